//! Types that several endpoints of Ollama's API share.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paguro_model::chat::WallTime;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{Finish, Format, Timing, Usage},
    openai::types::TierTokens,
    wire::{Other, left_out},
};

/// Format of the answer: `json`, or a JSON schema.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = OllamaFormat)]
pub enum FormatParam {
    /// `json`, or empty for any text.
    Name(String),
    /// A schema.
    #[schema(value_type = Object)]
    Schema(Map<String, Value>),
}

impl<'de> Deserialize<'de> for FormatParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("\"json\" or a JSON schema")
            .string(|name| Ok(Self::Name(name.to_owned())))
            .map(|map| map.deserialize().map(Self::Schema))
            .deserialize(deserializer)
    }
}

impl FormatParam {
    /// Converts the format.
    ///
    /// # Errors
    /// An unknown name.
    pub fn format(param: Option<Self>) -> Result<Format, ApiError> {
        match param {
            None => Ok(Format::Text),
            Some(Self::Schema(schema)) => Ok(Format::JsonSchema(schema.into())),
            Some(Self::Name(name)) => match name.as_str() {
                "" => Ok(Format::Text),
                "json" => Ok(Format::JsonObject),
                other => {
                    let message = format!("`format` is `json` or a JSON schema, not `{other}`");
                    Err(ApiError::invalid("format", message))
                }
            },
        }
    }
}

/// Known fields of requests that generate text.
pub const OTHERS: &[Other] = &[left_out("shift", &["false"], "a full context ends the answer")];

/// Returns the number of most probable tokens to report; `None` without log-probabilities.
///
/// # Errors
/// The number is too large, or `logprobs` is off.
pub fn logprobs(logprobs: Option<bool>, top: Option<usize>) -> Result<Option<usize>, ApiError> {
    match (logprobs, top) {
        (_, Some(21..)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be at most 20")),
        (Some(true), top) => Ok(Some(top.unwrap_or(0))),
        (_, None | Some(0)) => Ok(None),
        (_, Some(_)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true")),
    }
}

/// Replaces OpenAI's field names in errors by those of this API.
pub fn rename(error: ApiError) -> ApiError {
    error.renamed(&[
        ("response_format", "format"),
        ("stop", "options.stop"),
        ("temperature", "options.temperature"),
        ("top_k", "options.top_k"),
        ("top_p", "options.top_p"),
        ("min_p", "options.min_p"),
        ("repetition_penalty", "options.repeat_penalty"),
        ("frequency_penalty", "options.frequency_penalty"),
        ("presence_penalty", "options.presence_penalty"),
        ("context", "options.num_ctx"),
    ])
}

/// Last fields of an answer. Durations are in nanoseconds.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = OllamaEnd)]
pub struct End {
    /// `stop`, `length`, `load` or `unload`.
    pub done_reason: &'static str,
    /// Time from the request to the last token.
    #[serde(skip_serializing_if = "Option::is_none")]
    total_duration: Option<u64>,
    /// Time from the request to the queue: loading the model and tokenizing.
    #[serde(skip_serializing_if = "Option::is_none")]
    load_duration: Option<u64>,
    /// Tokens of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_eval_count: Option<usize>,
    /// Prompt tokens found in the prefix cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cached_count: Option<usize>,
    /// Cached tokens by tier.
    #[serde(flatten)]
    tiers: Option<TierTokens>,
    /// Time from leaving the queue to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_eval_duration: Option<u64>,
    /// Tokens of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_count: Option<usize>,
    /// Time from the first token to the last; of a single token, its share of the prefill.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_duration: Option<u64>,
}

impl End {
    /// Returns the last fields of an answer.
    pub fn of(finish: &Finish, usage: Usage, timing: Timing) -> Self {
        let (prompt, decode) = timing.stages(usage.prompt - usage.cached);
        Self {
            done_reason: match finish {
                Finish::Length => "length",
                Finish::Stop | Finish::StopString(_) | Finish::ToolCalls => "stop",
            },
            total_duration: Some(nanoseconds(timing.received.elapsed())),
            load_duration: Some(nanoseconds(timing.submitted - timing.received)),
            prompt_eval_count: Some(usage.prompt),
            prompt_cached_count: (usage.cached > 0).then_some(usage.cached),
            tiers: Some(usage.into()),
            prompt_eval_duration: Some(nanoseconds(prompt)),
            eval_count: Some(usage.completion),
            eval_duration: Some(nanoseconds(decode)),
        }
    }

    /// Returns the last fields of a request that only loads or unloads a model.
    pub fn without_answer(done_reason: &'static str) -> Self {
        Self {
            done_reason,
            total_duration: None,
            load_duration: None,
            prompt_eval_count: None,
            prompt_cached_count: None,
            tiers: None,
            prompt_eval_duration: None,
            eval_count: None,
            eval_duration: None,
        }
    }
}

/// Converts a duration to nanoseconds.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the current time in the format of RFC 3339.
pub fn now() -> String {
    rfc3339(SystemTime::now())
}

/// Formats a time in UTC by RFC 3339.
pub fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let date = WallTime { seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX) };
    format!("{}.{:06}Z", date.format("%Y-%m-%dT%H:%M:%S"), since.subsec_micros())
}
