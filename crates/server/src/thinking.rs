//! Fields that control reasoning, in the spellings of all servers. Every API that answers chats accepts all of them.
//!
//! If fields contradict each other, the first one of this order applies. Switches: `think`, `thinking`,
//! `enable_thinking`, `reasoning.enabled`, `chat_template_kwargs`, then an effort of `none`. Efforts:
//! `reasoning_effort`, `reasoning.effort`, `think`, `thinking`, `chat_template_kwargs`. Budgets: `reasoning.max_tokens`,
//! `thinking.budget_tokens`, `thinking_budget_tokens`, `reasoning_budget`, `thinking_budget`, `chat_template_kwargs`.
//! A budget of 0 switches reasoning off.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use crate::{
    count::check_length,
    error::ApiError,
    generate::Reasoning,
    wire::{Limit, Tolerance},
};

/// Maximum number of variables of a chat template.
const MAX_VARIABLES: usize = 256;

/// Fields that control reasoning.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct ReasoningParams {
    /// Effort of reasoning: `none`, `minimal`, `low`, `medium`, `high`, `xhigh`. A model that can only switch reasoning
    /// on or off reasons for all values but `none`; a model without reasoning ignores the field.
    pub reasoning_effort: Option<String>,
    /// Controls reasoning in OpenRouter's format, and in that of `/v1/responses`.
    pub reasoning: Option<ReasoningObject>,
    /// Switches reasoning on or off, or sets its effort. (From Ollama.)
    pub think: Option<Think>,
    /// Controls reasoning in Anthropic's format; hosted APIs in OpenAI's format share it.
    pub thinking: Option<Thinking>,
    /// Switches reasoning on or off: a variable of the templates of Qwen and others. (From vLLM.)
    pub enable_thinking: Option<bool>,
    /// As `reasoning.max_tokens`, which takes precedence. (From llama.cpp.)
    pub thinking_budget_tokens: Option<Limit>,
    /// As `thinking_budget_tokens`, which takes precedence. (The name of llama.cpp's flag.)
    pub reasoning_budget: Option<Limit>,
    /// As `reasoning_budget`, which takes precedence. (From Qwen's API.)
    pub thinking_budget: Option<Limit>,
    /// False to leave the text of reasoning out of the answer. (From OpenRouter.)
    pub include_reasoning: Option<bool>,
    /// `hidden` leaves the text of reasoning out of the answer. With other values it is a field of its own. (From Groq
    /// and llama.cpp.)
    pub reasoning_format: Option<String>,
    /// Variables for the model's chat template. (Extension.)
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// Controls reasoning.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReasoningObject {
    /// As `reasoning_effort`, which takes precedence.
    pub effort: Option<String>,
    /// Switches reasoning on or off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Maximum tokens of reasoning. At the limit, reasoning is closed and the answer begins. -1 for no limit. (From
    /// OpenRouter.)
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<Limit>,
    /// True to leave the text of reasoning out of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude: Option<bool>,
    /// Has no effect: reasoning is not summarized.
    pub summary: Option<String>,
    /// The older name of `summary`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generate_summary: Option<String>,
}

/// A switch of reasoning, or its effort.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Think {
    /// Switches reasoning on or off.
    Switch(bool),
    /// `low`, `medium` or `high`.
    Level(String),
}

impl<'de> Deserialize<'de> for Think {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("true, false, \"low\", \"medium\" or \"high\"")
            .bool(|switch| Ok(Self::Switch(switch)))
            .string(|level| Ok(Self::Level(level.to_owned())))
            .deserialize(deserializer)
    }
}

/// A switch of reasoning with its budget, or a switch alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Thinking {
    /// Switches reasoning on or off.
    Switch(bool),
    /// `enabled`, `disabled`, `adaptive` or `auto`, or an effort.
    Name(String),
    /// Switch and budget.
    Object(ThinkingObject),
}

/// A switch of reasoning with its budget.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = AnthropicThinking)]
pub struct ThinkingObject {
    /// `enabled`, `disabled`, or `adaptive`: the model decides.
    pub r#type: Option<String>,
    /// Maximum tokens of reasoning. At the limit, reasoning is closed and the answer begins. If absent, there is no
    /// limit. In Anthropic's API it is at least 1024 and below `max_tokens`.
    pub budget_tokens: Option<Limit>,
    /// `omitted` sends no text of reasoning; any other value sends all of it, without a summary.
    pub display: Option<String>,
}

impl<'de> Deserialize<'de> for Thinking {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("true, false, or an object with `type`")
            .bool(|switch| Ok(Self::Switch(switch)))
            .string(|name| Ok(Self::Name(name.to_owned())))
            .map(|map| map.deserialize().map(Self::Object))
            .deserialize(deserializer)
    }
}

