//! Errors in the format of Anthropic's API.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::ApiError;

/// Body of an error, and of the event that aborts a stream.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicErrorBody)]
pub struct ErrorBody {
    /// Always `error`.
    r#type: &'static str,
    error: ErrorObject,
}

/// Description of an error.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicErrorObject)]
pub struct ErrorObject {
    /// Type of the error.
    r#type: &'static str,
    /// Message for people.
    message: String,
}

impl ErrorBody {
    /// Returns the body of an error.
    pub fn new(error: &ApiError) -> Self {
        let r#type = match error {
            ApiError::Invalid { .. }
            | ApiError::UnknownField { .. }
            | ApiError::ContextTooLong { .. }
            | ApiError::InputTooLong { .. }
            | ApiError::MethodNotAllowed { .. }
            | ApiError::BodyTimeout(_)
            | ApiError::BodyTooSlow { .. } => "invalid_request_error",
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
            // Clients search for this wording and then shorten the conversation.
            ApiError::ContextTooLong { tokens, limit } => format!(
                "prompt is too long: {tokens} tokens > {limit} maximum; shorten it, or start the server with a larger --ctx"
            ),
            other => other.to_string(),
        };
        Self { r#type: "error", error: ErrorObject { r#type, message } }
    }
}

/// Body of an error.
pub fn body(error: &ApiError) -> Value {
    serde_json::to_value(ErrorBody::new(error)).unwrap_or_default()
}
