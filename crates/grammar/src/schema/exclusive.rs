//! Opposites of schemas, and schemas that no value fits together: for `not`, `if` and `oneOf`.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{
    Keys, PLACE, TYPES, at,
    combine::{Combiner, DERIVED, Group, Part},
    count, entries, equal, list, pattern, strings, type_of, types,
};

/// Deepest schemas that are compared.
const DEEPEST: usize = 16;

/// Knowledge of a value from the schemas beside one.
pub(super) struct Domain {
    /// Its only values.
    values: Option<Vec<Value>>,
    types: Option<Vec<String>>,
    /// Schemas of the same value.
    own: Vec<Keys>,
}

impl Domain {
    fn allows(&self, kind: &str) -> bool {
        self.types.as_ref().is_none_or(|types| {
            types.iter().any(|name| name == kind || kind == "number" && name == "integer")
        })
    }
}

impl Combiner {
    pub(super) fn domain(&mut self, group: &Group, types: Option<Vec<String>>) -> Domain {
        let own: Vec<Keys> = group.own().cloned().collect();
        let values = own.iter().find_map(|keys| self.finite_own(keys, 0));
        Domain { values, types, own }
    }

    fn domain_of(&mut self, schemas: &[Value]) -> Result<Domain, String> {
        let mut all = Group::default();
        for schema in schemas {
            all.parts.extend(self.group(schema)?.parts);
        }
        let types = all.types(None);
        Ok(self.domain(&all, types))
    }

    /// Returns the values of a schema if they are few.
    pub(super) fn finite(&self, schema: &Value, depth: usize) -> Option<Vec<Value>> {
        self.finite_own(schema.as_object()?, depth)
    }

    fn finite_own(&self, keys: &Keys, depth: usize) -> Option<Vec<Value>> {
        if depth > DEEPEST {
            return None;
        }
        let many = |schemas: &[Value]| {
            let each: Option<Vec<_>> = schemas.iter().map(|schema| self.finite(schema, depth + 1)).collect();
            Some(each?.concat()).filter(|values| !values.is_empty())
        };
        if let Some(value) = keys.get("const") {
            return Some(vec![value.clone()]);
        }
        if keys.contains_key("enum") {
            return Some(list(keys, "enum").to_vec());
        }
        if let Some(number) = keys.get("$ref").and_then(Value::as_u64) {
            return self.finite(&self.schemas[number as usize], depth + 1);
        }
        if let Some(values) = list(keys, "allOf").iter().find_map(|part| self.finite(part, depth + 1)) {
            return Some(values);
        }
        if let Some(values) = many(list(keys, "anyOf")).or_else(|| many(list(keys, "oneOf"))) {
            return Some(values);
        }
        let of_type = |name: &str| match name {
            "null" => Some(vec![Value::Null]),
            "boolean" => Some(vec![true.into(), false.into()]),
            _ => None,
        };
        let each: Option<Vec<_>> = types(keys)?.into_iter().map(of_type).collect();
        each.map(|each| each.concat())
    }

