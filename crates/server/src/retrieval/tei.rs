//! `/embed`, `/embed_sparse`, `/similarity` and `/info`, as text-embeddings-inference has them. Its `/rerank` is in [`super::rerank`].

use axum::{extract::State, response::Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    params::{self, PromptParams, TruncationParams, model_or_default},
    rerank::check_texts,
};
use crate::{
    AppState,
    count::ClientCount,
    error::ApiError,
    extract::{Json, written},
    generate::{self, Caller, EmbedRequest, Field, MAX_INPUTS, Prompt, VectorKinds},
    openai::completions::PromptParam,
    wire::{Body, Other},
};

/// Texts whose embeddings are wanted.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = TeiEmbedRequest)]
pub struct EmbedParams {
    /// The model's name; the first model that the server was started with if absent.
    pub model: Option<String>,
    /// A text or its tokens, or a list of them.
    pub inputs: PromptParam,
    /// False for vectors as the model computes them; otherwise their length is made one.
    pub normalize: Option<bool>,
    /// Number of first values that are kept.
    pub dimensions: Option<ClientCount>,
    #[serde(flatten)]
    pub prompt: PromptParams,
    #[serde(flatten)]
    pub truncation: TruncationParams,
}

impl Body for EmbedParams {
    const OTHERS: &'static [&'static [Other]] = &[params::OTHERS];
}

/// Computes embeddings of texts: the answer is a list of vectors.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/embed", tag = "Retrieval", request_body = EmbedParams,
    responses((status = 200, body = Vec<Vec<f32>>)),
)]
pub async fn embed(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<EmbedParams>,
) -> Result<Response, ApiError> {
    let (inputs, field) = params::read_inputs(body.inputs, "inputs", &state.settings)?;
    let request = EmbedRequest {
        dimensions: body.dimensions,
        truncation: body.truncation.read()?,
        prompt: body.prompt.read()?,
        raw: body.normalize == Some(false),
        ..EmbedRequest::new(inputs, field)
    };
    let model = model_or_default(&state, body.model).await?;
    let client = caller.client.clone();
    let embedded = generate::embed(&state, caller, &model, request).await?;
    written(&state, &client, move || embedded.vectors).await
}

/// Texts whose sparse vectors are wanted.
#[derive(Debug, Deserialize, ToSchema)]
pub struct SparseParams {
    /// The model's name; the first model that the server was started with if absent.
    pub model: Option<String>,
    /// A text or its tokens, or a list of them.
    pub inputs: PromptParam,
    #[serde(flatten)]
    pub prompt: PromptParams,
    #[serde(flatten)]
    pub truncation: TruncationParams,
}

impl Body for SparseParams {
    const OTHERS: &'static [&'static [Other]] = &[params::OTHERS];
}

/// An element of a sparse vector.
#[derive(Debug, Serialize, ToSchema)]
pub struct SparseValue {
    /// Id of the token.
    index: u32,
    /// Its weight.
    value: f32,
}

/// Computes sparse vectors of texts with a model like bge-m3: the answer has a list for each text, of its tokens with weights
/// above 0.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/embed_sparse", tag = "Retrieval", request_body = SparseParams,
    responses((status = 200, body = Vec<Vec<SparseValue>>)),
)]
pub async fn embed_sparse(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<SparseParams>,
) -> Result<Response, ApiError> {
    let (inputs, field) = params::read_inputs(body.inputs, "inputs", &state.settings)?;
    let request = EmbedRequest {
        truncation: body.truncation.read()?,
        prompt: body.prompt.read()?,
        kinds: VectorKinds { dense: false, sparse: Some("model"), multi_vector: None },
        ..EmbedRequest::new(inputs, field)
    };
    let model = model_or_default(&state, body.model).await?;
    let client = caller.client.clone();
    let embedded = generate::embed(&state, caller, &model, request).await?;
    let answer = move || -> Vec<Vec<SparseValue>> {
        let values = |weights: Vec<(u32, f32)>| {
            weights.into_iter().map(|(index, value)| SparseValue { index, value }).collect()
        };
        embedded.sparse.into_iter().map(values).collect()
    };
    written(&state, &client, answer).await
}

/// A text, and others to compare with it.
#[derive(Debug, Deserialize, ToSchema)]
pub struct SimilarityRequest {
    /// The model's name; the first model that the server was started with if absent.
    pub model: Option<String>,
    /// The texts.
    pub inputs: SimilarityInput,
    /// Prompt and truncation.
    pub parameters: Option<SimilarityParams>,
}

impl Body for SimilarityRequest {}

/// A text, and others to compare with it.
#[derive(Debug, Deserialize, ToSchema)]
pub struct SimilarityInput {
    /// The text.
    pub source_sentence: String,
    /// The others.
    pub sentences: Vec<String>,
}

/// Prompt and truncation.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct SimilarityParams {
    #[serde(flatten)]
    pub prompt: PromptParams,
    #[serde(flatten)]
    pub truncation: TruncationParams,
}

/// Compares texts by the cosine of their embeddings: the answer is a list of numbers.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/similarity", tag = "Retrieval", request_body = SimilarityRequest,
    responses((status = 200, body = Vec<f32>)),
)]
pub async fn similarity(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<SimilarityRequest>,
) -> Result<Response, ApiError> {
    let SimilarityInput { source_sentence, sentences } = body.inputs;
    let parameters = body.parameters.unwrap_or_default();
    let field = Field::list("inputs.sentences");
    check_texts(&sentences, field)?;
    if source_sentence.is_empty() {
        return Err(ApiError::invalid("inputs.source_sentence", "`inputs.source_sentence` is an empty text"));
    }
    let (prompt, truncation) = (parameters.prompt.read()?, parameters.truncation.read()?);
    let model = model_or_default(&state, body.model).await?;
    let client = caller.client.clone();
    let request = |texts: Vec<String>, field| EmbedRequest {
        prompt: prompt.clone(),
        truncation,
        ..EmbedRequest::new(texts.into_iter().map(Prompt::Text).collect(), field)
    };
    let source = request(vec![source_sentence], Field::one("inputs.source_sentence"));
    let source = generate::embed(&state, caller.clone(), &model, source).await?;
    let others = generate::embed(&state, caller, &model, request(sentences, field)).await?;
    let answer = move || -> Vec<f32> {
        let dot = |vector: &Vec<f32>| source.vectors[0].iter().zip(vector).map(|(a, b)| a * b).sum();
        others.vectors.iter().map(dot).collect()
    };
    written(&state, &client, answer).await
}

/// Description of the model, as TEI has it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = TeiInfo)]
pub struct Info {
    /// The model that requests without `model` get.
    model_id: String,
    /// Most tokens of a text, as the model is or would be loaded.
    max_input_length: Option<usize>,
    /// Most texts of a request.
    max_client_batch_size: usize,
    /// Paguro's version.
    version: &'static str,
}

/// Describes the model that requests without `model` get.
///
/// # Errors
/// There is no model.
#[utoipa::path(get, path = "/info", tag = "Retrieval", responses((status = 200, body = Info)))]
pub async fn info(State(state): State<AppState>) -> Result<Json<Info>, ApiError> {
    let model_id = model_or_default(&state, None).await?;
    let entry = state.models.find(&model_id).await?;
    Ok(Json(Info {
        model_id,
        max_input_length: state.models.context(&entry),
        max_client_batch_size: MAX_INPUTS,
        version: env!("CARGO_PKG_VERSION"),
    }))
}
