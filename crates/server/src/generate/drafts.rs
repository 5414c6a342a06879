//! Parameters of drafts in requests. They change the speed of an answer only.

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

    /// Returns the engine's options. A prediction that exceeds the context is of no use, and is not read.
    pub fn options(self, model: &Model, max_context: usize) -> DraftOptions {
        let text = self.prediction.unwrap_or_default();
        let is_read = self.enabled != Some(false) && super::check_text(&text, model, max_context).is_ok();
        let predicted = is_read.then(|| model.tokenizer.encode(&text, SpecialTokens::AsText).into());
        let count = |count: Option<ClientCount>| count.map(|count| count.at_most(MOST_DRAFTED));
        DraftOptions {
            most: if self.enabled == Some(false) { 0 } else { count(self.most).unwrap_or(MOST_DRAFTED) },
            least: count(self.least).unwrap_or(0),
            least_chance: f64::from(self.least_chance.unwrap_or(0.0)),
            prediction: predicted.unwrap_or_default(),
            ..DraftOptions::default()
        }
    }
}
