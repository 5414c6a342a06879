//! Fields of a type, from its JSON schema. The OpenAPI document contains the same schemas.

use std::{
    any::TypeId,
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{Body, Other, Rule};

/// The schema of a type, with the schemas that it refers to.
#[derive(Debug)]
pub struct Schema {
    root: Value,
    components: HashMap<String, Value>,
}

/// The schemas of all bodies, each generated on first use.
#[derive(Debug, Default)]
pub struct Schemas(Mutex<HashMap<TypeId, Arc<Schema>>>);

impl Schemas {
    /// Returns the schema of a body.
    pub fn of<T: Body>(&self) -> Arc<Schema> {
        let mut schemas = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        schemas.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(Schema::of::<T>())).clone()
    }
}

impl Schema {
    /// Returns the schema of a type.
    pub fn of<T: ToSchema>() -> Self {
        let mut referenced = Vec::new();
        T::schemas(&mut referenced);
        // Schemas have string keys and no fallible parts.
        let value = |schema| serde_json::to_value(schema).unwrap_or_default();
        let mut schema = Self {
            root: value(T::schema()),
            components: referenced.into_iter().map(|(name, schema)| (name, value(schema))).collect(),
        };
        schema.root = schema.merged(&schema.root);
        let merged =
            schema.components.iter().map(|(name, part)| (name.clone(), schema.merged(part))).collect();
        schema.components = merged;
        schema
    }

    /// Returns the type's own schema.
    pub fn root(&self) -> &Value {
        &self.root
    }

    /// Returns the schema that applies to a value; `None` if several could.
    pub fn resolve<'s>(&'s self, mut schema: &'s Value, value: &Value) -> Option<&'s Value> {
        loop {
            schema = self.follow(schema);
            let Some(alternatives) = alternatives(schema) else { return Some(schema) };
            let some: Vec<_> =
                alternatives.iter().map(|one| self.follow(one)).filter(|one| !is_null(one)).collect();
            // An optional value, whose type need not match.
            if let [one] = some[..] {
                schema = one;
                continue;
            }
            let mut fitting = some.into_iter().filter(|one| takes(one, value));
            schema = match (fitting.next(), fitting.next()) {
                (Some(one), None) => one,
                (Some(first), Some(second)) => {
                    let all: Vec<_> = [first, second].into_iter().chain(fitting).collect();
                    let mut tagged = all.into_iter().filter(|one| self.is_tagged(one, value)).peekable();
                    let first = *tagged.peek()?;
                    tagged.find(|one| required(one).all(|name| value.get(name).is_some())).unwrap_or(first)
                }
                (None, _) => return None,
            };
        }
    }

    /// Returns true if a schema, or one of its alternatives, has this JSON type.
    pub fn takes_some(&self, schema: &Value, value: &Value) -> bool {
        let schema = self.follow(schema);
        match alternatives(schema) {
            Some(all) => all.iter().any(|one| self.takes_some(one, value)),
            None => takes(schema, value),
        }
    }

    /// Returns the JSON types of a schema and of all its alternatives.
    pub fn all_types<'s>(&'s self, schema: &'s Value) -> Vec<&'s str> {
        let schema = self.follow(schema);
        match alternatives(schema) {
            Some(all) => all.iter().flat_map(|one| self.all_types(one)).collect(),
            None => types(schema).collect(),
        }
    }

    fn follow<'s>(&'s self, mut schema: &'s Value) -> &'s Value {
        while let Some(next) = schema
            .get("$ref")
            .and_then(Value::as_str)
            .and_then(|name| self.components.get(name.rsplit('/').next().unwrap_or_default()))
        {
            schema = next;
        }
        schema
    }

    /// Returns true if a value has the tags of this alternative, or lacks optional ones.
    fn is_tagged(&self, schema: &Value, value: &Value) -> bool {
        let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return false };
        let tag = |property: &Value| -> Option<Value> {
            let some = alternatives(property).and_then(|list| list.iter().find(|one| !is_null(one)));
            let property = self.follow(some.unwrap_or(property));
            let list = property.get("enum").and_then(Value::as_array).filter(|list| list.len() == 1);
            property.get("const").or_else(|| list.and_then(|list| list.first())).cloned()
        };
        let mut tags = 0;
        for (name, property) in properties {
            let Some(tag) = tag(property) else { continue };
            tags += 1;
            let fits = match value.get(name) {
                Some(Value::Null) | None => required(schema).all(|required| required != name),
                Some(given) => *given == tag,
            };
            if !fits {
                return false;
            }
        }
        tags > 0
    }

    /// Merges the parts of an `allOf` into one object. It is open if one of them is.
    fn merged(&self, schema: &Value) -> Value {
        let merge_all = |list: &Value| -> Value {
            list.as_array().into_iter().flatten().map(|schema| self.merged(schema)).collect()
        };
        if let Some(parts) = schema.get("allOf").and_then(Value::as_array) {
            let (mut properties, mut required, mut open) = (Map::new(), Vec::new(), false);
            for part in parts {
                let part = self.merged(self.follow(part));
                match part.get("properties").and_then(Value::as_object) {
                    Some(own) => properties.extend(own.clone()),
                    None => open = true,
                }
                required.extend(part["required"].as_array().into_iter().flatten().cloned());
            }
            return json!({"type": "object", "properties": properties, "required": required, "open": open});
        }
        let mut schema = schema.clone();
        for list in ["oneOf", "anyOf"] {
            if let Some(alternatives) = schema.get(list).map(merge_all) {
                schema[list] = alternatives;
            }
        }
        schema
    }
}

