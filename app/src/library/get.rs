//! `paguro pull`.

use std::{cell::RefCell, error::Error, path::Path};

use paguro_library::{
    Cancel, Details, LibraryError, ModelName, ModelRecord, PullOptions, hub::Reference, known,
};

use super::{Chat, failure, inspect_with_chat, progress::Bars, usable};
use crate::{
    adapters::{self, BaseCheck},
    cli::PullArgs,
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    models::{EMBEDDED, elsewhere, is_embedded},
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
    if let Some(reference) = elsewhere(text, settings) {
        terminal
            .status(&format!("it is on this machine as well; to use its file: paguro import {reference}"));
    }
    let base = args.base.as_deref();
    let interrupt = Interrupt::install()?;
    let (record, chat) = download((&reference, name, base), settings, terminal, &interrupt)?;
    print_summary(&record, &chat, terminal)?;
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
pub fn cannot_run(record: &ModelRecord) -> Option<String> {
    let problem = record.details.problem.as_ref()?;
    Some(format!("this version of Paguro cannot run `{}`: {problem}", record.name.short()))
}

/// Downloads a model, or an adapter of the model `base`, into the library.
///
/// # Errors
/// The download fails, an adapter does not fit its base, or Ctrl-C is pressed.
pub fn download(
    (reference, name, base): (&Reference, Option<ModelName>, Option<&str>),
    settings: &LibrarySettings,
    terminal: Terminal,
    interrupt: &Interrupt,
) -> Outcome<(ModelRecord, ChatCheck)> {
    let hub = settings.hub()?;
    let library = settings.open()?;
    let cancel = Cancel::default();
    let stop = cancel.clone();
    let _armed = interrupt.on_press(move || stop.cancel());
    let options = PullOptions { name, cancel };
    let bars = Bars::new(terminal, "getting");
    let chat = ChatCheck::default();
    let base = BaseCheck::new(settings, base);
    let inspect = |path: &Path| base.check(path, chat.inspect(path)?);
    let result = library.pull(&hub, reference, &options, &inspect, &|progress| bars.show(progress));
    drop(bars);
    if matches!(result, Err(LibraryError::Cancelled)) {
        terminal.note("stopped; the same command goes on from here");
    }
    let record = result.and_then(|record| base.record(&library, record)).map_err(failure)?;
    chat.warn(&record, terminal);
    Ok((record, chat))
}

/// Inspector of a model. It also compiles the chat template, and stores the result.
#[derive(Default)]
pub struct ChatCheck(RefCell<Chat>);

impl ChatCheck {
    /// Opens the model at `path` and returns its properties.
    pub fn inspect(&self, path: &Path) -> Result<Details, Box<dyn Error + Send + Sync>> {
        let (details, chat) = inspect_with_chat(path)?;
        self.0.replace(chat);
        Ok(details)
    }

    /// Returns true if the inspected model writes text and has no chat template.
    pub fn lacks_template(&self) -> bool {
        *self.0.borrow() == Chat::None
    }

    /// Returns true if the inspected model writes no text.
    pub fn is_encoder(&self) -> bool {
        matches!(*self.0.borrow(), Chat::Encoder(_) | Chat::Assistant)
    }

    /// Returns the command that uses the inspected model, with its purpose.
    fn command(&self, name: &str) -> String {
        match *self.0.borrow() {
            Chat::Encoder(false) => format!("compute vectors with it: paguro embed {name} FILE"),
            Chat::Encoder(true) => format!("score texts with it: paguro rerank {name} QUERY FILE"),
            Chat::Assistant => "it drafts for its model, beside which it is found".to_owned(),
            _ => format!("run it: paguro run {name}"),
        }
    }

    /// Prints a warning if the chat template of the model does not compile.
    pub fn warn(&self, record: &ModelRecord, terminal: Terminal) {
        if let Chat::Broken(problem) = &*self.0.borrow() {
            let name = record.name.short();
            terminal.status(&format!("{name} cannot chat: {problem}"));
            terminal
                .status(&format!("to continue a prompt without the chat template: paguro run {name} --raw"));
        }
    }
}

/// Refuses an adapter without a base.
fn lacks_base(record: &ModelRecord) -> Result<(), String> {
    if record.is_adapter() { adapters::base_name(record, &[]).map(drop) } else { Ok(()) }
}

/// Prints the name, size and quantization of the model, and the command that uses it.
///
/// # Errors
/// The error of standard output.
pub fn print_summary(record: &ModelRecord, chat: &ChatCheck, terminal: Terminal) -> Outcome<()> {
    let (name, size) = (record.name.short(), units::bytes(record.size()));
    let of = match (record.is_adapter(), record.base()) {
        (false, _) if record.assistant().is_some() => ", with its assistant".to_owned(),
        (false, _) => String::new(),
        (true, Some(base)) => format!(", adapter of {base}"),
        (true, None) => ", adapter".to_owned(),
    };
    Output::new().line(format_args!("{name} ({size}, {}{of})", record.details.quantization))?;
    if let (true, Err(problem)) = (record.details.problem.is_none(), lacks_base(record)) {
        terminal.status(&problem);
        return Ok(());
    }
    if record.details.problem.is_none() {
        terminal.status(&chat.command(&name));
    }
    Ok(())
}
