//! What is asked, and what it means.

use std::collections::HashMap;

use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{ChatRequest, Format, Message, Reasoning, Role, Tool, ToolCall, ToolChoice},
    wire::{Content, Other, Tolerance, left_out, no_effect, unreadable},
};

/// One message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
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
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicBlock)]
pub enum Block {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// What the model thought.
    Thinking {
        /// Its text.
        thinking: String,
        /// Not checked.
        #[serde(rename = "signature")]
        _signature: Option<String>,
    },
    /// A tool that the model has called.
    ToolUse {
        /// Names the call.
        id: String,
        /// Names the tool.
        name: String,
        /// Its arguments.
        #[schema(value_type = Option<Object>)]
        input: Option<Map<String, Value>>,
    },
    /// What came of a call.
    ToolResult {
        /// Which call.
        tool_use_id: String,
        /// The result.
        content: Option<Content<ResultBlock>>,
        /// Whether it failed: the model then reads `Error: ` before the result.
        is_error: Option<bool>,
    },
    /// Refused in the last message of a user, and replaced by a note in others and in results of calls: models here read
    /// text only.
    #[schema(value_type = Object)]
    Image(Map<String, Value>),
    /// Refused in the last message of a user, and replaced by a note in others and in results of calls: models here read
    /// text only.
    #[schema(value_type = Object)]
    Document(Map<String, Value>),
    /// Refused in the last message of a user, and replaced by a note in others and in results of calls: models here read
    /// text only.
    #[schema(value_type = Object)]
    SearchResult(Map<String, Value>),
    /// Ignored: nobody here can read it.
    #[schema(value_type = Object)]
    RedactedThinking(Map<String, Value>),
    /// Any other kind is ignored, and named in `X-Paguro-Ignored`.
    #[serde(other)]
    Other,
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
    /// Refused in the last message of a user, and replaced by a note in others and in results of calls: models here read
    /// text only.
    #[schema(value_type = Object)]
    Image(Map<String, Value>),
    /// Refused in the last message of a user, and replaced by a note in others and in results of calls: models here read
    /// text only.
    #[schema(value_type = Object)]
    Document(Map<String, Value>),
    /// Refused in the last message of a user, and replaced by a note in others and in results of calls: models here read
    /// text only.
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

/// A tool that the model may call, or one that this server would have to run.
#[derive(Debug, ToSchema)]
#[serde(untagged)]
#[schema(as = AnthropicTool)]
pub enum ToolParam {
    /// A tool that the client runs.
    Custom(CustomTool),
    /// Any other kind (`web_search_...`, `bash_...`, ...) is not offered: this server runs no tools. It is ignored, and named
    /// in `X-Paguro-Ignored`.
    #[schema(value_type = Object)]
    Other(Value),
}

/// A tool that the client runs.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicCustomTool)]
pub struct CustomTool {
    /// `custom` or absent.
    #[serde(rename = "type")]
    _type: Option<CustomType>,
    /// Its name.
    name: String,
    /// What it does.
    description: Option<String>,
    /// The JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    input_schema: Option<Map<String, Value>>,
    /// Whether calls must fit the schema.
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

/// Known fields of the parts of a prompt that are not read.
pub const OTHERS: &[Other] = &[
    no_effect("cache_control", PREFIXES),
    no_effect("system[].cache_control", PREFIXES),
    no_effect("system[].citations", "the model reads the text only"),
    no_effect("messages[].content[].cache_control", PREFIXES),
    no_effect("messages[].content[].citations", "the model reads the text only"),
    no_effect("messages[].content[].caller", "calls come from the model"),
    no_effect("messages[].content[].content[].cache_control", PREFIXES),
    no_effect("messages[].content[].content[].citations", "the model reads the text only"),
    no_effect("tools[].cache_control", PREFIXES),
    no_effect("tools[].eager_input_streaming", "arguments are always sent as they come"),
    left_out("tools[].defer_loading", &["false"], "tools are offered from the beginning"),
    left_out("tools[].input_examples", &[], "say in the description how to use the tool"),
    left_out("tools[].allowed_callers", &["[\"direct\"]"], "the model itself calls: `direct`"),
    left_out("speed", &["\"standard\""], "answers come as fast as they can: `standard`"),
    left_out("user_profile_id", &[], "there are no profiles"),
    left_out("workspace_id", &[], "there are no workspaces"),
    no_effect("betas", "what there is here is always on"),
    no_effect("anthropic_version", "the header says it"),
];

const PREFIXES: &str = "all prefixes are kept as long as there is room, and usage says what was found";

/// Whether tools are called.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
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
#[serde(tag = "type", rename_all = "lowercase")]
#[schema(as = AnthropicThinking)]
pub enum ThinkingParam {
    /// It does.
    Enabled {
        /// Most tokens to think with, at least 1024 and below `max_tokens`. Then the thought is closed, and the answer
        /// begins. If absent, there is no bound.
        budget_tokens: Option<usize>,
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
#[schema(as = AnthropicOutputConfig)]
pub struct OutputConfig {
    /// How much a model that thinks should think: `low`, `medium`, `high`, `xhigh`, `max`.
    effort: Option<String>,
    /// What form it has.
    format: Option<OutputFormat>,
}

/// The form of an answer.
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

/// The part of a request that makes the prompt.
#[derive(Debug)]
pub struct Chat {
    pub messages: Vec<MessageParam>,
    pub system: Option<Content<SystemBlock>>,
    pub tools: Option<Vec<ToolParam>>,
    pub tool_choice: Option<ToolChoiceParam>,
    pub thinking: Option<ThinkingParam>,
    pub output_config: Option<OutputConfig>,
    pub output_format: Option<OutputFormat>,
}

impl Chat {
    /// Our own request. `max_tokens` bounds the thinking, too.
    ///
    /// # Errors
    /// What cannot be honoured, by name.
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
    if let Some(effort) = effort
        .as_deref()
        .filter(|effort| !["none", "minimal", "low", "medium", "high", "xhigh", "max"].contains(effort))
    {
        let message = format!("`output_config.effort` is low, medium, high, xhigh or max, not `{effort}`");
        return Err(ApiError::invalid("output_config.effort", message));
    }
    let mut budget = None;
    let enabled = match thinking {
        None | Some(ThinkingParam::Adaptive { .. }) => None,
        Some(ThinkingParam::Disabled {}) => Some(false),
        Some(ThinkingParam::Enabled { budget_tokens, .. }) => {
            let is_wrong = |budget: usize| budget < 1024 || max_tokens.is_some_and(|most| budget >= most);
            if budget_tokens.is_some_and(is_wrong) {
                let message = "`thinking.budget_tokens` must be at least 1024 and below `max_tokens`";
                return Err(ApiError::invalid("thinking.budget_tokens", message));
            }
            budget = budget_tokens;
            Some(true)
        }
    };
    let param = if enabled.is_some() { "thinking" } else { "output_config.effort" };
    Ok(Reasoning { enabled, effort, budget, param, demanded: false })
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
    /// Adds a message. The model is asked about one of them.
    fn add(
        &mut self,
        message: MessageParam,
        path: &str,
        is_asked: bool,
        tolerance: &Tolerance,
    ) -> Result<(), ApiError> {
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
            self.add_block(role, block, &format!("{path}.content[{i}]"), is_asked, tolerance)?;
        }
        Ok(())
    }

    fn add_block(
        &mut self,
        role: Role,
        block: Block,
        path: &str,
        is_asked: bool,
        tolerance: &Tolerance,
    ) -> Result<(), ApiError> {
        let unreadable = |kind: &str| unreadable(kind, path, is_asked, tolerance);
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
                let arguments = Value::from(input.unwrap_or_default()).to_string();
                self.last(Role::Assistant).tool_calls.push(ToolCall { id, name, arguments });
            }
            Block::ToolResult { tool_use_id, content, is_error, .. } => {
                let Some(name) = self.called.get(&tool_use_id).cloned() else {
                    let message =
                        format!("`{path}.tool_use_id` is `{tool_use_id}`, but no call before it has this id");
                    return Err(ApiError::invalid(format!("{path}.tool_use_id"), message));
                };
                let mut text =
                    content.map_or(Ok(String::new()), |content| content.result(path, tolerance))?;
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
            Block::Image(_) => self.push(role, unreadable("image")?),
            Block::Document(document) => match plain_text(&document) {
                Some(text) => self.push(role, text),
                None => self.push(role, unreadable("document")?),
            },
            Block::SearchResult(result) => match found_text(&result) {
                Some(text) => self.push(role, text),
                None => self.push(role, unreadable("search_result")?),
            },
            Block::RedactedThinking(_) => {
                tolerance.leave_out(path, "nobody here can read redacted thinking")?
            }
            Block::Other => tolerance.leave_out(path, "blocks of this type have no meaning here")?,
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

/// The text of a document that is plain text.
fn plain_text(document: &Map<String, Value>) -> Option<String> {
    let source = document.get("source")?;
    let is_text = source.get("type")?.as_str() == Some("text");
    is_text.then(|| source.get("data")?.as_str().map(str::to_owned)).flatten()
}

/// The title, source and text of a search result.
fn found_text(result: &Map<String, Value>) -> Option<String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let parts = result.get("content")?.as_array()?.iter().map(|part| text(part.get("text")?));
    let parts = parts.collect::<Option<Vec<_>>>()?;
    let heading = ["title", "source"].into_iter().filter_map(|name| text(result.get(name)?));
    Some(heading.chain(parts).collect::<Vec<_>>().join("\n"))
}

/// Claude Code's line about its bill. It has a number that is new in each request (`cch=`), which the model does not need,
/// and which would keep every request from finding the prefix of the one before.
const BILLING: &str = "x-anthropic-billing-header:";

/// The system prompt with a constant number in [`BILLING`]'s line.
fn without_nonce(system: String) -> String {
    let end = system.find('\n').unwrap_or(system.len());
    let Some(start) = system[..end].find("cch=").filter(|_| system.starts_with(BILLING)) else {
        return system;
    };
    let start = start + "cch=".len();
    let length = system[start..end].find([';', ' ']).unwrap_or(end - start);
    [&system[..start], "0", &system[start + length..]].concat()
}

impl Content<SystemBlock> {
    fn text(self) -> String {
        without_nonce(match self {
            Self::Text(text) => text,
            Self::Parts(blocks) => {
                let texts: Vec<_> = blocks.into_iter().map(|SystemBlock::Text { text, .. }| text).collect();
                texts.join("\n")
            }
        })
    }
}

impl Content<ResultBlock> {
    /// The text of a call's result. The client cannot take back what a tool has found, so other content is replaced.
    fn result(self, path: &str, tolerance: &Tolerance) -> Result<String, ApiError> {
        let blocks = match self {
            Self::Text(text) => return Ok(text),
            Self::Parts(blocks) => blocks.into_iter().enumerate(),
        };
        let texts = blocks.map(|(i, block)| {
            let kind = match block {
                ResultBlock::Text { text, .. } => return Ok(text),
                ResultBlock::Document(document) => match plain_text(&document) {
                    Some(text) => return Ok(text),
                    None => "document",
                },
                ResultBlock::Image(_) => "image",
                ResultBlock::SearchResult(result) => match found_text(&result) {
                    Some(text) => return Ok(text),
                    None => "search_result",
                },
                ResultBlock::Other => "content",
            };
            unreadable(kind, &format!("{path}.content[{i}]"), false, tolerance)
        });
        Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_bill_is_constant() {
        for (system, expected) in [
            (
                "x-anthropic-billing-header: cc_version=2; cch=aa111;\nRules with cch=1",
                "x-anthropic-billing-header: cc_version=2; cch=0;\nRules with cch=1",
            ),
            ("x-anthropic-billing-header: cch=bb222", "x-anthropic-billing-header: cch=0"),
            ("x-anthropic-billing-header: a=1\ncch=2;", "x-anthropic-billing-header: a=1\ncch=2;"),
            ("Say cch=1;", "Say cch=1;"),
        ] {
            assert_eq!(without_nonce(system.into()), expected);
        }
    }
}
