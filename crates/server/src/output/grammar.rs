//! Grammars for answers that call tools, or must, in llguidance's form of Lark. What they allow, [`super::OutputParser`]
//! reads back as whole calls.

use paguro_engine::narrow_schema;
use serde_json::{Map, Value, json};

use super::syntax::{CallSyntax, Format, UnreadCalls};

/// A tool that a model is offered.
#[derive(Clone, Copy, Debug)]
pub struct OfferedTool<'t> {
    /// Its name.
    pub name: &'t str,
    /// What it does.
    pub description: Option<&'t str>,
    /// The JSON schema of its arguments, which are an object; `None` has none.
    pub parameters: Option<&'t Value>,
}

/// What an answer may be.
#[derive(Clone, Copy, Debug)]
pub struct AnswerRules<'t> {
    /// The tools that may be called.
    pub tools: &'t [OfferedTool<'t>],
    /// Whether several calls are allowed, where the model's syntax has room for them.
    pub parallel: bool,
    /// What an answer without calls is; without this, at least one tool is called.
    pub otherwise: Option<Otherwise<'t>>,
    /// Reasoning before the answer.
    pub thought: Thought,
}

/// Reasoning before an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thought {
    /// There is none.
    #[default]
    None,
    /// The model may write some.
    Optional,
    /// The prompt has begun it, and the model ends it.
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
    /// The grammar, for a model that writes like this. `control` gives the ids of control tokens by their names: to a
    /// grammar they are no text.
    ///
    /// # Errors
    /// [`UnreadCalls`], if there are tools and the model writes calls in a way that is not read.
    pub fn grammar(
        &self,
        format: &Format,
        control: impl Fn(&str) -> Option<u32>,
    ) -> Result<String, UnreadCalls> {
        let markers = format.markers().filter_map(|marker| Some((marker, control(marker)?))).collect();
        let mut writer = Writer { markers, rules: Vec::new() };
        let mut answers = Vec::new();
        if !self.tools.is_empty() {
            let syntax = format.calls()?;
            answers.push("calls");
            writer.calls(syntax, self);
            if let Some(Otherwise::Text) = self.otherwise {
                answers.push(writer.text(syntax, self));
            }
        }
        if let Some(Otherwise::Json(schema)) = self.otherwise {
            answers.push("json");
            writer.rules.push(format!("json: %json {}", compact(schema.clone())));
        }
        let mut first = "";
        if let Some((open, close)) = format.reasoning.filter(|_| self.thought != Thought::None) {
            let begun = self.thought == Thought::Begun;
            writer.thought(if begun { "" } else { open }, close);
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
    /// The rules `calls`, `call` for one of them, and `more` for what follows the first.
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
            self.rules.push(format!("arguments_{index}: %json {}", arguments_schema(tool.parameters)));
        }
    }

    /// The rules for a text without calls (`TEXT`), and for one before calls (`led`), where a marker divides the two.
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

    /// A text up to a marker.
    fn lead(&mut self, marker: &str) {
        self.rules.push(match self.control(marker) {
            Some(id) => format!("lead: /(?s:.*)/ <[{id}]>"),
            None => format!("lead[suffix={}]: /(?s:.*)/", json!(marker)),
        });
    }

    fn control(&self, marker: &str) -> Option<u32> {
        self.markers.iter().find(|(control, _)| *control == marker).map(|(_, id)| *id)
    }

    /// A text as the grammar's terminals: strings, and control tokens by their ids.
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

    /// Reasoning after `open`, with its end and the line breaks after it.
    fn thought(&mut self, open: &str, close: &str) {
        let open = self.terminals(open);
        let space = if open.is_empty() { "" } else { " " };
        self.rules.push(format!("thought: {open}{space}reasoning /\\n{{0,2}}/"));
        self.rules.push(match self.control(close) {
            Some(id) => format!("reasoning: /(?s:.*)/ <[{id}]>"),
            None => format!("reasoning[suffix={}]: /(?s:.*)/", json!(close)),
        });
    }
}

/// The text from a call's beginning to its arguments.
fn open(syntax: &CallSyntax, tool: &OfferedTool<'_>) -> String {
    [syntax.layout.open, &syntax.escape(tool.name), syntax.layout.infix].concat()
}

/// A text as a regular expression between slashes.
fn escape(text: &str) -> String {
    regex::escape(text).replace('/', r"\/")
}

/// The schema of arguments: an object.
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

/// A schema of JSON in one line, as models write it in calls, with nothing that it does not speak of. Without a fixed form of the whitespace, a model that has
/// nothing to say may go on with spaces for ever.
fn compact(mut schema: Value) -> Value {
    narrow_schema(&mut schema);
    if let Value::Object(schema) = &mut schema {
        let form = json!({"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false});
        schema.insert("x-guidance".into(), form);
    }
    schema
}
