//! Offered tools, and argument values that are not JSON.

use serde_json::{Map, Value};

/// A tool whose calls are parsed.
#[derive(Clone, Debug)]
pub struct ReadTool {
    /// Its name.
    pub name: String,
    /// Its parameters, with the kinds of values that each accepts.
    parameters: Vec<(String, Kinds)>,
}

/// The kinds of values that a schema allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kinds {
    pub text: bool,
    pub other: bool,
}

/// Maximum depth of examined schemas.
const MAX_DEPTH: usize = 8;

/// Maximum nesting of values in a call's arguments.
const MAX_NESTED: usize = 64;

impl ReadTool {
    /// Creates a tool from the JSON schema of its arguments.
    pub fn new(name: &str, schema: Option<&Value>) -> Self {
        let properties = schema.and_then(|schema| schema["properties"].as_object());
        let parameters =
            properties.into_iter().flatten().map(|(key, schema)| (key.clone(), kinds(schema, 0)));
        Self { name: name.to_owned(), parameters: parameters.collect() }
    }

    /// Returns the value of a parameter: parsed JSON, or the text itself if the parameter accepts strings.
    pub(super) fn value(&self, parameter: &str, text: &str) -> Value {
        let known = self.parameters.iter().find(|(name, _)| name == parameter);
        let kinds = known.map_or(Kinds { text: true, other: true }, |(_, kinds)| *kinds);
        let trimmed = text.trim();
        let json = || match trimmed {
            // Python's spelling.
            "True" => Some(Value::Bool(true)),
            "False" => Some(Value::Bool(false)),
            "None" => Some(Value::Null),
            _ => serde_json::from_str::<Value>(trimmed).ok().or_else(|| literal(trimmed)),
        };
        let value = if kinds.other { json().filter(|value| !kinds.text || !value.is_string()) } else { None };
        value.unwrap_or_else(|| text.into())
    }
}

/// Returns the kinds of values that a schema allows; both if it names none.
pub(super) fn kinds(schema: &Value, depth: usize) -> Kinds {
    let of_type = |name: &str| Kinds { text: name == "string", other: name != "string" };
    let both = |kinds: &mut dyn Iterator<Item = Kinds>| {
        let all =
            kinds.fold(Kinds::default(), |a, b| Kinds { text: a.text || b.text, other: a.other || b.other });
        if all == Kinds::default() { Kinds { text: true, other: true } } else { all }
    };
    if depth > MAX_DEPTH {
        return Kinds { text: true, other: true };
    }
    let of_value = |value: &Value| Kinds { text: value.is_string(), other: !value.is_string() };
    match &schema["type"] {
        Value::String(name) => return of_type(name),
        Value::Array(names) => return both(&mut names.iter().filter_map(Value::as_str).map(of_type)),
        _ => {}
    }
    if let Some(values) = schema["enum"].as_array() {
        return both(&mut values.iter().map(of_value));
    }
    if let Some(value) = schema.get("const") {
        return of_value(value);
    }
    let choices = schema["anyOf"].as_array().or_else(|| schema["oneOf"].as_array());
    both(&mut choices.into_iter().flatten().map(|schema| kinds(schema, depth + 1)))
}

/// Parses keyword arguments in Python's syntax: `a=1, b="x"`.
pub(super) fn keywords(text: &str) -> Option<Map<String, Value>> {
    let mut parser = Literals { rest: text };
    let mut arguments = Map::new();
    loop {
        if parser.end() {
            return Some(arguments);
        }
        if !arguments.is_empty() {
            parser.take(',')?;
            // A comma may follow the last one.
            if parser.end() {
                return Some(arguments);
            }
        }
        let name = parser.name()?;
        parser.take('=')?;
        let value = parser.value(0)?;
        arguments.insert(name.to_owned(), value);
    }
}

/// Parses a value in Python's syntax.
fn literal(text: &str) -> Option<Value> {
    let mut parser = Literals { rest: text };
    // A bare word is a string.
    let value = parser.value(0).filter(|value| value.is_array() || value.is_object())?;
    parser.end().then_some(value)
}

/// Parser of Python and JSON literals.
struct Literals<'t> {
    rest: &'t str,
}

impl<'t> Literals<'t> {
    fn end(&mut self) -> bool {
        self.rest = self.rest.trim_start();
        self.rest.is_empty()
    }

    fn take(&mut self, c: char) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(c)?;
        Some(())
    }

    fn name(&mut self) -> Option<&'t str> {
        self.rest = self.rest.trim_start();
        let end =
            self.rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_NESTED {
            return None;
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.text(quote).map(Value::String),
            '[' => self.items('[', ']', depth).map(Value::Array),
            '(' => self.items('(', ')', depth).map(Value::Array),
            '{' => self.object(depth).map(Value::Object),
            '-' | '0'..='9' => {
                let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && !"+-._".contains(c));
                let (number, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
                self.rest = rest;
                serde_json::from_str(number).ok()
            }
            _ => match self.name()? {
                "True" | "true" => Some(Value::Bool(true)),
                "False" | "false" => Some(Value::Bool(false)),
                "None" | "null" => Some(Value::Null),
                _ => None,
            },
        }
    }

    fn items(&mut self, open: char, close: char, depth: usize) -> Option<Vec<Value>> {
        self.take(open)?;
        let mut items = Vec::new();
        loop {
            if self.take(close).is_some() {
                return Some(items);
            }
            if !items.is_empty() {
                self.take(',')?;
                if self.take(close).is_some() {
                    return Some(items);
                }
            }
            items.push(self.value(depth + 1)?);
        }
    }

    fn object(&mut self, depth: usize) -> Option<Map<String, Value>> {
        self.take('{')?;
        let mut object = Map::new();
        loop {
            if self.take('}').is_some() {
                return Some(object);
            }
            if !object.is_empty() {
                self.take(',')?;
                if self.take('}').is_some() {
                    return Some(object);
                }
            }
            let Value::String(key) = self.value(depth + 1)? else { return None };
            self.take(':')?;
            object.insert(key, self.value(depth + 1)?);
        }
    }

    fn text(&mut self, quote: char) -> Option<String> {
        let mut chars = self.rest.char_indices();
        chars.next()?;
        let mut text = String::new();
        while let Some((at, c)) = chars.next() {
            if c == quote {
                self.rest = &self.rest[at + c.len_utf8()..];
                return Some(text);
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            let (_, escaped) = chars.next()?;
            let digits = match escaped {
                'n' => Err('\n'),
                't' => Err('\t'),
                'r' => Err('\r'),
                'b' => Err('\u{8}'),
                'f' => Err('\u{c}'),
                'x' => Ok(2),
                'u' => Ok(4),
                'U' => Ok(8),
                other => Err(other),
            };
            match digits {
                Err(c) => text.push(c),
                Ok(count) => {
                    let mut number = |count| {
                        (0..count).try_fold(0, |number: u32, _| {
                            let digit = chars.next()?.1.to_digit(16)?;
                            number.checked_mul(16)?.checked_add(digit)
                        })
                    };
                    let first = number(count)?;
                    let pair = (0xD800..0xDC00).contains(&first);
                    text.push(if pair { '\u{FFFD}' } else { char::from_u32(first).unwrap_or('\u{FFFD}') });
                }
            }
        }
        None
    }
}