    /// Returns schemas of which each other value fits one; `None` if it cannot be written.
    pub(super) fn opposite(
        &mut self,
        schema: &Value,
        domain: &Domain,
        depth: usize,
    ) -> Result<Option<Vec<Value>>, String> {
        self.step(0)?;
        let keys = match schema {
            Value::Object(keys) => keys,
            other => {
                return Ok(Some(if other == &Value::Bool(true) {
                    Vec::new()
                } else {
                    vec![Value::Bool(true)]
                }));
            }
        };
        if depth > DEEPEST {
            return Ok(None);
        }
        let mut ways = Vec::new();
        for (key, value) in keys {
            let typed = |kind: &str, key: &str, value: Value| {
                let mut keys = Keys::from_iter([("type".to_owned(), kind.into())]);
                keys.insert(key.to_owned(), value);
                Value::Object(keys)
            };
            let length = value.as_u64().unwrap_or(0);
            match key.as_str() {
                PLACE => {}
                "type" => {
                    let names = types(keys).unwrap_or_default();
                    if names.contains(&"integer") && !names.contains(&"number") && domain.allows("number") {
                        let integers = domain
                            .types
                            .as_ref()
                            .is_some_and(|types| !types.iter().any(|name| name == "number"));
                        if !integers {
                            return Ok(None);
                        }
                    }
                    let is_other = |name: &&str| {
                        let is_number = *name == "number" && names.contains(&"integer");
                        !names.contains(name) && !is_number
                    };
                    let others: Vec<&str> = TYPES.into_iter().filter(is_other).collect();
                    if !others.is_empty() {
                        ways.push(json!({"type": others}));
                    }
                }
                "const" | "enum" => {
                    let values = if key == "enum" { list(keys, key) } else { std::slice::from_ref(value) };
                    let Some(others) = other_values(values, domain) else { return Ok(None) };
                    ways.extend(others);
                }
                "minimum" => ways.push(typed("number", "exclusiveMaximum", value.clone())),
                "maximum" => ways.push(typed("number", "exclusiveMinimum", value.clone())),
                "exclusiveMinimum" => ways.push(typed("number", "maximum", value.clone())),
                "exclusiveMaximum" => ways.push(typed("number", "minimum", value.clone())),
                "minLength" => ways.push(typed("string", "maxLength", (length - 1).into())),
                "maxLength" => ways.push(typed("string", "minLength", (length + 1).into())),
                "minItems" => ways.push(typed("array", "maxItems", (length - 1).into())),
                "maxItems" => ways.push(typed("array", "minItems", (length + 1).into())),
                "minProperties" if length == 1 => ways.push(typed("object", "maxProperties", 0.into())),
                "maxProperties" if length == 0 => ways.push(typed("object", "minProperties", 1.into())),
                "required" => {
                    for name in strings(keys, key) {
                        ways.push(typed(
                            "object",
                            "properties",
                            Keys::from_iter([(name.to_owned(), false.into())]).into(),
                        ));
                    }
                }
                "properties" => {
                    for (name, schema) in entries(keys, key) {
                        let beside: Vec<Value> = domain
                            .own
                            .iter()
                            .filter_map(|own| own.get("properties")?.get(name))
                            .cloned()
                            .collect();
                        let inner = self.domain_of(&beside)?;
                        let Some(others) = self.opposite(schema, &inner, depth + 1)? else { return Ok(None) };
                        if !others.is_empty() {
                            let properties = Keys::from_iter([(name.clone(), json!({"anyOf": others}))]);
                            ways.push(
                                json!({"type": "object", "required": [name], "properties": properties}),
                            );
                        }
                    }
                }
                "additionalProperties" if value == &Value::Bool(true) => {}
                "$ref" => {
                    let target = self.schemas[length as usize].clone();
                    let Some(others) = self.opposite(&target, domain, depth + 1)? else { return Ok(None) };
                    ways.extend(others);
                }
                "allOf" => {
                    for part in list(keys, key) {
                        let Some(others) = self.opposite(part, domain, depth + 1)? else { return Ok(None) };
                        ways.extend(others);
                    }
                }
                "anyOf" => {
                    let mut all = Vec::new();
                    let mut possible = true;
                    for part in list(keys, key) {
                        let Some(others) = self.opposite(part, domain, depth + 1)? else { return Ok(None) };
                        possible &= !others.is_empty();
                        all.push(json!({"anyOf": others}));
                    }
                    if possible {
                        ways.push(json!({"allOf": all}));
                    }
                }
                "not" => ways.push(value.clone()),
                _ => return Ok(None),
            }
        }
        Ok(Some(ways))
    }

