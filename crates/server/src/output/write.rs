//! The other direction: calls as the model is used to see them, for models whose chat template has no place for tools.

use serde_json::{Value, json};

use super::{
    OfferedTool,
    syntax::{CallSyntax, GENERIC},
};

impl CallSyntax {
    /// The text of an answer that consists of these calls: names, and arguments as JSON.
    pub fn write<'c>(&self, calls: impl IntoIterator<Item = (&'c str, &'c str)>) -> String {
        let layout = &self.layout;
        let call = |(name, arguments): (&str, &str)| {
            [layout.open, &self.escape(name), layout.infix, arguments, layout.close].concat()
        };
        let calls: Vec<_> = calls.into_iter().map(call).collect();
        [layout.before, &calls.join(layout.between), layout.after].concat()
    }

    /// A name, as it stands between `open` and `infix`.
    pub(super) fn escape(&self, name: &str) -> String {
        if self.layout.open.ends_with('"') {
            let quoted = json!(name).to_string();
            quoted[1..quoted.len() - 1].to_owned()
        } else {
            name.to_owned()
        }
    }
}

/// What a model has to be told where its chat template has no place for tools; it then uses the generic syntax.
pub fn instructions(tools: &[OfferedTool<'_>]) -> String {
    let mut text =
        String::from("You may call these functions, given with the JSON schemas of their arguments:\n\n");
    for tool in tools {
        let function = json!({
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters.unwrap_or(&Value::Null),
        });
        text += &function.to_string();
        text.push('\n');
    }
    let example = GENERIC.write([("NAME", "{\"ARGUMENT\": VALUE}")]);
    text + "\nTo call functions, answer with nothing but a JSON array of calls: " + &example
}

/// A model's answer with calls, as [`instructions`] ask for it.
pub fn write_calls<'c>(text: &str, calls: impl IntoIterator<Item = (&'c str, &'c str)>) -> String {
    let calls = GENERIC.write(calls);
    if text.is_empty() { calls } else { [text, "\n", &calls].concat() }
}
