//! Tokens of a sequence.

use std::ops::Deref;

/// Tokens of a prompt and its answer, by position. All of them are final: a token is appended after its step.
///
/// During a step that checks a draft, its tokens follow them. They are in no length and in no slice of the final ones.
#[derive(Clone, Debug)]
pub(crate) struct Tokens {
    ids: Vec<u32>,
    /// Number of tokens of the prompt.
    prompt: usize,
    /// Number of drafted tokens at the end.
    drafted: usize,
}

impl Tokens {
    /// Returns the tokens of a prompt, before its answer.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self { prompt: prompt.len(), ids: prompt, drafted: 0 }
    }

    /// Returns the number of tokens of the prompt.
    pub fn prompt(&self) -> usize {
        self.prompt
    }

    /// Returns the number of tokens of the answer.
    pub fn generated(&self) -> usize {
        self.len() - self.prompt
    }

    /// Appends a token of the answer.
    pub fn push(&mut self, token: u32) {
        debug_assert!(self.drafted == 0, "a draft is removed before its tokens are accepted");
        self.ids.push(token);
    }

    /// Adds a draft of the tokens that follow.
    pub fn set_draft(&mut self, draft: &[u32]) {
        self.clear_draft();
        self.ids.extend_from_slice(draft);
        self.drafted = draft.len();
    }

    /// Removes the draft.
    pub fn clear_draft(&mut self) {
        self.ids.truncate(self.len());
        self.drafted = 0;
    }

    /// Returns all tokens with those of the draft.
    pub fn with_draft(&self) -> &[u32] {
        &self.ids
    }
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids[..self.ids.len() - self.drafted]
    }
}
