//! Values as Python sees them: text of them, iteration, and what all of it may cost.

use std::{collections::HashMap, fmt::Write, sync::Arc};

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Enumerator, Object, ObjectRepr, ValueKind},
};

/// The variable that holds what one rendering may use in total, in bytes of text and containers made, and in work of
/// the same order. A hostile template doubles a string with every step, so counting steps is not enough.
pub(super) const BUDGET: &str = "__budget";

/// Bytes that an element of a list counts for.
pub(super) const ELEMENT: usize = 32;

/// How deep containers may be nested; handling them is recursive.
const MAX_DEPTH: usize = 100;

struct Budget(usize);

pub(super) fn fail<T>(message: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.into()))
}

/// The budget is used up.
pub(super) fn exhausted() -> Error {
    Error::new(ErrorKind::OutOfFuel, "the template makes too much text")
}

fn budget<'s>(state: &'s mut State<'_, '_>) -> &'s mut Budget {
    let limit = match state.get_extension::<Budget>() {
        Some(_) => 0,
        None => state.lookup(BUDGET).and_then(|limit| limit.as_usize()).unwrap_or(0),
    };
    state.get_or_insert_extension_with(|| Budget(limit))
}

/// What is left.
pub(super) fn left(state: &mut State) -> usize {
    budget(state).0
}

/// Uses `bytes` of the budget; called before the memory is.
pub(super) fn charge(state: &mut State, bytes: usize) -> Result<(), Error> {
    let budget = budget(state);
    budget.0 = budget.0.checked_sub(bytes).ok_or_else(exhausted)?;
    Ok(())
}

/// A string that has been charged for nowhere yet.
pub(super) fn string(state: &mut State, text: String) -> Result<Value, Error> {
    charge(state, text.len())?;
    Ok(Value::from(text))
}

/// A list that has been charged for nowhere yet.
pub(super) fn list(state: &mut State, items: Vec<Value>) -> Result<Value, Error> {
    charge(state, items.len().saturating_mul(ELEMENT))?;
    Ok(Value::from(items))
}

/// A dictionary in the order of insertion.
#[derive(Debug, Default)]
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    index: HashMap<Value, usize>,
}

impl Dict {
    pub(super) fn insert(&mut self, key: Value, value: Value) {
        match self.index.get(&lookup_key(&key)) {
            Some(&at) => self.entries[at].1 = value,
            None => {
                self.index.insert(lookup_key(&key), self.entries.len());
                self.entries.push((key, value));
            }
        }
    }

    pub(super) fn get(&self, key: &Value) -> Option<&Value> {
        self.index.get(&lookup_key(key)).map(|&at| &self.entries[at].1)
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }
}

/// To a dictionary, `1`, `1.0` and `True` are one key.
fn lookup_key(key: &Value) -> Value {
    match key.kind() {
        ValueKind::Bool => Value::from(i64::from(key.is_true())),
        ValueKind::Number => match f64::try_from(key.clone()) {
            Ok(float) if float.fract() == 0.0 && float.abs() < 1e15 => Value::from(float as i64),
            _ => key.clone(),
        },
        _ => key.clone(),
    }
}

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.entries.iter().map(|(key, _)| key.clone()).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }
}

/// The dictionary that a value is; namespaces and loops are none.
pub(super) fn as_dict(value: &Value) -> Option<&Dict> {
    value.downcast_object_ref()
}

/// Something to iterate over that is not a list: a generator, or a view of a dictionary.
#[derive(Debug)]
pub(super) struct Lazy {
    pub(super) items: Vec<Value>,
    /// `dict_items` and the like have a length; generators do not, and are true even if they are empty.
    pub(super) view: Option<&'static str>,
}

impl Lazy {
    pub(super) fn generator(state: &mut State, items: Vec<Value>) -> Result<Value, Error> {
        charge(state, items.len().saturating_mul(ELEMENT))?;
        Ok(Value::from_object(Self { items, view: None }))
    }
}

impl Object for Lazy {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.view.map(|_| self.items.len())
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.view.is_none() || !self.items.is_empty()
    }
}

/// JSON as template values.
pub(super) fn from_json(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => {
            let integer = number.as_i64().map(Value::from).or_else(|| number.as_u64().map(Value::from));
            integer.or_else(|| number.as_f64().map(Value::from)).unwrap_or_default()
        }
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => items.iter().map(from_json).collect::<Vec<_>>().into(),
        serde_json::Value::Object(entries) => {
            let mut dict = Dict::default();
            for (key, value) in entries {
                dict.insert(Value::from(key.as_str()), from_json(value));
            }
            Value::from_object(dict)
        }
    }
}

/// The items that iterating over a value gives.
pub(super) fn items(state: &mut State, value: &Value) -> Result<Vec<Value>, Error> {
    if let Some(text) = value.as_str() {
        charge(state, text.len().saturating_mul(ELEMENT))?;
        return Ok(text.chars().map(|c| Value::from(c.encode_utf8(&mut [0; 4]) as &str)).collect());
    }
    match value.kind() {
        ValueKind::Undefined => Ok(Vec::new()),
        // Namespaces and loops are no dictionaries.
        ValueKind::Map if as_dict(value).is_none() => fail("'object' object is not iterable"),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            charge(state, value.len().unwrap_or(0).saturating_mul(ELEMENT))?;
            value.try_iter()?.checked().collect()
        }
        _ => fail(format!("'{}' object is not iterable", type_name(value))),
    }
}

