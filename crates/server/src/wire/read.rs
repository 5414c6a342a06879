//! Parsing of a body into a type. Unknown fields are ignored, refused, or reported as typing errors.

use std::{collections::HashSet, fmt, mem};

use serde::{
    Deserializer,
    de::{DeserializeOwned, DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};
use strsim::damerau_levenshtein;
use utoipa::ToSchema;

use super::{Body, Other, Rule, Schema, Tolerance, schema, surrogates::mend, tolerance::without_indices};
use crate::error::{ApiError, missing};

/// Maximum number of values of one body, including nested ones. It bounds the memory of a small body with many values.
const MOST_VALUES: usize = 8 << 20;

/// Maximum number of unknown fields of one body that are compared with known ones.
const MOST_COMPARED: usize = 256;

/// Fields for which an empty value is meaningful: an empty answer, an empty prompt, no adapters.
const EMPTY_IS_A_VALUE: [&str; 8] =
    ["content", "text", "arguments", "output", "prompt", "input", "schema", "lora"];

/// Names of other servers' fields that only resemble ours.
const FOREIGN: [&str; 4] = ["models", "min_k", "top_n", "mode"];

/// The byte order mark, which editors and shells of Windows write before a text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Parses a body. `model` is the value of a missing field `model`.
///
/// # Errors
/// The problem with its path.
pub fn read<T: Body>(
    bytes: &[u8],
    schema: &Schema,
    model: Option<String>,
    tolerance: &Tolerance,
) -> Result<T, ApiError> {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    // serde would accept an array with an object's fields in order.
    if !T::IS_LIST && bytes.trim_ascii_start().first() == Some(&b'[') {
        let message = "the body is a JSON array; it must be an object".into();
        return Err(ApiError::Invalid { param: None, message });
    }
    let bytes = mend(bytes);
    let mut json = serde_json::Deserializer::from_slice(&bytes);
    let mut values = 0;
    let value = Json(&mut values).deserialize(&mut json).and_then(|value| json.end().map(|()| value));
    let mut value = value.map_err(|error| refusal(None, &error))?;
    if let Value::Object(fields) = &mut value {
        // An empty name is an absent one.
        if fields.get("model").is_some_and(|name| name == "") {
            fields.remove("model");
        }
        fields.extend(model.map(|model| ("model".to_owned(), model.into())));
    }
    read_value(value, schema, T::OTHERS, tolerance)
}

/// Converts a parsed value.
///
/// # Errors
/// The problem with its path.
pub fn read_value<T: DeserializeOwned + ToSchema>(
    mut value: Value,
    schema: &Schema,
    others: &[&[Other]],
    tolerance: &Tolerance,
) -> Result<T, ApiError> {
    let mut reader = Reader { schema, others, tolerance, path: String::new(), compared: HashSet::new() };
    reader.value(schema.root(), &mut value)?;
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        refusal((path != ".").then_some(path), error.inner())
    })
}

/// Compares a body with the schema of its type.
struct Reader<'r> {
    schema: &'r Schema,
    others: &'r [&'r [Other]],
    tolerance: &'r Tolerance,
    /// Path of the current value: `messages[0].content`.
    path: String,
    /// Unknown fields that were compared with known ones, as paths without indices.
    compared: HashSet<String>,
}

