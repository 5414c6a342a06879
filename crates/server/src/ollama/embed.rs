//! `/api/embed`, and the older `/api/embeddings`.

use axum::{extract::State, response::Response};
use paguro_model::tokenizer::Cut;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    duration::KeepAlive,
    options::{self, OptionsParam},
    types::{nanoseconds, rename},
};
use crate::{
    AppState,
    count::ClientCount,
    error::ApiError,
    extract::{Json, written},
    generate::{self, Caller, EmbedRequest, Embedded, Field, Prompt, Truncation},
    retrieval::PromptParams,
    wire::{Body, OneOrMany, Other},
};

/// A request for embeddings of texts.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaEmbedRequest)]
pub struct EmbedParams {
    /// The model's name, as `/api/tags` lists it.
    model: String,
    /// A text or a list of texts. Without any, the model is loaded.
    input: Option<OneOrMany<String>>,
    /// Truncates texts that are too long, instead of refusing them; true if absent.
    truncate: Option<bool>,
    /// Number of leading values to keep; the result is normalized again.
    dimensions: Option<ClientCount>,
    /// Only `num_ctx` has an effect: nothing is sampled.
    options: Option<OptionsParam>,
    /// Time that the model stays in memory after its last use.
    keep_alive: Option<KeepAlive>,
    #[serde(flatten)]
    prompt: PromptParams,
}

impl Body for EmbedParams {
    const OTHERS: &'static [&'static [Other]] = &[options::OTHERS];
}

impl Body for EmbeddingParams {
    const OTHERS: &'static [&'static [Other]] = &[options::OTHERS];
}

/// Normalized embeddings.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaEmbeddings)]
pub struct Embeddings {
    /// The model's name in the request.
    model: String,
    /// Embeddings in the order of the texts.
    embeddings: Vec<Vec<f32>>,
    /// Time from the request to the end, in nanoseconds.
    total_duration: u64,
    /// Time until the texts were queued: loading the model and tokenizing.
    load_duration: u64,
    /// Tokens of all texts.
    prompt_eval_count: usize,
}

/// A request for the embedding of a text.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaEmbeddingRequest)]
pub struct EmbeddingParams {
    /// The model's name, as `/api/tags` lists it.
    model: String,
    /// The text. Without one, the model is loaded.
    prompt: Option<String>,
    /// Only `num_ctx` has an effect: nothing is sampled.
    options: Option<OptionsParam>,
    /// Time that the model stays in memory after its last use.
    keep_alive: Option<KeepAlive>,
}

/// An embedding, not normalized.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaEmbedding)]
pub struct Embedding {
    embedding: Vec<f32>,
}

/// Computes embeddings of texts.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/api/embed", tag = "Ollama", request_body = EmbedParams,
    responses((status = 200, body = Embeddings)),
)]
pub async fn embed(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<EmbedParams>,
) -> Result<Response, ApiError> {
    let is_list = matches!(body.input, Some(OneOrMany::Many(_)));
    let inputs = match body.input {
        None => Vec::new(),
        Some(OneOrMany::One(text)) if text.is_empty() => Vec::new(),
        Some(input) => input.into_vec(),
    };
    let inputs = inputs.into_iter().map(Prompt::Text).collect();
    let request = EmbedRequest {
        dimensions: body.dimensions,
        truncation: match body.truncate {
            Some(false) => Truncation::Refuse,
            _ => Truncation::to_context(Cut::End),
        },
        context: context(body.options)?,
        prompt: body.prompt.read()?,
        ..EmbedRequest::new(inputs, Field { name: "input", is_list })
    };
    let client = caller.client.clone();
    let embedded = run(&state, caller, &body.model, request, body.keep_alive).await?;
    let timing = embedded.timing;
    let answer = move || Embeddings {
        model: body.model,
        embeddings: embedded.vectors,
        total_duration: nanoseconds(timing.received.elapsed()),
        load_duration: nanoseconds(timing.submitted - timing.received),
        prompt_eval_count: embedded.tokens,
    };
    written(&state, &client, answer).await
}

/// Computes the embedding of a text; `/api/embed` has replaced this.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/api/embeddings", tag = "Ollama", request_body = EmbeddingParams,
    responses((status = 200, body = Embedding)),
)]
pub async fn embeddings(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<EmbeddingParams>,
) -> Result<Json<Embedding>, ApiError> {
    let prompt = body.prompt.filter(|prompt| !prompt.is_empty());
    let inputs = prompt.into_iter().map(Prompt::Text).collect();
    let request = EmbedRequest {
        truncation: Truncation::to_context(Cut::End),
        context: context(body.options)?,
        raw: true,
        ..EmbedRequest::new(inputs, Field::one("prompt"))
    };
    let mut embedded = run(&state, caller, &body.model, request, body.keep_alive).await?;
    Ok(Json(Embedding { embedding: embedded.vectors.pop().unwrap_or_default() }))
}

async fn run(
    state: &AppState,
    caller: Caller,
    model: &str,
    request: EmbedRequest,
    keep_alive: Option<KeepAlive>,
) -> Result<Embedded, ApiError> {
    keep_alive.map_or(Ok(()), |KeepAlive(time)| caller.check_keep_alive(time))?;
    let name = state.models.find(model).await?.name;
    let embedded = generate::embed(state, caller, &name, request).await;
    let embedded = embedded.map_err(rename)?;
    if let Some(KeepAlive(time)) = keep_alive {
        embedded.lease.keep_alive(time);
    }
    Ok(embedded)
}

fn context(options: Option<OptionsParam>) -> Result<Option<ClientCount>, ApiError> {
    Ok(options.unwrap_or_default().into_options()?.context)
}
