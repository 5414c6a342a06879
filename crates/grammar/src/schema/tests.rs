use std::{fs, path::Path};

use regex::Regex;
use serde_json::{Value, json};

use super::{formats, keywords, keywords::Effect, narrow, pattern};

fn narrowed(schema: Value) -> Value {
    narrow(&schema).unwrap_or_else(|problem| panic!("{problem}: {schema}"))
}

#[test]
fn the_documentation_lists_every_keyword_and_format() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schemas.md");
    let text = fs::read_to_string(file).unwrap();
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("| `")).collect();
    let expected: Vec<String> = keywords::KEYWORDS
        .iter()
        .map(|keyword| {
            let effect = match keyword.effect {
                Effect::Enforced => "enforced",
                Effect::InPart => "in part",
                Effect::Name => "names a schema",
                Effect::Annotation => "annotation",
            };
            format!("| `{}` | {} | {effect} | {} |", keyword.name, keyword.drafts, keyword.note)
        })
        .collect();
    assert_eq!(rows, expected);
    for format in formats::ALL {
        assert!(text.contains(&format!("`{format}`")), "{format}");
        Regex::new(&formats::pattern(format).unwrap()).unwrap();
    }
}

#[test]
fn objects_are_closed_where_they_stand() {
    let fox = json!({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]});
    let mut only = fox.clone();
    only["additionalProperties"] = false.into();
    assert_eq!(narrowed(fox.clone()), only);
    // A combination elsewhere is no reason to leave an object open.
    let either = json!({"oneOf": [{"type": "boolean"}, {"type": "null"}]});
    assert_eq!(
        narrowed(
            json!({"properties": {"not": fox, "list": {"items": fox}, "either": either}, "default": {"properties": {}}})
        ),
        json!({
            "properties": {"not": only, "list": {"items": only}, "either": {"$ref": "#/$defs/1"}},
            "additionalProperties": false, "$defs": {"1": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
        })
    );
    // Open objects stay open.
    for schema in [
        json!({"type": "object"}),
        json!({"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "null"}}),
        json!({"properties": {"a": {"type": "null"}}, "patternProperties": {"^x": {"type": "null"}}}),
        json!({"properties": {"a": {"type": "null"}}, "required": ["b"]}),
    ] {
        assert_eq!(narrowed(schema.clone()), schema);
    }
}

#[test]
fn parts_are_closed_together_and_alternatives_each() {
    let part =
        |name: &str| json!({"type": "object", "properties": {name: {"type": "null"}}, "required": [name]});
    assert_eq!(
        narrowed(json!({"allOf": [part("a"), part("b")]})),
        json!({"allOf": [part("a"), part("b"), {
            "properties": {"a": true, "b": true}, "additionalProperties": false, "type": ["object"],
        }]})
    );
    let mut only = [part("a"), part("b")];
    only.iter_mut().for_each(|part| part["additionalProperties"] = false.into());
    let text = narrowed(json!({"oneOf": [part("a"), part("b")]})).to_string();
    assert!(text.contains(&only[0].to_string()) && text.contains(&only[1].to_string()), "{text}");
    assert_eq!(narrowed(json!({"anyOf": [part("a"), part("b")]})), json!({"anyOf": only}));
}

#[test]
fn what_cannot_be_enforced_is_named_with_its_place() {
    for (schema, problem) in [
        (
            json!({"properties": {"a": {"items": {"type": "string"}, "uniqueItems": true}}}),
            "`uniqueItems` at `properties.a`",
        ),
        (json!({"not": {"pattern": "a"}}), "`not` is supported for"),
        (json!({"if": {"pattern": "a"}, "then": {"maxLength": 3}}), "`if` is supported where"),
        (json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "`oneOf`: a value may fit"),
        (
            json!({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object"}),
            "no value fits all of its parts",
        ),
        (json!({"minProperties": 2, "type": "object"}), "`minProperties` is 2, and names are free"),
        (json!({"propertyNames": {"pattern": "^a", "maxLength": 3}}), "`propertyNames`"),
        (
            json!({"items": {"$ref": "https://example.com/a.json"}}),
            "`$ref` at `items`: `https://example.com/a.json` is in another document",
        ),
        (json!({"items": {"$ref": "#/$defs/none"}}), "leads to no part"),
        (json!({"items": {"pattern": "(?!a)b"}}), "`pattern` at `items`: look-around"),
        (json!({"pattern": r"\bfox"}), "word boundary"),
        (json!({"type": "text"}), "`type` is \"text\"; it should be one or several of null"),
        (json!({"properties": {"a": {"enum": []}}}), "`enum` at `properties.a` is empty"),
        (json!({"properties": {"a": {"minLength": -1}}}), "`minLength` at `properties.a` is -1"),
        (json!({"properties": {"a": {"required": true}}}), "`required` at `properties.a` is true"),
        (json!({"properties": {"a": 3}}), "`properties.a` is no schema"),
        (
            json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}),
            "leads back to itself",
        ),
        (json!({"contains": {"pattern": "a"}, "maxContains": 1}), "`maxContains` is supported where"),
        (json!({"x-guidance": {}}), "`x-guidance` is not supported"),
        (
            json!({"type": "object", "properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}, "anyOf": [{"$ref": "#"}]}]}),
            "levels deep, references followed",
        ),
        (json!(false), "`false` allows nothing"),
        (
            json!({"dependentRequired": (0..12).map(|i| (format!("a{i}"), json!(["b"]))).collect::<serde_json::Map<_, _>>()}),
            "more than 512 combinations",
        ),
    ] {
        let answer = narrow(&schema).expect_err(&schema.to_string());
        assert!(answer.contains(problem), "{answer}: {schema}");
    }
}

#[test]
fn patterns_are_those_of_ecma() {
    for (pattern, taken, refused) in [
        (r"^.$", &["a", "é"][..], &["\n", "\r", "\u{2028}", ""][..]),
        (r"^\s\S$", &[" a"], &["\u{85}a", " \u{feff}"]),
        (r"^[[\s]$", &["[", " "], &["a", "]"]),
        (r"^[^]$", &["\n", "a"], &[""]),
        (r"^[\s\S]{2}$", &["\n1"], &["a"]),
        (r"^[&&~-]+$", &["&~-"], &["a"]),
    ] {
        let rewritten = pattern::rewrite(pattern, None).unwrap().all;
        let regex = Regex::new(&rewritten[0]).unwrap();
        assert!(taken.iter().all(|text| regex.is_match(text)), "{rewritten:?}");
        assert!(!refused.iter().any(|text| regex.is_match(text)), "{rewritten:?}");
    }
    assert_eq!(pattern::rewrite("^(?=.{3}$)[ab]*$", None).unwrap().all.len(), 2);
    let others = Regex::new(&pattern::other_than(&["fox", "fog", "f"]).unwrap()).unwrap();
    for (text, taken) in [
        ("", true),
        ("f", false),
        ("fo", true),
        ("fox", false),
        ("fog", false),
        ("foxy", true),
        ("x\n", true),
    ] {
        assert_eq!(others.is_match(text), taken, "{text:?}");
    }
}
