//! Parameters of the DRY sampler in requests.

use std::sync::Arc;

use paguro_engine::Dry;
use paguro_model::tokenizer::{SEQUENCE_BREAKERS, Tokenizer};

use crate::{count::check_length, error::ApiError};

/// Penalty of repetitions. `None` is llama.cpp's default.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // named as the fields of `Dry` that they set
pub struct DryOptions {
    pub multiplier: Option<f32>,
    pub base: Option<f32>,
    pub allowed_length: Option<u32>,
    /// 0 disables the sampler; a negative number means all tokens.
    pub window: Option<i64>,
    /// Texts that end a repetition.
    pub breakers: Option<Vec<String>>,
    /// Tokens of `breakers`, set by [`find_breakers`](Self::find_breakers).
    pub breaking: Arc<[u32]>,
}

/// Largest number of breakers, and largest size of each in bytes.
const MAX_BREAKERS: usize = 64;
const MAX_BREAKER: usize = 64;

impl DryOptions {
    /// Fills what is `None` with the values of `other`.
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

    /// Checks the sizes of the lists.
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

    /// Finds the tokens that end a repetition, if the sampler is on.
    pub fn find_breakers(&mut self, tokenizer: &Tokenizer) {
        if self.is_on() {
            self.breaking = match &self.breakers {
                Some(texts) => tokenizer.sequence_breakers(texts),
                None => tokenizer.sequence_breakers(&SEQUENCE_BREAKERS),
            }
            .into();
        }
    }

    /// Returns the sampler's parameters. [`find_breakers`](Self::find_breakers) has to be called before.
    pub fn sampling(&self) -> Dry {
        let default = Dry::default();
        Dry {
            // A value out of range is refused by name when the request is checked.
            multiplier: self.multiplier.filter(|_| self.window != Some(0)).unwrap_or_default(),
            base: self.base.unwrap_or(default.base),
            allowed_length: self.allowed_length.unwrap_or(default.allowed_length),
            window: self.window.and_then(|window| u32::try_from(window).ok()),
            breakers: self.breaking.clone(),
        }
    }
}
