//! Methods of strings, dictionaries and lists. What would change a value is refused, as jinja2's sandbox does.

use std::sync::Arc;

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, Object, ObjectRepr, Tuple, ValueKind, from_args},
};

use super::{
    operators, percent, text,
    values::{Dict, Lazy, as_dict, charge, fail, items, list, type_name},
};

/// Arguments of a call.
pub(super) struct Arguments {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(String, Value)>,
}

impl Arguments {
    pub(super) fn new(values: &[Value]) -> Result<Self, Error> {
        let (positional, kwargs): (&[Value], Kwargs) = from_args(values)?;
        let named = kwargs
            .args()
            .map(|name| Ok((name.to_owned(), kwargs.get(name)?)))
            .collect::<Result<_, Error>>()?;
        Ok(Self { positional: positional.to_vec(), named })
    }

    /// The arguments in the order of `names`, however they were given.
    pub(super) fn bind<const N: usize>(self, names: [&str; N]) -> Result<[Option<Value>; N], Error> {
        if self.positional.len() > N {
            return fail(format!("takes at most {N} arguments, {} were given", self.positional.len()));
        }
        let mut bound = [const { None }; N];
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            let Some(slot) = names.iter().position(|own| *own == name).map(|index| &mut bound[index]) else {
                return fail(format!("unexpected keyword argument '{name}'"));
            };
            if slot.replace(value).is_some() {
                return fail(format!("argument '{name}' was given twice"));
            }
        }
        Ok(bound)
    }

    /// No arguments.
    fn none(self) -> Result<(), Error> {
        self.bind([]).map(|[]| ())
    }
}

const DICT_METHODS: &[&str] = &["get", "items", "keys", "values", "copy"];
const DICT_CHANGES: &[&str] = &["clear", "pop", "popitem", "setdefault", "update"];
const LIST_CHANGES: &[&str] = &["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];

/// Whether dictionaries have a method of this name, which hides an item of that name from `dict.name`.
pub(super) fn is_dict_method(name: &str) -> bool {
    DICT_METHODS.contains(&name) || DICT_CHANGES.contains(&name)
}

/// `value.name`, where `name` is a method of dictionaries.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    if as_dict(value).is_some() && DICT_METHODS.contains(&name) {
        return Ok(Value::from_object(Method { value: value.clone(), name: name.to_owned() }));
    }
    if as_dict(value).is_some() && DICT_CHANGES.contains(&name) {
        return Ok(Value::UNDEFINED);
    }
    if value.is_undefined() {
        return fail(format!("an undefined value has no attribute '{name}'"));
    }
    Ok(value.get_attr(name).unwrap_or_default())
}

/// `dict.items`, not called yet.
#[derive(Debug)]
struct Method {
    value: Value,
    name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        call(state, &self.value, &self.name, args.to_vec())
    }
}

/// `value.name(arguments)`
pub(super) fn call(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: Vec<Value>,
) -> Result<Value, Error> {
    let unsafe_change =
        || fail(format!("access to attribute '{name}' of '{}' object is unsafe", type_name(value)));
    if let Some(string) = value.as_str() {
        let result = str_method(state, string, name, &arguments)?;
        // Methods of text that is marked as safe for HTML keep the mark.
        return Ok(match result.as_str() {
            Some(text) if value.is_safe() => operators::marked(text.to_owned(), true),
            _ => result,
        });
    }
    if let Some(dict) = as_dict(value) {
        if DICT_CHANGES.contains(&name) {
            return unsafe_change();
        }
        if DICT_METHODS.contains(&name) {
            return dict_method(state, dict, name, Arguments::new(&arguments)?);
        }
        // A macro or another function in a dictionary.
        return match dict.get(&Value::from(name)) {
            Some(function) => function.call(state, &arguments),
            None => fail(format!("'dict object' has no attribute '{name}'")),
        };
    }
    match value.kind() {
        ValueKind::Undefined => fail(format!("an undefined value has no attribute '{name}'")),
        ValueKind::Seq if LIST_CHANGES.contains(&name) => unsafe_change(),
        ValueKind::Seq => list_method(state, value, name, Arguments::new(&arguments)?),
        // minijinja's own divides by the number of arguments.
        ValueKind::Map if name == "cycle" && arguments.is_empty() => fail("no items for cycling given"),
        ValueKind::Map | ValueKind::Plain => value.call_method(state, name, &arguments),
        _ => fail(format!("'{}' object has no attribute '{name}'", type_name(value))),
    }
}

