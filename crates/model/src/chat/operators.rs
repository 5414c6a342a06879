//! What operators, subscripts and calls mean, as Python and jinja2's sandbox define it.

use std::cmp::Ordering;

use minijinja::{
    Environment, Error, State, Value,
    value::{Rest, Tuple, ValueKind, ValueOrKwargs},
};

use super::{
    methods::{self, Arguments},
    percent,
    values::{Dict, ELEMENT, as_dict, charge, check_depth, fail, items, list, string, to_text, type_name},
};

/// Registers the functions that [`super::expression`] calls.
pub(super) fn register(env: &mut Environment<'static>) {
    env.add_function("__add", |state: &mut State, terms: Rest<Value>| {
        let (first, rest) = terms.split_first().map_or((Value::UNDEFINED, &[][..]), |(f, r)| (f.clone(), r));
        rest.iter().try_fold(first, |sum, term| add(state, &sum, term))
    });
    env.add_function("__cat", |state: &mut State, parts: Rest<Value>| {
        let mut text = String::new();
        for part in parts.iter() {
            match part.as_str() {
                Some(part) => {
                    charge(state, part.len())?;
                    text.push_str(part);
                }
                None => text.push_str(&to_text(state, part)?),
            }
        }
        Ok::<_, Error>(Value::from(text))
    });
    env.add_function("__mul", |state: &mut State, left: &Value, right: &Value| multiply(state, left, right));
    env.add_function("__mod", |state: &mut State, left: &Value, right: &Value| modulo(state, left, right));
    env.add_function("__eq", |state: &mut State, left: &Value, right: &Value| equal(state, left, right));
    env.add_function("__ne", |state: &mut State, left: &Value, right: &Value| {
        equal(state, left, right).map(|equal| !equal)
    });
    env.add_function("__lt", |state: &mut State, a: &Value, b: &Value| {
        compare(state, a, b, "<", Ordering::is_lt)
    });
    env.add_function("__le", |state: &mut State, a: &Value, b: &Value| {
        compare(state, a, b, "<=", Ordering::is_le)
    });
    env.add_function("__gt", |state: &mut State, a: &Value, b: &Value| {
        compare(state, a, b, ">", Ordering::is_gt)
    });
    env.add_function("__ge", |state: &mut State, a: &Value, b: &Value| {
        compare(state, a, b, ">=", Ordering::is_ge)
    });
    env.add_function("__in", |state: &mut State, item: &Value, container: &Value| {
        contains(state, item, container)
    });
    env.add_function("__not_in", |state: &mut State, item: &Value, container: &Value| {
        contains(state, item, container).map(|found| !found)
    });
    env.add_function("__item", |value: &Value, key: &Value| item(value, key));
    env.add_function("__attribute", |value: &Value, name: &str| methods::attribute(value, name));
    env.add_function("__slice", slice);
    env.add_function(
        "__call",
        |state: &mut State, value: &Value, name: &str, arguments: Rest<ValueOrKwargs>| {
            methods::call(state, value, name, arguments.into_values())
        },
    );
    env.add_function("__iterate", |state: &mut State, value: &Value| match value.kind() {
        ValueKind::Seq => Ok(value.clone()),
        // Loops need to know their length.
        _ => items(state, value).map(Value::from),
    });
    env.add_function("__list", |state: &mut State, items: Rest<Value>| {
        items.iter().try_for_each(|item| check_depth(state, item, 0))?;
        list(state, items.0)
    });
    env.add_function("__tuple", |state: &mut State, items: Rest<Value>| {
        items.iter().try_for_each(|item| check_depth(state, item, 0))?;
        charge(state, items.len() * ELEMENT)?;
        Ok::<_, Error>(Value::from(Tuple::from(items.0)))
    });
    env.add_function("__dict", |state: &mut State, entries: Rest<Value>| {
        let mut dict = Dict::default();
        for entry in entries.0.chunks_exact(2) {
            check_depth(state, &entry[0], 0)?;
            check_depth(state, &entry[1], 0)?;
            dict.insert(hashable(&entry[0])?, entry[1].clone());
        }
        charge(state, entries.len() * ELEMENT)?;
        Ok::<_, Error>(Value::from_object(dict))
    });
    env.add_function("__shallow", |state: &mut State, value: Value| {
        check_depth(state, &value, 0)?;
        Ok::<_, Error>(value)
    });
}

