//! Modelfiles: the text form of a model that `/api/create` makes.
//!
//! `/api/show` writes one from which the same model can be made again. Texts are written plain, or between `"""` if they
//! have line breaks. `"""` closes a text only at the end of a line; a `\` before it, which Ollama does not know, keeps
//! the text open.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::error::ApiError;

const QUOTES: &str = "\"\"\"";

/// A model by its base and its defaults, with the names of `/api/create`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Modelfile {
    /// Base model.
    pub from: Option<String>,
    /// Adapter of the base: the digest of an uploaded blob, or a name of the library.
    pub adapter: Option<String>,
    /// Chat template.
    pub template: Option<String>,
    /// System prompt.
    pub system: Option<String>,
    /// Options of requests; `stop` is a list.
    pub parameters: Map<String, Value>,
    /// Messages before every chat: role and content.
    pub messages: Vec<(String, String)>,
    /// Licenses.
    pub licenses: Vec<String>,
}

impl Modelfile {
    /// Writes the text, with a heading for its editor.
    pub fn write(&self, name: &str) -> String {
        let mut out = format!("# To make a model from this one, replace FROM by:\n# FROM {name}\n\n");
        let mut line = |instruction: &str, value: &str| {
            let _ = writeln!(out, "{instruction} {}", quoted(value));
        };
        self.from.iter().for_each(|from| line("FROM", from));
        self.adapter.iter().for_each(|adapter| line("ADAPTER", adapter));
        self.template.iter().for_each(|template| line("TEMPLATE", template));
        self.system.iter().for_each(|system| line("SYSTEM", system));
        for (name, value) in &self.parameters {
            each(value, &mut |value| line(&format!("PARAMETER {name}"), value));
        }
        for (role, content) in &self.messages {
            line(&format!("MESSAGE {role}"), content);
        }
        self.licenses.iter().for_each(|license| line("LICENSE", license));
        out
    }

    /// Parses a text.
    ///
    /// # Errors
    /// The line that is not understood.
    pub fn parse(text: &str) -> Result<Self, ApiError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text).replace("\r\n", "\n");
        let mut file = Self::default();
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let at = text[..text.len() - rest.len()].matches('\n').count() + 1;
            let wrong = |problem: &str| {
                let message = format!("`modelfile`, line {at}: {problem}");
                Err(ApiError::invalid("modelfile", message))
            };
            let end = rest.find('\n').unwrap_or(rest.len());
            let first = rest[..end].trim();
            if first.is_empty() || first.starts_with('#') {
                rest = rest.get(end + 1..).unwrap_or_default();
                continue;
            }
            let (instruction, after) = word(rest);
            let instruction = instruction.to_ascii_uppercase();
            let (name, after) = match instruction.as_str() {
                "PARAMETER" | "MESSAGE" => word(after),
                _ => ("", after),
            };
            let Some((value, after)) = value(after) else { return wrong("a text between \"\"\" has no end") };
            rest = after;
            match instruction.as_str() {
                "FROM" | "ADAPTER" | "TEMPLATE" | "SYSTEM" | "LICENSE" if value.is_empty() => {
                    return wrong(&format!("`{instruction}` has no value"));
                }
                "FROM" => file.from = Some(value),
                "ADAPTER" if file.adapter.is_some() => return wrong("a model has one `ADAPTER`"),
                "ADAPTER" => file.adapter = Some(value),
                "TEMPLATE" => file.template = Some(value),
                "SYSTEM" => file.system = Some(value),
                "LICENSE" => file.licenses.push(value),
                "MESSAGE" => file.messages.push((name.to_owned(), value)),
                "PARAMETER" if name == "stop" => {
                    let stops = file.parameters.entry("stop").or_insert_with(|| json!([]));
                    if let Some(stops) = stops.as_array_mut() {
                        stops.push(value.into());
                    }
                }
                "PARAMETER" => {
                    let value = serde_json::from_str(&value).unwrap_or_else(|_| Value::from(value));
                    file.parameters.insert(name.to_owned(), value);
                }
                _ => {
                    return wrong(&format!(
                        "`{instruction}` is unknown; there are FROM, ADAPTER, TEMPLATE, SYSTEM, PARAMETER, MESSAGE and LICENSE"
                    ));
                }
            }
        }
        Ok(file)
    }
}

/// Writes the parameters as `/api/show` lists them.
pub fn parameter_lines(parameters: &Map<String, Value>) -> String {
    let mut lines = Vec::new();
    for (name, value) in parameters {
        each(value, &mut |value| lines.push(format!("{name:<30} {}", quoted(value))));
    }
    lines.join("\n")
}

/// Calls `write` with a value, or with each value of a list.
fn each(value: &Value, write: &mut dyn FnMut(&str)) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| each(value, write)),
        Value::String(text) => write(text),
        other => write(&other.to_string()),
    }
}

