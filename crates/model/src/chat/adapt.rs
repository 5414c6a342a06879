//! Conversion of messages to a form that a template supports.
//!
//! Templates refuse or omit messages that they were not written for: a system message, two consecutive user messages, or
//! two calls in one message. The abilities of a template are determined once, by rendering small chats. Messages are
//! then converted to the nearest supported form without loss of text.

use serde_json::{Map, Value, json};

use super::{ChatInput, ChatTemplate};

/// Abilities of a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Abilities {
    /// True if it renders a system message at the beginning.
    system: bool,
    /// True if it renders a system message after others.
    later_system: bool,
    /// True if it renders consecutive messages of one role.
    repeated_roles: bool,
    /// True if it renders the calls of a message.
    calls: bool,
    /// True if it renders several calls of one message.
    several_calls: bool,
    /// True if it expects the arguments of a call as JSON text instead of an object.
    arguments_as_text: bool,
    /// True if the content of a message that has only calls must be null instead of an empty text.
    null_content: bool,
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn system(text: &str) -> Value {
    json!({"role": "system", "content": text})
}

impl Abilities {
    pub(super) fn of(template: &ChatTemplate) -> Self {
        let render = |messages: Value| {
            let tools = json!([{"type": "function", "function": {
                "name": "lookup", "description": "Looks up.",
                "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
            }}]);
            template.render(&ChatInput { tools: Some(tools), ..ChatInput::new(messages) }).ok()
        };
        let writes = |messages: Value, texts: &[&str]| {
            render(messages).is_some_and(|text| texts.iter().all(|part| text.contains(part)))
        };
        let arguments = |is_text: bool, value: &str| {
            let arguments = json!({ "place": value });
            if is_text { Value::from(arguments.to_string()) } else { arguments }
        };
        let call = |is_text: bool, value: &str, id: &str| {
            let function = json!({"name": "lookup", "arguments": arguments(is_text, value)});
            json!({"id": id, "type": "function", "function": function})
        };
        let result =
            |id: &str| json!({"role": "tool", "name": "lookup", "tool_call_id": id, "content": "qresult"});
        let calling = |content: Value, calls: Vec<Value>, results: Vec<Value>| {
            let mut messages =
                vec![user("quser"), json!({"role": "assistant", "content": content, "tool_calls": calls})];
            messages.extend(results);
            Value::from(messages)
        };
        let one = |content: Value, is_text: bool| {
            calling(content, vec![call(is_text, "qvalue", "call00001")], vec![result("call00001")])
        };
        // Objects are preferred: a template that writes values as JSON would escape the quotation marks of a text.
        let takes_object =
            writes(one("".into(), false), &["qvalue"]) || writes(one(Value::Null, false), &["qvalue"]);
        let arguments_as_text = !takes_object
            && (writes(one("".into(), true), &["qvalue"]) || writes(one(Value::Null, true), &["qvalue"]));
        let (empty, null) =
            (render(one("".into(), arguments_as_text)), render(one(Value::Null, arguments_as_text)));
        let has_call = |text: &Option<String>| text.as_ref().is_some_and(|text| text.contains("qvalue"));
        let writes_call = has_call(&empty) || has_call(&null);
        let null_content = has_call(&null)
            && null.as_ref().is_some_and(|text| !text.contains("None"))
            && (!has_call(&empty) || null.as_ref().map(String::len) < empty.as_ref().map(String::len));
        let content = || if null_content { Value::Null } else { "".into() };
        let two = calling(
            content(),
            vec![
                call(arguments_as_text, "qvalue", "call00001"),
                call(arguments_as_text, "qother", "call00002"),
            ],
            vec![result("call00001"), result("call00002")],
        );
        Self {
            system: writes(json!([system("qsystem"), user("quser")]), &["qsystem", "quser"]),
            later_system: writes(
                json!([
                    system("qsystem"),
                    user("quser"),
                    assistant("qanswer"),
                    system("qlater"),
                    user("qmore")
                ]),
                &["qsystem", "qlater"],
            ) && writes(json!([user("quser"), system("qlater"), user("qmore")]), &["qlater"]),
            repeated_roles: writes(json!([user("quser"), user("qmore")]), &["quser", "qmore"]),
            // If every chat with a call fails, assume that the template writes calls.
            calls: writes_call || (empty.is_none() && null.is_none()),
            several_calls: !writes_call || writes(two, &["qvalue", "qother"]),
            arguments_as_text,
            null_content,
        }
    }

    /// Returns the messages in a form that the template supports.
    pub(super) fn adapt(self, messages: &Value) -> Value {
        let Some(messages) = messages.as_array() else { return messages.clone() };
        let mut messages: Vec<Value> = messages.clone();
        if !self.later_system {
            messages = systems_first(messages);
        }
        if !self.system {
            messages = system_as_user(messages);
        }
        if self.calls && !self.several_calls {
            messages = one_call_each(messages);
        }
        if !self.repeated_roles {
            messages = merge_repeated(messages);
        }
        for message in &mut messages {
            self.adapt_calls(message);
        }
        messages.into()
    }

