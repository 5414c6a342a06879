//! The supported APIs, and the format of errors in each.

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
    /// OpenAI's API, and all paths outside of the other APIs.
    OpenAi,
    /// Anthropic's API.
    Anthropic,
    /// Ollama's API.
    Ollama,
}

impl Dialect {
    /// Returns the API of a path.
    pub fn of_path(path: &str) -> Self {
        match path {
            "/v1/messages" => Self::Anthropic,
            _ if path.starts_with("/v1/messages/") => Self::Anthropic,
            _ if path.starts_with("/api/") => Self::Ollama,
            _ => Self::OpenAi,
        }
    }

    /// Returns the body of an error.
    pub fn error(self, error: &ApiError) -> Value {
        match self {
            Self::OpenAi => openai::error::body(error),
            Self::Anthropic => anthropic::error::body(error),
            Self::Ollama => ollama::error::body(error),
        }
    }
}

/// Writes the body of each error that a handler or an inner layer has returned.
pub async fn shape_errors(request: Request, next: Next) -> Response {
    let dialect = Dialect::of_path(request.uri().path());
    let mut response = next.run(request).await;
    // The error stays among the extensions for the access log.
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
