//! What is asked, and what it means.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{ChatRequest, Format, Message, Reasoning, Role, Tool, ToolCall, ToolChoice},
    openai::types::{Content, refuse},
};

/// One message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AnthropicMessageParam)]
pub struct MessageParam {
    /// Who says it.
    role: RoleParam,
    /// What is said.
    content: Content<Block>,
}

/// Who says a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = AnthropicRole)]
pub enum RoleParam {
    /// The one who asks, and the tools that answer.
    User,
    /// The model. If the last message is the model's, the answer goes on from it.
    Assistant,
    /// Whoever set this up.
    System,
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, serde::Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[schema(as = AnthropicBlock)]
pub enum Block {
    /// Text.
    Text {
        /// The text.
        text: String,
        /// Has no effect: prefixes are found by their content.
        cache_control: Option<CacheControl>,
        /// Has no effect: the model reads the text only.
        #[schema(value_type = Option<Vec<Object>>)]
        citations: Option<Vec<Value>>,
    },
    /// What the model thought.
    Thinking {
        /// Its text.
        thinking: String,
        /// Not checked.
        signature: String,
    },
    /// A tool that the model has called.
    ToolUse {
        /// Names the call.
        id: String,
        /// Names the tool.
        name: String,
        /// Its arguments.
        #[schema(value_type = Object)]
        input: Map<String, Value>,
        /// Has no effect: prefixes are found by their content.
        cache_control: Option<CacheControl>,
        /// Has no effect: calls come from the model.
        #[schema(value_type = Option<Object>)]
        caller: Option<Value>,
    },
    /// What came of a call.
    ToolResult {
        /// Which call.
        tool_use_id: String,
        /// The result.
        content: Option<Content<ResultBlock>>,
        /// Whether it failed: the model then reads `Error: ` before the result.
        is_error: Option<bool>,
        /// Has no effect: prefixes are found by their content.
        cache_control: Option<CacheControl>,
    },
    /// Not supported: models here read text only.
    #[schema(value_type = Object)]
    Image(Map<String, Value>),
    /// Not supported: models here read text only.
    #[schema(value_type = Object)]
    Document(Map<String, Value>),
    /// Not supported: models here read text only.
    #[schema(value_type = Object)]
    SearchResult(Map<String, Value>),
    /// Not supported: nobody here can read it.
    #[schema(value_type = Object)]
    RedactedThinking(Map<String, Value>),
}

/// A part of a tool's result.
#[derive(Clone, Debug, PartialEq, serde::Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[schema(as = AnthropicResultBlock)]
pub enum ResultBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
        /// Has no effect: prefixes are found by their content.
        cache_control: Option<CacheControl>,
    },
    /// Not supported: models here read text only.
    #[schema(value_type = Object)]
    Image(Map<String, Value>),
    /// Not supported: models here read text only.
    #[schema(value_type = Object)]
    Document(Map<String, Value>),
    /// Not supported: models here read text only.
    #[schema(value_type = Object)]
    SearchResult(Map<String, Value>),
}

/// A part of the system prompt.
#[derive(Clone, Debug, PartialEq, serde::Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[schema(as = AnthropicSystemBlock)]
pub enum SystemBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
        /// Has no effect: prefixes are found by their content.
        cache_control: Option<CacheControl>,
        /// Has no effect: the model reads the text only.
        #[schema(value_type = Option<Vec<Object>>)]
        citations: Option<Vec<Value>>,
    },
}

/// Where a prefix ends that is to be kept. Has no effect: all prefixes are, as long as there is room, and usage says
/// what was found.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CacheControl {
    /// Always `ephemeral`.
    r#type: CacheType,
    /// For how long.
    ttl: Option<String>,
}

/// `ephemeral`: there is nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CacheType {
    /// Not for ever.
    Ephemeral,
}

