//! Items of a response in progress, and the events of each piece.

use paguro_model::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{
    super::logprobs::{ChatTokenLogprob, chat_logprobs},
    request::Item,
};
use crate::{
    generate::{Delta, Message, Role, TokenLogprob, ToolCall},
    ids,
};

/// A part of a response.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// Message of the model.
    Message {
        /// Id of the item.
        id: String,
        /// `in_progress`, `completed` or `incomplete`.
        status: &'static str,
        /// Always `assistant`.
        role: &'static str,
        /// The text, in one part.
        content: Vec<OutputPart>,
    },
    /// Reasoning before the answer.
    Reasoning {
        /// Id of the item.
        id: String,
        /// `in_progress`, `completed` or `incomplete`.
        status: &'static str,
        /// Always empty: reasoning is not summarized.
        #[schema(value_type = Vec<Object>)]
        summary: [Value; 0],
        /// The text, in one part.
        content: Vec<OutputPart>,
    },
    /// Tool calls.
    FunctionCall {
        /// Id of the item.
        id: String,
        /// `in_progress`, `completed` or `incomplete`.
        status: &'static str,
        /// Id of the call.
        call_id: String,
        /// Name of the function.
        name: String,
        /// Namespace of the offered function.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// An object, as JSON text.
        arguments: String,
    },
}

/// Text of an item.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputPart {
    /// Text of a message.
    OutputText {
        /// The text.
        text: String,
        /// Always empty: there are no citations.
        #[schema(value_type = Vec<Object>)]
        annotations: [Value; 0],
        /// Tokens of the text, if requested.
        logprobs: Vec<ChatTokenLogprob>,
    },
    /// Text of reasoning.
    ReasoningText {
        /// The text.
        text: String,
    },
}

/// Items of a response in progress.
#[derive(Debug, Default)]
pub struct Output {
    items: Vec<OutputItem>,
    /// True while the last item is open.
    open: bool,
    events: Vec<(&'static str, Value)>,
    /// Functions with their namespaces.
    namespaces: Vec<(String, String)>,
}

impl Output {
    /// Creates an empty list. `namespaces` has the functions that were offered in one.
    pub fn new(namespaces: Vec<(String, String)>) -> Self {
        Self { namespaces, ..Self::default() }
    }

    /// Adds a piece.
    pub fn add(&mut self, delta: Delta, tokenizer: &Tokenizer, tokens: &[TokenLogprob]) {
        match delta {
            Delta::Text(text) => {
                if !matches!(self.items.last(), Some(OutputItem::Message { .. }) if self.open) {
                    let part = OutputPart::text(String::new());
                    let id = ids::new("msg_");
                    self.open(OutputItem::Message {
                        id,
                        status: "in_progress",
                        role: "assistant",
                        content: vec![part],
                    });
                }
                let new = chat_logprobs(tokenizer, tokens);
                let event = json!({"content_index": 0, "delta": text, "logprobs": new});
                if let Some(OutputItem::Message { content, .. }) = self.items.last_mut()
                    && let Some(OutputPart::OutputText { text: all, logprobs, .. }) = content.last_mut()
                {
                    all.push_str(&text);
                    logprobs.extend(new);
                }
                self.event("response.output_text.delta", event);
            }
            Delta::Reasoning(text) => {
                if !matches!(self.items.last(), Some(OutputItem::Reasoning { .. }) if self.open) {
                    let content = vec![OutputPart::ReasoningText { text: String::new() }];
                    let id = ids::new("rs_");
                    self.open(OutputItem::Reasoning { id, status: "in_progress", summary: [], content });
                }
                if let Some(OutputItem::Reasoning { content, .. }) = self.items.last_mut()
                    && let Some(OutputPart::ReasoningText { text: all }) = content.last_mut()
                {
                    all.push_str(&text);
                }
                self.event("response.reasoning_text.delta", json!({"content_index": 0, "delta": text}));
            }
            Delta::ToolCall { id: call_id, name, .. } => {
                let (id, arguments) = (ids::new("fc_"), String::new());
                let namespace = self.namespaces.iter().find(|(function, _)| *function == name);
                let namespace = namespace.map(|(_, namespace)| namespace.clone());
                let status = "in_progress";
                self.open(OutputItem::FunctionCall { id, status, call_id, name, namespace, arguments });
            }
            Delta::ToolArguments { text, .. } => {
                if let Some(OutputItem::FunctionCall { arguments, .. }) = self.items.last_mut() {
                    arguments.push_str(&text);
                }
                self.event("response.function_call_arguments.delta", json!({"delta": text}));
            }
        }
    }

