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

/// All of its paths.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(messages::create)).routes(routes!(count::count))
}

/// Describes the known fields of its requests.
pub fn describe(document: &mut serde_json::Value) {
    wire::describe::<messages::MessagesRequest>(document);
    wire::describe::<count::CountTokensRequest>(document);
}

/// The versions of the API that are spoken here: what there is of these paths is the same in both, as far as the official
/// clients of both can tell.
const VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];

/// Refuses a client that expects another version of the API. One that says nothing (curl) gets this one.
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

/// Errors of the layer that all APIs share name fields as OpenAI does; here they have these names.
fn rename(error: ApiError) -> ApiError {
    error.renamed(&[
        ("stop", "stop_sequences"),
        ("reasoning_effort", "thinking"),
        ("response_format", "output_config.format"),
        ("prompt", "messages"),
    ])
}
