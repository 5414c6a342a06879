//! What `/v1/responses` is asked, and the chat that becomes of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use super::super::{
    messages::FunctionType,
    types::{self, Content, StreamOptions, refuse},
};
use crate::{
    error::ApiError,
    generate::{ChatRequest, Format, Message, Options, Reasoning, Role, Tool, ToolCall, ToolChoice},
};

/// A turn that is to be answered.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResponseRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// What is said: a text, or items.
    pub input: Option<InputParam>,
    /// What the model is told first. It holds for this turn only.
    pub instructions: Option<String>,
    /// Goes on after this stored response.
    pub previous_response_id: Option<String>,
    /// Whether the response can be asked for, and gone on from, later; true if absent. Responses are kept in memory:
    /// the oldest ones go first, and all with the server.
    pub store: Option<bool>,
    /// Sends the response in parts, as server-sent events.
    pub stream: Option<bool>,
    /// How the stream is written.
    pub stream_options: Option<StreamOptions>,
    /// Most tokens of the answer, those that the model thinks with included.
    pub max_output_tokens: Option<usize>,
    /// Divides the logits; 0 takes the best token. If absent, what the model recommends, or 0.8.
    pub temperature: Option<f32>,
    /// Keeps the smallest set of best tokens whose probability reaches this.
    pub top_p: Option<f32>,
    /// With `include: ["message.output_text.logprobs"]`: how many of the best tokens are reported.
    pub top_logprobs: Option<usize>,
    /// What else to report: `message.output_text.logprobs`. `reasoning.encrypted_content` has no effect: reasoning is
    /// not encrypted.
    pub include: Option<Vec<String>>,
    /// What the answer must be.
    pub text: Option<TextParam>,
    /// How a model that thinks should think.
    pub reasoning: Option<ReasoningParam>,
    /// What the model may call.
    pub tools: Option<Vec<FunctionToolParam>>,
    /// Whether it may, or must.
    pub tool_choice: Option<FunctionChoiceParam>,
    /// Whether it may call several tools at once.
    pub parallel_tool_calls: Option<bool>,
    /// Must be `disabled` or absent: what does not fit is refused and not cut.
    pub truncation: Option<String>,
    /// Must be false or absent.
    pub background: Option<bool>,
    /// Must be `auto`, `default` or absent: there is one tier.
    pub service_tier: Option<String>,
    /// Comes back with the response.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Has no effect: nobody is told about users.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub user: Option<String>,
    /// Has no effect: nobody is told about users.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub safety_identifier: Option<String>,
    /// Has no effect: prefixes are found by their content.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub prompt_cache_key: Option<String>,
    /// Has no effect: prefixes stay as long as there is room.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub prompt_cache_retention: Option<String>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub conversation: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub prompt: Option<Value>,
    /// Not supported: no tools run here.
    pub max_tool_calls: Option<usize>,
}

/// A text, or items.
#[derive(Debug, ToSchema, Serialize)]
#[serde(untagged)]
pub enum InputParam {
    /// What the user says.
    Text(String),
    /// Items, oldest first.
    #[schema(value_type = Vec<Object>)]
    Items(Vec<InputItem>),
}

impl<'de> Deserialize<'de> for InputParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a text or a list of items")
            .string(|text| Ok(Self::Text(text.to_owned())))
            .seq(|list| list.deserialize().map(Self::Items))
            .deserialize(deserializer)
    }
}

