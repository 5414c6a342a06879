//! Messages and answer formats of a chat.

use paguro_engine::Grammar;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{Format, Message, Role, ToolCall},
    images::{self, Image, Parts},
    wire::{Content, Other, Output, Tolerance, arguments, no_effect, refused, unreadable},
};

/// One message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ChatMessage {
    /// Author of the message.
    pub role: RoleParam,
    /// Content; may be absent for an assistant that calls tools. The result of a call may be an object.
    pub content: Option<Output<ContentPart>>,
    /// Name of the author among several.
    pub name: Option<String>,
    /// Reasoning of an assistant before the content, for models whose templates contain it.
    pub reasoning_content: Option<String>,
    /// Another name of `reasoning_content`.
    pub reasoning: Option<String>,
    /// Tool calls of an assistant.
    pub tool_calls: Option<Vec<ToolCallParam>>,
    /// Id of the call of a result; if absent, the first of the last calls without a result.
    pub tool_call_id: Option<String>,
    /// Refusal of an assistant.
    pub refusal: Option<String>,
}

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RoleParam {
    /// The operator.
    System,
    /// The newer name of `system`.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, ToSchema)]
pub struct ContentPart {
    /// `text`, `image_url`, or an assistant's `refusal`. Video and audio are refused. Other types are refused in the
    /// last message of a user, and replaced by a note in earlier ones, because no model reads them. So are images for a
    /// model that reads text only.
    pub r#type: Option<String>,
    /// The text.
    pub text: Option<String>,
    /// The refusal.
    pub refusal: Option<String>,
    /// The image.
    pub image_url: Option<ImageUrlParam>,
    /// Level of detail, if `image_url` is a text.
    pub detail: Option<String>,
}

/// An image: its URL, or an object with it.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ImageUrlParam {
    /// The URL.
    Url(String),
    /// The URL and options.
    Object(ImageUrlObject),
}

/// An image at a URL.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, ToSchema)]
pub struct ImageUrlObject {
    /// A data URL (`data:image/png;base64,...`), or a URL of http or https at a host that `--image-urls` names.
    pub url: String,
    /// `auto`, `low` (few tokens) or `high` (as many as model and settings permit).
    pub detail: Option<String>,
}

impl<'de> Deserialize<'de> for ImageUrlParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a URL, or an object with `url`")
            .string(|url| Ok(Self::Url(url.to_owned())))
            .map(|map| map.deserialize().map(Self::Object))
            .deserialize(deserializer)
    }
}

impl ImageUrlParam {
    /// Returns the image in the field at `path`. `detail` is that of the part.
    ///
    /// # Errors
    /// An unknown level of detail, or a URL that is not supported.
    pub fn image(self, path: &str, detail: Option<&str>) -> Result<Image, ApiError> {
        let (url, own) = match self {
            Self::Url(url) => (url, None),
            Self::Object(object) => (object.url, object.detail),
        };
        let field = if own.is_some() { format!("{path}.image_url.detail") } else { format!("{path}.detail") };
        let detail = images::detail(own.as_deref().or(detail), &field)?;
        Image::from_url(&format!("{path}.image_url"), url, detail)
    }
}

/// Known fields of messages that are ignored or refused.
pub const OTHERS: &[Other] = &[
    refused("messages[].function_call", &[], "`tool_calls` has replaced it"),
    no_effect("messages[].annotations", "the prompt contains only the text"),
    no_effect("messages[].audio", "the prompt contains only the text"),
    no_effect("messages[].id", "messages are in their order"),
    no_effect("messages[].parsed", "the prompt contains only the text"),
    no_effect("messages[].reasoning_details", "`reasoning_content` has the text"),
    no_effect("messages[].tool_calls[].function.parsed_arguments", "the prompt contains `arguments`"),
    no_effect("messages[].content[].cache_control", "prefixes are found by their content"),
    no_effect("messages[].content[].annotations", "the prompt contains only the text"),
    no_effect("messages[].content[].input_audio", "no model here reads audio"),
    no_effect("messages[].content[].audio_url", "no model here reads audio"),
    no_effect("messages[].content[].video_url", "no model here reads video"),
    no_effect("messages[].content[].file", "models here read text and images"),
];

