//! Messages, tools and answer formats of a chat.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use super::types::{Content, refuse};
use crate::{
    error::ApiError,
    generate::{Format, Message, Role, Tool, ToolCall, ToolChoice},
};

/// One message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// Who says it.
    pub role: RoleParam,
    /// What is said. An assistant's may be absent if it calls tools.
    pub content: Option<Content<ContentPart>>,
    /// Who of several.
    pub name: Option<String>,
    /// What an assistant thought before it said that, for models whose templates show it.
    pub reasoning_content: Option<String>,
    /// The same under its other name.
    pub reasoning: Option<String>,
    /// What an assistant called.
    pub tool_calls: Option<Vec<ToolCallParam>>,
    /// Which call this is the result of.
    pub tool_call_id: Option<String>,
    /// What an assistant said instead of an answer.
    pub refusal: Option<String>,
    /// Has no effect: the model sees only the text.
    #[expect(dead_code, reason = "it has no effect; see above")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub annotations: Option<Vec<Value>>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub audio: Option<Value>,
    /// Not supported: `tool_calls` has replaced it.
    #[schema(value_type = Option<Object>)]
    pub function_call: Option<Value>,
}

/// Who says a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RoleParam {
    /// The one who set this up.
    System,
    /// The newer name of `system`; templates know that one.
    Developer,
    /// The one who asks.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ContentPart {
    /// `text`, or an assistant's `refusal`. Nothing else can be read.
    pub r#type: String,
    /// The text.
    pub text: Option<String>,
    /// The refusal.
    pub refusal: Option<String>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub image_url: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub input_audio: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub file: Option<Value>,
}

/// A call that an assistant made.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolCallParam {
    /// Names the call.
    pub id: String,
    /// Always `function`.
    #[expect(dead_code, reason = "there is nothing else")]
    pub r#type: FunctionType,
    /// What was called.
    pub function: FunctionCallParam,
}

/// `function`: there is nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FunctionType {
    /// A function.
    #[default]
    Function,
}

/// What was called.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionCallParam {
    /// The function's name.
    pub name: String,
    /// An object, as JSON text.
    pub arguments: String,
}

/// A function that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolParam {
    /// Always `function`.
    #[expect(dead_code, reason = "there is nothing else")]
    pub r#type: FunctionType,
    /// The function.
    pub function: FunctionParam,
}

/// A function.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionParam {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments; absent, it takes none.
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
    /// Whether calls must fit the schema.
    pub strict: Option<bool>,
}

/// Whether tools are called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ToolChoiceParam {
    /// `none`, `auto` or `required`.
    Mode(String),
    /// This one.
    Named(NamedTool),
}

/// A tool that is to be called.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedTool {
    /// Always `function`.
    r#type: FunctionType,
    /// Which one.
    function: NamedFunction,
}

/// A function that is to be called.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedFunction {
    name: String,
}

/// What an answer must be.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResponseFormat {
    /// The kind.
    pub r#type: FormatType,
    /// With `json_schema`: the schema.
    pub json_schema: Option<JsonSchemaParam>,
}

/// Kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FormatType {
    /// Any text.
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that fits a schema.
    JsonSchema,
}

/// A schema with its name.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JsonSchemaParam {
    /// Its name; has no effect.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub name: String,
    /// What it is for; has no effect.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub description: Option<String>,
    /// The schema.
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Value>,
    /// Answers always fit, whatever is said here.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub strict: Option<bool>,
}

impl ChatMessage {
    /// Our own message; `path` is where it was.
    ///
    /// # Errors
    /// What its role cannot have, or nothing here can read.
    pub fn into_message(self, path: &str) -> Result<Message, ApiError> {
        let field = |name: &str| format!("{path}.{name}");
        refuse(&self.audio, &field("audio"), "models here read text only")?;
        refuse(&self.function_call, &field("function_call"), "`tool_calls` has replaced it")?;
        let only = |is_there: bool, name: &str, role: RoleParam| match is_there && self.role != role {
            true => {
                let role = format!("{role:?}").to_lowercase();
                let param = field(name);
                Err(ApiError::invalid(&param, format!("`{param}`: only messages of role `{role}` have it")))
            }
            false => Ok(()),
        };
        only(self.tool_calls.is_some(), "tool_calls", RoleParam::Assistant)?;
        only(self.reasoning_content.is_some(), "reasoning_content", RoleParam::Assistant)?;
        only(self.reasoning.is_some(), "reasoning", RoleParam::Assistant)?;
        only(self.refusal.is_some(), "refusal", RoleParam::Assistant)?;
        only(self.tool_call_id.is_some(), "tool_call_id", RoleParam::Tool)?;
        if self.role == RoleParam::Tool && self.tool_call_id.is_none() {
            let param = field("tool_call_id");
            return Err(ApiError::invalid(
                &param,
                format!("`{param}` is missing: which call is this the result of?"),
            ));
        }
        let content = self.content.map(|content| content.text(&field("content"))).transpose()?;
        let content = content.or(self.refusal);
        let calls = self.tool_calls.unwrap_or_default();
        if content.is_none() && calls.is_empty() {
            let param = field("content");
            return Err(ApiError::invalid(&param, format!("`{param}` is missing")));
        }
        Ok(Message {
            role: match self.role {
                RoleParam::System | RoleParam::Developer => Role::System,
                RoleParam::User => Role::User,
                RoleParam::Assistant => Role::Assistant,
                RoleParam::Tool => Role::Tool,
            },
            content: content.unwrap_or_default(),
            reasoning: self.reasoning_content.or(self.reasoning),
            name: self.name,
            tool_calls: calls.into_iter().map(ToolCallParam::into_call).collect(),
            tool_call_id: self.tool_call_id,
        })
    }
}

