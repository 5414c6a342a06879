//! jinja2's filters on sequences.

use std::{cmp::Ordering, collections::HashSet};

use minijinja::{
    Error, State, Value,
    value::{Tuple, ValueKind},
};

use super::{
    filters::{Filter, is_mapping},
    methods::{Arguments, optional_int},
    operators,
    values::{ELEMENT, Lazy, as_dict, charge, fail, items, list as new_list, to_text, type_name},
};

/// Sequences longer than this are not made out of a single number.
const MAX_MADE: i64 = 100_000;

pub(super) const FILTERS: &[(&str, Filter)] = &[
    ("batch", batch),
    ("dictsort", dictsort),
    ("first", first),
    ("groupby", groupby),
    ("items", entries),
    ("join", join),
    ("last", last),
    ("list", |state, value, _| items(state, value).map(Value::from)),
    ("map", map),
    ("max", |state, value, arguments| extreme(state, value, arguments, Ordering::is_gt)),
    ("min", |state, value, arguments| extreme(state, value, arguments, Ordering::is_lt)),
    ("reject", |state, value, arguments| select(state, value, arguments, false, false)),
    ("rejectattr", |state, value, arguments| select(state, value, arguments, true, false)),
    ("reverse", reverse),
    ("select", |state, value, arguments| select(state, value, arguments, false, true)),
    ("selectattr", |state, value, arguments| select(state, value, arguments, true, true)),
    ("slice", slice),
    ("sort", sort),
    ("sum", sum),
    ("unique", unique),
];

/// `value.a.0.b`, by a path as filters take it.
fn by_path(value: &Value, path: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return or_default(operators::item(value, path)?, default) };
    let mut value = value.clone();
    for part in path.split('.') {
        let is_index = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let key =
            part.parse::<u64>().ok().filter(|_| is_index).map_or_else(|| Value::from(part), Value::from);
        value = or_default(operators::item(&value, &key)?, default)?;
    }
    Ok(value)
}

fn or_default(value: Value, default: Option<&Value>) -> Result<Value, Error> {
    match default {
        Some(default) if value.is_undefined() && !default.is_none() => Ok(default.clone()),
        _ => Ok(value),
    }
}

/// What sorting and comparing ignores, unless asked not to.
fn ignore_case(value: Value, case_sensitive: bool) -> Value {
    match value.as_str() {
        Some(text) if !case_sensitive => Value::from(text.to_lowercase()),
        _ => value,
    }
}

fn is_truthy(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

fn some(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_none())
}

fn join(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [separator, attribute] = arguments.bind(["d", "attribute"])?;
    let separator = separator.map_or_else(|| Ok(String::new()), |separator| to_text(state, &separator))?;
    let attribute = some(attribute);
    let mut out = String::new();
    for (index, item) in items(state, value)?.iter().enumerate() {
        if index > 0 {
            charge(state, separator.len())?;
            out.push_str(&separator);
        }
        let item = match &attribute {
            Some(path) => by_path(item, path, None)?,
            None => item.clone(),
        };
        out.push_str(&to_text(state, &item)?);
    }
    Ok(Value::from(out))
}

fn first(state: &mut State, value: &Value, _: Arguments) -> Result<Value, Error> {
    Ok(items(state, value)?.into_iter().next().unwrap_or_default())
}

fn last(state: &mut State, value: &Value, _: Arguments) -> Result<Value, Error> {
    if value.kind() == ValueKind::Iterable && value.len().is_none() {
        return fail("'generator' object is not reversible");
    }
    Ok(items(state, value)?.pop().unwrap_or_default())
}

fn reverse(state: &mut State, value: &Value, _: Arguments) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        charge(state, text.len())?;
        return Ok(Value::from(text.chars().rev().collect::<String>()));
    }
    let mut all = items(state, value)?;
    all.reverse();
    match value.kind() == ValueKind::Iterable && value.len().is_none() {
        true => Ok(Value::from(all)),
        false => Lazy::generator(state, all),
    }
}

fn entries(state: &mut State, value: &Value, _: Arguments) -> Result<Value, Error> {
    let pairs = match as_dict(value) {
        Some(dict) => dict.entries(),
        None if value.is_undefined() => &[],
        None => return fail("Can only get item pairs from a mapping."),
    };
    let pairs =
        pairs.iter().map(|(key, value)| Value::from(Tuple::from([key.clone(), value.clone()]))).collect();
    Lazy::generator(state, pairs)
}

fn map(state: &mut State, value: &Value, mut arguments: Arguments) -> Result<Value, Error> {
    // jinja2 asks whether there is anything first, so nothing of any type is nothing.
    if !value.is_true() {
        return Lazy::generator(state, Vec::new());
    }
    let all = items(state, value)?;
    let mut out = Vec::with_capacity(all.len());
    if arguments.positional.is_empty() {
        let [attribute, default] = arguments.bind(["attribute", "default"])?;
        let Some(attribute) = attribute else { return fail("map requires a filter argument") };
        for item in &all {
            out.push(by_path(item, &attribute, default.as_ref())?);
        }
    } else {
        let filter = arguments.positional.remove(0);
        let Some(filter) = filter.as_str() else { return fail("map requires the name of a filter") };
        for item in all {
            let arguments = with_item(item, &arguments);
            out.push(state.apply_filter(filter, &arguments)?);
        }
    }
    Lazy::generator(state, out)
}

