//! What a request says of DRY, and the tokens that end its repetitions.

use std::sync::Arc;

use paguro_engine::Dry;
use paguro_model::tokenizer::{SpecialTokens, Tokenizer};

use crate::{count::check_length, error::ApiError};

/// How repetitions are penalized. `None` is llama.cpp's default.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // named as the fields of `Dry` that they set
pub struct DryOptions {
    pub multiplier: Option<f32>,
    pub base: Option<f32>,
    pub allowed_length: Option<u32>,
    /// 0 is off, and all tokens below that.
    pub window: Option<i64>,
    /// Texts that end a repetition.
    pub breakers: Option<Vec<String>>,
    /// Tokens that do, once they have been found.
    pub breaking: Arc<[u32]>,
}

/// Texts that end a repetition, unless a request names others.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// Most of them, and most bytes of each.
const MAX_BREAKERS: usize = 64;
const MAX_BREAKER: usize = 64;

impl DryOptions {
    /// These, and the others' where these say nothing.
    pub fn or(self, other: Self) -> Self {
        Self {
            multiplier: self.multiplier.or(other.multiplier),
            base: self.base.or(other.base),
            allowed_length: self.allowed_length.or(other.allowed_length),
            window: self.window.or(other.window),
            breakers: self.breakers.or(other.breakers),
            breaking: self.breaking,
        }
    }

    /// Checks the lists before anything is made of them.
    ///
    /// # Errors
    /// Too many texts, or one that is too long.
    pub fn check(&self) -> Result<(), ApiError> {
        let breakers = self.breakers.as_deref().unwrap_or_default();
        check_length(breakers.len(), MAX_BREAKERS, "dry_sequence_breakers")?;
        match breakers.iter().find(|breaker| breaker.len() > MAX_BREAKER) {
            None => Ok(()),
            Some(long) => {
                let message = format!(
                    "a text of `dry_sequence_breakers` has {} bytes, at most {MAX_BREAKER}",
                    long.len()
                );
                Err(ApiError::invalid("dry_sequence_breakers", message))
            }
        }
    }

    fn is_on(&self) -> bool {
        self.multiplier.is_some_and(|multiplier| multiplier > 0.0) && self.window != Some(0)
    }

    /// Finds the tokens that end a repetition: those that have one of the texts in them, and the last token of a text that
    /// no token has.
    pub fn find_breakers(&mut self, tokenizer: &Tokenizer) {
        if !self.is_on() {
            return;
        }
        let own = BREAKERS.map(str::to_owned).to_vec();
        let breakers: Vec<_> =
            self.breakers.clone().unwrap_or(own).into_iter().filter(|text| !text.is_empty()).collect();
        let mut found = vec![false; breakers.len()];
        let mut tokens = Vec::new();
        for token in 0..tokenizer.vocab_size() as u32 {
            let bytes = tokenizer.token_bytes(token);
            for (text, found) in breakers.iter().zip(&mut found) {
                if bytes.windows(text.len()).any(|part| part == text.as_bytes()) {
                    *found = true;
                    tokens.push(token);
                }
            }
        }
        for (text, _) in breakers.iter().zip(found).filter(|(_, found)| !found) {
            tokens.extend(tokenizer.encode(text, SpecialTokens::AsText).last());
        }
        tokens.sort_unstable();
        tokens.dedup();
        self.breaking = tokens.into();
    }

    /// The sampler's values, after [`find_breakers`](Self::find_breakers).
    pub fn sampling(&self) -> Dry {
        let default = Dry::default();
        Dry {
            // A value without meaning is refused by name when the request is checked.
            multiplier: self.multiplier.filter(|_| self.window != Some(0)).unwrap_or_default(),
            base: self.base.unwrap_or(default.base),
            allowed_length: self.allowed_length.unwrap_or(default.allowed_length),
            window: self.window.and_then(|window| u32::try_from(window).ok()),
            breakers: self.breaking.clone(),
        }
    }
}
