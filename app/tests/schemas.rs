//! Random JSON schemas with random seeds, on the engine and the embedded model: every finished answer validates.
//! `PAGURO_SCHEMAS` sets their number (60), `PAGURO_SCHEMAS_SEED` the seed (1).

use std::{env, path::Path};

use jsonschema::Draft;
use paguro_backend::SamplingParams;
use paguro_backend_conformance::Rng;
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_engine::{Engine, EngineOptions, Event, FinishReason, Generation, Grammar, Request};
use paguro_model::{LoadOptions, Model, tokenizer::SpecialTokens};
use serde_json::{Map, Value, json};

const FORMATS: [&str; 10] =
    ["date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid", "email", "hostname", "uri"];

/// A schema of at most so many levels; what it allows is bounded, so that a model comes to its end.
fn schema(rng: &mut Rng, levels: usize) -> Value {
    let kinds = if levels == 0 { 10 } else { 20 };
    match rng.below(kinds) {
        0 => json!({"type": "boolean"}),
        1 => json!({"type": "null"}),
        2 => {
            let least = rng.below(50) as i64 - 25;
            json!({"type": "integer", "minimum": least, "maximum": least + rng.below(1000) as i64})
        }
        3 => json!({"type": "number", "minimum": -1.5, "exclusiveMaximum": rng.below(100)}),
        4 => json!({"type": "string", "minLength": rng.below(3), "maxLength": 3 + rng.below(12)}),
        5 => {
            let patterns = ["^[a-z]{2,6}$", "^(fox|owl) [0-9]{1,3}$", "^[A-Z][a-z]{1,8}(-[a-z]{1,4})?$"];
            json!({"type": "string", "pattern": patterns[rng.below(patterns.len())]})
        }
        6 => json!({"type": "string", "format": FORMATS[rng.below(FORMATS.len())]}),
        7 => {
            let values =
                [json!("fox"), json!("é\"\n"), json!(7), json!(null), json!(true), json!({"a": [1, "b"]})];
            let count = 1 + rng.below(values.len());
            if count == 1 {
                json!({"const": values[rng.below(values.len())]})
            } else {
                json!({"enum": values[..count]})
            }
        }
        8 => {
            let step = 1 + rng.below(9) as i64;
            json!({"type": "integer", "exclusiveMinimum": -100, "maximum": 100, "multipleOf": step})
        }
        9 => {
            let (least, most) = (rng.below(3), 3 + rng.below(9));
            json!({"type": ["string", "null", "integer"], "minLength": least, "maxLength": most, "minimum": 0, "maximum": 99})
        }
        10..13 => object(rng, levels),
        13 => {
            let names = ["^[a-c]{1,3}$", "^x-"];
            let values = schema(rng, levels - 1);
            json!({
                "type": "object", "patternProperties": {names[rng.below(2)]: values}, "maxProperties": rng.below(4),
                "additionalProperties": false,
            })
        }
        14 => {
            let most = rng.below(3);
            json!({"type": "object", "additionalProperties": schema(rng, levels - 1), "maxProperties": most})
        }
        15 => json!({"oneOf": [
            {"type": "string", "maxLength": rng.below(9)}, {"type": "boolean"}, object(rng, levels),
        ]}),
        16 => json!({"type": "object", "maxProperties": 2, "allOf": [
            {"properties": {"kind": {"enum": ["fox", "owl"]}}, "required": ["kind"]},
            {"properties": {"kind": {"minLength": 2}, "part": schema(rng, levels - 1)}, "required": ["part"]},
        ]}),
        17 => {
            let least = rng.below(3);
            json!({"type": "array", "items": schema(rng, levels - 1), "minItems": least, "maxItems": least + rng.below(3)})
        }
        18 => {
            let items: Vec<_> = (0..1 + rng.below(3)).map(|_| schema(rng, levels - 1)).collect();
            json!({"type": "array", "minItems": items.len(), "prefixItems": items, "items": false})
        }
        _ => {
            let ways: Vec<_> = (0..2 + rng.below(2)).map(|_| schema(rng, levels - 1)).collect();
            json!({"anyOf": ways})
        }
    }
}

