//! Writer of calls in the model's syntax, for models whose chat template does not support tools.

use serde_json::{Value, json};

use super::{
    OfferedTool, braces,
    families::GENERIC,
    syntax::{CallSyntax, Elements, Reading},
};

impl CallSyntax {
    /// Returns the text of an answer that consists of these calls, given as names and JSON arguments.
    pub fn write<'c>(&self, calls: impl IntoIterator<Item = (&'c str, &'c str)>) -> String {
        let layout = &self.layout;
        let call = |(name, arguments): (&str, &str)| {
            [layout.open, &self.escape(name), layout.infix, &self.arguments(arguments), layout.close].concat()
        };
        let calls: Vec<_> = calls.into_iter().map(call).collect();
        [layout.before, &calls.join(layout.between), layout.after].concat()
    }

    /// Writes the arguments of a call from a JSON object.
    fn arguments(&self, json: &str) -> String {
        let each = |write: &dyn Fn((&String, &Value)) -> String, between| match serde_json::from_str(json) {
            Ok(Value::Object(object)) => object.iter().map(write).collect::<Vec<_>>().join(between),
            _ => String::new(),
        };
        match self.reading {
            Reading::Elements(Elements { key: (open, close), gap, value: marks, .. }) => each(
                &|(key, value)| {
                    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                    [*open, key, close, gap, marks.0, &value, marks.1, "\n"].concat()
                },
                "",
            ),
            Reading::Braces => match serde_json::from_str(json) {
                Ok(Value::Object(object)) => braces::write(&object),
                _ => String::new(),
            },
            Reading::Keywords => each(&|(key, value)| format!("{key}={value}"), ", "),
            _ => json.to_owned(),
        }
    }

    /// Escapes a name between `open` and `infix`.
    pub(super) fn escape(&self, name: &str) -> String {
        if self.layout.open.ends_with('"') {
            let quoted = json!(name).to_string();
            quoted[1..quoted.len() - 1].to_owned()
        } else {
            name.to_owned()
        }
    }
}

/// Returns instructions for models whose chat template does not support tools; they then use the generic syntax.
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

/// Returns an answer with calls in the format of [`instructions`].
pub fn write_calls<'c>(text: &str, calls: impl IntoIterator<Item = (&'c str, &'c str)>) -> String {
    let calls = GENERIC.write(calls);
    if text.is_empty() { calls } else { [text, "\n", &calls].concat() }
}
