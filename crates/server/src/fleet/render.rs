//! Prompts as tokens, without an answer: routers look for the server that has the prefix of a request, and need its tokens.

use axum::extract::State;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, Prompt},
    ids,
    openai::{
        chat::ChatCompletionRequest,
        completions::CompletionRequest,
        responses::{ResponseRequest, prepare},
    },
};

/// A request for `/inference/v1/generate`.
#[derive(Debug, Serialize, ToSchema)]
pub struct RenderedRequest {
    request_id: String,
    model: String,
    /// Tokens of the prompt.
    token_ids: Vec<u32>,
    /// Sampling parameters and limits.
    #[schema(value_type = Object)]
    sampling_params: Map<String, Value>,
    stream: bool,
    cache_salt: Option<String>,
    priority: i32,
    /// Always `null`.
    features: Option<Value>,
    /// Always `null`.
    kv_transfer_params: Option<Value>,
}

/// Parameters of a request besides its prompt.
#[derive(Debug, Default)]
pub struct Parameters {
    /// Beginning of its id.
    pub prefix: &'static str,
    /// Name of the model.
    pub model: String,
    /// Sampling parameters, without those that are not set.
    pub sampling: Map<String, Value>,
    /// Maximum tokens of an answer if the request has no limit.
    pub default_max_tokens: Option<usize>,
    /// True for a stream.
    pub stream: bool,
}

impl Parameters {
    /// Returns a request with these tokens for a context of `context` tokens.
    fn request(&self, token_ids: Vec<u32>, context: usize) -> RenderedRequest {
        let mut sampling_params = self.sampling.clone();
        let rest = context.saturating_sub(token_ids.len());
        let most = self.default_max_tokens.unwrap_or(rest).min(rest);
        sampling_params.entry("max_tokens").or_insert_with(|| most.into());
        let salt = sampling_params.remove("cache_salt");
        let priority = sampling_params.remove("priority");
        RenderedRequest {
            request_id: ids::new(self.prefix),
            model: self.model.clone(),
            token_ids,
            sampling_params,
            stream: self.stream,
            cache_salt: salt.and_then(|salt| salt.as_str().map(str::to_owned)),
            priority: priority.and_then(|priority| priority.as_i64()).unwrap_or(0) as i32,
            features: None,
            kv_transfer_params: None,
        }
    }
}

/// Adds the fields of `value` that are set.
pub fn set_fields(value: &impl Serialize, to: &mut Map<String, Value>) {
    // The types of parameters have string keys and no fallible parts.
    if let Ok(Value::Object(fields)) = serde_json::to_value(value) {
        to.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
    }
}

/// Returns the tokens of a chat. The model answers the same prompt in `/v1/chat/completions`.
///
/// # Errors
/// A field that is not supported, by name; a prompt that does not fit.
#[utoipa::path(
    post, path = "/v1/chat/completions/render", tag = "Routers", request_body = ChatCompletionRequest,
    responses((status = 200, body = RenderedRequest)),
)]
pub async fn chat(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ChatCompletionRequest>,
) -> Result<Json<RenderedRequest>, ApiError> {
    let mut parameters = body.parameters();
    let request = body.into_request(&caller.tolerance)?;
    let rendered = generate::render_chat(&state, &caller, &parameters.model, request).await?;
    parameters.model = rendered.model;
    Ok(Json(parameters.request(rendered.tokens, rendered.context)))
}

/// Returns the tokens of texts, one element for each.
///
/// # Errors
/// A field that is not supported, by name; a prompt that does not fit.
#[utoipa::path(
    post, path = "/v1/completions/render", tag = "Routers", request_body = CompletionRequest,
    responses((status = 200, body = Vec<RenderedRequest>)),
)]
pub async fn completion(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<CompletionRequest>,
) -> Result<Json<Vec<RenderedRequest>>, ApiError> {
    let parameters = body.parameters();
    let prompts: Vec<Prompt> = body.prompts(&state.settings)?;
    let mut requests = Vec::new();
    for prompt in prompts {
        let rendered = generate::render_text(&state, &caller, &parameters.model, prompt).await?;
        let request = parameters.request(rendered.tokens, rendered.context);
        requests.push(RenderedRequest { model: rendered.model, ..request });
    }
    Ok(Json(requests))
}

/// Returns the tokens of a turn of `/v1/responses`.
///
/// # Errors
/// A field that is not supported, by name; a prompt that does not fit.
#[utoipa::path(
    post, path = "/v1/responses/render", tag = "Routers", request_body = ResponseRequest,
    responses((status = 200, body = RenderedRequest)),
)]
pub async fn response(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ResponseRequest>,
) -> Result<Json<RenderedRequest>, ApiError> {
    let mut parameters = body.parameters();
    let (_, turn) = prepare(&state, &caller, body).await?;
    let rendered = generate::render_chat(&state, &caller, &parameters.model, turn.request).await?;
    parameters.model = rendered.model;
    Ok(Json(parameters.request(rendered.tokens, rendered.context)))
}
