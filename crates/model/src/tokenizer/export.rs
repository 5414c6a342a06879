//! A `tokenizer.json` as a GGUF file's metadata.
//!
//! GGUF only names the way in which text is cut into words. The names are tried in turn, and the first with which a probe gives the
//! same tokens is taken. A tokenizer that none of them imitates is refused.

use std::collections::HashMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::Value as Json;

use super::{
    SpecialTokens, Tokenizer, TokenizerConfig, TokenizerError, pretokenize, spm::SPACE, vocab::TokenKind,
};
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
    match model["type"].as_str() {
        Some("BPE") => {}
        Some("WordPiece") => return wordpiece(tokenizer, &json, config, size, metadata),
        Some("Unigram") => return unigram(tokenizer, &json, config, size, metadata),
        _ => {
            return Err(invalid(&format!(
                "its model is {}, and GGUF has BPE, WordPiece and Unigram",
                model["type"]
            )));
        }
    }
    let merges = merges(model)?;
    let tokens = vocabulary(tokenizer, size, |name, _| name, metadata);
    let scores = scores(&merges, &tokens);
    let joined = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
    let mut set = |key: &str, value: Value| metadata.set(&format!("tokenizer.ggml.{key}"), value);
    set("merges", Value::Array(Array::Strings(joined)));
    let others = tokenizer.stop_tokens.iter().copied().filter(|&id| Some(id) != tokenizer.eos);
    // Encoders have the names of BERT's classifier for the tokens around a text.
    let around = |ids: &[u32]| ids.first().copied().filter(|_| tokenizer.is_around_texts());
    let (bos, eos) =
        (tokenizer.bos.or(around(&tokenizer.prefix)), tokenizer.eos.or(around(&tokenizer.suffix)));
    for (key, id) in [("bos", bos), ("eos", eos), ("eot", others.min())] {
        if let Some(id) = id {
            set(&format!("{key}_token_id"), Value::U32(id));
        }
    }
    set("add_bos_token", Value::Bool(bos.is_some_and(|bos| tokenizer.prefix.contains(&bos))));
    set("add_eos_token", Value::Bool(eos.is_some_and(|eos| tokenizer.suffix.contains(&eos))));
    named(tokenizer, config, metadata);

    let expected = tokenizer.encode(PROBE, SpecialTokens::AsText);
    let fits = |metadata: &Metadata| {
        let read = Tokenizer::from_gguf(metadata);
        read.is_ok_and(|read| {
            let is_around = tokenizer.is_around_texts();
            read.encode(PROBE, SpecialTokens::AsText) == expected
                && (!is_around || (&read.prefix, &read.suffix) == (&tokenizer.prefix, &tokenizer.suffix))
        })
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

/// Writes the names and kinds of tokens, with `spelling` of each, and returns the names.
fn vocabulary(
    tokenizer: &Tokenizer,
    size: usize,
    spelling: impl Fn(String, TokenKind) -> String,
    metadata: &mut Metadata,
) -> Vec<String> {
    let mut tokens: Vec<String> = Vec::with_capacity(size);
    let mut types = Vec::with_capacity(size);
    for (id, kind) in tokenizer.vocab.kinds() {
        tokens.push(spelling(String::from_utf8_lossy(tokenizer.vocab.name(id)).into_owned(), kind));
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
    metadata.set("tokenizer.ggml.tokens", Value::Array(Array::Strings(tokens.clone())));
    metadata.set("tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    tokens
}

/// Ids of tokens that `tokenizer_config.json` names.
fn named(tokenizer: &Tokenizer, config: &TokenizerConfig, metadata: &mut Metadata) {
    for (key, name) in [("padding", &config.pad_token), ("unknown", &config.unk_token)] {
        if let Some(id) = name.as_deref().and_then(|name| tokenizer.vocab.find(name.as_bytes())) {
            metadata.set(&format!("tokenizer.ggml.{key}_token_id"), Value::U32(id));
        }
    }
}

/// Tokens around a text, of encoders. `names` are those of the first and of the last.
fn around(tokenizer: &Tokenizer, names: [&[&str]; 2], metadata: &mut Metadata) -> Result<(), TokenizerError> {
    for (names, ids) in names.into_iter().zip([&tokenizer.prefix, &tokenizer.suffix]) {
        let [id] = ids[..] else {
            return Err(invalid("it does not put one token before and one after a text"));
        };
        for name in names {
            metadata.set(&format!("tokenizer.ggml.{name}_token_id"), Value::U32(id));
        }
    }
    Ok(())
}

/// WordPiece. GGUF files mark the first parts of words, and not the others.
fn wordpiece(
    tokenizer: &Tokenizer,
    json: &Json,
    config: &TokenizerConfig,
    size: usize,
    metadata: &mut Metadata,
) -> Result<(), TokenizerError> {
    let is_special = |kind| matches!(kind, TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined);
    let spelling = |name: String, kind| match name.strip_prefix("##") {
        _ if is_special(kind) || name.starts_with('[') && name.ends_with(']') => name,
        Some(part) => part.to_owned(),
        None => format!("{SPACE}{name}"),
    };
    vocabulary(tokenizer, size, spelling, metadata);
    metadata.set("tokenizer.ggml.model", Value::String("bert".to_owned()));
    around(tokenizer, [&["bos", "cls"], &["eos", "seperator"]], metadata)?;
    named(tokenizer, config, metadata);
    let unknown = json["model"]["unk_token"].as_str().and_then(|name| tokenizer.vocab.find(name.as_bytes()));
    if let Some(id) = unknown {
        metadata.set("tokenizer.ggml.unknown_token_id", Value::U32(id));
    }
    let lowercase = json["normalizer"]["lowercase"].as_bool().unwrap_or(false);
    metadata.set("tokenizer.ggml.normalizer.lowercase", Value::Bool(lowercase));
    if is_the_same(tokenizer, metadata) {
        return Ok(());
    }
    Err(invalid("it differs from BERT's, which is the only one of its kind that GGUF has"))
}

/// Unigram, in GGUF files T5's.
fn unigram(
    tokenizer: &Tokenizer,
    json: &Json,
    config: &TokenizerConfig,
    size: usize,
    metadata: &mut Metadata,
) -> Result<(), TokenizerError> {
    let tokens = vocabulary(tokenizer, size, |name, _| name, metadata);
    let listed = json["model"]["vocab"].as_array().into_iter().flatten();
    let mut scores: Vec<f32> = listed.map(|token| token[1].as_f64().unwrap_or(0.0) as f32).collect();
    scores.resize(tokens.len(), 0.0);
    metadata.set("tokenizer.ggml.model", Value::String("t5".to_owned()));
    metadata.set("tokenizer.ggml.pre", Value::String("default".to_owned()));
    metadata.set("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
    around(tokenizer, [&["bos", "cls"], &["eos", "seperator"]], metadata)?;
    for key in ["add_bos_token", "add_eos_token"] {
        metadata.set(&format!("tokenizer.ggml.{key}"), Value::Bool(true));
    }
    named(tokenizer, config, metadata);
    if let Some(id) = json["model"]["unk_id"].as_u64() {
        metadata.set("tokenizer.ggml.unknown_token_id", Value::U32(id as u32));
    }
    if let Some(map) = charsmap(&json["normalizer"]) {
        let map = STANDARD.decode(map).map_err(|error| invalid(&error.to_string()))?;
        metadata.set("tokenizer.ggml.precompiled_charsmap", Value::Array(Array::U8(map)));
    }
    for (prefix, whitespace) in [(true, true), (true, false), (false, true), (false, false)] {
        metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
        metadata.set("tokenizer.ggml.remove_extra_whitespaces", Value::Bool(whitespace));
        if is_the_same(tokenizer, metadata) {
            return Ok(());
        }
    }
    Err(invalid("it cuts text in a way that GGUF has no name for"))
}

/// SentencePiece's precompiled map of characters, in a normalizer or a sequence of them.
fn charsmap(normalizer: &Json) -> Option<&str> {
    let inner = normalizer["normalizers"].as_array().into_iter().flatten();
    normalizer["precompiled_charsmap"].as_str().or_else(|| inner.filter_map(charsmap).next())
}

/// True if the tokenizer of a file has the tokens of an encoder's, makes the same of a probe and of a pair of texts, and puts the same
/// tokens around a text.
fn is_the_same(tokenizer: &Tokenizer, metadata: &Metadata) -> bool {
    let Ok(read) = Tokenizer::from_gguf(metadata) else { return false };
    let mut tokens = tokenizer.vocab.kinds().map(|(id, _)| id);
    let prompt = |of: &Tokenizer, special| of.encode_prompt(PROBE, special);
    let pair = |of: &Tokenizer| of.encode_pair(PROBE, "a second text", 1 << 20);
    tokens.all(|id| read.vocab.name(id) == tokenizer.vocab.name(id))
        && [SpecialTokens::AsText, SpecialTokens::Parse]
            .into_iter()
            .all(|special| prompt(&read, special) == prompt(tokenizer, special))
        && pair(&read) == pair(tokenizer)
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
