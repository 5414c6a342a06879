//! `--json-schema`, `--regex` and `--grammar` on the command line.

use crate::common::{Ran, run};
use serde_json::Value;

const SCHEMA: &str = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["name", "age"], "additionalProperties": false}"#;

fn answer(args: &[&str]) -> String {
    run(&[&["run", "--quiet", "--branches", "1"], args, &["Who is the hero?"]].concat())
        .ok()
        .trim_end()
        .to_owned()
}

#[test]
fn answers_follow_a_schema_given_as_text_or_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hero.json");
    std::fs::write(&file, SCHEMA).unwrap();
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    for seed in ["1", "2", "3"] {
        let texts =
            [SCHEMA, file.to_str().unwrap()].map(|given| answer(&["--json-schema", given, "--seed", seed]));
        assert_eq!(texts[0], texts[1]);
        let value: Value =
            serde_json::from_str(&texts[0]).unwrap_or_else(|error| panic!("{error}: {}", texts[0]));
        assert!(jsonschema::is_valid(&schema, &value), "{value}");
    }
}

#[test]
fn answers_match_an_expression_as_a_whole() {
    for seed in ["1", "2", "3"] {
        let text = answer(&["--regex", "[a-f]{2}-[0-9]{3}", "--seed", seed]);
        let (letters, digits) = text.split_once('-').unwrap_or_else(|| panic!("{text:?}"));
        assert!(letters.len() == 2 && letters.bytes().all(|b| b"abcdef".contains(&b)), "{text:?}");
        assert!(digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit()), "{text:?}");
    }
}

#[test]
fn answers_follow_a_grammar() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sum.lark");
    std::fs::write(&file, "start: NUMBER (\" + \" NUMBER){2}\nNUMBER: /[1-9]/\n").unwrap();
    let text = answer(&["--grammar", file.to_str().unwrap(), "--seed", "5"]);
    let numbers: Vec<_> = text.split(" + ").collect();
    assert!(numbers.len() == 3 && numbers.iter().all(|n| n.parse::<u8>().is_ok()), "{text:?}");
    // The same in llama.cpp's format, as text and under llama.cpp's name for a file.
    let gbnf = "root ::= number (\" + \" number){2}\nnumber ::= [1-9]";
    std::fs::write(folder.path().join("sum.gbnf"), gbnf).unwrap();
    let file = folder.path().join("sum.gbnf");
    for given in [["--grammar", gbnf], ["--grammar-file", file.to_str().unwrap()]] {
        assert_eq!(answer(&[&given[..], &["--seed", "5"]].concat()), text);
    }
}

#[test]
fn what_cannot_be_followed_is_named() {
    let refused = |args: &[&str], words: &str| {
        let Ran { code, err, .. } = run(&[&["run", "--quiet"], args, &["Hi there"]].concat());
        assert!(code != Some(0) && err.starts_with("error: ") && err.contains(words), "{code:?}: {err}");
    };
    refused(&["--json-schema", r#"{"type": "array", "uniqueItems": true}"#], "uniqueItems");
    refused(&["--json-schema", "{"], "JSON");
    refused(&["--json-schema", "no-such-file.json"], "no-such-file.json");
    refused(&["--grammar", "root ::= (\"a\""], "line 1, column 14: the grammar ends, and `)` should be here");
    refused(&["--grammar", "no-such-file.gbnf"], "no-such-file.gbnf");
    refused(&["--regex", "(a"], "regular expression");
    refused(&["--regex", "a", "--json-schema", "{}"], "--json-schema");
}