/// The arguments of a filter or test, with the value before them.
fn with_item(item: Value, arguments: &Arguments) -> Vec<Value> {
    let mut all = vec![item];
    all.extend(arguments.positional.iter().cloned());
    if !arguments.named.is_empty() {
        all.push(
            arguments
                .named
                .iter()
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect::<minijinja::value::Kwargs>()
                .into(),
        );
    }
    all
}

fn select(
    state: &mut State,
    value: &Value,
    mut arguments: Arguments,
    by_attribute: bool,
    keep: bool,
) -> Result<Value, Error> {
    if !value.is_true() {
        return Lazy::generator(state, Vec::new());
    }
    if by_attribute && arguments.positional.is_empty() {
        return fail("Missing parameter for attribute name");
    }
    let attribute = by_attribute.then(|| arguments.positional.remove(0));
    let test = (!arguments.positional.is_empty()).then(|| arguments.positional.remove(0));
    let mut out = Vec::new();
    for item in items(state, value)? {
        let tested = match &attribute {
            Some(path) => by_path(&item, path, None)?,
            None => item.clone(),
        };
        let passed = match &test {
            None => tested.is_true(),
            Some(test) => match test.as_str() {
                Some(test) => state.perform_test(test, &with_item(tested, &arguments))?,
                None => return fail("the name of a test must be a string"),
            },
        };
        if passed == keep {
            out.push(item);
        }
    }
    Lazy::generator(state, out)
}

/// Sorts by a key, keeping the order of equal ones; fails if two keys do not compare.
fn sorted(
    state: &mut State,
    mut keyed: Vec<(Vec<Value>, Value)>,
    reverse: bool,
) -> Result<Vec<Value>, Error> {
    let mut failure = None;
    keyed.sort_by(|(left, _), (right, _)| {
        if failure.is_some() {
            return Ordering::Equal;
        }
        for (left, right) in left.iter().zip(right) {
            match operators::order(state, left, right) {
                Ok(Some(Ordering::Equal)) | Ok(None) => {}
                Ok(Some(ordering)) => return if reverse { ordering.reverse() } else { ordering },
                Err(error) => failure = Some(error),
            }
        }
        Ordering::Equal
    });
    match failure {
        None => Ok(keyed.into_iter().map(|(_, value)| value).collect()),
        Some(error) => Err(error),
    }
}

fn sort(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [reverse, case_sensitive, attribute] = arguments.bind(["reverse", "case_sensitive", "attribute"])?;
    let case_sensitive = is_truthy(case_sensitive);
    let paths: Vec<Value> = match some(attribute) {
        None => Vec::new(),
        Some(paths) => match paths.as_str() {
            Some(paths) => paths.split(',').map(Value::from).collect(),
            None => vec![paths],
        },
    };
    let mut keyed = Vec::new();
    for item in items(state, value)? {
        let keys = match paths.is_empty() {
            true => vec![ignore_case(item.clone(), case_sensitive)],
            false => {
                let key = |path| by_path(&item, path, None).map(|key| ignore_case(key, case_sensitive));
                paths.iter().map(key).collect::<Result<_, _>>()?
            }
        };
        keyed.push((keys, item));
    }
    let sorted = sorted(state, keyed, is_truthy(reverse))?;
    new_list(state, sorted)
}

fn dictsort(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [case_sensitive, by, reverse] = arguments.bind(["case_sensitive", "by", "reverse"])?;
    let case_sensitive = is_truthy(case_sensitive);
    let by_value = match by.as_ref().map(|by| by.as_str()) {
        None | Some(Some("key")) => false,
        Some(Some("value")) => true,
        _ => return fail("You can only sort by either \"key\" or \"value\""),
    };
    let Some(dict) = as_dict(value).filter(|_| is_mapping(value)) else {
        return fail(format!("'{}' object has no attribute 'items'", type_name(value)));
    };
    charge(state, dict.entries().len() * ELEMENT)?;
    let keyed = dict.entries().iter().map(|(key, value)| {
        let sorted_by = if by_value { value } else { key };
        let pair = Value::from(Tuple::from([key.clone(), value.clone()]));
        (vec![ignore_case(sorted_by.clone(), case_sensitive)], pair)
    });
    let keyed = keyed.collect();
    sorted(state, keyed, is_truthy(reverse)).map(Value::from)
}

