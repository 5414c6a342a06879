//! Incremental decoding without incomplete characters.

use std::sync::Arc;

use super::{SpecialText, Tokenizer};

/// Decoder of a growing sequence of tokens. Its pieces, concatenated, equal [`Tokenizer::decode`] of the whole.
#[derive(Clone, Debug)]
pub struct DecodeStream {
    tokenizer: Arc<Tokenizer>,
    special: SpecialText,
    /// Control tokens that write their names in any case.
    shown: Arc<[u32]>,
    /// Bytes that are no character write nothing, instead of U+FFFD.
    skips_invalid: bool,
    /// True before the first text, where an initial space is dropped.
    at_start: bool,
    /// Bytes of an incomplete character: at most three.
    pending: Vec<u8>,
}

impl DecodeStream {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, special: SpecialText) -> Self {
        let at_start = tokenizer.strips_first_space;
        Self {
            tokenizer,
            special,
            shown: Arc::default(),
            skips_invalid: false,
            at_start,
            pending: Vec::new(),
        }
    }

    /// Has these control tokens write their names, hidden as the others may be.
    pub fn show(&mut self, tokens: impl Into<Arc<[u32]>>) {
        self.shown = tokens.into();
    }

    /// Leaves out bytes that are no character, which would show as U+FFFD otherwise.
    pub fn skip_invalid(&mut self) {
        self.skips_invalid = true;
    }

    /// Takes a token; returns the text that is certain now, which may be nothing.
    pub fn push(&mut self, id: u32) -> String {
        let special = if self.shown.contains(&id) { SpecialText::Show } else { self.special };
        let mut bytes = self.tokenizer.written(id, special);
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);

        let mut text = String::with_capacity(self.pending.len());
        let mut done = 0;
        loop {
            match std::str::from_utf8(&self.pending[done..]) {
                Ok(valid) => {
                    text.push_str(valid);
                    done = self.pending.len();
                    break;
                }
                Err(error) => {
                    let valid = &self.pending[done..][..error.valid_up_to()];
                    text.push_str(&String::from_utf8_lossy(valid));
                    done += error.valid_up_to();
                    // Without a length, the text ends within a character.
                    let Some(invalid) = error.error_len() else { break };
                    if !self.skips_invalid {
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                    done += invalid;
                }
            }
        }
        self.pending.drain(..done);
        text
    }

    /// Ends the text and returns the rest: an incomplete character becomes U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
