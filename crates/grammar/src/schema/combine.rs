//! Combinations of schemas that apply to one value.
//!
//! A schema and those beside it (`allOf`, `$ref`, alternatives) form a group. Objects are closed by group: the names of
//! all parts are allowed, and no others, unless a part states otherwise. Each alternative is closed by itself, with room
//! for the names of the parts that apply together with it. By the standard, an object may have other properties. A
//! small model that may add properties seldom ends its answer; llama.cpp and vLLM close objects as well.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde_json::{Value, json};

use super::{Keys, PLACE, at, common_types, count, counts, entries, list, lists, names, strings, types};

/// Most values that are copied in rewriting, which bound its time and memory.
const MAX_STEPS: usize = 10_000_000;

/// Most levels of schemas within schemas, with the references that are written out in combinations.
const MAX_DEPTH: usize = 200;

/// Most combinations of alternatives in one group.
const MAX_WAYS: usize = 512;

/// Keyword of alternatives that this module adds; their names do not count.
pub(super) const DERIVED: &str = "$derived";

/// Keywords that are rewritten, and their companions.
const REWRITTEN: [&str; 22] = [
    PLACE,
    DERIVED,
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedProperties",
    "unevaluatedItems",
    "minProperties",
    "maxProperties",
    "format",
];

/// Alternatives of a group: one of them fits.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub ways: Vec<Value>,
    /// Written by this module; its names do not count.
    pub derived: bool,
}

/// A part of a group.
#[derive(Clone, Debug)]
pub(super) enum Part {
    /// Keywords of one schema.
    Own(Keys),
    Choice(Choice),
}

/// Parts that apply to one value.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    pub parts: Vec<Part>,
    /// Nothing fits.
    pub is_false: bool,
}

impl Group {
    pub fn own(&self) -> impl Iterator<Item = &Keys> {
        self.parts.iter().filter_map(|part| match part {
            Part::Own(keys) => Some(keys),
            Part::Choice(_) => None,
        })
    }

    fn choices(&self) -> impl Iterator<Item = &Choice> {
        self.parts.iter().filter_map(|part| match part {
            Part::Choice(choice) => Some(choice),
            Part::Own(_) => None,
        })
    }

    pub fn types(&self, outer: Option<&[String]>) -> Option<Vec<String>> {
        self.own().fold(outer.map(<[String]>::to_vec), |found, keys| common_types(found, types(keys)))
    }
}

/// Schemas that apply to a value beside an alternative.
#[derive(Clone, Debug, Default)]
struct Room {
    /// Names of others.
    names: BTreeSet<String>,
    /// Another part determines the other names.
    is_open: bool,
    /// `unevaluatedProperties` of the group.
    unevaluated: Option<Value>,
    types: Option<Vec<String>>,
    least: u64,
    most: Option<u64>,
    required: BTreeSet<String>,
}

impl Room {
    fn is_default(&self) -> bool {
        self.names.is_empty()
            && !self.is_open
            && self.unevaluated.is_none()
            && self.least == 0
            && self.most.is_none()
    }
}

/// Rewrites the schemas of [`plain`](super::plain::plain).
pub(super) struct Combiner {
    pub schemas: Vec<Value>,
    requested: BTreeSet<usize>,
    queue: VecDeque<usize>,
    pub steps: usize,
    /// Level of the schema that is written.
    depth: usize,
}

impl Combiner {
    pub fn new(schemas: Vec<Value>) -> Self {
        Self { schemas, requested: BTreeSet::new(), queue: VecDeque::new(), steps: 0, depth: 0 }
    }

    /// Returns the whole document.
    pub fn document(mut self) -> Result<Value, String> {
        let root = self.schemas[0].clone();
        let root = match self.value(&root)? {
            Value::Bool(false) if self.schemas[0].is_boolean() => return Err("`false` allows nothing".into()),
            Value::Bool(false) => return Err("no value fits all of its parts".into()),
            Value::Bool(true) => Keys::new(),
            Value::Object(keys) => keys,
            _ => unreachable!("schemas are booleans or objects"),
        };
        let mut definitions = BTreeMap::new();
        while let Some(number) = self.queue.pop_front() {
            let schema = self.schemas[number].clone();
            // A reference alone would be one to itself.
            let schema = self.group_of(&schema, &Room::default())?;
            definitions.insert(number, schema);
        }
        let mut document = root;
        if !definitions.is_empty() {
            let definitions: Keys =
                definitions.into_iter().map(|(number, schema)| (number.to_string(), schema)).collect();
            document.insert("$defs".into(), definitions.into());
        }
        Ok(document.into())
    }

