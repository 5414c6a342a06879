//! `paguro run`: one answer, or a chat.

mod answer;
mod chat;
mod commands;
mod editor;
mod grammar;
pub mod images;
mod once;
mod preset;
mod progress;
mod prompt;
mod sampling;
pub mod saved;
mod session;

use std::{
    io::{Write, stderr, stdin},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use paguro_engine::{Adapter, Constraint, DiskCache, DraftModel, EngineOptions, PageBudget, SubmitError};
use paguro_model::Model;

use crate::{
    adapters, assistant,
    cli::RunArgs,
    devices::Devices,
    eval,
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    library,
    load::{self, Loaded},
    models::{EMBEDDED, Found, Missing, Source, is_name, is_path},
    serve::disk::Weights,
    settings::{LibrarySettings, Terminal},
    tokenize::read_text,
    units,
};
use chat::Chat;
use preset::Recorded;
use prompt::{Conversation, Style};
use session::{DigestThread, Session};

/// Note for a model whose template has no switch for thinking.
const NO_SWITCH: &str = "the model's chat template has no switch for thinking";

/// Arguments, settings and terminal of a run.
#[derive(Clone, Copy)]
pub struct Invocation<'a> {
    args: &'a RunArgs,
    library: &'a LibrarySettings,
    devices: &'a Devices,
    terminal: Terminal,
    interrupt: &'a Interrupt,
    session: Option<&'a Session>,
}

/// A model that is open and not started.
struct Opened {
    model: Arc<Model>,
    style: Style,
    /// Its adapters with their scales.
    adapters: Vec<(PathBuf, f32)>,
    /// Its files, for a session.
    weights: Option<Weights>,
}

/// A running model.
pub struct Running {
    /// Its name for display.
    name: String,
    /// Its name for a later run of the session.
    reference: String,
    /// Ends before the engine, which saves the session's cache then.
    _digest: Option<DigestThread>,
    loaded: Loaded,
    style: Style,
    /// Constraint of every answer.
    constraint: Option<Constraint>,
    /// Adapters of every answer, with their scales.
    adapters: Vec<(Adapter, f32)>,
}

/// Runs the command.
///
/// # Errors
/// A failure, or Ctrl-C.
pub fn run(
    args: &RunArgs,
    library: &LibrarySettings,
    devices: &Devices,
    terminal: Terminal,
    history: Option<&Path>,
) -> Outcome<()> {
    let interrupt = &Interrupt::install()?;
    let session = args.session.as_ref().map(|name| Session::open(name, library)).transpose()?;
    let invocation = Invocation { args, library, devices, terminal, interrupt, session: session.as_ref() };
    let (source, prompt) = invocation.model_and_prompt()?;
    let mut recorded = Recorded::of(&source, library)?;
    let mut completed = args.clone();
    recorded.complete(&mut completed);
    // Errors of the model are reported before input is read.
    let opened = Invocation { args: &completed, ..invocation }.open_source(&source)?;
    if !args.images.is_empty() {
        images::check(&opened.model, &source.short_name())?;
    }
    let has_begun = session.as_ref().is_some_and(|session| session.conversation != Conversation::default());
    if matches!(opened.style, Style::Chat(_)) && !has_begun {
        completed.system = completed.system.or(recorded.system);
    }
    if !recorded.unused.is_empty() {
        let (name, unused) = (source.name(), recorded.unused.join(", "));
        terminal.note(&format!("`run` does not use what is recorded with {name} for servers: {unused}"));
    }
    let (args, invocation) = (&completed, Invocation { args: &completed, ..invocation });
    let prompt = with_standard_input(prompt, terminal)?;
    if prompt.is_none() && (args.json || args.branches > 1) {
        let flag = if args.json { "--json" } else { "--branches" };
        let failure = Failure::usage(format!("{flag} needs a prompt; a chat has none"));
        return Err(failure.hint("give the prompt as an argument, or on standard input"));
    }
    let running = invocation.start(&source, opened)?;
    match prompt {
        Some(prompt) => once::answer(invocation, &running, prompt),
        None => Chat::new(invocation, running).run(history),
    }
}

