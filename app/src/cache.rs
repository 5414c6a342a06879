//! `paguro cache`.

use std::{path::Path, time::Duration};

use paguro_kv_store::{Info, ModelInfo, Store, StoreError, StoreOptions};
use serde_json::json;

use crate::{
    cli::{CacheArgs, CacheCommand},
    failure::{Failure, Outcome},
    output::Output,
    serve::disk::default_folder,
    sessions,
    settings::{LibrarySettings, Terminal},
    table::Table,
    units,
};

/// Timeout of a deletion.
const PATIENCE: Duration = Duration::from_secs(600);

/// Shows, checks or clears the store.
///
/// # Errors
/// A store that cannot be read, or that another process uses; damaged items, for `verify`.
pub fn cache(args: &CacheArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let dir = args.dir.clone().or_else(|| default_folder(settings)).ok_or_else(|| {
        Failure::new("there is no folder for the cache on disk")
            .hint("--dir names one, or PAGURO_HOME the library's")
    })?;
    match &args.command {
        CacheCommand::Info { json } => info(&dir, *json, terminal),
        CacheCommand::Verify { json } => verify(&dir, *json),
        CacheCommand::Clear { model, json } => clear(&dir, model.as_deref(), *json),
    }
}

fn inspect(dir: &Path, verify: bool) -> Outcome<(Info, u64)> {
    Store::inspect(dir, verify).map_err(|error| Failure::from_error(&error))
}

/// Returns the name of a space's model.
fn name(model: Option<&ModelInfo>) -> &str {
    model.map_or("(unknown)", |info| &info.model)
}

fn info(dir: &Path, as_json: bool, terminal: Terminal) -> Outcome<()> {
    let (info, _) = inspect(dir, false)?;
    let mut out = Output::new();
    if as_json {
        let models: Vec<_> = info
            .spaces
            .iter()
            .map(|(model, items, bytes)| {
                json!({
                    "model": model.as_ref().map(|model| &model.model),
                    "format": model.as_ref().map(|model| &model.format),
                    "block_size": model.as_ref().map(|model| model.block_size),
                    "items": items,
                    "bytes": bytes,
                })
            })
            .collect();
        return out.json(&json!({
            "dir": dir, "bytes": info.bytes, "damaged": info.scan.damaged, "lost_bytes": info.scan.lost_bytes, "models": models,
        }));
    }
    out.line(format_args!("{}: {}", dir.display(), units::bytes(info.bytes)))?;
    if info.scan.damaged > 0 {
        let lost = units::bytes(info.scan.lost_bytes);
        out.line(format_args!("{lost} are damaged and will not be used"))?;
    }
    if info.spaces.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(["model", "items", "size"], &[1, 2], &[]);
    for (model, items, bytes) in &info.spaces {
        let name = name(model.as_ref()).to_owned();
        table.push([name, items.to_string(), units::bytes(*bytes)], "");
    }
    table.write(&mut out, terminal)
}

fn verify(dir: &Path, as_json: bool) -> Outcome<()> {
    let (info, damaged) = inspect(dir, true)?;
    let items: u64 = info.spaces.iter().map(|(_, items, _)| items).sum();
    let mut out = Output::new();
    let lost = info.scan.lost_bytes;
    if as_json {
        out.json(&json!({ "items": items, "damaged": damaged, "lost_bytes": lost }))?;
    } else {
        out.line(format_args!("{items} items in {}", units::bytes(info.bytes)))?;
    }
    if damaged == 0 && info.scan.damaged == 0 {
        return Ok(());
    }
    let lost = units::bytes(lost);
    let failure = Failure::new(format!("{damaged} items are damaged, and {lost} cannot be read at all"));
    Err(failure.hint("they are never used; `paguro cache clear` frees their space"))
}

fn clear(dir: &Path, model: Option<&str>, as_json: bool) -> Outcome<()> {
    let before = if dir.exists() { Store::size(dir) } else { 0 };
    let mut removed = 0;
    if dir.exists() {
        let store = Store::open(dir, StoreOptions::new(u64::MAX)).map_err(|error| match error {
            StoreError::InUse { .. } => {
                Failure::from_error(&error).hint("stop `paguro serve` first: it has the cache open")
            }
            error => Failure::from_error(&error),
        })?;
        match model {
            Some(model) => removed = store.remove_model(model),
            None => store.clear(),
        }
        if !store.flush(PATIENCE) || store.stats().is_off {
            return Err(Failure::new(format!("not everything in {} could be deleted", dir.display())));
        }
    }
    if let Some(model) = model.filter(|_| removed == 0) {
        let failure = Failure::new(format!("nothing is stored for a model named `{model}`"));
        return Err(failure.hint("`paguro cache info` shows the names"));
    }
    let freed = before.saturating_sub(Store::size(dir));
    let mut out = Output::new();
    if as_json {
        out.json(&json!({ "freed": freed }))
    } else {
        out.line(format_args!("{} freed", units::bytes(freed)))
    }
}

/// Deletes what is stored for a model that is being removed, also in sessions. A server that has the store open does it
/// within seconds.
///
/// # Errors
/// A store that cannot be written.
pub fn forget(settings: &LibrarySettings, model: &str) -> Result<(), StoreError> {
    let dirs = default_folder(settings).into_iter().chain(sessions::caches(settings));
    dirs.filter(|dir| dir.exists()).try_for_each(|dir| match Store::open(&dir, StoreOptions::new(u64::MAX)) {
        Ok(store) => {
            store.remove_model(model);
            store.flush(PATIENCE);
            Ok(())
        }
        Err(StoreError::InUse { .. }) => Store::request_removal(&dir, model),
        Err(error) => Err(error),
    })
}
