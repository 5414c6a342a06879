//! JSON schemas in the form that the grammar library compiles correctly.
//!
//! A schema is rewritten in two steps. [`plain`] resolves references, replaces older spellings and formats, and drops
//! keywords that bind nothing. [`combine`] closes objects and writes combinations (`oneOf`, `not`, `if`,
//! `dependentRequired`, ...) as alternatives. Every value of the result fits the original schema. A keyword for which
//! this is impossible is an error with its name and place. [`keywords`] lists all keywords.

mod combine;
mod counts;
mod embedded;
mod exclusive;
mod formats;
pub(crate) mod keywords;
mod lists;
mod names;
mod pattern;
mod plain;
mod references;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

pub(crate) use self::embedded::{escapes, narrow_embedded};
use self::plain::PLACE;

/// Keywords and values of a schema.
type Keys = Map<String, Value>;

/// All types of JSON. An integer is a number.
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// Returns a schema all of whose values fit `schema`, with the library's keywords alone.
///
/// # Errors
/// A keyword that cannot be enforced, with its place and the remedy.
pub(crate) fn narrow(schema: &Value) -> Result<Value, String> {
    combine::Combiner::new(plain::plain(schema)?).document()
}

/// Returns the place of a keyword for an error.
fn at(keyword: &str, place: &str) -> String {
    if place.is_empty() { format!("`{keyword}`") } else { format!("`{keyword}` at `{place}`") }
}

/// True if two JSON values are equal; 1 equals 1.0.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| equal(x, y)),
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(name, x)| y.get(name).is_some_and(|y| equal(x, y)))
        }
        _ => a == b,
    }
}

/// Returns the type of a value.
fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Returns the names of a `type`; `None` if it is absent.
fn types(keys: &Keys) -> Option<Vec<&str>> {
    match keys.get("type")? {
        Value::Array(types) => Some(types.iter().filter_map(Value::as_str).collect()),
        one => one.as_str().map(|one| vec![one]),
    }
}

/// Returns the types that are in both lists.
fn common_types(a: Option<Vec<String>>, b: Option<Vec<&str>>) -> Option<Vec<String>> {
    let Some(b) = b else { return a };
    let Some(a) = a else { return Some(b.into_iter().map(Into::into).collect()) };
    let has = |list: &[&str], name: &str| list.contains(&name);
    let a: Vec<&str> = a.iter().map(String::as_str).collect();
    let mut both: Vec<String> =
        a.iter().filter(|name| has(&b, name)).map(|name| (*name).to_owned()).collect();
    for (one, other) in [(&a, &b), (&b, &a)] {
        if has(one, "integer")
            && has(other, "number")
            && !both.iter().any(|name| name == "integer" || name == "number")
        {
            both.push("integer".into());
        }
    }
    Some(both)
}

/// Returns the schemas under a keyword that holds a list.
fn list<'k>(keys: &'k Keys, keyword: &str) -> &'k [Value] {
    keys.get(keyword).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Returns the entries under a keyword that holds an object.
fn entries<'k>(keys: &'k Keys, keyword: &str) -> impl Iterator<Item = (&'k String, &'k Value)> {
    keys.get(keyword).and_then(Value::as_object).into_iter().flatten()
}

/// Returns the strings of a list.
fn strings<'k>(keys: &'k Keys, keyword: &str) -> impl Iterator<Item = &'k str> {
    list(keys, keyword).iter().filter_map(Value::as_str)
}

/// Returns a count.
fn count(keys: &Keys, keyword: &str) -> Option<u64> {
    keys.get(keyword).and_then(Value::as_u64)
}
