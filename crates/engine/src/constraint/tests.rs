//! The largest grammars that the bounds allow are compiled within a part of the compiler's stack, and are dropped and
//! cloned on any stack.

use std::{
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use paguro_model::{LoadOptions, Model};
use serde_json::{Value, json};

use super::{Grammar, Vocabulary};

/// Grammars as large as the bounds allow, and of every shape that makes a compiler recurse or allocate.
fn large_grammars() -> Vec<(&'static str, Grammar)> {
    let names = |count: usize| (0..count).map(|i| format!("property_{i}"));
    let object = |properties: usize, required: usize| {
        let list: serde_json::Map<_, _> =
            names(properties).map(|name| (name, json!({"type": "null"}))).collect();
        json!({"type": "object", "properties": list, "required": names(required).collect::<Vec<_>>()})
    };
    let chain = |links: usize, link: &dyn Fn(Value) -> Value| {
        let mut list = serde_json::Map::new();
        for i in 0..links {
            list.insert(format!("a{i}"), link(json!({"$ref": format!("#/$defs/a{}", i + 1)})));
        }
        list.insert(format!("a{links}"), json!({"type": "null"}));
        json!({"$defs": list, "$ref": "#/$defs/a0"})
    };
    let rules = |count: usize, rule: &dyn Fn(usize) -> String, last: &str| {
        let rules: String = (0..count).map(|i| rule(i) + "\n").collect();
        format!("start: r0\n{rules}{last}")
    };
    let nested = |open: &str, inner: &str, close: &str| open.repeat(95) + inner + &close.repeat(95);
    let schemas = [
        ("chain", chain(998, &|next| next)),
        ("chain of properties", chain(900, &|next| json!({"properties": {"x": next}, "required": ["x"]}))),
        ("chain of allOf", chain(900, &|next| json!({"allOf": [next, {"type": "null"}]}))),
        ("chain of anyOf", chain(900, &|next| json!({"anyOf": [next, {"type": "integer"}]}))),
        ("chain of oneOf", chain(900, &|next| json!({"oneOf": [next, {"type": "integer"}]}))),
        ("chain of items", chain(900, &|next| json!({"items": next, "type": "array"}))),
        ("chain of prefix items", chain(900, &|next| json!({"prefixItems": [next], "type": "array"}))),
        ("chain of patterns", chain(900, &|next| json!({"patternProperties": {"^x": next}}))),
        ("chain of others", chain(900, &|next| json!({"additionalProperties": next}))),
        ("optional", object(2000, 0)),
        ("required", object(2000, 2000)),
        ("named nowhere", object(0, 2000)),
        ("many objects", json!({"anyOf": vec![object(20, 10); 160]})),
        (
            "enum",
            json!({"enum": (0..5000).map(|i| format!("value {i} of many that are alike")).collect::<Vec<_>>()}),
        ),
        ("enum of objects", json!({"enum": (0..4000).map(|i| json!({"a": i})).collect::<Vec<_>>()})),
        ("long constants", json!({"enum": ["x".repeat(100_000) + "a", "x".repeat(100_000) + "b"]})),
        ("anyOf", json!({"anyOf": (0..4000).map(|i| json!({"const": i})).collect::<Vec<_>>()})),
        ("oneOf", json!({"oneOf": (0..4000).map(|i| json!({"const": i})).collect::<Vec<_>>()})),
        ("allOf", json!({"allOf": (0..4000).map(|i| json!({"minimum": i})).collect::<Vec<_>>()})),
        (
            "patterns",
            json!({"patternProperties": names(500).map(|name| (format!("^{name}"), json!({}))).collect::<serde_json::Map<_, _>>()}),
        ),
        ("lengths", json!({"type": "string", "minLength": 100_000, "maxLength": 4_000_000_000u64})),
        ("items", json!({"type": "array", "minItems": 1_000_000_000, "maxItems": 4_000_000_000u64})),
        ("more items", json!({"type": "array", "minItems": u64::MAX, "items": object(100, 100)})),
        (
            "few properties",
            json!({"type": "object", "minProperties": 1_000_000_000, "maxProperties": u64::MAX}),
        ),
        ("range", json!({"type": "number", "minimum": -1e308, "maximum": 1e308, "multipleOf": 1e-9})),
        ("small range", json!({"type": "number", "minimum": 1e-308, "maximum": 1.1e-308})),
        ("multiples", json!({"type": "integer", "multipleOf": 4_294_967_291u64})),
        ("pattern", json!({"type": "string", "pattern": "^(a{1000}){1000}$"})),
        ("nested pattern", json!({"type": "string", "pattern": nested("(a|", "b", ")*")})),
        ("wide pattern", json!({"type": "string", "pattern": "[a-z]{3}|".repeat(20_000) + "x"})),
        ("deep", serde_json::from_str(&nested("{\"items\":", "{}", "}")).unwrap()),
    ];
    let mut grammars: Vec<_> =
        schemas.into_iter().map(|(name, schema)| (name, Grammar::JsonSchema(schema))).collect();
    let lark = [
        ("rules", rules(1900, &|i| format!("r{i}: \"a\" r{}", i + 1), "r1900: \"b\"")),
        (
            "nested rules",
            rules(
                39,
                &|i| format!("r{i}: {}", nested("(\"a\" ", &format!("r{}", i + 1), ")?")),
                "r39: \"b\"",
            ),
        ),
        ("terminals", rules(1900, &|i| format!("T{i}: \"a\" T{}", i + 1), "r0: T0\nT1900: \"b\"")),
        ("negations", format!("start: T\nT: {}/b/", "~/a/ & ".repeat(5000))),
        (
            "schemas",
            (0..900)
                .map(|i| format!("r{i}: %json {{\"type\": \"integer\", \"minimum\": {i}}}\n"))
                .collect::<String>()
                + &format!("start: {}", (0..900).map(|i| format!("r{i}")).collect::<Vec<_>>().join(" | ")),
        ),
    ];
    grammars.extend(lark.map(|(name, lark)| (name, Grammar::Lark(lark))));
    let list = |count: usize, item: &dyn Fn(usize) -> String, between: &str| {
        (0..count).map(item).collect::<Vec<_>>().join(between)
    };
    let recursive = |rest: String| format!("root ::= \"(\" root \")\" root | {rest}");
    let gbnf = [
        ("GBNF, words", recursive(list(4_000, &|i| format!("\"word{i}\""), " | ") + "\nx ::= root")),
        (
            "GBNF, overlaps",
            recursive(list(1_500, &|i| format!("[a-{}]*", char::from(b'b' + (i % 20) as u8)), " ")),
        ),
        ("GBNF, ambiguous", recursive(list(2_000, &|i| format!("\"a\" [a-z]* \"{i}\" root"), " | "))),
        ("GBNF, repetitions", recursive(format!("{}[ab]{}", "(".repeat(40), "){32}".repeat(40)))),
        ("GBNF, doubling", {
            let rules = list(60, &|i| format!("a{i} ::= a{} a{}", i + 1, i + 1), "\n");
            format!("{}\n{rules}\na60 ::= [ab]+", recursive("a0 \"!\"".into()))
        }),
        ("GBNF, rules", {
            let rules = list(4_500, &|i| format!("a{i} ::= [ab]* a{} \"c\" | root", i + 1), "\n");
            format!("{}\n{rules}\na4500 ::= [ab]+", recursive("a0 \"!\"".into()))
        }),
        ("GBNF, nothing", "root ::= root | a\na ::= root a".into()),
    ];
    grammars.extend(gbnf.map(|(name, gbnf)| (name, Grammar::Gbnf(gbnf))));
    let regexes = [
        ("nested groups", nested("(a|", "b", ")+")),
        ("alternatives", "abc|".repeat(50_000)),
        ("repetitions", "((((a{100}){100}){100}){100})".into()),
        ("classes", r"\w{1,1000}".into()),
        ("text", "x".repeat(250_000)),
    ];
    grammars.extend(regexes.map(|(name, regex)| (name, Grammar::Regex(regex))));
    grammars
}

#[test]
fn the_largest_grammars_are_compiled_or_refused_soon() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales/tales-Q8_0.gguf");
    let model = Model::open(&file, &LoadOptions { max_context: Some(64) }).unwrap();
    let vocabulary = Vocabulary::new(&model.tokenizer, model.program.vocab, &model.stop_tokens).unwrap();
    let vocabulary = Arc::new(vocabulary);
    vocabulary.compile(&Grammar::JsonObject).unwrap();
    for (name, grammar) in large_grammars() {
        let begin = Instant::now();
        let compiled = vocabulary.compile(&grammar);
        let took = begin.elapsed();
        // A hundred times the usual duration. A slower grammar would block a thread.
        assert!(took < Duration::from_secs(60), "{name} took {took:?}");
        if let Ok(constraint) = compiled {
            // Later users of the grammar have a stack as other threads have.
            let small = thread::Builder::new().stack_size(128 << 10);
            let clone = small.spawn(move || drop(constraint.clone())).unwrap();
            clone.join().unwrap();
        }
    }
}
