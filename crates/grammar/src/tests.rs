//! The largest grammars that the bounds allow are compiled within a part of the compiler's stack, and are dropped and
//! cloned on any stack.

use std::{
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use llguidance::api::TopLevelGrammar;
use paguro_model::{LoadOptions, Model};
use serde_json::{Value, json};

use super::{Grammar, GrammarError, TokenText, Vocabulary, bounds::MAX_TEXT};

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
        ("patterns of names", {
            let patterns = (0..100).map(|i| (format!("^{i}$"), json!({}))).collect::<serde_json::Map<_, _>>();
            json!({"patternProperties": patterns})
        }),
        ("allOf, patterns", {
            json!({"type": "string", "allOf": (0..50).map(|i| json!({"pattern": i.to_string()})).collect::<Vec<_>>()})
        }),
        ("allOf, products", {
            let any: Vec<_> =
                (0..200).map(|i| json!({"properties": {format!("p{i}"): {"maxLength": i}}})).collect();
            json!({"allOf": [{"anyOf": any}, {"anyOf": any}, {"anyOf": any}]})
        }),
        ("counted properties", {
            let mut object = object(100, 0);
            object["minProperties"] = json!(1);
            object["additionalProperties"] = json!(false);
            object
        }),
        ("remainders", json!({"type": "integer", "multipleOf": 9973, "minimum": -7})),
        ("many remainders", {
            let list: serde_json::Map<_, _> = (0..2)
                .map(|i| (format!("p{i}"), json!({"type": "integer", "multipleOf": 9967 + 6 * i})))
                .collect();
            json!({"properties": list})
        }),
        ("dates", {
            let list: serde_json::Map<_, _> = (0..1500)
                .map(|i| (format!("p{i}"), json!({"type": "string", "format": "date-time", "maxLength": i})))
                .collect();
            json!({"properties": list})
        }),
        ("rings", {
            let ring = |name: &str, links: usize| -> serde_json::Map<_, _> {
                let next = |i: usize| json!({"properties": {"x": {"$ref": format!("#/$defs/{name}{}", (i + 1) % links)}}});
                (0..links).map(|i| (format!("{name}{i}"), next(i))).collect()
            };
            let mut list = ring("a", 97);
            list.extend(ring("b", 89));
            json!({"$defs": list, "allOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}]})
        }),
    ];
    let mut grammars: Vec<_> =
        schemas.into_iter().map(|(name, schema)| (name, Grammar::JsonSchema(schema))).collect();
    let lark = [
        ("rules", rules(990, &|i| format!("r{i}: \"a\" r{}", i + 1), "r990: \"b\"")),
        (
            "nested rules",
            rules(
                10,
                &|i| format!("r{i}: {}", nested("(\"a\" ", &format!("r{}", i + 1), ")?")),
                "r10: \"b\"",
            ),
        ),
        ("terminals", rules(990, &|i| format!("T{i}: \"a\" T{}", i + 1), "r0: T0\nT990: \"b\"")),
        ("negations", format!("start: T\nT: {}/b/", "~/a/ & ".repeat(50))),
        ("intersections", {
            let parts: Vec<_> = (0..50).map(|i| format!("/.*{i}.*/")).collect();
            format!("start: T\nT: {}", parts.join(" & "))
        }),
        ("alternatives", format!("start: {}\"b\"", "\"a\"|".repeat(4999))),
        ("words", {
            let words: Vec<_> = (0..20_000).map(|i| format!("\"{i}\"")).collect();
            format!("start: T\nT: {}", words.join("|"))
        }),
        ("optional parts", format!("start: {}\nx: \"a\"", "x? ".repeat(1000))),
        ("optional parts of a terminal", format!("start: T\nT: {}\nX: /[a-y]/", "X? ".repeat(1000))),
        ("products", {
            let rules: Vec<_> =
                (0..12).map(|i| format!("T{i}:{}", format!(" T{}", i + 1).repeat(8))).collect();
            format!("start: T0\n{}\nT12: /[a-z]?[b-y]?/", rules.join("\n"))
        }),
        ("doubling", {
            let rules: Vec<_> = (0..990).map(|i| format!("T{i}: T{0} T{0}", i + 1)).collect();
            format!("start: T0\n{}\nT990: \"b\"", rules.join("\n"))
        }),
        ("nested repetitions", format!("start: {}x{}\nx: \"a\"", "(".repeat(25), "{1,1000000})".repeat(25))),
        ("substring", format!("start: %regex {{\"substring_chars\": \"{}\"}}", "abc ".repeat(50_000))),
        ("itself", "start: \"a\" @lark_grammar".into()),
        ("only itself", "start: @lark_grammar".into()),
        ("template", format!("start: {}", "a{".repeat(50_000))),
        ("nested grammars", format!("start: {}\"a\"{}", "%lark { start: ".repeat(40), "}".repeat(40))),
        ("conditions", format!("start: a::0\na::_: \"x\" %if {}true{}", "not(".repeat(90), ")".repeat(90))),
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
        ("optional letters", "[a-y]?".repeat(1000)),
        ("optional sets", (0..1000).map(|i| format!("[a-{}]*", char::from(b'b' + (i % 20) as u8))).collect()),
        ("sets", (0..500).map(|i| format!("[\\p{{L}}\\x{{{:x}}}]", 0x2000 + i)).collect()),
        ("any case", r"(?i:[\p{L}])".repeat(500)),
        ("infixes", (0..5000).map(|i| format!("[ab]*a[ab]{{{i}}}|")).take(450).collect()),
        ("a break out of the expression", "a/\nx: %json {} #".into()),
    ];
    grammars.extend(regexes.map(|(name, regex)| (name, Grammar::Regex(regex))));
    grammars
}

fn vocabulary() -> Arc<Vocabulary> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales/tales-Q8_0.gguf");
    let model = Model::open(&file, &LoadOptions { max_context: Some(64) }).unwrap();
    let tokens = (0..model.program.vocab as u32).map(|token| TokenText {
        bytes: model.tokenizer.token_bytes(token),
        is_control: model.tokenizer.is_special(token),
    });
    Arc::new(Vocabulary::new(tokens, &model.stop_tokens).unwrap())
}

