//! Requests and their conversion.

use paguro_vision::Detail;
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::history::History;
use crate::{
    error::ApiError,
    generate::{ChatRequest, Format, Message, Role, Tool, ToolChoice},
    images::Image,
    thinking::{ReasoningParams, RequestedReasoning, Thinking, ThinkingObject},
    wire::{Content, Limit, Other, Output, Tolerance, left_out, no_effect},
};

/// One message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicMessageParam)]
pub struct MessageParam {
    /// Author of the message.
    pub role: RoleParam,
    /// Content of the message.
    pub content: Content<Block>,
}

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = AnthropicRole)]
pub enum RoleParam {
    /// The user, and results of tools.
    User,
    /// The model. If the last message has this role, the answer continues it.
    Assistant,
    /// The operator.
    System,
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, serde::Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicBlock)]
pub enum Block {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// Reasoning of the model.
    Thinking {
        /// Its text.
        thinking: String,
        /// Not checked.
        #[serde(rename = "signature")]
        _signature: Option<String>,
    },
    /// A tool that the model has called.
    ToolUse {
        /// Id of the call.
        id: String,
        /// Name of the tool.
        name: String,
        /// Its arguments.
        #[schema(value_type = Option<Object>)]
        input: Option<Map<String, Value>>,
    },
    /// Result of a call.
    ToolResult {
        /// Id of the call.
        tool_use_id: String,
        /// The result.
        content: Option<Output<ResultBlock>>,
        /// True if the call failed: `Error: ` then precedes the result in the prompt.
        is_error: Option<bool>,
    },
    /// An image. For a model that reads text only, it is refused in the last message of a user, and replaced by a note in
    /// other messages and in results of calls.
    Image {
        /// The image.
        source: ImageSource,
    },
    /// Refused in the last message of a user; replaced by a note in other messages and in results of calls, because
    /// models read text only.
    #[schema(value_type = Object)]
    Document(Map<String, Value>),
    /// Refused in the last message of a user; replaced by a note in other messages and in results of calls, because
    /// models read text only.
    #[schema(value_type = Object)]
    SearchResult(Map<String, Value>),
    /// Ignored, because it is encrypted.
    #[schema(value_type = Object)]
    RedactedThinking(Map<String, Value>),
    /// Any other kind is ignored, and named in `X-Paguro-Ignored`.
    #[serde(other)]
    Other,
}

/// The data of an image, or their place.
#[derive(Clone, Debug, PartialEq, serde::Serialize, Deserialize, ToSchema)]
#[schema(as = AnthropicImageSource)]
pub struct ImageSource {
    /// `base64` or `url`. There are no stored files, so `file` is refused.
    pub r#type: String,
    /// Has no effect: the format is recognised by the data.
    #[serde(rename = "media_type")]
    pub _media_type: Option<String>,
    /// The file in base64.
    pub data: Option<String>,
    /// A URL of http or https at a host that `--image-urls` names.
    pub url: Option<String>,
}

impl ImageSource {
    /// Returns the image of the block at `path`.
    ///
    /// # Errors
    /// The source is not supported.
    pub fn image(self, path: &str) -> Result<Image, ApiError> {
        let need = |value: Option<String>, name: &str| {
            let param = format!("{path}.source.{name}");
            value.ok_or_else(|| ApiError::invalid(&param, format!("`{param}` is missing")))
        };
        match self.r#type.as_str() {
            "base64" => Ok(Image::from_base64(&format!("{path}.source.data"), need(self.data, "data")?)),
            "url" => Image::from_url(&format!("{path}.source.url"), need(self.url, "url")?, Detail::Auto),
            other => {
                let other: String = other.chars().take(20).collect();
                let param = format!("{path}.source.type");
                let message = format!("`{param}` is `{other}`; images come in `base64`, or from a `url`");
                Err(ApiError::invalid(param, message))
            }
        }
    }
}

/// A part of a tool's result.
#[derive(Clone, Debug, PartialEq, serde::Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicResultBlock)]
pub enum ResultBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// An image. For a model that reads text only, it is refused in the last message of a user, and replaced by a note in
    /// other messages and in results of calls.
    Image {
        /// The image.
        source: ImageSource,
    },
    /// Refused in the last message of a user; replaced by a note in other messages and in results of calls, because
    /// models read text only.
    #[schema(value_type = Object)]
    Document(Map<String, Value>),
    /// Refused in the last message of a user; replaced by a note in other messages and in results of calls, because
    /// models read text only.
    #[schema(value_type = Object)]
    SearchResult(Map<String, Value>),
    /// Any other kind is replaced by a note.
    #[serde(other)]
    Other,
}