/// Splits off the first word of a line.
fn word(text: &str) -> (&str, &str) {
    let text = text.trim_start_matches([' ', '\t']);
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    (&text[..end], &text[end..])
}

/// Returns the text as a value.
fn quoted(text: &str) -> String {
    let is_plain = !text.is_empty() && !text.contains(['\n', '\r', '"']) && text.trim() == text;
    if is_plain {
        return text.to_owned();
    }
    // A run of backslashes before quotation marks that would close the text is doubled, and one more is added.
    let mut out = QUOTES.to_owned();
    let mut rest = text;
    while let Some(at) = rest.find(QUOTES) {
        let after = &rest[at + QUOTES.len()..];
        let slashes = rest[..at].len() - rest[..at].trim_end_matches('\\').len();
        out.push_str(&rest[..at]);
        if after.find('\n').is_some_and(|end| after[..end].trim().is_empty()) {
            out.push_str(&"\\".repeat(slashes + 1));
            out.push_str(QUOTES);
            rest = after;
        } else {
            // One mark at a time, because `""""` ends with three as well.
            out.push('"');
            rest = &rest[at + 1..];
        }
    }
    out.push_str(rest);
    out.push_str(&"\\".repeat(text.len() - text.trim_end_matches('\\').len()));
    out.push_str(QUOTES);
    out
}

/// Reads a value. Returns it with the text after its line.
fn value(text: &str) -> Option<(String, &str)> {
    let text = text.trim_start_matches([' ', '\t']);
    let line_end = text.find('\n').unwrap_or(text.len());
    let Some(inner) = text.strip_prefix(QUOTES) else {
        let line = text[..line_end].trim();
        let bare = line.strip_prefix('"').and_then(|line| line.strip_suffix('"')).unwrap_or(line);
        return Some((bare.to_owned(), text.get(line_end + 1..).unwrap_or_default()));
    };
    let (mut out, mut rest) = (String::new(), inner);
    loop {
        let at = rest.find(QUOTES)?;
        let after = &rest[at + QUOTES.len()..];
        let line = after.find('\n').unwrap_or(after.len());
        if !after[..line].trim().is_empty() {
            out.push_str(&rest[..=at]);
            rest = &rest[at + 1..];
            continue;
        }
        let before = &rest[..at];
        let kept = before.trim_end_matches('\\');
        let slashes = before.len() - kept.len();
        out.push_str(kept);
        out.push_str(&"\\".repeat(slashes / 2));
        if slashes % 2 == 0 {
            return Some((out, after.get(line + 1..).unwrap_or_default()));
        }
        out.push_str(QUOTES);
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn modelfiles_of_ollama_are_read() {
        let text = "\u{feff}# A comment\r\nFROM llama3.2\r\n\r\nPARAMETER temperature 0.5\r\nparameter stop \"<|end|>\"\r\n\
            PARAMETER stop User:\r\nSYSTEM \"\"\"You are\r\nMario.\"\"\"\r\nMESSAGE user Who are \"you\"?\r\nLICENSE \"MIT\"";
        let file = Modelfile::parse(text).unwrap();
        assert_eq!(file.from.as_deref(), Some("llama3.2"));
        assert_eq!(file.system.as_deref(), Some("You are\nMario."));
        assert_eq!(json!(file.parameters), json!({"temperature": 0.5, "stop": ["<|end|>", "User:"]}));
        assert_eq!(file.messages, [("user".to_owned(), "Who are \"you\"?".to_owned())]);
        assert_eq!(file.licenses, ["MIT"]);
        for (text, problem) in [
            ("FROM a\nADAPTER b\nADAPTER c", "line 3: a model has one `ADAPTER`"),
            ("SYSTEM \"\"\"open", "line 1: a text"),
            ("\nRUN x", "line 2: `RUN` is unknown"),
            ("FROM\n", "`FROM` has no value"),
        ] {
            let error = Modelfile::parse(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_modelfile_is_read_as_it_was_written(
            texts in prop::collection::vec("(\"|\\\\|\n|\"\"\"\n|[ a{}%#]|ü){1,12}", 4),
        ) {
            let texts: Vec<_> = texts;
            let file = Modelfile {
                from: Some("base".into()),
                adapter: Some("lora".into()),
                template: Some(texts[0].clone()),
                system: Some(texts[1].clone()),
                parameters: json!({"stop": [texts[2]], "top_k": 3, "seed": -1}).as_object().unwrap().clone(),
                messages: vec![("user".into(), texts[3].clone()), ("assistant".into(), String::new())],
                licenses: vec![texts[2].clone()],
            };
            let written = file.write("name");
            prop_assert_eq!(Modelfile::parse(&written), Ok(file), "{}", written);
        }
    }
}