#[test]
fn the_largest_grammars_are_compiled_or_refused_soon() {
    let vocabulary = vocabulary();
    vocabulary.compile(&Grammar::JsonObject).unwrap();
    for (name, grammar) in large_grammars() {
        let begin = Instant::now();
        let until = begin + Duration::from_secs(60);
        let compiled = vocabulary.compile_while(&grammar, until, &|| true);
        // A hundred times the usual duration. A slower grammar would be abandoned, and its thread would compute on.
        assert!(!matches!(compiled, Err(GrammarError::TooSlow { .. })), "{name} took {:?}", begin.elapsed());
        if let Ok(constraint) = compiled {
            // Later users of the grammar have a stack as other threads have.
            let small = thread::Builder::new().stack_size(128 << 10);
            let clone = small.spawn(move || drop(constraint.clone())).unwrap();
            clone.join().unwrap();
        }
    }
}

#[test]
fn a_grammar_that_was_not_measured_does_not_overflow_the_stack() {
    let rules = |name: &str, open: &str, close: &str| {
        let mut text = format!("start: {name}0\n");
        for i in 0.. {
            let line = format!("{name}{i}:{}{name}{}{}\n", open.repeat(26), i + 1, close.repeat(26));
            if text.len() + line.len() > MAX_TEXT {
                return text + &format!("{name}{i}: \"a\"");
            }
            text += &line;
        }
        text
    };
    let chain = |links: usize, link: &dyn Fn(Value) -> Value| {
        let next = |i: usize| link(json!({"$ref": format!("#/$defs/{}", i + 1)}));
        let mut list: serde_json::Map<_, _> = (0..links).map(|i| (i.to_string(), next(i))).collect();
        list.insert(links.to_string(), json!(true));
        json!({"$defs": list, "$ref": "#/$defs/0"})
    };
    let lark = [
        rules("a", "(", ")"),
        rules("a", "[", "]"),
        rules("A", "(", ")"),
        rules("A", "[", "]"),
        rules("A", "~(", ")"),
    ];
    let schemas = [
        chain(9_000, &|next| next),
        chain(2_500, &|next| (0..6).fold(next, |inner, _| json!({"items": inner}))),
        chain(5_000, &|next| json!({"properties": {"x": next}})),
        chain(6_000, &|next| json!({"prefixItems": [next]})),
        chain(5_000, &|next| json!({"additionalProperties": next})),
        chain(6_000, &|next| json!({"anyOf": [next]})),
        json!({"required": (0..20_000).map(|i| i.to_string()).collect::<Vec<_>>()}),
    ];
    let vocabulary = vocabulary();
    let grammars = lark.map(TopLevelGrammar::from_lark).into_iter();
    for grammar in grammars.chain(schemas.map(TopLevelGrammar::from_json_schema)) {
        let (until, shared) = (Instant::now() + Duration::from_secs(60), vocabulary.clone());
        let compiled = vocabulary.compilers.run(1, until, &|| true, move || shared.parser(grammar).map(drop));
        // An error is fine as well.
        drop(compiled.unwrap());
    }
}

