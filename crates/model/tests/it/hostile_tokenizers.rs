//! Tokenizers that try to hang or to eat the memory: refused with the reason, or bounded.

use std::time::Instant;

use paguro_model::{
    gguf::{Array, Metadata, Value},
    tokenizer::{SpecialTokens, Tokenizer},
};
use serde_json::json;

/// Runs a case and prints its time. Without a bound, cases take hours, and the limit of a test ends them.
fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    println!("{:6} ms: {what}", start.elapsed().as_millis());
    result
}

/// A GGUF vocabulary with control tokens of these names, and the letters.
fn gguf(names: Vec<String>) -> Result<Tokenizer, String> {
    let mut metadata = Metadata::default();
    let mut types = vec![3_i32; names.len()];
    let mut names = names;
    names.extend(('a'..='z').map(String::from));
    types.resize(names.len(), 1);
    let scores = vec![0.0; names.len()];
    for (key, value) in [
        ("model", Value::String("llama".into())),
        ("tokens", Value::Array(Array::Strings(names))),
        ("token_type", Value::Array(Array::I32(types))),
        ("scores", Value::Array(Array::F32(scores))),
    ] {
        assert!(metadata.insert(format!("tokenizer.ggml.{key}"), value));
    }
    Tokenizer::from_gguf(&metadata).map_err(|error| error.to_string())
}

/// A `tokenizer.json` after a change.
fn hf(change: impl FnOnce(&mut serde_json::Value)) -> Result<Tokenizer, String> {
    let mut json = json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "aa": 2}, "merges": ["a a"], "unk_token": null},
    });
    change(&mut json);
    Tokenizer::from_hf(json.to_string().as_bytes(), None).map_err(|error| error.to_string())
}