/// A message, a call, its result, or reasoning.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InputItem {
    /// `message` (also if absent), `function_call`, `function_call_output` or `reasoning`.
    pub r#type: Option<String>,
    /// Has no effect.
    pub id: Option<String>,
    /// Has no effect.
    pub status: Option<String>,
    /// Who says a message: `user`, `assistant`, `system` or `developer`.
    pub role: Option<String>,
    /// What a message says, or what was thought.
    pub content: Option<Content<InputPart>>,
    /// Which call this is, or is the result of.
    pub call_id: Option<String>,
    /// What is called.
    pub name: Option<String>,
    /// With what: an object as JSON text.
    pub arguments: Option<String>,
    /// The result of a call.
    pub output: Option<Content<InputPart>>,
    /// A summary of reasoning; has no effect.
    #[schema(value_type = Option<Vec<Object>>)]
    pub summary: Option<Vec<Value>>,
    /// Must be absent: reasoning is not encrypted here.
    pub encrypted_content: Option<String>,
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InputPart {
    /// `input_text`, `output_text`, `refusal` or `reasoning_text`.
    pub r#type: String,
    /// The text.
    pub text: Option<String>,
    /// A refusal's text.
    pub refusal: Option<String>,
    /// Has no effect: the model sees only the text.
    #[schema(value_type = Option<Vec<Object>>)]
    pub annotations: Option<Vec<Value>>,
    /// Has no effect: the model sees only the text.
    #[schema(value_type = Option<Vec<Object>>)]
    pub logprobs: Option<Vec<Value>>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub image_url: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub file_id: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub file_data: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub file_url: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub filename: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub detail: Option<Value>,
}

/// What the answer must be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TextParam {
    /// Text, if absent.
    #[serde(default)]
    pub format: Option<FormatParam>,
    /// Must be `medium` or absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verbosity: Option<String>,
}

/// A format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FormatParam {
    /// `text`, `json_object` or `json_schema`.
    pub r#type: String,
    /// A schema's name; has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What a schema is for; has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// With `json_schema`: the schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Value>,
    /// Answers always fit, whatever is said here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strict: Option<bool>,
}

/// How a model that thinks should think.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReasoningParam {
    /// `none`, `minimal`, `low`, `medium`, `high` or `xhigh`.
    pub effort: Option<String>,
    /// Must be `auto` or absent: reasoning is shown as it is, and not summed up.
    pub summary: Option<String>,
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionToolParam {
    /// Always `function`.
    pub r#type: FunctionType,
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
    /// Whether calls must fit the schema.
    pub strict: Option<bool>,
}

/// Whether tools are called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum FunctionChoiceParam {
    /// `none`, `auto` or `required`.
    Mode(String),
    /// This one.
    Named(FunctionChoice),
}

/// A function that is to be called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionChoice {
    r#type: FunctionType,
    name: String,
}

impl<'de> Deserialize<'de> for FunctionChoiceParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("`none`, `auto`, `required`, or the function to call")
            .string(|mode| Ok(Self::Mode(mode.to_owned())))
            .map(|map| map.deserialize().map(Self::Named))
            .deserialize(deserializer)
    }
}

/// What `include` may ask for.
const LOGPROBS: &str = "message.output_text.logprobs";

impl ResponseRequest {
    /// The messages of this turn.
    ///
    /// # Errors
    /// What cannot be read, by name.
    pub fn messages(&mut self) -> Result<Vec<Message>, ApiError> {
        match self.input.take() {
            None if self.previous_response_id.is_some() => Ok(Vec::new()),
            None => Err(ApiError::invalid("input", "`input` is missing")),
            Some(InputParam::Text(content)) => Ok(vec![Message { content, ..Message::default() }]),
            Some(InputParam::Items(items)) => messages(items),
        }
    }

    /// Whether log-probabilities are wanted.
    pub fn wants_logprobs(&self) -> bool {
        self.include.iter().flatten().any(|what| what == LOGPROBS)
    }

