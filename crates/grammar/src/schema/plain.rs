//! A schema with one spelling for everything: references are numbers of schemas, `items` and `prefixItems` are those of
//! 2020-12, formats are patterns, counts are integers. Keywords that bind nothing are gone. `$at` has the place of each
//! schema for errors.

use std::collections::{HashMap, VecDeque};

use serde_json::{Value, json};

use super::{
    Keys, TYPES, at, count, formats, keywords, pattern,
    references::{Located, References},
    types,
};

/// Key of a schema's place.
pub(super) const PLACE: &str = "$at";

/// Keywords of which at most one may stand alone in a schema that is not a definition of its own.
const COMBINING: [&str; 6] = ["allOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired"];

/// Returns the schemas of a document: the root, then those that references or combinations lead to.
///
/// # Errors
/// A keyword with an impossible value, and its place.
pub(super) fn plain(schema: &Value) -> Result<Vec<Value>, String> {
    let draft = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
    let mut this = Plain {
        references: References::new(schema),
        // These drafts ignore it.
        prefix_items: !["draft-04", "draft-06", "draft-07", "2019-09"].iter().any(|old| draft.contains(old)),
        schemas: vec![Value::Null],
        numbers: HashMap::from([(std::ptr::from_ref(schema), 0)]),
        queue: VecDeque::from([(0, Located { schema, resource: schema }, String::new())]),
    };
    while let Some((number, located, place)) = this.queue.pop_front() {
        this.schemas[number] = this.schema(located, &place)?;
    }
    Ok(this.schemas)
}

struct Plain<'d> {
    references: References<'d>,
    prefix_items: bool,
    schemas: Vec<Value>,
    numbers: HashMap<*const Value, usize>,
    queue: VecDeque<(usize, Located<'d>, String)>,
}

