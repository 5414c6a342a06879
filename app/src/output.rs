//! Standard output, where a reader may go away at any moment (`paguro inspect | head`): nothing here panics then, as
//! `println!` would; the error ends the program quietly.

use std::io::{self, StdoutLock, Write};

use serde_json::Value;

use crate::failure::Outcome;

/// Standard output, locked for as long as the answer takes.
pub struct Output {
    out: StdoutLock<'static>,
}

impl Output {
    /// Takes standard output.
    pub fn new() -> Self {
        Self { out: io::stdout().lock() }
    }

    /// A line.
    ///
    /// # Errors
    /// A reader that has gone away, a full disk.
    pub fn line(&mut self, text: impl std::fmt::Display) -> Outcome<()> {
        Ok(writeln!(self.out, "{text}")?)
    }

    /// Bytes as they are.
    ///
    /// # Errors
    /// As for [`Output::line`].
    pub fn bytes(&mut self, bytes: &[u8]) -> Outcome<()> {
        self.out.write_all(bytes)?;
        Ok(self.out.flush()?)
    }

    /// A piece of text, at once.
    ///
    /// # Errors
    /// As for [`Output::line`].
    pub fn piece(&mut self, text: &str) -> Outcome<()> {
        self.bytes(text.as_bytes())
    }

    /// An object on a line of its own, at once.
    ///
    /// # Errors
    /// As for [`Output::line`].
    pub fn json(&mut self, value: &Value) -> Outcome<()> {
        self.piece(&format!("{value}\n"))
    }
}
