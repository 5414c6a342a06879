//! Ollama's API.

mod answer;
pub mod chat;
mod defaults;
mod duration;
pub mod embed;
pub mod error;
pub mod generate;
pub mod library;
pub mod models;
mod options;
mod types;

use axum::{
    Router,
    routing::{delete, get, head, post},
};

use crate::AppState;

pub use defaults::Defaults;

/// All of its paths.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/api/generate", post(generate::generate))
        .route("/api/chat", post(chat::chat))
        .route("/api/embed", post(embed::embed))
        .route("/api/embeddings", post(embed::embeddings))
        .route("/api/tags", get(models::tags))
        .route("/api/ps", get(models::ps))
        .route("/api/show", post(models::show))
        .route("/api/pull", post(library::pull))
        .route("/api/create", post(library::create))
        .route("/api/copy", post(library::copy))
        .route("/api/delete", delete(library::delete))
        .route("/api/blobs/{digest}", head(library::has_blob).post(library::put_blob))
        .route("/api/version", get(models::version))
}
