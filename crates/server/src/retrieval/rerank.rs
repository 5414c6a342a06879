//! `/v1/rerank`, `/v2/rerank` and `/rerank`: documents in the order in which they fit a query, as Jina, Cohere, vLLM and TEI have
//! it.

use std::{cmp::Ordering, sync::Arc};

use axum::{extract::State, response::Response};
use serde::{Deserialize, Deserializer, Serialize};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use super::params::{TruncationParams, model_or_default};
use crate::{
    AppState,
    count::ClientCount,
    error::ApiError,
    extract::{Json, written},
    generate::{self, Caller, Field, RankRequest},
    ids,
    openai::embeddings::EmbeddingUsage,
    wire::{Body, Other, left_out, no_effect, refused},
};

/// A query, and documents that may answer it.
#[derive(Debug, Deserialize, ToSchema)]
pub struct RerankRequest {
    /// The model's name, as `/v1/models` lists it; the first model that the server was started with if absent.
    pub model: Option<String>,
    /// The query.
    pub query: String,
    /// The documents: texts, or objects with a `text`.
    pub documents: Option<Vec<DocumentParam>>,
    /// The documents in TEI's words. The answer has TEI's form then.
    pub texts: Option<Vec<String>>,
    /// Number of documents in the answer, the best ones; all if absent or 0.
    pub top_n: Option<ClientCount>,
    /// Whether the answer has the documents' texts; if absent, false for `/v2/rerank` and true otherwise.
    pub return_documents: Option<bool>,
    /// Whether the answer has the texts, with `texts`; false if absent.
    pub return_text: Option<bool>,
    /// Whether scores are logits. Otherwise they are between 0 and 1.
    pub raw_scores: Option<bool>,
    /// The task, for rerankers that read one, in place of the model's own: `Given a web search query, ...`.
    pub instruction: Option<String>,
    #[serde(flatten)]
    pub truncation: TruncationParams,
}

/// Known fields without an implementation that all requests for scores or labels share.
pub const COMMON: [Other; 3] = [
    no_effect("user", "the server does not tell anybody about users"),
    left_out("priority", &["0"], "requests of a client are equal"),
    left_out("request_id", &[], "the server makes its own; the header `X-Request-Id` sets it"),
];

/// Known fields of requests for scores that have no implementation.
pub const OTHERS: &[Other] = &[refused("use_activation", &["true"], "`raw_scores` returns logits")];

impl Body for RerankRequest {
    const OTHERS: &'static [&'static [Other]] = &[
        &COMMON,
        OTHERS,
        &[
            refused("rank_fields", &["[\"text\"]"], "of documents that are objects, `text` is read"),
            left_out("max_chunks_per_doc", &[], "documents are not cut into chunks"),
            left_out("max_tokens_per_doc", &[], "`truncate_prompt_tokens` bounds the whole prompt"),
        ],
    ];
}

/// A document.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum DocumentParam {
    /// Its text.
    Text(String),
    /// An object with its text.
    Object(Document),
}

/// A document's text.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Document {
    /// The text.
    pub text: String,
}

impl<'de> Deserialize<'de> for DocumentParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a text, or an object with a `text`")
            .string(|text| Ok(Self::Text(text.to_owned())))
            .map(|object| object.deserialize().map(Self::Object))
            .deserialize(deserializer)
    }
}

/// Documents, the best one first.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum RerankAnswer {
    /// As Jina, Cohere and vLLM write it.
    Results(RerankList),
    /// As TEI writes it.
    Ranks(Vec<Rank>),
}

/// Documents, the best one first.
#[derive(Debug, Serialize, ToSchema)]
pub struct RerankList {
    id: String,
    /// Always `list`.
    object: &'static str,
    model: String,
    results: Vec<RerankResult>,
    usage: EmbeddingUsage,
}

/// A document's score.
#[derive(Debug, Serialize, ToSchema)]
pub struct RerankResult {
    /// Position of the document in the request.
    index: usize,
    /// Its score.
    relevance_score: f32,
    /// The document.
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document>,
}

/// A document's score, as TEI writes it.
#[derive(Debug, Serialize, ToSchema)]
pub struct Rank {
    /// Position of the document in the request.
    index: usize,
    /// The document.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// Its score.
    score: f32,
}

/// Sorts documents by how well they fit a query.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/v1/rerank", tag = "Retrieval", request_body = RerankRequest,
    responses((status = 200, body = RerankAnswer)),
)]
pub async fn v1(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<RerankRequest>,
) -> Result<Response, ApiError> {
    rerank(state, caller, body, true).await
}

