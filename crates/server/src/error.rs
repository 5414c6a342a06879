//! Everything that a request can be told instead of an answer: one enum, mapped to a status here and to each API's
//! shape by its dialect.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use paguro_engine::{RequestError, SubmitError};
use paguro_model::{ModelError, chat::TemplateError};

use crate::{source::LoadError, units::bytes};

/// Why a request got no answer, or only the beginning of one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// A value that makes no sense, or that this server or this model cannot honour.
    #[error("{message}")]
    Invalid {
        /// Which one: `messages[0].content`. `None` if it is about the request as a whole.
        param: Option<String>,
        /// What is wrong with it and what would be right.
        message: String,
    },
    /// A field that does not exist.
    #[error("unknown field `{param}`: {hint}")]
    UnknownField {
        /// Its path.
        param: String,
        /// Name of the field to use instead, as a sentence.
        hint: String,
    },
    /// Prompt and answer do not fit. The words are those that clients of OpenAI's API look for.
    #[error(
        "This model's maximum context length is {limit} tokens. However, your prompt has {tokens} tokens, \
         and an answer needs room, too. Shorten the prompt, or start the server with a larger --ctx."
    )]
    ContextTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Most tokens of prompt and answer.
        limit: usize,
    },
    /// No key, or one that nobody knows.
    #[error("{0}")]
    Unauthorized(&'static str),
    /// A key without the scope, a `Host` or an `Origin` that is not served.
    #[error("{0}")]
    Forbidden(String),
    /// There is no such model.
    #[error("there is no model `{0}`; /v1/models lists those there are")]
    ModelNotFound(String),
    /// There is no such thing.
    #[error("{0}")]
    NotFound(String),
    /// The path exists, but not for this method.
    #[error("{path} does not take {method} requests")]
    MethodNotAllowed {
        /// What was used.
        method: String,
        /// Where.
        path: String,
    },
    /// The body did not arrive in time.
    #[error("the request's body did not arrive within {} s", .0.as_secs())]
    BodyTimeout(Duration),
    /// The body comes too slowly.
    #[error(
        "the request's body comes with fewer than {rate} bytes a second; the server's --min-body-rate says how fast it must come"
    )]
    BodyTooSlow {
        /// Least bytes in a second.
        rate: u64,
    },
    /// The body is too large.
    #[error(
        "the request's body is larger than {}; the server's --max-body says how large it may be", bytes(*limit as u64)
    )]
    BodyTooLarge {
        /// Most bytes.
        limit: usize,
    },
    /// Too many requests wait.
    #[error("{0}")]
    QueueFull(String),
    /// It did not finish in time.
    #[error("{0}")]
    Timeout(String),
    /// Not now: shutting down, or a model that could not be loaded.
    #[error("{0}")]
    Unavailable(String),
    /// There is not enough memory for the model, and waiting will not help.
    #[error("{0}")]
    InsufficientMemory(String),
    /// What should not happen.
    #[error("{0}")]
    Internal(String),
}

impl ApiError {
    /// A refused field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { param: Some(param.into()), message: message.into() }
    }

    /// An answer that was not there when its time was up.
    pub fn timeout() -> Self {
        Self::Timeout(
            "the answer was not finished in time; the header `x-request-timeout` and the server's --request-timeout say how long it may take"
                .into(),
        )
    }

    /// The same about fields that have other names in an API: pairs of the name here and the name there.
    #[must_use]
    pub fn renamed(self, names: &[(&str, &str)]) -> Self {
        match self {
            Self::Invalid { param: Some(param), message } => {
                let Some((here, there)) = names.iter().find(|(here, _)| *here == param) else {
                    return Self::Invalid { param: Some(param), message };
                };
                let message = message.replace(&format!("`{here}`"), &format!("`{there}`"));
                Self::Invalid { param: Some((*there).to_owned()), message }
            }
            other => other,
        }
    }

    /// The status that goes with it.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } | Self::UnknownField { .. } | Self::ContextTooLong { .. } => {
                StatusCode::BAD_REQUEST
            }
            Self::Unauthorized(_) => StatusCode::UNAUTHORIZED,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::ModelNotFound(_) | Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTimeout(_) | Self::BodyTooSlow { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::QueueFull(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Timeout(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::InsufficientMemory(_) => StatusCode::INSUFFICIENT_STORAGE,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Which field it is about.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Invalid { param, .. } => param.as_deref(),
            Self::UnknownField { param, .. } => Some(param),
            Self::ModelNotFound(_) => Some("model"),
            _ => None,
        }
    }

    /// When to try again, for errors that time heals.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::QueueFull(_) => Some(Duration::from_secs(1)),
            Self::Unavailable(_) => Some(Duration::from_secs(5)),
            _ => None,
        }
    }
}

/// The error travels as an extension of a response without a body; the outermost layer
/// ([`crate::dialect::shape_errors`]) writes it in the shape of the API whose path was asked.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        if let Some(wait) = self.retry_after() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(wait.as_secs()));
        }
        if matches!(self, Self::Unauthorized(_)) {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull { .. } | SubmitError::QueueTokensFull { .. } => Self::QueueFull(message),
            SubmitError::ContextTooLong { tokens, limit } => Self::ContextTooLong { tokens, limit },
            SubmitError::EmptyPrompt | SubmitError::TokenOutOfRange { .. } => {
                Self::invalid("prompt", message)
            }
            SubmitError::Invalid { field, problem } => {
                let field = match field {
                    "branches" => "n",
                    "stop_strings" => "stop",
                    other => other,
                };
                Self::invalid(field, format!("`{field}` {problem}"))
            }
            SubmitError::Sampling(invalid) => Self::invalid(invalid.field, message),
            SubmitError::Stopped { .. } => Self::Unavailable(message),
            _ => Self::Internal(message),
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::EngineStopped(_) => Self::Unavailable(message),
            RequestError::DeadlineExceeded => Self::timeout(),
            RequestError::Constraint(_) => Self::invalid("response_format", message),
            _ => Self::Internal(message),
        }
    }
}

impl From<ModelError> for ApiError {
    fn from(error: ModelError) -> Self {
        Self::Unavailable(error.to_string())
    }
}

impl From<TemplateError> for ApiError {
    /// Templates refuse chats that their model was not made for; the rest is the template's fault, but this model
    /// cannot take this chat in any case.
    fn from(error: TemplateError) -> Self {
        Self::invalid("messages", format!("the model's chat template refuses these messages: {error}"))
    }
}

impl From<LoadError> for ApiError {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::NotFound(name) => Self::ModelNotFound(name),
            LoadError::TooLarge(message) => Self::InsufficientMemory(message),
            LoadError::Ambiguous(message) | LoadError::Unsupported(message) => {
                Self::invalid("model", message)
            }
            LoadError::Invalid(message) => Self::Invalid { param: None, message },
            LoadError::Failed(message) => Self::Unavailable(message),
        }
    }
}
