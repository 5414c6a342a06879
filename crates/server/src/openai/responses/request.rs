//! Requests of `/v1/responses` and their conversion.

use std::collections::HashSet;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use super::super::{
    messages::ImageUrlParam,
    sampling::{self, SamplingParams},
    tools::{ToolChoiceParam, ToolParam},
    types::StreamOptions,
};
use crate::{
    error::ApiError,
    fleet::{Parameters, set_fields},
    generate::{ChatRequest, Format, Message, Options, Role, Tool, ToolCall},
    images::{self, Image, Parts},
    thinking::ReasoningParams,
    wire::{
        Body, Content, Limit, Other, Output, Tolerance, arguments, left_out, no_effect, refused, unreadable,
    },
};

/// A request to answer a turn.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ResponseRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// Input of the turn: a text or items.
    pub input: Option<InputParam>,
    /// System prompt of this turn only.
    pub instructions: Option<String>,
    /// Continues this stored response.
    pub previous_response_id: Option<String>,
    /// True to store the response for later requests; true if absent. Responses are stored in memory and lost when the
    /// server stops; the oldest are evicted first.
    pub store: Option<bool>,
    /// Streams the response as server-sent events.
    pub stream: Option<bool>,
    /// Has no effect: usage is always part of the last event.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub stream_options: Option<StreamOptions>,
    /// Maximum tokens of the answer, including reasoning; -1 for no limit.
    pub max_output_tokens: Option<Limit>,
    /// The name of `max_output_tokens` in chat completions; `max_output_tokens` takes precedence.
    pub max_tokens: Option<Limit>,
    #[serde(flatten)]
    pub sampling: SamplingParams,
    /// With `include: ["message.output_text.logprobs"]`: number of most probable tokens to report.
    pub top_logprobs: Option<usize>,
    /// Further data to report: `message.output_text.logprobs`. `reasoning.encrypted_content` has no effect, because
    /// reasoning is not encrypted.
    pub include: Option<Vec<String>>,
    /// Format of the answer.
    pub text: Option<TextParam>,
    /// Grammar of the answer in GBNF or Lark. (From llama.cpp.)
    pub grammar: Option<String>,
    #[serde(flatten)]
    pub reasoning: ReasoningParams,
    /// Tools that the model may call.
    pub tools: Option<Vec<ToolParam>>,
    /// Permits, requires or forbids calls of tools, or requires a call of one tool.
    pub tool_choice: Option<ToolChoiceParam>,
    /// True if an answer may have several calls.
    pub parallel_tool_calls: Option<bool>,
    /// `auto` drops the oldest turns of a conversation that exceeds the context; with `disabled`, the default, it is
    /// refused.
    pub truncation: Option<Truncation>,
    /// Returned with the response.
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    /// Returned with the response; has no effect.
    pub safety_identifier: Option<String>,
    /// Returned with the response; has no effect, because prefixes are found by their content.
    pub prompt_cache_key: Option<String>,
    /// Returned with the response; has no effect, because the server runs no tools.
    pub max_tool_calls: Option<usize>,
}

/// Known fields of this endpoint.
const OTHERS: &[Other] = &[
    refused("conversation", &[], "use `previous_response_id` to continue a response"),
    refused("prompt", &[], "there are no stored prompts"),
    refused("background", &["false"], "a response is cancelled with its connection"),
    left_out("input[].encrypted_content", &[], "reasoning is not encrypted here"),
    left_out("context_management", &[], "all of `input` is read"),
    no_effect("client_metadata", "it is not used"),
    no_effect("conversation_id", "nothing is stored that it could label"),
    no_effect("input[].phase", "items are in their order"),
    no_effect("input[].summary", "reasoning is not summed up"),
    no_effect("input[].namespace", "functions are found by their names"),
    no_effect("input[].content[].annotations", "the prompt contains only the text"),
    no_effect("input[].content[].logprobs", "the prompt contains only the text"),
    no_effect("input[].content[].cache_control", "prefixes are found by their content"),
    no_effect("input[].content[].file_data", "models here read text and images"),
    no_effect("input[].content[].file_url", "models here read text and images"),
    no_effect("input[].content[].filename", "models here read text and images"),
    no_effect("input[].output[].annotations", "the prompt contains only the text"),
];

impl Body for ResponseRequest {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS, sampling::OTHERS];
}

/// Treatment of a conversation that exceeds the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = ResponseTruncation)]
pub enum Truncation {
    /// The oldest turns are dropped.
    Auto,
    /// It is refused.
    #[default]
    Disabled,
}

