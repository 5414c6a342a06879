//! The APIs that are spoken here, and the one place where errors take their shapes.

use std::sync::Arc;

use axum::{
    extract::Request,
    http::{HeaderValue, header},
    middleware::Next,
    response::Response,
};
use serde_json::Value;

use crate::{anthropic, error::ApiError, ollama, openai};

/// An API with its own wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's, and everything that is nobody else's.
    OpenAi,
    /// Anthropic's.
    Anthropic,
    /// Ollama's.
    Ollama,
}

impl Dialect {
    /// The API that a path belongs to.
    pub fn of_path(path: &str) -> Self {
        match path {
            "/v1/messages" => Self::Anthropic,
            _ if path.starts_with("/v1/messages/") => Self::Anthropic,
            _ if path.starts_with("/api/") => Self::Ollama,
            _ => Self::OpenAi,
        }
    }

    /// An error's body.
    pub fn error(self, error: &ApiError) -> Value {
        match self {
            Self::OpenAi => openai::error::body(error),
            Self::Anthropic => anthropic::error::body(error),
            Self::Ollama => ollama::error::body(error),
        }
    }
}

/// Writes the body of every error that a handler or a layer below has answered with.
pub async fn shape_errors(request: Request, next: Next) -> Response {
    let dialect = Dialect::of_path(request.uri().path());
    let mut response = next.run(request).await;
    // It stays among the extensions for the line in the log.
    if let Some(error) = response.extensions().get::<Arc<ApiError>>().cloned() {
        if error.status().is_server_error() {
            tracing::debug!(%error, "refused");
        }
        *response.body_mut() = dialect.error(&error).to_string().into();
        let json = HeaderValue::from_static("application/json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
    }
    response
}
