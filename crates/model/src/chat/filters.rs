//! jinja2's filters on single values; those on sequences are in [`super::sequences`].

use minijinja::{
    Environment, Error, State, Value,
    value::{Rest, ValueKind, ValueOrKwargs},
};

use super::{
    json,
    methods::{Arguments, optional_int},
    operators::{self, Number},
    percent, sequences, text,
    values::{as_dict, charge, fail, items, string, to_text, type_name, with_text},
};

/// A filter: the value before `|`, and the arguments in parentheses.
pub(super) type Filter = fn(&mut State, &Value, Arguments) -> Result<Value, Error>;

const FILTERS: &[(&str, Filter)] = &[
    ("abs", abs),
    ("capitalize", |state, value, _| converted(state, value, text::capitalize)),
    ("center", center),
    ("count", length),
    ("d", default),
    ("default", default),
    ("e", |state, value, _| operators::escape(state, value)),
    ("escape", |state, value, _| operators::escape(state, value)),
    ("float", float),
    ("forceescape", |state, value, _| {
        let text = to_text(state, value)?;
        operators::escape(state, &Value::from(text))
    }),
    ("format", format),
    ("indent", indent),
    ("int", int),
    ("length", length),
    ("lower", |state, value, _| converted(state, value, str::to_lowercase)),
    ("replace", replace),
    ("round", round),
    ("safe", |state, value, _| to_text(state, value).map(Value::from_safe_string)),
    ("string", |state, value, _| match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => to_text(state, value).map(Value::from),
    }),
    ("title", |state, value, _| with_text(state, value, |state, text| string(state, title(text)))),
    ("tojson", tojson),
    ("trim", trim),
    ("truncate", truncate),
    ("upper", |state, value, _| converted(state, value, str::to_uppercase)),
    ("wordcount", |state, value, _| with_text(state, value, |_, text| Ok(Value::from(words(text))))),
];

/// Replaces minijinja's filters by Python's.
pub(super) fn register(env: &mut Environment<'static>) {
    for &(name, filter) in FILTERS.iter().chain(sequences::FILTERS) {
        env.add_filter(name, move |state: &mut State, value: &Value, arguments: Rest<ValueOrKwargs>| {
            filter(state, value, Arguments::new(&arguments.into_values())?)
        });
    }
}

/// Whether there is a filter of this name.
pub(super) fn exists(name: &str) -> bool {
    FILTERS.iter().chain(sequences::FILTERS).any(|(own, _)| *own == name)
}

