//! Functions of Python's jinja2 that minijinja lacks or defines differently, as far as chat templates use them.
//!
//! minijinja charges fuel for every value that a function, filter or method returns. Here only larger intermediate
//! values are charged.

use minijinja::{
    Environment, Error, ErrorKind, State, Value,
    value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs, from_args},
};
use minijinja_contrib::pycompat;

use super::json;

/// Maximum nesting of values in a namespace. Printing, comparing and dropping values recurse.
const MAX_DEPTH: usize = 100;

/// Fuel for each value that is looked at on its way into a namespace.
const VISIT: u64 = 4;

/// Adds methods, filters, tests and functions.
pub(super) fn register(env: &mut Environment<'static>) {
    env.set_unknown_method_callback(method);
    env.add_filter("tojson", json::tojson);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_test("sequence", |value: &Value| value.is_undefined() || is_iterable(value));
    env.add_test("iterable", |value: &Value| value.is_undefined() || is_iterable(value));
    env.add_function("__plain", |state: &mut State, value: Value| plain(state, value));
    env.add_function("raise_exception", |message: &Value| {
        let raised = Raised(message.to_string());
        Err::<Value, Error>(Error::new(ErrorKind::InvalidOperation, "raised").with_source(raised))
    });
}

/// The error of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

fn fail<T>(message: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.into()))
}

fn is_iterable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
}

/// Methods of strings and lists that pycompat lacks.
fn method(state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        if name == "index" && matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            let (item,): (&Value,) = from_args(arguments)?;
            let position = value.try_iter()?.position(|other| other == *item);
            return position.map_or_else(|| fail("the value is not in the list"), |at| Ok(Value::from(at)));
        }
        return pycompat::unknown_method_callback(state, value, name, arguments);
    };
    let list = |parts: Vec<&str>| Ok(parts.into_iter().map(Value::from).collect::<Value>());
    let triple = |parts: [&str; 3]| Ok(Value::from(Tuple::from(parts.map(Value::from))));
    match name {
        "split" => {
            let (separator, most) = split_arguments(arguments)?;
            let separator = separator.map_or(Value::from(()), Value::from);
            let arguments = [separator, most.map_or(Value::from(()), Value::from)];
            pycompat::unknown_method_callback(state, value, name, &arguments)
        }
        "rsplit" => {
            let (separator, most) = split_arguments(arguments)?;
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX - 1);
            let mut parts = Vec::new();
            let mut rest = text;
            match separator.as_deref() {
                Some("") => return fail("empty separator"),
                Some(separator) => {
                    while let Some((before, after)) =
                        rest.rsplit_once(separator).filter(|_| parts.len() < most)
                    {
                        parts.push(after);
                        rest = before;
                    }
                    parts.push(rest);
                }
                None => {
                    rest = rest.trim_end();
                    while let Some(at) = rest.rfind(char::is_whitespace).filter(|_| parts.len() < most) {
                        parts.push(rest[at..].trim_start());
                        rest = rest[..at].trim_end();
                    }
                    parts.extend((!rest.is_empty()).then_some(rest));
                }
            }
            parts.reverse();
            list(parts)
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            if separator.is_empty() {
                return fail("empty separator");
            }
            let is_first = name == "partition";
            let cut = if is_first { text.split_once(separator) } else { text.rsplit_once(separator) };
            triple(match cut {
                Some((before, after)) => [before, separator, after],
                None if is_first => [text, "", ""],
                None => ["", "", text],
            })
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        // The filter of this name charges for the width; the method does not.
        "format" if has_large_width(text) => fail("a width in the format is too large or computed"),
        "index" => {
            let (part,): (&str,) = from_args(arguments)?;
            let position = text.find(part).map(|at| text[..at].chars().count());
            position.map_or_else(|| fail("substring not found"), |at| Ok(Value::from(at)))
        }
        _ => pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

/// Returns true if a format may produce much more text than its arguments: `{:99999}`, `{:{}}`.
fn has_large_width(format: &str) -> bool {
    let large = format.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > 4);
    // A field that contains another one has two opening braces before the first closing one.
    let computed = format.split('}').any(|field| field.replace("{{", "").matches('{').count() > 1);
    large || computed
}