/// A call that an assistant made.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ToolCallParam {
    /// Id of the call.
    pub id: Option<String>,
    /// `function` or absent, or `custom`.
    pub r#type: Option<String>,
    /// Has no effect: calls are in order.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub index: Option<usize>,
    /// The called function.
    pub function: Option<FunctionCallParam>,
    /// The called custom tool. The prompt contains it as a function with one argument, `input`.
    pub custom: Option<CustomCallParam>,
}

/// A call of a custom tool.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CustomCallParam {
    /// Its name.
    pub name: String,
    /// A text.
    pub input: Option<String>,
}

/// The called function.
#[derive(Debug, Deserialize, ToSchema)]
pub struct FunctionCallParam {
    /// The function's name.
    pub name: String,
    /// An object, as JSON text or as JSON.
    pub arguments: Option<Value>,
}

/// Format of the answer, in all spellings.
#[derive(Debug, Default, Deserialize, ToSchema, Serialize)]
pub struct FormatParams {
    /// Format of the answer.
    response_format: Option<ResponseFormat>,
    /// JSON schema, in llama.cpp's format.
    json_schema: Option<Value>,
    /// JSON schema, in vLLM's older format.
    guided_json: Option<Value>,
    /// Format of the whole answer, in vLLM's format.
    structured_outputs: Option<StructuredOutputs>,
    /// The older name of `structured_outputs.regex`.
    guided_regex: Option<String>,
    /// The older name of `structured_outputs.choice`.
    guided_choice: Option<Vec<String>>,
    /// The older name of `structured_outputs.grammar`.
    guided_grammar: Option<String>,
    /// Grammar, in llama.cpp's format: the same as `structured_outputs.grammar`.
    grammar: Option<String>,
}

/// Format of the whole answer: one of these.
#[derive(Debug, Default, Deserialize, ToSchema, Serialize)]
pub struct StructuredOutputs {
    /// JSON that fits this schema.
    json: Option<Value>,
    /// A JSON object.
    json_object: Option<bool>,
    /// Text that this regular expression matches as a whole.
    regex: Option<String>,
    /// One of these texts.
    choice: Option<Vec<String>>,
    /// A grammar in GBNF, llama.cpp's format, with the rule `root`, or in llguidance's variant of Lark, with the rule
    /// `start`. The first rule determines the format.
    grammar: Option<String>,
}

/// Format of an answer.
#[derive(Debug, Deserialize, ToSchema, Serialize)]
pub struct ResponseFormat {
    /// The kind.
    pub r#type: FormatType,
    /// With `json_schema`: an object with the schema as `schema`, or the schema.
    pub json_schema: Option<Value>,
    /// The schema, in llama.cpp's format.
    pub schema: Option<Value>,
}

/// Kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FormatType {
    /// Any text.
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that fits a schema.
    JsonSchema,
}

/// Converts messages.
///
/// # Errors
/// A field that is not supported, by name.
pub fn messages(messages: Vec<ChatMessage>, tolerance: &Tolerance) -> Result<Vec<Message>, ApiError> {
    let last_user = messages.iter().rposition(|message| message.role == RoleParam::User);
    let messages = messages.into_iter().enumerate();
    let message = |(i, message): (usize, ChatMessage)| {
        message.into_message(&format!("messages[{i}]"), Some(i) == last_user, tolerance)
    };
    let mut messages = messages.map(message).collect::<Result<Vec<_>, _>>()?;
    name_results(&mut messages);
    Ok(messages)
}

/// Assigns the ids of the last calls without results to results without an id, in order.
fn name_results(messages: &mut [Message]) {
    let mut open: Vec<String> = Vec::new();
    for message in messages {
        match (message.role, &message.tool_call_id) {
            (Role::Assistant, _) => open = message.tool_calls.iter().map(|call| call.id.clone()).collect(),
            (Role::Tool, Some(id)) => open.retain(|other| other != id),
            (Role::Tool, None) if !open.is_empty() => message.tool_call_id = Some(open.remove(0)),
            _ => {}
        }
    }
}