impl Invocation<'_> {
    /// Splits the words into model and prompt. Offers to download a missing model.
    fn model_and_prompt(&self) -> Outcome<(Source, Option<String>)> {
        let args = self.args;
        let flag = match &args.file {
            Some(file) => Some(eval::read(file)?),
            None => args.prompt.clone(),
        };
        let (name, words, by_word) = match (&args.model, args.words.split_first()) {
            (Some(model), _) => (Some(model), &args.words[..], false),
            (None, Some((first, rest))) if is_name(first) => (Some(first), rest, true),
            _ => {
                let of_session = self.session.and_then(|session| session.model.as_ref());
                (of_session.or(args.default_model.as_ref()), &args.words[..], false)
            }
        };
        let words = match (flag, words.is_empty()) {
            (Some(_), false) => {
                let failure = Failure::usage("the prompt is given twice: as words and as a flag");
                return Err(failure.hint("leave out --prompt or --file, or the words"));
            }
            (Some(text), true) => Some(text),
            (None, true) => None,
            (None, false) => Some(words.join(" ")),
        };
        let as_prompt = |failure: Failure| {
            let all = args.words.join(" ");
            match &args.default_model {
                _ if !by_word || args.words.iter().any(|word| is_path(word)) => failure,
                None => failure.hint(format!("to ask the built-in model: paguro run {EMBEDDED} {all:?}")),
                Some(default) => failure.hint(format!("to ask {default}: paguro run -m {default} {all:?}")),
            }
        };
        let source = match name {
            Some(name) => self.find(name, &as_prompt)?,
            None => Source::Embedded,
        };
        if words.as_ref().is_some_and(|prompt| prompt.trim().is_empty()) {
            return Err(Failure::usage("the prompt is empty")
                .hint(format!("paguro run {EMBEDDED} \"Tell me a story\"")));
        }
        Ok((source, words))
    }

    /// Returns the model with this name. Offers to download it. `unknown` completes the error of an unknown name.
    fn find(&self, name: &str, unknown: &dyn Fn(Failure) -> Failure) -> Outcome<Source> {
        let missing = match Source::look_up(name, self.library).map_err(unknown)? {
            Found::Here(source) => return Ok(source),
            Found::Missing(missing) => missing,
        };
        let Some((reference, short)) = missing.download().filter(|_| self.wants_download(&missing)) else {
            // A model of another program is no prompt.
            let is_here = missing.elsewhere.is_some();
            return Err(if is_here { missing.failure() } else { unknown(missing.failure()) });
        };
        library::download((&reference, short, None), self.library, self.terminal, self.interrupt)?;
        Source::find(Some(name), self.library)
    }

    /// Asks for confirmation of a download, if there is a terminal.
    fn wants_download(&self, missing: &Missing) -> bool {
        let Some((title, bytes)) = missing.offer() else { return false };
        let is_here = missing.elsewhere.is_some();
        if is_here || !self.terminal.interactive || !self.terminal.progress || self.args.json {
            return false;
        }
        let size = bytes.map(|bytes| format!(" {}", units::bytes(bytes))).unwrap_or_default();
        // If the question cannot be written, the answer is no.
        let _ = write!(stderr(), "{title} is not here; download{size}? [Y/n] ");
        let _ = stderr().flush();
        let mut answer = String::new();
        let read = stdin().read_line(&mut answer).is_ok_and(|bytes| bytes > 0);
        read && matches!(answer.trim().to_lowercase().as_str(), "" | "y" | "yes")
    }

    /// Opens a model and selects the prompt style.
    fn open_source(&self, source: &Source) -> Outcome<Opened> {
        let context = match self.args.ctx {
            None => load::Context::Default,
            Some(0) => load::Context::Trained,
            Some(tokens) => load::Context::Tokens(tokens),
        };
        let (base, adapter) = adapters::split(source, self.library)?;
        let mut adapters: Vec<_> = adapter.into_iter().map(|path| (path, 1.0)).collect();
        for text in &self.args.loras {
            adapters.push(adapters::place(text, self.library)?);
        }
        let weights = self.session.and_then(|session| session.weights(&base));
        let mut file = self.args.projector.choice().open(&base, |line| self.terminal.note(line))?;
        let draft = self.args.speculate.draft.source(self.library)?;
        let assistants = || assistant::of_settings(self.library);
        assistant::add(&mut file, &base, draft.as_ref(), assistants, |line| self.terminal.note(line))?;
        let mut model = load::writer_of(&file, &base, context)?;
        // Of several adapters, none has the right to its own tokens.
        if let [(path, _)] = &adapters[..]
            && let Some(dialect) = adapters::dialect(path, &model)?
        {
            model = Arc::new(dialect);
        }
        let style = Style::new(&model, self.args.raw, self.args.system.as_deref(), self.args.think)?;
        if self.args.think.is_some() && !prompt::has_switch(&model) {
            self.terminal.status(NO_SWITCH);
        }
        if self.session.is_some() && matches!(style, Style::Raw(_)) {
            let failure = Failure::usage("the model has no chat template, so it has no conversations");
            return Err(failure.hint("leave out --session"));
        }
        Ok(Opened { model, style, adapters, weights })
    }

    /// Returns the conversation so far: the session's, or a new one.
    fn conversation(&self) -> Conversation {
        let system = self.args.system.clone();
        let Some(session) = self.session else { return Conversation::new(system) };
        let mut conversation = session.conversation.clone();
        system.into_iter().for_each(|text| conversation.set_system(text));
        conversation
    }

    /// Writes the session's messages, if there is a session.
    fn keep(&self, running: &Running, conversation: &Conversation) -> Outcome<()> {
        self.session.map_or(Ok(()), |session| session.save(&running.reference, conversation))
    }

    /// Starts an engine.
    fn start(&self, source: &Source, opened: Opened) -> Outcome<Running> {
        let Opened { model, style, adapters, weights } = opened;
        let grammar = grammar::read(&self.args.grammar)?;
        let name = source.short_name();
        let session = self.session.zip(weights);
        let disk = session.as_ref().map(|(session, weights)| session.cache(&name, weights));
        let draft = load::draft(self.args.speculate.draft.draft.as_deref(), &model, self.library)?;
        let loaded = start(self.args, model, (disk, draft), (self.devices, self.terminal))?;
        let digest =
            session.map(|(session, weights)| session.read_later(weights, loaded.handle.clone(), &name));
        let constraint = grammar::compile(grammar.as_ref(), &loaded)?;
        let adapter = |(path, scale): (PathBuf, f32)| {
            Ok((adapters::load(&path, &loaded.model, &loaded.handle)?, scale))
        };
        let adapters = adapters.into_iter().map(adapter).collect::<Outcome<_>>()?;
        let reference = source.reference();
        Ok(Running { reference, _digest: digest, name, loaded, style, constraint, adapters })
    }

    /// Finds, opens and starts another model of a chat. Ctrl-C meanwhile keeps the present one, not ends the program.
    fn open(&self, name: &str) -> Outcome<Running> {
        let source = self.find(name, &|failure| failure)?;
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (pressed, terminal) = (is_stopped.clone(), self.terminal);
        let _armed = self.interrupt.on_press(move || {
            pressed.store(true, Ordering::Relaxed);
            terminal.note("the model is dropped when it is loaded; Ctrl-C again ends the program");
        });
        let running = self.open_source(&source).and_then(|opened| self.start(&source, opened))?;
        match is_stopped.load(Ordering::Relaxed) {
            true => Err(Failure::new(format!("{name} is not used: Ctrl-C was pressed"))),
            false => Ok(running),
        }
    }
}

