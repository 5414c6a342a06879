//! Errors as Anthropic's API writes them.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::ApiError;

/// An error's body, and the event that ends a stream too early.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicErrorBody)]
pub struct ErrorBody {
    /// Always `error`.
    r#type: &'static str,
    error: ErrorObject,
}

/// What went wrong.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicErrorObject)]
pub struct ErrorObject {
    /// The kind of error.
    r#type: &'static str,
    /// For people.
    message: String,
}

impl ErrorBody {
    /// The body of an error.
    pub fn new(error: &ApiError) -> Self {
        let r#type = match error {
            ApiError::Invalid { .. }
            | ApiError::UnknownField { .. }
            | ApiError::ContextTooLong { .. }
            | ApiError::MethodNotAllowed { .. }
            | ApiError::BodyTimeout(_) => "invalid_request_error",
            ApiError::Unauthorized(_) => "authentication_error",
            ApiError::Forbidden(_) => "permission_error",
            ApiError::ModelNotFound(_) | ApiError::NotFound(_) => "not_found_error",
            ApiError::BodyTooLarge { .. } => "request_too_large",
            ApiError::QueueFull(_) => "rate_limit_error",
            ApiError::Timeout(_) => "timeout_error",
            ApiError::Unavailable(_) | ApiError::InsufficientMemory(_) => "overloaded_error",
            ApiError::Internal(_) => "api_error",
        };
        let message = match error {
            // Clients look for these words, and then shorten the conversation.
            ApiError::ContextTooLong { tokens, limit } => format!(
                "prompt is too long: {tokens} tokens > {limit} maximum; shorten it, or start the server with a larger --ctx"
            ),
            other => other.to_string(),
        };
        Self { r#type: "error", error: ErrorObject { r#type, message } }
    }
}

/// An error's body.
pub fn body(error: &ApiError) -> Value {
    serde_json::to_value(ErrorBody::new(error)).unwrap_or_default()
}