/// A text or items.
#[derive(Debug, ToSchema, Serialize)]
#[serde(untagged)]
pub enum InputParam {
    /// Text of the user.
    Text(String),
    /// Items, oldest first.
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
pub struct InputItem {
    /// `message` (also if absent), `function_call`, `function_call_output`, `custom_tool_call`,
    /// `custom_tool_call_output`, `reasoning`, or `item_reference` for an item of a stored response. Other types are
    /// ignored, and named in `X-Paguro-Ignored`.
    pub r#type: Option<String>,
    /// Id of the item, to which later requests can refer if the response is stored.
    pub id: Option<String>,
    /// Has no effect.
    pub status: Option<String>,
    /// Author of a message: `user`, `assistant`, `system` or `developer`.
    pub role: Option<String>,
    /// Text of a message or of reasoning.
    pub content: Option<Content<InputPart>>,
    /// Id of the call.
    pub call_id: Option<String>,
    /// The called function.
    pub name: Option<String>,
    /// Arguments of a function: an object, as JSON text or as JSON.
    pub arguments: Option<Value>,
    /// Input of a custom tool: text.
    pub input: Option<String>,
    /// The result of a call: a text, parts, or an object.
    pub output: Option<Output<InputPart>>,
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InputPart {
    /// `input_text`, `input_image`, `output_text`, `refusal` or `reasoning_text`. Video and audio are refused. Other
    /// types are refused in the last message of a user, and replaced by a note in earlier ones, because no model reads
    /// them. So are images for a model that reads text only.
    pub r#type: String,
    /// The text.
    pub text: Option<String>,
    /// A refusal's text.
    pub refusal: Option<String>,
    /// An image: a data URL, or a URL of http or https at a host that `--image-urls` names.
    pub image_url: Option<ImageUrlParam>,
    /// Level of detail of an image: `auto`, `low` or `high`.
    pub detail: Option<String>,
    /// Refused for images: there are no stored files.
    pub file_id: Option<String>,
}

/// Format of the answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TextParam {
    /// Format of the text; any text if absent.
    #[serde(default)]
    pub format: Option<FormatParam>,
    /// Has no effect: the models do not support it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verbosity: Option<String>,
}

/// A format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FormatParam {
    /// `text`, `json_object` or `json_schema`.
    pub r#type: String,
    /// A schema's name; has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Description of a schema; has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// With `json_schema`: the schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<Value>,
    /// Has no effect: answers always fit the schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strict: Option<bool>,
}

/// Supported value of `include`.
const LOGPROBS: &str = "message.output_text.logprobs";

impl ResponseRequest {
    /// Returns the messages of this turn.
    ///
    /// # Errors
    /// An invalid field, by name.
    pub fn messages(&mut self, find: &FindItem<'_>, tolerance: &Tolerance) -> Result<Input, ApiError> {
        let message = |content| Message { content, ..Message::default() };
        match self.input.take() {
            None if self.previous_response_id.is_some() => Ok(Input::default()),
            None => Err(ApiError::invalid("input", "`input` is missing")),
            Some(InputParam::Text(content)) => {
                Ok(Input { messages: vec![message(content)], ..Input::default() })
            }
            Some(InputParam::Items(items)) => {
                let input = input(items, find, tolerance)?;
                if input.messages.is_empty() && self.previous_response_id.is_none() {
                    let message = "`input` has no messages: there is nothing to answer";
                    return Err(ApiError::invalid("input", message));
                }
                Ok(input)
            }
        }
    }

    /// Returns true if log-probabilities are requested.
    pub fn wants_logprobs(&self) -> bool {
        self.include.iter().flatten().any(|what| what == LOGPROBS)
    }