/// Appends standard input to the prompt, unless it is a terminal.
fn with_standard_input(prompt: Option<String>, terminal: Terminal) -> Outcome<Option<String>> {
    if terminal.interactive {
        return Ok(prompt);
    }
    let text = read_text()?;
    // The final line end belongs to the file, not to the prompt.
    let text = text.strip_suffix('\n').map_or(&text[..], |text| text.strip_suffix('\r').unwrap_or(text));
    match (prompt, text.trim().is_empty()) {
        (Some(prompt), true) => Ok(Some(prompt)),
        (Some(prompt), false) => Ok(Some(format!("{prompt}\n\n{text}"))),
        (None, false) => Ok(Some(text.to_owned())),
        (None, true) => {
            Err(Failure::usage("there is no prompt: none was given, and standard input is empty")
                .hint("give the prompt as an argument, or run on a terminal to chat"))
        }
    }
}

fn start(
    args: &RunArgs,
    model: Arc<Model>,
    (disk, draft): (Option<DiskCache>, Option<Arc<DraftModel>>),
    (devices, terminal): (&Devices, Terminal),
) -> Outcome<Loaded> {
    let context = match args.ctx {
        Some(0) => model.context_length,
        Some(tokens) => tokens,
        None => model.context_length.min(load::DEFAULT_CONTEXT),
    };
    let trained = model.context_length;
    let defaults = EngineOptions::default();
    let options = args.speculate.speculate.of(EngineOptions {
        block_size: args.page_size.unwrap_or(defaults.block_size),
        pages: PageBudget::Tokens(context.saturating_mul(args.branches)),
        max_context: Some(context),
        max_sequences: args.branches,
        max_batch_tokens: args.batch.or_default(args.branches),
        // No reader waits for steps.
        step_time: Duration::MAX,
        max_image_tokens: Some(images::MOST_TOKENS),
        kv_dtype: args.kv.kv_dtype.into(),
        attention: args.attention.attention.into(),
        draft,
        disk,
        ..defaults
    });
    let may_shrink = args.ctx.is_none();
    let loaded =
        load::start(model, options, may_shrink, args.threads.threads, (devices, &args.on), terminal)?;
    if context > trained {
        let memory = units::bytes(loaded.kv_bytes);
        terminal.note(&format!(
            "the model was trained for {trained} tokens; past them its answers get worse, and {context} tokens need {memory} for \
             their K and V"
        ));
    }
    Ok(loaded)
}

/// Converts a refused request to a failure, with a hint for the flag. Invalid values are usage errors.
fn refused(error: &SubmitError) -> Failure {
    match error {
        SubmitError::ContextTooLong { .. } => {
            // The engine's message names the field of the API; the flag is enough here.
            let message = error.to_string();
            let message = message.split(';').next().unwrap_or_default();
            Failure::new(message).hint("shorten it, or make the context larger: -c N")
        }
        SubmitError::Sampling(_) | SubmitError::Invalid { .. } => Failure::usage(error),
        _ => Failure::from_error(error),
    }
}
