//! `paguro rm`, `paguro cp` and `paguro prune`.

use paguro_library::{Library, LibraryError, ModelRecord, plain_name};

use super::{empty, failure, failure_of, find, usable};
use crate::{
    cache,
    cli::{CpArgs, PruneArgs, RmArgs},
    failure::{Failure, Outcome},
    output::Output,
    settings::LibrarySettings,
    units,
};

/// Runs `paguro rm`.
///
/// # Errors
/// A name is ambiguous, an alias, or unknown without `--force`. No model is removed then.
pub fn rm(args: &RmArgs, settings: &LibrarySettings) -> Outcome<()> {
    let Some(library) = settings.open_existing()? else {
        if args.force {
            return Ok(());
        }
        return Err(empty(&args.names[0]));
    };
    check(&library, args)?;
    let mut out = Output::new();
    for name in &args.names {
        let adapters = adapters_of(&library, name)?;
        let removed = match library.remove(name) {
            Err(LibraryError::NotFound { .. }) if args.force => continue,
            removed => removed.map_err(|error| failure_of(name, error))?,
        };
        let freed = match removed.freed {
            Some(bytes) => format!("{} freed", units::bytes(bytes)),
            None => "another process is writing to the library; `paguro prune` frees its space later".into(),
        };
        let model = removed.record.name.short();
        out.line(format_args!("removed {model} ({freed})"))?;
        let left: Vec<String> = adapters.iter().map(|adapter| adapter.name.short()).collect();
        if !left.is_empty() {
            out.line(format_args!("its adapters have no base now: {}", left.join(", ")))?;
        }
        if let Err(error) = cache::forget(settings, &model) {
            out.line(format_args!("its cache on disk is still there: {error}"))?;
        }
    }
    Ok(())
}

/// Returns the adapters of a model, which stay without a base when it is removed.
fn adapters_of(library: &Library, name: &str) -> Outcome<Vec<ModelRecord>> {
    let Ok(model) = library.find(name) else { return Ok(Vec::new()) };
    let records = library.list().map_err(failure)?;
    Ok(model.adapters(&records).cloned().collect())
}

/// Checks all names before the first model is removed.
fn check(library: &Library, args: &RmArgs) -> Outcome<()> {
    let stays = |failure: Failure| match args.names.len() {
        1 => failure,
        _ => failure.hint("nothing was removed"),
    };
    let aliases = |record: &ModelRecord, name: &str| {
        record.aliases().any(|alias| plain_name(alias).eq_ignore_ascii_case(plain_name(name)))
    };
    for name in &args.names {
        if args.force && matches!(library.find(name), Err(LibraryError::NotFound { .. })) {
            continue;
        }
        match find(library, name) {
            Ok(record) if aliases(&record, name) => {
                let model = record.name.short();
                let failure = Failure::usage(format!("`{name}` is an alias of the model {model}"))
                    .hint(format!("to remove the alias: paguro preset {model} --remove-alias {name}"))
                    .hint(format!("to remove the model: paguro rm {model}"));
                return Err(stays(failure));
            }
            found => drop(found.map_err(stays)?),
        }
    }
    Ok(())
}

/// Runs `paguro cp`.
///
/// # Errors
/// The model is unknown, or the new name is taken.
pub fn cp(args: &CpArgs, settings: &LibrarySettings) -> Outcome<()> {
    usable(&args.to)?;
    let library = settings.open()?;
    let from = find(&library, &args.from)?.name.to_string();
    let record = library.copy(&from, &args.to, args.replace);
    let record = record.map_err(|error| failure_of(&args.from, error))?;
    Output::new().line(record.name.short())
}

/// Runs `paguro prune`.
///
/// # Errors
/// Another process writes to the library, or, without `--force`, the catalogue has lost models.
pub fn prune(args: &PruneArgs, settings: &LibrarySettings) -> Outcome<()> {
    let library = match (settings.open_existing(), &settings.root) {
        // With `--force`, a lost or damaged catalogue is replaced by an empty one, so all files are unused.
        (Err(_), Some(root)) if args.force => Some(Library::open_anew(root).map_err(failure)?),
        (library, _) => library?,
    };
    let pruned = match library {
        Some(library) => library.prune(args.force).map_err(failure)?,
        None => Default::default(),
    };
    let (files, bytes) = (units::plural(pruned.files, "file"), units::bytes(pruned.bytes));
    Output::new().line(format_args!("{files} removed ({bytes} freed)"))
}
