//! `paguro verify` and `paguro rebuild`.

use paguro_library::{Cancel, Finding, Library, Repair, Restored, Verified, VerifyOptions};
use serde_json::{Value, json};

use super::{empty, failure, failure_of, find, inspect, progress::Bars};
use crate::{
    cli::{RebuildArgs, VerifyArgs},
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    output::Output,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Runs `paguro verify`.
///
/// # Errors
/// The name is unknown, files are damaged and not repaired, or Ctrl-C.
pub fn verify(args: &VerifyArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let library = match (settings.open_existing()?, &args.name) {
        (Some(library), _) => library,
        (None, Some(name)) => return Err(empty(name)),
        (None, None) => return report(args, &Verified::default(), terminal),
    };
    args.name.as_ref().map(|name| find(&library, name)).transpose()?;
    let hub = args.repair.then(|| settings.hub()).transpose()?;
    let (cancel, interrupt) = (Cancel::default(), Interrupt::install()?);
    let stop = cancel.clone();
    let _armed = interrupt.on_press(move || stop.cancel());
    let bars = Bars::new(terminal, "reading");
    let options = VerifyOptions { name: args.name.as_deref(), repair: hub.as_ref() };
    let verified = library.verify(&options, &cancel, &|progress| bars.show(progress));
    drop(bars);
    let name = args.name.as_deref().unwrap_or_default();
    report(args, &verified.map_err(|error| failure_of(name, error))?, terminal)
}

fn report(args: &VerifyArgs, verified: &Verified, terminal: Terminal) -> Outcome<()> {
    let mut out = Output::new();
    let damaged = verified.findings.iter().filter(|finding| !finding.is_repaired()).count();
    if args.json {
        out.json(&json!({
            "files": verified.files,
            "bytes": verified.bytes,
            "damaged": damaged,
            "repaired": verified.findings.len() - damaged,
            "findings": verified.findings.iter().map(as_json).collect::<Vec<_>>(),
        }))?;
    } else {
        for finding in &verified.findings {
            let place = match (&finding.location, &finding.models[..]) {
                (Some(location), _) => location.display().to_string(),
                (None, []) => finding.file.clone(),
                (None, _) => format!("{} ({})", finding.file, finding.digest),
            };
            let models = match &finding.models[..] {
                [] => "no model".to_owned(),
                models => models.join(", "),
            };
            let repair = match &finding.repair {
                None => String::new(),
                Some(Repair::Done(from)) => format!("; repaired from {from}"),
                Some(Repair::Failed(why)) => format!("; not repaired: {why}"),
            };
            out.line(format_args!("{models}: {place}: {}{repair}", finding.problem))?;
        }
        let files = units::plural(verified.files, "file");
        terminal.status(&format!("{files} read, {}", units::bytes(verified.bytes)));
    }
    if damaged == 0 {
        return Ok(());
    }
    let text = match damaged {
        1 => "1 file is damaged".to_owned(),
        n => format!("{n} files are damaged"),
    };
    let failure = Failure::new(text);
    Err(if args.repair { failure } else { failure.hint("paguro verify --repair downloads them again") })
}

fn as_json(finding: &Finding) -> Value {
    let (repaired, repair) = match &finding.repair {
        None => (false, Value::Null),
        Some(Repair::Done(from)) => (true, json!({ "from": from })),
        Some(Repair::Failed(why)) => (false, json!({ "error": why })),
    };
    json!({
        "models": finding.models,
        "file": finding.file,
        "digest": finding.digest.to_string(),
        "location": finding.location,
        "problem": finding.problem.to_string(),
        "repaired": repaired,
        "repair": repair,
    })
}

/// Runs `paguro rebuild`.
///
/// # Errors
/// Another process writes to the library, or Ctrl-C.
pub fn rebuild(args: &RebuildArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let Some(root) = settings.root.as_deref().filter(|root| root.is_dir()) else {
        terminal.status("there is no library");
        return Ok(());
    };
    let (cancel, interrupt) = (Cancel::default(), Interrupt::install()?);
    let stop = cancel.clone();
    let _armed = interrupt.on_press(move || stop.cancel());
    let bars = Bars::new(terminal, "reading");
    let rebuilt = Library::rebuild(root, &inspect, &cancel, &|progress| bars.show(progress));
    drop(bars);
    let rebuilt = rebuilt.map_err(failure)?;
    let mut out = Output::new();
    if args.json {
        let model = |restored: &Restored| json!({ "name": restored.model.name.to_string(), "problems": restored.problems });
        return out.json(&json!({
            "restored": rebuilt.models.iter().map(model).collect::<Vec<_>>(),
            "known": rebuilt.known,
            "unreadable": rebuilt.unreadable,
            "unused": rebuilt.unused,
            "set_aside": rebuilt.set_aside,
        }));
    }
    for Restored { model, problems } in &rebuilt.models {
        out.line(format_args!("restored {}", model.name.short()))?;
        for problem in problems {
            out.line(format_args!("  {problem}; `paguro verify --repair` downloads it again"))?;
        }
    }
    for problem in &rebuilt.unreadable {
        terminal.note(problem);
    }
    if let Some(path) = &rebuilt.set_aside {
        terminal.status(&format!("the old catalogue is kept as {}", path.display()));
    }
    if rebuilt.unused > 0 {
        let files = units::plural(rebuilt.unused, "file");
        terminal.status(&format!("{files} belong to no model; `paguro prune` deletes them"));
    }
    let models = units::plural(rebuilt.models.len(), "model");
    let known = if rebuilt.known > 0 { format!(", {} known before", rebuilt.known) } else { String::new() };
    terminal.status(&format!("{models} restored{known}"));
    Ok(())
}