/// A key of a dictionary, if it can be one.
pub(super) fn hashable(key: &Value) -> Result<Value, Error> {
    match key.kind() {
        ValueKind::Seq if key.is_tuple() => Ok(key.clone()),
        ValueKind::Seq | ValueKind::Map => fail(format!("unhashable type: '{}'", type_name(key))),
        _ => Ok(key.clone()),
    }
}

/// A number; booleans are numbers.
#[derive(Clone, Copy)]
pub(super) enum Number {
    Integer(i128),
    Float(f64),
}

impl Number {
    pub(super) fn of(value: &Value) -> Option<Self> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Integer(i128::from(value.is_true()))),
            ValueKind::Number if value.is_integer() => {
                i128::try_from(value.clone()).ok().map(Number::Integer)
            }
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    pub(super) fn float(self) -> f64 {
        match self {
            Number::Integer(value) => value as f64,
            Number::Float(value) => value,
        }
    }
}

/// An integer as a value.
pub(super) fn integer(value: i128) -> Value {
    i64::try_from(value).map_or_else(|_| Value::from(value), Value::from)
}

fn arithmetic(
    operator: &str,
    left: &Value,
    right: &Value,
    integers: impl Fn(i128, i128) -> Option<i128>,
    floats: impl Fn(f64, f64) -> Option<f64>,
) -> Result<Value, Error> {
    let result = match (Number::of(left), Number::of(right)) {
        (Some(Number::Integer(a)), Some(Number::Integer(b))) => integers(a, b).map(integer),
        (Some(a), Some(b)) => floats(a.float(), b.float()).map(Value::from),
        _ => return unsupported(operator, left, right),
    };
    result.map_or_else(|| fail(format!("{left} {operator} {right} has no result")), Ok)
}

fn unsupported<T>(operator: &str, left: &Value, right: &Value) -> Result<T, Error> {
    let (left, right) = (type_name(left), type_name(right));
    fail(format!("unsupported operand types for {operator}: '{left}' and '{right}'"))
}

/// A string, marked as safe for HTML or not.
pub(super) fn marked(text: String, is_safe: bool) -> Value {
    if is_safe { Value::from_safe_string(text) } else { Value::from(text) }
}

/// `value|escape`: text for HTML, marked as safe.
pub(super) fn escape(state: &mut State, value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = to_text(state, value)?;
    charge(state, text.len().saturating_mul(5))?;
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    Ok(Value::from_safe_string(text.replace('\'', "&#39;").replace('"', "&#34;")))
}

pub(super) fn add(state: &mut State, left: &Value, right: &Value) -> Result<Value, Error> {
    if left.is_safe() != right.is_safe() && left.as_str().is_some() && right.as_str().is_some() {
        // Text that is marked as safe for HTML escapes what it is added to, even here.
        let (left, right) = (escape(state, left)?, escape(state, right)?);
        return add(state, &left, &right);
    }
    let is_safe = left.is_safe();
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        charge(state, left.len() + right.len())?;
        return Ok(marked([left, right].concat(), is_safe));
    }
    if left.kind() == ValueKind::Seq && right.kind() == ValueKind::Seq && left.is_tuple() == right.is_tuple()
    {
        let mut all = items(state, left)?;
        all.extend(items(state, right)?);
        return Ok(if left.is_tuple() { Value::from(Tuple::from(all)) } else { Value::from(all) });
    }
    arithmetic("+", left, right, i128::checked_add, |a, b| Some(a + b))
}

fn multiply(state: &mut State, left: &Value, right: &Value) -> Result<Value, Error> {
    let times = |value: &Value| match Number::of(value) {
        Some(Number::Integer(times)) => usize::try_from(times.max(0)).ok(),
        _ => None,
    };
    for (value, times) in [(left, times(right)), (right, times(left))] {
        let Some(times) = times else { continue };
        if let Some(text) = value.as_str() {
            charge(state, text.len().saturating_mul(times))?;
            return Ok(marked(text.repeat(times), value.is_safe()));
        }
        if value.kind() == ValueKind::Seq {
            charge(state, value.len().unwrap_or(0).saturating_mul(times).saturating_mul(ELEMENT))?;
            let all = items(state, value)?;
            let repeated: Vec<Value> = (0..times).flat_map(|_| all.iter().cloned()).collect();
            return Ok(if value.is_tuple() {
                Value::from(Tuple::from(repeated))
            } else {
                Value::from(repeated)
            });
        }
    }
    arithmetic("*", left, right, i128::checked_mul, |a, b| Some(a * b))
}

