//! Anthropic's API.

mod answer;
pub mod count;
pub mod error;
mod history;
pub mod messages;
mod request;
mod stream;

use axum::http::HeaderMap;
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{AppState, error::ApiError, wire};

/// Returns the routes.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(messages::create)).routes(routes!(count::count))
}

/// Adds the known fields of requests to the OpenAPI document.
pub fn describe(document: &mut serde_json::Value) {
    wire::describe::<messages::MessagesRequest>(document);
    wire::describe::<count::CountTokensRequest>(document);
}

/// Supported versions of the API. The paths served here are the same in both, as far as the official clients show.
const VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];

/// Refuses a client that expects another version of the API. The header is optional.
fn check_version(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get("anthropic-version") {
        None => Ok(()),
        Some(version) if VERSIONS.iter().any(|known| version == known) => Ok(()),
        Some(version) => {
            let version = String::from_utf8_lossy(version.as_bytes());
            let message = format!("`anthropic-version` is {}, not `{version}`", VERSIONS.join(" or "));
            Err(ApiError::invalid("anthropic-version", message))
        }
    }
}

/// Replaces OpenAI's field names in errors by those of this API.
fn rename(error: ApiError) -> ApiError {
    error.renamed(&[
        ("stop", "stop_sequences"),
        ("reasoning_effort", "thinking"),
        ("response_format", "output_config.format"),
        ("prompt", "messages"),
    ])
}