impl<'r> Reader<'r> {
    fn value(&mut self, schema: &'r Value, value: &mut Value) -> Result<(), ApiError> {
        if !self.schema.takes_some(schema, value) {
            let mut expected = Vec::new();
            for name in self.schema.all_types(schema) {
                let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
                let one = format!("{article} {name}");
                if name != "null" && !expected.contains(&one) {
                    expected.push(one);
                }
            }
            return Err(self.invalid(&format!("must be {}, not {}", expected.join(" or "), shown(value))));
        }
        let Some(schema) = self.schema.resolve(schema, value) else { return Ok(()) };
        let words = schema.get("enum").and_then(Value::as_array).filter(|words| !words.contains(value));
        if let (Some(words), Value::String(_)) = (words, &*value) {
            let words: Vec<_> =
                words.iter().filter_map(Value::as_str).map(|word| format!("`{word}`")).collect();
            return Err(self.invalid(&format!("must be one of {}, not {}", words.join(", "), shown(value))));
        }
        match value {
            Value::Object(fields) => {
                if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
                    let known = mem::take(fields);
                    *fields = self.object(schema, properties, known)?;
                }
            }
            Value::Array(list) => {
                if let Some(items) = schema.get("items") {
                    let length = self.path.len();
                    for (index, item) in list.iter_mut().enumerate() {
                        self.path += &format!("[{index}]");
                        self.value(items, item)?;
                        self.path.truncate(length);
                    }
                }
            }
            Value::Number(number) => self.number(schema, number)?,
            Value::Null | Value::Bool(_) | Value::String(_) => {}
        }
        Ok(())
    }

    /// Converts floats without a fraction, which some clients send for integers.
    fn number(&self, schema: &Value, number: &mut Number) -> Result<(), ApiError> {
        let is_integer = schema::types(schema).any(|name| name == "integer");
        if let Some(float) =
            number.as_f64().filter(|float| is_integer && number.is_f64() && float.abs() < 9e15)
        {
            *number = Number::from(float as i64);
        }
        if !is_integer {
            return Ok(());
        }
        let least = schema.get("minimum").and_then(Value::as_i64);
        if let (Some(least), Some(value)) = (least, number.as_i64())
            && value < least
        {
            return Err(self.invalid(&format!("must be at least {least}, not {value}")));
        }
        let is_small = schema.get("format").and_then(Value::as_str) == Some("int32");
        let most = if least == Some(0) { u64::from(u32::MAX) } else { i32::MAX.unsigned_abs().into() };
        if is_small && number.as_u64().is_some_and(|value| value > most) {
            return Err(self.invalid(&format!("must be at most {most}, not {number}")));
        }
        Ok(())
    }

    fn object(
        &mut self,
        schema: &'r Value,
        properties: &'r Map<String, Value>,
        fields: Map<String, Value>,
    ) -> Result<Map<String, Value>, ApiError> {
        let is_required = |name: &str| schema::required(schema).any(|required| required == name);
        let is_open = schema.get("open") == Some(&Value::Bool(true));
        let mut kept = Map::new();
        let length = self.path.len();
        for (name, mut value) in fields {
            if !self.path.is_empty() {
                self.path.push('.');
            }
            self.path += &name;
            match properties.get(&name) {
                Some(_) if value.is_null() => {}
                Some(property) => {
                    let matters = is_required(&name) || EMPTY_IS_A_VALUE.contains(&name.as_str());
                    if matters
                        || !is_empty(&value)
                        || value.is_object() && is_free(self.schema.resolve(property, &value))
                    {
                        self.value(property, &mut value)?;
                        kept.insert(name, value);
                    }
                }
                None if is_open => drop(kept.insert(name, value)),
                None => self.unknown(&name, &value, properties)?,
            }
            self.path.truncate(length);
        }
        Ok(kept)
    }

    /// Handles a field that the type does not have.
    fn unknown(
        &mut self,
        name: &str,
        value: &Value,
        properties: &Map<String, Value>,
    ) -> Result<(), ApiError> {
        let short = without_indices(&self.path);
        if let Some(Other { rule, why, .. }) =
            self.others.iter().copied().flatten().find(|other| other.path == short)
        {
            let asks_for_nothing = value.is_null()
                || is_empty(value)
                || rule.neutral().iter().any(|neutral| {
                    serde_json::from_str(neutral).is_ok_and(|neutral: Value| same(&neutral, value))
                });
            return match rule {
                Rule::NoEffect => Ok(()),
                _ if asks_for_nothing => Ok(()),
                Rule::LeftOut | Rule::LeftOutUnless(_) => self.tolerance.leave_out(&self.path, why),
                Rule::Refused | Rule::RefusedUnless(_) => {
                    let mut message = format!("`{}` is not supported: {why}", self.path);
                    if !rule.neutral().is_empty() {
                        message += &format!("; omit it, or set it to {}", rule.neutral().join(" or "));
                    }
                    Err(ApiError::invalid(self.path.as_str(), message))
                }
            };
        }
        let known = || {
            let siblings = self.siblings().map(|(name, _)| name);
            properties.keys().map(String::as_str).chain(siblings)
        };
        if self.tolerance.is_strict() {
            let names: Vec<_> = known().map(|name| format!("`{name}`")).collect();
            let hint = format!("expected one of {}", names.join(", "));
            return Err(ApiError::UnknownField { param: self.path.clone(), hint });
        }
        if value.is_null() || is_empty(value) {
            return Ok(());
        }
        if self.compared.len() < MOST_COMPARED && !self.compared.contains(&short) {
            // A misspelled field without effect is not reported.
            let siblings = self.siblings().filter(|(_, rule)| rule.refuses()).map(|(name, _)| name);
            let candidates = properties.keys().map(String::as_str).chain(siblings);
            if let Some(meant) = nearest(name, candidates) {
                let hint = format!("did you mean `{meant}`?");
                return Err(ApiError::UnknownField { param: self.path.clone(), hint });
            }
            self.compared.insert(short);
        }
        self.tolerance.note(&self.path, "the field is unknown");
        Ok(())
    }

    /// Returns the known fields beside the current path that the type does not read, with their rules.
    fn siblings(&self) -> impl Iterator<Item = (&'r str, Rule)> + use<'r> {
        let short = without_indices(&self.path);
        let parent = short.rsplit_once('.').map_or(String::new(), |(parent, _)| format!("{parent}."));
        let others = self.others.iter().copied().flatten();
        let named =
            others.filter_map(move |other| Some((other.path.strip_prefix(parent.as_str())?, other.rule)));
        named.filter(|(name, _)| !name.contains('.'))
    }

    fn invalid(&self, message: &str) -> ApiError {
        match self.path.as_str() {
            "" => ApiError::Invalid { param: None, message: format!("the body {message}") },
            path => ApiError::invalid(path, format!("`{path}` {message}")),
        }
    }
}

