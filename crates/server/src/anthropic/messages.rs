//! `/v1/messages`.

use axum::{
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use utoipa::ToSchema;

use super::{
    answer::Message,
    check_version,
    request::{
        self, Chat, MessageParam, OutputConfig, OutputFormat, SystemBlock, ThinkingParam, ToolChoiceParam,
        ToolParam,
    },
    stream,
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest, Options},
    wire::{Body, Content, Limit, OneOrMany, Other, Tolerance, left_out, no_effect},
};

/// A chat that is to be answered.
#[derive(Debug, Deserialize, ToSchema)]
pub struct MessagesRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// What was said so far.
    pub messages: Vec<MessageParam>,
    /// Most tokens of the answer, those that the model thinks with included. With 0 the prompt is read, so that the
    /// prefix cache has it.
    pub max_tokens: Limit,
    /// What the model is told before everything else.
    pub system: Option<Content<SystemBlock>>,
    /// Sends the answer in parts, as server-sent events.
    pub stream: Option<bool>,
    /// Texts that end the answer.
    pub stop_sequences: Option<Vec<String>>,
    /// Divides the logits; 0 takes the best token. If absent, what the model recommends, or 0.8.
    pub temperature: Option<f32>,
    /// Keeps this many best tokens; 0 and -1 keep all.
    pub top_k: Option<i64>,
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
    /// The older name of `output_config.format`.
    pub output_format: Option<OutputFormat>,
}

/// Known fields of messages alone.
const OTHERS: &[Other] = &[
    no_effect("metadata", "nobody is told about users"),
    left_out("service_tier", &["\"auto\"", "\"standard_only\""], "there is one tier, `auto`"),
    left_out("container", &[], "this server runs nothing but models"),
    left_out("context_management", &KEEPS_ALL, "all of `messages` is read, and nothing else"),
    left_out("diagnostics", &[], "usage says what the prefix cache had"),
    left_out("inference_geo", &[], "everything happens on this machine"),
    left_out("mcp_servers", &[], "tools are called by the client"),
];

/// Context managements that do nothing: Claude Code's is one.
const KEEPS_ALL: [&str; 2] =
    [r#"{"edits": []}"#, r#"{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}"#];

impl Body for MessagesRequest {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS, request::OTHERS];
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
    let request = body.into_request(&caller.tolerance)?;
    let generating = generate::chat(&state, caller, &model, request).await.map_err(super::rename)?;
    if stream {
        return Ok(stream::write(generating, omit_thinking));
    }
    let message = Message::collect(generating, omit_thinking).await.map_err(super::rename)?;
    Ok(Json(message).into_response())
}

impl MessagesRequest {
    /// Every field has its place, or is refused here.
    fn into_request(self, tolerance: &Tolerance) -> Result<ChatRequest, ApiError> {
        let stream = self.stream == Some(true);
        let Limit(max_tokens) = self.max_tokens;
        let chat = Chat {
            messages: self.messages,
            system: self.system,
            tools: self.tools,
            tool_choice: self.tool_choice,
            thinking: self.thinking,
            output_config: self.output_config,
            output_format: self.output_format,
        };
        Ok(ChatRequest {
            options: Options {
                temperature: self.temperature,
                top_k: self.top_k.map(|most| u32::try_from(most.max(0)).unwrap_or(u32::MAX)),
                top_p: self.top_p,
                stop: Options::stop_strings(self.stop_sequences.map(OneOrMany::Many)),
                max_tokens: max_tokens.map(Into::into),
                ..Options::default()
            },
            // Without streaming, arguments are an object, and half of one cannot be written.
            whole_calls: !stream,
            ..chat.into_request(max_tokens, tolerance)?
        })
    }
}
