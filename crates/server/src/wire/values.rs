//! Types of values that several APIs share.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned, de::Error as _};
use serde_json::{Map, Value};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use super::Tolerance;
use crate::error::ApiError;

/// One value or a list.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum OneOrMany<T> {
    /// One value.
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
    /// Returns the values as a list.
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

/// Content that may also be the result of a call: a text, a list of parts, or an object, which stands for its JSON text.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Output<P> {
    /// A text.
    Text(String),
    /// Parts.
    Parts(Vec<P>),
    /// An object; only for the result of a call.
    #[schema(value_type = Object)]
    Json(Map<String, Value>),
}

impl<'de, P: DeserializeOwned> Deserialize<'de> for Output<P> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a string, a list of content parts, or an object")
            .string(|text| Ok(Self::Text(text.to_owned())))
            .seq(|list| list.deserialize().map(Self::Parts))
            .map(|map| map.deserialize().map(Self::Json))
            .deserialize(deserializer)
    }
}

impl<P> Output<P> {
    /// Returns the content with an object as a text: its JSON, or the text of a single part without its list.
    pub fn content(self) -> Content<P> {
        match self {
            Self::Text(text) => Content::Text(text),
            Self::Parts(parts) => Content::Parts(parts),
            Self::Json(object) => {
                let kind = object.get("type").and_then(Value::as_str);
                let is_part = kind.is_some_and(|kind| ["text", "input_text", "output_text"].contains(&kind));
                match object.get("text") {
                    Some(Value::String(text)) if is_part => Content::Text(text.clone()),
                    _ => Content::Text(Value::from(object).to_string()),
                }
            }
        }
    }
}

/// Returns the arguments of a call as JSON text, from JSON text or JSON; absent or empty ones are an empty object.
pub fn arguments(value: Option<Value>) -> String {
    match value {
        None | Some(Value::Null) => "{}".into(),
        Some(Value::String(text)) if text.trim().is_empty() => "{}".into(),
        Some(Value::String(text)) => text,
        Some(json) => json.to_string(),
    }
}

/// Maximum number of tokens. -1 is no limit, as in llama.cpp, vLLM and Ollama.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(value_type = i64)]
pub struct Limit(pub Option<usize>);

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match i64::deserialize(deserializer)? {
            -1 => Ok(Self(None)),
            number => match usize::try_from(number) {
                Ok(limit) => Ok(Self(Some(limit))),
                Err(_) => Err(D::Error::custom(format_args!("{number} is below 0; -1 would be no limit"))),
            },
        }
    }
}

impl Limit {
    /// Returns the maximum tokens of an answer, at least 1.
    ///
    /// # Errors
    /// The limit is 0.
    pub fn at_least_one(limit: Option<Self>, param: &str) -> Result<Option<usize>, ApiError> {
        match limit.and_then(|limit| limit.0) {
            Some(0) => Err(ApiError::invalid(param, format!("`{param}` must be at least 1"))),
            tokens => Ok(tokens),
        }
    }
}

/// Refuses an unsupported field.
///
/// # Errors
/// The field is present.
pub fn refuse<T>(value: &Option<T>, param: &str, why: impl fmt::Display) -> Result<(), ApiError> {
    match value {
        Some(_) => Err(ApiError::invalid(param, format!("`{param}` is not supported: {why}"))),
        None => Ok(()),
    }
}

/// Returns a placeholder for content that is neither text nor an image. Earlier messages are read without such content: a client cannot
/// remove it, and every later request of the conversation would be refused. Content that the request asks about
/// (`is_asked`) is refused.
///
/// # Errors
/// The content is asked about, or the request is strict.
pub fn unreadable(kind: &str, path: &str, is_asked: bool, tolerance: &Tolerance) -> Result<String, ApiError> {
    if is_asked || tolerance.is_strict() {
        let message = format!("`{path}` is `{kind}`: models here read text and images");
        return Err(ApiError::invalid(path, message));
    }
    tolerance.note(path, "models here read text and images");
    Ok(format!("[{kind} left out: this model reads text]"))
}