    /// Counts a step, and the values of the schema that it copies.
    pub fn step(&mut self, copied: usize) -> Result<(), String> {
        self.steps += 1 + copied;
        if self.steps > MAX_STEPS {
            return Err(
                "its combinations (`allOf`, `oneOf`, `if`, ...) are too large when written out".into()
            );
        }
        Ok(())
    }

    /// Rewrites the schema of a value that no other schema applies to.
    pub fn value(&mut self, schema: &Value) -> Result<Value, String> {
        self.alternative(schema, &Room::default())
    }

    fn alternative(&mut self, schema: &Value, room: &Room) -> Result<Value, String> {
        if let Some(number) = reference(schema)
            && room.is_default()
        {
            if self.requested.insert(number) {
                self.queue.push_back(number);
            }
            return Ok(json!({"$ref": format!("#/$defs/{number}")}));
        }
        self.group_of(schema, room)
    }

    fn group_of(&mut self, schema: &Value, room: &Room) -> Result<Value, String> {
        if schema.is_boolean() {
            return Ok(schema.clone());
        }
        if self.depth == MAX_DEPTH {
            return Err(format!(
                "its combinations (`anyOf`, `allOf`, ...) are more than {MAX_DEPTH} levels deep, references followed; refer \
                 to a definition without keywords beside the `$ref`"
            ));
        }
        self.depth += 1;
        let group = self.group(schema)?;
        let written = self.write(group, room);
        self.depth -= 1;
        written
    }

    /// Returns the parts of a schema, with those of its references.
    pub fn group(&mut self, schema: &Value) -> Result<Group, String> {
        let mut group = Group::default();
        self.add(schema, &mut group, &mut Vec::new())?;
        Ok(group)
    }

    fn add(&mut self, schema: &Value, group: &mut Group, within: &mut Vec<usize>) -> Result<(), String> {
        self.step(size(schema))?;
        let keys = match schema {
            Value::Object(keys) => keys,
            other => {
                group.is_false |= other == &Value::Bool(false);
                return Ok(());
            }
        };
        let start = group.parts.len();
        let mut own = Some(keys.clone());
        for (key, value) in keys {
            match key.as_str() {
                "properties" => group.parts.extend(own.take().map(Part::Own)),
                "$ref" => {
                    let number = value.as_u64().expect("references are numbers") as usize;
                    if within.contains(&number) {
                        return Err("a `$ref` leads back to itself, so nothing is valid".into());
                    }
                    within.push(number);
                    let target = self.schemas[number].clone();
                    self.add(&target, group, within)?;
                    within.pop();
                }
                "allOf" => {
                    for part in list(keys, key) {
                        self.add(part, group, within)?;
                    }
                }
                "anyOf" | DERIVED => {
                    let derived = key == DERIVED;
                    group.parts.push(Part::Choice(Choice { ways: list(keys, key).to_vec(), derived }));
                }
                _ => {}
            }
        }
        if let Some(own) = own
            && own.keys().any(|key| !matches!(key.as_str(), PLACE | "$ref" | "allOf" | "anyOf" | DERIVED))
        {
            group.parts.insert(start, Part::Own(own));
        }
        Ok(())
    }