/// Returns true for an empty value.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Returns true if objects of a schema can have any fields, so that an empty one may be meaningful.
fn is_free(schema: Option<&Value>) -> bool {
    schema.is_some_and(|schema| {
        schema.get("properties").is_none()
            && schema::types(schema).all(|name| matches!(name, "object" | "null"))
    })
}

/// Compares JSON values; 1 and 1.0 are equal.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

/// Returns the most similar known name: one with a typing error, or in another case.
fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    if name.len() > 64 || FOREIGN.contains(&name) {
        return None;
    }
    let plain = |name: &str| name.to_lowercase().replace(['_', '-'], "");
    let meant = plain(name);
    let near = known.filter(|known| name.len().abs_diff(known.len()) <= 4).filter_map(|known| {
        let distance = damerau_levenshtein(&meant, &plain(known));
        let most = match known.len() {
            0..=4 => 0,
            5..=7 => 1,
            _ => 2,
        };
        (distance <= most).then_some((distance, known))
    });
    near.min_by_key(|(distance, _)| *distance).map(|(_, known)| known)
}

/// Formats a value for an error.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        scalar => {
            let text = scalar.to_string();
            match text.char_indices().nth(60) {
                Some((end, _)) => format!("{}...", &text[..end]),
                None => text,
            }
        }
    }
}

/// Reads JSON. Refuses duplicate fields and too many values.
struct Json<'n>(&'n mut usize);

impl<'de> DeserializeSeed<'de> for Json<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        *self.0 += 1;
        if *self.0 > MOST_VALUES {
            return Err(D::Error::custom(format_args!("the body has more than {MOST_VALUES} values")));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Json<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(Json(self.0))? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            let value = map.next_value_seed(Json(self.0))?;
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format_args!("duplicate field `{name}`")));
            }
            fields.insert(name, value);
        }
        Ok(fields.into())
    }
}

fn refusal(path: Option<String>, error: &serde_json::Error) -> ApiError {
    let message = error.to_string();
    // serde's message without the position, which is of little use in a body that a library wrote.
    let words = message.rsplit_once(" at line ").map_or(message.as_str(), |(words, _)| words);
    // Limits of serde_json that valid JSON may exceed.
    let place = message.strip_prefix(words).unwrap_or_default();
    let problem = match words {
        "recursion limit exceeded" => {
            format!("is nested too deeply{place}: at most 127 levels of lists and objects are read")
        }
        "number out of range" => format!("has a number out of range{place}: at most 1.8e308 can be read"),
        _ => format!("is not JSON: {message}"),
    };
    if !error.is_data() {
        return ApiError::Invalid { param: None, message: format!("the body {problem}") };
    }
    if let Some((name, _)) = words.strip_prefix("missing field `").and_then(|rest| rest.split_once('`')) {
        let param = path.map_or_else(|| name.to_owned(), |path| format!("{path}.{name}"));
        let message = missing(&param);
        return ApiError::Invalid { param: Some(param), message };
    }
    match path {
        Some(path) => ApiError::Invalid { message: format!("`{path}`: {words}"), param: Some(path) },
        None => ApiError::Invalid { param: None, message: words.to_owned() },
    }
}
