//! Errors of requests: one enum, with an HTTP status here and a format in each dialect.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use paguro_engine::{RequestError, SubmitError};
use paguro_model::{ModelError, chat::TemplateError};

use crate::{source::LoadError, units::bytes};

/// Returns the message for a missing field.
pub fn missing(param: &str) -> String {
    format!("`{param}` is missing")
}

/// Reason for which a request failed, before or during its answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// An invalid value, or one that this server or model does not support.
    #[error("{message}")]
    Invalid {
        /// Path of the field, such as `messages[0].content`; `None` for the request as a whole.
        param: Option<String>,
        /// The problem and its solution.
        message: String,
    },
    /// A field that does not exist.
    #[error("unknown field `{param}`: {hint}")]
    UnknownField {
        /// Path of the field.
        param: String,
        /// A sentence that names the field to use instead.
        hint: String,
    },
    /// Prompt and answer exceed the context. Clients of OpenAI's API search for this wording.
    #[error(
        "This model's maximum context length is {limit} tokens. However, your prompt has {tokens} tokens, \
         which leaves no room for an answer. Shorten the prompt, or start the server with a larger --ctx."
    )]
    ContextTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Maximum tokens of prompt and answer.
        limit: usize,
    },
    /// A text of several, or one that gets no answer, does not fit.
    #[error(
        "This model's maximum context length is {limit} tokens. However, `{param}` has {}{tokens} tokens. Shorten it, or let it \
         be cut with `truncate` or `truncate_prompt_tokens`.", if *is_exact { "" } else { "at least " }
    )]
    InputTooLong {
        /// The text: `input[3]`.
        param: String,
        /// Its tokens.
        tokens: usize,
        /// False if `tokens` is a lower bound.
        is_exact: bool,
        /// Most tokens of a text.
        limit: usize,
    },
    /// The key is missing or unknown.
    #[error("{0}")]
    Unauthorized(&'static str),
    /// The key lacks the scope, or the `Host` or `Origin` is not allowed.
    #[error("{0}")]
    Forbidden(String),
    /// No model has this name.
    #[error("there is no model `{0}`; /v1/models lists the models")]
    ModelNotFound(String),
    /// The requested object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The path does not support the method.
    #[error("{path} does not take {method} requests")]
    MethodNotAllowed {
        /// Method of the request.
        method: String,
        /// Path of the request.
        path: String,
    },
    /// The body did not arrive in time.
    #[error("the request's body did not arrive within {} s", .0.as_secs())]
    BodyTimeout(Duration),
    /// The body arrives too slowly.
    #[error(
        "the request's body comes with fewer than {rate} bytes a second; --min-body-rate of the server sets the minimum"
    )]
    BodyTooSlow {
        /// Minimum bytes per second.
        rate: u64,
    },
    /// The body is too large.
    #[error(
        "the request's body is larger than {}; --max-body of the server sets the limit", bytes(*limit as u64)
    )]
    BodyTooLarge {
        /// Maximum bytes.
        limit: usize,
    },
    /// The queue is full.
    #[error("{0}")]
    QueueFull(String),
    /// The request exceeded its time.
    #[error("{0}")]
    Timeout(String),
    /// The server is shutting down, or a model could not be loaded.
    #[error("{0}")]
    Unavailable(String),
    /// The model needs more memory than there is; retrying does not help.
    #[error("{0}")]
    InsufficientMemory(String),
    /// An internal error.
    #[error("{0}")]
    Internal(String),
}

impl ApiError {
    /// Returns true if the required field `name` of a body is missing.
    pub fn is_missing(&self, name: &str) -> bool {
        let Self::Invalid { param: Some(param), message } = self else { return false };
        param == name && *message == missing(name)
    }

    /// Returns an error about the field `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { param: Some(param.into()), message: message.into() }
    }

    /// Returns the error for an answer that was not finished in time.
    pub fn timeout() -> Self {
        Self::Timeout(
            "the answer was not finished in time; the header `x-request-timeout` and --request-timeout of the server set the limit"
                .into(),
        )
    }

    /// Replaces field names by those of another API, given as pairs of the name here and the name there.
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

    /// Returns the HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. }
            | Self::UnknownField { .. }
            | Self::ContextTooLong { .. }
            | Self::InputTooLong { .. } => StatusCode::BAD_REQUEST,
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

    /// Returns the field that the error is about.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Invalid { param, .. } => param.as_deref(),
            Self::UnknownField { param, .. } | Self::InputTooLong { param, .. } => Some(param),
            Self::ModelNotFound(_) => Some("model"),
            _ => None,
        }
    }

    /// Returns the `Retry-After` time of transient errors.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::QueueFull(_) => Some(Duration::from_secs(1)),
            Self::Unavailable(_) => Some(Duration::from_secs(5)),
            _ => None,
        }
    }
}

/// Stores the error as an extension of an empty response. The outermost layer ([`crate::dialect::shape_errors`]) writes
/// the body in the format of the path's API.
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
            RequestError::Picture(_) => Self::invalid("messages", message),
            RequestError::Step(_) | RequestError::NotFinite => Self::Internal(message),
        }
    }
}

impl From<ModelError> for ApiError {
    fn from(error: ModelError) -> Self {
        Self::Unavailable(error.to_string())
    }
}

impl From<TemplateError> for ApiError {
    /// A template refuses chats that its model was not trained for. Any other error is a defect of the template, but
    /// this model cannot answer the chat in either case.
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
