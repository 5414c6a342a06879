//! Any bytes as a tokenizer. The first byte chooses: a `tokenizer.json`, or a vocabulary as GGUF files have it, with a
//! line for each token (its kind as a digit, then its name) and, after an empty line, for each merge.

#![no_main]

use libfuzzer_sys::fuzz_target;
use paguro_model::{
    gguf::{Array, Metadata, Value},
    tokenizer::{SpecialText, SpecialTokens, Tokenizer},
};

const PRE: [&str; 6] = ["gpt-2", "llama3", "qwen2", "deepseek-v3", "default", "smollm"];

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, rest)) = bytes.split_first() else { return };
    let tokenizer = match kind {
        b'{' => Tokenizer::from_hf(bytes, Some(br#"{"bos_token": "a", "add_bos_token": true}"#)),
        _ => match std::str::from_utf8(rest) {
            Ok(text) => Tokenizer::from_gguf(&vocabulary(kind, text)),
            Err(_) => return,
        },
    };
    let Ok(tokenizer) = tokenizer else { return };
    let text = String::from_utf8_lossy(&rest[..rest.len().min(512)]);
    for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
        for text in ["", "Hello <s> 123\n\n  é 中", &text, &"a ".repeat(500), &" ".repeat(1000)] {
            let ids = tokenizer.encode_prompt(text, special);
            std::hint::black_box(tokenizer.decode(&ids, SpecialText::Show));
        }
    }
});

fn vocabulary(kind: u8, text: &str) -> Metadata {
    let (tokens, merges) = text.split_once("\n\n").unwrap_or((text, ""));
    let tokens = tokens.lines().map(|line| match line.chars().next() {
        Some(digit @ '1'..='6') => (line[1..].to_owned(), digit as i32 - '0' as i32),
        _ => (line.to_owned(), 1),
    });
    let (names, types): (Vec<_>, Vec<_>) = tokens.unzip();
    let scores = (0..names.len()).map(|at| -(at as f32)).collect();
    let merges = merges.lines().map(str::to_owned).collect();
    let model = if kind % 2 == 0 { "llama" } else { "gpt2" };
    let pre = PRE[usize::from(kind / 2) % PRE.len()];
    let mut metadata = Metadata::default();
    for (key, value) in [
        ("model", Value::String(model.into())),
        ("pre", Value::String(pre.into())),
        ("tokens", Value::Array(Array::Strings(names))),
        ("token_type", Value::Array(Array::I32(types))),
        ("scores", Value::Array(Array::F32(scores))),
        ("merges", Value::Array(Array::Strings(merges))),
    ] {
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
    }
    metadata
}
