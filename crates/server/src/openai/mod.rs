//! OpenAI's API.

pub mod adapters;
pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod error;
pub mod infill;
pub mod logprobs;
pub mod messages;
pub mod models;
mod multimodal;
pub mod props;
pub mod responses;
pub mod sampling;
pub mod tokens;
mod tools;
pub mod types;

pub use responses::ResponseStore;

use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{AppState, wire};

/// Returns the routes.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(chat::create))
        .routes(routes!(completions::create))
        .routes(routes!(infill::create))
        .routes(routes!(embeddings::create))
        .routes(routes!(responses::create))
        .routes(routes!(responses::get, responses::delete))
        .routes(routes!(tokens::tokenize))
        .routes(routes!(tokens::detokenize))
        .routes(routes!(tokens::tokenizer_info))
        .routes(routes!(models::list))
        .routes(routes!(props::props))
        .routes(routes!(adapters::list, adapters::scale))
        .routes(routes!(adapters::load))
        .routes(routes!(adapters::unload))
        // Names of models have slashes, which a path of the document cannot express.
        .route("/v1/models/{*model}", axum::routing::get(models::get))
}

/// Adds the known fields of requests to the OpenAPI document.
pub fn describe(document: &mut serde_json::Value) {
    wire::describe::<chat::ChatCompletionRequest>(document);
    wire::describe::<completions::CompletionRequest>(document);
    wire::describe::<infill::InfillRequest>(document);
    wire::describe::<embeddings::EmbeddingRequest>(document);
    wire::describe::<responses::ResponseRequest>(document);
    wire::describe::<tokens::TokenizeRequest>(document);
}
