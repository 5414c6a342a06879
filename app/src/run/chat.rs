//! The interactive chat.

use std::{path::Path, time::Instant};

use clap::{Parser, error::ErrorKind};
use paguro_engine::SubmitError;
use paguro_library::ModelRecord;

use super::{
    Invocation, Running,
    answer::{Answer, follow},
    commands::{self, Entry},
    editor::ChatEditor,
    images::{self, Attachment},
    progress,
    prompt::{self, Conversation, Role, Style},
    refused, sampling, saved,
};
use crate::{
    cli::{SamplingArgs, foreign},
    failure::{Failure, Outcome},
    models::EMBEDDED,
    output::Output,
    units,
};

/// Divisor of the context. The quotient is reserved for an answer; the oldest turns are dropped to free it.
const ANSWER_SHARE: usize = 4;

/// Flags without a value, which `/set` turns on or off.
const SWITCHES: [&str; 1] = ["ignore-eos"];

/// State of a chat.
pub struct Chat<'a> {
    invocation: Invocation<'a>,
    running: Running,
    conversation: Conversation,
    /// Conversation that was last saved to the session's file.
    kept: Conversation,
    sampling: SamplingArgs,
    /// True to show speeds after each answer.
    verbose: bool,
    out: Output,
}

/// Parser of `/set NAME VALUE`, which is read as the flag `--NAME=VALUE`.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct SetLine {
    #[command(flatten)]
    sampling: SamplingArgs,
}

impl<'a> Chat<'a> {
    /// Creates a chat.
    pub fn new(invocation: Invocation<'a>, running: Running) -> Self {
        let conversation = invocation.conversation();
        let sampling = invocation.args.sampling.clone();
        Self {
            kept: conversation.clone(),
            invocation,
            running,
            conversation,
            sampling,
            verbose: invocation.terminal.verbose,
            out: Output::new(),
        }
    }

    /// Runs the chat until the user leaves. A command or an answer that fails prints its error, and the chat goes on with
    /// its model, conversation and values.
    ///
    /// # Errors
    /// The terminal cannot be read, or an answer cannot be printed.
    pub fn run(&mut self, history: Option<&Path>) -> Outcome<()> {
        for image in &self.invocation.args.images {
            self.attach(image);
        }
        let values = self.values().into_iter().map(|(name, _)| name);
        let values = values.chain(["system", "think", "verbose"].map(str::to_owned)).collect();
        let mut editor = ChatEditor::new(history, values, self.model_names())?;
        self.greet();
        while let Some(typed) = editor.read(self.invocation.terminal)? {
            match Entry::parse(&typed) {
                Entry::Empty => {}
                Entry::Exit => break,
                Entry::Message(text) => self.message(text)?,
                Entry::Regenerate => self.regenerate()?,
                other => self.command(other),
            }
            self.keep();
        }
        Ok(())
    }

    /// Saves the conversation to the session's file if it has changed.
    fn keep(&mut self) {
        if self.kept != self.conversation {
            match self.invocation.keep(&self.running, &self.conversation) {
                Ok(()) => self.kept.clone_from(&self.conversation),
                Err(failure) => self.say(&failure),
            }
        }
    }