    /// Returns the alternatives of a `oneOf`, each without the values of the others.
    pub(super) fn one_of(
        &mut self,
        keys: &Keys,
        group: &Group,
        outer: Option<&[String]>,
    ) -> Result<Vec<Value>, String> {
        let ways = list(keys, "oneOf");
        let mut written: Vec<Value> = Vec::new();
        let domain = self.domain(group, outer.map(<[String]>::to_vec));
        for (index, way) in ways.iter().enumerate() {
            // An alternative without a type that describes objects is meant as one.
            let found = self.group(way)?;
            let describes = |keys: &Keys| keys.contains_key("properties") || keys.contains_key("required");
            let is_object = found.types(outer).is_none() && found.own().any(describes);
            let object = json!({"type": "object"});
            let mut all = vec![way.clone()];
            if is_object {
                all.push(object);
            }
            let mut narrowed = json!({"allOf": all});
            let allowed = self.closed_names(group, &found);
            for (other, schema) in ways.iter().enumerate() {
                if other == index || self.disjoint_within(&narrowed, schema, allowed.as_ref(), outer)? {
                    continue;
                }
                let Some(others) = self.opposite(schema, &domain, 0)? else {
                    let place = keys.get(PLACE).and_then(Value::as_str).unwrap_or_default();
                    return Err(format!(
                        "{}: a value may fit its alternatives {index} and {other} at once; use `anyOf`, or a required property with different values (`const`)",
                        at("oneOf", place)
                    ));
                };
                let others = if others.is_empty() { Value::Bool(false) } else { json!({DERIVED: others}) };
                narrowed["allOf"].as_array_mut().expect("a list").push(others);
            }
            let only = narrowed["allOf"].as_array().expect("a list");
            written.push(if only.len() == 1 { only[0].clone() } else { narrowed });
        }
        Ok(written)
    }

    /// Returns the names to which closing will restrict an alternative without alternatives of its own.
    fn closed_names(&mut self, group: &Group, way: &Group) -> Option<BTreeSet<String>> {
        let plain = |group: &Group| {
            let states = [
                "additionalProperties",
                "patternProperties",
                "unevaluatedProperties",
                "minProperties",
                "propertyNames",
                "dependentRequired",
                "dependentSchemas",
                "if",
            ];
            group.own().all(|keys| states.iter().all(|key| !keys.contains_key(*key)))
                && group.parts.iter().all(|part| matches!(part, Part::Own(_)))
        };
        let names = |group: &Group| {
            group
                .own()
                .flat_map(|keys| entries(keys, "properties"))
                .map(|(name, _)| name.clone())
                .collect::<BTreeSet<_>>()
        };
        let required = |group: &Group| {
            group.own().flat_map(|keys| strings(keys, "required")).map(str::to_owned).collect::<BTreeSet<_>>()
        };
        let mut all = names(way);
        if all.is_empty() || !plain(way) || !plain(group) || way.own().any(|keys| keys.contains_key("oneOf"))
        {
            return None;
        }
        all.extend(names(group));
        (required(way).is_subset(&all) && required(group).is_subset(&all)).then_some(all)
    }

    fn disjoint_within(
        &mut self,
        a: &Value,
        b: &Value,
        allowed: Option<&BTreeSet<String>>,
        outer: Option<&[String]>,
    ) -> Result<bool, String> {
        let context = outer.map(|types| json!({"type": types}));
        let parts: Vec<Value> = [Some(a.clone()), context].into_iter().flatten().collect();
        self.disjoint(&json!({"allOf": parts}), b, allowed)
    }

    /// True if certainly no value fits both schemas. An object of `a` has only the names `allowed`.
    pub(super) fn disjoint(
        &mut self,
        a: &Value,
        b: &Value,
        allowed: Option<&BTreeSet<String>>,
    ) -> Result<bool, String> {
        self.disjoint_at(a, b, allowed, 0)
    }

