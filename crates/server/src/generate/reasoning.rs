//! Requested reasoning.

use paguro_model_output::Format as OutputFormat;
use serde_json::{Map, Value, json};

use crate::{error::ApiError, wire::Tolerance};

/// Requested reasoning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasoning {
    /// Switches reasoning on or off; `None` leaves it to the model's template.
    pub enabled: Option<bool>,
    /// Effort, with the names that templates use: `low`, `medium`, `high`.
    pub effort: Option<String>,
    /// Limit of reasoning tokens. At the limit, reasoning is closed and the answer begins.
    pub budget: Option<usize>,
    /// True if the request is refused for a model without reasoning. Otherwise the option is ignored.
    pub demanded: bool,
    /// Field of the request that sets it.
    pub param: &'static str,
}

/// Limits of reasoning tokens by effort, for templates without efforts. Higher efforts have no limit.
const EFFORTS: &[(&str, usize)] = &[("minimal", 256), ("low", 1024), ("medium", 4096)];

impl Reasoning {
    /// Converts an effort of OpenAI's scale from the field `param`.
    ///
    /// # Errors
    /// An unknown effort.
    pub fn from_effort(effort: Option<String>, param: &'static str) -> Result<Self, ApiError> {
        match effort.as_deref() {
            None => Ok(Self { param, ..Self::default() }),
            Some("none") => Ok(Self { enabled: Some(false), param, ..Self::default() }),
            Some("minimal" | "low" | "medium" | "high" | "xhigh" | "max") => {
                Ok(Self { effort, param, ..Self::default() })
            }
            Some(other) => {
                let message =
                    format!("`{param}` is none, minimal, low, medium, high, xhigh or max, not `{other}`");
                Err(ApiError::invalid(param, message))
            }
        }
    }

    /// Sets the template's variables for reasoning in `extra`. Returns the limit of reasoning tokens, if there is one.
    ///
    /// # Errors
    /// The model does not reason, and reasoning is demanded or the request is strict.
    pub(super) fn write(
        &self,
        format: &OutputFormat,
        template: &str,
        extra: &mut Map<String, Value>,
        tolerance: &Tolerance,
    ) -> Result<Option<usize>, ApiError> {
        let mut switches = ["enable_thinking", "thinking"].into_iter();
        let switch = switches.find(|name| template.contains(name) && !template.contains("message.thinking"));
        let level = template.contains("reasoning_effort");
        let thinks = switch.is_some() || level || format.reasons();
        let off = self.enabled == Some(false) || self.budget == Some(0);
        if !thinks {
            if !off && *self != (Self { param: self.param, ..Self::default() }) {
                let message = "the model does not reason: its chat template knows no reasoning";
                if self.demanded && self.enabled == Some(true) {
                    return Err(ApiError::invalid(self.param, format!("`{}`: {message}", self.param)));
                }
                tolerance.leave_out(self.param, message)?;
            }
            return Ok(None);
        }
        if off {
            match switch {
                Some(name) => drop(extra.insert(name.into(), json!(false))),
                // Reasoning that the model begins is closed at once.
                None => return Ok(Some(0)),
            }
            return Ok(self.budget);
        }
        let hinted = self.effort.is_some() || self.budget.is_some();
        if let Some(name) = switch.filter(|_| self.enabled == Some(true) || (hinted && !level)) {
            extra.insert(name.into(), json!(true));
        }
        let mut budget = self.budget;
        match &self.effort {
            Some(effort) if level => drop(extra.insert("reasoning_effort".into(), json!(effort))),
            // Without efforts in the template, a limit replaces them.
            Some(effort) => {
                let most = EFFORTS.iter().find(|(name, _)| name == effort).map(|(_, most)| *most);
                budget = budget.into_iter().chain(most).min();
            }
            None => {}
        }
        Ok(budget)
    }
}
