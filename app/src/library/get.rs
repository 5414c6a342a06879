//! `paguro pull` and `paguro import`.

use paguro_registry::{Cancel, ImportOptions, ModelRecord, PullOptions, RegistryError, hub::Reference};

use super::{failure, inspect, progress::Bars, usable};
use crate::{
    cli::{ImportArgs, PullArgs},
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    output::Output,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Runs `paguro pull`.
///
/// # Errors
/// Whatever keeps the model from coming, and Ctrl-C.
pub fn pull(args: &PullArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let reference: Reference = args.reference.parse().map_err(|error: RegistryError| {
        let failure = failure(error);
        if std::path::Path::new(&args.reference).exists() {
            failure.hint(format!("to take in a file or a folder: paguro import {}", args.reference))
        } else {
            failure
        }
    })?;
    args.name.as_ref().map(usable).transpose()?;
    let hub = settings.hub()?;
    let registry = settings.open()?;
    let (cancel, interrupt) = (Cancel::default(), Interrupt::install()?);
    let stop = cancel.clone();
    let _armed = interrupt.on_press(move || stop.cancel());
    let options = PullOptions { name: args.name.clone(), cancel };
    let bars = Bars::new(terminal, "getting");
    let result = registry.pull(&hub, &reference, &options, &inspect, &|progress| bars.show(progress));
    drop(bars);
    if matches!(result, Err(RegistryError::Cancelled)) {
        terminal.note("stopped; the same command goes on from here");
    }
    let record = result.map_err(failure)?;
    report(&record)?;
    match &record.details.problem {
        None => Ok(()),
        Some(problem) => {
            let name = record.name.short();
            let text = format!("this version of Paguro cannot run `{name}`: {problem}");
            if args.force {
                terminal.status(&text);
                return Ok(());
            }
            Err(Failure::new(text).hint(format!("it stays in the library; to remove it: paguro rm {name}")))
        }
    }
}

/// Runs `paguro import`.
///
/// # Errors
/// What is not a model; a name that is taken; Ctrl-C.
pub fn import(args: &ImportArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    args.name.as_ref().map(usable).transpose()?;
    let registry = settings.open()?;
    let (cancel, interrupt) = (Cancel::default(), Interrupt::install()?);
    let stop = cancel.clone();
    let _armed = interrupt.on_press(move || stop.cancel());
    let options = ImportOptions {
        name: args.name.clone(),
        copy: args.copy,
        replace: args.replace,
        force: args.force,
        cancel,
    };
    let bars = Bars::new(terminal, if args.copy { "copying" } else { "reading" });
    let result = registry.import(&args.path, &options, &inspect, &|progress| bars.show(progress));
    drop(bars);
    let record = result.map_err(|error| match error {
        RegistryError::NameTaken { name } => {
            Failure::usage(format!("the library has a model `{name}` already"))
                .hint("--name gives another name, --replace takes its place")
        }
        error => failure(error),
    })?;
    report(&record)?;
    if let Some(problem) = &record.details.problem {
        terminal.status(&format!("this version of Paguro cannot run it: {problem}"));
    }
    Ok(())
}

/// The name to use from now on.
fn report(record: &ModelRecord) -> Outcome<()> {
    let size = units::bytes(record.size());
    Output::new().line(format_args!("{} ({size}, {})", record.name.short(), record.details.quantization))
}
