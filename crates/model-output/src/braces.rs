//! Arguments in Gemma 4's format: `{key:VALUE,...}`. Strings stand between two [`QUOTE`]s without escapes; other values
//! are JSON.

use serde_json::{Map, Value};

/// Mark before and after a string.
pub(super) const QUOTE: &str = "<|\"|>";

/// Maximum nesting of values in a call's arguments.
const MAX_NESTED: usize = 64;

/// Parses the arguments between the outermost braces.
pub(super) fn read(text: &str) -> Option<Map<String, Value>> {
    let mut reader = Reader { rest: text };
    let arguments = reader.members(0)?;
    reader.rest.trim().is_empty().then_some(arguments)
}

/// Writes the arguments between the outermost braces.
pub(super) fn write(arguments: &Map<String, Value>) -> String {
    let members = arguments.iter().map(|(key, value)| format!("{key}:{}", write_value(value)));
    members.collect::<Vec<_>>().join(",")
}

fn write_value(value: &Value) -> String {
    match value {
        Value::String(text) => [QUOTE, text, QUOTE].concat(),
        Value::Object(object) => format!("{{{}}}", write(object)),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(write_value).collect::<Vec<_>>().join(","))
        }
        other => other.to_string(),
    }
}

struct Reader<'t> {
    rest: &'t str,
}

impl<'t> Reader<'t> {
    fn take(&mut self, mark: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(mark)?;
        Some(())
    }

    fn up_to(&mut self, mark: &str) -> Option<&'t str> {
        let (text, rest) = self.rest.split_once(mark)?;
        self.rest = rest;
        Some(text)
    }

    /// Parses members up to the closing brace or the end.
    fn members(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let mut members = Map::new();
        loop {
            self.rest = self.rest.trim_start();
            if self.rest.is_empty() || self.rest.starts_with('}') {
                return Some(members);
            }
            if !members.is_empty() {
                self.take(",")?;
            }
            let key = match self.take(QUOTE) {
                Some(()) => {
                    let key = self.up_to(QUOTE)?;
                    self.take(":")?;
                    key
                }
                None => self.up_to(":")?.trim().trim_matches('"'),
            };
            if key.is_empty() {
                return None;
            }
            let value = self.value(depth)?;
            members.insert(key.to_owned(), value);
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_NESTED {
            return None;
        }
        if self.take(QUOTE).is_some() {
            return self.up_to(QUOTE).map(Value::from);
        }
        if self.take("{").is_some() {
            let members = self.members(depth + 1)?;
            self.take("}")?;
            return Some(members.into());
        }
        if self.take("[").is_some() {
            let mut items = Vec::new();
            while self.take("]").is_none() {
                if !items.is_empty() {
                    self.take(",")?;
                }
                items.push(self.value(depth + 1)?);
            }
            return Some(items.into());
        }
        // A number, a word, or a JSON string.
        let mut values = serde_json::Deserializer::from_str(self.rest).into_iter::<Value>();
        let value = values.next()?.ok()?;
        self.rest = &self.rest[values.byte_offset()..];
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let arguments = json!({
            "city": "Rome, {\"Italy\"}: [x]\n",
            "days": [1, -2.5, true, null],
            "more": {"a": {"b": []}, "c": "", "d": {}},
        });
        let arguments = arguments.as_object().unwrap();
        assert_eq!(read(&write(arguments)).as_ref(), Some(arguments));
        assert_eq!(read(""), Some(Map::new()));
        let spaced = read(" a : 1 , <|\"|>b<|\"|> : <|\"|>x<|\"|> , \"c\" : \"y\" ");
        assert_eq!(spaced.map(Value::Object), Some(json!({"a": 1, "b": "x", "c": "y"})));
    }

    #[test]
    fn what_is_not_arguments_is_refused() {
        let deep = format!("a:{}", "[".repeat(100));
        for text in ["a", "a:", "a:x", ":1", "a:1 b:2", "a:[1", "a:{b:1", "a:<|\"|>x", "a:1}", &deep] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