impl<'d> Plain<'d> {
    fn schema(&mut self, Located { schema, resource }: Located<'d>, place: &str) -> Result<Value, String> {
        let keys = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(keys) => keys,
            _ if place.is_empty() => return Err("a schema is an object or a boolean".into()),
            _ => return Err(format!("`{place}` is no schema; a schema is an object or a boolean")),
        };
        let resource = self.references.resource(schema, resource);
        let mut out = Keys::from_iter([(PLACE.to_owned(), Value::from(place))]);
        let mut patterns = Vec::new();
        for (key, value) in keys {
            let wrong =
                |expected: &str| format!("{} is {}; it should be {expected}", at(key, place), short(value));
            let below = if place.is_empty() { key.clone() } else { format!("{place}.{key}") };
            let here = Located { schema: value, resource };
            match key.as_str() {
                "x-guidance" => {
                    return Err(format!("the key {} is not supported; leave it out", at(key, place)));
                }
                "type" => {
                    let names: Vec<&Value> =
                        value.as_array().map_or_else(|| vec![value], |names| names.iter().collect());
                    let known = |name: &&Value| {
                        name.as_str().is_some_and(|name| name == "integer" || TYPES.contains(&name))
                    };
                    if names.is_empty() || !names.iter().all(known) {
                        return Err(wrong(
                            "one or several of null, boolean, integer, number, string, array, object",
                        ));
                    }
                    out.insert(key.clone(), value.clone());
                }
                "const" => drop(out.insert(key.clone(), value.clone())),
                "enum" => {
                    let values = value.as_array().ok_or_else(|| wrong("a list of values"))?;
                    if values.is_empty() {
                        return Err(format!("{} is empty, so nothing is valid", at(key, place)));
                    }
                    out.insert(key.clone(), value.clone());
                }
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                    let is_flag = key.starts_with("exclusive") && value.is_boolean();
                    let positive = key != "multipleOf" || value.as_f64().is_some_and(|step| step > 0.0);
                    if !(value.is_number() && positive || is_flag) {
                        return Err(wrong(if key == "multipleOf" { "a number above 0" } else { "a number" }));
                    }
                    out.insert(key.clone(), value.clone());
                }
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties"
                | "minContains" | "maxContains" => {
                    let whole = value.as_f64().filter(|count| *count >= 0.0 && count.fract() == 0.0);
                    let whole = whole.ok_or_else(|| wrong("a whole number of at least 0"))? as u64;
                    if whole > 0 || key.starts_with("max") || key == "minContains" {
                        out.insert(key.clone(), whole.into());
                    }
                }
                "pattern" => {
                    let text = value.as_str().ok_or_else(|| wrong("a regular expression"))?;
                    let format = keys.get("format").and_then(Value::as_str);
                    let rewritten = pattern::rewrite(text, format)
                        .map_err(|problem| format!("{}: {problem}", at(key, place)))?;
                    patterns.extend(rewritten.all);
                    if !rewritten.fits_format {
                        patterns.extend(format.and_then(formats::pattern));
                    }
                }
                "format" => {
                    let name = value.as_str().ok_or_else(|| wrong("the name of a format"))?;
                    if !keys.contains_key("pattern") {
                        patterns.extend(formats::pattern(name));
                    }
                }
                "properties" | "dependentSchemas" | "patternProperties" => {
                    let schemas = value.as_object().ok_or_else(|| wrong("an object of schemas"))?;
                    let mut plain = Keys::new();
                    for (name, schema) in schemas {
                        let below = format!("{below}.{name}");
                        let schema = self.child(Located { schema, resource }, &below)?;
                        let mut name = name.clone();
                        if key == "patternProperties" {
                            let mut all = pattern::rewrite(&name, None)
                                .map_err(|problem| format!("`{below}`: {problem}"))?
                                .all;
                            name = all.pop().unwrap_or_default();
                            if !all.is_empty() {
                                return Err(format!(
                                    "`{below}`: look-around is not supported in the names of properties"
                                ));
                            }
                        }
                        plain.insert(name, schema);
                    }
                    if !plain.is_empty() {
                        out.insert(key.clone(), plain.into());
                    }
                }
                "required" => {
                    let names = value.as_array().filter(|names| names.iter().all(Value::is_string));
                    if !names.ok_or_else(|| wrong("the list of the required names"))?.is_empty() {
                        out.insert(key.clone(), value.clone());
                    }
                }
                "dependentRequired" | "dependencies" => {
                    for (name, value) in value.as_object().ok_or_else(|| wrong("an object"))? {
                        let names = value.as_array().filter(|names| names.iter().all(Value::is_string));
                        let (target, plain) = match names {
                            Some(names) if names.is_empty() => continue,
                            Some(_) => ("dependentRequired", value.clone()),
                            None if key == "dependencies" => (
                                "dependentSchemas",
                                self.child(Located { schema: value, resource }, &format!("{below}.{name}"))?,
                            ),
                            None => return Err(wrong("an object of lists of names")),
                        };
                        let entry = out.entry(target).or_insert_with(|| json!({}));
                        entry.as_object_mut().expect("an object").insert(name.clone(), plain);
                    }
                }
                "additionalProperties"
                | "propertyNames"
                | "unevaluatedProperties"
                | "unevaluatedItems"
                | "contains"
                | "if"
                | "then"
                | "else"
                | "not"
                | "additionalItems" => {
                    let plain = self.child(here, &below)?;
                    out.insert(key.clone(), plain);
                }
                "items" | "prefixItems" | "allOf" | "anyOf" | "oneOf" => {
                    let Value::Array(schemas) = value else {
                        if key != "items" {
                            return Err(wrong("a list of schemas"));
                        }
                        let plain = self.child(here, &below)?;
                        out.insert(key.clone(), plain);
                        continue;
                    };
                    let mut plain = Vec::new();
                    for (index, schema) in schemas.iter().enumerate() {
                        let below = format!("{below}[{index}]");
                        let here = Located { schema, resource };
                        // The alternatives are parts of this schema.
                        let is_part = key.ends_with("Of");
                        plain.push(if is_part {
                            self.schema(here, &below)?
                        } else {
                            self.child(here, &below)?
                        });
                    }
                    if plain.is_empty() && matches!(key.as_str(), "anyOf" | "oneOf") {
                        return Err(format!("{} is empty, so nothing is valid", at(key, place)));
                    }
                    if !plain.is_empty() || key == "items" {
                        out.insert(key.clone(), plain.into());
                    }
                }
                "$ref" | "$dynamicRef" | "$recursiveRef" => {
                    let reference = value.as_str().ok_or_else(|| wrong("a reference"))?;
                    let target = self.references.resolve(reference, resource, key == "$dynamicRef");
                    let target = target.map_err(|problem| format!("{}: {problem}", at(key, place)))?;
                    let number = self.number(target, reference.trim_start_matches("#/"));
                    let reference = json!({"$ref": number});
                    if out.contains_key("$ref") {
                        out.entry("allOf")
                            .or_insert_with(|| json!([]))
                            .as_array_mut()
                            .expect("a list")
                            .push(reference);
                    } else {
                        out.insert("$ref".into(), number.into());
                    }
                }
                "$recursiveAnchor" if value == true && !place.is_empty() => {
                    return Err(format!(
                        "{} is supported in the outermost schema only; use `$ref`",
                        at(key, place)
                    ));
                }
                "uniqueItems" if value == true => drop(out.insert(key.clone(), true.into())),
                // Annotations.
                _ => debug_assert!(
                    keywords::find(key).is_none_or(|keyword| keyword.effect != keywords::Effect::Enforced)
                        || key == "nullable"
                ),
            }
        }
        if let Some(first) = patterns.first() {
            out.insert("pattern".into(), first.as_str().into());
        }
        for more in patterns.iter().skip(1) {
            let all = out.entry("allOf").or_insert_with(|| json!([]));
            all.as_array_mut().expect("a list").push(json!({PLACE: place, "pattern": more}));
        }
        if keys.get("nullable") == Some(&Value::Bool(true))
            && let Some(mut types) =
                types(&out).map(|types| types.into_iter().map(str::to_owned).collect::<Vec<_>>())
            && !types.iter().any(|name| name == "null")
        {
            types.push("null".into());
            out.insert("type".into(), types.into());
        }
        self.tidy(&mut out);
        Ok(fold(out))
    }

    /// Removes what binds nothing, and older spellings.
    fn tidy(&self, out: &mut Keys) {
        for (exclusive, inclusive) in [("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")] {
            match out.get(exclusive) {
                Some(Value::Bool(true)) => {
                    let bound = out.shift_remove(inclusive);
                    out.shift_remove(exclusive);
                    out.extend(bound.map(|bound| (exclusive.to_owned(), bound)));
                }
                Some(Value::Bool(false)) => drop(out.shift_remove(exclusive)),
                _ => {}
            }
        }
        bound_numbers(out);
        let rest = out.shift_remove("additionalItems");
        if !self.prefix_items {
            out.shift_remove("prefixItems");
        }
        if let Some(Value::Array(_)) = out.get("items") {
            let first = out.shift_remove("items").expect("it is there");
            if first.as_array().is_some_and(|first| !first.is_empty()) {
                out.insert("prefixItems".into(), first);
            }
            out.extend(rest.map(|rest| ("items".to_owned(), rest)));
        }
        if out.get("propertyNames").is_some_and(any_string) {
            out.shift_remove("propertyNames");
        }
        if out.contains_key("items") {
            out.shift_remove("unevaluatedItems");
        }
        let is_true = |out: &Keys, key: &str| out.get(key) == Some(&Value::Bool(true));
        for key in ["then", "else", "unevaluatedItems", "items"] {
            if is_true(out, key) {
                out.shift_remove(key);
            }
        }
        if out.get("not") == Some(&Value::Bool(false)) {
            out.shift_remove("not");
        }
        if !out.contains_key("then") && !out.contains_key("else") {
            out.shift_remove("if");
        }
        if !out.contains_key("if") {
            out.shift_remove("then");
            out.shift_remove("else");
        }
        if count(out, "minContains") == Some(0) && !out.contains_key("maxContains") {
            out.shift_remove("contains");
        }
        if !out.contains_key("contains") {
            out.shift_remove("minContains");
            out.shift_remove("maxContains");
        }
    }

    /// Returns a schema of another value: a definition of its own if it combines others.
    fn child(&mut self, located: Located<'d>, place: &str) -> Result<Value, String> {
        let plain = self.schema(located, place)?;
        let Value::Object(keys) = &plain else { return Ok(plain) };
        let has = |key: &str| keys.contains_key(key);
        let combines =
            COMBINING.iter().any(|key| has(key)) || (has("$ref") || has("anyOf")) && keys.len() > 2;
        if !combines {
            return Ok(plain);
        }
        self.schemas.push(plain);
        Ok(json!({"$ref": self.schemas.len() - 1}))
    }

    /// Returns the number of a referenced schema.
    fn number(&mut self, target: Located<'d>, place: &str) -> usize {
        let next = self.schemas.len();
        let number = *self.numbers.entry(target.schema).or_insert(next);
        if number == next {
            self.schemas.push(Value::Null);
            self.queue.push_back((number, target, place.replace('/', ".")));
        }
        number
    }
}

