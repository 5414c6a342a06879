//! The line editor of the chat: keys, completion, history.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustyline::{
    Cmd, ConditionalEventHandler, Config, Context, Editor, Event, EventContext, EventHandler, Helper,
    KeyCode, KeyEvent, Modifiers, RepeatCount,
    completion::{Completer, FilenameCompleter, Pair},
    config::{BellStyle, CompletionType},
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::DefaultHistory,
    validate::Validator,
};

use super::commands::{self, Lines, Typed};
use crate::{
    failure::{Failure, Outcome},
    settings::Terminal,
};

const PROMPT: &str = "> ";
const CONTINUED: &str = ". ";
/// Maximum number of lines of the history.
const HISTORY: usize = 1000;

/// Reader of entries from the terminal.
pub struct ChatEditor {
    editor: Editor<Keys, DefaultHistory>,
    history: Option<PathBuf>,
    /// True if the line was not empty when Ctrl-C was pressed.
    had_text: Arc<AtomicBool>,
    /// True after Ctrl-C on an empty line, until the next key. A second Ctrl-C leaves the chat.
    armed: Arc<AtomicBool>,
}

impl ChatEditor {
    /// Creates an editor with the history in a file. `values` are the names for `/set`, `models` those for `/model`.
    ///
    /// # Errors
    /// The terminal does not support editing.
    pub fn new(history: Option<&Path>, values: Vec<String>, models: Vec<String>) -> Outcome<Self> {
        let trouble =
            |error: ReadlineError| Failure::new(format!("cannot edit lines on this terminal: {error}"));
        let config = Config::builder()
            .max_history_size(HISTORY)
            .and_then(|builder| builder.history_ignore_dups(true))
            .map_err(trouble)?
            .bell_style(BellStyle::None)
            .completion_type(CompletionType::List)
            .build();
        let mut editor = Editor::with_config(config).map_err(trouble)?;
        let (had_text, armed) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
        editor.set_helper(Some(Keys {
            values,
            models,
            files: FilenameCompleter::new(),
            armed: armed.clone(),
        }));
        let alt_enter = KeyEvent(KeyCode::Enter, Modifiers::ALT);
        editor.bind_sequence(alt_enter, EventHandler::Simple(Cmd::Newline));
        let watch = Interrupted { had_text: had_text.clone() };
        editor.bind_sequence(KeyEvent::ctrl('C'), EventHandler::Conditional(Box::new(watch)));
        if let Some(path) = history {
            // The chat works without a history.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history: history.map(Path::to_owned), had_text, armed })
    }

    /// Returns the next entry; `None` when the user leaves.
    ///
    /// # Errors
    /// The terminal cannot be read.
    pub fn read(&mut self, terminal: Terminal) -> Outcome<Option<Typed>> {
        let mut lines = Lines::default();
        self.armed.store(false, Ordering::Relaxed);
        loop {
            match self.editor.readline(if lines.open() { CONTINUED } else { PROMPT }) {
                Ok(line) => {
                    self.armed.store(false, Ordering::Relaxed);
                    if let Some(typed) = lines.push(&line) {
                        self.remember(&typed);
                        return Ok(Some(typed));
                    }
                }
                Err(ReadlineError::Interrupted) => {
                    let had_text = self.had_text.swap(false, Ordering::Relaxed) || lines.open();
                    if had_text {
                        self.armed.store(false, Ordering::Relaxed);
                        lines = Lines::default();
                    } else if self.armed.swap(true, Ordering::Relaxed) {
                        return Ok(None);
                    } else {
                        terminal.note("Ctrl-C again, Ctrl-D or /exit leaves");
                    }
                }
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(Failure::new(format!("cannot read from the terminal: {error}"))),
            }
        }
    }

    /// Adds an entry to the history and its file, so that closing the terminal loses nothing.
    fn remember(&mut self, typed: &Typed) {
        if typed.text.trim().is_empty() {
            return;
        }
        // The history is optional: its file may be on a read-only disk.
        let _ = self.editor.add_history_entry(&typed.text);
        if let Some(path) = &self.history {
            if let Some(folder) = path.parent() {
                let _ = fs::create_dir_all(folder);
            }
            let _ = self.editor.save_history(path);
        }
    }
}

/// Completion and validation for the line editor.
struct Keys {
    values: Vec<String>,
    models: Vec<String>,
    files: FilenameCompleter,
    armed: Arc<AtomicBool>,
}

impl Helper for Keys {}
impl Highlighter for Keys {}
impl Validator for Keys {}

impl Hinter for Keys {
    type Hint = String;

    /// Returns no hint. It is called for each key that changes the line, so it disarms Ctrl-C.
    fn hint(&self, line: &str, _pos: usize, _ctx: &Context<'_>) -> Option<String> {
        if !line.is_empty() {
            self.armed.store(false, Ordering::Relaxed);
        }
        None
    }
}

impl Completer for Keys {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, ctx: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = &line[..pos];
        let Some((command, rest)) = typed.split_once(' ') else {
            let names: Vec<_> = commands::names().collect();
            return Ok((0, if typed.starts_with('/') { matching(typed, &names) } else { Vec::new() }));
        };
        let start = typed.len() - rest.len();
        match command {
            "/set" if !rest.contains(' ') => Ok((start, matching(rest, &self.values))),
            "/model" => Ok((start, matching(rest, &self.models))),
            "/save" | "/load" => self.files.complete(line, pos, ctx),
            _ => Ok((pos, Vec::new())),
        }
    }
}

/// Returns the names with the prefix `typed`.
fn matching(typed: &str, names: &[String]) -> Vec<Pair> {
    let begins = |name: &&String| name.starts_with(typed);
    names
        .iter()
        .filter(begins)
        .map(|name| Pair { display: name.clone(), replacement: name.clone() })
        .collect()
}

/// Records whether Ctrl-C was pressed on a non-empty line.
struct Interrupted {
    had_text: Arc<AtomicBool>,
}

impl ConditionalEventHandler for Interrupted {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, ctx: &EventContext<'_>) -> Option<Cmd> {
        self.had_text.store(!ctx.line().is_empty(), Ordering::Relaxed);
        None
    }
}
