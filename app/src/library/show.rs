//! `paguro list` and `paguro show`.

use std::time::SystemTime;

use humantime::format_rfc3339_millis;
use paguro_library::{ModelRecord, Source, found::Program};
use serde_json::{Value, json};

use super::{VERSION, empty, failure, find, import::list_found, inspect};
use crate::{
    cli::{ListArgs, ShowArgs},
    failure::Outcome,
    output::Output,
    presets::Preset,
    settings::{LibrarySettings, Terminal},
    table::Table,
    units,
};

/// Runs `paguro list`.
///
/// # Errors
/// The library cannot be read.
pub fn list(args: &ListArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    if args.found {
        return list_found(args.json, settings, terminal);
    }
    let models = match settings.open_existing()? {
        Some(library) => library.list_with_problems(&VERSION, &inspect).map_err(failure)?,
        None => Vec::new(),
    };
    let mut out = Output::new();
    if args.json {
        return models.iter().try_for_each(|(model, problem)| {
            let mut value = as_json(model);
            value["problem"] = json!(problem);
            out.json(&value)
        });
    }
    if models.is_empty() {
        terminal.status("the library is empty; add models with `paguro pull` or `paguro import`");
        let counts = Program::ALL.map(|program| (program, settings.stores.models(program).models.len()));
        let found: Vec<_> = counts.iter().filter(|(_, count)| *count > 0).collect();
        if !found.is_empty() {
            let programs = found.iter().map(|(program, count)| format!("{program} has {count}"));
            let programs = programs.collect::<Vec<_>>().join(", ");
            terminal.status(&format!("{programs}; `paguro list --found` shows how to import them"));
        }
        return Ok(());
    }
    let mut table =
        Table::new(["name", "size", "parameters", "quantization", "changed"], &[1, 2], &[4, 2, 3]);
    for (model, problem) in &models {
        let cells = [
            model.name.short(),
            units::bytes(model.size()),
            units::count(model.details.parameters),
            model.details.quantization.clone(),
            ago(model.modified_at),
        ];
        table.push(cells, problem.as_ref().map_or_else(String::new, |it| format!("cannot run: {it}")));
    }
    table.write(&mut out, terminal)
}

/// Runs `paguro show`. Missing files are no error: the row `problem` reports them.
///
/// # Errors
/// The name is unknown or ambiguous.
pub fn show(args: &ShowArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let Some(library) = settings.open_existing()? else {
        return Err(empty(&args.name));
    };
    let model = find(&library, &args.name)?;
    let path = library.path(&model).map_err(|error| error.to_string());
    let unusable = model.details.problem.as_ref().map(|problem| format!("cannot run: {problem}"));
    let mut out = Output::new();
    if args.json {
        let mut value = as_json(&model);
        match path {
            Ok(path) => {
                value["path"] = json!(path);
                value["problem"] = json!(unusable);
            }
            Err(problem) => value["problem"] = json!(problem),
        }
        return out.json(&value);
    }
    out.line(terminal.bold(&model.name.short()))?;
    let mut row = |name: &str, value: String| out.line(format_args!("  {name:<14}{value}"));
    row("source", source(&model.source))?;
    row("format", model.format.name().to_owned())?;
    row("architecture", model.details.architecture.clone().unwrap_or_else(|| "(none)".into()))?;
    let parameters = units::count(model.details.parameters);
    row("parameters", format!("{parameters} ({})", model.details.quantization))?;
    let files = units::plural(model.files.len(), "file");
    row("size", format!("{} in {files}", units::bytes(model.size())))?;
    row("digest", model.digest().to_string())?;
    row("changed", format!("{} ({})", ago(model.modified_at), format_rfc3339_millis(model.modified_at)))?;
    match path {
        Ok(path) => {
            row("path", path.display().to_string())?;
            unusable.map_or(Ok(()), |problem| row("problem", problem))?;
        }
        Err(problem) => row("problem", problem)?,
    }
    for (name, value) in &model.defaults {
        row("default", format!("{name} = {value}"))?;
    }
    for (name, value) in
        Preset::of(&model).map_or_else(|problem| vec![("problem".into(), problem)], |it| it.rows())
    {
        row("preset", format!("{name} = {value}"))?;
    }
    for file in &model.files {
        row("file", format!("{} ({}, {})", file.name, units::bytes(file.size), file.digest))?;
    }
    Ok(())
}

fn source(source: &Source) -> String {
    match source {
        Source::Hub { endpoint, repo, commit } => format!("{endpoint}/{repo}, commit {commit}"),
        Source::Import { path } => format!("imported from {}", path.display()),
        Source::Upload => "uploaded".to_owned(),
        Source::Model { name } => format!("made from {name}"),
    }
}

fn as_json(model: &ModelRecord) -> Value {
    let files = model.files.iter();
    json!({
        "name": model.name.to_string(),
        "source": model.source,
        "format": model.format.name(),
        "architecture": model.details.architecture,
        "parameters": model.details.parameters,
        "quantization": model.details.quantization,
        "bytes": model.size(),
        "digest": model.digest().to_string(),
        "created_at": format_rfc3339_millis(model.created_at).to_string(),
        "modified_at": format_rfc3339_millis(model.modified_at).to_string(),
        "defaults": model.defaults,
        "preset": model.extra,
        "files": files.map(|file| json!({
            "name": file.name,
            "bytes": file.size,
            "digest": file.digest.to_string(),
            "location": file.location,
        })).collect::<Vec<_>>(),
    })
}

fn ago(time: SystemTime) -> String {
    // The age is 0 if `time` is in the future, because the clock was set back.
    units::ago(SystemTime::now().duration_since(time).unwrap_or_default())
}