    /// The chat to answer, from all messages so far.
    ///
    /// # Errors
    /// What cannot be honoured, by name.
    pub fn chat(&self, messages: Vec<Message>) -> Result<ChatRequest, ApiError> {
        self.refuse_unsupported()?;
        let logprobs = self.wants_logprobs().then(|| self.top_logprobs.unwrap_or(0));
        if self.top_logprobs.is_some() && logprobs.is_none() {
            let message = format!("`top_logprobs` needs `include`: [\"{LOGPROBS}\"]");
            return Err(ApiError::invalid("top_logprobs", message));
        }
        if logprobs > Some(20) {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be at most 20"));
        }
        let options = Options {
            temperature: self.temperature,
            top_p: self.top_p,
            max_tokens: types::at_least_one(self.max_output_tokens, "max_output_tokens")?.map(Into::into),
            logprobs: logprobs.map(Into::into),
            ..Options::default()
        };
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone());
        let tools: Vec<_> = self.tools.iter().flatten().cloned().map(FunctionToolParam::into_tool).collect();
        Ok(ChatRequest {
            messages,
            tool_choice: self.tool_choice(&tools)?,
            tools,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            format: self.format()?,
            reasoning: Reasoning::from_effort(effort, "reasoning.effort")?,
            // Without streaming nobody needs half a call.
            whole_calls: self.stream != Some(true),
            options,
            ..ChatRequest::default()
        })
    }

    fn tool_choice(&self, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
        ToolChoice::check(
            match &self.tool_choice {
                None => Ok("auto"),
                Some(FunctionChoiceParam::Mode(mode)) => Ok(mode.as_str()),
                Some(FunctionChoiceParam::Named(choice)) => Err(choice.name.as_str()),
            },
            tools,
        )
    }

    fn format(&self) -> Result<Format, ApiError> {
        let Some(format) = self.text.as_ref().and_then(|text| text.format.clone()) else {
            return Ok(Format::Text);
        };
        match (format.r#type.as_str(), format.schema) {
            ("json_schema", Some(schema)) => Ok(Format::JsonSchema(schema)),
            ("json_schema", None) => {
                Err(ApiError::invalid("text.format.schema", "`text.format.schema` is missing"))
            }
            (_, Some(_)) => {
                let message = "`text.format.schema`: only the type `json_schema` has a schema";
                Err(ApiError::invalid("text.format.schema", message))
            }
            ("text", None) => Ok(Format::Text),
            ("json_object", None) => Ok(Format::JsonObject),
            (other, None) => {
                let message =
                    format!("`text.format.type` is text, json_object or json_schema, not `{other}`");
                Err(ApiError::invalid("text.format.type", message))
            }
        }
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        StreamOptions::check(self.stream_options, self.stream == Some(true))?;
        refuse(&self.conversation, "conversation", "`previous_response_id` goes on from a response")?;
        refuse(&self.prompt, "prompt", "there are no stored prompts")?;
        refuse(&self.max_tool_calls, "max_tool_calls", "no tools run here: calls come back to you")?;
        let background = self.background.filter(|background| *background);
        refuse(&background, "background", "a response ends with its connection")?;
        let truncation = self.truncation.as_ref().filter(|how| *how != "disabled");
        refuse(&truncation, "truncation", "what does not fit is refused and not cut")?;
        let tier = self.service_tier.as_ref().filter(|tier| !matches!(tier.as_str(), "auto" | "default"));
        refuse(&tier, "service_tier", "there is one tier, `default`")?;
        let summary = self.reasoning.as_ref().and_then(|reasoning| reasoning.summary.as_ref());
        refuse(&summary.filter(|how| *how != "auto"), "reasoning.summary", "reasoning is not summed up")?;
        let verbosity = self.text.as_ref().and_then(|text| text.verbosity.as_ref());
        let why = "models here do not know it; say in a message how long to answer";
        refuse(&verbosity.filter(|verbosity| *verbosity != "medium"), "text.verbosity", why)?;
        let known = [LOGPROBS, "reasoning.encrypted_content"];
        match self.include.iter().flatten().enumerate().find(|(_, what)| !known.contains(&what.as_str())) {
            Some((i, what)) => {
                let message =
                    format!("`include[{i}]` asks for `{what}`, which there is not; there is {LOGPROBS}");
                Err(ApiError::invalid(format!("include[{i}]"), message))
            }
            None => Ok(()),
        }
    }
}

