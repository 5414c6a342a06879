//! Errors as Ollama's API writes them.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::ApiError;

/// An error's body, and the line that ends a stream too early.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaError)]
pub struct ErrorBody {
    /// What went wrong.
    error: String,
}

impl ErrorBody {
    /// The body of an error.
    pub fn new(error: &ApiError) -> Self {
        let error = match error {
            // Clients look for these words, and then offer to pull the model.
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

/// An error's body.
pub fn body(error: &ApiError) -> Value {
    serde_json::to_value(ErrorBody::new(error)).unwrap_or_default()
}
