//! The interactive chat.

use std::{fs, io::Write, path::Path, time::Instant};

use clap::{Parser, error::ErrorKind};
use paguro_engine::{Constraint, SubmitError};
use rustyline::{Config, DefaultEditor, config::BellStyle, error::ReadlineError};

use super::{
    answer::{Answer, follow},
    commands::{Entry, HELP, Lines},
    prompt::{Conversation, Style},
    refused, sampling,
};
use crate::{
    cli::{RunArgs, SamplingArgs},
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    load::Loaded,
    output::Output,
    settings::Terminal,
};

const PROMPT: &str = "> ";
const CONTINUED: &str = ". ";
/// Lines of history kept.
const HISTORY: usize = 1000;

/// Part of the context that stays free for the answer; the oldest turns are forgotten for it.
const ANSWER_SHARE: usize = 4;

/// A chat under way.
pub struct Chat<'a> {
    loaded: &'a Loaded,
    style: Style<'a>,
    conversation: Conversation,
    sampling: SamplingArgs,
    /// What every answer must be.
    constraint: Option<Constraint>,
    terminal: Terminal,
    interrupt: &'a Interrupt,
    out: Output,
}

/// `/set NAME VALUE` is a flag on a line of its own.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct SetLine {
    #[command(flatten)]
    sampling: SamplingArgs,
}

impl<'a> Chat<'a> {
    /// A chat that has not begun.
    pub fn new(
        args: &RunArgs,
        loaded: &'a Loaded,
        style: Style<'a>,
        constraint: Option<Constraint>,
        terminal: Terminal,
        interrupt: &'a Interrupt,
    ) -> Self {
        let conversation = Conversation::new(args.system.clone());
        Self {
            loaded,
            style,
            conversation,
            sampling: args.sampling.clone(),
            constraint,
            terminal,
            interrupt,
            out: Output::new(),
        }
    }

    /// Reads and answers until the person leaves.
    ///
    /// # Errors
    /// A terminal that cannot be read, an engine that failed.
    pub fn run(&mut self, history: Option<&Path>) -> Outcome<()> {
        let mut editor = editor(history)?;
        self.greet();
        while let Some(text) = read(&mut editor, self.terminal)? {
            match Entry::parse(&text) {
                Entry::Empty => {}
                Entry::Message(text) => self.message(text)?,
                Entry::Reset => self
                    .forget(self.conversation.system().map(str::to_owned), "the conversation is forgotten"),
                Entry::System(Some(_)) if matches!(self.style, Style::Raw(_)) => {
                    self.terminal.note("there is no chat template here that could carry a system message");
                }
                Entry::System(text) => {
                    self.forget(text, "the system message is set, the conversation begins anew")
                }
                Entry::Set { name, value } => self.set(&name, &value),
                Entry::Show => self.show()?,
                Entry::Help => self.terminal.note(HELP),
                Entry::Unknown(command) => {
                    self.terminal.note(&format!("`{command}` is not a command; /help lists them"))
                }
                Entry::Exit => break,
            }
            save_history(&mut editor, history);
        }
        Ok(())
    }

    fn greet(&self) {
        let name = &self.loaded.model.name;
        let what = match self.style {
            Style::Chat(_) => "",
            Style::Raw(_) => " · no chat template: each text is continued on its own",
        };
        self.terminal.status(&format!("{name}{what} · /help for help, Ctrl-D to leave"));
    }

    fn forget(&mut self, system: Option<String>, note: &str) {
        self.conversation = Conversation::new(system);
        self.terminal.note(note);
    }

    /// Puts a message to the model and shows its answer. What goes wrong with this message is said, and the chat
    /// goes on.
    fn message(&mut self, text: String) -> Outcome<()> {
        self.conversation.ask(text);
        let tokens = match self.fit() {
            Ok(tokens) => tokens,
            Err(failure) => {
                self.conversation.take_back();
                self.say(&failure);
                return Ok(());
            }
        };
        let mut request = sampling::request(tokens, &self.sampling, &self.loaded.model.defaults);
        request.constraint = self.constraint.clone();
        let seed = (request.sampling.temperature > 0.0).then_some(request.sampling.seed);
        let submitted = Instant::now();
        let generation = match self.loaded.handle.generate(request) {
            Ok(generation) => generation,
            Err(error @ SubmitError::Stopped { .. }) => return Err(Failure::from_error(&error)),
            Err(error) => {
                self.conversation.take_back();
                self.say(&refused(&error));
                return Ok(());
            }
        };
        let canceller = generation.canceller();
        let armed = self.interrupt.on_press(move || canceller.cancel());
        let out = &mut self.out;
        let answer = follow(generation, 1, submitted, |piece| out.piece(piece.text))?;
        drop(armed);
        self.finish(answer, seed)
    }