impl TextParam {
    /// As it comes back: plain text is a format, too.
    pub fn or_plain(self) -> Self {
        let plain =
            FormatParam { r#type: "text".into(), name: None, description: None, schema: None, strict: None };
        Self { format: self.format.or(Some(plain)), ..self }
    }
}

impl FunctionToolParam {
    fn into_tool(self) -> Tool {
        let Self { name, description, parameters, strict, .. } = self;
        Tool { name, description, parameters, strict: strict == Some(true) }
    }
}

/// Messages from items: reasoning and calls belong to the assistant's message that they stand beside.
fn messages(items: Vec<InputItem>) -> Result<Vec<Message>, ApiError> {
    let mut messages: Vec<Message> = Vec::new();
    let mut reasoning = None;
    for (i, item) in items.into_iter().enumerate() {
        let path = format!("input[{i}]");
        match item.read(&path)? {
            Item::Reasoning(text) => reasoning = Some(text),
            Item::Message(mut message) => {
                if message.role == Role::Assistant {
                    message.reasoning = reasoning.take();
                }
                messages.push(message);
            }
            Item::Call(call) => match messages.last_mut() {
                Some(last) if last.role == Role::Assistant && reasoning.is_none() => {
                    last.tool_calls.push(call)
                }
                _ => messages.push(Message {
                    role: Role::Assistant,
                    reasoning: reasoning.take(),
                    tool_calls: vec![call],
                    ..Message::default()
                }),
            },
        }
    }
    if messages.is_empty() {
        return Err(ApiError::invalid("input", "`input` has no messages: there is nothing to answer"));
    }
    Ok(messages)
}

enum Item {
    Message(Message),
    Call(ToolCall),
    Reasoning(String),
}

impl InputItem {
    fn read(self, path: &str) -> Result<Item, ApiError> {
        fn need<T>(value: Option<T>, path: &str, name: &str) -> Result<T, ApiError> {
            let param = format!("{path}.{name}");
            value.ok_or_else(|| ApiError::invalid(&param, format!("`{param}` is missing")))
        }
        let text = |content: Content<InputPart>, name: &str| text(content, &format!("{path}.{name}"));
        refuse(
            &self.encrypted_content,
            &format!("{path}.encrypted_content"),
            "reasoning is not encrypted here",
        )?;
        match self.r#type.as_deref().unwrap_or("message") {
            "message" => {
                let role = match need(self.role, path, "role")?.as_str() {
                    "user" => Role::User,
                    "assistant" => Role::Assistant,
                    "system" | "developer" => Role::System,
                    other => {
                        let param = format!("{path}.role");
                        let message =
                            format!("`{param}` is user, assistant, system or developer, not `{other}`");
                        return Err(ApiError::invalid(param, message));
                    }
                };
                let content = text(need(self.content, path, "content")?, "content")?;
                Ok(Item::Message(Message { role, content, ..Message::default() }))
            }
            "function_call" => Ok(Item::Call(ToolCall {
                id: need(self.call_id, path, "call_id")?,
                name: need(self.name, path, "name")?,
                arguments: need(self.arguments, path, "arguments")?,
            })),
            "function_call_output" => {
                let content = text(need(self.output, path, "output")?, "output")?;
                let tool_call_id = Some(need(self.call_id, path, "call_id")?);
                Ok(Item::Message(Message { role: Role::Tool, content, tool_call_id, ..Message::default() }))
            }
            "reasoning" => {
                let content = self.content.map(|content| text(content, "content")).transpose()?;
                Ok(Item::Reasoning(content.unwrap_or_default()))
            }
            other => {
                let param = format!("{path}.type");
                let message = format!(
                    "`{param}` is `{other}`: items here are message, function_call, function_call_output and reasoning"
                );
                Err(ApiError::invalid(param, message))
            }
        }
    }
}

fn text(content: Content<InputPart>, path: &str) -> Result<String, ApiError> {
    let part = |(i, part): (usize, InputPart)| {
        let text = match part.r#type.as_str() {
            "input_text" | "output_text" | "reasoning_text" | "text" => part.text,
            "refusal" => part.refusal,
            other => {
                let param = format!("{path}[{i}].type");
                let message = format!("`{param}` is `{other}`: models here read text only");
                return Err(ApiError::invalid(param, message));
            }
        };
        let param = format!("{path}[{i}].text");
        text.ok_or_else(|| ApiError::invalid(&param, format!("`{param}` is missing")))
    };
    match content {
        Content::Text(text) => Ok(text),
        Content::Parts(parts) => parts.into_iter().enumerate().map(part).collect(),
    }
}
