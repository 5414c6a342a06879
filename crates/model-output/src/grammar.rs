//! Grammars of answers with optional or required tool calls, in llguidance's variant of Lark. [`super::OutputParser`]
//! parses every allowed text into complete calls.

use serde_json::{Map, Value, json};

use super::{
    braces,
    syntax::{CallSyntax, Elements, Format, Frame, Reading, UnreadCalls},
    tools::kinds,
};

/// A tool that is offered to a model.
#[derive(Clone, Copy, Debug)]
pub struct OfferedTool<'t> {
    /// Its name.
    pub name: &'t str,
    /// Its description.
    pub description: Option<&'t str>,
    /// JSON schema of its arguments, which are an object; `None` without arguments.
    pub parameters: Option<&'t Value>,
}

/// Rules of an answer.
#[derive(Clone, Copy, Debug)]
pub struct AnswerRules<'t> {
    /// The tools that may be called.
    pub tools: &'t [OfferedTool<'t>],
    /// True if several calls are allowed, where the model's syntax permits them.
    pub parallel: bool,
    /// Form of an answer without calls; `None` if at least one call is required.
    pub otherwise: Option<Otherwise<'t>>,
    /// Reasoning before the answer.
    pub thought: Thought,
    /// True if the prompt has begun the text of the answer ([`Format::in_answer`]).
    pub in_answer: bool,
}

/// Reasoning before an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thought {
    /// No reasoning.
    #[default]
    None,
    /// Reasoning is allowed.
    Optional,
    /// The prompt has begun reasoning, and the model ends it.
    Begun,
}

/// An answer without calls.
#[derive(Clone, Copy, Debug)]
pub enum Otherwise<'t> {
    /// Text, which may also come before calls.
    Text,
    /// JSON that fits a schema.
    Json(&'t Value),
}

impl AnswerRules<'_> {
    /// Returns the grammar in a model's format. `control` returns the ids of control tokens by name, because these are
    /// not text in a grammar.
    ///
    /// # Errors
    /// [`UnreadCalls`], if tools are offered and the model's call format is not supported.
    pub fn grammar(
        &self,
        format: &Format,
        control: impl Fn(&str) -> Option<u32>,
    ) -> Result<String, UnreadCalls> {
        let markers = format.markers().filter_map(|marker| Some((marker, control(marker)?))).collect();
        let mut writer = Writer { markers, rules: Vec::new() };
        let mut answers = Vec::new();
        let frame = format.frame();
        let begin = frame.filter(|_| !self.in_answer).map_or("", |frame| frame.answer);
        let begin = writer.terminals(begin);
        if !self.tools.is_empty() {
            let syntax = format.calls()?;
            answers.push("calls");
            writer.calls(syntax, self);
            if let Some(Otherwise::Text) = self.otherwise {
                let text = writer.text(syntax, self);
                answers.push(if begin.is_empty() { text } else { "text" });
                if !begin.is_empty() {
                    writer.rules.push(format!("text: {begin} {text}"));
                }
            }
        }
        if let Some(Otherwise::Json(schema)) = self.otherwise {
            answers.push("json");
            writer.rules.push(format!("json: {begin} %json {}", compact(schema.clone())));
        }
        let mut first = "";
        if let Some((open, close)) = format.reasoning.filter(|_| self.thought != Thought::None) {
            let begun = self.thought == Thought::Begun;
            writer.thought(if begun { "" } else { open }, close, frame);
            first = if begun { "thought " } else { "thought? " };
        }
        Ok(format!("start: {first}({})\n{}", answers.join(" | "), writer.rules.join("\n")))
    }
}

struct Writer<'m> {
    /// Control tokens and their ids.
    markers: Vec<(&'m str, u32)>,
    rules: Vec<String>,
}

