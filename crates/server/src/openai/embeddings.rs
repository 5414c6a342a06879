//! `/v1/embeddings`.

use std::collections::BTreeMap;

use axum::{extract::State, response::Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::completions::PromptParam;
use crate::{
    AppState,
    count::ClientCount,
    error::ApiError,
    extract::{Json, written},
    generate::{self, Caller, EmbedRequest, VectorKinds},
    retrieval::{EncodingFormat, OTHERS, PromptParams, TruncationParams, Vector, read_inputs},
    wire::{Body, Other},
};

/// A request for embeddings of texts.
#[derive(Debug, Deserialize, ToSchema)]
pub struct EmbeddingRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// A text, its tokens, or a list of these. Tokens are those of this model (`/tokenize`), not of OpenAI's models.
    pub input: PromptParam,
    /// Number of first values that are kept. The vector has length one again.
    pub dimensions: Option<ClientCount>,
    /// Encoding of vectors.
    pub encoding_format: Option<EncodingFormat>,
    /// The name of `encoding_format` in Jina's API.
    pub embedding_type: Option<EncodingFormat>,
    /// False for vectors as the model computes them; otherwise their length is made one.
    pub normalize: Option<bool>,
    /// False for answers without `embedding`, beside other vectors.
    pub return_dense: Option<bool>,
    /// True for weights of the text's tokens, of models like bge-m3.
    pub return_sparse: Option<bool>,
    /// True for a vector of each token, of models like bge-m3.
    pub return_colbert_vecs: Option<bool>,
    #[serde(flatten)]
    pub prompt: PromptParams,
    #[serde(flatten)]
    pub truncation: TruncationParams,
}

impl Body for EmbeddingRequest {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS];
}

/// Embeddings.
#[derive(Debug, Serialize, ToSchema)]
pub struct EmbeddingList {
    /// Always `list`.
    object: &'static str,
    /// Embeddings in the order of the texts.
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingUsage,
}

/// The embedding of a text.
#[derive(Debug, Serialize, ToSchema)]
pub struct Embedding {
    /// Always `embedding`.
    object: &'static str,
    /// Index of the text.
    index: usize,
    /// The vector of the text, unless `return_dense` is false.
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding: Option<Vector>,
    /// Weights above 0 of the text's tokens by their ids, for `return_sparse`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BTreeMap<String, f32>>)]
    lexical_weights: Option<BTreeMap<u32, f32>>,
    /// Vectors of all tokens but the first, for `return_colbert_vecs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    colbert_vecs: Option<Vec<Vector>>,
}

/// Tokens that were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct EmbeddingUsage {
    /// Tokens of all texts.
    pub prompt_tokens: usize,
    /// Equal to `prompt_tokens`.
    pub total_tokens: usize,
}

/// Computes embeddings of texts.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/v1/embeddings", tag = "OpenAI", request_body = EmbeddingRequest,
    responses((status = 200, body = EmbeddingList)),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<EmbeddingRequest>,
) -> Result<Response, ApiError> {
    let format = match (body.encoding_format, body.embedding_type) {
        (Some(one), Some(other)) if one != other => {
            let message = "`encoding_format` and `embedding_type` differ; give one of them";
            return Err(ApiError::invalid("embedding_type", message));
        }
        (one, other) => one.or(other).unwrap_or_default(),
    };
    let kinds = kinds(&body)?;
    let (inputs, field) = read_inputs(body.input, "input", &state.settings)?;
    let request = EmbedRequest {
        dimensions: body.dimensions,
        truncation: body.truncation.read()?,
        prompt: body.prompt.read()?,
        raw: body.normalize == Some(false),
        kinds,
        ..EmbedRequest::new(inputs, field)
    };
    let client = caller.client.clone();
    let embedded = generate::embed(&state, caller, &body.model, request).await?;
    let answer = move || {
        let (mut sparse, mut multi) = (embedded.sparse.into_iter(), embedded.multi_vectors.into_iter());
        let data = embedded.vectors.into_iter().enumerate().map(|(index, vector)| Embedding {
            object: "embedding",
            index,
            embedding: kinds.dense.then(|| format.write(vector)),
            lexical_weights: sparse
                .next()
                .filter(|_| kinds.sparse.is_some())
                .map(|weights| weights.into_iter().collect()),
            colbert_vecs: multi
                .next()
                .filter(|_| kinds.multi_vector.is_some())
                .map(|vectors| vectors.into_iter().map(|vector| format.write(vector)).collect()),
        });
        EmbeddingList {
            object: "list",
            data: data.collect(),
            model: embedded.model,
            usage: EmbeddingUsage { prompt_tokens: embedded.tokens, total_tokens: embedded.tokens },
        }
    };
    written(&state, &client, answer).await
}

/// Returns the kinds of vectors that a request asks for.
fn kinds(body: &EmbeddingRequest) -> Result<VectorKinds, ApiError> {
    let is_asked = |flag: Option<bool>, name| flag.filter(|flag| *flag).map(|_| name);
    let kinds = VectorKinds {
        dense: body.return_dense != Some(false),
        sparse: is_asked(body.return_sparse, "return_sparse"),
        multi_vector: is_asked(body.return_colbert_vecs, "return_colbert_vecs"),
    };
    if !kinds.dense && kinds.sparse.is_none() && kinds.multi_vector.is_none() {
        let message = "`return_dense` is false, so there is nothing to return; set `return_sparse` or `return_colbert_vecs`";
        return Err(ApiError::invalid("return_dense", message));
    }
    if !kinds.dense && body.dimensions.is_some() {
        let message = "`dimensions` is for the vector that `return_dense: false` leaves out";
        return Err(ApiError::invalid("dimensions", message));
    }
    Ok(kinds)
}
