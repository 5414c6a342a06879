//! `/v1/messages/count_tokens`.

use axum::{extract::State, http::HeaderMap};
use paguro_model::Model;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    check_version,
    request::{
        CacheControl, Chat, MessageParam, OutputConfig, SystemBlock, ThinkingParam, ToolChoiceParam,
        ToolParam,
    },
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller},
    openai::types::{Content, refuse},
};

/// A chat whose tokens are to be counted.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CountTokensRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// What was said so far.
    pub messages: Vec<MessageParam>,
    /// What the model is told before everything else.
    pub system: Option<Content<SystemBlock>>,
    /// What the model may call.
    pub tools: Option<Vec<ToolParam>>,
    /// Whether it may, or must.
    pub tool_choice: Option<ToolChoiceParam>,
    /// Whether the model thinks first.
    pub thinking: Option<ThinkingParam>,
    /// What the answer is to be like.
    pub output_config: Option<OutputConfig>,
    /// Has no effect: prefixes are found by their content.
    #[expect(dead_code, reason = "accepted by name, without effect")]
    pub cache_control: Option<CacheControl>,
    /// Must be `standard` or absent.
    pub speed: Option<String>,
    /// Not supported.
    pub user_profile_id: Option<String>,
    /// Not supported.
    pub workspace_id: Option<String>,
}

/// The number of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct CountTokensResponse {
    /// Tokens of the prompt, with all that the model's template adds.
    input_tokens: usize,
}

/// Counts the tokens of a prompt, and computes nothing.
///
/// # Errors
/// What cannot be honoured, by name.
#[utoipa::path(
    post, path = "/v1/messages/count_tokens", tag = "Anthropic",
    request_body = CountTokensRequest,
    responses(
        (status = 200, body = CountTokensResponse),
        (status = "4XX", body = super::error::ErrorBody),
        (status = "5XX", body = super::error::ErrorBody),
    ),
)]
pub async fn count(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Json(body): Json<CountTokensRequest>,
) -> Result<Json<CountTokensResponse>, ApiError> {
    check_version(&headers)?;
    let speed = body.speed.filter(|speed| speed != "standard");
    refuse(&speed, "speed", "answers come as fast as they can: `standard`")?;
    refuse(&body.user_profile_id, "user_profile_id", "there are no profiles")?;
    refuse(&body.workspace_id, "workspace_id", "there are no workspaces")?;
    let CountTokensRequest { messages, system, tools, tool_choice, thinking, output_config, .. } = body;
    let chat = Chat { messages, system, tools, tool_choice, thinking, output_config };
    let request = chat.into_request(None)?;
    let lease = state.models.lease(&body.model).await?;
    let max_context = lease.handle.max_context();
    let work = move |model: &Model, _: &dyn Fn() -> bool| request.prompt(model, max_context);
    let prompt = generate::off_thread(&state, &caller, &lease, work);
    let prompt = prompt.await.map_err(super::rename)?;
    Ok(Json(CountTokensResponse { input_tokens: prompt.len() }))
}