    fn finish(&mut self, answer: Answer, seed: Option<u64>) -> Outcome<()> {
        if !answer.branches[0].text.ends_with('\n') {
            self.out.piece("\n")?;
        }
        self.terminal.status(&answer.status(seed));
        // What a stopped answer said was said: the conversation goes on from there.
        self.conversation
            .answer(answer.branches.into_iter().next().map(|branch| branch.text).unwrap_or_default());
        Ok(())
    }

    /// The conversation's tokens; the oldest turns are forgotten until an answer fits, too.
    fn fit(&mut self) -> Outcome<Vec<u32>> {
        let limit = self.loaded.handle.max_context();
        let room = self.sampling.max_tokens.unwrap_or(usize::MAX).min(limit / ANSWER_SHARE);
        let mut forgotten = 0;
        loop {
            let tokens = self.conversation.tokens(&self.loaded.model, self.style)?;
            if tokens.len() + room <= limit || !self.conversation.forget_oldest() {
                if forgotten > 0 {
                    self.terminal.note(&format!(
                        "the context of {limit} tokens is full: the oldest {forgotten} questions and answers are forgotten"
                    ));
                }
                return Ok(tokens);
            }
            forgotten += 1;
        }
    }

    fn set(&mut self, name: &str, value: &str) {
        let mut line = SetLine { sampling: self.sampling.clone() };
        let flag = format!("--{}={value}", name.trim_start_matches('-').replace('_', "-"));
        match line.try_update_from([flag]) {
            Ok(()) => self.sampling = line.sampling,
            Err(error) if error.kind() == ErrorKind::UnknownArgument => {
                self.terminal
                    .note(&format!("there is no sampling value `{name}`; `paguro run --help` lists them"));
            }
            Err(error) => {
                let text = error.to_string();
                let first = text.lines().next().unwrap_or_default();
                self.terminal.note(first.trim_start_matches("error: "));
            }
        }
    }

    fn show(&mut self) -> Outcome<()> {
        let model = &self.loaded.model;
        let used = self.conversation.tokens(model, self.style)?.len();
        let params = sampling::decide(&self.sampling, &model.defaults);
        self.terminal.note(&format!("model      {} ({})", model.name, model.architecture));
        self.terminal.note(&format!("sampling   {}", sampling::describe(&params)));
        self.terminal.note(&format!("system     {}", self.conversation.system().unwrap_or("(none)")));
        self.terminal.note(&format!(
            "context    {} messages, {used} of {} tokens",
            self.conversation.len(),
            self.loaded.handle.max_context()
        ));
        Ok(())
    }

    fn say(&self, failure: &Failure) {
        if let Some(report) = failure.report(self.terminal.color_errors) {
            let _ = std::io::stderr().write_all(report.as_bytes());
        }
    }
}

fn editor(history: Option<&Path>) -> Outcome<DefaultEditor> {
    let trouble = |error: ReadlineError| Failure::new(format!("cannot edit lines on this terminal: {error}"));
    let config = Config::builder()
        .max_history_size(HISTORY)
        .and_then(|builder| builder.history_ignore_dups(true))
        .map_err(trouble)?
        .bell_style(BellStyle::None)
        .build();
    let mut editor = DefaultEditor::with_config(config).map_err(trouble)?;
    if let Some(path) = history {
        // No history yet, or one that cannot be read: the chat works without.
        let _ = editor.load_history(path);
    }
    Ok(editor)
}

/// Keeps the history after each entry, so that a terminal that is closed loses nothing.
fn save_history(editor: &mut DefaultEditor, history: Option<&Path>) {
    let Some(path) = history else { return };
    if let Some(folder) = path.parent() {
        let _ = fs::create_dir_all(folder);
    }
    // A read-only home is no reason to disturb the chat.
    let _ = editor.save_history(path);
}

/// The next entry, all its lines; `None` when the person leaves.
fn read(editor: &mut DefaultEditor, terminal: Terminal) -> Outcome<Option<String>> {
    let mut lines = Lines::default();
    let mut warned = false;
    loop {
        match editor.readline(if lines.open() { CONTINUED } else { PROMPT }) {
            Ok(line) => {
                warned = false;
                if let Some(text) = lines.push(&line) {
                    if !text.trim().is_empty() {
                        // A line that cannot be remembered is still a line.
                        let _ = editor.add_history_entry(&text);
                    }
                    return Ok(Some(text));
                }
            }
            Err(ReadlineError::Interrupted) if lines.open() => lines = Lines::default(),
            Err(ReadlineError::Interrupted) if !warned => {
                terminal.note("Ctrl-C again, Ctrl-D or /exit leaves");
                warned = true;
            }
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => return Ok(None),
            Err(error) => return Err(Failure::new(format!("cannot read from the terminal: {error}"))),
        }
    }
}
