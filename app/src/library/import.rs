//! `paguro import`: files and folders of this machine, and models of other programs.

use std::{io::ErrorKind, path::Path};

use paguro_library::{
    Cancel, ImportOptions, Library, LibraryError, ModelRecord, Taken,
    found::{self, FoundModel, Listing, Program},
    known,
};

use paguro_model::AdapterFile;

use super::{
    empty_store, failure,
    get::{ChatCheck, cannot_run, print_summary},
    ollama,
    progress::Bars,
    usable,
};
use crate::{
    adapters::BaseCheck,
    cli::{ImportArgs, Placement},
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    models::{EMBEDDED, elsewhere, is_path},
    output::Output,
    settings::{LibrarySettings, Terminal},
    table::Table,
    units,
};

/// Runs `paguro import`.
///
/// # Errors
/// The path has no model, the name is taken, or Ctrl-C is pressed. Of several models, all that can be imported are.
pub fn import(args: &ImportArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    args.name.as_ref().map(usable).transpose()?;
    let models = models(&args.path, settings, terminal)?;
    let library = settings.open()?;
    let (cancel, interrupt) = (Cancel::default(), Interrupt::install()?);
    let stop = cancel.clone();
    let _armed = interrupt.on_press(move || stop.cancel());
    let importer = Importer { args, settings, library: &library, cancel, terminal };
    match models {
        None => importer.import_path(),
        Some(models) => importer.import_all(&models),
    }
}

/// Returns the models of another program or of a folder; `None` if the path is one model.
fn models(path: &Path, settings: &LibrarySettings, terminal: Terminal) -> Outcome<Option<Vec<FoundModel>>> {
    if !path.exists()
        && let Some((program, name)) = path.to_str().and_then(Program::split)
    {
        if !name.is_empty() {
            return Ok(Some(vec![settings.stores.find(program, name).map_err(failure)?]));
        }
        let Listing { models, problems } = settings.stores.models(program);
        if models.is_empty() {
            return Err(empty_store(program, &problems));
        }
        problems.iter().for_each(|problem| terminal.status(problem));
        return Ok(Some(models));
    }
    if path.metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Err(missing(path, settings));
    }
    if !path.is_dir() || path.join("config.json").is_file() || AdapterFile::is_at(path) {
        return Ok(None);
    }
    let Listing { models, problems } = found::in_folder(path).map_err(failure)?;
    problems.iter().for_each(|problem| terminal.status(problem));
    Ok(Some(models).filter(|models| !models.is_empty()))
}

/// Returns the error for a path that does not exist: a program without its colon, the name of a model of another
/// program, or one to pull.
fn missing(path: &Path, settings: &LibrarySettings) -> Failure {
    let text = path.display().to_string();
    let failure = Failure::usage(format!("there is no file or folder `{text}`"));
    let program = Program::ALL.into_iter().find(|program| program.prefix().trim_end_matches(':') == text);
    if let Some(program) = program {
        let prefix = program.prefix();
        return failure.hint(format!("all models of {program}: paguro import {prefix}"));
    }
    if let Some(reference) = elsewhere(&text, settings) {
        return failure.hint(format!("the model of this name: paguro import {reference}"));
    }
    match known::wanted(&text) {
        Ok(_) if !is_path(&text) => failure.hint(format!("to download a model: paguro pull {text}")),
        _ => failure,
    }
}

/// The library and the choices of one run.
struct Importer<'a> {
    args: &'a ImportArgs,
    settings: &'a LibrarySettings,
    library: &'a Library,
    cancel: Cancel,
    terminal: Terminal,
}

