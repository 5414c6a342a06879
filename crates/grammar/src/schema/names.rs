//! `propertyNames`.

use serde_json::{Value, json};

use super::{Keys, PLACE, TYPES, at, combine::Combiner, count, list, pattern, types};

/// Names that fit a schema.
#[derive(Default)]
struct Rule {
    listed: Option<Vec<String>>,
    excluded: Vec<String>,
    patterns: Vec<String>,
}

/// Returns a rule; `None` if it is not supported.
fn read(schemas: &[Value], schema: &Value, rule: &mut Rule, depth: usize) -> Option<()> {
    const DEEPEST: usize = 20;
    let only = |rule: &mut Rule, names: Vec<String>| match &mut rule.listed {
        Some(listed) => listed.retain(|name| names.contains(name)),
        none => *none = Some(names),
    };
    let texts =
        |values: &[Value]| values.iter().filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>();
    let keys = match schema {
        Value::Object(keys) if depth < DEEPEST => keys,
        Value::Bool(false) => {
            only(rule, Vec::new());
            return Some(());
        }
        other => return (other == &Value::Bool(true)).then_some(()),
    };
    let bound = |key| count(keys, key);
    if bound("minLength").is_some() || bound("maxLength").is_some() {
        rule.patterns.push(pattern::of_length(bound("minLength").unwrap_or(0), bound("maxLength")));
    }
    for (key, value) in keys {
        match key.as_str() {
            PLACE | "minLength" | "maxLength" => {}
            "type" => {
                if !types(keys).is_some_and(|types| types.contains(&"string")) {
                    only(rule, Vec::new());
                }
            }
            "const" => only(rule, texts(std::slice::from_ref(value))),
            "enum" => only(rule, texts(list(keys, key))),
            "pattern" => rule.patterns.push(value.as_str()?.to_owned()),
            "$ref" => read(schemas, schemas.get(value.as_u64()? as usize)?, rule, depth + 1)?,
            "allOf" => list(keys, key)
                .iter()
                .try_for_each(|part| read(schemas, part, rule, depth + 1).ok_or(()))
                .ok()?,
            "anyOf" | "oneOf" => {
                let mut names: Vec<String> = Vec::new();
                for part in list(keys, key) {
                    let more = listed_at(schemas, part, depth + 1)?;
                    if key == "oneOf" && more.iter().any(|name| names.contains(name)) {
                        return None;
                    }
                    names.extend(more);
                }
                only(rule, names);
            }
            "not" => rule.excluded.extend(listed_at(schemas, value, depth + 1)?),
            // They bind no strings.
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {}
            _ => return None,
        }
    }
    Some(())
}

fn listed_at(schemas: &[Value], schema: &Value, depth: usize) -> Option<Vec<String>> {
    let mut rule = Rule::default();
    read(schemas, schema, &mut rule, depth)?;
    let is_list = rule.excluded.is_empty() && rule.patterns.is_empty();
    rule.listed.filter(|_| is_list)
}

/// Returns the names that a schema lists, if it does no more.
pub(super) fn listed(schemas: &[Value], schema: &Value) -> Option<Vec<String>> {
    listed_at(schemas, schema, 0)
}

/// Returns the rule of `propertyNames` as schemas of objects.
fn forms(combiner: &Combiner, keys: &Keys) -> Result<Vec<Value>, String> {
    let Some(schema) = keys.get("propertyNames") else { return Ok(Vec::new()) };
    let mut rule = Rule::default();
    let read = read(&combiner.schemas, schema, &mut rule, 0);
    if read.is_none() || rule.patterns.len() > 1 {
        let place = keys.get(PLACE).and_then(Value::as_str).unwrap_or_default();
        return Err(format!(
            "{} is supported as a list of names (`enum`, `const`), one `pattern`, one `format`, or a length; write it as one pattern",
            at("propertyNames", place)
        ));
    }
    let mut forms = Vec::new();
    if let Some(names) = &rule.listed {
        let names: Keys = names
            .iter()
            .filter(|name| !rule.excluded.contains(name))
            .map(|name| (name.clone(), true.into()))
            .collect();
        forms.push(json!({"properties": names, "additionalProperties": false}));
    } else if !rule.excluded.is_empty() {
        let names: Keys = rule.excluded.into_iter().map(|name| (name, false.into())).collect();
        forms.push(json!({"properties": names}));
    }
    if let Some(pattern) = rule.patterns.pop() {
        forms.push(json!({"patternProperties": {pattern: true}, "additionalProperties": false}));
    }
    Ok(forms)
}

/// True if `propertyNames` becomes part of the schema's own keywords.
fn merges(keys: &Keys, forms: &[Value]) -> bool {
    let is_record = !keys.contains_key("properties") && !keys.contains_key("patternProperties");
    is_record && forms.len() == 1 && forms[0].get("additionalProperties").is_some()
}

/// Adds `propertyNames` to the written keywords of a record.
pub(super) fn merge(combiner: &Combiner, keys: &Keys, out: &mut Keys) -> Result<(), String> {
    let mut forms = forms(combiner, keys)?;
    if !merges(keys, &forms) {
        return Ok(());
    }
    let values = out.shift_remove("additionalProperties").unwrap_or(Value::Bool(true));
    if let Some(Value::Object(mut form)) = forms.pop() {
        for schemas in form.values_mut().filter_map(Value::as_object_mut) {
            schemas.values_mut().for_each(|schema| *schema = values.clone());
        }
        out.extend(form);
    }
    Ok(())
}

/// Returns the parts for `propertyNames` beside `properties`.
pub(super) fn rule(combiner: &Combiner, keys: &Keys) -> Result<Vec<Value>, String> {
    let forms = forms(combiner, keys)?;
    Ok(if merges(keys, &forms) { Vec::new() } else { forms })
}

/// Returns the alternatives of an object that has a property, which then is one of `with`, or has not; others fit.
pub(super) fn with_or_without(name: &str, with: Value) -> Vec<Value> {
    let others: Vec<&str> = TYPES.into_iter().filter(|kind| *kind != "object").collect();
    let mut without = Keys::new();
    without.insert(name.to_owned(), false.into());
    vec![with, json!({"type": "object", "properties": without}), json!({"type": others})]
}