/// Returns the required fields of an object.
pub fn required(schema: &Value) -> impl Iterator<Item = &str> {
    schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

fn alternatives(schema: &Value) -> Option<&Vec<Value>> {
    schema.get("oneOf").or_else(|| schema.get("anyOf")).and_then(Value::as_array)
}

/// Returns true if a schema allows only `null`.
fn is_null(schema: &Value) -> bool {
    types(schema).eq(["null"])
}

/// Returns the JSON types of a schema's values; empty if it names none.
pub fn types(schema: &Value) -> impl Iterator<Item = &str> {
    let types = schema.get("type");
    let list = types.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    types.and_then(Value::as_str).into_iter().chain(list)
}

/// Returns true if a schema allows this JSON type.
fn takes(schema: &Value, value: &Value) -> bool {
    if alternatives(schema).is_some() {
        return true;
    }
    let is = |name: &str| match value {
        Value::Null => name == "null",
        Value::Bool(_) => name == "boolean",
        Value::Number(number) if number.is_f64() => {
            name == "number" || name == "integer" && number.as_f64().is_some_and(|value| value.fract() == 0.0)
        }
        Value::Number(_) => matches!(name, "integer" | "number"),
        Value::String(_) => name == "string",
        Value::Array(_) => name == "array",
        Value::Object(_) => name == "object",
    };
    types(schema).next().is_none() || types(schema).any(is)
}

/// Adds the known fields that a type does not read to the OpenAPI document.
pub fn describe<T: Body>(document: &mut Value) {
    for Other { path, rule, why } in T::OTHERS.iter().copied().flatten() {
        let values = |values: &[&str]| values.join(", ");
        let says = match rule {
            Rule::NoEffect => format!("Has no effect: {why}."),
            Rule::LeftOut => format!("Ignored, and named in `X-Paguro-Ignored`: {why}."),
            Rule::Refused => format!("Not supported: {why}."),
            Rule::LeftOutUnless(neutral) => {
                format!(
                    "Other values than {} are ignored, and named in `X-Paguro-Ignored`: {why}.",
                    values(neutral)
                )
            }
            Rule::RefusedUnless(neutral) => format!("Must be {} or absent: {why}.", values(neutral)),
        };
        let (parents, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut parents = parents.split('.').filter(|parent| !parent.is_empty());
        let root = format!("/components/schemas/{}", T::name());
        let at = parents.try_fold(root, |at, parent| child(document, &at, parent.trim_end_matches("[]")));
        let Some(at) = at else { continue };
        let Some(object) = object_at(document, &at) else { continue };
        if let Some(properties) =
            document.pointer_mut(&object).and_then(|object| object["properties"].as_object_mut())
        {
            properties.insert(name.to_owned(), json!({"description": says}));
        }
    }
}

/// Returns the JSON pointer to an object's properties, also if the object is part of an `allOf` or `oneOf`.
fn object_at(document: &Value, at: &str) -> Option<String> {
    let schema = document.pointer(at)?;
    if schema.get("properties").is_some() {
        return Some(at.to_owned());
    }
    if let Some(name) = schema.get("$ref").and_then(Value::as_str) {
        return object_at(document, name.trim_start_matches('#'));
    }
    if schema.get("items").is_some() {
        return object_at(document, &format!("{at}/items"));
    }
    for list in ["oneOf", "allOf"] {
        let parts = schema.get(list).and_then(Value::as_array).map_or(0, Vec::len);
        // The type's own fields are in the last part.
        let found = (0..parts).rev().find_map(|part| object_at(document, &format!("{at}/{list}/{part}")));
        if found.is_some() {
            return found;
        }
    }
    None
}

fn child(document: &Value, at: &str, name: &str) -> Option<String> {
    let object = object_at(document, at)?;
    let property = format!("{object}/properties/{name}");
    object_at(document, &property)
}
