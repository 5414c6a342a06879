//! `/v1/messages`.

use axum::{
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{
    answer::Message,
    check_version,
    request::{
        CacheControl, Chat, MessageParam, OutputConfig, SystemBlock, ThinkingParam, ToolChoiceParam,
        ToolParam,
    },
    stream,
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest, Options},
    openai::types::{Content, refuse},
};

/// A chat that is to be answered.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MessagesRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// What was said so far.
    pub messages: Vec<MessageParam>,
    /// Most tokens of the answer, those that the model thinks with included. With 0 the prompt is read, so that the
    /// prefix cache has it.
    pub max_tokens: usize,
    /// What the model is told before everything else.
    pub system: Option<Content<SystemBlock>>,
    /// Sends the answer in parts, as server-sent events.
    pub stream: Option<bool>,
    /// Texts that end the answer.
    pub stop_sequences: Option<Vec<String>>,
    /// Divides the logits; 0 takes the best token. If absent, what the model recommends, or 0.8.
    pub temperature: Option<f32>,
    /// Keeps this many best tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keeps the smallest set of best tokens whose probability reaches this.
    pub top_p: Option<f32>,
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
    /// Has no effect: nobody is told about users.
    #[schema(value_type = Option<Object>)]
    #[expect(dead_code, reason = "accepted by name, without effect")]
    pub metadata: Option<Value>,
    /// Must be `auto`, `standard_only` or absent: there is one tier.
    pub service_tier: Option<String>,
    /// Must be `standard` or absent.
    pub speed: Option<String>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub container: Option<Value>,
    /// Must leave all of `messages` as it is: without `edits`, or with those that keep everything.
    #[schema(value_type = Option<Object>)]
    pub context_management: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub diagnostics: Option<Value>,
    /// Not supported: everything happens here.
    pub inference_geo: Option<String>,
    /// Not supported: tools are called by the client.
    #[schema(value_type = Option<Vec<Object>>)]
    pub mcp_servers: Option<Vec<Value>>,
    /// Not supported.
    pub user_profile_id: Option<String>,
    /// Not supported.
    pub workspace_id: Option<String>,
}

/// Answers a chat, at once or as a stream.
///
/// # Errors
/// What cannot be honoured, by name.
#[utoipa::path(
    post, path = "/v1/messages", tag = "Anthropic",
    request_body = MessagesRequest,
    responses(
        (status = 200, content((Message = "application/json"), (String = "text/event-stream"))),
        (status = "4XX", body = super::error::ErrorBody),
        (status = "5XX", body = super::error::ErrorBody),
    ),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Json(body): Json<MessagesRequest>,
) -> Result<Response, ApiError> {
    check_version(&headers)?;
    let stream = body.stream == Some(true);
    let omit_thinking = body.thinking.as_ref().is_some_and(ThinkingParam::omits);
    let model = body.model.clone();
    let request = body.into_request()?;
    let generating = generate::chat(&state, caller, &model, request).await.map_err(super::rename)?;
    if stream {
        return Ok(stream::write(generating, omit_thinking));
    }
    let message = Message::collect(generating, omit_thinking).await.map_err(super::rename)?;
    Ok(Json(message).into_response())
}

impl MessagesRequest {
    /// Every field has its place, or is refused here.
    fn into_request(self) -> Result<ChatRequest, ApiError> {
        self.refuse_unsupported()?;
        let stream = self.stream == Some(true);
        let chat = Chat {
            messages: self.messages,
            system: self.system,
            tools: self.tools,
            tool_choice: self.tool_choice,
            thinking: self.thinking,
            output_config: self.output_config,
        };
        Ok(ChatRequest {
            options: Options {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                stop: self.stop_sequences.unwrap_or_default(),
                max_tokens: Some(self.max_tokens.into()),
                ..Options::default()
            },
            // Without streaming, arguments are an object, and half of one cannot be written.
            whole_calls: !stream,
            ..chat.into_request(Some(self.max_tokens))?
        })
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let tier =
            self.service_tier.as_ref().filter(|tier| !matches!(tier.as_str(), "auto" | "standard_only"));
        refuse(&tier, "service_tier", "there is one tier, `auto`")?;
        let speed = self.speed.as_ref().filter(|speed| *speed != "standard");
        refuse(&speed, "speed", "answers come as fast as they can: `standard`")?;
        refuse(&self.container, "container", "this server runs nothing but models")?;
        let management = self.context_management.as_ref().filter(|management| !keeps_all(management));
        refuse(&management, "context_management", "all of `messages` is read, and nothing else")?;
        refuse(&self.diagnostics, "diagnostics", "usage says what the prefix cache had")?;
        refuse(&self.inference_geo, "inference_geo", "everything happens on this machine")?;
        let servers = self.mcp_servers.as_ref().filter(|servers| !servers.is_empty());
        refuse(&servers, "mcp_servers", "tools are called by the client")?;
        refuse(&self.user_profile_id, "user_profile_id", "there are no profiles")?;
        refuse(&self.workspace_id, "workspace_id", "there are no workspaces")
    }
}

/// Whether a context management does nothing, as that of Claude Code.
fn keeps_all(management: &Value) -> bool {
    let keep_thinking = json!({"type": "clear_thinking_20251015", "keep": "all"});
    let Some(keys) = management.as_object() else { return false };
    keys.iter().all(|(key, edits)| {
        key == "edits"
            && edits.as_array().is_some_and(|edits| edits.iter().all(|edit| *edit == keep_thinking))
    })
}