/// Requested reasoning, from all fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestedReasoning {
    /// Requested reasoning.
    pub reasoning: Reasoning,
    /// True if its text is not part of the answer.
    pub is_hidden: bool,
    /// Variables of the chat template.
    pub template_variables: Map<String, Value>,
}

/// A switch or an effort in one field.
#[derive(Clone, Debug, Default)]
struct Setting {
    enabled: Option<bool>,
    effort: Option<String>,
}

impl ReasoningParams {
    /// Combines the fields. `effort` is the name of the API's own field for an effort.
    ///
    /// # Errors
    /// An unknown name, or the request is strict and has a field without effect.
    pub fn combine(
        self,
        effort: &'static str,
        tolerance: &Tolerance,
    ) -> Result<RequestedReasoning, ApiError> {
        let variables = self.chat_template_kwargs.unwrap_or_default();
        check_length(variables.len(), MAX_VARIABLES, "chat_template_kwargs")?;
        let reasoning = self.reasoning.unwrap_or_default();
        for (name, how) in
            [("summary", &reasoning.summary), ("generate_summary", &reasoning.generate_summary)]
        {
            if how.as_ref().is_some_and(|how| how != "auto") {
                tolerance.leave_out(&format!("reasoning.{name}"), "reasoning is not summed up")?;
            }
        }
        let think = match self.think {
            Some(Think::Switch(switch)) => Setting { enabled: Some(switch), effort: None },
            Some(Think::Level(level)) => Setting::named(level, "think", "true, false, low, medium or high")?,
            None => Setting::default(),
        };
        // As Ollama does it.
        let demanded = effort == "think" && think.enabled.is_some();
        let (thinking, thinking_budget, is_omitted) = match self.thinking {
            Some(thinking) => thinking.read(tolerance)?,
            None => Default::default(),
        };
        let mut variable = ["enable_thinking", "thinking"].into_iter().filter_map(|name| variables.get(name));
        let variable = variable.find_map(Value::as_bool);
        let switches = [
            (think.enabled, "think"),
            (thinking.enabled, "thinking"),
            (self.enable_thinking, "enable_thinking"),
            (reasoning.enabled, "reasoning.enabled"),
            (variable, "chat_template_kwargs"),
        ];
        let variable = variables.get("reasoning_effort").and_then(Value::as_str).map(str::to_owned);
        let efforts = [
            (
                self.reasoning_effort,
                if effort == "output_config.effort" { effort } else { "reasoning_effort" },
            ),
            (reasoning.effort, "reasoning.effort"),
            (think.effort, "think"),
            (thinking.effort, "thinking"),
            // The template may have names of its own.
            (variable.filter(|name| is_effort(name)), "chat_template_kwargs"),
        ];
        let variable = variables.get("thinking_budget").and_then(Value::as_u64);
        let variable = variable.and_then(|most| usize::try_from(most).ok()).map(|most| Limit(Some(most)));
        let budgets = [
            (reasoning.max_tokens, "reasoning.max_tokens"),
            (thinking_budget, "thinking"),
            (self.thinking_budget_tokens, "thinking_budget_tokens"),
            (self.reasoning_budget, "reasoning_budget"),
            (self.thinking_budget, "thinking_budget"),
            (variable, "chat_template_kwargs"),
        ];
        let switch = switches.into_iter().find_map(|(switch, param)| Some((switch?, param)));
        let budget = budgets.into_iter().find_map(|(budget, param)| Some((budget?, param)));
        let given = efforts.into_iter().find_map(|(effort, param)| Some((effort?, param)));
        let params = [switch.map(|it| it.1), given.as_ref().map(|it| it.1), budget.map(|it| it.1)];
        let (given, param) = given.map_or((None, effort), |(given, param)| (Some(given), param));
        let mut combined = Reasoning::from_effort(given, param)?;
        combined.enabled = switch.map(|it| it.0).or(combined.enabled);
        combined.budget = budget.and_then(|it| it.0.0);
        combined.param = params.into_iter().flatten().next().unwrap_or(effort);
        combined.demanded = demanded;
        let hides = match self.reasoning_format.as_deref() {
            Some("hidden") => true,
            Some("none" | "raw") => {
                tolerance.leave_out("reasoning_format", "reasoning is always a field of its own")?;
                false
            }
            _ => false,
        };
        let is_hidden =
            hides || is_omitted || self.include_reasoning == Some(false) || reasoning.exclude == Some(true);
        Ok(RequestedReasoning { reasoning: combined, is_hidden, template_variables: variables })
    }
}

fn is_effort(name: &str) -> bool {
    Reasoning::from_effort(Some(name.to_owned()), "").is_ok()
}