    /// Executes a command whose errors do not end the chat.
    fn command(&mut self, entry: Entry) {
        match entry {
            Entry::Clear => {
                let system = self.conversation.system().map(str::to_owned);
                self.conversation = Conversation::new(system);
                self.note("The conversation is cleared.");
            }
            Entry::Undo => self.undo(),
            Entry::Save(file) => {
                let saved = saved::save(Path::new(&file), &self.running.name, &self.conversation);
                self.report(
                    saved.map(|count| format!("{} saved in {file}.", units::plural(count, "message"))),
                );
            }
            Entry::Load(file) => {
                let loaded = saved::load(Path::new(&file)).map(|conversation| {
                    self.conversation = conversation;
                    format!(
                        "The conversation goes on after {}.",
                        units::plural(self.conversation.len(), "message")
                    )
                });
                self.report(loaded.map_err(|failure| failure.hint("`/model NAME` switches to a model")));
            }
            Entry::Think(think) => match self.running.style {
                Style::Chat(_) if prompt::has_switch(&self.running.loaded.model) => {
                    self.running.style = Style::Chat(Some(think));
                    self.note(if think {
                        "The model thinks first."
                    } else {
                        "The model answers without thinking."
                    });
                }
                _ => self.note(&format!("{}.", super::NO_SWITCH)),
            },
            Entry::Image(path) => self.attach(&path),
            Entry::Model(None) => self.note(&format!("The model is {}.", self.running.name)),
            Entry::Model(Some(name)) => {
                let running = self.invocation.open(&name).map(|running| {
                    self.running = running;
                    format!("The conversation goes on with {}.", self.running.name)
                });
                self.report(running);
            }
            Entry::System(text) => self.set_system(text),
            Entry::Verbose(verbose) => {
                self.verbose = verbose;
                self.note(if verbose { "Speeds are shown." } else { "Speeds are not shown." });
            }
            Entry::Values => self.list_values(),
            Entry::Show => self.show(),
            Entry::Set { name, value } => self.set(&name, value.as_deref()),
            Entry::Help => self.invocation.terminal.table(&commands::help()),
            Entry::Wrong(problem) => self.note(&problem),
            Entry::Message(_) | Entry::Regenerate | Entry::Exit | Entry::Empty => {}
        }
    }

    fn greet(&self) {
        let what = match self.running.style {
            Style::Chat(_) => "",
            Style::Raw(_) => " · no chat template: each text is continued on its own",
        };
        if self.conversation.len() > 0 {
            let messages = units::plural(self.conversation.len(), "message");
            self.invocation.terminal.status(&format!("the conversation goes on after {messages}"));
        }
        self.invocation
            .terminal
            .status(&format!("{}{what} · /help for help, Ctrl-D to leave", self.running.name));
        if self.running.name == EMBEDDED && self.conversation.len() == 0 {
            self.invocation.terminal.status("It tells short stories: try \"Tell me a story about a boat\".");
        }
    }

    /// Returns the names that `/model` completes.
    fn model_names(&self) -> Vec<String> {
        let records: Vec<ModelRecord> = match self.invocation.library.open_existing() {
            Ok(Some(library)) => library.list().unwrap_or_default(),
            // Without a library, only the embedded model is completed.
            _ => Vec::new(),
        };
        let names = records.iter().map(|record| record.name.short());
        names.chain([EMBEDDED.to_owned()]).collect()
    }

    fn set_system(&mut self, text: Option<String>) {
        if text.is_some() && matches!(self.running.style, Style::Raw(_)) {
            return self.note("There is no chat template here that could carry a system message.");
        }
        let note = match &text {
            Some(_) => "The system message is set; the conversation starts over.",
            None => "The system message is removed; the conversation starts over.",
        };
        self.conversation = Conversation::new(text);
        self.note(note);
    }

    /// Adds a message and prints its answer. A message that cannot be answered is removed again.
    fn message(&mut self, text: String) -> Outcome<()> {
        self.conversation.ask(text);
        if !self.answer()? {
            self.conversation.take_back(Role::User);
        }
        Ok(())
    }

    /// Replaces the last answer by a new one.
    fn regenerate(&mut self) -> Outcome<()> {
        let before = self.conversation.take_back(Role::Assistant);
        if self.conversation.turns().last().is_none_or(|turn| turn.role != Role::User) {
            if let Some(before) = before {
                self.conversation.answer(before);
            }
            self.note("There is no message to answer again.");
            return Ok(());
        }
        if self.sampling.seed().is_some() {
            self.note("The seed is fixed, so the answer will be the same; /set seed -1 draws anew.");
        }
        if !self.answer()?
            && let Some(before) = before
        {
            self.conversation.answer(before);
        }
        Ok(())
    }

    /// Adds an image to the next message.
    fn attach(&mut self, path: &str) {
        let model = &self.running.loaded.model;
        let image = images::check(model, &self.running.name).and_then(|()| Attachment::read(path));
        match image {
            Ok(image) => {
                self.conversation.attach(image);
                let images = units::plural(self.conversation.attached(), "image");
                self.note(&format!("The next message has {images}."));
            }
            Err(failure) => self.say(&failure),
        }
    }