fn dict_method(state: &mut State, dict: &Dict, name: &str, arguments: Arguments) -> Result<Value, Error> {
    let entries = dict.entries();
    if name == "get" {
        if !arguments.named.is_empty() {
            return fail("dict.get() takes no keyword arguments");
        }
        return match arguments.bind(["key", "default"])? {
            [Some(key), default] => {
                Ok(dict.get(&key).cloned().or(default).unwrap_or_else(|| Value::from(())))
            }
            _ => fail("get takes a key"),
        };
    }
    arguments.none()?;
    charge(state, entries.len() * super::values::ELEMENT)?;
    let (view, items): (_, Vec<Value>) = match name {
        "items" => {
            let pair = |(key, value): &(Value, Value)| Value::from(Tuple::from([key.clone(), value.clone()]));
            ("dict_items", entries.iter().map(pair).collect())
        }
        "keys" => ("dict_keys", entries.iter().map(|(key, _)| key.clone()).collect()),
        "values" => ("dict_values", entries.iter().map(|(_, value)| value.clone()).collect()),
        _ => {
            let mut copy = Dict::default();
            entries.iter().for_each(|(key, value)| copy.insert(key.clone(), value.clone()));
            return Ok(Value::from_object(copy));
        }
    };
    Ok(Value::from_object(Lazy { items, view: Some(view) }))
}

fn list_method(state: &mut State, value: &Value, name: &str, arguments: Arguments) -> Result<Value, Error> {
    let all = items(state, value)?;
    match (name, arguments.positional.as_slice()) {
        ("count", [item]) => Ok(Value::from(all.iter().filter(|other| *other == item).count())),
        ("index", [item]) => match all.iter().position(|other| other == item) {
            Some(index) => Ok(Value::from(index)),
            None => fail(format!("{item} is not in list")),
        },
        ("copy", []) if !value.is_tuple() => Ok(value.clone()),
        _ => fail(format!("'{}' object has no attribute '{name}'", type_name(value))),
    }
}

/// What is missing in a call.
fn needs<T>(value: Option<T>, name: &str) -> Result<T, Error> {
    value.ok_or_else(|| Error::new(ErrorKind::MissingArgument, format!("argument '{name}' is missing")))
}

fn needs_str(value: Option<Value>, name: &str) -> Result<String, Error> {
    match needs(value, name)?.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => fail(format!("argument '{name}' must be str")),
    }
}

/// An optional string; `None` counts as absent.
fn optional_str(value: Option<Value>, name: &str) -> Result<Option<String>, Error> {
    value.filter(|value| !value.is_none()).map(|value| needs_str(Some(value), name)).transpose()
}

/// An optional integer.
pub(super) fn optional_int(value: Option<Value>, name: &str) -> Result<Option<i64>, Error> {
    let int = |value: Value| match value.as_i64() {
        Some(int) => Ok(int),
        None if value.kind() == ValueKind::Bool => Ok(i64::from(value.is_true())),
        None => fail(format!("argument '{name}' must be int")),
    };
    value.filter(|value| !value.is_none()).map(int).transpose()
}

