//! Tokens that end a repetition for the DRY sampler.

use super::{SpecialTokens, Tokenizer};

/// Texts that end a repetition unless others are given. llama.cpp has the same.
pub const SEQUENCE_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

impl Tokenizer {
    /// Returns the tokens that contain one of `texts`, in ascending order. A text that no token contains is represented by
    /// the last token of its encoding. Reads the whole vocabulary.
    pub fn sequence_breakers<T: AsRef<str>>(&self, texts: &[T]) -> Vec<u32> {
        let texts: Vec<_> = texts.iter().map(AsRef::as_ref).filter(|text| !text.is_empty()).collect();
        let mut found = vec![false; texts.len()];
        let mut tokens = Vec::new();
        for token in 0..self.vocab_size() as u32 {
            let bytes = self.token_bytes(token);
            for (text, found) in texts.iter().zip(&mut found) {
                if bytes.windows(text.len()).any(|part| part == text.as_bytes()) {
                    *found = true;
                    tokens.push(token);
                }
            }
        }
        for (text, _) in texts.iter().zip(found).filter(|(_, found)| !found) {
            tokens.extend(self.encode(text, SpecialTokens::AsText).last());
        }
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }
}
