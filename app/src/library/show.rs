//! `paguro list` and `paguro show`.

use std::{path::Path, time::SystemTime};

use humantime::format_rfc3339_millis;
use paguro_library::{Library, ModelRecord, Source, found::Program, plain_name};
use paguro_model::ModelFile;
use serde_json::{Value, json};

use super::{VERSION, empty, failure, find, import::list_found, inspect};
use crate::{
    adapters, assistant,
    cli::{ListArgs, ShowArgs},
    failure::Outcome,
    models::{self, is_embedded},
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
    let records: Vec<_> = models.iter().map(|(model, _)| model.clone()).collect();
    if args.json {
        return models.iter().try_for_each(|(model, problem)| {
            let mut value = as_json(model, &records);
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
        let last = match (problem, model.is_adapter()) {
            (Some(problem), _) => format!("cannot run: {problem}"),
            (None, false) if assistant::is_record(model) => {
                "assistant, which drafts for its model".to_owned()
            }
            (None, false) if model.assistant().is_some() => "with its assistant".to_owned(),
            (None, false) => String::new(),
            (None, true) => match base(model, &records) {
                Ok(base) => format!("adapter of {base}"),
                Err(problem) => format!("adapter: {problem}"),
            },
        };
        table.push(cells, last);
    }
    table.write(&mut out, terminal)
}

/// Returns the name of the assistant that drafts for a model.
fn assistant_of(model: &ModelRecord, path: &Path, library: &Library) -> Option<String> {
    let source = models::Source::Library { name: model.name.to_string(), path: path.to_owned() };
    let mut file = ModelFile::open(path).ok()?;
    assistant::add(&mut file, &source, None, || assistant::of_library(library), |_| ()).ok()?;
    file.assistant().map(|assistant| assistant.name().to_owned())
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
    let records = library.list().map_err(failure)?;
    let path = library.path(&model).map_err(|error| error.to_string());
    let unusable = model.details.problem.as_ref().map(|problem| format!("cannot run: {problem}"));
    let mut out = Output::new();
    if args.json {
        let mut value = as_json(&model, &records);
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
    if let Some(adapter) = &model.details.adapter {
        row("adapter of", base(&model, &records).unwrap_or_else(|problem| format!("(none): {problem}")))?;
        row("trained for", adapter.trained_for.clone().unwrap_or_else(|| "(unknown)".into()))?;
        row("rank", adapter.rank.to_string())?;
    }
    row("architecture", model.details.architecture.clone().unwrap_or_else(|| "(none)".into()))?;
    let parameters = units::count(model.details.parameters);
    row("parameters", format!("{parameters} ({})", model.details.quantization))?;
    let files = units::plural(model.files.len(), "file");
    row("size", format!("{} in {files}", units::bytes(model.size())))?;
    row("digest", model.digest().to_string())?;
    row("changed", format!("{} ({})", ago(model.modified_at), format_rfc3339_millis(model.modified_at)))?;
    match path {
        Ok(path) => {
            if let Some(name) = assistant_of(&model, &path, &library) {
                row("drafts", format!("with its assistant {name}"))?;
            }
            row("path", path.display().to_string())?;
            unusable.map_or(Ok(()), |problem| row("problem", problem))?;
        }
        Err(problem) => row("problem", problem)?,
    }
    let adapters: Vec<_> = model.adapters(&records).map(|adapter| adapter.name.short()).collect();
    if !adapters.is_empty() {
        row("adapters", adapters.join(", "))?;
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

/// Returns the base of an adapter for display, or the reason for which there is none.
fn base(adapter: &ModelRecord, records: &[ModelRecord]) -> Result<String, String> {
    let name = adapters::base_name(adapter, records)?;
    let is_it =
        |record: &ModelRecord| plain_name(&record.name.short()).eq_ignore_ascii_case(plain_name(&name));
    match is_embedded(&name) || records.iter().any(is_it) {
        true => Ok(name),
        false => Ok(format!("{name}, which is not in the library")),
    }
}

fn source(source: &Source) -> String {
    match source {
        Source::Hub { endpoint, repo, commit } => format!("{endpoint}/{repo}, commit {commit}"),
        Source::Import { path } => format!("imported from {}", path.display()),
        Source::Upload => "uploaded".to_owned(),
        Source::Model { name } => format!("made from {name}"),
    }
}

fn as_json(model: &ModelRecord, records: &[ModelRecord]) -> Value {
    let files = model.files.iter();
    let adapter = model.details.adapter.as_ref().map(|adapter| {
        let base = adapters::base_name(model, records).ok();
        json!({"base": base, "trained_for": adapter.trained_for, "rank": adapter.rank})
    });
    json!({
        "name": model.name.to_string(),
        "source": model.source,
        "format": model.format.name(),
        "architecture": model.details.architecture,
        "parameters": model.details.parameters,
        "quantization": model.details.quantization,
        "adapter": adapter,
        "assistant": model.assistant().map(|file| &file.name),
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