impl Writer<'_> {
    /// Adds the rules `calls`, `call` for one of them, and `more` for the text after the first.
    fn calls(&mut self, syntax: &CallSyntax, rules: &AnswerRules<'_>) {
        let layout = &syntax.layout;
        let (before, after) = (self.terminals(layout.before), self.terminals(layout.after));
        let more = match rules.parallel && syntax.parallel {
            true => format!("({} call)* {after}", self.terminals(layout.between)),
            false => after,
        };
        // A rule cannot be empty.
        let more = if more.is_empty() { "\"\"".to_owned() } else { more };
        self.rules.push(format!("calls: {before} call more"));
        self.rules.push(format!("more: {more}"));
        let calls: Vec<_> = (0..rules.tools.len()).map(|index| format!("call_{index}")).collect();
        self.rules.push(format!("call: {}", calls.join(" | ")));
        for (index, tool) in rules.tools.iter().enumerate() {
            let open = self.terminals(&open(syntax, tool));
            let close = self.terminals(layout.close);
            self.rules.push(format!("call_{index}: {open} arguments_{index} {close}"));
            self.arguments(syntax, index, tool);
        }
    }

    /// Adds the rule for the arguments of a tool.
    fn arguments(&mut self, syntax: &CallSyntax, index: usize, tool: &OfferedTool<'_>) {
        let rule = format!("arguments_{index}");
        let schema = tool.parameters.unwrap_or(&Value::Null);
        match syntax.reading {
            Reading::Elements(elements) => match schema["properties"].as_object() {
                Some(properties) => {
                    let mut items = Vec::new();
                    for (at, (key, property)) in properties.iter().enumerate() {
                        let item = format!("parameter_{index}_{at}");
                        self.element(elements, &item, key, property, schema);
                        let optional = if is_required(schema, key) { "" } else { "?" };
                        items.push(format!("{item}{optional}"));
                    }
                    let none = if items.is_empty() { "\"\"" } else { "" };
                    self.rules.push(format!("{rule}: {none}{}", items.join(" ")));
                }
                None if tool.parameters.is_none() => self.rules.push(format!("{rule}: \"\"")),
                // Arguments with any names.
                None => {
                    let item = format!("parameter_{index}");
                    let (open, close) = elements.key;
                    let (open, close) = (self.terminals(open), self.terminals(close));
                    let (gap, value) = (self.terminals(elements.gap), self.terminals(elements.value.0));
                    self.until(&format!("{item}_value"), elements.value.1);
                    self.rules.push(format!(
                        "{item}: {open} /[^<>\"\\n]{{1,64}}/ {close} {gap} {value} {item}_value \"\\n\""
                    ));
                    self.rules.push(format!("{rule}: {item}*"));
                }
            },
            Reading::Braces => {
                let mut properties: Vec<_> = schema["properties"].as_object().into_iter().flatten().collect();
                // Templates sort keys.
                properties.sort_by_key(|(key, _)| key.to_lowercase());
                let known = tool.parameters.is_none() || schema["properties"].is_object();
                let rules = properties.into_iter().map(|(key, property)| {
                    let value = format!("{rule}_value_{}", self.rules.len());
                    self.braced_value(&value, property, schema);
                    (format!("{key}:"), value, is_required(schema, key))
                });
                let rules = rules.collect();
                match known {
                    true => self.sequence(&rule, ",", rules),
                    false => {
                        self.any_braced();
                        self.rules.push(format!("{rule}: (any_member (\",\" any_member)*)?"));
                    }
                }
            }
            Reading::Keywords => {
                let none = Map::new();
                let properties = schema["properties"].as_object().unwrap_or(&none);
                let rules = properties.iter().enumerate().map(|(at, (key, property))| {
                    let value = format!("{rule}_value_{at}");
                    self.rules.push(format!("{value}: %json {}", compact(within(property, schema))));
                    (format!("{key}="), value, is_required(schema, key))
                });
                let rules = rules.collect();
                self.sequence(&rule, ", ", rules);
            }
            Reading::Objects | Reading::Named { .. } | Reading::Either { .. } | Reading::Channels => {
                self.rules.push(format!("{rule}: %json {}", arguments_schema(tool.parameters)));
            }
        }
    }

    /// Adds the rule for a parameter between marks.
    fn element(&mut self, elements: &Elements, rule: &str, key: &str, property: &Value, schema: &Value) {
        let open = [elements.key.0, key, elements.key.1, elements.gap, elements.value.0].concat();
        let open = self.terminals(&open);
        let close = self.terminals(elements.value.1);
        let texts = property["enum"].as_array().filter(|values| values.iter().all(Value::is_string));
        let kinds = kinds(property, 0);
        if let Some(texts) = texts {
            let texts: Vec<_> = texts.iter().map(ToString::to_string).collect();
            self.rules.push(format!("{rule}: {open} ({}) {close} \"\\n\"", texts.join(" | ")));
            return;
        }
        let text = format!("{rule}_text");
        if kinds.text {
            self.until(&text, elements.value.1);
        }
        let value = if kinds.text {
            text
        } else {
            self.rules.push(format!("{rule}_json: %json {}", compact(within(property, schema))));
            format!("{rule}_json {close}")
        };
        self.rules.push(format!("{rule}: {open} {value} \"\\n\""));
    }

    /// Adds the rules for arguments in this order, with separators between those that are present. Each has the text
    /// before its value, the rule of its value, and a flag that is true if it is required.
    fn sequence(&mut self, rule: &str, separator: &str, arguments: Vec<(String, String, bool)>) {
        let (count, separator) = (arguments.len(), json!(separator));
        for (at, (key, value, required)) in arguments.into_iter().enumerate() {
            self.rules.push(format!("{rule}_item_{at}: {} {value}", json!(key)));
            let next = at + 1;
            let skip = if required { String::new() } else { format!(" | {rule}_from_{next}") };
            self.rules.push(format!("{rule}_from_{at}: {rule}_item_{at} {rule}_after_{next}{skip}"));
            let optional = if required { "" } else { "?" };
            self.rules.push(format!(
                "{rule}_after_{at}: ({separator} {rule}_item_{at}){optional} {rule}_after_{next}"
            ));
        }
        self.rules.push(format!("{rule}_from_{count}: \"\""));
        self.rules.push(format!("{rule}_after_{count}: \"\""));
        self.rules.push(format!("{rule}: {rule}_from_0"));
    }

    /// Adds the rule for a value in Gemma's format: a string between marks, JSON, or any value of either kind.
    fn braced_value(&mut self, rule: &str, property: &Value, schema: &Value) {
        let quote = self.terminals(braces::QUOTE);
        let texts = property["enum"].as_array().filter(|values| values.iter().all(Value::is_string));
        if let Some(texts) = texts {
            let texts: Vec<_> = texts.iter().map(ToString::to_string).collect();
            self.rules.push(format!("{rule}: {quote} ({}) {quote}", texts.join(" | ")));
            return;
        }
        const PLAIN: [&str; 4] = ["integer", "number", "boolean", "null"];
        let kind = property["type"].as_str().unwrap_or_default();
        if kind == "string" {
            self.until(&format!("{rule}_text"), braces::QUOTE);
            self.rules.push(format!("{rule}: {quote} {rule}_text"));
        } else if PLAIN.contains(&kind) {
            self.rules.push(format!("{rule}: %json {}", compact(within(property, schema))));
        } else {
            self.any_braced();
            let start = match kind {
                "object" => "any_object",
                "array" => "any_array",
                _ => "any_value",
            };
            self.rules.push(format!("{rule}: {start}"));
        }
    }

    /// Adds the rules `any_value`, `any_object`, `any_array` and `any_member` for values in Gemma's format.
    fn any_braced(&mut self) {
        if self.rules.iter().any(|rule| rule.starts_with("any_value:")) {
            return;
        }
        let quote = self.terminals(braces::QUOTE);
        self.until("any_text", braces::QUOTE);
        let plain = compact(json!({"type": ["number", "boolean", "null"]}));
        self.rules.extend([
            format!("any_plain: %json {plain}"),
            format!("any_value: {quote} any_text | any_object | any_array | any_plain"),
            "any_object: \"{\" (any_member (\",\" any_member)*)? \"}\"".to_owned(),
            "any_array: \"[\" (any_value (\",\" any_value)*)? \"]\"".to_owned(),
            "any_member: /[a-zA-Z0-9_\\-]{1,64}/ \":\" any_value".to_owned(),
        ]);
    }

    /// Adds a rule for any text up to and including the first `end`. A line break before `end` is part of the text.
    fn until(&mut self, rule: &str, end: &str) {
        let end = end.trim_start();
        let first = self.markers.iter().filter_map(|(marker, _)| Some((end.find(marker)?, *marker))).min();
        let rules = match first {
            Some((0, _)) => vec![format!("{rule}: /(?s:.*)/ {}", self.terminals(end))],
            Some((at, _)) => vec![
                format!("{rule}_text[suffix={}]: /(?s:.*)/", json!(end[..at])),
                format!("{rule}: {rule}_text {}", self.terminals(&end[at..])),
            ],
            None => vec![format!("{rule}[suffix={}]: /(?s:.*)/", json!(end))],
        };
        self.rules.extend(rules);
    }

    /// Adds the rules for a text without calls (`TEXT`) and for one before calls (`led`), which ends at a marker.
    fn text(&mut self, syntax: &CallSyntax, rules: &AnswerRules<'_>) -> &'static str {
        let mut text = String::from("TEXT: /(?s:.+)/");
        for marker in syntax.markers {
            if self.control(marker).is_none() {
                text += &format!(" & ~/(?s:.*){}(?s:.*)/", escape(marker));
            }
        }
        if syntax.bare {
            text += " & ~/[ \\n\\r\\t]*[\\[{`](?s:.*)/";
        }
        self.rules.push(text);
        if syntax.frame.is_some() {
            // Text before calls is a message of its own.
            return "TEXT";
        }
        let layout = &syntax.layout;
        let starts = |text: &str| syntax.markers.iter().find(|marker| text.starts_with(**marker)).copied();
        if let Some(marker) = starts(layout.before) {
            let rest = self.terminals(&layout.before[marker.len()..]);
            self.rules.push(format!("led: lead {rest} call more"));
            self.lead(marker);
        } else if let Some(marker) = starts(layout.open) {
            let calls: Vec<_> = (0..rules.tools.len()).map(|index| format!("led_{index}")).collect();
            self.rules.push(format!("led: lead ({}) more", calls.join(" | ")));
            for (index, tool) in rules.tools.iter().enumerate() {
                let rest = self.terminals(&open(syntax, tool)[marker.len()..]);
                let close = self.terminals(layout.close);
                self.rules.push(format!("led_{index}: {rest} arguments_{index} {close}"));
            }
            self.lead(marker);
        } else {
            return "TEXT";
        }
        "TEXT | led"
    }

    /// Adds the rule for a text up to a marker.
    fn lead(&mut self, marker: &str) {
        self.rules.push(match self.control(marker) {
            Some(id) => format!("lead: /(?s:.*)/ <[{id}]>"),
            None => format!("lead[suffix={}]: /(?s:.*)/", json!(marker)),
        });
    }

    fn control(&self, marker: &str) -> Option<u32> {
        self.markers.iter().find(|(control, _)| *control == marker).map(|(_, id)| *id)
    }

    /// Converts a text to the grammar's terminals: strings, and control tokens by id.
    fn terminals(&self, text: &str) -> String {
        let mut terminals = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let found =
                self.markers.iter().filter_map(|(marker, id)| Some((rest.find(marker)?, marker.len(), id)));
            let (at, len, id) = found.min().unwrap_or((rest.len(), 0, &0));
            if at > 0 {
                terminals.push(json!(rest[..at]).to_string());
            }
            if len > 0 {
                terminals.push(format!("<[{id}]>"));
            }
            rest = &rest[at + len..];
        }
        terminals.join(" ")
    }

    /// Adds the rule for reasoning after `open`, with its end and the text that follows: line breaks, or the beginning
    /// of the next message.
    fn thought(&mut self, open: &str, close: &str, frame: Option<Frame>) {
        let open = self.terminals(open);
        let space = if open.is_empty() { "" } else { " " };
        let next = frame.map_or_else(|| "/\\n{0,2}/".to_owned(), |frame| self.terminals(frame.next));
        self.rules.push(format!("thought: {open}{space}reasoning {next}"));
        self.rules.push(match self.control(close) {
            Some(id) => format!("reasoning: /(?s:.*)/ <[{id}]>"),
            None => format!("reasoning[suffix={}]: /(?s:.*)/", json!(close)),
        });
    }
}