    fn undo(&mut self) {
        self.conversation.take_back(Role::Assistant);
        match self.conversation.take_back(Role::User) {
            Some(_) => self.note("The last message and its answer are taken back."),
            None => self.note("There is nothing to take back."),
        }
    }

    /// Generates and prints the answer to the last message. If it cannot be answered, prints the reason and returns
    /// false.
    fn answer(&mut self) -> Outcome<bool> {
        let tokens = match self.fit() {
            Ok(tokens) => tokens,
            Err(failure) => {
                self.say(&failure);
                return Ok(false);
            }
        };
        let loaded = &self.running.loaded;
        let lasting_tokens =
            self.conversation.lasting_tokens(&loaded.model, self.running.style, tokens.len());
        let mut request = sampling::request(tokens, &self.sampling, &loaded.model);
        request.lasting_tokens = lasting_tokens;
        request.pictures = match self.conversation.pictures(&loaded.model, &request.prompt) {
            Ok(pictures) => pictures,
            Err(failure) => {
                self.say(&failure);
                return Ok(false);
            }
        };
        request.constraint = self.running.constraint.clone();
        request.adapters.clone_from(&self.running.adapters);
        let seed = (request.sampling.temperature > 0.0).then_some(request.sampling.seed);
        let mut reading = progress::reading(&self.invocation.terminal, &loaded.handle, request.prompt.len());
        let submitted = Instant::now();
        let generation = match loaded.handle.generate(request) {
            Ok(generation) => generation,
            Err(error) => {
                drop(reading);
                let failure = refused(&error);
                let is_over = matches!(error, SubmitError::Stopped { .. });
                self.say(&if is_over { failure.hint(self.after_the_engine()) } else { failure });
                return Ok(false);
            }
        };
        let canceller = generation.canceller();
        let armed = self.invocation.interrupt.on_press(move || canceller.cancel());
        let out = &mut self.out;
        let (mut is_broken, mut begun) = (false, false);
        let answer = follow(generation, 1, submitted, |piece| {
            reading.take();
            begun |= !piece.text.is_empty();
            out.piece(piece.text).inspect_err(|_| is_broken = true)
        });
        drop((armed, reading));
        match answer {
            Ok(answer) => self.finish(answer, seed).map(|()| true),
            // Without the output there is no chat.
            Err(failure) if is_broken => Err(failure),
            Err(failure) => {
                if begun {
                    self.out.piece("\n")?;
                }
                self.say(&failure.hint(self.after_the_engine()));
                Ok(false)
            }
        }
    }

    /// Returns a hint for a chat whose engine failed.
    fn after_the_engine(&self) -> String {
        format!("/model {} loads the model again; /save FILE keeps the conversation", self.running.reference)
    }

    fn finish(&mut self, answer: Answer, seed: Option<u64>) -> Outcome<()> {
        if !answer.branches[0].text.ends_with('\n') {
            self.out.piece("\n")?;
        }
        let line =
            if self.verbose { Some(answer.status(&self.running.name, seed)) } else { answer.remarks() };
        if let Some(line) = line {
            self.invocation.terminal.status(&line);
        }
        // The text of a stopped answer stays in the conversation.
        self.conversation
            .answer(answer.branches.into_iter().next().map(|branch| branch.text).unwrap_or_default());
        Ok(())
    }

    /// Returns the tokens of the conversation. Drops its oldest turns if they leave too little space for an answer.
    ///
    /// # Errors
    /// The last message alone does not fit into the context. Then no turns are dropped.
    fn fit(&mut self) -> Outcome<Vec<u32>> {
        let loaded = &self.running.loaded;
        let limit = loaded.handle.max_context();
        let room = self.sampling.max_tokens().unwrap_or(usize::MAX).min(limit / ANSWER_SHARE);
        let mut shorter = self.conversation.clone();
        let mut dropped = 0;
        let tokens = loop {
            let tokens = shorter.tokens(&loaded.model, self.running.style)?;
            if tokens.len() + room <= limit || !shorter.forget_oldest() {
                break tokens;
            }
            dropped += 1;
        };
        if tokens.len() >= limit {
            let count = tokens.len();
            let failure = Failure::usage(format!(
                "the message has {count} tokens, and message and answer together can have {limit}"
            ));
            return Err(failure.hint("shorten it, or start with a larger context: -c N"));
        }
        if dropped > 0 {
            self.conversation = shorter;
            let which = match dropped {
                1 => "the oldest question and its answer were dropped".to_owned(),
                n => format!("the {n} oldest questions and their answers were dropped"),
            };
            self.note(&format!("The conversation no longer fits into {limit} tokens; {which}."));
        }
        Ok(tokens)
    }