/// Returns a simpler form of a schema: a boolean if it binds everything or nothing, the only part of an `allOf`.
fn fold(mut keys: Keys) -> Value {
    if keys.get("not") == Some(&Value::Bool(true)) {
        return false.into();
    }
    let bound = keys.keys().filter(|key| *key != PLACE).count();
    if bound == 0 {
        return true.into();
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        if let Some(Value::Array(parts)) = keys.get_mut(key)
            && bound == 1
            && parts.len() == 1
        {
            return parts.remove(0);
        }
    }
    keys.into()
}

/// Narrows bounds that the library's numbers of 64 bits do not have.
fn bound_numbers(out: &mut Keys) {
    const MOST: f64 = 1e17;
    let number = |out: &Keys, key: &str| out.get(key).and_then(Value::as_f64);
    let low = ["minimum", "exclusiveMinimum"].map(|key| number(out, key));
    let high = ["maximum", "exclusiveMaximum"].map(|key| number(out, key));
    if low.iter().flatten().any(|low| *low >= MOST) || high.iter().flatten().any(|high| *high <= -MOST) {
        return;
    }
    for (key, value) in out.iter_mut().filter(|(key, _)| key.ends_with("imum")) {
        if let Some(number) = value.as_f64().filter(|number| number.abs() > MOST) {
            debug_assert!(number < 0.0 || key.to_lowercase().ends_with("maximum"));
            *value = MOST.copysign(number).into();
        }
    }
}

/// True if every string fits.
fn any_string(schema: &Value) -> bool {
    match schema {
        Value::Bool(any) => *any,
        Value::Object(keys) => {
            keys.keys().all(|key| key == PLACE || key == "type")
                && types(keys).is_none_or(|types| types.contains(&"string"))
        }
        _ => false,
    }
}

fn short(value: &Value) -> String {
    const MOST: usize = 40;
    let text = value.to_string();
    if text.chars().count() <= MOST { text } else { text.chars().take(MOST).chain("...".chars()).collect() }
}