    /// Ends the last item.
    pub fn close(&mut self, status: &'static str) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let Some(item) = self.items.last_mut() else { return };
        item.set_status(status);
        let item = item.clone();
        match &item {
            OutputItem::FunctionCall { arguments, name, .. } => {
                let event = json!({"arguments": arguments, "name": name});
                self.event("response.function_call_arguments.done", event);
            }
            OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. } => {
                for part in content {
                    let (name, event) = match part {
                        OutputPart::OutputText { text, logprobs, .. } => (
                            "response.output_text.done",
                            json!({"content_index": 0, "text": text, "logprobs": logprobs}),
                        ),
                        OutputPart::ReasoningText { text } => {
                            ("response.reasoning_text.done", json!({"content_index": 0, "text": text}))
                        }
                    };
                    self.event(name, event);
                    self.event("response.content_part.done", json!({"content_index": 0, "part": part}));
                }
            }
        }
        self.event("response.output_item.done", json!({"item": item}));
    }

    fn open(&mut self, item: OutputItem) {
        self.close("completed");
        // An item begins without content, which follows as a part.
        let (bare, part) = match &item {
            OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. } => {
                (item.without_content(), content.first().cloned())
            }
            OutputItem::FunctionCall { .. } => (item.clone(), None),
        };
        self.items.push(item);
        self.open = true;
        self.event("response.output_item.added", json!({"item": bare}));
        if let Some(part) = part {
            self.event("response.content_part.added", json!({"content_index": 0, "part": part}));
        }
    }

    /// Adds an event of the last item.
    fn event(&mut self, name: &'static str, mut event: Value) {
        let index = self.items.len().saturating_sub(1);
        if let Value::Object(fields) = &mut event {
            fields.insert("output_index".into(), json!(index));
            if !fields.contains_key("item")
                && let Some(item) = self.items.last()
            {
                fields.insert("item_id".into(), json!(item.id()));
            }
        }
        self.events.push((name, event));
    }

    /// Returns the events since the last call: names and fields.
    pub fn take_events(&mut self) -> Vec<(&'static str, Value)> {
        std::mem::take(&mut self.events)
    }

    /// Returns all items so far.
    pub fn items(&self) -> &[OutputItem] {
        &self.items
    }

    /// Returns the items with their ids, to which later requests can refer.
    pub fn with_ids(&self) -> Vec<(String, Item)> {
        let text = |content: &[OutputPart]| content.iter().map(OutputPart::as_str).collect::<String>();
        let item = |item: &OutputItem| match item {
            OutputItem::Message { content, .. } => {
                let (role, content) = (Role::Assistant, text(content));
                Item::Message(Message { role, content, ..Message::default() })
            }
            OutputItem::Reasoning { content, .. } => Item::Reasoning(text(content)),
            OutputItem::FunctionCall { call_id, name, arguments, .. } => {
                Item::Call(ToolCall { id: call_id.clone(), name: name.clone(), arguments: arguments.clone() })
            }
        };
        self.items.iter().map(|it| (it.id().to_owned(), item(it))).collect()
    }

    /// Converts the items to messages for the next turn.
    pub fn messages(&self) -> Vec<Message> {
        let mut message = Message { role: Role::Assistant, ..Message::default() };
        for item in &self.items {
            match item {
                OutputItem::Message { content, .. } => {
                    content.iter().for_each(|part| message.content += part.as_str())
                }
                OutputItem::Reasoning { content, .. } => {
                    let reasoning = message.reasoning.get_or_insert_default();
                    content.iter().for_each(|part| reasoning.push_str(part.as_str()));
                }
                OutputItem::FunctionCall { call_id, name, arguments, .. } => message
                    .tool_calls
                    .push(ToolCall { id: call_id.clone(), name: name.clone(), arguments: arguments.clone() }),
            }
        }
        vec![message]
    }
}

impl OutputItem {
    fn id(&self) -> &str {
        let (Self::Message { id, .. } | Self::Reasoning { id, .. } | Self::FunctionCall { id, .. }) = self;
        id
    }

    fn set_status(&mut self, new: &'static str) {
        let (Self::Message { status, .. }
        | Self::Reasoning { status, .. }
        | Self::FunctionCall { status, .. }) = self;
        *status = new;
    }

    fn without_content(&self) -> Self {
        let mut bare = self.clone();
        if let Self::Message { content, .. } | Self::Reasoning { content, .. } = &mut bare {
            content.clear();
        }
        bare
    }
}

impl OutputPart {
    fn text(text: String) -> Self {
        Self::OutputText { text, annotations: [], logprobs: Vec::new() }
    }

    fn as_str(&self) -> &str {
        let (Self::OutputText { text, .. } | Self::ReasoningText { text }) = self;
        text
    }
}
