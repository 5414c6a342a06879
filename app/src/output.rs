//! Standard output whose reader may close it at any time (`paguro inspect
//! head`). Unlike `println!` it does not panic; the error ends the program silently.

use std::io::{self, StdoutLock, Write};

use serde_json::Value;

use crate::failure::Outcome;

/// Locked standard output.
pub struct Output {
    out: StdoutLock<'static>,
}

impl Output {
    /// Locks standard output.
    pub fn new() -> Self {
        Self { out: io::stdout().lock() }
    }

    /// Writes a line.
    ///
    /// # Errors
    /// The reader has closed the output, or the disk is full.
    pub fn line(&mut self, text: impl std::fmt::Display) -> Outcome<()> {
        Ok(writeln!(self.out, "{text}")?)
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// As for [`Output::line`].
    pub fn bytes(&mut self, bytes: &[u8]) -> Outcome<()> {
        self.out.write_all(bytes)?;
        Ok(self.out.flush()?)
    }

    /// Writes a piece of text and flushes it.
    ///
    /// # Errors
    /// As for [`Output::line`].
    pub fn piece(&mut self, text: &str) -> Outcome<()> {
        self.bytes(text.as_bytes())
    }

    /// Writes an object on a line and flushes it.
    ///
    /// # Errors
    /// As for [`Output::line`].
    pub fn json(&mut self, value: &Value) -> Outcome<()> {
        self.piece(&format!("{value}\n"))
    }
}
