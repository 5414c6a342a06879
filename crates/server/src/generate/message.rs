//! Messages, calls and tools of a chat, and the form in which chat templates get them.

use paguro_model::chat::content_parts;
use paguro_model_output::{Format as OutputFormat, OfferedTool};
use serde_json::{Map, Value, json};

use crate::images::{Image, Parts};

/// One message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// Its author.
    pub role: Role,
    /// Its text, in which [`PICTURE`](paguro_model::chat::PICTURE) stands for each image.
    pub content: String,
    /// Its images, in the order of the text.
    pub images: Vec<Image>,
    /// Reasoning of an assistant before the text.
    pub reasoning: Option<String>,
    /// Name of the author among several, or of the tool.
    pub name: Option<String>,
    /// Calls of an assistant.
    pub tool_calls: Vec<ToolCall>,
    /// Id of the call whose result this is.
    pub tool_call_id: Option<String>,
}

/// Author of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// The operator.
    System,
    /// The user.
    #[default]
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

/// A call that an assistant made.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Id of the call.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// An object, as JSON text.
    pub arguments: String,
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Its description.
    pub description: Option<String>,
    /// JSON schema of its arguments; `None` if it has none.
    pub parameters: Option<Value>,
    /// True if calls must fit the schema.
    pub strict: bool,
}

impl Message {
    /// Creates a message from its content.
    pub fn new(role: Role, content: Parts) -> Self {
        Self { role, content: content.text, images: content.images, ..Self::default() }
    }

    /// Returns true if an answer can continue this message.
    pub fn can_be_continued(&self) -> bool {
        self.role == Role::Assistant && self.tool_calls.is_empty()
    }

    /// Moves reasoning at the beginning of an assistant's content, which clients echo, to `reasoning`.
    pub(super) fn separate_reasoning(&mut self) {
        if self.role != Role::Assistant || self.reasoning.is_some() {
            return;
        }
        let thought =
            self.content.trim_start().strip_prefix("<think>").and_then(|rest| rest.split_once("</think>"));
        if let Some((reasoning, answer)) = thought {
            let reasoning = reasoning.trim();
            self.reasoning = (!reasoning.is_empty()).then(|| reasoning.to_owned());
            self.content = answer.trim_start().to_owned();
        }
    }

    /// Returns the message in the format of Hugging Face's templates, without empty fields.
    pub(super) fn for_template(&self, format: &OutputFormat, template: &str) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), json!(self.role.name()));
        // gpt-oss's template names reasoning `thinking`, and refuses content beside the reasoning of a call.
        if template.contains("message.thinking") {
            let calls = !self.tool_calls.is_empty();
            let thinking = match &self.reasoning {
                Some(reasoning) if calls && !self.content.is_empty() => {
                    Some([reasoning, "\n", &self.content].concat())
                }
                reasoning => reasoning.clone(),
            };
            let content = if calls && thinking.is_some() { "" } else { &self.content };
            message.insert("content".into(), json!(content));
            message.extend(thinking.map(|thinking| ("thinking".into(), json!(thinking))));
        } else {
            let content =
                if self.images.is_empty() { json!(self.content) } else { content_parts(&self.content) };
            message.insert("content".into(), content);
            message.extend(self.reasoning.as_ref().map(|text| ("reasoning_content".into(), json!(text))));
        }
        if let Some(name) = &self.name {
            message.insert("name".into(), json!(name));
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| call.for_template(format)).collect();
            message.insert("tool_calls".into(), calls);
        }
        if let Some(id) = &self.tool_call_id {
            message.insert("tool_call_id".into(), json!(format.call_id(id)));
        }
        message.into()
    }
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl ToolCall {
    /// Returns the call in the format of templates. Its arguments are an object, because templates write them with
    /// `tojson`.
    fn for_template(&self, format: &OutputFormat) -> Value {
        let arguments = serde_json::from_str(&self.arguments).unwrap_or_else(|_| json!(self.arguments));
        let id = format.call_id(&self.id);
        json!({"id": id, "type": "function", "function": {"name": self.name, "arguments": arguments}})
    }
}

/// Returns a tool in the format of templates.
pub(super) fn tool_for_template(tool: &OfferedTool<'_>) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), json!(tool.name));
    if let Some(description) = tool.description {
        function.insert("description".into(), json!(description));
    }
    let none = || json!({"type": "object", "properties": {}});
    function.insert("parameters".into(), tool.parameters.cloned().unwrap_or_else(none));
    json!({"type": "function", "function": function})
}