    /// Writes keywords of the parts as alternatives: `oneOf`, `not`, `if`, `dependentRequired`, `contains`, ...
    fn derive(&mut self, group: &mut Group, outer: &Room) -> Result<(), String> {
        let all = group.clone();
        let types = group.types(outer.types.as_deref());
        for keys in all.own() {
            let place = keys.get(PLACE).and_then(Value::as_str).unwrap_or_default();
            let mut push =
                |ways: Vec<Value>, derived| group.parts.push(Part::Choice(Choice { ways, derived }));
            if keys.contains_key("oneOf") {
                push(self.one_of(keys, &all, types.as_deref())?, false);
            }
            if let Some(not) = keys.get("not") {
                let domain = self.domain(&all, types.clone());
                let ways = self.opposite(not, &domain, 0)?.ok_or_else(|| {
                    format!("{} is supported for types, values, ranges, `required` and `properties`; list what is allowed instead", at("not", place))
                })?;
                push(ways, true);
            }
            if let Some(condition) = keys.get("if") {
                let domain = self.domain(&all, types.clone());
                let opposite = self.opposite(condition, &domain, 0)?.ok_or_else(|| {
                    format!("{} is supported where its opposite can be described (types, values, ranges, `required`, `properties`); use `anyOf`", at("if", place))
                })?;
                let part = |key| keys.get(key).cloned().unwrap_or(Value::Bool(true));
                let mut ways = vec![json!({"allOf": [condition, part("then")]})];
                ways.extend(opposite.into_iter().map(|way| json!({"allOf": [way, part("else")]})));
                push(ways, false);
            }
            for (name, needed) in entries(keys, "dependentRequired") {
                let mut names = vec![json!(name)];
                names.extend(needed.as_array().into_iter().flatten().filter(|other| *other != name).cloned());
                push(names::with_or_without(name, json!({"type": "object", "required": names})), true);
            }
            for (name, schema) in entries(keys, "dependentSchemas") {
                let with = json!({"type": "object", "required": [name], "allOf": [schema]});
                push(names::with_or_without(name, with), false);
            }
            for ways in self.list_choices(keys, &all)? {
                push(ways, true);
            }
        }
        Ok(())
    }

    /// Writes a group.
    fn write(&mut self, mut group: Group, room: &Room) -> Result<Value, String> {
        self.step(0)?;
        if group.is_false {
            return Ok(false.into());
        }
        self.derive(&mut group, room)?;
        let types = group.types(room.types.as_deref());
        let own_names: BTreeSet<String> = group.own().flat_map(named).collect();
        let mut choice_names = Vec::new();
        let mut ends = true;
        for choice in group.choices() {
            let mut found = BTreeSet::new();
            if !choice.derived {
                for way in choice.ways.clone() {
                    ends &= self.names(&way, &mut found, &mut Vec::new())?;
                }
            }
            choice_names.push(found);
        }
        let mut all_names: BTreeSet<String> = own_names.union(&room.names).cloned().collect();
        all_names.extend(choice_names.iter().flatten().cloned());
        let mut required: BTreeSet<String> = room.required.clone();
        required.extend(group.own().flat_map(|keys| strings(keys, "required")).map(str::to_owned));
        let mut needed = required.clone();
        needed.extend(group.own().flat_map(|keys| entries(keys, "dependentRequired")).flat_map(
            |(_, names)| names.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned),
        ));
        let least = group.own().filter_map(|keys| count(keys, "minProperties")).fold(room.least, u64::max);
        let most = group.own().filter_map(|keys| count(keys, "maxProperties")).chain(room.most).min();

        let states = |key: &str| group.own().any(|keys| keys.contains_key(key));
        let unevaluated = match group.own().find_map(|keys| keys.get("unevaluatedProperties")) {
            Some(schema) => Some(schema.clone()),
            None => room.unevaluated.clone(),
        };
        let is_stated = room.is_open || states("additionalProperties");
        let several = group.choices().filter(|choice| !choice.derived).count() > 1;
        if unevaluated.as_ref().is_some_and(|schema| schema != &Value::Bool(true)) && several && !is_stated {
            return Err("`unevaluatedProperties` is supported beside one list of alternatives; use `additionalProperties`".into());
        }
        // The schema of all other names.
        let closing = match &unevaluated {
            _ if is_stated => None,
            Some(schema) => Some(schema.clone()).filter(|schema| schema != &Value::Bool(true)),
            None => {
                let has_names = !own_names.is_empty()
                    || !all_names.is_empty() && !group.choices().any(|choice| !choice.derived);
                let fits =
                    needed.iter().all(|name| all_names.contains(name)) && all_names.len() as u64 >= least;
                let closes = has_names && fits && ends && !states("patternProperties");
                closes.then_some(Value::Bool(false))
            }
        };
        let is_open = is_stated
            || states("patternProperties") && unevaluated.is_none()
            || unevaluated == Some(Value::Bool(true));