impl Importer<'_> {
    fn options(&self, default: Placement) -> ImportOptions {
        let placement = self.args.placement().unwrap_or(default);
        ImportOptions {
            name: self.args.name.clone(),
            copy: placement == Placement::Copy,
            link: placement == Placement::Link,
            replace: self.args.replace,
            force: self.args.force,
            reserved: vec![EMBEDDED.to_owned()],
            cancel: self.cancel.clone(),
            ..ImportOptions::default()
        }
    }

    fn bars(&self, options: &ImportOptions) -> Bars {
        Bars::new(self.terminal, if options.copy { "copying" } else { "reading" })
    }

    /// Imports the file or folder.
    fn import_path(&self) -> Outcome<()> {
        let options = self.options(Placement::InPlace);
        let (bars, chat) = (self.bars(&options), ChatCheck::default());
        let progress = |progress: paguro_library::Progress<'_>| bars.show(progress);
        let base = BaseCheck::new(self.settings, self.args.base.as_deref());
        let inspect = |path: &Path| base.check(path, chat.inspect(path)?);
        let result = self.library.import_again(&self.args.path, &options, &inspect, &progress);
        drop(bars);
        let record = match result.map_err(taken)? {
            Taken::New(record) => base.record(self.library, record).map_err(taken)?,
            Taken::Same(record) => {
                self.say_same(&record);
                return Ok(());
            }
        };
        print_summary(&record, &chat, self.terminal)?;
        if let Some(text) = cannot_run(&record) {
            self.terminal.status(&text);
        }
        chat.warn(&record, self.terminal);
        Ok(())
    }

    /// Imports models of another program or of a folder.
    fn import_all(&self, models: &[FoundModel]) -> Outcome<()> {
        if let (Some(name), true) = (&self.args.name, models.len() > 1) {
            let count = models.len();
            return Err(Failure::usage(format!(
                "--name {} is for one model, and there are {count}",
                name.short()
            ))
            .hint("`paguro list --found` lists them by name"));
        }
        let (mut failed, mut forcible) = (0, false);
        for model in models {
            match self.import_found(model) {
                Ok(()) => {}
                Err(LibraryError::Cancelled) => return Err(Failure::interrupted()),
                // The next one would fail as well.
                Err(error @ (LibraryError::ReadOnly { .. } | LibraryError::DiskFull { .. })) => {
                    return Err(failure(error));
                }
                Err(error) if models.len() == 1 => return Err(taken(error)),
                Err(error) => {
                    failed += 1;
                    forcible |=
                        matches!(error, LibraryError::CannotRun { .. } | LibraryError::NameTaken { .. });
                    self.terminal.note(&format!("not imported: {}", reason(model, error)));
                }
            }
        }
        if failed == 0 {
            return Ok(());
        }
        let count = units::plural(models.len(), "model");
        let failure = Failure::new(format!("{failed} of {count} were not imported"));
        Err(match forcible {
            true => failure
                .hint("--force imports models that cannot run, --replace replaces models of the same name"),
            false => failure,
        })
    }

    /// Imports one model of another program.
    fn import_found(&self, model: &FoundModel) -> Result<(), LibraryError> {
        let default = if model.program == Program::Folder { Placement::InPlace } else { Placement::Link };
        // An adapter of Ollama comes with the weights of its base.
        let of_program = model.base.as_deref().map(|base| self.import_base(base, default)).transpose()?;
        let wanted = self.args.base.as_deref().or(of_program.as_deref());
        let base = BaseCheck::new(self.settings, wanted);
        let settings = ollama::translate(&model.settings);
        let mut options = self.options(default);
        options.defaults = settings.defaults;
        options.extra = settings.preset.to_record();
        let (bars, chat) = (self.bars(&options), ChatCheck::default());
        let progress = |progress: paguro_library::Progress<'_>| bars.show(progress);
        let inspect = |path: &Path| base.check(path, chat.inspect(path)?);
        let taken = self.library.import_found(model, &options, &inspect, &progress)?;
        drop(bars);
        match taken {
            Taken::Same(record) => self.say_same(&record),
            Taken::New(record) => {
                let record = base.record(self.library, record)?;
                // A closed standard output does not end the import of the others.
                let _ = print_summary(&record, &chat, self.terminal);
                self.say_place(model, &record, &options);
                if let Some(text) = cannot_run(&record) {
                    self.terminal.status(&text);
                }
                chat.warn(&record, self.terminal);
                settings.notes.iter().for_each(|note| self.terminal.status(note));
                if model.settings.template.is_some() && !chat.is_encoder() && !record.is_adapter() {
                    let name = record.name.short();
                    self.terminal.status(&match chat.lacks_template() {
                        false => "its template in Go's language is not used; the file has a chat template".to_owned(),
                        true => format!(
                            "it cannot chat: its template in Go's language is not used, and the file has no chat template; \
                             paguro preset {name} --chat-template FILE sets one in jinja"
                        ),
                    });
                }
                if model.projector().is_some() {
                    self.terminal.status("its projector for images is beside it");
                }
            }
        }
        Ok(())
    }

    /// Returns the name of the library's model that an adapter of another program changes, which is imported first if the
    /// library does not have it.
    fn import_base(&self, base: &FoundModel, default: Placement) -> Result<String, LibraryError> {
        let same = self.library.same_as(base)?;
        if let Some(name) = same.first() {
            return Ok(name.short());
        }
        let options = ImportOptions { name: None, replace: false, ..self.options(default) };
        let (bars, chat) = (self.bars(&options), ChatCheck::default());
        let progress = |progress: paguro_library::Progress<'_>| bars.show(progress);
        let taken = self.library.import_found(base, &options, &|path| chat.inspect(path), &progress)?;
        drop(bars);
        let (Taken::New(record) | Taken::Same(record)) = taken;
        let _ = print_summary(&record, &chat, self.terminal);
        Ok(record.name.short())
    }

    fn say_same(&self, record: &ModelRecord) {
        self.terminal.status(&format!("{} is in the library already", record.name.short()));
    }

    /// States where the files of an imported model are.
    fn say_place(&self, model: &FoundModel, record: &ModelRecord, options: &ImportOptions) {
        let in_library = record.files.iter().all(|file| file.location.is_none());
        let program = model.program;
        self.terminal.status(&match (options.copy, in_library) {
            (true, _) => "its files were copied".to_owned(),
            (false, true) => format!("its files are shared with {program} by hard links, which take no space"),
            (false, false) if options.link => format!(
                "its files stay in {program}, because the library cannot have hard links to them; if they are removed there, the \
                 model is gone (--copy copies them)"
            ),
            (false, false) => "its files stay where they are".to_owned(),
        });
    }
}