#[test]
fn honest_grammars_are_compiled() {
    let lark = [
        "start: x # it's 5\" long\nx: \"a\" // or \"b\n  | \"b\"",
        "# \"\nstart: %json {\"type\": \"object\", \"description\": \"// #\"}",
        "start: <[1-5]> \"#\" <|end|> /\\/\"#[\\\"\\/]/",
        "start: NUMBER (\" + \" NUMBER){2}\nNUMBER: /[1-9]/i\n%ignore /[ \\t]+/",
        "%import common.INT\n%import common (WS, CNAME)\n%ignore WS\nstart: INT | CNAME | \"it's\"",
        "%llguidance {\"no_forcing\": true}\nstart: %regex {\"substring_words\": \"a # b // c\"}",
        "start: %lark {\n  start: x+\n  x: \"{\" | \"}\" # }\n} \"!\"",
        "start: a::0\na::_: \"x\" a::incr(_) %if lt(_, 3)\n  | \"\" %if ge(_, 3)",
        "?start: \"a\"~2..3 [B] -> c\nB: (\"b\" | ~/c/) & /./",
        "start[capture=\"x\"]: a\na[suffix=\"\\n\", max_tokens=5]: /.*/",
    ];
    let gbnf = [
        "# \"\nroot ::= \"a\" [^\"#/]* # it's 5\" long\n",
        "root ::= \"//\" item{2,3}\nitem ::= \"\\\"\" | [/]",
    ];
    let regexes = ["", "a/b#\"c//", r"\/\d{3}\p{L}+", "it's|5\" long|[^/\"#]*"];
    let grammars = (lark.iter().map(|text| Grammar::Lark((*text).into())))
        .chain(gbnf.iter().map(|text| Grammar::Gbnf((*text).into())))
        .chain(regexes.iter().map(|text| Grammar::Regex((*text).into())));
    let vocabulary = vocabulary();
    for grammar in grammars {
        let compiled = vocabulary.compile(&grammar);
        assert!(compiled.is_ok(), "{grammar:?}: {compiled:?}");
    }
}

#[test]
fn a_slow_grammar_is_named_and_compiled_in_the_background() {
    let vocabulary = vocabulary();
    let grammar = Grammar::Lark(format!("start: T\nT: {}\nX: /[a-y]/", "X? ".repeat(900)));
    let compile = |until, wanted: bool| vocabulary.compile_while(&grammar, until, &|| wanted).map(drop);
    let later = Instant::now() + Duration::from_secs(60);
    assert_eq!(compile(Instant::now(), true), Err(GrammarError::TooSlow { kind: "Lark grammar" }));
    assert_eq!(
        compile(Instant::now() + Duration::from_millis(1), true),
        Err(GrammarError::TooSlow { kind: "Lark grammar" })
    );
    // The error is cached until the thread ends, whose result replaces it.
    while vocabulary.compilers.abandoned() > 0 {
        assert!(Instant::now() < later, "the thread does not end");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(!matches!(compile(later, true), Err(GrammarError::TooSlow { .. })));
}