/// How Python calls the type of a value.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "Undefined",
        ValueKind::None => "NoneType",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        ValueKind::Bytes => "bytes",
        ValueKind::Seq if value.is_tuple() => "tuple",
        ValueKind::Seq => "list",
        ValueKind::Map if as_dict(value).is_some() => "dict",
        ValueKind::Iterable => "generator",
        _ => "object",
    }
}

/// Refuses values that are nested deeper than anything here handles, or larger than the budget.
pub(super) fn check_depth(state: &mut State, value: &Value, depth: usize) -> Result<(), Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        return Ok(());
    }
    if depth > MAX_DEPTH {
        return fail("values are nested too deeply");
    }
    if let Some(dict) = as_dict(value) {
        charge(state, dict.entries().len().saturating_mul(ELEMENT))?;
        return dict.entries().iter().try_for_each(|(key, value)| {
            check_depth(state, key, depth + 1)?;
            check_depth(state, value, depth + 1)
        });
    }
    charge(state, value.len().unwrap_or(1).saturating_mul(ELEMENT))?;
    for item in value.try_iter()?.checked() {
        let item = item?;
        check_depth(state, &item, depth + 1)?;
        // Namespaces.
        if value.kind() == ValueKind::Map {
            check_depth(state, &value.get_item(&item)?, depth + 1)?;
        }
    }
    Ok(())
}

/// `str(value)`, as `{{ value }}` writes it.
pub(super) fn to_text(state: &mut State, value: &Value) -> Result<String, Error> {
    let mut text = Text { out: String::new(), limit: left(state) };
    text.str(value)?;
    charge(state, text.out.len())?;
    Ok(text.out)
}

/// Calls `f` with `str(value)`, without a copy of strings.
pub(super) fn with_text<R>(
    state: &mut State,
    value: &Value,
    f: impl FnOnce(&mut State, &str) -> Result<R, Error>,
) -> Result<R, Error> {
    match value.as_str() {
        Some(text) => f(state, text),
        None => {
            let text = to_text(state, value)?;
            f(state, &text)
        }
    }
}

struct Text {
    out: String,
    limit: usize,
}

impl Text {
    fn str(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.out.push_str(text),
            None if value.is_undefined() => {}
            None => self.repr(value)?,
        }
        Ok(())
    }

    fn repr(&mut self, value: &Value) -> Result<(), Error> {
        if self.out.len() > self.limit {
            return Err(exhausted());
        }
        if let Some(text) = value.as_str() {
            let quoted = repr_str(text);
            self.out.push_str(&if value.is_safe() { format!("Markup({quoted})") } else { quoted });
            return Ok(());
        }
        match value.kind() {
            ValueKind::Undefined => self.out.push_str("Undefined"),
            ValueKind::Number if !value.is_integer() => {
                let float = f64::try_from(value.clone())?;
                self.out.push_str(&repr_float(float));
            }
            ValueKind::Seq => {
                let (open, close) = if value.is_tuple() { ("(", ")") } else { ("[", "]") };
                let single = value.is_tuple() && value.len() == Some(1);
                self.sequence(open, value.try_iter()?, if single { ",)" } else { close })?;
            }
            ValueKind::Iterable => match value.downcast_object_ref::<Lazy>() {
                Some(Lazy { items, view: Some(name) }) => {
                    self.sequence(&format!("{name}(["), items.iter().cloned(), "])")?;
                }
                _ => self.out.push_str("<generator object>"),
            },
            ValueKind::Map if let Some(dict) = as_dict(value) => {
                self.out.push('{');
                for (index, (key, value)) in dict.entries().iter().enumerate() {
                    self.out.push_str(if index == 0 { "" } else { ", " });
                    self.repr(key)?;
                    self.out.push_str(": ");
                    self.repr(value)?;
                }
                self.out.push('}');
            }
            ValueKind::Map => self.out.push_str("<object>"),
            // None, booleans and integers print in minijinja as they do in Python.
            _ => write!(self.out, "{value}").map_err(|_| exhausted())?,
        }
        Ok(())
    }

    fn sequence(&mut self, open: &str, items: impl Iterator<Item = Value>, close: &str) -> Result<(), Error> {
        self.out.push_str(open);
        for (index, item) in items.enumerate() {
            self.out.push_str(if index == 0 { "" } else { ", " });
            self.repr(&item)?;
        }
        self.out.push_str(close);
        Ok(())
    }
}

/// `repr` of a string: quotes, and escapes for what does not print.
fn repr_str(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        let _ = match c {
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            '\\' => write!(out, "\\\\"),
            _ if c == quote => write!(out, "\\{c}"),
            ' '..='~' => write!(out, "{c}"),
            _ if is_printable(c) => write!(out, "{c}"),
            _ => match u32::from(c) {
                code @ ..0x100 => write!(out, "\\x{code:02x}"),
                code @ ..0x10000 => write!(out, "\\u{code:04x}"),
                code => write!(out, "\\U{code:08x}"),
            },
        };
    }
    out.push(quote);
    out
}

/// Python's `str.isprintable`: neither control, format, unassigned nor separator. Rust escapes the same characters,
/// and combining ones too where they begin a string: hence the letter before.
fn is_printable(c: char) -> bool {
    ['a', c].iter().collect::<String>().escape_debug().nth(1) == Some(c)
}

/// `repr` of a float: the shortest digits that read back as the same number.
pub(super) fn repr_float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        // Debug always shows a fraction; below 16 digits it never uses an exponent, but for very small numbers.
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// What Python's `str.isspace` and `\s` take for whitespace.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}