    fn disjoint_at(
        &mut self,
        a: &Value,
        b: &Value,
        allowed: Option<&BTreeSet<String>>,
        depth: usize,
    ) -> Result<bool, String> {
        self.step(0)?;
        if depth > DEEPEST {
            return Ok(false);
        }
        let (left, right) = (self.group(a)?, self.group(b)?);
        if left.is_false || right.is_false {
            return Ok(true);
        }
        for (group, other) in [(&left, b), (&right, a)] {
            let choices = group.parts.iter().filter_map(|part| match part {
                Part::Choice(choice) => Some(choice.ways.clone()),
                Part::Own(keys) if keys.contains_key("oneOf") => Some(list(keys, "oneOf").to_vec()),
                Part::Own(_) => None,
            });
            for ways in choices.collect::<Vec<_>>() {
                let mut all = true;
                for way in &ways {
                    all = all && self.disjoint_at(way, other, None, depth + 1)?;
                }
                if all {
                    return Ok(true);
                }
            }
        }
        let both = right.types(left.types(None).as_deref());
        if both.as_ref().is_some_and(Vec::is_empty) {
            return Ok(true);
        }
        for (group, other) in [(&left, &right), (&right, &left)] {
            for values in group.own().filter_map(|keys| self.finite_own(keys, 0)) {
                let mut none = true;
                for value in &values {
                    let mut refuted = false;
                    for keys in group.own().chain(other.own()) {
                        refuted = refuted || self.refutes(value, &keys.clone().into(), 0);
                    }
                    none &= refuted;
                }
                if none {
                    return Ok(true);
                }
            }
        }
        let only =
            both.as_deref().and_then(|types| if let [one] = types { Some(one.as_str()) } else { None });
        let all = || left.own().chain(right.own());
        let crosses = |least: &str, most: &str| {
            let least = all().filter_map(|keys| count(keys, least)).max();
            let most = all().filter_map(|keys| count(keys, most)).min();
            least.zip(most).is_some_and(|(least, most)| least > most)
        };
        Ok(match only {
            Some("object") => self.objects_differ(&left, &right, allowed, depth)?,
            Some("string") => crosses("minLength", "maxLength"),
            Some("array") => crosses("minItems", "maxItems") || self.items_differ(&left, &right, depth)?,
            Some("number" | "integer") => {
                let bounds = |key: &str| all().filter_map(|keys| keys.get(key)?.as_f64()).collect::<Vec<_>>();
                let (low, high) = (bounds("minimum"), bounds("maximum"));
                let (above, below) = (bounds("exclusiveMinimum"), bounds("exclusiveMaximum"));
                let crosses = |low: &[f64], high: &[f64], strict: bool| {
                    low.iter()
                        .any(|low| high.iter().any(|high| if strict { low >= high } else { low > high }))
                };
                crosses(&low, &high, false)
                    || crosses(&above, &high, true)
                    || crosses(&low, &below, true)
                    || crosses(&above, &below, true)
            }
            _ => false,
        })
    }