/// A part of the system prompt.
#[derive(Clone, Debug, PartialEq, serde::Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicSystemBlock)]
pub enum SystemBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
}

/// A function that the model may call, or a tool of another kind.
#[derive(Debug, ToSchema)]
#[serde(untagged)]
#[schema(as = AnthropicTool)]
pub enum ToolParam {
    /// A function that the client runs.
    Custom(CustomTool),
    /// Any other kind (`web_search_...`, `bash_...`, ...) is not offered: this server runs no tools. It is ignored, and named
    /// in `X-Paguro-Ignored`.
    #[schema(value_type = Object)]
    Other(Value),
}

/// A function that the client runs.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicCustomTool)]
pub struct CustomTool {
    /// `custom` or absent.
    #[serde(rename = "type")]
    _type: Option<CustomType>,
    /// Its name.
    name: String,
    /// Its description.
    description: Option<String>,
    /// JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    input_schema: Option<Map<String, Value>>,
    /// True if calls must fit the schema.
    strict: Option<bool>,
}

/// `custom`: the client runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = AnthropicCustomType)]
pub enum CustomType {
    /// The client runs it.
    Custom,
}

impl<'de> Deserialize<'de> for ToolParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let tool = Value::deserialize(deserializer)?;
        match tool.get("type").map(|kind| kind.as_str()) {
            None | Some(Some("custom")) => {
                CustomTool::deserialize(tool).map(Self::Custom).map_err(D::Error::custom)
            }
            Some(_) => Ok(Self::Other(tool)),
        }
    }
}

/// Known fields of a prompt that are ignored or refused.
pub const OTHERS: &[Other] = &[
    no_effect("cache_control", PREFIXES),
    no_effect("system[].cache_control", PREFIXES),
    no_effect("system[].citations", "the prompt contains only the text"),
    no_effect("messages[].content[].cache_control", PREFIXES),
    no_effect("messages[].content[].citations", "the prompt contains only the text"),
    no_effect("messages[].content[].caller", "calls come from the model"),
    no_effect("messages[].content[].content[].cache_control", PREFIXES),
    no_effect("messages[].content[].content[].citations", "the prompt contains only the text"),
    no_effect("tools[].cache_control", PREFIXES),
    no_effect("tools[].eager_input_streaming", "arguments are always sent as they come"),
    left_out("tools[].defer_loading", &["false"], "tools are offered from the beginning"),
    left_out("tools[].input_examples", &[], "describe the use of the tool in its description"),
    left_out("tools[].allowed_callers", &["[\"direct\"]"], "the model calls tools directly: `direct`"),
    left_out("speed", &["\"standard\""], "all requests run at the same speed: `standard`"),
    left_out("user_profile_id", &[], "there are no profiles"),
    left_out("workspace_id", &[], "there are no workspaces"),
    no_effect("betas", "supported features are always on"),
    no_effect("anthropic_version", "the header says it"),
];

const PREFIXES: &str = "all prefixes are cached while memory allows, and `usage` reports the tokens found";

/// Permits, requires or forbids calls of tools, or requires a call of one tool.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
#[schema(as = AnthropicToolChoice)]
pub enum ToolChoiceParam {
    /// The model decides.
    Auto {
        /// True for at most one call.
        disable_parallel_tool_use: Option<bool>,
    },
    /// At least one call.
    Any {
        /// True for exactly one call.
        disable_parallel_tool_use: Option<bool>,
    },
    /// A call of this tool.
    Tool {
        /// Name of the tool.
        name: String,
        /// True for exactly one call.
        disable_parallel_tool_use: Option<bool>,
    },
    /// No calls.
    None {},
}

/// Format and effort of the answer.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = AnthropicOutputConfig)]
pub struct OutputConfig {
    /// Effort of reasoning: `low`, `medium`, `high`, `xhigh`, `max`.
    effort: Option<String>,
    /// Format of the answer.
    format: Option<OutputFormat>,
}

/// Format of an answer.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicOutputFormat)]
pub enum OutputFormat {
    /// JSON that fits a schema.
    JsonSchema {
        /// The schema.
        #[schema(value_type = Object)]
        schema: Map<String, Value>,
    },
}

/// Fields of a request that determine the prompt.
#[derive(Debug)]
pub struct Chat {
    pub messages: Vec<MessageParam>,
    pub system: Option<Content<SystemBlock>>,
    pub tools: Option<Vec<ToolParam>>,
    pub tool_choice: Option<ToolChoiceParam>,
    pub reasoning: ReasoningParams,
    pub output_config: Option<OutputConfig>,
    pub output_format: Option<OutputFormat>,
}