fn str_method(state: &mut State, string: &str, name: &str, values: &[Value]) -> Result<Value, Error> {
    // Everything here reads the string once, and makes at most about as much.
    charge(state, string.len())?;
    if name == "format" {
        return percent::str_format(state, string, values);
    }
    let arguments = Arguments::new(values)?;
    if let Some(result) = text::query(string, name) {
        arguments.none()?;
        return Ok(Value::from(result));
    }
    if let Some(result) = text::convert(string, name) {
        arguments.none()?;
        return super::values::string(state, result);
    }
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [characters] = arguments.bind(["chars"])?;
            let characters = optional_str(characters, "chars")?;
            let (left, right) = (name != "rstrip", name != "lstrip");
            Ok(Value::from(text::strip(string, characters.as_deref(), left, right)))
        }
        "split" | "rsplit" => {
            let [separator, limit] = arguments.bind(["sep", "maxsplit"])?;
            let separator = optional_str(separator, "sep")?;
            let limit = optional_int(limit, "maxsplit")?.and_then(|limit| usize::try_from(limit).ok());
            if separator.as_deref() == Some("") {
                return fail("empty separator");
            }
            let parts = text::split(string, separator.as_deref(), limit, name == "rsplit");
            list(state, parts.into_iter().map(Value::from).collect())
        }
        "partition" | "rpartition" => {
            let [separator] = arguments.bind(["sep"])?;
            let separator = needs_str(separator, "sep")?;
            let parts = text::partition(string, &separator, name == "rpartition");
            Ok(Value::from(Tuple::from(parts.map(Value::from))))
        }
        "splitlines" => {
            let [keep] = arguments.bind(["keepends"])?;
            let lines = text::lines(string, keep.is_some_and(|keep| keep.is_true()));
            list(state, lines.into_iter().map(Value::from).collect())
        }
        "replace" => {
            let [old, new, count] = arguments.bind(["old", "new", "count"])?;
            let (old, new) = (needs_str(old, "old")?, needs_str(new, "new")?);
            let count = optional_int(count, "count")?.and_then(|count| usize::try_from(count).ok());
            text::replace(state, string, &old, &new, count)
        }
        "startswith" | "endswith" => {
            let [affix, start, end] = arguments.bind(["prefix", "start", "end"])?;
            let string = text::between(string, optional_int(start, "start")?, optional_int(end, "end")?);
            let affix = needs(affix, "prefix")?;
            let affixes = if affix.is_tuple() { items(state, &affix)? } else { vec![affix] };
            let mut found = false;
            for affix in affixes {
                let affix = needs_str(Some(affix), "prefix")?;
                found |=
                    if name == "startswith" { string.starts_with(&affix) } else { string.ends_with(&affix) };
            }
            Ok(Value::from(found))
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = arguments.bind(["prefix"])?;
            let affix = needs_str(affix, "prefix")?;
            let rest = if name == "removeprefix" {
                string.strip_prefix(&affix)
            } else {
                string.strip_suffix(&affix)
            };
            Ok(Value::from(rest.unwrap_or(string)))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let [part, start, end] = arguments.bind(["sub", "start", "end"])?;
            let part = needs_str(part, "sub")?;
            let (start, end) = (optional_int(start, "start")?, optional_int(end, "end")?);
            let (before, within) = text::offset_and_between(string, start, end);
            let at = if name.starts_with('r') { within.rfind(&part) } else { within.find(&part) };
            match at.map(|at| before + within[..at].chars().count()) {
                Some(index) => Ok(Value::from(index)),
                None if name.ends_with("find") => Ok(Value::from(-1)),
                None => fail("substring not found"),
            }
        }
        "count" => {
            let [part, start, end] = arguments.bind(["sub", "start", "end"])?;
            let part = needs_str(part, "sub")?;
            let within = text::between(string, optional_int(start, "start")?, optional_int(end, "end")?);
            Ok(Value::from(within.matches(&part).count()))
        }
        "join" => {
            let [parts] = arguments.bind(["iterable"])?;
            let mut joined = String::new();
            for (index, part) in items(state, &needs(parts, "iterable")?)?.iter().enumerate() {
                let Some(part) = part.as_str() else {
                    return fail(format!(
                        "sequence item {index}: expected str instance, {} found",
                        type_name(part)
                    ));
                };
                charge(state, part.len() + string.len())?;
                joined.push_str(if index == 0 { "" } else { string });
                joined.push_str(part);
            }
            Ok(Value::from(joined))
        }
        "center" | "ljust" | "rjust" => {
            let [width, fill] = arguments.bind(["width", "fillchar"])?;
            let width = needs(optional_int(width, "width")?, "width")?;
            let fill = optional_str(fill, "fillchar")?.unwrap_or_else(|| " ".to_owned());
            let mut characters = fill.chars();
            let (Some(fill), None) = (characters.next(), characters.next()) else {
                return fail("the fill character must be exactly one character long");
            };
            text::pad(state, string, width, fill, name)
        }
        "zfill" => {
            let [width] = arguments.bind(["width"])?;
            let width = needs(optional_int(width, "width")?, "width")?;
            let digits = string.strip_prefix(['+', '-']).unwrap_or(string);
            let sign = &string[..string.len() - digits.len()];
            let padded = text::pad(state, digits, width - sign.len() as i64, '0', "rjust")?;
            Ok(Value::from([sign, padded.as_str().unwrap_or_default()].concat()))
        }
        _ => fail(format!("'str object' has no attribute '{name}'")),
    }
}
