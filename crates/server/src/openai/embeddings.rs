//! `/v1/embeddings`.

use axum::extract::State;
use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::completions::PromptParam;
use crate::{
    AppState,
    count::ClientCount,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, EmbedRequest},
    wire::{Body, Other, no_effect},
};

/// A request for embeddings of texts.
#[derive(Debug, Deserialize, ToSchema)]
pub struct EmbeddingRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// A text, its tokens, or a list of these. Tokens are those of this model (`/tokenize`), not of OpenAI's models.
    pub input: PromptParam,
    /// Number of leading values to keep; the result is normalized again.
    pub dimensions: Option<ClientCount>,
    /// Encoding of vectors.
    pub encoding_format: Option<EncodingFormat>,
}

impl Body for EmbeddingRequest {
    const OTHERS: &'static [&'static [Other]] = &[&[no_effect("user", "nobody is told about users")]];
}

/// Encoding of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    /// Lists of numbers.
    #[default]
    Float,
    /// Their 32-bit floats, little-endian, as base64.
    Base64,
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
    embedding: Vector,
}

/// A normalized vector.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Vector {
    /// Its values.
    Float(Vec<f32>),
    /// Its values as base64.
    Base64(String),
}

/// Token counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct EmbeddingUsage {
    /// Tokens of all texts.
    prompt_tokens: usize,
    /// Equal to `prompt_tokens`.
    total_tokens: usize,
}

/// Computes embeddings of texts.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/v1/embeddings", tag = "OpenAI",
    request_body = EmbeddingRequest,
    responses(
        (status = 200, body = EmbeddingList),
        (status = "4XX", body = super::error::ErrorBody<'static>),
        (status = "5XX", body = super::error::ErrorBody<'static>),
    ),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<EmbeddingRequest>,
) -> Result<Json<EmbeddingList>, ApiError> {
    let format = body.encoding_format.unwrap_or_default();
    check_texts(&body.input)?;
    let request = EmbedRequest {
        inputs: body.input.into_prompts("input", &state.settings)?,
        dimensions: body.dimensions,
        ..EmbedRequest::default()
    };
    let embedded = generate::embed(&state, caller, &body.model, request).await;
    let embedded = embedded.map_err(|error| error.renamed(&[("prompt", "input")]))?;
    let data = embedded.vectors.into_iter().enumerate().map(|(index, vector)| Embedding {
        object: "embedding",
        index,
        embedding: format.write(vector),
    });
    Ok(Json(EmbeddingList {
        object: "list",
        data: data.collect(),
        model: embedded.model,
        usage: EmbeddingUsage { prompt_tokens: embedded.tokens, total_tokens: embedded.tokens },
    }))
}

/// Refuses empty texts and lists of tokens, as OpenAI's API does: a model without an initial token has no vector for
/// them.
///
/// # Errors
/// The index of an empty input.
/// The place of an empty input.
fn check_texts(input: &PromptParam) -> Result<(), ApiError> {
    let empty = |index: Option<usize>, what: &str| {
        let param = index.map_or_else(|| "input".to_owned(), |index| format!("input[{index}]"));
        Err(ApiError::invalid(
            &param,
            format!("`{param}` is {what}, of which there is no embedding; leave it out"),
        ))
    };
    match input {
        PromptParam::Text(text) if text.is_empty() => empty(None, "an empty text"),
        PromptParam::Texts(texts) => match texts.iter().position(String::is_empty) {
            Some(index) => empty(Some(index), "an empty text"),
            None => Ok(()),
        },
        PromptParam::TokenLists(lists) => match lists.iter().position(Vec::is_empty) {
            Some(index) => empty(Some(index), "an empty list of tokens"),
            None => Ok(()),
        },
        PromptParam::Text(_) | PromptParam::Tokens(_) => Ok(()),
    }
}

impl EncodingFormat {
    fn write(self, vector: Vec<f32>) -> Vector {
        match self {
            Self::Float => Vector::Float(vector),
            Self::Base64 => {
                let bytes: Vec<u8> = vector.into_iter().flat_map(f32::to_le_bytes).collect();
                Vector::Base64(BASE64_STANDARD.encode(bytes))
            }
        }
    }
}