fn is_truthy(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

fn default(_: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [default, boolean] = arguments.bind(["default_value", "boolean"])?;
    let replaced = value.is_undefined() || (is_truthy(boolean) && !value.is_true());
    Ok(if replaced { default.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

fn length(_: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [] = arguments.bind([])?;
    let length = if value.is_undefined() { Some(0) } else { value.len() };
    match length {
        Some(length) => Ok(Value::from(length)),
        None => fail(format!("object of type '{}' has no len()", type_name(value))),
    }
}

fn tojson(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [ensure_ascii, indent, separators, sort_keys] =
        arguments.bind(["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => {
                let width = optional_int(Some(indent), "indent")?.unwrap_or(0).max(0) as usize;
                charge(state, width)?;
                Some(" ".repeat(width))
            }
        },
    };
    let separators = match separators.filter(|separators| !separators.is_none()) {
        None => None,
        Some(pair) => match items(state, &pair)?.as_slice() {
            [item, key] => Some((to_text(state, item)?, to_text(state, key)?)),
            _ => return fail("separators must be a pair"),
        },
    };
    let style = json::Style {
        ensure_ascii: is_truthy(ensure_ascii),
        indent,
        separators,
        sort_keys: is_truthy(sort_keys),
    };
    json::dumps(state, value, &style)
}

fn trim(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [characters] = arguments.bind(["chars"])?;
    let characters = characters.filter(|characters| !characters.is_none());
    let characters = characters.as_ref().and_then(Value::as_str);
    converted(state, value, |text| text::strip(text, characters, true, true).to_owned())
}

fn replace(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [Some(old), Some(new), count] = arguments.bind(["old", "new", "count"])? else {
        return fail("replace takes what to replace, and by what");
    };
    let count = optional_int(count, "count")?.and_then(|count| usize::try_from(count).ok());
    let (old, new) = (to_text(state, &old)?, to_text(state, &new)?);
    with_text(state, value, |state, text| text::replace(state, text, &old, &new, count))
}

fn indent(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [width, first, blank] = arguments.bind(["width", "first", "blank"])?;
    let Some(text) = value.as_str() else {
        return fail(format!("cannot indent '{}'", type_name(value)));
    };
    let indention = match width.as_ref().and_then(Value::as_str) {
        Some(text) => text.to_owned(),
        None => {
            let width = optional_int(width, "width")?.unwrap_or(4).max(0) as usize;
            charge(state, width)?;
            " ".repeat(width)
        }
    };
    // As in jinja2: with a line break at the end, the last line counts even if it is empty.
    let text = [text, "\n"].concat();
    let lines = text::lines(&text, false);
    charge(state, text.len().saturating_add(lines.len().saturating_mul(indention.len() + 1)))?;
    let mut out = if is_truthy(first) { indention.clone() } else { String::new() };
    let blank = is_truthy(blank);
    for (index, line) in lines.into_iter().enumerate() {
        if index > 0 {
            out.push('\n');
            if blank || !line.is_empty() {
                out.push_str(&indention);
            }
        }
        out.push_str(line);
    }
    Ok(Value::from(out))
}

/// Each word with a large first letter; words begin after spaces, hyphens and opening brackets.
fn title(text: &str) -> String {
    let mut at_start = true;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let separates = matches!(c, '-' | '(' | '{' | '[' | '<') || super::values::is_space(c);
        if at_start && !separates {
            out.extend(c.to_uppercase())
        } else {
            out.extend(c.to_lowercase())
        }
        at_start = separates;
    }
    out
}

/// Runs of letters, digits and underscores.
fn words(text: &str) -> usize {
    text.split(|c: char| c != '_' && !c.is_alphanumeric()).filter(|word| !word.is_empty()).count()
}

fn center(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [width] = arguments.bind(["width"])?;
    let width = optional_int(width, "width")?.unwrap_or(80);
    with_text(state, value, |state, text| text::pad(state, text, width, ' ', "center"))
}

fn truncate(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [length, kill_words, end, leeway] = arguments.bind(["length", "killwords", "end", "leeway"])?;
    let length = optional_int(length, "length")?.unwrap_or(255);
    let leeway = optional_int(leeway, "leeway")?.unwrap_or(5);
    let end = end.map_or_else(|| Ok("...".to_owned()), |end| to_text(state, &end))?;
    let end_length = end.chars().count() as i64;
    if length < end_length || leeway < 0 {
        return fail("expected a length of at least the length of the end");
    }
    let Some(own_length) = value.len().or(value.is_undefined().then_some(0)) else {
        return fail(format!("object of type '{}' has no len()", type_name(value)));
    };
    if own_length as i64 <= length.saturating_add(leeway) {
        return Ok(value.clone());
    }
    let Some(text) = value.as_str() else { return fail("only strings can be truncated") };
    let cut = text::between(text, None, Some(length - end_length));
    let cut =
        if is_truthy(kill_words) { cut } else { cut.rsplit_once(' ').map_or(cut, |(before, _)| before) };
    string(state, [cut, &end].concat())
}

/// For a filter that makes text out of text and keeps what it is marked as.
fn converted(state: &mut State, value: &Value, convert: impl FnOnce(&str) -> String) -> Result<Value, Error> {
    let text = with_text(state, value, |state, text| {
        charge(state, text.len())?;
        Ok(convert(text))
    })?;
    Ok(operators::marked(text, value.is_safe()))
}

fn format(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let format = to_text(state, value)?;
    if !arguments.positional.is_empty() && !arguments.named.is_empty() {
        return fail("can't handle positional and keyword arguments at the same time");
    }
    if arguments.named.is_empty() {
        return percent::format(state, &format, &arguments.positional);
    }
    let named =
        Value::from_pairs(arguments.named.into_iter().map(|(name, value)| (Value::from(name), value)));
    percent::format(state, &format, &[named])
}

fn abs(_: &mut State, value: &Value, _: Arguments) -> Result<Value, Error> {
    match Number::of(value) {
        Some(Number::Integer(integer)) => Ok(operators::integer(integer.saturating_abs())),
        Some(Number::Float(float)) => Ok(Value::from(float.abs())),
        None => fail(format!("bad operand type for abs(): '{}'", type_name(value))),
    }
}

/// Undefined values convert to no number, and unlike others not to the default either.
fn check_defined(value: &Value) -> Result<(), Error> {
    if value.is_undefined() { fail("an undefined value is no number") } else { Ok(()) }
}

fn int(_: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    check_defined(value)?;
    let [default, base] = arguments.bind(["default", "base"])?;
    let base = optional_int(base, "base")?.and_then(|base| u32::try_from(base).ok()).unwrap_or(10);
    if !(2..=36).contains(&base) {
        return fail("base must be between 2 and 36");
    }
    let truncated = |float: f64| float.is_finite().then(|| operators::integer(float.trunc() as i128));
    let parsed = match (value.as_str(), Number::of(value)) {
        (Some(text), _) => {
            parse_int(text, base).map(operators::integer).or_else(|| parse_float(text).and_then(truncated))
        }
        (_, Some(Number::Integer(integer))) => Some(operators::integer(integer)),
        (_, Some(Number::Float(float))) => truncated(float),
        _ => None,
    };
    Ok(parsed.or(default).unwrap_or_else(|| Value::from(0)))
}

fn float(_: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    check_defined(value)?;
    let [default] = arguments.bind(["default"])?;
    let parsed = value.as_str().map_or_else(|| Number::of(value).map(Number::float), parse_float);
    Ok(parsed.map(Value::from).or(default).unwrap_or_else(|| Value::from(0.0)))
}

/// Python's `int(text, base)`: spaces around it, a sign, single underscores and a prefix are fine.
fn parse_int(text: &str, base: u32) -> Option<i128> {
    let text = text::strip(text, None, true, true);
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let prefix = match base {
        2 => ["0b", "0B"],
        8 => ["0o", "0O"],
        16 => ["0x", "0X"],
        _ => ["", ""],
    };
    let digits = digits.strip_prefix(prefix[0]).or_else(|| digits.strip_prefix(prefix[1])).unwrap_or(digits);
    let magnitude =
        without_underscores(digits).and_then(|digits| i128::from_str_radix(&digits, base).ok())?;
    Some(if text.starts_with('-') { -magnitude } else { magnitude })
}

fn parse_float(text: &str) -> Option<f64> {
    without_underscores(text::strip(text, None, true, true))?.parse().ok()
}

/// Digits with single underscores between them; a sign in front would have been taken off already.
fn without_underscores(digits: &str) -> Option<String> {
    let malformed = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    (!malformed).then(|| digits.replace('_', ""))
}

fn round(_: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let [precision, method] = arguments.bind(["precision", "method"])?;
    let precision = optional_int(precision, "precision")?.unwrap_or(0).clamp(-300, 300) as i32;
    let method = method.as_ref().and_then(Value::as_str).unwrap_or("common");
    let Some(number) = Number::of(value) else {
        return fail(format!("type {} cannot be rounded", type_name(value)));
    };
    let power = 10_f64.powi(precision);
    match (method, number) {
        ("common", Number::Integer(integer)) if precision >= 0 => Ok(operators::integer(integer)),
        ("common", Number::Integer(integer)) => {
            Ok(operators::integer(((integer as f64 * power).round_ties_even() / power) as i128))
        }
        // Formatting rounds the exact value, as Python's round does.
        ("common", Number::Float(float)) if precision >= 0 && float.is_finite() => {
            let rounded = format!("{float:.*}", precision as usize);
            Ok(Value::from(rounded.parse().unwrap_or(float)))
        }
        ("common", Number::Float(float)) => Ok(Value::from((float * power).round_ties_even() / power)),
        ("ceil", number) => Ok(Value::from((number.float() * power).ceil() / power)),
        ("floor", number) => Ok(Value::from((number.float() * power).floor() / power)),
        _ => fail("method must be common, ceil or floor"),
    }
}

/// `value is mapping`
pub(super) fn is_mapping(value: &Value) -> bool {
    value.kind() == ValueKind::Map && as_dict(value).is_some()
}
