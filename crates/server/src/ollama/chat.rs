//! `/api/chat`.

use axum::{extract::State, response::Response};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::{
    answer::{Answer, AnswerWriter, Endpoint},
    duration::KeepAlive,
    models,
    options::{self, OptionsParam},
    types::{self, FormatParam, rename},
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest, Message, Options, Role, Tool, ToolCall},
    images::{Image, Parts},
    thinking::ReasoningParams,
    wire::{Body, Content, Other, Output, Tolerance, arguments},
};

/// A request to answer a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaChatRequest)]
pub struct ChatParams {
    /// The model's name, as `/api/tags` lists it.
    model: String,
    /// The conversation so far. Without messages, the model is loaded, or unloaded if `keep_alive` is 0. If the last
    /// message is the model's, the answer continues it.
    messages: Option<Vec<MessageParam>>,
    /// Streams the answer line by line; true if absent.
    stream: Option<bool>,
    /// True, also if absent, to drop the oldest turns of a chat that exceeds the context; system messages stay. If false,
    /// such a chat is refused.
    truncate: Option<bool>,
    /// Tools that the model may call.
    tools: Option<Vec<ToolParam>>,
    /// Format of the answer.
    format: Option<FormatParam>,
    #[serde(flatten)]
    reasoning: ReasoningParams,
    /// Sampling parameters and limits.
    options: Option<OptionsParam>,
    /// Time that the model stays in memory after its last use.
    keep_alive: Option<KeepAlive>,
    /// True to report log-probabilities.
    logprobs: Option<bool>,
    /// Number of most probable tokens to report at each position, at most 20.
    top_logprobs: Option<usize>,
}

impl Body for ChatParams {
    const OTHERS: &'static [&'static [Other]] = &[types::OTHERS, options::OTHERS];
}

/// One message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaMessage)]
pub struct MessageParam {
    role: RoleParam,
    /// Content of the message. The result of a call may be an object.
    content: Option<Output<TextPart>>,
    /// Reasoning before the text.
    thinking: Option<String>,
    /// Tool calls of the model.
    tool_calls: Option<Vec<ToolCallParam>>,
    /// Name of the tool of a result.
    tool_name: Option<String>,
    /// The older name of `tool_name`.
    name: Option<String>,
    /// Id of the call of a result; if absent, the first call without a result.
    tool_call_id: Option<String>,
    /// Images before the text, in base64. For a model that reads text only, they are refused in the last message of a
    /// user, and replaced by a note in others.
    images: Option<Vec<String>>,
}

/// A part of a message in OpenAI's format.
#[derive(Clone, Debug, PartialEq, serde::Serialize, Deserialize, ToSchema)]
#[schema(as = OllamaTextPart)]
pub struct TextPart {
    /// The text.
    text: String,
    /// `text`.
    r#type: Option<String>,
}

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = OllamaRole)]
pub enum RoleParam {
    /// The operator.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

/// A call that the model made.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaToolCall)]
pub struct ToolCallParam {
    /// Id of the call.
    id: Option<String>,
    /// Always `function`.
    r#type: Option<String>,
    /// The called function.
    function: FunctionCallParam,
}

/// The called function.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaFunctionCall)]
pub struct FunctionCallParam {
    /// The tool's name.
    name: String,
    /// Its arguments: an object, as JSON or as JSON text.
    arguments: Option<Value>,
    /// Has no effect: calls are in order.
    #[serde(rename = "index")]
    _index: Option<usize>,
}

/// A tool that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaTool)]
pub struct ToolParam {
    /// `function` or absent. Other kinds are ignored, and named in `X-Paguro-Ignored`: this server runs no tools.
    r#type: Option<String>,
    /// The function.
    function: Option<FunctionParam>,
}

/// A function.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaFunction)]
pub struct FunctionParam {
    /// Its name.
    name: String,
    /// Its description.
    description: Option<String>,
    /// JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
    /// True if calls must fit the schema.
    strict: Option<bool>,
}

/// Answers a chat, as a whole or line by line.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/api/chat", tag = "Ollama", request_body = ChatParams,
    responses((status = 200, content((Answer = "application/json"), (Answer = "application/x-ndjson")))),
)]
pub async fn chat(
    State(state): State<AppState>,
    caller: Caller,
    Json(mut body): Json<ChatParams>,
) -> Result<Response, ApiError> {
    let keep_alive = body.keep_alive;
    keep_alive.map_or(Ok(()), |KeepAlive(time)| caller.check_keep_alive(time))?;
    let stream = body.stream != Some(false);
    let writer = AnswerWriter { endpoint: Endpoint::Chat, model: std::mem::take(&mut body.model) };
    let request = body.into_request(&caller.tolerance)?;
    let name = state.models.find(&writer.model).await?.name;
    if request.messages.is_empty() {
        return models::load_or_unload(&state, &name, keep_alive, &writer).await;
    }
    let generating = generate::chat(&state, caller, &name, request).await.map_err(rename)?;
    if let Some(KeepAlive(time)) = keep_alive {
        generating.keep_alive(time);
    }
    writer.write(generating, stream).await
}

