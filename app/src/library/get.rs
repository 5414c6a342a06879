//! `paguro pull` and `paguro import`.

use std::{cell::RefCell, error::Error, path::Path};

use paguro_library::{
    Cancel, Details, ImportOptions, LibraryError, ModelName, ModelRecord, PullOptions, hub::Reference, known,
};

use super::{failure, inspect_with_chat, progress::Bars, usable};
use crate::{
    cli::{ImportArgs, PullArgs},
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    models::{EMBEDDED, is_embedded},
    output::Output,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Runs `paguro pull`.
///
/// # Errors
/// The name is invalid, the download fails, or Ctrl-C is pressed. Without `--force` also if this version cannot run the
/// model.
pub fn pull(args: &PullArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let text = &args.reference;
    if is_embedded(text) {
        return Err(Failure::usage(format!(
            "`{text}` is the model inside this binary; there is nothing to download"
        ))
        .hint(format!("paguro run {EMBEDDED} \"Tell me a story\"")));
    }
    let (reference, name) = known::wanted(text).map_err(|error| {
        let failure = failure(error);
        if Path::new(text).exists() {
            failure.hint(format!("to import a file or a folder: paguro import {text}"))
        } else {
            failure.hint("`paguro search` lists well-known models and those on the hub")
        }
    })?;
    args.name.as_ref().map(usable).transpose()?;
    let name = args.name.clone().or(name);
    let record = download(&reference, name, settings, terminal, &Interrupt::install()?)?;
    print_summary(&record, terminal)?;
    match cannot_run(&record) {
        None => Ok(()),
        Some(text) if args.force => {
            terminal.status(&text);
            Ok(())
        }
        Some(text) => {
            let name = record.name.short();
            Err(Failure::new(text)
                .hint(format!("`paguro search` lists other models; to remove this one: paguro rm {name}")))
        }
    }
}

/// Returns a message with the reason for which this version cannot run the model; `None` if it can.
fn cannot_run(record: &ModelRecord) -> Option<String> {
    let problem = record.details.problem.as_ref()?;
    Some(format!("this version of Paguro cannot run `{}`: {problem}", record.name.short()))
}

/// Downloads a model into the library.
///
/// # Errors
/// The download fails, or Ctrl-C is pressed.
pub fn download(
    reference: &Reference,
    name: Option<ModelName>,
    settings: &LibrarySettings,
    terminal: Terminal,
    interrupt: &Interrupt,
) -> Outcome<ModelRecord> {
    let hub = settings.hub()?;
    let library = settings.open()?;
    let cancel = Cancel::default();
    let stop = cancel.clone();
    let _armed = interrupt.on_press(move || stop.cancel());
    let options = PullOptions { name, cancel };
    let bars = Bars::new(terminal, "getting");
    let chat = ChatCheck::default();
    let inspect = |path: &Path| chat.inspect(path);
    let result = library.pull(&hub, reference, &options, &inspect, &|progress| bars.show(progress));
    drop(bars);
    if matches!(result, Err(LibraryError::Cancelled)) {
        terminal.note("stopped; the same command goes on from here");
    }
    let record = result.map_err(failure)?;
    chat.warn(&record, terminal);
    Ok(record)
}

/// Inspector of a model. It also compiles the chat template, and stores the error.
#[derive(Default)]
struct ChatCheck(RefCell<Option<String>>);

impl ChatCheck {
    /// Opens the model at `path` and returns its properties.
    fn inspect(&self, path: &Path) -> Result<Details, Box<dyn Error + Send + Sync>> {
        let (details, problem) = inspect_with_chat(path)?;
        self.0.replace(problem);
        Ok(details)
    }

    /// Prints a warning if the chat template of the model does not compile.
    fn warn(&self, record: &ModelRecord, terminal: Terminal) {
        if let Some(problem) = self.0.take() {
            let name = record.name.short();
            terminal.status(&format!("{name} cannot chat: {problem}"));
            terminal
                .status(&format!("to continue a prompt without the chat template: paguro run {name} --raw"));
        }
    }
}

/// Runs `paguro import`.
///
/// # Errors
/// The path has no model, the name is taken, or Ctrl-C is pressed.
pub fn import(args: &ImportArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    args.name.as_ref().map(usable).transpose()?;
    let library = settings.open()?;
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
    let chat = ChatCheck::default();
    let result = library.import(&args.path, &options, &|path| chat.inspect(path), &|progress| {
        bars.show(progress);
    });
    drop(bars);
    let record = result.map_err(|error| match error {
        LibraryError::NameTaken { name } => {
            Failure::usage(format!("the library has a model `{name}` already"))
                .hint("--name gives another name, --replace takes its place")
        }
        error => failure(error),
    })?;
    print_summary(&record, terminal)?;
    if let Some(text) = cannot_run(&record) {
        terminal.status(&text);
    }
    chat.warn(&record, terminal);
    Ok(())
}

/// Prints the name, size and quantization of the model.
fn print_summary(record: &ModelRecord, terminal: Terminal) -> Outcome<()> {
    let (name, size) = (record.name.short(), units::bytes(record.size()));
    Output::new().line(format_args!("{name} ({size}, {})", record.details.quantization))?;
    if record.details.problem.is_none() {
        terminal.status(&format!("run it: paguro run {name}"));
    }
    Ok(())
}