/// A tool that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AnthropicTool)]
pub struct ToolParam {
    /// `custom` or absent: there are no tools on this side.
    r#type: Option<String>,
    /// Its name.
    name: String,
    /// What it does.
    description: Option<String>,
    /// The JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    input_schema: Option<Map<String, Value>>,
    /// Whether calls must fit the schema.
    strict: Option<bool>,
    /// Has no effect: prefixes are found by their content.
    #[expect(dead_code, reason = "accepted by name, without effect")]
    cache_control: Option<CacheControl>,
    /// Has no effect: arguments are always sent as they come.
    #[expect(dead_code, reason = "accepted by name, without effect")]
    eager_input_streaming: Option<bool>,
    /// Not supported: tools are offered from the beginning.
    defer_loading: Option<bool>,
    /// Not supported: say in the description how to use it.
    #[schema(value_type = Option<Vec<Object>>)]
    input_examples: Option<Vec<Value>>,
    /// Must be `["direct"]` or absent: the model itself calls.
    allowed_callers: Option<Vec<String>>,
}

/// Whether tools are called.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
#[schema(as = AnthropicToolChoice)]
pub enum ToolChoiceParam {
    /// If the model wants to.
    Auto {
        /// One call at most.
        disable_parallel_tool_use: Option<bool>,
    },
    /// At least one.
    Any {
        /// One call exactly.
        disable_parallel_tool_use: Option<bool>,
    },
    /// This one.
    Tool {
        /// Which.
        name: String,
        /// One call exactly.
        disable_parallel_tool_use: Option<bool>,
    },
    /// None.
    None {},
}

/// Whether the model thinks first.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
#[schema(as = AnthropicThinking)]
pub enum ThinkingParam {
    /// It does.
    Enabled {
        /// At least 1024 and below `max_tokens`. Has no other effect: thinking ends when the model ends it, or with
        /// `max_tokens`.
        budget_tokens: usize,
        /// Whether its text is sent; it is never summarized.
        display: Option<Display>,
    },
    /// It does, if it wants to.
    Adaptive {
        /// Whether its text is sent; it is never summarized.
        display: Option<Display>,
    },
    /// It does not.
    Disabled {},
}

/// What is shown of thinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Display {
    /// All of it.
    Summarized,
    /// That there was some.
    Omitted,
}

/// What the answer is to be like.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AnthropicOutputConfig)]
pub struct OutputConfig {
    /// How much a model that thinks should think: `low`, `medium`, `high`, `xhigh`, `max`.
    effort: Option<String>,
    /// What form it has.
    format: Option<OutputFormat>,
}

/// The form of an answer.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[schema(as = AnthropicOutputFormat)]
pub enum OutputFormat {
    /// JSON that fits a schema.
    JsonSchema {
        /// The schema.
        #[schema(value_type = Object)]
        schema: Map<String, Value>,
    },
}

/// The part of a request that makes the prompt.
#[derive(Debug)]
pub struct Chat {
    pub messages: Vec<MessageParam>,
    pub system: Option<Content<SystemBlock>>,
    pub tools: Option<Vec<ToolParam>>,
    pub tool_choice: Option<ToolChoiceParam>,
    pub thinking: Option<ThinkingParam>,
    pub output_config: Option<OutputConfig>,
}

