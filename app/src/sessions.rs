//! Folders of sessions, and `paguro sessions`.

use std::{
    fs,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use paguro_kv_store::{Store, StoreError, StoreOptions};
use serde_json::json;

use crate::{
    cli::{SessionsArgs, SessionsCommand},
    failure::{Failure, Outcome},
    output::Output,
    run::saved,
    settings::{LibrarySettings, Terminal},
    table::Table,
    units,
};

/// Longest name of a session, in bytes.
const MOST_NAME: usize = 64;

/// Folder of all sessions.
///
/// # Errors
/// There is no home.
pub fn folder(settings: &LibrarySettings) -> Outcome<PathBuf> {
    let root = settings.root.as_ref().ok_or_else(|| {
        Failure::new("there is no folder for sessions").hint("PAGURO_HOME names the library's folder")
    })?;
    Ok(root.join("sessions"))
}

/// Folder of one session. It may not exist.
///
/// # Errors
/// A name that is no file name everywhere.
pub fn folder_of(settings: &LibrarySettings, name: &str) -> Outcome<PathBuf> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if !begins || !name.chars().all(is_plain) || name.len() > MOST_NAME {
        let failure = Failure::usage(format!("`{name}` cannot be the name of a session"));
        return Err(failure.hint(format!(
            "a name has up to {MOST_NAME} letters, digits and . _ -, and begins with a letter or a digit"
        )));
    }
    Ok(folder(settings)?.join(name))
}

/// File with a session's messages.
pub fn messages(folder: &Path) -> PathBuf {
    folder.join("conversation.json")
}

/// Folder of a session's cache.
pub fn cache(folder: &Path) -> PathBuf {
    folder.join("kv")
}

/// Opens the cache of a session, which also keeps other processes out of the session.
///
/// # Errors
/// Another process has it open; the system's error.
pub fn open_cache(folder: &Path, options: StoreOptions) -> Outcome<Store> {
    Store::open(&cache(folder), options).map_err(|error| match error {
        StoreError::InUse { .. } => {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Failure::new(format!("the session `{name}` is in use by another process"))
                .hint("end that one first, or use another name")
        }
        error => Failure::from_error(&error),
    })
}

/// Folders of all sessions, by name.
fn all(settings: &LibrarySettings) -> Outcome<Vec<(String, PathBuf)>> {
    let folder = folder(settings)?;
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::new(format!("cannot read {}: {error}", folder.display()))),
    };
    let folders = entries.flatten().filter(|entry| entry.path().is_dir());
    let mut all: Vec<_> =
        folders.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path())).collect();
    all.sort();
    Ok(all)
}

/// Folders of the caches of all sessions.
pub fn caches(settings: &LibrarySettings) -> Vec<PathBuf> {
    all(settings).unwrap_or_default().iter().map(|(_, folder)| cache(folder)).collect()
}

/// Lists or deletes sessions.
///
/// # Errors
/// A session that does not exist, that another process uses, or that cannot be deleted.
pub fn sessions(args: &SessionsArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    match &args.command {
        SessionsCommand::List { json } => list(settings, terminal, *json),
        SessionsCommand::Rm { names } => names.iter().try_for_each(|name| remove(settings, name)),
    }
}

fn list(settings: &LibrarySettings, terminal: Terminal, as_json: bool) -> Outcome<()> {
    let mut out = Output::new();
    let all = all(settings)?;
    if all.is_empty() && !as_json {
        terminal.status("there are no sessions; `paguro run --session NAME` begins one");
        return Ok(());
    }
    let mut table = Table::new(["name", "model", "messages", "cache"], &[2, 3], &[]);
    for (name, folder) in all {
        let path = messages(&folder);
        let (model, count) = match saved::load_with_model(&path) {
            Ok((model, conversation)) => (model, Some(conversation.len())),
            // Its first answer was interrupted.
            Err(_) if !path.exists() => (String::new(), Some(0)),
            Err(_) => (String::new(), None),
        };
        let bytes = Store::size(&cache(&folder));
        let changed = fs::metadata(&path).and_then(|file| file.modified()).ok();
        let changed = changed.and_then(|time| Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs()));
        if as_json {
            out.json(&json!({
                "name": name, "model": model, "messages": count, "cache_bytes": bytes, "changed": changed,
            }))?;
        } else {
            let count = count.map_or_else(|| "damaged".to_owned(), |count| count.to_string());
            table.push([name, model, count, units::bytes(bytes)], "");
        }
    }
    if as_json {
        return Ok(());
    }
    table.write(&mut out, terminal)
}

fn remove(settings: &LibrarySettings, name: &str) -> Outcome<()> {
    let folder = folder_of(settings, name)?;
    if !folder.is_dir() {
        let failure = Failure::new(format!("there is no session `{name}`"));
        return Err(failure.hint("`paguro sessions list` shows the names"));
    }
    let store = open_cache(&folder, StoreOptions::new(u64::MAX))?;
    let removed = fs::remove_dir_all(&folder);
    drop(store);
    removed.map_err(|error| Failure::new(format!("cannot delete {}: {error}", folder.display())))?;
    Output::new().line(format_args!("removed {name}"))
}