impl ChatParams {
    /// Converts the request. Unsupported fields are ignored or refused by name.
    fn into_request(self, tolerance: &Tolerance) -> Result<ChatRequest, ApiError> {
        let messages = messages(self.messages.unwrap_or_default())?;
        let mut tools = Vec::new();
        for (i, tool) in self.tools.unwrap_or_default().into_iter().enumerate() {
            tools.extend(tool.into_tool(&format!("tools[{i}]"), tolerance)?);
        }
        let reasoning = self.reasoning.combine("think", tolerance)?;
        Ok(ChatRequest {
            continue_last: messages.last().is_some_and(Message::can_be_continued),
            messages,
            tools,
            parallel_tool_calls: true,
            format: FormatParam::format(self.format)?,
            reasoning: reasoning.reasoning,
            hides_reasoning: reasoning.is_hidden,
            template_variables: reasoning.template_variables,
            drops_turns: self.truncate != Some(false),
            options: Options {
                logprobs: types::logprobs(self.logprobs, self.top_logprobs)?.map(Into::into),
                ..self.options.unwrap_or_default().into_options()?
            },
            // A call is one line, with an object in it.
            whole_calls: true,
            ..ChatRequest::default()
        })
    }
}

/// Converts messages.
///
/// # Errors
/// A field that is not supported, by name.
pub fn messages(messages: Vec<MessageParam>) -> Result<Vec<Message>, ApiError> {
    let mut calls = Calls::default();
    let messages = messages.into_iter().enumerate();
    let message =
        |(i, message): (usize, MessageParam)| message.into_message(&mut calls, &format!("messages[{i}]"));
    messages.map(message).collect()
}

/// Ids of calls. Ollama's clients may omit them; templates need them.
#[derive(Default)]
struct Calls {
    made: usize,
    /// Calls without a result, in order: id and tool.
    open: Vec<(String, String)>,
}

impl MessageParam {
    fn into_message(self, calls: &mut Calls, path: &str) -> Result<Message, ApiError> {
        let role = match self.role {
            RoleParam::System => Role::System,
            RoleParam::User => Role::User,
            RoleParam::Assistant => Role::Assistant,
            RoleParam::Tool => Role::Tool,
        };
        let only_of = |given: bool, field: &str, wanted: Role, name: &str| {
            if given && role != wanted {
                let param = format!("{path}.{field}");
                return Err(ApiError::invalid(
                    &param,
                    format!("only a message of the role `{name}` has `{param}`"),
                ));
            }
            Ok(())
        };
        only_of(self.tool_calls.is_some(), "tool_calls", Role::Assistant, "assistant")?;
        only_of(self.thinking.is_some(), "thinking", Role::Assistant, "assistant")?;
        only_of(self.tool_name.is_some(), "tool_name", Role::Tool, "tool")?;
        only_of(self.tool_call_id.is_some(), "tool_call_id", Role::Tool, "tool")?;
        if matches!(self.content, Some(Output::Json(_))) && role != Role::Tool {
            let param = format!("{path}.content");
            let message = format!("`{param}` must be a string: only the result of a call is an object");
            return Err(ApiError::invalid(param, message));
        }
        let text = match self.content.map(Output::content) {
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => parts.into_iter().map(|part| part.text).collect(),
        };
        let content = with_images(self.images, &format!("{path}.images"), &text);
        let name = self.tool_name.or(self.name);
        let mut message = Message { reasoning: self.thinking, name, ..Message::new(role, content) };
        for call in self.tool_calls.into_iter().flatten() {
            if call.r#type.as_ref().is_some_and(|r#type| r#type != "function") {
                let param = format!("{path}.tool_calls");
                return Err(ApiError::invalid(
                    &param,
                    format!("`{param}` has a type that is not `function`"),
                ));
            }
            let id = call.id.unwrap_or_else(|| format!("call_{}", calls.made));
            calls.made += 1;
            calls.open.push((id.clone(), call.function.name.clone()));
            let arguments = arguments(call.function.arguments);
            message.tool_calls.push(ToolCall { id, name: call.function.name, arguments });
        }
        if role == Role::Tool {
            let is_meant = |(id, name): &(String, String)| match (&self.tool_call_id, &message.name) {
                (Some(wanted), _) => id == wanted,
                (None, Some(wanted)) => name == wanted,
                (None, None) => true,
            };
            let call = calls.open.iter().position(is_meant).map(|at| calls.open.remove(at));
            let (id, name) = call.unzip();
            message.tool_call_id = self.tool_call_id.or(id);
            message.name = message.name.or(name);
        }
        Ok(message)
    }
}

/// Returns the content of a message: images in base64 from the field at `path`, and the text after them.
pub(super) fn with_images(images: Option<Vec<String>>, path: &str, text: &str) -> Parts {
    let mut parts = Parts::default();
    for (i, image) in images.into_iter().flatten().enumerate() {
        parts.push_image(Image::from_base64(&format!("{path}[{i}]"), image));
    }
    parts.push_text(text);
    parts
}

impl ToolParam {
    fn into_tool(self, path: &str, tolerance: &Tolerance) -> Result<Option<Tool>, ApiError> {
        if let Some(kind) = self.r#type.filter(|kind| kind != "function") {
            let why = format_args!("this server runs no tools, so a `{kind}` is not offered");
            tolerance.leave_out(path, why)?;
            return Ok(None);
        }
        let Some(FunctionParam { name, description, parameters, strict }) = self.function else {
            let param = format!("{path}.function");
            return Err(ApiError::invalid(&param, format!("`{param}` is missing")));
        };
        Ok(Some(Tool { name, description, parameters, strict: strict == Some(true) }))
    }
}
