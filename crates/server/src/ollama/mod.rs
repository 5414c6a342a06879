//! Ollama's API.

mod answer;
pub mod chat;
pub mod create;
mod duration;
pub mod embed;
pub mod error;
pub mod generate;
pub mod library;
mod modelfile;
pub mod models;
mod options;
mod types;

use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{AppState, wire};

pub use chat::{MessageParam, messages};
pub use options::{OTHERS as OTHER_OPTIONS, OptionsParam};

/// Returns the routes.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(generate::generate))
        .routes(routes!(chat::chat))
        .routes(routes!(embed::embed))
        .routes(routes!(embed::embeddings))
        .routes(routes!(models::tags))
        .routes(routes!(models::ps))
        .routes(routes!(models::show))
        .routes(routes!(library::pull))
        .routes(routes!(create::create))
        .routes(routes!(library::copy))
        .routes(routes!(library::delete))
        .routes(routes!(library::has_blob, library::put_blob))
        .routes(routes!(models::version))
}

/// Adds the known fields of requests to the OpenAPI document.
pub fn describe(document: &mut serde_json::Value) {
    wire::describe::<generate::GenerateParams>(document);
    wire::describe::<chat::ChatParams>(document);
    wire::describe::<embed::EmbedParams>(document);
    wire::describe::<models::ShowParams>(document);
    wire::describe::<library::PullParams>(document);
    wire::describe::<create::CreateParams>(document);
}
