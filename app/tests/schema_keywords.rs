//! Keywords of JSON Schema on the engine and the embedded model: what is finished validates, and what cannot be enforced is
//! refused by name.

use std::path::Path;

use paguro_backend_conformance::Rng;
use serde_json::{Map, Value, json};

use super::schemas::check;

/// Schemas of a library.
fn recorded(file: &str) -> Map<String, Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/schemas").join(file);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// They are refused: sets of free values.
const REFUSED: [&str; 2] = ["set of strings", "set of integers"];

#[test]
fn schemas_of_libraries_are_followed() {
    let mut schemas = Vec::new();
    for file in ["pydantic.json", "zod.json"] {
        schemas.extend(recorded(file).into_iter().filter(|(name, _)| !REFUSED.contains(&name.as_str())));
    }
    let (names, schemas): (Vec<_>, Vec<_>) = schemas.into_iter().unzip();
    let finished = check(&schemas, None, 2, &mut Rng::new(3), 1.4, 120);
    let ended = finished.iter().filter(|finished| **finished > 0).count();
    let never: Vec<_> =
        names.iter().zip(finished).filter(|(_, finished)| *finished == 0).map(|(name, _)| name).collect();
    println!("no answer came to its end: {never:?}");
    assert!(ended * 5 >= schemas.len() * 4, "{ended} of {}", schemas.len());
}

