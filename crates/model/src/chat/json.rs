//! JSON: values of it, and `tojson`, which writes as Python's `json.dumps` does.

use std::fmt::Write;

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, ValueKind},
};

use super::MARK;

/// Bytes of JSON between two charges of fuel.
const CHARGED_BYTES: usize = 4096;

/// Converts JSON to a value for templates.
pub(super) fn to_value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => {
            let integer = number.as_i64().map(Value::from).or_else(|| number.as_u64().map(Value::from));
            integer.or_else(|| number.as_f64().map(Value::from)).unwrap_or_default()
        }
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => items.iter().map(to_value).collect::<Vec<_>>().into(),
        serde_json::Value::Object(entries) => {
            Value::from_pairs(entries.iter().map(|(key, value)| (key.as_str(), to_value(value))))
        }
    }
}

/// The arguments of `json.dumps`.
struct Style {
    ensure_ascii: bool,
    /// Indentation per level; `None` for one line.
    indent: Option<String>,
    /// Between items.
    item: String,
    /// Behind keys.
    key: String,
    sort_keys: bool,
}

/// `value|tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`, as transformers defines it.
pub(super) fn tojson(state: &mut State, value: &Value, named: Kwargs) -> Result<Value, Error> {
    let flag =
        |name: &str| Ok::<_, Error>(named.get::<Option<Value>>(name)?.is_some_and(|flag| flag.is_true()));
    let indent = match named.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => match i64::try_from(indent)?.max(0) {
                width @ 0..=100 => Some(" ".repeat(width as usize)),
                width => return fail(format!("an indentation of {width} is too wide")),
            },
        },
    };
    let (mut item, mut key) = (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
    if let Some(pair) = named.get::<Option<Value>>("separators")?.filter(|pair| !pair.is_none()) {
        (item, key) =
            (pair.get_item(&Value::from(0))?.to_string(), pair.get_item(&Value::from(1))?.to_string());
    }
    let (ensure_ascii, sort_keys) = (flag("ensure_ascii")?, flag("sort_keys")?);
    named.assert_all_used()?;
    let style = Style { ensure_ascii, indent, item, key, sort_keys };
    let mut writer = Writer { out: String::new(), charged: 0, state, style: &style };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

struct Writer<'s, 't, 'e> {
    out: String,
    /// Bytes of `out` that fuel was charged for.
    charged: usize,
    state: &'s mut State<'t, 'e>,
    style: &'s Style,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.charge()?;
        if let Some(text) = value.as_str() {
            self.text(text);
            return Ok(());
        }
        match value.kind() {
            ValueKind::None | ValueKind::Bool | ValueKind::Number => self.out.push_str(&scalar(value)?),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.checked();
                self.sequence('[', ']', items.map(|item| (None, item)), depth)?;
            }
            ValueKind::Map => {
                let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
                let mut entries = Vec::new();
                for (key, value) in pairs.into_iter().flatten() {
                    self.state.consume_fuel(1)?;
                    let key = match (key.as_str(), key.kind()) {
                        (Some(key), _) => key.to_owned(),
                        (_, ValueKind::None | ValueKind::Bool | ValueKind::Number) => scalar(&key)?,
                        _ => return fail("keys of JSON are strings, numbers, true, false or none"),
                    };
                    entries.push((Some(key), Ok(value)));
                }
                if self.style.sort_keys {
                    entries.sort_by(|(left, _), (right, _)| left.cmp(right));
                }
                self.sequence('{', '}', entries.into_iter(), depth)?;
            }
            kind => return fail(format!("a value of type {kind} cannot be written as JSON")),
        }
        Ok(())
    }

    fn sequence(
        &mut self,
        open: char,
        close: char,
        items: impl Iterator<Item = (Option<String>, Result<Value, Error>)>,
        depth: usize,
    ) -> Result<(), Error> {
        let style = self.style;
        self.out.push(open);
        let mut is_empty = true;
        for (key, value) in items {
            self.state.consume_fuel(1)?;
            if !is_empty {
                self.out.push_str(&style.item);
            }
            is_empty = false;
            self.line(depth + 1)?;
            if let Some(key) = key {
                self.text(&key);
                self.out.push_str(&style.key);
            }
            self.value(&value?, depth + 1)?;
        }
        if !is_empty {
            self.line(depth)?;
        }
        self.out.push(close);
        Ok(())
    }

    /// Charges fuel for the text written since the last charge.
    fn charge(&mut self) -> Result<(), Error> {
        let written = self.out.len() - self.charged;
        if written >= CHARGED_BYTES {
            self.charged = self.out.len();
            self.state.consume_fuel(written as u64 / 64)?;
        }
        Ok(())
    }

    /// Begins a line, where the style has lines.
    fn line(&mut self, depth: usize) -> Result<(), Error> {
        let Some(indent) = &self.style.indent else { return Ok(()) };
        self.out.push('\n');
        self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        self.charge()
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                _ if c < ' ' || (self.style.ensure_ascii && c > '~' && c != MARK) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn fail<T>(message: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.into()))
}

/// Numbers, booleans and `null`.
fn scalar(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::None => "null".into(),
        ValueKind::Bool => if value.is_true() { "true" } else { "false" }.into(),
        _ if value.is_integer() => value.to_string(),
        _ => match f64::try_from(value.clone())? {
            float if float.is_nan() => "NaN".into(),
            float if float.is_infinite() => if float > 0.0 { "Infinity" } else { "-Infinity" }.into(),
            float => repr_float(float),
        },
    })
}

/// Python's `repr` of a finite float.
fn repr_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}