/// The remainder has the sign of the divisor. Of strings: formatting.
fn modulo(state: &mut State, left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(format) = left.as_str() {
        let arguments = if right.is_tuple() { items(state, right)? } else { vec![right.clone()] };
        return percent::format(state, format, &arguments);
    }
    let integers = |a: i128, b: i128| {
        let remainder = a.checked_rem(b)?;
        Some(if remainder != 0 && (remainder < 0) != (b < 0) { remainder + b } else { remainder })
    };
    let floats = |a: f64, b: f64| {
        let remainder = a % b;
        let other_sign = remainder != 0.0 && (remainder < 0.0) != (b < 0.0);
        (b != 0.0).then_some(if other_sign { remainder + b } else { remainder })
    };
    arithmetic("%", left, right, integers, floats)
}

/// Charges for looking at all of a value.
fn charge_look(state: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => charge(state, text.len() / 16),
        None => check_depth(state, value, 0),
    }
}

pub(super) fn equal(state: &mut State, left: &Value, right: &Value) -> Result<bool, Error> {
    if left.len() != right.len() {
        return Ok(false);
    }
    charge_look(state, left)?;
    charge_look(state, right)?;
    Ok(left == right)
}

fn compare(
    state: &mut State,
    left: &Value,
    right: &Value,
    operator: &str,
    test: impl Fn(Ordering) -> bool,
) -> Result<bool, Error> {
    match order(state, left, right) {
        Ok(ordering) => Ok(ordering.is_some_and(test)),
        Err(_) => unsupported(operator, left, right),
    }
}

/// How two values compare; `None` if one is not a number but a float, an error if their types do not compare.
pub(super) fn order(state: &mut State, left: &Value, right: &Value) -> Result<Option<Ordering>, Error> {
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        charge(state, left.len().min(right.len()) / 16)?;
        return Ok(Some(left.cmp(right)));
    }
    if left.kind() == ValueKind::Seq && right.kind() == ValueKind::Seq && left.is_tuple() == right.is_tuple()
    {
        let (left, right) = (items(state, left)?, items(state, right)?);
        for (left, right) in left.iter().zip(&right) {
            if !equal(state, left, right)? {
                return order(state, left, right);
            }
        }
        return Ok(Some(left.len().cmp(&right.len())));
    }
    match (Number::of(left), Number::of(right)) {
        (Some(Number::Integer(a)), Some(Number::Integer(b))) => Ok(Some(a.cmp(&b))),
        (Some(a), Some(b)) => Ok(a.float().partial_cmp(&b.float())),
        _ => unsupported("<", left, right),
    }
}

pub(super) fn contains(state: &mut State, item: &Value, container: &Value) -> Result<bool, Error> {
    if let Some(text) = container.as_str() {
        charge(state, text.len() / 16)?;
        return match item.as_str() {
            Some(part) => Ok(text.contains(part)),
            None => fail(format!("'in <string>' requires string as left operand, not {}", type_name(item))),
        };
    }
    if let Some(dict) = as_dict(container) {
        return Ok(dict.get(&hashable(item)?).is_some());
    }
    for other in items(state, container)? {
        if equal(state, item, &other)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// `value[key]`: undefined where there is nothing, an error only for what is undefined itself.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return fail(format!("an undefined value has no element {key}"));
    }
    let index = |length: usize| match Number::of(key) {
        Some(Number::Integer(index)) if index < 0 => {
            usize::try_from(index.unsigned_abs()).ok().and_then(|back| length.checked_sub(back))
        }
        Some(Number::Integer(index)) => usize::try_from(index).ok(),
        _ => None,
    };
    let found = if let Some(text) = value.as_str() {
        let index = index(if text.is_ascii() { text.len() } else { text.chars().count() });
        index.and_then(|index| text.chars().nth(index)).map(|c| Value::from(c.to_string()))
    } else if let Some(dict) = as_dict(value) {
        let method = || key.as_str().and_then(|name| methods::attribute(value, name).ok());
        dict.get(key).cloned().or_else(method)
    } else {
        match value.kind() {
            ValueKind::Seq => {
                index(value.len().unwrap_or(0)).and_then(|index| value.get_item_by_index(index).ok())
            }
            // Namespaces, loops.
            ValueKind::Map => value.get_item(key).ok(),
            _ => None,
        }
    };
    Ok(found.unwrap_or_default())
}

