//! jinja2's tests, `value is name`.

use std::cmp::Ordering;

use minijinja::{
    Environment, Error, State, Value,
    value::{Rest, ValueKind},
};

use super::{
    filters,
    operators::{self, Number},
    text,
    values::{fail, type_name, with_text},
};

type Test = fn(&mut State, &Value, &[Value]) -> Result<bool, Error>;

const TESTS: &[(&str, Test)] = &[
    ("boolean", |_, value, _| Ok(value.kind() == ValueKind::Bool)),
    ("callable", |_, value, _| Ok(value.kind() == ValueKind::Plain)),
    ("defined", |_, value, _| Ok(!value.is_undefined())),
    ("divisibleby", |_, value, other| Ok(remainder(value, argument(other)?)? == 0)),
    ("escaped", |_, _, _| Ok(false)),
    ("even", |_, value, _| Ok(remainder(value, &Value::from(2))? == 0)),
    ("false", |_, value, _| Ok(value.kind() == ValueKind::Bool && !value.is_true())),
    ("filter", |_, value, _| Ok(value.as_str().is_some_and(filters::exists))),
    ("float", |_, value, _| Ok(value.kind() == ValueKind::Number && !value.is_integer())),
    ("in", |state, value, other| operators::contains(state, value, argument(other)?)),
    ("integer", |_, value, _| Ok(value.kind() == ValueKind::Number && value.is_integer())),
    ("iterable", |_, value, _| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        Ok(matches!(value.kind(), Undefined | String | Seq | Map | Iterable))
    }),
    ("lower", |state, value, _| {
        with_text(state, value, |_, value| Ok(text::query(value, "islower") == Some(true)))
    }),
    ("mapping", |_, value, _| Ok(filters::is_mapping(value))),
    ("none", |_, value, _| Ok(value.is_none())),
    ("number", |_, value, _| Ok(Number::of(value).is_some())),
    ("odd", |_, value, _| Ok(remainder(value, &Value::from(2))? == 1)),
    ("sameas", |state, value, other| {
        let other = argument(other)?;
        Ok(value.kind() == other.kind() && operators::equal(state, value, other)?)
    }),
    ("sequence", |_, value, _| {
        use ValueKind::{Seq, String, Undefined};
        Ok(matches!(value.kind(), Undefined | String | Seq) || filters::is_mapping(value))
    }),
    ("string", |_, value, _| Ok(value.kind() == ValueKind::String)),
    ("test", |_, value, _| Ok(value.as_str().is_some_and(|name| TESTS.iter().any(|(own, _)| *own == name)))),
    ("true", |_, value, _| Ok(value.kind() == ValueKind::Bool && value.is_true())),
    ("undefined", |_, value, _| Ok(value.is_undefined())),
    ("upper", |state, value, _| {
        with_text(state, value, |_, value| Ok(text::query(value, "isupper") == Some(true)))
    }),
    ("==", equal),
    ("eq", equal),
    ("equalto", equal),
    ("!=", not_equal),
    ("ne", not_equal),
    (">", |state, value, other| compare(state, value, other, Ordering::is_gt)),
    ("gt", |state, value, other| compare(state, value, other, Ordering::is_gt)),
    ("greaterthan", |state, value, other| compare(state, value, other, Ordering::is_gt)),
    (">=", |state, value, other| compare(state, value, other, Ordering::is_ge)),
    ("ge", |state, value, other| compare(state, value, other, Ordering::is_ge)),
    ("<", |state, value, other| compare(state, value, other, Ordering::is_lt)),
    ("lt", |state, value, other| compare(state, value, other, Ordering::is_lt)),
    ("lessthan", |state, value, other| compare(state, value, other, Ordering::is_lt)),
    ("<=", |state, value, other| compare(state, value, other, Ordering::is_le)),
    ("le", |state, value, other| compare(state, value, other, Ordering::is_le)),
];

/// Replaces minijinja's tests by Python's.
pub(super) fn register(env: &mut Environment<'static>) {
    for &(name, test) in TESTS {
        env.add_test(name, move |state: &mut State, value: &Value, arguments: Rest<Value>| {
            test(state, value, &arguments)
        });
    }
}

fn argument(arguments: &[Value]) -> Result<&Value, Error> {
    match arguments {
        [argument] => Ok(argument),
        _ => fail("this test takes one argument"),
    }
}

fn equal(state: &mut State, value: &Value, other: &[Value]) -> Result<bool, Error> {
    operators::equal(state, value, argument(other)?)
}

fn not_equal(state: &mut State, value: &Value, other: &[Value]) -> Result<bool, Error> {
    equal(state, value, other).map(|equal| !equal)
}

fn compare(
    state: &mut State,
    value: &Value,
    other: &[Value],
    test: fn(Ordering) -> bool,
) -> Result<bool, Error> {
    Ok(operators::order(state, value, argument(other)?)?.is_some_and(test))
}

fn remainder(value: &Value, divisor: &Value) -> Result<i128, Error> {
    match (Number::of(value), Number::of(divisor)) {
        (Some(Number::Integer(value)), Some(Number::Integer(divisor))) if divisor != 0 => {
            Ok(value.rem_euclid(divisor))
        }
        (Some(value), Some(divisor)) if divisor.float() != 0.0 => {
            let remainder = value.float().rem_euclid(divisor.float());
            // A fraction is neither odd nor even.
            Ok(if remainder.fract() == 0.0 { remainder as i128 } else { -1 })
        }
        _ => fail(format!(
            "unsupported operand types for %: '{}' and '{}'",
            type_name(value),
            type_name(divisor)
        )),
    }
}