    /// Converts the request, with all messages so far.
    ///
    /// # Errors
    /// A field that is not supported, by name.
    pub fn chat(
        &self,
        messages: Vec<Message>,
        mut tools: Vec<Tool>,
        tolerance: &Tolerance,
    ) -> Result<ChatRequest, ApiError> {
        self.leave_out(tolerance)?;
        let logprobs = self.wants_logprobs().then(|| self.top_logprobs.unwrap_or(0));
        if self.top_logprobs > Some(0) && logprobs.is_none() {
            let message = format!("`top_logprobs` needs `include`: [\"{LOGPROBS}\"]");
            return Err(ApiError::invalid("top_logprobs", message));
        }
        if logprobs > Some(20) {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be at most 20"));
        }
        let options = Options {
            max_tokens: match self.max_output_tokens {
                None => Limit::at_least_one(self.max_tokens, "max_tokens")?,
                tokens => Limit::at_least_one(tokens, "max_output_tokens")?,
            }
            .map(Into::into),
            logprobs: logprobs.map(Into::into),
            ..self.sampling.clone().into_options()?
        };
        let reasoning = self.reasoning.clone().combine("reasoning.effort", tolerance)?;
        Ok(ChatRequest {
            continue_last: messages.last().is_some_and(Message::can_be_continued),
            messages,
            tool_choice: ToolChoiceParam::check(self.tool_choice.clone(), &mut tools)?,
            tools,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            format: self.format()?,
            reasoning: reasoning.reasoning,
            hides_reasoning: reasoning.is_hidden,
            drops_turns: self.truncation == Some(Truncation::Auto),
            template_variables: reasoning.template_variables,
            // Without streaming, calls are returned whole.
            whole_calls: self.stream != Some(true),
            options,
            ..ChatRequest::default()
        })
    }

    /// Returns what the request has besides its prompt.
    pub(crate) fn parameters(&self) -> Parameters {
        let mut sampling = Map::new();
        set_fields(&self.sampling, &mut sampling);
        let most = self.max_output_tokens.or(self.max_tokens).and_then(|most| most.0);
        sampling.extend(most.map(|most| ("max_tokens".to_owned(), most.into())));
        let (model, stream) = (self.model.clone(), self.stream == Some(true));
        Parameters { prefix: "resp_", model, sampling, default_max_tokens: None, stream }
    }

    /// Records the fields that are ignored.
    fn leave_out(&self, tolerance: &Tolerance) -> Result<(), ApiError> {
        let verbosity = self.text.as_ref().and_then(|text| text.verbosity.as_ref());
        if verbosity.is_some_and(|verbosity| verbosity != "medium") {
            let why = "the models do not support it; ask for the length in a message";
            tolerance.leave_out("text.verbosity", why)?;
        }
        let known = [LOGPROBS, "reasoning.encrypted_content"];
        for (i, what) in self.include.iter().flatten().enumerate() {
            if !known.contains(&what.as_str()) {
                let why = format_args!("there is no `{what}` here; there is {LOGPROBS}");
                tolerance.leave_out(&format!("include[{i}]"), why)?;
            }
        }
        Ok(())
    }

    fn format(&self) -> Result<Format, ApiError> {
        match (self.text_format()?, &self.grammar) {
            (format, None) => Ok(format),
            (Format::Text, Some(grammar)) => Ok(Format::grammar(grammar.clone(), "grammar")),
            _ => {
                let message = "`grammar` and `text.format` both set the format of the answer: give one";
                Err(ApiError::invalid("grammar", message))
            }
        }
    }

