//! Tokens of a sequence.

use std::ops::Deref;

/// Tokens of a prompt and its answer, by position. All of them are final: a token is appended after its step.
#[derive(Clone, Debug)]
pub(crate) struct Tokens {
    ids: Vec<u32>,
    /// Number of tokens of the prompt.
    prompt: usize,
}

impl Tokens {
    /// Returns the tokens of a prompt, before its answer.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self { prompt: prompt.len(), ids: prompt }
    }

    /// Returns the number of tokens of the prompt.
    pub fn prompt(&self) -> usize {
        self.prompt
    }

    /// Returns the number of tokens of the answer.
    pub fn generated(&self) -> usize {
        self.ids.len() - self.prompt
    }

    /// Appends a token of the answer.
    pub fn push(&mut self, token: u32) {
        self.ids.push(token);
    }
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids
    }
}