fn object(rng: &mut Rng, levels: usize) -> Value {
    let names = ["name", "age", "città", "a b", "x\"y", "tags", "next"];
    let mut properties = Map::new();
    for _ in 0..1 + rng.below(4) {
        properties.insert(names[rng.below(names.len())].into(), schema(rng, levels - 1));
    }
    let required: Vec<_> = properties.keys().filter(|_| rng.below(3) > 0).cloned().collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// A whole document: sometimes with a definition that it refers to.
fn document(rng: &mut Rng) -> Value {
    if rng.below(5) > 0 {
        let levels = 1 + rng.below(3);
        return schema(rng, levels);
    }
    let part = schema(rng, 1);
    json!({
        "$defs": {"part": part},
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/part"}, "second": {"$ref": "#/$defs/part"}, "kind": schema(rng, 1)},
        "required": ["first", "second"],
        "additionalProperties": false,
    })
}

/// Text and reason of an answer.
fn read(mut generation: Generation) -> (String, FinishReason) {
    let mut text = String::new();
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Token { text: more, .. } => text += &more,
            Event::Finished { text: more, reason, .. } => return (text + &more, reason),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    panic!("no end");
}

/// Asks the embedded model for `seeds` answers to each schema, all at once, and checks those that come to their end,
/// also with `others`. Returns their number for each schema.
pub fn check(
    schemas: &[Value],
    others: Option<&[Value]>,
    seeds: usize,
    rng: &mut Rng,
    temperature: f32,
    max_tokens: usize,
) -> Vec<usize> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf");
    let model = Model::open(&file, &LoadOptions { max_context: Some(1024) }).unwrap();
    let engine = Engine::start(&Cpu::new(CpuOptions::default()), &model, EngineOptions::default()).unwrap();
    let handle = engine.handle();
    let mut problems = Vec::new();
    let mut generations = Vec::new();
    for (i, schema) in schemas.iter().enumerate() {
        let constraint = match handle.compile(&Grammar::JsonSchema(schema.clone())) {
            Ok(constraint) => constraint,
            Err(error) => {
                problems.push(format!("{error}: {schema}"));
                continue;
            }
        };
        for _ in 0..seeds {
            let text = format!("<|user|>\nTell me about number {i}<|end|>\n<|assistant|>\n");
            let sampling =
                SamplingParams { temperature, seed: rng.below(1 << 30) as u64, ..SamplingParams::default() };
            let request = Request {
                constraint: Some(constraint.clone()),
                sampling,
                max_tokens: Some(max_tokens),
                ..Request::new(model.tokenizer.encode_prompt(&text, SpecialTokens::Parse))
            };
            generations.push((i, handle.generate(request).unwrap()));
        }
    }
    let mut finished = vec![0; schemas.len()];
    for (i, generation) in generations {
        let (text, reason) = read(generation);
        if let FinishReason::Length = reason {
            continue;
        }
        finished[i] += 1;
        let other = others.map(|others| validate(&others[i], &text));
        problems.extend(validate(&schemas[i], &text).and(other.unwrap_or(Ok(()))).err());
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    handle.check_pages().unwrap().unwrap();
    finished
}

/// Validates an answer by the standard, in the draft that the schema names.
pub fn validate(schema: &Value, text: &str) -> Result<(), String> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("{error}: {text:?} of {schema}"))?;
    let mut standard = schema.clone();
    let is_old = of_openapi(&mut standard);
    let mut options = jsonschema::options().should_validate_formats(true);
    if is_old {
        options = options.with_draft(Draft::Draft4);
    }
    let validator = options.build(&standard);
    let validator = validator.map_err(|error| format!("{error}: {schema}"))?;
    validator.validate(&value).map_err(|error| format!("{error}: {text} of {schema}"))
}

/// Writes OpenAPI 3.0's `nullable` as the standard has it. Returns true if a bound is exclusive as in draft 4.
fn of_openapi(schema: &mut Value) -> bool {
    match schema {
        Value::Object(keys) => {
            if keys.get("nullable") == Some(&json!(true)) && keys.get("type").is_some_and(Value::is_string) {
                keys["type"] = json!([keys["type"], "null"]);
            }
            let flags = ["exclusiveMinimum", "exclusiveMaximum"];
            let is_flag = flags.iter().any(|flag| keys.get(*flag).is_some_and(Value::is_boolean));
            keys.values_mut().fold(is_flag, |found, value| of_openapi(value) || found)
        }
        Value::Array(values) => values.iter_mut().map(of_openapi).fold(false, |found, is| found | is),
        _ => false,
    }
}

/// Checks that nearly all answers came to their end.
fn check_ends(schemas: &[Value], rng: &mut Rng, temperature: f32) {
    let finished: usize = check(schemas, None, 1, rng, temperature, 500).iter().sum();
    let count = schemas.len();
    println!("{finished} of {count} answers came to their end");
    assert!(finished * 10 >= count * 9, "only {finished} of {count} answers came to their end");
}

fn number(name: &str, default: usize) -> usize {
    env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn finished_answers_validate() {
    let mut rng = Rng::new(number("PAGURO_SCHEMAS_SEED", 1) as u64);
    let schemas: Vec<_> = (0..number("PAGURO_SCHEMAS", 60)).map(|_| document(&mut rng)).collect();
    check_ends(&schemas, &mut rng, 1.0);
}

/// So hot that every character that a format allows comes up.
#[test]
fn formats_are_as_validators_have_them() {
    let mut rng = Rng::new(number("PAGURO_SCHEMAS_SEED", 1) as u64);
    let each = number("PAGURO_SCHEMAS", 60) / FORMATS.len();
    let schemas = FORMATS.iter().flat_map(|format| vec![json!({"type": "string", "format": format}); each]);
    check_ends(&schemas.collect::<Vec<_>>(), &mut rng, 3.0);
}