/// `value[start:stop:step]`
fn slice(
    state: &mut State,
    value: &Value,
    start: &Value,
    stop: &Value,
    step: Option<Value>,
) -> Result<Value, Error> {
    let bound = |value: &Value| match (value.is_none(), Number::of(value)) {
        (true, _) => Ok(None),
        (_, Some(Number::Integer(bound))) => Ok(Some(bound)),
        _ => fail("slice indices must be integers or None"),
    };
    let step = step.as_ref().map_or(Ok(None), bound)?.unwrap_or(1);
    if step == 0 {
        return fail("slice step cannot be zero");
    }
    let (start, stop) = (bound(start)?, bound(stop)?);
    if value.as_str().is_none() && value.kind() != ValueKind::Seq {
        return fail(format!("'{}' object is not subscriptable", type_name(value)));
    }
    // The common slices of long strings do not need their characters one by one.
    if let (Some(text), 1) = (value.as_str(), step) {
        let length = if text.is_ascii() { text.len() } else { text.chars().count() } as i128;
        let (from, to) = (clamp(start, 0, 0, length), clamp(stop, length, 0, length));
        let at = |index: i128| match text.is_ascii() {
            true => index as usize,
            false => text.char_indices().nth(index as usize).map_or(text.len(), |(at, _)| at),
        };
        return string(state, if from < to { text[at(from)..at(to)].to_owned() } else { String::new() });
    }
    let all = items(state, value)?;
    let length = all.len() as i128;
    let picked: Vec<Value> = if step > 0 {
        let (from, to) = (clamp(start, 0, 0, length), clamp(stop, length, 0, length));
        let step = usize::try_from(step).unwrap_or(usize::MAX);
        (from..to).step_by(step).map(|index| all[index as usize].clone()).collect()
    } else {
        let (from, to) = (clamp(start, length - 1, -1, length - 1), clamp(stop, -1, -1, length - 1));
        let step = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
        (to + 1..=from).rev().step_by(step).map(|index| all[index as usize].clone()).collect()
    };
    if value.as_str().is_some() {
        let text: String = picked.iter().filter_map(Value::as_str).collect();
        return string(state, text);
    }
    Ok(if value.is_tuple() { Value::from(Tuple::from(picked)) } else { Value::from(picked) })
}

/// A bound of a slice, counted from the end if it is negative, and put between `low` and `high`.
fn clamp(bound: Option<i128>, default: i128, low: i128, high: i128) -> i128 {
    // For a negative step, `high` is the last index and the length is one more.
    let length = if low < 0 { high + 1 } else { high };
    bound.map_or(default, |bound| if bound < 0 { bound + length } else { bound }).clamp(low, high.max(low))
}

/// `dict(other, key=value)`
pub(super) fn dict(state: &mut State, arguments: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::new(arguments)?;
    let mut dict = Dict::default();
    for other in &arguments.positional {
        let pairs = match as_dict(other) {
            Some(dict) => dict.entries().to_vec(),
            None => {
                let mut pairs = Vec::new();
                for pair in items(state, other)? {
                    match items(state, &pair)?.as_slice() {
                        [key, value] => pairs.push((hashable(key)?, value.clone())),
                        _ => return fail("dict takes pairs"),
                    }
                }
                pairs
            }
        };
        pairs.into_iter().for_each(|(key, value)| dict.insert(key, value));
    }
    for (name, value) in arguments.named {
        check_depth(state, &value, 0)?;
        dict.insert(Value::from(name), value);
    }
    charge(state, dict.entries().len() * ELEMENT)?;
    Ok(Value::from_object(dict))
}