impl Setting {
    /// Parses the name of a switch or of an effort in the field `param`.
    fn named(name: String, param: &str, names: &str) -> Result<Self, ApiError> {
        match name.as_str() {
            "enabled" | "on" | "true" => Ok(Self { enabled: Some(true), effort: None }),
            "disabled" | "off" | "false" | "none" => Ok(Self { enabled: Some(false), effort: None }),
            "adaptive" | "auto" => Ok(Self::default()),
            effort if is_effort(effort) => Ok(Self { enabled: Some(true), effort: Some(name) }),
            other => Err(ApiError::invalid(param, format!("`{param}` is {names}, not `{other}`"))),
        }
    }
}

impl Thinking {
    /// Returns the switch, the budget, and true if the text of reasoning is left out.
    fn read(self, tolerance: &Tolerance) -> Result<(Setting, Option<Limit>, bool), ApiError> {
        let names = "enabled, disabled or adaptive";
        let object = match self {
            Self::Switch(switch) => {
                return Ok((Setting { enabled: Some(switch), effort: None }, None, false));
            }
            Self::Name(name) => return Ok((Setting::named(name, "thinking", names)?, None, false)),
            Self::Object(object) => object,
        };
        let display = object.display.as_deref();
        if display.is_some_and(|display| !["summarized", "omitted"].contains(&display)) {
            // Agents invent such values, and the answer does not depend on them.
            tolerance.leave_out("thinking.display", "reasoning is sent without a summary, or omitted")?;
        }
        let setting = match object.r#type {
            Some(name) => Setting::named(name, "thinking.type", names)?,
            None => Setting { enabled: object.budget_tokens.map(|most| most.0 != Some(0)), effort: None },
        };
        Ok((setting, object.budget_tokens, display == Some("omitted")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Whether reasoning is on, its effort, its budget, and whether its text is hidden.
    type Combined = (Option<bool>, Option<String>, Option<usize>, bool);

    fn combined(body: Value) -> Result<Combined, String> {
        let params: ReasoningParams = serde_json::from_value(body).map_err(|error| error.to_string())?;
        let combined = params.combine("reasoning_effort", &Tolerance::default());
        let RequestedReasoning { reasoning, is_hidden, .. } = combined.map_err(|error| error.to_string())?;
        Ok((reasoning.enabled, reasoning.effort, reasoning.budget, is_hidden))
    }

    #[test]
    fn every_spelling_is_understood() {
        let off = (Some(false), None, None, false);
        let on = (Some(true), None, None, false);
        let effort = |enabled, name: &str| (enabled, Some(name.to_owned()), None, false);
        let budget = |enabled, most| (enabled, None, Some(most), false);
        for (body, expected) in [
            (json!({}), (None, None, None, false)),
            (json!({"reasoning_effort": "none"}), off.clone()),
            (json!({"reasoning": {"effort": "none"}}), off.clone()),
            (json!({"reasoning": {"enabled": false}}), off.clone()),
            (json!({"enable_thinking": false}), off.clone()),
            (json!({"think": false}), off.clone()),
            (json!({"thinking": false}), off.clone()),
            (json!({"thinking": "disabled"}), off.clone()),
            (json!({"thinking": {"type": "disabled"}}), off.clone()),
            (json!({"chat_template_kwargs": {"enable_thinking": false}}), off.clone()),
            (json!({"chat_template_kwargs": {"thinking": false}}), off.clone()),
            (json!({"enable_thinking": true}), on.clone()),
            (json!({"thinking": {"type": "enabled"}}), on.clone()),
            (json!({"thinking": {"type": "adaptive"}}), (None, None, None, false)),
            (json!({"thinking": {"type": "enabled", "budget_tokens": 9}}), budget(Some(true), 9)),
            (json!({"reasoning_effort": "minimal"}), effort(None, "minimal")),
            (json!({"think": "low"}), effort(Some(true), "low")),
            (json!({"reasoning_budget": 0}), budget(None, 0)),
            (json!({"thinking_budget": 0}), budget(None, 0)),
            (json!({"thinking_budget_tokens": 7}), budget(None, 7)),
            (json!({"reasoning": {"max_tokens": 3}, "reasoning_budget": 5}), budget(None, 3)),
            (json!({"reasoning_budget": -1}), (None, None, None, false)),
            (json!({"include_reasoning": false}), (None, None, None, true)),
            (json!({"reasoning": {"exclude": true}}), (None, None, None, true)),
            (json!({"reasoning_format": "hidden"}), (None, None, None, true)),
            // The documented order.
            (json!({"enable_thinking": false, "reasoning_effort": "high"}), effort(Some(false), "high")),
            (json!({"enable_thinking": true, "reasoning_effort": "none"}), on.clone()),
            (json!({"think": false, "enable_thinking": true}), off.clone()),
            (json!({"reasoning": {"enabled": true}, "chat_template_kwargs": {"thinking": false}}), on),
        ] {
            assert_eq!(combined(body.clone()), Ok(expected), "{body}");
        }
        for wrong in
            [json!({"think": "deeply"}), json!({"thinking": {"type": "x"}}), json!({"reasoning_effort": "x"})]
        {
            assert!(combined(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