impl Content<ContentPart> {
    fn text(self, path: &str) -> Result<String, ApiError> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Parts(parts) => {
                let parts = parts.into_iter().enumerate();
                parts.map(|(i, part)| part.text(&format!("{path}[{i}]"))).collect()
            }
        }
    }
}

impl ContentPart {
    fn text(self, path: &str) -> Result<String, ApiError> {
        let Self { r#type, text, refusal, image_url, input_audio, file } = self;
        let (wanted, other) = match r#type.as_str() {
            "text" => (("text", text), ("refusal", refusal)),
            "refusal" => (("refusal", refusal), ("text", text)),
            other => {
                let param = format!("{path}.type");
                let message = format!("`{param}` is `{other}`: models here read `text` only");
                return Err(ApiError::invalid(param, message));
            }
        };
        refuse(&image_url, &format!("{path}.image_url"), "models here read text only")?;
        refuse(&input_audio, &format!("{path}.input_audio"), "models here read text only")?;
        refuse(&file, &format!("{path}.file"), "models here read text only")?;
        refuse(&other.1, &format!("{path}.{}", other.0), format_args!("this part is a `{}`", r#type))?;
        let param = format!("{path}.{}", wanted.0);
        wanted.1.ok_or_else(|| ApiError::invalid(&param, format!("`{param}` is missing")))
    }
}

impl ToolCallParam {
    fn into_call(self) -> ToolCall {
        ToolCall { id: self.id, name: self.function.name, arguments: self.function.arguments }
    }
}

impl ToolParam {
    /// Our own tool.
    pub fn into_tool(self) -> Tool {
        let FunctionParam { name, description, parameters, strict } = self.function;
        Tool { name, description, parameters, strict: strict == Some(true) }
    }
}

impl<'de> Deserialize<'de> for ToolChoiceParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("`none`, `auto`, `required`, or the function to call")
            .string(|mode| Ok(Self::Mode(mode.to_owned())))
            .map(|map| map.deserialize().map(Self::Named))
            .deserialize(deserializer)
    }
}

impl ToolChoiceParam {
    /// Our own choice.
    ///
    /// # Errors
    /// A choice that is none, or of a tool that is not offered.
    pub fn check(choice: Option<Self>, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
        match &choice {
            None => ToolChoice::check(Ok("auto"), tools),
            Some(Self::Mode(mode)) => ToolChoice::check(Ok(mode), tools),
            Some(Self::Named(tool)) => ToolChoice::check(Err(&tool.function.name), tools),
        }
    }
}

impl ResponseFormat {
    /// Our own format.
    ///
    /// # Errors
    /// A schema that is missing, or of a format that has none.
    pub fn format(format: Option<Self>) -> Result<Format, ApiError> {
        let Some(Self { r#type, json_schema }) = format else { return Ok(Format::Text) };
        if r#type != FormatType::JsonSchema {
            refuse(&json_schema, "response_format.json_schema", "only the type `json_schema` has a schema")?;
        }
        match (r#type, json_schema) {
            (FormatType::Text, _) => Ok(Format::Text),
            (FormatType::JsonObject, _) => Ok(Format::JsonObject),
            (FormatType::JsonSchema, Some(JsonSchemaParam { schema: Some(schema), .. })) => {
                Ok(Format::JsonSchema(schema))
            }
            (FormatType::JsonSchema, _) => {
                let param = "response_format.json_schema.schema";
                Err(ApiError::invalid(param, format!("`{param}` is missing")))
            }
        }
    }
}