    fn values(&self) -> Vec<(String, String)> {
        sampling::values(&self.sampling, &self.running.loaded.model.defaults)
    }

    fn list_values(&self) {
        self.invocation.terminal.table(&self.values());
        self.note("/set NAME VALUE changes one; a name may be shortened.");
    }

    fn set(&mut self, given: &str, value: Option<&str>) {
        let values = self.values();
        let names = values.iter().map(|(name, _)| name.as_str());
        let name = match commands::prefix(given, names) {
            Ok(name) => name.to_owned(),
            Err(several) => match foreign::sampling_name(given) {
                Some(name) => name.to_owned(),
                None if several.is_empty() => {
                    let all: Vec<_> = values.iter().map(|(name, _)| name.as_str()).collect();
                    return self.note(&format!(
                        "There is no sampling value `{given}`; there are {}.",
                        all.join(", ")
                    ));
                }
                None => return self.note(&format!("`{given}` could be {}.", several.join(", "))),
            },
        };
        if let Some(Err(problem)) = value.map(|value| self.change(&name, value)) {
            return self.note(&problem);
        }
        let now = self.values().into_iter().find(|(other, _)| *other == name);
        self.note(&format!("{name} is {}.", now.map(|(_, value)| value).unwrap_or_default()));
    }

    /// Sets a sampling value, which is parsed as its flag is.
    fn change(&mut self, name: &str, value: &str) -> Result<(), String> {
        let mut line = SetLine { sampling: self.sampling.clone() };
        let flag = match (SWITCHES.contains(&name), value) {
            (true, "on" | "true" | "1") => format!("--{name}"),
            (true, "off" | "false" | "0") => {
                self.sampling.ignore_eos = false;
                return Ok(());
            }
            (true, _) => return Err(format!("`{name}` is on or off.")),
            (false, _) => format!("--{name}={value}"),
        };
        match line.try_update_from([flag]) {
            Ok(()) => {
                self.sampling = line.sampling;
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::UnknownArgument => {
                Err(format!("There is no sampling value `{name}`; /set lists them."))
            }
            Err(error) => {
                let text = error.to_string();
                Err(text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned())
            }
        }
    }

    fn show(&self) {
        let Running { loaded, name, style, .. } = &self.running;
        let limit = loaded.handle.max_context();
        let messages = units::plural(self.conversation.len(), "message");
        let context = match self.conversation.tokens(&loaded.model, *style) {
            Ok(tokens) => format!("{messages}, {} of {limit} tokens", tokens.len()),
            // Many templates read the first message.
            Err(_) if self.conversation.len() == 0 => format!("{messages}, of {limit} tokens"),
            Err(failure) => format!("{messages} that cannot be counted: {}", failure.message()),
        };
        let values: Vec<_> =
            self.values().into_iter().map(|(name, value)| format!("{name} {value}")).collect();
        let rows = [
            ("model", format!("{name} ({}, {})", loaded.model.name, loaded.model.architecture)),
            ("sampling", values.join(", ")),
            ("system", self.conversation.system().unwrap_or("(none)").to_owned()),
            ("context", context),
        ];
        self.invocation.terminal.table(&rows.map(|(name, value)| (name.to_owned(), value)));
    }

    fn note(&self, text: &str) {
        self.invocation.terminal.note(text);
    }

    /// Prints the result of a command.
    fn report(&self, outcome: Outcome<String>) {
        match outcome {
            Ok(note) => self.note(&note),
            Err(failure) => self.say(&failure),
        }
    }

    fn say(&self, failure: &Failure) {
        self.invocation.terminal.report(failure);
    }
}