/// `split(sep=None, maxsplit=-1)`
fn split_arguments(arguments: &[Value]) -> Result<(Option<String>, Option<i64>), Error> {
    let (separator, most, named): (Option<String>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = named.get::<Option<String>>("sep")?.or(separator);
    let most = named.get::<Option<i64>>("maxsplit")?.or(most);
    named.assert_all_used()?;
    Ok((separator, most))
}

/// `value|int(default, base)`: the default replaces a value that is not a number.
fn int(value: &Value, default: Option<i64>, base: Option<u32>, named: Kwargs) -> Result<Value, Error> {
    let default = named.get::<Option<i64>>("default")?.or(default).unwrap_or(0);
    let base = named.get::<Option<u32>>("base")?.or(base).unwrap_or(10);
    named.assert_all_used()?;
    if !(2..=36).contains(&base) {
        return fail(format!("base {base} is not between 2 and 36"));
    }
    if value.is_undefined() {
        return fail("an undefined value is no number");
    }
    let truncated = |float: f64| float.is_finite().then(|| Value::from(float.trunc() as i128));
    let parsed = match value.as_str() {
        Some(text) => {
            let text = text.trim();
            let parsed = i64::from_str_radix(text, base).ok().map(Value::from);
            parsed.or_else(|| text.parse().ok().and_then(truncated))
        }
        None if value.is_integer() => Some(value.clone()),
        None if value.kind() == ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok().and_then(truncated),
    };
    Ok(parsed.unwrap_or_else(|| Value::from(default)))
}

/// `value|float(default)`
fn float(value: &Value, default: Option<f64>, named: Kwargs) -> Result<f64, Error> {
    let default = named.get::<Option<f64>>("default")?.or(default).unwrap_or(0.0);
    named.assert_all_used()?;
    if value.is_undefined() {
        return fail("an undefined value is no number");
    }
    let parsed = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    Ok(parsed.unwrap_or(default))
}

/// `value|default(other, boolean)`
fn default(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let arguments = arguments.into_values();
    let (other, boolean, named): (Option<Value>, Option<bool>, Kwargs) = from_args(&arguments)?;
    let other = named.get::<Option<Value>>("default_value")?.or(other);
    let boolean = named.get::<Option<bool>>("boolean")?.or(boolean).unwrap_or(false);
    named.assert_all_used()?;
    let is_replaced = value.is_undefined() || (boolean && !value.is_true());
    Ok(if is_replaced { other.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

/// Converts a value for a namespace: plain data of bounded depth.
///
/// Only values in a namespace survive the iterations of a loop, so only these could become as deep as the loop is long
/// (`ns.x = [ns.x]`), chain lazy sequences, or contain the namespace. Lazy sequences are converted to lists.
pub(super) fn plain(state: &mut State, value: Value) -> Result<Value, Error> {
    let mut is_lazy = false;
    check(state, &value, 0, &mut is_lazy)?;
    if is_lazy { eager(state, &value) } else { Ok(value) }
}

fn check(state: &mut State, value: &Value, depth: usize, is_lazy: &mut bool) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return fail("a namespace holds values that are nested too deeply");
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let is_list = value.downcast_object_ref::<Vec<Value>>().is_some() || value.is_tuple();
            *is_lazy |= !is_list;
            for item in value.try_iter()?.checked() {
                state.consume_fuel(VISIT)?;
                check(state, &item?, depth + 1, is_lazy)?;
            }
        }
        ValueKind::Map => {
            let object = value.as_object();
            if object.is_none_or(|object| object.type_name().contains("Namespace")) {
                return fail("a namespace cannot hold a namespace");
            }
            // Macros and other objects with attributes are stored as copies of these.
            *is_lazy |= object.is_none_or(|object| !object.type_name().contains("IndexMap"));
            for (key, value) in object.and_then(|object| object.try_iter_pairs()).into_iter().flatten() {
                state.consume_fuel(VISIT)?;
                check(state, &key, depth + 1, is_lazy)?;
                check(state, &value, depth + 1, is_lazy)?;
            }
        }
        ValueKind::Plain | ValueKind::Invalid => return fail("a namespace holds only data"),
        _ => {}
    }
    Ok(())
}

fn eager(state: &mut State, value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let mut items = Vec::new();
            for item in value.try_iter()?.checked() {
                state.consume_fuel(VISIT)?;
                items.push(eager(state, &item?)?);
            }
            Ok(if value.is_tuple() { Value::from(Tuple::new(items)) } else { Value::from(items) })
        }
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
            let mut entries = Vec::new();
            for (key, value) in pairs.into_iter().flatten() {
                state.consume_fuel(VISIT)?;
                entries.push((key, eager(state, &value)?));
            }
            Ok(Value::from_pairs(entries))
        }
        _ => Ok(value.clone()),
    }
}
