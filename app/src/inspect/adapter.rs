//! `inspect` of an adapter (LoRA).

use std::path::{Path, PathBuf};

use paguro_model::AdapterFile;
use serde_json::json;

use super::dimensions;
use crate::{
    cli::InspectArgs,
    failure::{Failure, Outcome},
    library,
    output::Output,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Returns the path of an adapter: a file or folder of this name, or else one of the library. `None` if the name is not that
/// of an adapter.
///
/// # Errors
/// The library cannot be read.
pub fn find(name: Option<&str>, settings: &LibrarySettings) -> Outcome<Option<PathBuf>> {
    let Some(name) = name else { return Ok(None) };
    let path = PathBuf::from(name);
    if path.exists() {
        return Ok(AdapterFile::is_at(&path).then_some(path));
    }
    let Some(library) = settings.open_existing()? else { return Ok(None) };
    match library.find(name) {
        Ok(record) if record.is_adapter() => library.path(&record).map(Some).map_err(library::failure),
        _ => Ok(None),
    }
}

/// Prints the properties of an adapter.
///
/// # Errors
/// It cannot be read.
pub fn inspect(path: &Path, args: &InspectArgs, terminal: Terminal) -> Outcome<()> {
    let file = AdapterFile::open(path).map_err(|error| Failure::from_error(&error))?;
    let mut out = Output::new();
    let pairs = file.pairs();
    if args.json {
        let pairs = pairs.map(|(target, [a, b])| json!({"target": target, "a": a, "b": b}));
        return out.json(&json!({
            "name": file.name(),
            "adapter": true,
            "file": file.format(),
            "files": file.files(),
            "trained_for": file.base(),
            "rank": file.rank(),
            "parameters": file.parameters(),
            "format": file.weight_format(),
            "bytes": file.bytes(),
            "pairs": pairs.collect::<Vec<_>>(),
        }));
    }
    out.line(terminal.bold(file.name()))?;
    let mut row = |name: &str, value: String| out.line(format_args!("  {name:<14}{value}"));
    row("file", format!("adapter (LoRA) of {}, {}", file.format(), units::bytes(file.bytes())))?;
    row("trained for", file.base().unwrap_or("(unknown)").to_owned())?;
    row("rank", file.rank().to_string())?;
    row("parameters", format!("{} ({})", units::count(file.parameters()), file.weight_format()))?;
    out.line("")?;
    let count = file.targets().count();
    if !args.tensors {
        return out.line(format_args!(
            "{} {}",
            terminal.bold(&units::plural(count, "changed tensor")),
            terminal.dim("(--tensors lists them)")
        ));
    }
    out.line(terminal.bold(&units::plural(count, "changed tensor")))?;
    let width = file.targets().map(str::len).max().unwrap_or(0);
    for (target, [a, b]) in pairs {
        out.line(format_args!("  {target:width$}  A {}  B {}", dimensions(&a), dimensions(&b)))?;
    }
    Ok(())
}
