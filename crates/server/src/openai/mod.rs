//! OpenAI's API.

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod error;
mod logprobs;
mod messages;
pub mod models;
pub mod props;
pub mod responses;
pub mod tokens;
pub mod types;

pub use responses::ResponseStore;

use axum::{
    Router,
    routing::{get, post},
};

use crate::AppState;

/// All of its paths.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/models", get(models::list))
        .route("/props", get(props::props))
        .route("/v1/models/{*model}", get(models::get))
}
