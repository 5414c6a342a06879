//! `tojson`: Python's `json.dumps`.

use std::fmt::Write;

use minijinja::{Error, State, Value, value::ValueKind};

use super::values::{as_dict, charge, exhausted, fail, left, repr_float, type_name};

/// The arguments of `json.dumps`.
pub(super) struct Style {
    pub(super) ensure_ascii: bool,
    /// What one level is indented by; without it, all is on one line.
    pub(super) indent: Option<String>,
    /// Between items, and after keys.
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
}

/// Writes a value as JSON.
pub(super) fn dumps(state: &mut State, value: &Value, style: &Style) -> Result<Value, Error> {
    let defaults = if style.indent.is_some() { (",", ": ") } else { (", ", ": ") };
    let (item, key) = style.separators.as_ref().map_or(defaults, |(item, key)| (item, key));
    let mut writer = Writer { out: String::new(), limit: left(state), style, item, key };
    writer.value(value, 0)?;
    charge(state, writer.out.len())?;
    Ok(Value::from(writer.out))
}

struct Writer<'s> {
    out: String,
    limit: usize,
    style: &'s Style,
    item: &'s str,
    key: &'s str,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if self.out.len() > self.limit {
            return Err(exhausted());
        }
        if let Some(text) = value.as_str() {
            self.text(text);
            return Ok(());
        }
        match value.kind() {
            ValueKind::None | ValueKind::Bool | ValueKind::Number => self.out.push_str(&scalar(value)?),
            ValueKind::Seq => {
                let items = value.try_iter()?;
                self.sequence('[', ']', items.map(|item| (None, item)), depth)?;
            }
            ValueKind::Map if let Some(dict) = as_dict(value) => {
                let mut entries = Vec::with_capacity(dict.entries().len());
                for (key, value) in dict.entries() {
                    let key = match (key.as_str(), key.kind()) {
                        (Some(key), _) => key.to_owned(),
                        (_, ValueKind::None | ValueKind::Bool | ValueKind::Number) => scalar(key)?,
                        _ => {
                            return fail(format!(
                                "keys must be str, int, float, bool or None, not {}",
                                type_name(key)
                            ));
                        }
                    };
                    entries.push((Some(key), value.clone()));
                }
                if self.style.sort_keys {
                    entries.sort_by(|(left, _), (right, _)| left.cmp(right));
                }
                self.sequence('{', '}', entries.into_iter(), depth)?;
            }
            _ => return fail(format!("Object of type {} is not JSON serializable", type_name(value))),
        }
        Ok(())
    }

    fn sequence(
        &mut self,
        open: char,
        close: char,
        items: impl Iterator<Item = (Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.out.push(open);
        let mut is_empty = true;
        for (key, value) in items {
            if !is_empty {
                self.out.push_str(self.item);
            }
            is_empty = false;
            self.line(depth + 1)?;
            if let Some(key) = key {
                self.text(&key);
                self.out.push_str(self.key);
            }
            self.value(&value, depth + 1)?;
        }
        if !is_empty {
            self.line(depth)?;
        }
        self.out.push(close);
        Ok(())
    }

    /// A new line, where there are lines.
    fn line(&mut self, depth: usize) -> Result<(), Error> {
        let Some(indent) = &self.style.indent else { return Ok(()) };
        if self.out.len().saturating_add(indent.len().saturating_mul(depth)) > self.limit {
            return Err(exhausted());
        }
        self.out.push('\n');
        self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        Ok(())
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
                _ if c < ' ' || (self.style.ensure_ascii && c > '~') => {
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
