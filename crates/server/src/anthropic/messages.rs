//! `/v1/messages`.

use axum::{
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use paguro_model::SamplingOverrides;
use serde::Deserialize;
use utoipa::ToSchema;

use super::{
    answer::Message,
    check_version,
    request::{
        self, Chat, MessageParam, OutputConfig, OutputFormat, SystemBlock, ToolChoiceParam, ToolParam,
    },
    stream,
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest, Options},
    thinking::ReasoningParams,
    wire::{Body, Content, Limit, OneOrMany, Other, Tolerance, left_out, no_effect},
};

/// A request to answer a chat.
#[derive(Debug, Deserialize, ToSchema)]
pub struct MessagesRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// The conversation so far.
    pub messages: Vec<MessageParam>,
    /// Maximum tokens of the answer, including reasoning. With 0 only the prompt is computed, for the prefix cache.
    pub max_tokens: Limit,
    /// System prompt.
    pub system: Option<Content<SystemBlock>>,
    /// Streams the answer as server-sent events.
    pub stream: Option<bool>,
    /// Stop strings.
    pub stop_sequences: Option<Vec<String>>,
    /// Divides the logits; 0 selects the most probable token. If absent, the model's recommendation, or 0.8.
    pub temperature: Option<f32>,
    /// Samples from the `top_k` most probable tokens; 0 and -1 keep all.
    pub top_k: Option<i64>,
    /// Samples from the smallest set of tokens whose probabilities add up to at least this.
    pub top_p: Option<f32>,
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

/// Known fields of this endpoint.
const OTHERS: &[Other] = &[
    no_effect("metadata", "users are not reported"),
    left_out("service_tier", &["\"auto\"", "\"standard_only\""], "there is one tier, `auto`"),
    left_out("container", &[], "this server has no containers"),
    left_out("context_management", &KEEPS_ALL, "all of `messages` is always used"),
    left_out("diagnostics", &[], "`usage` reports the tokens found in the prefix cache"),
    left_out("inference_geo", &[], "all requests run on this machine"),
    left_out("mcp_servers", &[], "tools are called by the client"),
];

/// Values that keep the whole context, such as Claude Code's.
const KEEPS_ALL: [&str; 2] =
    [r#"{"edits": []}"#, r#"{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}"#];

impl Body for MessagesRequest {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS, request::OTHERS];
}

/// Answers a chat, as a whole or as a stream.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/v1/messages", tag = "Anthropic", request_body = MessagesRequest,
    responses((status = 200, content((Message = "application/json"), (String = "text/event-stream")))),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Json(body): Json<MessagesRequest>,
) -> Result<Response, ApiError> {
    check_version(&headers)?;
    let stream = body.stream == Some(true);
    let model = body.model.clone();
    let mut request = body.into_request(&caller.tolerance)?;
    // Clients expect a block without text instead of none.
    let omit_thinking = std::mem::take(&mut request.hides_reasoning);
    let generating = generate::chat(&state, caller, &model, request).await.map_err(super::rename)?;
    if stream {
        return Ok(stream::write(generating, omit_thinking));
    }
    let message = Message::collect(generating, omit_thinking).await.map_err(super::rename)?;
    Ok(Json(message).into_response())
}

impl MessagesRequest {
    /// Converts the request. Unsupported fields are ignored or refused by name.
    fn into_request(self, tolerance: &Tolerance) -> Result<ChatRequest, ApiError> {
        let stream = self.stream == Some(true);
        let Limit(max_tokens) = self.max_tokens;
        let chat = Chat {
            messages: self.messages,
            system: self.system,
            tools: self.tools,
            tool_choice: self.tool_choice,
            reasoning: self.reasoning,
            output_config: self.output_config,
            output_format: self.output_format,
        };
        Ok(ChatRequest {
            options: Options {
                sampling: SamplingOverrides {
                    temperature: self.temperature,
                    top_k: Options::top_k(self.top_k),
                    top_p: self.top_p,
                    ..SamplingOverrides::default()
                },
                stop: Options::stop_strings(self.stop_sequences.map(OneOrMany::Many)),
                max_tokens: max_tokens.map(Into::into),
                ..Options::default()
            },
            // Without streaming, arguments are an object, which must be complete.
            whole_calls: !stream,
            ..chat.into_request(max_tokens, tolerance)?
        })
    }
}