/// Sorts documents by how well they fit a query, as Cohere's API does: without their texts.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/v2/rerank", tag = "Retrieval", request_body = RerankRequest,
    responses((status = 200, body = RerankAnswer)),
)]
pub async fn v2(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<RerankRequest>,
) -> Result<Response, ApiError> {
    rerank(state, caller, body, false).await
}

/// Sorts documents by how well they fit a query; with `texts` as TEI does it.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/rerank", tag = "Retrieval", request_body = RerankRequest,
    responses((status = 200, body = RerankAnswer)),
)]
pub async fn short(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<RerankRequest>,
) -> Result<Response, ApiError> {
    rerank(state, caller, body, true).await
}

async fn rerank(
    state: AppState,
    caller: Caller,
    body: RerankRequest,
    with_documents: bool,
) -> Result<Response, ApiError> {
    let (documents, field, is_tei) = match (body.documents, body.texts) {
        (Some(documents), None) => {
            let text = |document| match document {
                DocumentParam::Text(text) | DocumentParam::Object(Document { text }) => text,
            };
            (documents.into_iter().map(text).collect(), Field::list("documents"), false)
        }
        (None, Some(texts)) => (texts, Field::list("texts"), true),
        (None, None) => return Err(ApiError::invalid("documents", "give at least one document")),
        _ => return Err(ApiError::invalid("documents", "give either `documents` or `texts`")),
    };
    check_texts(&documents, field)?;
    if body.query.is_empty() {
        return Err(ApiError::invalid("query", "`query` is an empty text"));
    }
    let returns =
        if is_tei { body.return_text == Some(true) } else { body.return_documents.unwrap_or(with_documents) };
    let count = documents.len();
    let most = body.top_n.map_or(count, |top| match top.at_most(count) {
        0 => count,
        top => top,
    });
    let query: Arc<str> = body.query.into();
    let texts = if returns { documents.clone() } else { Vec::new() };
    let request = RankRequest {
        pairs: documents.into_iter().map(|document| (query.clone(), document)).collect(),
        field,
        instruction: body.instruction,
        truncation: body.truncation.read()?,
        raw: body.raw_scores == Some(true),
    };
    let model = model_or_default(&state, body.model).await?;
    let client = caller.client.clone();
    let ranked = generate::rank(&state, caller, &model, request).await?;
    let answer = move || {
        let mut texts: Vec<Option<String>> = texts.into_iter().map(Some).collect();
        let mut text = |index: usize| texts.get_mut(index).and_then(Option::take);
        let best = best(&ranked.scores, most);
        if is_tei {
            let ranks = best.into_iter().map(|(index, score)| Rank { index, text: text(index), score });
            return RerankAnswer::Ranks(ranks.collect());
        }
        let results = best.into_iter().map(|(index, relevance_score)| {
            let document = text(index).map(|text| Document { text });
            RerankResult { index, relevance_score, document }
        });
        RerankAnswer::Results(RerankList {
            id: ids::new("rerank-"),
            object: "list",
            results: results.collect(),
            model: ranked.model,
            usage: EmbeddingUsage { prompt_tokens: ranked.tokens, total_tokens: ranked.tokens },
        })
    };
    written(&state, &client, answer).await
}

/// Refuses lists without texts, and texts without characters, by index.
///
/// # Errors
/// The first one.
pub fn check_texts(texts: &[String], field: Field) -> Result<(), ApiError> {
    if texts.is_empty() {
        return Err(ApiError::invalid(field.name, format!("`{}` is an empty list", field.name)));
    }
    match texts.iter().position(String::is_empty) {
        Some(index) => {
            let param = field.at(index);
            let message = format!("`{param}` is an empty text; leave it out");
            Err(ApiError::invalid(param, message))
        }
        None => Ok(()),
    }
}

/// The best `most` scores with their positions, the best one first; of equal ones the first one.
pub fn best(scores: &[f32], most: usize) -> Vec<(usize, f32)> {
    let mut best: Vec<(usize, f32)> = scores.iter().copied().enumerate().collect();
    best.sort_by(|(a, x), (b, y)| y.partial_cmp(x).unwrap_or(Ordering::Equal).then(a.cmp(b)));
    best.truncate(most);
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_scores_come_first() {
        assert_eq!(best(&[0.2, 0.9, 0.2, 0.5], 3), [(1, 0.9), (3, 0.5), (0, 0.2)]);
        assert_eq!(best(&[], 3), []);
    }
}