impl ChatMessage {
    /// Converts a message at `path`. `is_asked` is true for the last message of the user.
    fn into_message(self, path: &str, is_asked: bool, tolerance: &Tolerance) -> Result<Message, ApiError> {
        let field = |name: &str| format!("{path}.{name}");
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
        if matches!(self.content, Some(Output::Json(_))) && self.role != RoleParam::Tool {
            let param = field("content");
            let message =
                format!("`{param}` must be a string or an array: only the result of a call is an object");
            return Err(ApiError::invalid(param, message));
        }
        let content = self
            .content
            .map(|content| content.content().parts(&field("content"), is_asked, tolerance))
            .transpose()?;
        let content = content.or(self.refusal.map(Parts::from));
        let calls = self.tool_calls.unwrap_or_default().into_iter().enumerate();
        let calls = calls.map(|(i, call)| call.into_call(i, &format!("{path}.tool_calls[{i}]")));
        let tool_calls = calls.collect::<Result<Vec<_>, _>>()?;
        // A function may return an empty result.
        let may_be_empty = matches!(self.role, RoleParam::Assistant | RoleParam::Tool);
        if content.is_none() && tool_calls.is_empty() && !may_be_empty {
            let param = field("content");
            return Err(ApiError::invalid(&param, format!("`{param}` is missing")));
        }
        let role = match self.role {
            RoleParam::System | RoleParam::Developer => Role::System,
            RoleParam::User => Role::User,
            RoleParam::Assistant => Role::Assistant,
            RoleParam::Tool => Role::Tool,
        };
        Ok(Message {
            reasoning: self.reasoning_content.or(self.reasoning),
            name: self.name,
            tool_calls,
            tool_call_id: self.tool_call_id,
            ..Message::new(role, content.unwrap_or_default())
        })
    }
}

impl Content<ContentPart> {
    fn parts(self, path: &str, is_asked: bool, tolerance: &Tolerance) -> Result<Parts, ApiError> {
        match self {
            Self::Text(text) => Ok(text.into()),
            Self::Parts(list) => {
                let mut parts = Parts::default();
                for (i, part) in list.into_iter().enumerate() {
                    part.add(&mut parts, &format!("{path}[{i}]"), is_asked, tolerance)?;
                }
                Ok(parts)
            }
        }
    }
}

impl ContentPart {
    fn add(
        self,
        parts: &mut Parts,
        path: &str,
        is_asked: bool,
        tolerance: &Tolerance,
    ) -> Result<(), ApiError> {
        let missing = |name: &str| {
            let param = format!("{path}.{name}");
            ApiError::invalid(&param, format!("`{param}` is missing"))
        };
        let kind = self.r#type.as_deref().unwrap_or("text");
        match kind {
            "text" | "input_text" | "output_text" => {
                parts.push_text(&self.text.ok_or_else(|| missing("text"))?);
            }
            "refusal" => parts.push_text(&self.refusal.ok_or_else(|| missing("refusal"))?),
            "image_url" | "input_image" => {
                let image = self.image_url.ok_or_else(|| missing("image_url"))?;
                parts.push_image(image.image(path, self.detail.as_deref())?);
            }
            other => match images::refused_medium(other, path) {
                Some(error) => return Err(error),
                None => parts.push_text(&unreadable(other, path, is_asked, tolerance)?),
            },
        }
        Ok(())
    }
}

impl ToolCallParam {
    fn into_call(self, index: usize, path: &str) -> Result<ToolCall, ApiError> {
        let id = self.id.unwrap_or_else(|| format!("call_{index}"));
        let missing = |name: &str| {
            let param = format!("{path}.{name}");
            ApiError::invalid(&param, format!("`{param}` is missing"))
        };
        match self.r#type.as_deref() {
            None | Some("function") => {}
            Some("custom") => {
                let custom = self.custom.ok_or_else(|| missing("custom"))?;
                let arguments = json!({"input": custom.input.unwrap_or_default()}).to_string();
                return Ok(ToolCall { id, name: custom.name, arguments });
            }
            Some(kind) => {
                let param = format!("{path}.type");
                let message = format!("`{param}` is `{kind}`: calls here are of functions");
                return Err(ApiError::invalid(param, message));
            }
        }
        let function = self.function.ok_or_else(|| missing("function"))?;
        Ok(ToolCall { id, name: function.name, arguments: arguments(function.arguments) })
    }
}

