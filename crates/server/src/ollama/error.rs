//! Errors in the format of Ollama's API.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::ApiError;

/// Body of an error, and the line that aborts a stream.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaError)]
pub struct ErrorBody {
    /// Description of an error.
    error: String,
}

impl ErrorBody {
    /// Returns the body of an error.
    pub fn new(error: &ApiError) -> Self {
        let error = match error {
            // Clients search for this wording and then offer to pull the model.
            ApiError::ModelNotFound(name) => format!("model '{name}' not found"),
            ApiError::ContextTooLong { tokens, limit } => format!(
                "the prompt has {tokens} tokens, but prompt and answer together can have {limit}; shorten \
                 it, or start the server with a larger --ctx"
            ),
            other => other.to_string(),
        };
        Self { error }
    }
}

/// Body of an error.
pub fn body(error: &ApiError) -> Value {
    serde_json::to_value(ErrorBody::new(error)).unwrap_or_default()
}