impl Chat {
    /// Converts the request. `max_tokens` also limits reasoning.
    ///
    /// # Errors
    /// A field that is not supported, by name.
    pub fn into_request(
        self,
        max_tokens: Option<usize>,
        tolerance: &Tolerance,
    ) -> Result<ChatRequest, ApiError> {
        let mut tools = Vec::new();
        for (i, tool) in self.tools.unwrap_or_default().into_iter().enumerate() {
            tools.extend(tool.into_tool(&format!("tools[{i}]"), tolerance)?);
        }
        let (tool_choice, parallel_tool_calls) = ToolChoiceParam::check(self.tool_choice, &tools)?;
        let OutputConfig { effort, format } = self.output_config.unwrap_or_default();
        let format = format.or(self.output_format);
        let last_user = self.messages.iter().rposition(|message| message.role == RoleParam::User);
        let mut history = History::default();
        if let Some(system) = self.system {
            history.push(Role::System, system.text());
        }
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` is empty: there is nothing to answer"));
        }
        for (i, message) in self.messages.into_iter().enumerate() {
            history.add(message, &format!("messages[{i}]"), Some(i) == last_user, tolerance)?;
        }
        let messages = history.messages;
        let reasoning = reasoning(self.reasoning, effort, max_tokens, tolerance)?;
        Ok(ChatRequest {
            continue_last: messages.last().is_some_and(Message::can_be_continued),
            messages,
            tools,
            tool_choice,
            parallel_tool_calls,
            format: match format {
                None => Format::Text,
                Some(OutputFormat::JsonSchema { schema }) => Format::JsonSchema(schema.into()),
            },
            reasoning: reasoning.reasoning,
            hides_reasoning: reasoning.is_hidden,
            template_variables: reasoning.template_variables,
            ..ChatRequest::default()
        })
    }
}

/// Returns the requested reasoning. `effort` is that of `output_config`.
fn reasoning(
    mut params: ReasoningParams,
    effort: Option<String>,
    max_tokens: Option<usize>,
    tolerance: &Tolerance,
) -> Result<RequestedReasoning, ApiError> {
    if let Some(Thinking::Object(ThinkingObject { budget_tokens: Some(Limit(Some(budget))), .. })) =
        &params.thinking
        && (*budget < 1024 || max_tokens.is_some_and(|most| *budget >= most))
    {
        let message = "`thinking.budget_tokens` must be at least 1024 and below `max_tokens`";
        return Err(ApiError::invalid("thinking.budget_tokens", message));
    }
    let name = if effort.is_some() { "output_config.effort" } else { "reasoning_effort" };
    params.reasoning_effort = effort.or(params.reasoning_effort);
    params.combine(name, tolerance)
}

impl ToolParam {
    fn into_tool(self, path: &str, tolerance: &Tolerance) -> Result<Option<Tool>, ApiError> {
        let CustomTool { name, description, input_schema, strict, .. } = match self {
            Self::Custom(tool) => tool,
            Self::Other(tool) => {
                let kind = tool.get("type").and_then(Value::as_str).unwrap_or_default();
                let why = format_args!("this server runs no tools, so a `{kind}` is not offered");
                tolerance.leave_out(path, why)?;
                return Ok(None);
            }
        };
        let Some(schema) = input_schema else {
            let param = format!("{path}.input_schema");
            return Err(ApiError::invalid(&param, format!("`{param}` is missing")));
        };
        Ok(Some(Tool { name, description, parameters: Some(schema.into()), strict: strict == Some(true) }))
    }
}

impl ToolChoiceParam {
    /// Converts the choice, and returns whether several calls are allowed.
    fn check(choice: Option<Self>, tools: &[Tool]) -> Result<(ToolChoice, bool), ApiError> {
        let (wanted, one) = match &choice {
            None => (Ok("auto"), None),
            Some(Self::Auto { disable_parallel_tool_use: one }) => (Ok("auto"), *one),
            Some(Self::Any { disable_parallel_tool_use: one }) => (Ok("required"), *one),
            Some(Self::Tool { name, disable_parallel_tool_use: one }) => (Err(name.as_str()), *one),
            Some(Self::None {}) => (Ok("none"), None),
        };
        if wanted == Ok("required") && tools.is_empty() {
            return Err(ApiError::invalid("tool_choice", "`tool_choice` is `any`, but there are no `tools`"));
        }
        Ok((ToolChoice::check(wanted, tools)?, one != Some(true)))
    }
}