/// Returns schemas, each with one that its answers fit as well.
#[rustfmt::skip]
fn cases() -> Vec<(Value, Value)> {
    let few = json!({"type": "integer", "minimum": 0, "maximum": 9});
    let object = |names: &[&str]| {
        let properties: Map<_, _> = names.iter().map(|name| ((*name).to_owned(), json!({"type": "boolean"}))).collect();
        json!({"type": "object", "properties": properties, "required": names})
    };
    let closed = |names: &[&str]| { let mut object = object(names); object["additionalProperties"] = false.into(); object };
    let kind = |kind: Value, name: &str| json!({"type": "object", "properties": {"kind": kind, (name): {"type": "boolean"}}, "required": ["kind"]});
    let any = json!(true);
    vec![
        // Types and values.
        (json!({"type": ["boolean", "null"]}), any.clone()),
        (json!({"type": "boolean", "nullable": true}), any.clone()),
        (json!({"const": {"a": [1, 1.5, "é\n"]}}), any.clone()),
        (json!({"enum": ["a", 1, null, {"b": []}]}), any.clone()),
        (json!({"type": "string", "enum": ["a", 1, null]}), json!({"const": "a"})),
        // Numbers.
        (json!({"type": "number", "minimum": 0, "exclusiveMinimum": true, "maximum": 3, "exclusiveMaximum": true}), any.clone()),
        (json!({"type": "number", "minimum": 0, "exclusiveMinimum": false, "maximum": 3}), any.clone()),
        (json!({"type": "integer", "minimum": -3.5e38, "maximum": 5, "multipleOf": 5}), any.clone()),
        // Texts.
        (json!({"type": "string", "minLength": 2.0, "maxLength": 4}), any.clone()),
        (json!({"type": "string", "pattern": "^[a-c\\s]{1,4}$", "format": "no such format"}), any.clone()),
        (json!({"type": "string", "pattern": "^(?=.{3}$)[ab]*$"}), any.clone()),
        (json!({"type": "string", "format": "date", "pattern": "^2"}), any.clone()),
        (json!({"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {"type": "null"}, "maxLength": 4}), any.clone()),
        // Lists.
        (json!({"type": "array", "items": few, "minItems": 1, "maxItems": 3, "uniqueItems": false}), any.clone()),
        (json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [few, {"type": "null"}], "additionalItems": false, "minItems": 2}), json!({"maxItems": 2})),
        (json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [few], "additionalItems": {"type": "null"}, "maxItems": 3}), any.clone()),
        (json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": few, "additionalItems": false, "maxItems": 3}), any.clone()),
        (json!({"type": "array", "prefixItems": [few, few], "items": {"type": "null"}, "maxItems": 4}), any.clone()),
        (json!({"type": "array", "prefixItems": [few], "unevaluatedItems": false}), json!({"maxItems": 1})),
        (json!({"type": "array", "items": {"enum": ["a", "b", "c", 1]}, "uniqueItems": true, "minItems": 2}), any.clone()),
        (json!({"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6, 7, 8]}, "uniqueItems": true, "minItems": 6}), any.clone()),
        (json!({"type": "array", "items": {"type": "boolean"}, "uniqueItems": true}), any.clone()),
        (json!({"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": true, "maxItems": 1}), any.clone()),
        (json!({"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}, few], "items": false, "uniqueItems": true}), any.clone()),
        (json!({"type": "array", "items": {"type": ["boolean", "null"]}, "contains": {"type": "null"}, "maxItems": 3}), any.clone()),
        (json!({"type": "array", "items": few, "contains": {"const": 7}, "minContains": 2, "maxContains": 3, "maxItems": 5}), any.clone()),
        (json!({"type": "array", "items": few, "contains": {"const": 7}, "minContains": 0, "maxItems": 3}), any.clone()),
        (json!({"type": "array", "items": few, "minContains": 2, "maxItems": 3}), any.clone()),
        (json!({"type": "array", "items": few, "contains": {"const": 7}, "minContains": 0, "maxContains": 1, "maxItems": 3}), any.clone()),
        // Objects.
        (object(&["a", "b"]), closed(&["a", "b"])),
        (json!({"type": "object", "properties": {"p": object(&["k"]), "q": {"oneOf": [{"type": "boolean"}, {"type": "null"}]}}, "required": ["p", "q"]}),
            json!({"properties": {"p": closed(&["k"]), "q": {}}, "additionalProperties": false})),
        (json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}, "maxProperties": 2}), any.clone()),
        (json!({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "boolean"}, "required": ["a"]}), any.clone()),
        (json!({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a", "b"]}}, "additionalProperties": few, "minProperties": 1}), any.clone()),
        (json!({"type": "object", "propertyNames": {"pattern": "^[a-c]{1,2}$"}, "additionalProperties": few, "maxProperties": 2}), any.clone()),
        (json!({"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}, "additionalProperties": few, "maxProperties": 2}), any.clone()),
        (json!({"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": few, "maxProperties": 1, "minProperties": 1}), any.clone()),
        (json!({"type": "object", "propertyNames": {"not": {"enum": ["fox"]}}, "additionalProperties": few, "maxProperties": 1}), any.clone()),
        (json!({"type": "object", "properties": {"a": few, "bcd": few}, "propertyNames": {"maxLength": 1}}), json!({"maxProperties": 1})),
        (json!({"type": "object", "patternProperties": {}, "additionalProperties": few, "maxProperties": 1}), any.clone()),
        (json!({"type": "object", "patternProperties": {"^[xy]$": few}, "additionalProperties": false, "maxProperties": 1}), any.clone()),
        (json!({"type": "object", "additionalProperties": few, "minProperties": 1, "maxProperties": 2}), any.clone()),
        (json!({"type": "object", "properties": {"a": few, "b": few, "c": few}, "minProperties": 2}), any.clone()),
        (json!({"type": "object", "properties": {"a": few, "b": few, "c": few}, "maxProperties": 2, "required": ["c"]}), any.clone()),
        (json!({"type": "object", "properties": {"a": few, "b": few, "c": few}, "minProperties": 1, "maxProperties": 2}), any.clone()),
        (json!({"type": "object", "properties": {"a": few, "b": few}, "additionalProperties": {"type": "null"}, "minProperties": 2, "maxProperties": 3}), any.clone()),
        (json!({"type": "object", "properties": {"a": few, "b": few, "c": few}, "dependentRequired": {"a": ["b", "c"]}}), any.clone()),
        (json!({"type": "object", "properties": {"a": few}, "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}}), any.clone()),
        (json!({"type": "object", "properties": {"a": few}, "dependentSchemas": {"a": {"properties": {"b": few}, "required": ["b"]}}}), any.clone()),
        (json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"a": few, "b": few}, "dependencies": {"a": ["b"], "b": {"properties": {"a": {"minimum": 3}}}}}), any.clone()),
        (json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": few, "maxProperties": 2}), any.clone()),
        (json!({"type": "object", "properties": {"a": few}, "unevaluatedProperties": false}), any.clone()),
        (json!({"allOf": [object(&["a"]), object(&["b"])], "unevaluatedProperties": false}), closed(&["a", "b"])),
        (json!({"type": "object", "properties": {"a": few}, "anyOf": [object(&["b"]), object(&["c"])], "unevaluatedProperties": false}), any.clone()),
        // Combinations.
        (json!({"allOf": [object(&["a"]), object(&["b"])]}), closed(&["a", "b"])),
        (json!({"$ref": "#/$defs/base", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "$defs": {"base": object(&["a"])}}), closed(&["a", "b"])),
        (json!({"anyOf": [object(&["a"]), object(&["b"])]}), json!({"anyOf": [closed(&["a"]), closed(&["b"])]})),
        (json!({"properties": {"id": few}, "required": ["id"], "type": "object", "anyOf": [object(&["a"]), object(&["b"])]}), json!({"maxProperties": 2})),
        (json!({"oneOf": [kind(json!({"const": "fox"}), "red"), kind(json!({"const": "owl"}), "wise")]}), any.clone()),
        (json!({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "kind", "mapping": {"fox": "#/$defs/a"}},
            "$defs": {"a": kind(json!({"enum": ["fox"]}), "red"), "b": kind(json!({"enum": ["owl", "hen"]}), "wise")}}), any.clone()),
        (json!({"oneOf": [object(&["a"]), object(&["b"])]}), json!({"maxProperties": 1})),
        (json!({"type": "object", "properties": {"a": few, "b": few}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}), json!({"maxProperties": 1})),
        (json!({"oneOf": [few, {"type": "integer", "minimum": 20, "maximum": 29}, {"type": "string", "maxLength": 3}, {"type": "string", "minLength": 5, "maxLength": 6}]}), any.clone()),
        (json!({"oneOf": [{"enum": ["a", "b", 1]}, {"enum": ["b", "c", 1]}]}), json!({"enum": ["a", "c"]})),
        (json!({"type": "string", "maxLength": 3, "not": {"enum": ["a", "fox", ""]}}), any.clone()),
        (json!({"type": "integer", "minimum": 0, "maximum": 3, "not": {"const": 2}}), any.clone()),
        (json!({"type": ["boolean", "null", "integer"], "not": {"type": ["integer", "null"]}}), json!({"type": "boolean"})),
        (json!({"type": "object", "properties": {"a": few, "b": few}, "not": {"required": ["a", "b"]}}), any.clone()),
        (json!({"anyOf": [{"type": "null"}, {"not": {}}]}), json!({"type": "null"})),
        (json!({"type": "object", "properties": {"pays": {"enum": ["cash", "card"]}, "number": few}, "required": ["pays"],
            "if": {"properties": {"pays": {"const": "card"}}}, "then": {"required": ["number"]}, "else": {"properties": {"number": false}}}), any.clone()),
        (json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "if": {"required": ["a"]}, "then": {"properties": {"b": few}, "required": ["b"]}}), any.clone()),
        (json!({"type": "boolean", "if": {"type": "null"}}), any.clone()),
        (json!({"type": "boolean", "then": {"type": "null"}, "else": false}), any.clone()),
        // References.
        (json!({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a b/c": few}, "type": "array", "items": {"$ref": "#/definitions/a%20b~1c"}, "maxItems": 2}), any.clone()),
        (json!({"$id": "https://example.com/root.json", "type": "array", "maxItems": 2, "items": {"$ref": "part.json"}, "$defs": {"p": {"$id": "part.json", "$ref": "#/$defs/q", "$defs": {"q": few}}}}), any.clone()),
        (json!({"type": "array", "maxItems": 2, "items": {"$ref": "#part"}, "$defs": {"p": {"$anchor": "part", "type": "boolean"}}}), any.clone()),
        (json!({"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://example.com/s", "type": "array", "maxItems": 2, "items": {"$ref": "#part"}, "definitions": {"p": {"id": "#part", "type": "boolean"}}}), any.clone()),
        (json!({"$dynamicAnchor": "node", "type": "object", "properties": {"leaf": {"type": "boolean"}, "next": {"type": "array", "items": {"$dynamicRef": "#node"}, "maxItems": 1}}, "required": ["leaf"]}), any.clone()),
        (json!({"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": true, "type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$recursiveRef": "#"}]}}, "required": ["next"]}), any.clone()),
        (json!({"type": "object", "properties": {"next": {"allOf": [{"$ref": "#"}, {"type": "object", "properties": {"a": few}}]}, "a": few}, "required": ["a"]}), any.clone()),
        // Annotations.
        (json!({"type": "boolean", "title": "t", "description": "d", "default": 3, "examples": [4], "example": 5, "deprecated": true, "readOnly": true, "writeOnly": true,
            "$comment": "c", "$vocabulary": {}, "externalDocs": {}, "xml": {}, "x-order": 1, "optional": true}), any),
    ]
}

/// Adds the keywords of a schema; names of properties are among them.
fn keys(schema: &Value, found: &mut Vec<String>) {
    match schema {
        Value::Object(entries) => entries.iter().for_each(|(key, value)| {
            found.push(key.clone());
            keys(value, found);
        }),
        Value::Array(values) => values.iter().for_each(|value| keys(value, found)),
        _ => {}
    }
}

#[test]
fn finished_answers_validate_for_each_keyword() {
    let cases = cases();
    let (schemas, others): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    let finished = check(&schemas, Some(&others), 4, &mut Rng::new(5), 1.8, 100);
    let never: Vec<_> = schemas.iter().zip(finished).filter(|(_, finished)| *finished == 0).collect();
    assert!(never.is_empty(), "no answer came to its end: {never:#?}");
    // Each keyword of the documentation has a case.
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/schemas.md");
    let text = std::fs::read_to_string(file).unwrap();
    let mut found = Vec::new();
    schemas.iter().for_each(|schema| keys(schema, &mut found));
    let listed = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let missing: Vec<_> =
        listed.filter(|name| *name != "x-guidance" && !found.iter().any(|key| key == name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