fn is_required(schema: &Value, key: &str) -> bool {
    schema["required"].as_array().is_some_and(|keys| keys.iter().any(|required| required == key))
}

/// Returns a property's schema with the definitions that it may refer to.
fn within(property: &Value, schema: &Value) -> Value {
    let mut property = property.clone();
    if let Value::Object(property) = &mut property {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = schema.get(key) {
                property.entry(key).or_insert_with(|| definitions.clone());
            }
        }
    }
    property
}

/// Returns the text from a call's beginning to its arguments.
fn open(syntax: &CallSyntax, tool: &OfferedTool<'_>) -> String {
    [syntax.layout.open, &syntax.escape(tool.name), syntax.layout.infix].concat()
}

/// Escapes a text for a regular expression between slashes.
fn escape(text: &str) -> String {
    regex::escape(text).replace('/', r"\/")
}

/// Returns the schema of arguments, which are an object.
fn arguments_schema(parameters: Option<&Value>) -> Value {
    let mut schema = match parameters {
        Some(Value::Object(schema)) => schema.clone(),
        Some(Value::Bool(false)) | None => {
            Map::from_iter([("properties".into(), json!({})), ("additionalProperties".into(), json!(false))])
        }
        Some(_) => Map::new(),
    };
    schema.entry("type").or_insert_with(|| json!("object"));
    compact(schema.into())
}

/// Restricts a schema to one line of JSON in the models' format. With free whitespace, a model could continue with spaces
/// for ever.
fn compact(mut schema: Value) -> Value {
    if let Value::Object(schema) = &mut schema {
        let form = json!({"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false});
        schema.insert("x-guidance".into(), form);
    }
    schema
}
