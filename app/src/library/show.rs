//! `paguro list` and `paguro show`.

use std::time::SystemTime;

use humantime::format_rfc3339_millis;
use paguro_library::{ModelRecord, Source, found::Program};
use serde_json::{Value, json};

use super::{VERSION, empty, failure, failure_of, import::list_found, inspect};
use crate::{
    cli::{ListArgs, ShowArgs},
    failure::Outcome,
    output::Output,
    presets::Preset,
    settings::{LibrarySettings, Terminal},
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
    let rows = models.iter().map(|(model, problem)| Row {
        name: model.name.short(),
        cells: [
            units::bytes(model.size()),
            units::count(model.details.parameters),
            model.details.quantization.clone(),
            ago(model.modified_at),
        ],
        problem: problem.clone(),
    });
    let rows: Vec<Row> = rows.collect();
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max("name".len());
    let columns = terminal_size::terminal_size_of(std::io::stdout()).map(|(width, _)| width.0.into());
    let shown = shown_cells(width, columns);
    let title = Row { name: "name".into(), cells: TITLES.map(str::to_owned), problem: None };
    out.line(terminal.bold(&title.line(width, shown)))?;
    rows.iter().try_for_each(|row| out.line(row.line(width, shown)))
}

/// Titles of the cells after the name.
const TITLES: [&str; 4] = ["size", "parameters", "quantization", "changed"];

/// Widths of the cells, without the blanks between them.
const WIDTHS: [usize; 4] = [10, 10, 12, 14];

/// A line of the list.
struct Row {
    name: String,
    cells: [String; 4],
    problem: Option<String>,
}

impl Row {
    /// Returns the line with these cells. The problem is the last one, because it may be long.
    fn line(&self, width: usize, shown: [bool; 4]) -> String {
        let mut line = format!("{:width$}", self.name);
        for (index, cell) in self.cells.iter().enumerate().filter(|(index, _)| shown[*index]) {
            let width = WIDTHS[index];
            // Numbers end below each other.
            line += &if index < 2 { format!("  {cell:>width$}") } else { format!("  {cell:width$}") };
        }
        line.truncate(line.trim_end().len());
        match &self.problem {
            None => line,
            Some(problem) => format!("{line}  cannot run: {problem}"),
        }
    }
}

/// Returns the cells that fit beside names of `width` in a terminal of `columns`; all without a terminal.
fn shown_cells(width: usize, columns: Option<usize>) -> [bool; 4] {
    let mut shown = [true; 4];
    let Some(columns) = columns else { return shown };
    // The first of these that does not fit is left out.
    for index in [3, 1, 2] {
        let cells = WIDTHS.iter().zip(shown).filter(|(_, shown)| *shown).map(|(width, _)| width + 2);
        if width + cells.sum::<usize>() <= columns {
            break;
        }
        shown[index] = false;
    }
    shown
}

/// Runs `paguro show`. Missing files are no error: the row `problem` reports them.
///
/// # Errors
/// The name is unknown or ambiguous.
pub fn show(args: &ShowArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let Some(library) = settings.open_existing()? else {
        return Err(empty(&args.name));
    };
    let model = library.find(&args.name).map_err(|error| failure_of(&args.name, error))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_has_fewer_columns() {
        for (width, columns, expected) in [
            (20, None, [true; 4]),
            (20, Some(80), [true; 4]),
            (20, Some(70), [true, true, true, false]),
            (20, Some(50), [true, false, true, false]),
            (20, Some(40), [true, false, false, false]),
            (60, Some(40), [true, false, false, false]),
        ] {
            assert_eq!(shown_cells(width, columns), expected, "{width} {columns:?}");
        }
        let row = Row {
            name: "m".into(),
            cells: ["1 B", "2", "Q4_0", "just now"].map(str::to_owned),
            problem: Some("it is old".into()),
        };
        assert_eq!(row.line(4, [true, false, true, false]), "m            1 B  Q4_0  cannot run: it is old");
    }
}