    fn objects_differ(
        &mut self,
        left: &Group,
        right: &Group,
        allowed: Option<&BTreeSet<String>>,
        depth: usize,
    ) -> Result<bool, String> {
        let required = |group: &Group| {
            group.own().flat_map(|keys| strings(keys, "required")).map(str::to_owned).collect::<BTreeSet<_>>()
        };
        let shuts = |group: &Group, name: &str| {
            group.own().any(|keys| {
                let named = keys.get("properties").and_then(|names| names.get(name));
                let shut = keys.get("additionalProperties") == Some(&Value::Bool(false))
                    && !keys.contains_key("patternProperties");
                named == Some(&Value::Bool(false)) || shut && named.is_none()
            })
        };
        let schemas = |group: &Group, name: &str| {
            group.own().filter_map(|keys| keys.get("properties")?.get(name)).cloned().collect::<Vec<_>>()
        };
        let (a, b) = (required(left), required(right));
        for name in a.union(&b) {
            let is_outside = allowed.is_some_and(|allowed| b.contains(name) && !allowed.contains(name));
            if is_outside || shuts(left, name) || shuts(right, name) {
                return Ok(true);
            }
            for one in schemas(left, name) {
                for other in schemas(right, name) {
                    if self.disjoint_at(&one, &other, None, depth + 1)? {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }

    fn items_differ(&mut self, left: &Group, right: &Group, depth: usize) -> Result<bool, String> {
        let least =
            left.own().chain(right.own()).filter_map(|keys| count(keys, "minItems")).max().unwrap_or(0);
        let item = |group: &Group, index: usize| {
            group
                .own()
                .filter_map(|keys| list(keys, "prefixItems").get(index).or_else(|| keys.get("items")))
                .cloned()
                .collect::<Vec<_>>()
        };
        for index in 0..least.min(DEEPEST as u64) as usize {
            for one in item(left, index) {
                for other in item(right, index) {
                    if self.disjoint_at(&one, &other, None, depth + 1)? {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }

    /// True if a value certainly does not fit.
    fn refutes(&self, value: &Value, schema: &Value, depth: usize) -> bool {
        let keys = match schema {
            Value::Object(keys) if depth <= DEEPEST => keys,
            other => return other == &Value::Bool(false),
        };
        let below = |value: &Value, schema: &Value| self.refutes(value, schema, depth + 1);
        let is = |name: &str| {
            name == type_of(value)
                || name == "integer" && value.as_f64().is_some_and(|number| number.fract() == 0.0)
        };
        let number = |key: &str| keys.get(key).and_then(Value::as_f64).zip(value.as_f64());
        let amount = match value {
            Value::String(text) => Some((text.chars().count(), "minLength", "maxLength")),
            Value::Array(items) => Some((items.len(), "minItems", "maxItems")),
            Value::Object(entries) => Some((entries.len(), "minProperties", "maxProperties")),
            _ => None,
        };
        let amount_differs = amount.is_some_and(|(amount, least, most)| {
            count(keys, least).is_some_and(|least| (amount as u64) < least)
                || count(keys, most).is_some_and(|most| amount as u64 > most)
        });
        let object_differs = value.as_object().is_some_and(|object| {
            strings(keys, "required").any(|name| !object.contains_key(name))
                || entries(keys, "properties")
                    .any(|(name, schema)| object.get(name).is_some_and(|value| below(value, schema)))
                || keys.get("additionalProperties") == Some(&Value::Bool(false))
                    && !keys.contains_key("patternProperties")
                    && object.keys().any(|name| entries(keys, "properties").all(|(named, _)| named != name))
        });
        let any = |key: &str| {
            let ways = list(keys, key);
            !ways.is_empty() && ways.iter().all(|way| below(value, way))
        };
        types(keys).is_some_and(|types| !types.into_iter().any(is))
            || keys.get("const").is_some_and(|only| !equal(only, value))
            || keys.contains_key("enum") && !list(keys, "enum").iter().any(|one| equal(one, value))
            || number("minimum").is_some_and(|(bound, number)| number < bound)
            || number("maximum").is_some_and(|(bound, number)| number > bound)
            || number("exclusiveMinimum").is_some_and(|(bound, number)| number <= bound)
            || number("exclusiveMaximum").is_some_and(|(bound, number)| number >= bound)
            || amount_differs
            || object_differs
            || keys
                .get("$ref")
                .and_then(Value::as_u64)
                .is_some_and(|number| below(value, &self.schemas[number as usize]))
            || list(keys, "allOf").iter().any(|part| below(value, part))
            || any("anyOf")
            || any("oneOf")
    }
}

/// Returns schemas of all values but these; `None` if they cannot be written.
fn other_values(values: &[Value], domain: &Domain) -> Option<Vec<Value>> {
    if let Some(all) = &domain.values {
        let others: Vec<&Value> =
            all.iter().filter(|one| !values.iter().any(|value| equal(one, value))).collect();
        return Some(if others.is_empty() { Vec::new() } else { vec![json!({"enum": others})] });
    }
    let mut ways = Vec::new();
    for kind in TYPES.into_iter().filter(|kind| domain.allows(kind)) {
        let same: Vec<&Value> = values.iter().filter(|value| type_of(value) == kind).collect();
        if same.is_empty() {
            ways.push(json!({"type": kind}));
            continue;
        }
        match kind {
            "null" => {}
            "boolean" => {
                let others = [true, false].into_iter().filter(|one| !same.contains(&&Value::Bool(*one)));
                ways.extend(others.map(|one| json!({"const": one})));
            }
            "string" => {
                let texts: Vec<&str> = same.iter().filter_map(|text| text.as_str()).collect();
                ways.push(json!({"type": "string", "pattern": pattern::other_than(&texts)?}));
            }
            "number" => {
                let mut numbers = same;
                numbers.sort_by(|a, b| a.as_f64().unwrap_or(0.0).total_cmp(&b.as_f64().unwrap_or(0.0)));
                ways.push(json!({"type": "number", "exclusiveMaximum": numbers[0]}));
                ways.extend(numbers.windows(2).map(|pair| {
                    json!({"type": "number", "exclusiveMinimum": pair[0], "exclusiveMaximum": pair[1]})
                }));
                ways.push(json!({"type": "number", "exclusiveMinimum": numbers[numbers.len() - 1]}));
            }
            _ => return None,
        }
    }
    Some(ways)
}
