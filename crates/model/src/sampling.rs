//! Sampling values that may be absent: of a model's recommendations, of flags, of presets, and of requests.

use paguro_backend::SamplingParams;

use crate::tokenizer::{SEQUENCE_BREAKERS, Tokenizer};

/// Declares the values, each with the field of [`SamplingParams`] that it sets.
macro_rules! overrides {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $($field:ident).+,)*) => {
        /// Sampling values; `None` leaves a value to weaker settings.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct SamplingOverrides {
            $($(#[$doc])* pub $name: Option<$type>,)*
            /// Texts that end a repetition of DRY, instead of [`SEQUENCE_BREAKERS`].
            pub dry_breakers: Option<Vec<String>>,
        }

        impl SamplingOverrides {
            /// Returns these values, completed by `weaker`.
            #[must_use]
            pub fn or(self, weaker: Self) -> Self {
                Self {
                    $($name: self.$name.or(weaker.$name),)*
                    dry_breakers: self.dry_breakers.or(weaker.dry_breakers),
                }
            }

            /// Sets the values in `params`; see [`Self::find_breakers`] for the texts.
            pub fn apply(&self, params: &mut SamplingParams) {
                $(if let Some(value) = &self.$name {
                    params.$($field).+ = value.clone();
                })*
            }
        }
    };
}

overrides! {
    /// Divides the logits.
    temperature: f32 => temperature,
    /// Number of tokens that are kept.
    top_k: u32 => top_k,
    /// Total probability of the tokens that are kept.
    top_p: f32 => top_p,
    /// Least probability of a token as a part of the highest one.
    min_p: f32 => min_p,
    /// Least logit of a token in standard deviations below the highest one.
    top_n_sigma: f32 => top_n_sigma,
    /// Probability of XTC in a draw.
    xtc_probability: f32 => xtc_probability,
    /// Least probability of a top choice of XTC.
    xtc_threshold: f32 => xtc_threshold,
    /// Penalty of the shortest repetition (DRY).
    dry_multiplier: f32 => dry.multiplier,
    /// Factor of that penalty for each token more.
    dry_base: f32 => dry.base,
    /// Length of the shortest repetition.
    dry_allowed_length: u32 => dry.allowed_length,
    /// Number of last tokens that DRY considers; `Some(None)` for all.
    dry_window: Option<u32> => dry.window,
    /// Factor of the logits of tokens that occur.
    repetition_penalty: f32 => repetition_penalty,
    /// Subtracted for each occurrence in the answer.
    frequency_penalty: f32 => frequency_penalty,
    /// Subtracted for tokens that occur in the answer.
    presence_penalty: f32 => presence_penalty,
    /// Number of last tokens that penalties consider; `Some(None)` for all.
    penalty_window: Option<u32> => penalty_window,
    /// Added to the logits of tokens.
    logit_bias: Vec<(u32, f32)> => logit_bias,
    /// Seed of the random numbers.
    seed: u64 => seed,
}

impl SamplingOverrides {
    /// Returns the texts that end a repetition of DRY.
    pub fn breaker_texts(&self) -> Vec<&str> {
        match &self.dry_breakers {
            Some(texts) => texts.iter().map(String::as_str).collect(),
            None => SEQUENCE_BREAKERS.to_vec(),
        }
    }

    /// Sets the tokens that end a repetition, if DRY is on. Looks at all tokens of the vocabulary.
    pub fn find_breakers(&self, params: &mut SamplingParams, tokenizer: &Tokenizer) {
        if params.dry.is_on() {
            params.dry.breakers = tokenizer.sequence_breakers(&self.breaker_texts()).into();
        }
    }
}