    fn adapt_calls(self, message: &mut Value) {
        if !self.calls {
            return calls_as_text(message);
        }
        let Some(message) = message.as_object_mut() else { return };
        let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) else { return };
        if self.arguments_as_text {
            for call in calls.iter_mut() {
                if let Some(arguments) =
                    call.pointer_mut("/function/arguments").filter(|value| !value.is_string())
                {
                    *arguments = arguments.to_string().into();
                }
            }
        }
        if self.null_content && !calls.is_empty() && message.get("content").is_some_and(|text| text == "") {
            message.insert("content".into(), Value::Null);
        }
    }
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

/// Appends the content of `more` to that of `message`. Each content is a text or a list of parts.
fn append(message: &mut Value, more: &Value) {
    let joined = match (&message["content"], &more["content"]) {
        (Value::Array(parts), Value::Array(more)) => parts.iter().chain(more).cloned().collect(),
        (Value::Array(parts), more) => {
            let part = json!({"type": "text", "text": more});
            parts.iter().cloned().chain([part]).collect()
        }
        (text, Value::Array(more)) => {
            let part = json!({"type": "text", "text": text});
            std::iter::once(part).chain(more.iter().cloned()).collect()
        }
        (text, more) => {
            let texts = [text.as_str().unwrap_or_default(), more.as_str().unwrap_or_default()];
            let texts: Vec<_> = texts.into_iter().filter(|text| !text.is_empty()).collect();
            Value::from(texts.join("\n\n"))
        }
    };
    message["content"] = joined;
}

/// Merges all system messages into one at the beginning.
fn systems_first(messages: Vec<Value>) -> Vec<Value> {
    let (systems, mut others): (Vec<_>, Vec<_>) =
        messages.into_iter().partition(|message| role(message) == "system");
    let merged = systems.into_iter().reduce(|mut first, later| {
        append(&mut first, &later);
        first
    });
    if let Some(system) = merged {
        others.insert(0, system);
    }
    others
}

/// Prepends system messages to the user message that follows. Without one, they become a user message.
fn system_as_user(messages: Vec<Value>) -> Vec<Value> {
    let mut adapted: Vec<Value> = Vec::with_capacity(messages.len());
    let mut waiting: Option<Value> = None;
    for mut message in messages {
        match role(&message) {
            "system" => match &mut waiting {
                Some(system) => append(system, &message),
                None => {
                    message["role"] = "user".into();
                    waiting = Some(message);
                }
            },
            "user" => adapted.push(match waiting.take() {
                Some(mut system) => {
                    append(&mut system, &message);
                    system
                }
                None => message,
            }),
            _ => {
                adapted.extend(waiting.take());
                adapted.push(message);
            }
        }
    }
    adapted.extend(waiting);
    adapted
}

/// Splits a message with several calls into one message for each call. The result of a call follows its message.
fn one_call_each(messages: Vec<Value>) -> Vec<Value> {
    let mut adapted = Vec::with_capacity(messages.len());
    let mut messages = messages.into_iter().peekable();
    while let Some(message) = messages.next() {
        let calls = message["tool_calls"].as_array().filter(|calls| calls.len() > 1).cloned();
        let Some(calls) = calls else {
            adapted.push(message);
            continue;
        };
        let mut results = Vec::new();
        while let Some(result) = messages.next_if(|next| role(next) == "tool") {
            results.push(result);
        }
        for (at, call) in calls.into_iter().enumerate() {
            let id = call["id"].clone();
            let mut one = message.clone();
            if at > 0 {
                one["content"] = "".into();
                for key in ["reasoning_content", "thinking"] {
                    one.as_object_mut().and_then(|one: &mut Map<_, _>| one.remove(key));
                }
            }
            one["tool_calls"] = json!([call]);
            adapted.push(one);
            let own = results.iter().position(|result| !id.is_null() && result["tool_call_id"] == id);
            // Results without an id are assigned to the calls in order.
            let own = own.or_else(|| results.iter().position(|result| result.get("tool_call_id").is_none()));
            adapted.extend(own.map(|own| results.remove(own)));
        }
        adapted.extend(results);
    }
    adapted
}

/// Moves the calls of a message to the end of its content, as JSON.
fn calls_as_text(message: &mut Value) {
    let Some(calls) = message.as_object_mut().and_then(|message| message.remove("tool_calls")) else {
        return;
    };
    let Some(calls) = calls.as_array().filter(|calls| !calls.is_empty()) else { return };
    let functions: Value = calls.iter().map(|call| call["function"].clone()).collect();
    append(message, &json!({"content": functions.to_string()}));
}

/// Merges consecutive messages of the user, and of the assistant. Messages with calls, and results, are not merged.
fn merge_repeated(messages: Vec<Value>) -> Vec<Value> {
    let mut adapted: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages {
        let can_merge = |message: &Value| {
            matches!(role(message), "user" | "assistant") && message.get("tool_calls").is_none()
        };
        match adapted.last_mut() {
            Some(last) if role(last) == role(&message) && can_merge(last) && can_merge(&message) => {
                append(last, &message);
            }
            _ => adapted.push(message),
        }
    }
    adapted
}
