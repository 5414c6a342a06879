//! A `tokenizer.json` as a GGUF file's metadata.
//!
//! GGUF only names the way in which text is cut into words. The names are tried in turn, and the first with which a probe gives the
//! same tokens is taken. A tokenizer that none of them imitates is refused.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::{SpecialTokens, Tokenizer, TokenizerConfig, TokenizerError, pretokenize, vocab::TokenKind};
use crate::gguf::{Array, Metadata, Value};

/// Text on which families of tokenizers differ: contractions, runs of digits, letters with marks, scripts, runs of spaces and line
/// ends, symbols before letters, emoji.
const PROBE: &str = "Hello world! I'm, you'll, WE'RE, DON'T; x_1 = foo.bar(1234567, 89)  # comment\n\n\n  \t tab \
    \r\n\r\n   ends   \n    if (a>=b) { return \"ÀÉÎ naïve café e\u{301}\"; } 3.14159 2024-01-31 12345 \
    Привет, как дела? 你好，世界。日本語のテスト、カタカナ 한국어 مرحبا १२३ ไทย  ½ ² \u{1F600}\u{1F468}\u{200D}\u{1F469} ... !!! <tag/> \
    CamelCaseWord iPhone HTTPServer $100 50% a/b/c http://x.y/z?q=1&r=2 'quoted' \u{a0}nbsp\u{3000}wide    ";

/// Writes the keys `tokenizer.ggml.*`. The vocabulary gets at least `size` tokens: as many as the embeddings have.
pub(super) fn write(
    tokenizer: &Tokenizer,
    json: &[u8],
    config: &TokenizerConfig,
    size: usize,
    metadata: &mut Metadata,
) -> Result<(), TokenizerError> {
    let json: Json = serde_json::from_slice(json).map_err(|error| invalid(&error.to_string()))?;
    let model = &json["model"];
    if model["type"] != "BPE" {
        return Err(invalid(&format!("its model is {}, and GGUF has BPE", model["type"])));
    }
    let merges = merges(model)?;
    let mut tokens: Vec<String> = Vec::with_capacity(size);
    let mut types = Vec::with_capacity(size);
    for (id, kind) in tokenizer.vocab.kinds() {
        tokens.push(String::from_utf8_lossy(tokenizer.vocab.name(id)).into_owned());
        types.push(match kind {
            TokenKind::Normal => 1,
            TokenKind::Unknown => 2,
            TokenKind::Control => 3,
            TokenKind::UserDefined => 4,
            TokenKind::Unused => 5,
            TokenKind::Byte => 6,
        });
    }
    for id in tokens.len()..size {
        tokens.push(format!("[PAD{id}]"));
        types.push(5);
    }
    let scores = scores(&merges, &tokens);
    let joined = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
    let mut set = |key: &str, value: Value| metadata.set(&format!("tokenizer.ggml.{key}"), value);
    set("tokens", Value::Array(Array::Strings(tokens)));
    set("token_type", Value::Array(Array::I32(types)));
    set("merges", Value::Array(Array::Strings(joined)));
    let find = |name: &Option<String>| tokenizer.vocab.find(name.as_deref()?.as_bytes());
    let others = tokenizer.stop_tokens.iter().copied().filter(|&id| Some(id) != tokenizer.eos);
    let ids = [
        ("bos", tokenizer.bos),
        ("eos", tokenizer.eos),
        ("padding", find(&config.pad_token)),
        ("unknown", find(&config.unk_token)),
        ("eot", others.min()),
    ];
    for (key, id) in ids {
        if let Some(id) = id {
            set(&format!("{key}_token_id"), Value::U32(id));
        }
    }
    set("add_bos_token", Value::Bool(tokenizer.bos.is_some_and(|bos| tokenizer.prefix.contains(&bos))));
    set("add_eos_token", Value::Bool(tokenizer.eos.is_some_and(|eos| tokenizer.suffix.contains(&eos))));

    let expected = tokenizer.encode(PROBE, SpecialTokens::AsText);
    let fits = |metadata: &Metadata| {
        let read = Tokenizer::from_gguf(metadata);
        read.is_ok_and(|read| read.encode(PROBE, SpecialTokens::AsText) == expected)
    };
    metadata.set("tokenizer.ggml.model", Value::String("gpt2".to_owned()));
    for name in pretokenize::names() {
        metadata.set("tokenizer.ggml.pre", Value::String(name.to_owned()));
        if fits(metadata) {
            return Ok(());
        }
    }
    metadata.remove("tokenizer.ggml.pre");
    // SentencePiece's, whose merges follow from scores.
    metadata.set("tokenizer.ggml.model", Value::String("llama".to_owned()));
    metadata.set("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
    metadata.remove("tokenizer.ggml.merges");
    for prefix in [true, false] {
        metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
        if fits(metadata) {
            return Ok(());
        }
    }
    Err(invalid("it cuts text in a way that GGUF has no name for"))
}

fn invalid(problem: &str) -> TokenizerError {
    TokenizerError::Invalid { what: "tokenizer.json".to_owned(), problem: problem.to_owned() }
}

/// Pairs, or strings with a space between the two.
fn merges(model: &Json) -> Result<Vec<(String, String)>, TokenizerError> {
    let pair = |merge: &Json| match merge {
        Json::String(text) => text.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())),
        Json::Array(pair) => match &pair[..] {
            [Json::String(left), Json::String(right)] => Some((left.clone(), right.clone())),
            _ => None,
        },
        _ => None,
    };
    let merges = model["merges"].as_array().ok_or_else(|| invalid("it has no merges"))?;
    merges.iter().map(|merge| pair(merge).ok_or_else(|| invalid("a merge that is no pair"))).collect()
}

/// Scores with which the best pair is the one that is merged first.
fn scores(merges: &[(String, String)], tokens: &[String]) -> Vec<f32> {
    let mut ranks = HashMap::with_capacity(merges.len());
    for (rank, (left, right)) in merges.iter().enumerate() {
        ranks.entry(format!("{left}{right}")).or_insert(rank);
    }
    let never = merges.len();
    tokens.iter().map(|token| -(ranks.get(token).copied().unwrap_or(never) as f32)).collect()
}