    fn text_format(&self) -> Result<Format, ApiError> {
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
}

impl TextParam {
    /// Returns the effective format, which is `text` if absent.
    pub fn or_plain(self) -> Self {
        let plain =
            FormatParam { r#type: "text".into(), name: None, description: None, schema: None, strict: None };
        Self { format: self.format.or(Some(plain)), ..self }
    }
}

/// Converts items to messages: reasoning and calls belong to the assistant's adjacent message.
fn input(items: Vec<InputItem>, find: &FindItem<'_>, tolerance: &Tolerance) -> Result<Input, ApiError> {
    let (mut with_ids, mut referred) = (Vec::new(), HashSet::new());
    let last_user = items.iter().rposition(|item| item.role.as_deref() == Some("user"));
    let mut messages: Vec<Message> = Vec::new();
    let mut reasoning = None;
    for (i, item) in items.into_iter().enumerate() {
        let path = format!("input[{i}]");
        let id = item.id.clone();
        let item = match (item.is_reference(), id) {
            (true, Some(id)) => {
                let item = find(&id)?;
                if !referred.insert(id) {
                    let message = format!("`{path}` refers to the same item as another reference");
                    return Err(ApiError::invalid(path, message));
                }
                item
            }
            (_, id) => {
                let item = item.read(&path, Some(i) == last_user, tolerance)?;
                with_ids.extend(id.zip(item.clone()));
                item
            }
        };
        let Some(item) = item else { continue };
        match item {
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
    Ok(Input { messages, items: with_ids })
}

/// An item as a part of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// A message or the result of a call.
    Message(Message),
    /// A call.
    Call(ToolCall),
    /// Reasoning of the model.
    Reasoning(String),
}

impl Item {
    /// Returns the bytes of its texts, approximately.
    pub fn bytes(&self) -> usize {
        128 + match self {
            Self::Message(message) => {
                message.content.len() + message.images.iter().map(Image::bytes).sum::<usize>()
            }
            Self::Call(call) => call.name.len() + call.arguments.len(),
            Self::Reasoning(text) => text.len(),
        }
    }
}

/// Messages of a turn's input, and its items with ids, to which later requests can refer.
#[derive(Debug, Default)]
pub struct Input {
    /// The messages.
    pub messages: Vec<Message>,
    /// Items with ids.
    pub items: Vec<(String, Item)>,
}

/// Finder of stored items by their ids; `None` for an item that the conversation already has.
pub type FindItem<'f> = dyn Fn(&str) -> Result<Option<Item>, ApiError> + 'f;

impl InputItem {
    /// Returns true for a reference to a stored item. Its type may be absent, as in OpenAI's API.
    fn is_reference(&self) -> bool {
        match self.r#type.as_deref() {
            Some(kind) => kind == "item_reference",
            None => self.id.is_some() && self.role.is_none() && self.content.is_none(),
        }
    }

    /// Converts an item; `None` for an unsupported kind. `is_asked` is true for the last message of the user.
    fn read(self, path: &str, is_asked: bool, tolerance: &Tolerance) -> Result<Option<Item>, ApiError> {
        fn need<T>(value: Option<T>, path: &str, name: &str) -> Result<T, ApiError> {
            let param = format!("{path}.{name}");
            value.ok_or_else(|| ApiError::invalid(&param, format!("`{param}` is missing")))
        }
        let parts = |content: Content<InputPart>, name: &str| {
            parts(content, &format!("{path}.{name}"), is_asked, tolerance)
        };
        let item = match self.r#type.as_deref().unwrap_or("message") {
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
                let content = parts(need(self.content, path, "content")?, "content")?;
                Item::Message(Message::new(role, content))
            }
            "function_call" => Item::Call(ToolCall {
                id: need(self.call_id, path, "call_id")?,
                name: need(self.name, path, "name")?,
                arguments: arguments(self.arguments),
            }),
            "custom_tool_call" => Item::Call(ToolCall {
                id: need(self.call_id, path, "call_id")?,
                name: need(self.name, path, "name")?,
                arguments: json!({"input": need(self.input, path, "input")?}).to_string(),
            }),
            "function_call_output" | "custom_tool_call_output" => {
                // A function may return an empty result.
                let content = self.output.map(|output| parts(output.content(), "output")).transpose()?;
                let tool_call_id = Some(need(self.call_id, path, "call_id")?);
                let message = Message::new(Role::Tool, content.unwrap_or_default());
                Item::Message(Message { tool_call_id, ..message })
            }
            "reasoning" => {
                let content = self.content.map(|content| parts(content, "content")).transpose()?;
                Item::Reasoning(content.unwrap_or_default().text)
            }
            "item_reference" => need(None, path, "id")?,
            other => {
                let why = format_args!("the type `{other}` is unknown");
                tolerance.leave_out(path, why)?;
                return Ok(None);
            }
        };
        Ok(Some(item))
    }
}

fn parts(
    content: Content<InputPart>,
    path: &str,
    is_asked: bool,
    tolerance: &Tolerance,
) -> Result<Parts, ApiError> {
    let list = match content {
        Content::Text(text) => return Ok(text.into()),
        Content::Parts(list) => list,
    };
    let mut parts = Parts::default();
    for (i, part) in list.into_iter().enumerate() {
        let path = format!("{path}[{i}]");
        let text = match part.r#type.as_str() {
            "input_text" | "output_text" | "reasoning_text" | "text" => part.text,
            "refusal" => part.refusal,
            "input_image" | "image_url" => {
                let param = format!("{path}.image_url");
                let image = part.image_url.ok_or_else(|| match part.file_id {
                    Some(_) => {
                        let param = format!("{path}.file_id");
                        let message =
                            format!("`{param}`: there are no stored files; send the image in `image_url`");
                        ApiError::invalid(param, message)
                    }
                    None => ApiError::invalid(&param, format!("`{param}` is missing")),
                })?;
                parts.push_image(image.image(&path, part.detail.as_deref())?);
                continue;
            }
            other => match images::refused_medium(other, &path) {
                Some(error) => return Err(error),
                None => Some(unreadable(other, &path, is_asked, tolerance)?),
            },
        };
        let param = format!("{path}.text");
        parts.push_text(&text.ok_or_else(|| ApiError::invalid(&param, format!("`{param}` is missing")))?);
    }
    Ok(parts)
}