impl Chat {
    /// Our own request. `max_tokens` bounds the thinking, too.
    ///
    /// # Errors
    /// What cannot be honoured, by name.
    pub fn into_request(self, max_tokens: Option<usize>) -> Result<ChatRequest, ApiError> {
        let tools = self.tools.unwrap_or_default().into_iter().enumerate();
        let tools: Vec<_> =
            tools.map(|(i, tool)| tool.into_tool(&format!("tools[{i}]"))).collect::<Result<_, _>>()?;
        let (tool_choice, parallel_tool_calls) = ToolChoiceParam::check(self.tool_choice, &tools)?;
        let OutputConfig { effort, format } = self.output_config.unwrap_or_default();
        let mut history = History::default();
        if let Some(system) = self.system {
            history.push(Role::System, system.text());
        }
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` is empty: there is nothing to answer"));
        }
        for (i, message) in self.messages.into_iter().enumerate() {
            history.add(message, &format!("messages[{i}]"))?;
        }
        let messages = history.messages;
        let last = messages.last();
        Ok(ChatRequest {
            continue_last: last
                .is_some_and(|last| last.role == Role::Assistant && last.tool_calls.is_empty()),
            messages,
            tools,
            tool_choice,
            parallel_tool_calls,
            format: match format {
                None => Format::Text,
                Some(OutputFormat::JsonSchema { schema }) => Format::JsonSchema(schema.into()),
            },
            reasoning: reasoning(self.thinking, effort, max_tokens)?,
            ..ChatRequest::default()
        })
    }
}

fn reasoning(
    thinking: Option<ThinkingParam>,
    effort: Option<String>,
    max_tokens: Option<usize>,
) -> Result<Reasoning, ApiError> {
    if let Some(effort) =
        effort.as_deref().filter(|effort| !["low", "medium", "high", "xhigh", "max"].contains(effort))
    {
        let message = format!("`output_config.effort` is low, medium, high, xhigh or max, not `{effort}`");
        return Err(ApiError::invalid("output_config.effort", message));
    }
    let enabled = match thinking {
        None | Some(ThinkingParam::Adaptive { .. }) => None,
        Some(ThinkingParam::Disabled {}) => Some(false),
        Some(ThinkingParam::Enabled { budget_tokens, .. }) => {
            if budget_tokens < 1024 || max_tokens.is_some_and(|most| budget_tokens >= most) {
                let message = "`thinking.budget_tokens` must be at least 1024 and below `max_tokens`";
                return Err(ApiError::invalid("thinking.budget_tokens", message));
            }
            Some(true)
        }
    };
    Ok(Reasoning { enabled, effort })
}

impl ThinkingParam {
    /// Whether thinking is only to be mentioned.
    pub fn omits(&self) -> bool {
        match self {
            Self::Enabled { display, .. } | Self::Adaptive { display } => *display == Some(Display::Omitted),
            Self::Disabled {} => false,
        }
    }
}

impl ToolParam {
    fn into_tool(self, path: &str) -> Result<Tool, ApiError> {
        let at = |field: &str| format!("{path}.{field}");
        if let Some(r#type) = self.r#type.filter(|r#type| r#type != "custom") {
            let message =
                format!("`{path}` is a `{type}`: there are no tools on this side, only `custom` ones");
            return Err(ApiError::invalid(at("type"), message));
        }
        refuse(
            &self.defer_loading.filter(|defer| *defer),
            &at("defer_loading"),
            "tools are offered from the beginning",
        )?;
        refuse(&self.input_examples, &at("input_examples"), "say in the description how to use the tool")?;
        let callers = self.allowed_callers.filter(|callers| callers != &["direct"]);
        refuse(&callers, &at("allowed_callers"), "the model itself calls: `direct`")?;
        let Some(schema) = self.input_schema else {
            let param = at("input_schema");
            return Err(ApiError::invalid(&param, format!("`{param}` is missing")));
        };
        Ok(Tool {
            name: self.name,
            description: self.description,
            parameters: Some(schema.into()),
            strict: self.strict == Some(true),
        })
    }
}

impl ToolChoiceParam {
    /// Our own choice, and whether several calls are allowed.
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

/// The messages as models know them: results of calls are messages of their own, and neighbours of one role are one.
#[derive(Default)]
struct History {
    messages: Vec<Message>,
    /// The names of called tools, by call.
    called: HashMap<String, String>,
}

impl History {
    fn add(&mut self, message: MessageParam, path: &str) -> Result<(), ApiError> {
        let role = match message.role {
            RoleParam::User => Role::User,
            RoleParam::Assistant => Role::Assistant,
            RoleParam::System => Role::System,
        };
        let blocks = match message.content {
            Content::Text(text) => {
                self.push(role, text);
                return Ok(());
            }
            Content::Parts(blocks) => blocks,
        };
        // A message without any block is one nevertheless.
        if blocks.is_empty() {
            self.push(role, String::new());
        }
        for (i, block) in blocks.into_iter().enumerate() {
            self.add_block(role, block, &format!("{path}.content[{i}]"))?;
        }
        Ok(())
    }

    fn add_block(&mut self, role: Role, block: Block, path: &str) -> Result<(), ApiError> {
        let unreadable = |what: &str| {
            Err(ApiError::invalid(path, format!("`{path}` is {what}: models here read text only")))
        };
        let wrong_role = |of: &str| {
            Err(ApiError::invalid(path, format!("`{path}` can only be in a message of the role `{of}`")))
        };
        match block {
            Block::Text { text, .. } => self.push(role, text),
            Block::Thinking { .. } | Block::ToolUse { .. } if role != Role::Assistant => {
                return wrong_role("assistant");
            }
            Block::ToolResult { .. } if role != Role::User => return wrong_role("user"),
            // Thinking that was not shown cannot be shown to the model either.
            Block::Thinking { thinking, .. } if thinking.is_empty() => {}
            Block::Thinking { thinking, .. } => {
                let reasoning = self.last(Role::Assistant).reasoning.get_or_insert_default();
                append(reasoning, &thinking);
            }
            Block::ToolUse { id, name, input, .. } => {
                self.called.insert(id.clone(), name.clone());
                let arguments = Value::from(input).to_string();
                self.last(Role::Assistant).tool_calls.push(ToolCall { id, name, arguments });
            }
            Block::ToolResult { tool_use_id, content, is_error, .. } => {
                let Some(name) = self.called.get(&tool_use_id).cloned() else {
                    let message =
                        format!("`{path}.tool_use_id` is `{tool_use_id}`, but no call before it has this id");
                    return Err(ApiError::invalid(format!("{path}.tool_use_id"), message));
                };
                let mut text = content.map_or(Ok(String::new()), |content| content.result(path))?;
                if is_error == Some(true) {
                    text.insert_str(0, "Error: ");
                }
                self.messages.push(Message {
                    role: Role::Tool,
                    content: text,
                    name: Some(name),
                    tool_call_id: Some(tool_use_id),
                    ..Message::default()
                });
            }
            Block::Image(_) => return unreadable("an image"),
            Block::Document(_) => return unreadable("a document"),
            Block::SearchResult(_) => return unreadable("a search result"),
            Block::RedactedThinking(_) => {
                let message =
                    format!("`{path}` is redacted thinking, which nobody here can read; leave it out");
                return Err(ApiError::invalid(path, message));
            }
        }
        Ok(())
    }

    /// Adds a text to the last message, if it is of this role, or as a new one.
    fn push(&mut self, role: Role, text: String) {
        append(&mut self.last(role).content, &text);
    }

    fn last(&mut self, role: Role) -> &mut Message {
        if self.messages.last().is_none_or(|last| last.role != role) {
            self.messages.push(Message { role, ..Message::default() });
        }
        let at = self.messages.len() - 1;
        &mut self.messages[at]
    }
}

/// Texts of one message are paragraphs.
fn append(text: &mut String, more: &str) {
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(more);
}

impl Content<SystemBlock> {
    fn text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(blocks) => {
                let texts: Vec<_> = blocks.into_iter().map(|SystemBlock::Text { text, .. }| text).collect();
                texts.join("\n")
            }
        }
    }
}

impl Content<ResultBlock> {
    fn result(self, path: &str) -> Result<String, ApiError> {
        let blocks = match self {
            Self::Text(text) => return Ok(text),
            Self::Parts(blocks) => blocks.into_iter().enumerate(),
        };
        let texts = blocks.map(|(i, block)| match block {
            ResultBlock::Text { text, .. } => Ok(text),
            ResultBlock::Image(_) | ResultBlock::Document(_) | ResultBlock::SearchResult(_) => {
                let path = format!("{path}.content[{i}]");
                let message = format!("`{path}` is no text: models here read text only");
                Err(ApiError::invalid(path, message))
            }
        });
        Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
    }
}
