//! `/v1/embed` and `/v2/embed`, as Cohere has them.

use axum::{extract::State, response::Response};
use paguro_model::tokenizer::Cut;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    params::{EncodingFormat, PromptParams, TruncateParam, TruncationParams, Vector},
    rerank::check_texts,
};
use crate::{
    AppState,
    count::ClientCount,
    error::ApiError,
    extract::{Json, written},
    generate::{self, Caller, EmbedRequest, Field, Prompt, Truncation},
    ids,
    wire::{Body, Other, left_out, refused},
};

/// Texts whose embeddings are wanted.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = CohereEmbedRequest)]
pub struct EmbedParams {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// The texts.
    pub texts: Vec<String>,
    /// Encodings of the vectors; `float` if absent.
    pub embedding_types: Option<Vec<EncodingFormat>>,
    /// Number of first values that are kept.
    pub output_dimension: Option<ClientCount>,
    /// The end of a text that is cut off if it is too long: `END` if absent, `START`, or `NONE` to refuse such texts.
    pub truncate: Option<String>,
    /// Purpose of the texts: `search_query`, `search_document`, or the name of a prompt. If the model's files define a prompt
    /// for it, its text is put before each text.
    pub input_type: Option<String>,
}

impl Body for EmbedParams {
    const OTHERS: &'static [&'static [Other]] = &[&[
        refused("images", &["[]"], "models here read text only"),
        refused("inputs", &[], "models here read text only; give `texts`"),
        left_out("max_tokens", &[], "`truncate` cuts texts to what the model reads"),
        left_out("priority", &["0"], "requests of a client are equal"),
    ]];
}

/// Embeddings.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CohereEmbeddings)]
pub struct Embeddings {
    id: String,
    /// `embeddings_floats`, or `embeddings_by_type` where encodings were asked for.
    response_type: &'static str,
    embeddings: ByType,
    /// The texts.
    texts: Vec<String>,
    meta: Meta,
}

/// Vectors in the order of the texts.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ByType {
    /// Floats alone, as `/v1/embed` writes them.
    Floats(Vec<Vector>),
    /// Vectors by encoding.
    Types(Types),
}

/// Vectors by encoding.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = CohereEmbeddingTypes)]
pub struct Types {
    #[serde(skip_serializing_if = "Option::is_none")]
    float: Option<Vec<Vector>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    int8: Option<Vec<Vector>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uint8: Option<Vec<Vector>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    binary: Option<Vec<Vector>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ubinary: Option<Vec<Vector>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base64: Option<Vec<Vector>>,
}

/// About the answer.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CohereMeta)]
pub struct Meta {
    billed_units: BilledUnits,
}

/// Tokens that were used.
#[derive(Debug, Serialize, ToSchema)]
pub struct BilledUnits {
    /// Tokens of all texts.
    input_tokens: usize,
}

/// Computes embeddings of texts: as a list of vectors, unless `embedding_types` asks for encodings.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/v1/embed", tag = "Retrieval", request_body = EmbedParams,
    responses((status = 200, body = Embeddings)),
)]
pub async fn v1(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<EmbedParams>,
) -> Result<Response, ApiError> {
    embed(state, caller, body, true).await
}

/// Computes embeddings of texts, in lists by encoding.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/v2/embed", tag = "Retrieval", request_body = EmbedParams,
    responses((status = 200, body = Embeddings)),
)]
pub async fn v2(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<EmbedParams>,
) -> Result<Response, ApiError> {
    embed(state, caller, body, false).await
}

async fn embed(
    state: AppState,
    caller: Caller,
    body: EmbedParams,
    is_v1: bool,
) -> Result<Response, ApiError> {
    let field = Field::list("texts");
    check_texts(&body.texts, field)?;
    let truncation =
        TruncationParams { truncate: body.truncate.map(TruncateParam::End), ..TruncationParams::default() };
    let truncation = match truncation.truncate {
        None => Truncation::to_context(Cut::End),
        Some(_) => truncation.read()?,
    };
    let prompt = PromptParams { prompt_name: None, input_type: body.input_type }.read()?;
    let request = EmbedRequest {
        dimensions: body.output_dimension,
        truncation,
        prompt,
        ..EmbedRequest::new(body.texts.iter().cloned().map(Prompt::Text).collect(), field)
    };
    let client = caller.client.clone();
    let embedded = generate::embed(&state, caller, &body.model, request)
        .await
        .map_err(|error| error.renamed(&[("dimensions", "output_dimension")]))?;
    let answer = move || {
        let encoded = |format: EncodingFormat| {
            Some(embedded.vectors.iter().map(|vector| format.write(vector.clone())).collect::<Vec<_>>())
        };
        let (response_type, embeddings) = match body.embedding_types {
            None if is_v1 => {
                let floats = encoded(EncodingFormat::Float).unwrap_or_default();
                ("embeddings_floats", ByType::Floats(floats))
            }
            types => {
                let types = types.unwrap_or_else(|| vec![EncodingFormat::Float]);
                let of = |format| if types.contains(&format) { encoded(format) } else { None };
                let types = Types {
                    float: of(EncodingFormat::Float),
                    int8: of(EncodingFormat::Int8),
                    uint8: of(EncodingFormat::Uint8),
                    binary: of(EncodingFormat::Binary),
                    ubinary: of(EncodingFormat::Ubinary),
                    base64: of(EncodingFormat::Base64),
                };
                ("embeddings_by_type", ByType::Types(types))
            }
        };
        let meta = Meta { billed_units: BilledUnits { input_tokens: embedded.tokens } };
        Embeddings { id: ids::new("embed-"), response_type, embeddings, texts: body.texts, meta }
    };
    written(&state, &client, answer).await
}