        // Object counts: where no alternatives follow, all names are known.
        let mut parts = Vec::new();
        let has_choices = group.choices().any(|choice| !choice.derived);
        let (mut least, mut most) = (least, most);
        if !has_choices && (least > 0 || most.is_some()) {
            let place = group.own().find_map(|keys| keys.get(PLACE)?.as_str()).unwrap_or_default().to_owned();
            let names = counts::Names {
                all: group
                    .own()
                    .flat_map(named)
                    .chain(self.listed_names(&group))
                    .chain(room.names.iter().cloned())
                    .collect(),
                required: &required,
                is_free: self.is_free(&group, closing.as_ref()),
            };
            let ways = counts::ways(&names, &mut least, &mut most, &place)?;
            if !ways.is_empty() {
                group.parts.push(Part::Choice(Choice { ways, derived: true }));
                choice_names.push(BTreeSet::new());
            }
            let bounds = [("minProperties", (least > 0).then_some(least)), ("maxProperties", most)];
            let bounds: Keys =
                bounds.into_iter().filter_map(|(key, count)| Some((key.to_owned(), count?.into()))).collect();
            if !bounds.is_empty() {
                parts.push(Value::Object(bounds));
            }
        }
        let product =
            group.choices().map(|choice| choice.ways.len().max(1)).try_fold(1usize, usize::checked_mul);
        if product.is_none_or(|ways| ways > MAX_WAYS) {
            return Err(format!(
                "its alternatives have more than {MAX_WAYS} combinations (`anyOf`, `oneOf`, `if`, `dependentRequired`, ...)"
            ));
        }

        let single = group.own().filter(|keys| keys.contains_key("properties")).count() == 1;
        let mut closing = closing.map(|schema| self.value(&schema)).transpose()?;
        let patterns: Keys = group
            .own()
            .flat_map(|keys| entries(keys, "patternProperties"))
            .map(|(name, _)| (name.clone(), true.into()))
            .collect();
        let mut index = 0;
        for part in group.parts.clone() {
            match part {
                Part::Own(keys) => {
                    let mut out = self.own(&keys)?;
                    let is_whole = single && patterns.is_empty() && keys.contains_key("properties");
                    if is_whole
                        && all_names.is_subset(&own_names)
                        && let Some(closing) = closing.take()
                    {
                        out.insert("additionalProperties".into(), closing);
                    }
                    if !out.is_empty() {
                        parts.push(out.into());
                    }
                    parts.extend(names::rule(self, &keys)?);
                }
                Part::Choice(choice) => {
                    let mut inner = Room { is_open, types: types.clone(), ..Room::default() };
                    if choice.derived {
                        inner.is_open = true;
                    } else {
                        inner.names = room.names.union(&own_names).cloned().collect();
                        let others = choice_names.iter().enumerate().filter(|(other, _)| *other != index);
                        inner.names.extend(others.flat_map(|(_, names)| names.iter().cloned()));
                        inner.unevaluated.clone_from(&unevaluated);
                        (inner.least, inner.most) = (least, most);
                        inner.required.clone_from(&required);
                    }
                    index += 1;
                    let mut ways = Vec::new();
                    for way in &choice.ways {
                        let way = self.alternative(way, &inner)?;
                        if way != Value::Bool(false) && !ways.contains(&way) {
                            ways.push(way);
                        }
                    }
                    match ways.len() {
                        0 => return Ok(false.into()),
                        1 => parts.extend(ways.pop()),
                        _ => parts.push(json!({"anyOf": ways})),
                    }
                }
            }
        }
        if let Some(closing) = closing {
            let properties: Keys = all_names.into_iter().map(|name| (name, true.into())).collect();
            let mut last = json!({"properties": properties, "additionalProperties": closing});
            if !patterns.is_empty() {
                last["patternProperties"] = patterns.into();
            }
            parts.push(last);
        }
        Ok(join(parts, types))
    }

    fn listed_names(&self, group: &Group) -> Vec<String> {
        let rules = group.own().filter_map(|keys| keys.get("propertyNames"));
        rules.filter_map(|rule| names::listed(&self.schemas, rule)).flatten().collect()
    }

    /// True if an object of a group may have names of its own choice.
    fn is_free(&self, group: &Group, closing: Option<&Value>) -> bool {
        let shuts = |keys: &Keys| {
            keys.get("additionalProperties") == Some(&Value::Bool(false))
                && !keys.contains_key("patternProperties")
        };
        let lists = |keys: &Keys| {
            keys.get("propertyNames").is_some_and(|rule| names::listed(&self.schemas, rule).is_some())
        };
        let closed = closing == Some(&Value::Bool(false))
            && !group.own().any(|keys| keys.contains_key("patternProperties"));
        !(closed || group.own().any(|keys| shuts(keys) || lists(keys)))
    }

    /// Writes the keywords of one schema that the library has.
    fn own(&mut self, keys: &Keys) -> Result<Keys, String> {
        let mut out = Keys::new();
        for (key, value) in keys {
            match (key.as_str(), value) {
                (key, _) if REWRITTEN.contains(&key) => {}
                ("properties" | "patternProperties", Value::Object(schemas)) => {
                    let mut written = Keys::new();
                    for (name, schema) in schemas {
                        written.insert(name.clone(), self.value(schema)?);
                    }
                    out.insert(key.clone(), written.into());
                }
                ("prefixItems", Value::Array(schemas)) => {
                    let written: Result<Vec<_>, _> =
                        schemas.iter().map(|schema| self.value(schema)).collect();
                    out.insert(key.clone(), written?.into());
                }
                ("additionalProperties" | "items", schema) => {
                    let written = self.value(schema)?;
                    out.insert(key.clone(), written);
                }
                _ => drop(out.insert(key.clone(), value.clone())),
            }
        }
        lists::unevaluated(self, keys, &mut out)?;
        names::merge(self, keys, &mut out)?;
        Ok(out)
    }

    /// Adds the names of a schema's group. Returns false if a part states the others.
    fn names(
        &mut self,
        schema: &Value,
        found: &mut BTreeSet<String>,
        within: &mut Vec<usize>,
    ) -> Result<bool, String> {
        self.step(0)?;
        let Value::Object(keys) = schema else { return Ok(true) };
        found.extend(named(keys));
        let shut = |schema: &Value| schema == &Value::Bool(false);
        let mut ends = !keys.contains_key("patternProperties")
            && keys.get("additionalProperties").is_none_or(shut)
            && keys.get("unevaluatedProperties").is_none_or(shut);
        if let Some(number) =
            reference(schema).or_else(|| keys.get("$ref")?.as_u64().map(|number| number as usize))
            && !within.contains(&number)
        {
            within.push(number);
            let target = self.schemas[number].clone();
            ends &= self.names(&target, found, within)?;
            within.pop();
        }
        let lists = ["allOf", "anyOf", "oneOf"].into_iter().flat_map(|key| list(keys, key));
        let ones = ["if", "then", "else"].into_iter().filter_map(|key| keys.get(key));
        let others = entries(keys, "dependentSchemas").map(|(_, schema)| schema);
        for part in lists.chain(ones).chain(others) {
            ends &= self.names(part, found, within)?;
        }
        Ok(ends)
    }
}

