//! Errors in the format of OpenAI's API.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::ApiError;

/// Body of an error.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody<'e> {
    error: ErrorObject<'e>,
}

/// Description of an error.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorObject<'e> {
    /// Message for people.
    message: String,
    /// Type of the error.
    r#type: &'static str,
    /// Name of the field.
    param: Option<&'e str>,
    /// Code for programs.
    code: Option<&'static str>,
}

/// Body of an error.
pub fn body(error: &ApiError) -> Value {
    let (r#type, code) = match error {
        ApiError::Invalid { .. } => ("invalid_request_error", Some("invalid_value")),
        ApiError::UnknownField { .. } => ("invalid_request_error", Some("unknown_parameter")),
        ApiError::ContextTooLong { .. } | ApiError::InputTooLong { .. } => {
            ("invalid_request_error", Some("context_length_exceeded"))
        }
        ApiError::Unauthorized(_) => ("invalid_request_error", Some("invalid_api_key")),
        ApiError::Forbidden(_) => ("permission_error", None),
        ApiError::ModelNotFound(_) => ("invalid_request_error", Some("model_not_found")),
        ApiError::NotFound(_) => ("invalid_request_error", Some("not_found")),
        ApiError::MethodNotAllowed { .. } => ("invalid_request_error", Some("method_not_allowed")),
        ApiError::BodyTimeout(_) | ApiError::BodyTooSlow { .. } => {
            ("invalid_request_error", Some("request_timeout"))
        }
        ApiError::BodyTooLarge { .. } => ("invalid_request_error", Some("request_too_large")),
        ApiError::QueueFull(_) => ("rate_limit_error", Some("rate_limit_exceeded")),
        ApiError::Timeout(_) => ("server_error", Some("timeout")),
        ApiError::Unavailable(_) => ("server_error", Some("unavailable")),
        ApiError::InsufficientMemory(_) => ("server_error", Some("insufficient_memory")),
        ApiError::Internal(_) => ("server_error", None),
    };
    let error = ErrorObject { message: error.to_string(), r#type, param: error.param(), code };
    serde_json::to_value(ErrorBody { error }).unwrap_or_default()
}
