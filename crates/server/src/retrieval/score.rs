//! `/v1/score` and `/score`, as vLLM has them.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    params::{TruncationParams, model_or_default},
    rerank::{self, check_texts},
};
use crate::{
    AppState,
    error::ApiError,
    extract::{Json, written},
    generate::{self, Caller, Field, MAX_INPUTS, RankRequest},
    ids,
    openai::embeddings::EmbeddingUsage,
    wire::{Body, OneOrMany, Other},
};

/// Pairs of texts to score: one with each of many, or two lists of equal length pair by pair.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ScoreRequest {
    /// The model's name, as `/v1/models` lists it; the first model that the server was started with if absent.
    pub model: Option<String>,
    /// The queries: a text, or a list.
    pub text_1: Option<OneOrMany<String>>,
    /// The documents: a text, or a list.
    pub text_2: Option<OneOrMany<String>>,
    /// Another name of `text_1`.
    pub queries: Option<OneOrMany<String>>,
    /// Another name of `text_2`.
    pub documents: Option<OneOrMany<String>>,
    /// Another name of `text_2`.
    pub items: Option<OneOrMany<String>>,
    /// Whether scores are logits. Otherwise they are between 0 and 1; with an embedding model they are cosines.
    pub raw_scores: Option<bool>,
    /// The task, for rerankers that read one, in place of the model's own.
    pub instruction: Option<String>,
    #[serde(flatten)]
    pub truncation: TruncationParams,
}

impl Body for ScoreRequest {
    const OTHERS: &'static [&'static [Other]] = &[&rerank::COMMON, rerank::OTHERS];
}

/// Scores.
#[derive(Debug, Serialize, ToSchema)]
pub struct ScoreList {
    id: String,
    /// Always `list`.
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: String,
    /// In the order of the pairs.
    data: Vec<Score>,
    usage: EmbeddingUsage,
}

/// The score of a pair.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PairScore)]
pub struct Score {
    /// Position of the pair.
    index: usize,
    /// Always `score`.
    object: &'static str,
    score: f32,
}

/// Scores pairs of texts: with a reranker, or by the cosine of their embeddings.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/v1/score", tag = "Retrieval", request_body = ScoreRequest,
    responses((status = 200, body = ScoreList)),
)]
pub async fn v1(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ScoreRequest>,
) -> Result<Response, ApiError> {
    let one_of = |fields: Vec<(&'static str, Option<OneOrMany<String>>)>| {
        let names: Vec<_> = fields.iter().map(|(name, _)| *name).collect();
        let mut given = fields.into_iter().filter_map(|(name, texts)| Some((name, texts?)));
        match (given.next(), given.next()) {
            (Some((name, texts)), None) => {
                let field = Field { name, is_list: matches!(texts, OneOrMany::Many(_)) };
                let texts = texts.into_vec();
                check_texts(&texts, field)?;
                Ok((texts, field))
            }
            _ => {
                let message = format!("give one of `{}`", names.join("`, `"));
                Err(ApiError::invalid(names[0], message))
            }
        }
    };
    let (first, first_field) = one_of(vec![("text_1", body.text_1), ("queries", body.queries)])?;
    let (second, field) =
        one_of(vec![("text_2", body.text_2), ("documents", body.documents), ("items", body.items)])?;
    let (left, right) = (first.len(), second.len());
    let first: Vec<Arc<str>> = first.into_iter().map(Arc::from).collect();
    let pairs = match (left, right) {
        (1, _) => second.into_iter().map(|text| (first[0].clone(), text)).collect(),
        (_, _) if left == right => first.into_iter().zip(second).collect(),
        _ => {
            let message = format!(
                "`{}` has {left} texts and `{}` has {right}; give one and many, or equally many",
                first_field.name, field.name
            );
            return Err(ApiError::invalid(first_field.name, message));
        }
    };
    let request = RankRequest {
        pairs,
        field,
        instruction: body.instruction,
        truncation: body.truncation.read()?,
        raw: body.raw_scores == Some(true),
    };
    crate::count::check_length(request.pairs.len(), MAX_INPUTS, field.name)?;
    let model = model_or_default(&state, body.model).await?;
    let client = caller.client.clone();
    let ranked = generate::score(&state, caller, &model, first_field, request).await?;
    let answer = move || {
        let scores = ranked.scores.into_iter().enumerate();
        ScoreList {
            id: ids::new("score-"),
            object: "list",
            created: ids::now(),
            model: ranked.model,
            data: scores.map(|(index, score)| Score { index, object: "score", score }).collect(),
            usage: EmbeddingUsage { prompt_tokens: ranked.tokens, total_tokens: ranked.tokens },
        }
    };
    written(&state, &client, answer).await
}

/// Scores pairs of texts: another path of `/v1/score`.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/score", tag = "Retrieval", request_body = ScoreRequest,
    responses((status = 200, body = ScoreList)),
)]
pub async fn short(
    state: State<AppState>,
    caller: Caller,
    body: Json<ScoreRequest>,
) -> Result<Response, ApiError> {
    v1(state, caller, body).await
}