fn added(names: impl Iterator<Item = String>) -> serde_json::Value {
    names
        .enumerate()
        .map(|(at, name)| {
            json!({"id": 10 + at, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect()
}

#[track_caller]
fn check_refused(result: Result<Tokenizer, String>, expected: &str) {
    let error = result.map(|_| ()).expect_err("it is refused");
    assert!(error.contains(expected), "{error}");
}

#[test]
fn long_tokens_are_refused_by_name() {
    for length in [1001, 50_000, 5_000_000] {
        let name = format!("<{}>", "x".repeat(length - 2));
        let bytes = format!("has {length} bytes; at most 1000");
        check_refused(timed("GGUF", || gguf(vec!["<s>".into(), name.clone()])), "token 1, `<xxx");
        check_refused(timed("GGUF", || gguf(vec!["<s>".into(), name.clone()])), &bytes);
        check_refused(
            timed("JSON", || hf(|json| json["added_tokens"] = added([name.clone()].into_iter()))),
            &bytes,
        );
        check_refused(timed("JSON", || hf(|json| json["model"]["vocab"][name.as_str()] = 3.into())), &bytes);
    }
    assert!(gguf(vec!["x".repeat(1000)]).is_ok());
}

/// As many and as long as the bounds allow, with long shared beginnings and without.
#[test]
fn many_special_tokens_take_bounded_time() {
    let shared = |at: usize| format!("{}{at:06}", "x".repeat(990));
    let distinct = |at: usize| format!("{at:06}").repeat(160);
    let short = |at: usize| format!("<{at}>");
    for (count, name) in [(1_000, &shared as &dyn Fn(usize) -> String), (1_000, &distinct), (50_000, &short)]
    {
        let names: Vec<_> = (0..count).map(name).collect();
        let text = "x".repeat(10_000) + &names[count - 1];
        for tokenizer in [
            timed("GGUF", || gguf(names.clone())),
            timed("JSON", || hf(|json| json["added_tokens"] = added(names.iter().cloned()))),
        ] {
            let ids = timed("encoding", || tokenizer.unwrap().encode(&text, SpecialTokens::Parse));
            assert!(ids.last().is_some_and(|&id| id as usize >= count - 1), "{:?}", ids.last());
        }
    }
    check_refused(gguf((0..5_000).map(shared).collect()), "added tokens have");
    check_refused(hf(|json| json["added_tokens"] = added((0..5_000).map(shared))), "added tokens have");
}

#[test]
fn exploding_normalizers_are_refused() {
    let replace = |pattern: serde_json::Value, content: String| json!({"type": "Replace", "pattern": pattern, "content": content});
    let a = || json!({"String": "a"});
    let sequence = |steps: Vec<serde_json::Value>| json!({"type": "Sequence", "normalizers": steps});
    for (normalizer, expected) in [
        (
            sequence(vec![replace(a(), "a".repeat(3000)); 4]),
            "normalizer 0, `Replace`, can make a text 3000 times as long",
        ),
        (
            sequence(vec![replace(a(), "aa".into()); 40]),
            "normalizer 6, `Replace`, can make a text 128 times as long",
        ),
        (
            sequence(vec![sequence(vec![replace(a(), "aaaaaaaaaa".into()); 2]); 2]),
            "normalizer 1, `Replace`, can make a text 100 times as long",
        ),
        (replace(json!({"Regex": "x*"}), "y".repeat(100)), "101 times"),
        (replace(json!({"Regex": "."}), "y".repeat(100)), "100 times"),
        (replace(json!({"String": ""}), "y".repeat(100)), "101 times"),
        (json!({"type": "Prepend", "prepend": "a".repeat(1 << 20)}), "prefix or suffix has 1048576 bytes"),
        (sequence(vec![json!({"type": "Lowercase"}); 100]), "`normalizer` has 100 steps"),
    ] {
        check_refused(timed("JSON", || hf(|json| json["normalizer"] = normalizer)), expected);
    }
    // Those of Gemma, Llama 2 and CLIP.
    for normalizer in [
        replace(json!({"String": " "}), "▁".into()),
        sequence(vec![
            json!({"type": "Prepend", "prepend": "▁"}),
            replace(json!({"String": " "}), "▁".into()),
        ]),
        sequence(vec![
            json!({"type": "NFC"}),
            replace(json!({"Regex": "\\s+"}), " ".into()),
            json!({"type": "Lowercase"}),
        ]),
    ] {
        hf(|json| json["normalizer"] = normalizer).unwrap();
    }
}

#[test]
fn regular_expressions_that_backtrack_are_refused() {
    let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    for regex in ["(?:a|a(?=.))*b", "(a+)+(?=c)b", "((?=a)a|aa?)*$x", "(x+x+)+(?!z)y", "(\\w*)*(?=!)\\1z"] {
        let result = timed(regex, || hf(|json| json["pre_tokenizer"] = split(regex)));
        check_refused(result, "backtracks more than");
        let sequence = json!({"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": [split(regex)]}]});
        check_refused(hf(|json| json["pre_tokenizer"] = sequence), "backtracks more than");
        let replace = json!({"type": "Replace", "pattern": {"Regex": regex}, "content": ""});
        check_refused(hf(|json| json["normalizer"] = replace), "backtracks more than");
    }
    // Those of GPT-4, Llama 3, Qwen 2 and DeepSeek V3.
    for regex in [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        r"[!\u0022#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ] {
        hf(|json| json["pre_tokenizer"] = split(regex)).unwrap();
    }
}

#[test]
fn other_parts_are_bounded() {
    let long = "a".repeat(1000);
    check_refused(
        hf(|json| json["model"]["continuing_subword_prefix"] = long.as_str().into()),
        "prefix or suffix",
    );
    check_refused(hf(|json| json["model"]["end_of_word_suffix"] = long.as_str().into()), "prefix or suffix");
    let word_piece = json!({"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 1_000_000_000});
    check_refused(hf(|json| json["model"] = word_piece), "max_input_chars_per_word");
    let piece = json!({"SpecialToken": {"id": "a", "type_id": 0}});
    let mut single = vec![piece; 10_000];
    single.push(json!({"Sequence": {"id": "A", "type_id": 0}}));
    let template = json!({"type": "TemplateProcessing", "single": single, "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}});
    check_refused(timed("JSON", || hf(|json| json["post_processor"] = template)), "10000 tokens before");
    let merges: Vec<_> = (0..100_000).map(|at| format!("a{at} b")).collect();
    timed("JSON", || hf(|json| json["model"]["merges"] = merges.into())).unwrap_err();
}

/// A long text without any boundary, in each kind of encoder.
#[test]
fn long_words_take_bounded_time() {
    let text = "a".repeat(1 << 20);
    let hf = hf(|_| {}).unwrap();
    assert_eq!(timed("BPE", || hf.encode(&text, SpecialTokens::AsText)).len(), 1 << 19);
    let gguf = gguf(vec!["<s>".into()]).unwrap();
    assert!(timed("SentencePiece", || gguf.encode(&text, SpecialTokens::AsText)).len() >= 1 << 20);
}