/// Returns the number of the schema that a schema without other keywords refers to.
pub(super) fn reference(schema: &Value) -> Option<usize> {
    let keys = schema.as_object()?;
    let alone = keys.keys().all(|key| key == PLACE || key == "$ref");
    keys.get("$ref").filter(|_| alone)?.as_u64().map(|number| number as usize)
}

/// Returns the names of a schema's own properties that may occur.
fn named(keys: &Keys) -> impl Iterator<Item = String> {
    entries(keys, "properties")
        .filter(|(_, schema)| **schema != Value::Bool(false))
        .map(|(name, _)| name.clone())
}

/// Returns the number of values in a schema.
fn size(schema: &Value) -> usize {
    match schema {
        Value::Object(keys) => 1 + keys.values().map(size).sum::<usize>(),
        Value::Array(values) => 1 + values.iter().map(size).sum::<usize>(),
        _ => 1,
    }
}

/// Joins written parts to one schema.
fn join(mut parts: Vec<Value>, types: Option<Vec<String>>) -> Value {
    if parts.contains(&Value::Bool(false)) {
        return false.into();
    }
    parts.retain(|part| part != &Value::Bool(true));
    // The library multiplies the types of parts that have none.
    for part in &mut parts {
        if let (Some(types), Value::Object(keys)) = (&types, part)
            && !keys.contains_key("type")
            && !keys.contains_key("$ref")
            && !keys.contains_key("anyOf")
            && !keys.contains_key("allOf")
            && !types.is_empty()
        {
            keys.insert("type".into(), types.clone().into());
        }
    }
    match parts.len() {
        0 => true.into(),
        1 => parts.remove(0),
        _ => json!({"allOf": parts}),
    }
}
