//! Embeddings, scores and labels in the forms of Cohere, Jina, text-embeddings-inference (TEI) and vLLM. `/v1/embeddings` is in
//! [`crate::openai`].

mod classify;
mod cohere;
mod params;
mod rerank;
mod score;
mod tei;

use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{AppState, wire};

pub use params::{EncodingFormat, OTHERS, PromptParams, TruncationParams, Vector, read_inputs};

/// All of its paths.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(rerank::v1))
        .routes(routes!(rerank::v2))
        .routes(routes!(rerank::short))
        .routes(routes!(score::v1))
        .routes(routes!(score::short))
        .routes(routes!(classify::v1))
        .routes(routes!(classify::short))
        .routes(routes!(classify::predict))
        .routes(routes!(cohere::v1))
        .routes(routes!(cohere::v2))
        .routes(routes!(tei::embed))
        .routes(routes!(tei::embed_sparse))
        .routes(routes!(tei::similarity))
        .routes(routes!(tei::info))
}

/// Describes the known fields of its requests.
pub fn describe(document: &mut serde_json::Value) {
    wire::describe::<rerank::RerankRequest>(document);
    wire::describe::<score::ScoreRequest>(document);
    wire::describe::<classify::ClassifyParams>(document);
    wire::describe::<classify::PredictParams>(document);
    wire::describe::<cohere::EmbedParams>(document);
    wire::describe::<tei::EmbedParams>(document);
    wire::describe::<tei::SparseParams>(document);
}