fn groupby(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [attribute, default, case_sensitive] = arguments.bind(["attribute", "default", "case_sensitive"])?;
    let Some(attribute) = attribute else { return fail("groupby requires an attribute") };
    let case_sensitive = is_truthy(case_sensitive);
    let mut keyed = Vec::new();
    for item in items(state, value)? {
        let key = by_path(&item, &attribute, default.as_ref())?;
        keyed.push((vec![ignore_case(key, case_sensitive)], item));
    }
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for item in sorted(state, keyed, false)? {
        let name = by_path(&item, &attribute, default.as_ref())?;
        let key = ignore_case(name.clone(), case_sensitive);
        match groups.last_mut() {
            Some((last, _, group)) if *last == key => group.push(item),
            _ => groups.push((key, name, vec![item])),
        }
    }
    let groups =
        groups.into_iter().map(|(_, name, group)| Value::from(Tuple::from([name, Value::from(group)])));
    let groups = groups.collect();
    new_list(state, groups)
}

fn unique(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [case_sensitive, attribute] = arguments.bind(["case_sensitive", "attribute"])?;
    let (case_sensitive, attribute) = (is_truthy(case_sensitive), some(attribute));
    let mut seen = HashSet::new();
    let mut out = Vec::new();
    for item in items(state, value)? {
        let key = match &attribute {
            Some(path) => by_path(&item, path, None)?,
            None => item.clone(),
        };
        if seen.insert(ignore_case(operators::hashable(&key)?, case_sensitive)) {
            out.push(item);
        }
    }
    Lazy::generator(state, out)
}

fn extreme(
    state: &mut State,
    value: &Value,
    arguments: Arguments,
    better: fn(Ordering) -> bool,
) -> Result<Value, Error> {
    let [case_sensitive, attribute] = arguments.bind(["case_sensitive", "attribute"])?;
    let (case_sensitive, attribute) = (is_truthy(case_sensitive), some(attribute));
    let mut best: Option<(Value, Value)> = None;
    for item in items(state, value)? {
        let key = match &attribute {
            Some(path) => by_path(&item, path, None)?,
            None => item.clone(),
        };
        let key = ignore_case(key, case_sensitive);
        let wins = match &best {
            None => true,
            Some((other, _)) => operators::order(state, &key, other)?.is_some_and(better),
        };
        if wins {
            best = Some((key, item));
        }
    }
    Ok(best.map(|(_, item)| item).unwrap_or_default())
}

fn sum(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [attribute, start] = arguments.bind(["attribute", "start"])?;
    let attribute = some(attribute);
    let mut sum = start.unwrap_or_else(|| Value::from(0));
    for item in items(state, value)? {
        let item = match &attribute {
            Some(path) => by_path(&item, path, None)?,
            None => item,
        };
        sum = operators::add(state, &sum, &item)?;
    }
    Ok(sum)
}

fn batch(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [size, fill] = arguments.bind(["linecount", "fill_with"])?;
    let size = optional_int(size, "linecount")?.filter(|size| (1..=MAX_MADE).contains(size));
    let Some(size) = size else { return fail("batch takes a number of items") };
    let fill = some(fill);
    let mut batches = Vec::new();
    for chunk in items(state, value)?.chunks(size as usize) {
        let mut batch = chunk.to_vec();
        if let Some(fill) = &fill {
            charge(state, (size as usize - batch.len()) * ELEMENT)?;
            batch.resize(size as usize, fill.clone());
        }
        batches.push(Value::from(batch));
    }
    Lazy::generator(state, batches)
}

fn slice(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [count, fill] = arguments.bind(["slices", "fill_with"])?;
    let count = optional_int(count, "slices")?.filter(|count| (1..=MAX_MADE).contains(count));
    let Some(count) = count.map(|count| count as usize) else {
        return fail("slice takes a number of slices");
    };
    let fill = some(fill);
    let all = items(state, value)?;
    let (each, with_extra) = (all.len() / count, all.len() % count);
    let mut rest = all.as_slice();
    let mut slices = Vec::with_capacity(count);
    for index in 0..count {
        let (slice, after) = rest.split_at(each + usize::from(index < with_extra));
        rest = after;
        let mut slice = slice.to_vec();
        if let Some(fill) = fill.as_ref().filter(|_| index >= with_extra) {
            slice.push(fill.clone());
        }
        slices.push(Value::from(slice));
    }
    Lazy::generator(state, slices)
}

/// `range(...)`, as a list.
pub(super) fn range(state: &mut State, arguments: &[Value]) -> Result<Value, Error> {
    let integer = |value: &Value| match optional_int(Some(value.clone()), "range")? {
        Some(integer) => Ok(integer),
        None => fail("range takes integers"),
    };
    let (start, stop, step) = match arguments {
        [stop] => (0, integer(stop)?, 1),
        [start, stop] => (integer(start)?, integer(stop)?, 1),
        [start, stop, step] => (integer(start)?, integer(stop)?, integer(step)?),
        _ => return fail("range takes one to three integers"),
    };
    if step == 0 {
        return fail("range() arg 3 must not be zero");
    }
    let (start, stop, step) = (i128::from(start), i128::from(stop), i128::from(step));
    let distance = if step > 0 { stop - start } else { start - stop };
    let length = (distance.max(0) + step.abs() - 1) / step.abs();
    if length > i128::from(MAX_MADE) {
        return fail(format!("Range too big. The sandbox blocks ranges larger than {MAX_MADE}."));
    }
    let all = (0..length).map(|index| operators::integer(start + index * step)).collect();
    new_list(state, all)
}
