//! Parts that several endpoints of OpenAI's API share.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{self, Finish},
};

/// One, or a list.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum OneOrMany<T> {
    /// One.
    One(T),
    /// A list.
    Many(Vec<T>),
}

impl<'de> Deserialize<'de> for OneOrMany<String> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a string or a list of strings")
            .string(|text| Ok(Self::One(text.to_owned())))
            .seq(|list| list.deserialize().map(Self::Many))
            .deserialize(deserializer)
    }
}

impl<T> OneOrMany<T> {
    /// All of them.
    pub fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// A text, or a list of parts.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Content<P> {
    /// A text.
    Text(String),
    /// Parts.
    Parts(Vec<P>),
}

impl<'de, P: DeserializeOwned> Deserialize<'de> for Content<P> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a string or a list of content parts")
            .string(|text| Ok(Self::Text(text.to_owned())))
            .seq(|list| list.deserialize().map(Self::Parts))
            .deserialize(deserializer)
    }
}

/// Tokens that were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of all answers.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Of the prompt's.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Of the answers'.
    pub completion_tokens_details: CompletionTokensDetails,
}

/// What the prompt's tokens were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Tokens that did not have to be computed: the prefix cache had them.
    pub cached_tokens: usize,
}

/// What the answers' tokens were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionTokensDetails {
    /// Tokens that the model thought with.
    pub reasoning_tokens: usize,
}

impl From<generate::Usage> for Usage {
    fn from(usage: generate::Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: usage.cached },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens: usage.reasoning },
        }
    }
}

/// Why an answer has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model has said all, or a stop string came up.
    Stop,
    /// The limit is reached, or the context is full.
    Length,
    /// The model has called tools.
    ToolCalls,
}

impl From<&Finish> for FinishReason {
    fn from(reason: &Finish) -> Self {
        match reason {
            Finish::Stop | Finish::StopString(_) => Self::Stop,
            Finish::Length => Self::Length,
            Finish::ToolCalls => Self::ToolCalls,
        }
    }
}

/// How a stream is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    /// Sends one more chunk at the end, with the tokens that were used.
    pub include_usage: Option<bool>,
    /// Must be false or absent: chunks are not padded.
    pub include_obfuscation: Option<bool>,
}

impl StreamOptions {
    /// Whether usage is wanted.
    ///
    /// # Errors
    /// Options without a stream, or that cannot be honoured.
    pub fn check(options: Option<Self>, stream: bool) -> Result<bool, ApiError> {
        let Some(options) = options else { return Ok(false) };
        if !stream {
            return Err(ApiError::invalid("stream_options", "`stream_options` needs `stream`: true"));
        }
        if options.include_obfuscation == Some(true) {
            let message = "`stream_options.include_obfuscation` is not supported: chunks are not padded";
            return Err(ApiError::invalid("stream_options.include_obfuscation", message));
        }
        Ok(options.include_usage == Some(true))
    }
}

/// Refuses a field that exists in OpenAI's API and asks for what does not exist here. `null` asks for nothing.
///
/// # Errors
/// If it is there.
pub fn refuse<T>(value: &Option<T>, param: &str, why: impl fmt::Display) -> Result<(), ApiError> {
    match value {
        Some(_) => Err(ApiError::invalid(param, format!("`{param}` is not supported: {why}"))),
        None => Ok(()),
    }
}

/// `logit_bias` as it is sent: tokens are keys, and keys are text.
pub type LogitBias = std::collections::BTreeMap<String, f32>;

/// The tokens and what is added to their logits.
///
/// # Errors
/// A key that is no token, a value outside of -100 to 100.
pub fn logit_bias(bias: Option<LogitBias>) -> Result<Vec<(u32, f32)>, ApiError> {
    let entry = |(key, value): (String, f32)| {
        let param = format!("logit_bias.{key}");
        let Ok(token) = key.parse() else {
            return Err(ApiError::invalid(param, format!("`{key}` in `logit_bias` is not a token's number")));
        };
        if !(-100.0..=100.0).contains(&value) {
            return Err(ApiError::invalid(
                param,
                format!("the bias of a token is between -100 and 100, not {value}"),
            ));
        }
        Ok((token, value))
    };
    bias.into_iter().flatten().map(entry).collect()
}

/// The limit of an answer's tokens: at least one.
///
/// # Errors
/// Zero.
pub fn at_least_one(value: Option<usize>, param: &str) -> Result<Option<usize>, ApiError> {
    match value {
        Some(0) => Err(ApiError::invalid(param, format!("`{param}` must be at least 1"))),
        value => Ok(value),
    }
}

/// At most four, as OpenAI has it, would refuse what works; an empty one would end every answer at once.
///
/// # Errors
/// An empty one.
pub fn stop(stop: Option<OneOrMany<String>>) -> Result<Vec<String>, ApiError> {
    let stop = stop.map(OneOrMany::into_vec).unwrap_or_default();
    if stop.iter().any(String::is_empty) {
        return Err(ApiError::invalid(
            "stop",
            "`stop` has an empty string, which would end every answer at once",
        ));
    }
    Ok(stop)
}