impl FormatParams {
    /// Converts the format.
    ///
    /// # Errors
    /// A schema is missing, or the format has no schema.
    pub fn format(mut self) -> Result<Format, ApiError> {
        let whole = self.whole()?;
        let is_free = self.response_format.as_ref().is_none_or(|format| format.r#type == FormatType::Text)
            && self.json_schema.is_none()
            && self.guided_json.is_none();
        match whole {
            None => self.json_format(),
            Some(whole) if is_free => Ok(whole),
            Some(Format::Whole { param, .. }) => {
                let message =
                    format!("`{param}` and another field both set the format of the answer: give one");
                Err(ApiError::invalid(param, message))
            }
            Some(_) => {
                let message =
                    "`structured_outputs` and another field both set the format of the answer: give one";
                Err(ApiError::invalid("structured_outputs", message))
            }
        }
    }

    /// Returns the format in vLLM's fields, except for schemas under older names.
    fn whole(&mut self) -> Result<Option<Format>, ApiError> {
        let StructuredOutputs { json, json_object, regex, choice, grammar } =
            self.structured_outputs.take().unwrap_or_default();
        let choice = choice.or(self.guided_choice.take()).filter(|texts| !texts.is_empty());
        let choice = choice.map(|texts| {
            let texts: Vec<_> = texts.iter().map(|text| regex::escape(text)).collect();
            Format::Whole { grammar: Grammar::Regex(texts.join("|")), param: "structured_outputs" }
        });
        let regex = regex.or(self.guided_regex.take());
        let regex =
            regex.map(|text| Format::Whole { grammar: Grammar::Regex(text), param: "structured_outputs" });
        let grammar = [
            (grammar, "structured_outputs.grammar"),
            (self.guided_grammar.take(), "guided_grammar"),
            (self.grammar.take(), "grammar"),
        ];
        let grammar = grammar.into_iter().find_map(|(text, param)| Some(Format::grammar(text?, param)));
        let object = json_object.filter(|wanted| *wanted).map(|_| Format::JsonObject);
        let mut given = [json.map(Format::JsonSchema), object, choice, regex, grammar].into_iter().flatten();
        match (given.next(), given.next()) {
            (format, None) => Ok(format),
            _ => {
                let message = "`structured_outputs` sets the format of the answer more than once: give one of `json`, \
                    `json_object`, `regex`, `choice` and `grammar`";
                Err(ApiError::invalid("structured_outputs", message))
            }
        }
    }

    fn json_format(self) -> Result<Format, ApiError> {
        let other = match self.json_schema.or(self.guided_json) {
            // vLLM also accepts a schema as text.
            Some(Value::String(text)) => serde_json::from_str(&text).map(Some).map_err(|error| {
                ApiError::invalid("guided_json", format!("`guided_json` is not JSON: {error}"))
            })?,
            other => other,
        };
        match (self.response_format, other) {
            (
                None | Some(ResponseFormat { r#type: FormatType::Text, json_schema: None, schema: None }),
                other,
            ) => Ok(other.map_or(Format::Text, Format::JsonSchema)),
            (Some(_), Some(_)) => {
                let message =
                    "`response_format` and `json_schema` both set the format of the answer: give one";
                Err(ApiError::invalid("response_format", message))
            }
            (Some(format), None) => format.format(),
        }
    }
}

impl ResponseFormat {
    fn format(self) -> Result<Format, ApiError> {
        let Self { r#type, json_schema, schema } = self;
        // An object with keywords of JSON Schema is the schema; others contain it.
        let is_schema = |value: &Value| {
            ["type", "properties", "$ref", "anyOf", "oneOf", "enum", "const"]
                .iter()
                .any(|key| value.get(key).is_some())
        };
        let schema = schema.or_else(|| match json_schema {
            Some(mut outer) if outer.get("schema").is_some() => outer.get_mut("schema").map(Value::take),
            other => other.filter(is_schema),
        });
        match (r#type, schema) {
            (FormatType::Text, None) => Ok(Format::Text),
            (FormatType::Text, Some(_)) => {
                let message = "`response_format.type` is `text`, which has no schema; `json_schema` has one";
                Err(ApiError::invalid("response_format.type", message))
            }
            (FormatType::JsonObject, None) => Ok(Format::JsonObject),
            (_, Some(schema)) => Ok(Format::JsonSchema(schema)),
            (FormatType::JsonSchema, None) => {
                let param = "response_format.json_schema.schema";
                Err(ApiError::invalid(param, format!("`{param}` is missing")))
            }
        }
    }
}
