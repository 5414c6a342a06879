//! `/v1/messages/count_tokens`.

use axum::{extract::State, http::HeaderMap};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    check_version,
    request::{
        self, Chat, MessageParam, OutputConfig, OutputFormat, SystemBlock, ToolChoiceParam, ToolParam,
    },
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest},
    thinking::ReasoningParams,
    wire::{Body, Content, Other, no_effect},
};

/// A request to count the tokens of a chat.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CountTokensRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// The conversation so far.
    pub messages: Vec<MessageParam>,
    /// System prompt.
    pub system: Option<Content<SystemBlock>>,
    /// Tools that the model may call.
    pub tools: Option<Vec<ToolParam>>,
    /// Permits, requires or forbids calls of tools, or requires a call of one tool.
    pub tool_choice: Option<ToolChoiceParam>,
    #[serde(flatten)]
    pub reasoning: ReasoningParams,
    /// Format and effort of the answer.
    pub output_config: Option<OutputConfig>,
    /// The older name of `output_config.format`.
    pub output_format: Option<OutputFormat>,
}

/// Known fields that are not part of a prompt.
const OTHERS: &[Other] = &[
    no_effect("max_tokens", "nothing is computed"),
    no_effect("stream", "nothing is computed"),
    no_effect("temperature", "nothing is computed"),
    no_effect("metadata", "users are not reported"),
    no_effect("mcp_servers", "tools are called by the client"),
    no_effect("context_management", "all of `messages` is read"),
];

impl Body for CountTokensRequest {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS, request::OTHERS];
}

/// A token count.
#[derive(Debug, Serialize, ToSchema)]
pub struct CountTokensResponse {
    /// Tokens of the prompt, including those of the model's template.
    input_tokens: usize,
}

/// Counts the tokens of a prompt without running the model.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/v1/messages/count_tokens", tag = "Anthropic", request_body = CountTokensRequest,
    responses((status = 200, body = CountTokensResponse)),
)]
pub async fn count(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Json(body): Json<CountTokensRequest>,
) -> Result<Json<CountTokensResponse>, ApiError> {
    check_version(&headers)?;
    let CountTokensRequest {
        messages,
        system,
        tools,
        tool_choice,
        reasoning,
        output_config,
        output_format,
        ..
    } = body;
    let chat = Chat { messages, system, tools, tool_choice, reasoning, output_config, output_format };
    let request = chat.into_request(None, &caller.tolerance)?;
    let request = ChatRequest { tolerance: caller.tolerance.clone(), ..request };
    let lease = state.models.lease(&body.model).await?;
    let prompt = generate::prompt(&state, &caller, &lease, request).await.map_err(super::rename)?;
    Ok(Json(CountTokensResponse { input_tokens: prompt.len() }))
}
