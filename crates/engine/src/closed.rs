//! Closes objects of a JSON schema: an object schema with `properties` allows no others, unless it states so. By the
//! standard they are allowed, but a small model that may add properties seldom ends its answer. llama.cpp and vLLM
//! interpret schemas in the same way. Every value of the narrower schema fits the original one.

use serde_json::{Map, Value};

use crate::formats::visit;

/// Keywords under which an object may have to fit several schemas, so that one must leave room for another's
/// properties, or may not fit one of them, so that narrowing it would allow more.
const COMBINING: [&str; 10] = [
    "allOf",
    "oneOf",
    "not",
    "if",
    "dependentSchemas",
    "dependencies",
    "propertyNames",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// Keywords whose schemas apply to the same value; their properties combine with those beside them.
const ELSEWHERE: [&str; 2] = ["anyOf", "$ref"];

/// Keywords that determine the properties.
const PROPERTIES: [&str; 4] = ["properties", "required", "patternProperties", "additionalProperties"];

/// Adds `"additionalProperties": false` to all objects of a schema that name properties. A schema that combines others
/// stays as it is.
pub(crate) fn close(schema: &mut Value) {
    let mut combines = false;
    visit(schema, &mut |keys| {
        let has = |names: &[&str]| names.iter().any(|name| keys.contains_key(*name));
        combines |= has(&COMBINING) || (has(&ELSEWHERE) && has(&PROPERTIES));
        combines |= keys.contains_key("anyOf") && keys.contains_key("$ref");
    });
    if !combines {
        visit(schema, &mut close_object);
    }
}

fn close_object(keys: &mut Map<String, Value>) {
    let Some(properties) = keys.get("properties").and_then(Value::as_object) else { return };
    let required = keys.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let named = required.iter().filter_map(Value::as_str).all(|name| properties.contains_key(name));
    let least = keys.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let open = ["additionalProperties", "patternProperties"].iter().any(|name| keys.contains_key(*name));
    // An object without names is one of any kind.
    if !properties.is_empty() && named && !open && properties.len() as u64 >= least {
        keys.insert("additionalProperties".into(), Value::Bool(false));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn closed(mut schema: Value) -> Value {
        close(&mut schema);
        schema
    }

    #[test]
    fn objects_with_names_have_no_others() {
        let fox = json!({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]});
        let only = json!({
            "type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": false,
        });
        assert_eq!(closed(fox.clone()), only);
        // A property may have a keyword's name, and a value may resemble a schema.
        assert_eq!(
            closed(
                json!({"properties": {"not": fox, "list": {"items": fox}}, "default": {"properties": {"a": 1}}})
            ),
            json!({
                "properties": {"not": only, "list": {"items": only}}, "default": {"properties": {"a": 1}},
                "additionalProperties": false,
            })
        );
        assert_eq!(
            closed(json!({"$defs": {"fox": fox}, "anyOf": [{"$ref": "#/$defs/fox"}, {"type": "null"}]})),
            json!({"$defs": {"fox": only}, "anyOf": [{"$ref": "#/$defs/fox"}, {"type": "null"}]})
        );
    }

    #[test]
    fn what_needs_room_keeps_it() {
        for schema in [
            json!({"type": "object"}),
            json!({"type": "object", "properties": {}}),
            json!({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}),
            json!({"properties": {"a": {}}, "patternProperties": {"^x": {}}}),
            json!({"properties": {"a": {}}, "required": ["b"]}),
            json!({"properties": {"a": {}}, "minProperties": 2}),
            json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]}),
            json!({"oneOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {"const": 1}}}]}),
            json!({"required": ["a"], "anyOf": [{"properties": {"b": {}}}, {"properties": {"a": {}}}]}),
            json!({"$defs": {"a": {"properties": {"a": {}}}}, "$ref": "#/$defs/a", "properties": {"b": {}}}),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }
}