/// Converts the error of an import.
fn taken(error: LibraryError) -> Failure {
    match error {
        LibraryError::NameTaken { name } => {
            Failure::usage(format!("the library has a model `{name}` already"))
                .hint("--name gives another name, --replace takes its place")
        }
        error @ LibraryError::BadName { .. } => failure(error).hint("--name gives another name"),
        error => failure(error),
    }
}

/// Returns the reason for which one of several models was not imported, with its name.
fn reason(model: &FoundModel, error: LibraryError) -> String {
    let name = model.reference();
    match error {
        LibraryError::Unusable { problem, .. } | LibraryError::CannotRun { problem, .. } => {
            format!("{name}: {problem}")
        }
        LibraryError::Inspect { source, .. } => format!("{name}: {source}"),
        error => format!("{name}: {error}"),
    }
}

/// Prints the models of other programs on this machine.
///
/// # Errors
/// The error of standard output.
pub fn list_found(json: bool, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let library = settings.open_existing()?;
    let mut rows = Vec::new();
    let mut problems = Vec::new();
    for program in Program::ALL {
        let listing = settings.stores.models(program);
        problems.extend(listing.problems);
        for model in listing.models {
            let same = library.as_ref().map(|library| library.same_as(&model));
            let same = same.transpose().map_err(failure)?.unwrap_or_default();
            rows.push((model, same));
        }
    }
    let mut out = Output::new();
    if json {
        problems.iter().for_each(|problem| terminal.note(problem));
        return rows.iter().try_for_each(|(model, same)| {
            let same: Vec<_> = same.iter().map(ToString::to_string).collect();
            out.json(&serde_json::json!({
                "name": model.reference(),
                "program": model.program.to_string(),
                "bytes": model.bytes,
                "path": model.path(),
                "projector": model.projector(),
                "problem": model.problem(),
                "in_library": same,
                "command": format!("paguro import {}", model.reference()),
            }))
        });
    }
    let mut table = Table::new(["name", "size"], &[1], &[]);
    table.text = "import";
    for (model, same) in &rows {
        let name = model.reference();
        // Several models may have the same files.
        let own = same.iter().find(|name| model.is_named(name));
        let last = match (model.problem(), own.or(same.first())) {
            (Some(problem), _) => format!("cannot: {problem}"),
            (None, Some(same)) => format!("in the library as {}", same.short()),
            (None, None) => format!("paguro import {name}"),
        };
        table.push([name, units::bytes(model.bytes)], last);
    }
    if !rows.is_empty() {
        table.write(&mut out, terminal)?;
    }
    problems.iter().for_each(|problem| terminal.note(problem));
    if rows.is_empty() {
        terminal.status("neither Ollama, LM Studio nor the Hugging Face cache has models here");
    } else {
        let programs: Vec<_> = Program::ALL
            .into_iter()
            .filter(|program| rows.iter().any(|(model, _)| model.program == *program))
            .map(|program| format!("paguro import {}", program.prefix()))
            .collect();
        terminal.status(&format!("all models of a program: {}", programs.join(", ")));
    }
    Ok(())
}
