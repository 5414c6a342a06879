//! Parameters of drafts in requests. They change the speed of an answer only.

use std::sync::Arc;

use paguro_engine::{DraftOptions, MOST_DRAFTED};
use paguro_model::{Model, tokenizer::SpecialTokens};

use crate::{count::ClientCount, error::ApiError};

/// Drafts of an answer. `None` leaves them to the engine.
#[derive(Clone, Debug, Default)]
pub struct DraftParams {
    /// False for no drafts.
    pub enabled: Option<bool>,
    /// Most drafted tokens of a step.
    pub most: Option<ClientCount>,
    /// Least drafted tokens of a step.
    pub least: Option<ClientCount>,
    /// Least chance of a drafted token.
    pub least_chance: Option<f32>,
    /// Text that the answer probably resembles.
    pub prediction: Option<String>,
    /// Tokens of `prediction`, set by [`read_prediction`](Self::read_prediction).
    pub predicted: Arc<[u32]>,
}

impl DraftParams {
    /// Fills what is `None` with the values of `other`.
    pub fn or(self, other: Self) -> Self {
        Self {
            enabled: self.enabled.or(other.enabled),
            most: self.most.or(other.most),
            least: self.least.or(other.least),
            least_chance: self.least_chance.or(other.least_chance),
            prediction: self.prediction.or(other.prediction),
            predicted: self.predicted,
        }
    }

    /// Checks the values.
    ///
    /// # Errors
    /// A chance that is none.
    pub fn check(&self) -> Result<(), ApiError> {
        match self.least_chance {
            Some(chance) if !(0.0..=1.0).contains(&chance) => {
                let message = format!("`speculative.p_min` is {chance}; a chance is between 0 and 1");
                Err(ApiError::invalid("speculative.p_min", message))
            }
            _ => Ok(()),
        }
    }

    /// Tokenizes the prediction. One that exceeds the context is of no use, and is not read.
    pub fn read_prediction(&mut self, model: &Model, max_context: usize) {
        let text = self.prediction.take().unwrap_or_default();
        if self.enabled != Some(false) && super::check_text(&text, model, max_context).is_ok() {
            self.predicted = model.tokenizer.encode(&text, SpecialTokens::AsText).into();
        }
    }

    /// Returns the engine's options.
    pub fn options(self) -> DraftOptions {
        let count = |count: Option<ClientCount>| count.map(|count| count.at_most(MOST_DRAFTED));
        DraftOptions {
            most: if self.enabled == Some(false) { 0 } else { count(self.most).unwrap_or(MOST_DRAFTED) },
            least: count(self.least).unwrap_or(0),
            least_chance: f64::from(self.least_chance.unwrap_or(0.0)),
            prediction: self.predicted,
            ..DraftOptions::default()
        }
    }
}
