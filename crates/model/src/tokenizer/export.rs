//! A `tokenizer.json` as a GGUF file's metadata.
//!
//! GGUF only names the way in which text is cut into words. The names are tried in order, and the first with which a probe gives the
//! same tokens is taken. A tokenizer that none of them imitates is refused.

use std::collections::HashMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::Value as Json;

use super::{
    SpecialTokens, Tokenizer, TokenizerConfig, TokenizerError, encoders, gguf,
    normalize::{self, Form},
    pretokenize,
    spm::SPACE,
    vocab::TokenKind,
};
use crate::gguf::{Array, Metadata, Value};

/// Text on which families of tokenizers differ: contractions, runs of digits, letters with marks, scripts, runs of spaces and line
/// ends, symbols before letters, emoji.
const PROBE: &str = "Hello world! I'm, you'll, WE'RE, DON'T; x_1 = foo.bar(1234567, 89)  # comment\n\n\n  \t tab \
    \r\n\r\n   ends   \n    if (a>=b) { return \"ÀÉÎ naïve café e\u{301}\"; } 3.14159 2024-01-31 12345 \
    A\u{30a} \u{212b}ngstr\u{f6}m \u{1112}\u{1161}\u{11ab} \u{fb01}n \u{ff21}\u{ff22} q\u{307}\u{323} e\u{323}\u{302} \u{958}\u{37e} \
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
    let form = Form::of_json(&json["normalizer"])?;
    let merges = merges(model)?;
    let tokens = vocabulary(tokenizer, size, |name, _| name, metadata);
    let scores = scores(&merges, &tokens);
    let joined = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
    let mut set = |key: &str, value: Value| metadata.set(&format!("tokenizer.ggml.{key}"), value);
    set("merges", Value::Array(Array::Strings(joined)));
    // As llama.cpp's converter has it: BOS and EOS are the tokens around a text, where there are some.
    let (bos, eos) = (
        tokenizer.prefix.first().copied().or(tokenizer.bos),
        tokenizer.suffix.last().copied().or(tokenizer.eos),
    );
    let others = tokenizer.eos.into_iter().chain(tokenizer.stop_tokens.iter().copied());
    let other = others.filter(|&id| Some(id) != eos).min_by_key(|&id| (Some(id) != tokenizer.eos, id));
    for (key, id) in [("bos", bos), ("eos", eos), ("eot", other)] {
        if let Some(id) = id {
            set(&format!("{key}_token_id"), Value::U32(id));
        }
    }
    set("add_bos_token", Value::Bool(!tokenizer.prefix.is_empty()));
    set("add_eos_token", Value::Bool(!tokenizer.suffix.is_empty()));
    own_tokens(tokenizer, [bos, eos], metadata);
    let found_after = match form {
        Some(_) => found_after(&json, tokenizer),
        None => Vec::new(),
    };
    metadata.set(normalize::FORM, Value::String(form.map_or("none", Form::name).to_owned()));
    if !found_after.is_empty() {
        metadata.set(normalize::FOUND_AFTER, Value::Array(Array::U32(found_after)));
    }
    named(tokenizer, config, metadata);

    let architecture = metadata.str("general.architecture").unwrap_or_default().to_owned();
    let architecture = architecture.as_str();
    let expected = tokenizer.encode(PROBE, SpecialTokens::AsText);
    let fits = |metadata: &Metadata| {
        let read = Tokenizer::from_gguf(metadata);
        read.is_ok_and(|read| {
            read.encode(PROBE, SpecialTokens::AsText) == expected
                && (&read.prefix, &read.suffix) == (&tokenizer.prefix, &tokenizer.suffix)
        })
    };
    metadata.set("tokenizer.ggml.model", Value::String("gpt2".to_owned()));
    let ignore_merges = model["ignore_merges"].as_bool().unwrap_or(false);
    for name in pretokenize::names(ignore_merges) {
        metadata.set("tokenizer.ggml.pre", Value::String(name.to_owned()));
        if fits(metadata) {
            // The key is written where the name does not imply it.
            if Form::of_file(None, Some(name), architecture).ok() == Some(form) {
                metadata.remove(normalize::FORM);
            }
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
            if Form::of_file(None, None, architecture).ok() == Some(form) {
                metadata.remove(normalize::FORM);
            }
            return Ok(());
        }
    }
    Err(invalid("it cuts text in a way that GGUF has no name for"))
}

/// Writes the tokens around a text that are not the file's BOS and EOS, and the model's own BOS and EOS where these differ.
fn own_tokens(tokenizer: &Tokenizer, [bos, eos]: [Option<u32>; 2], metadata: &mut Metadata) {
    for (key, ids) in [(gguf::PREFIX, &tokenizer.prefix), (gguf::SUFFIX, &tokenizer.suffix)] {
        if ids.len() > 1 {
            metadata.set(key, Value::Array(Array::U32(ids.clone())));
        }
    }
    for (key, own, written) in [(gguf::BOS, tokenizer.bos, bos), (gguf::EOS, tokenizer.eos, eos)] {
        if let Some(own) = own.filter(|_| own != written) {
            metadata.set(key, Value::U32(own));
        }
    }
}

/// Returns the added tokens that the tokenizer finds in the normalized text.
fn found_after(json: &Json, tokenizer: &Tokenizer) -> Vec<u32> {
    let tokens = json["added_tokens"].as_array().into_iter().flatten();
    let normalized = tokens.filter(|token| token["normalized"] == true);
    let ids = normalized.filter_map(|token| u32::try_from(token["id"].as_u64()?).ok());
    ids.filter(|&id| tokenizer.vocab.kind(id) == Some(TokenKind::UserDefined)).collect()
}

/// Returns the keys of a file that llama.cpp does not know, each as a phrase.
pub(super) fn differences(metadata: &Metadata) -> Vec<String> {
    let mut all = Vec::new();
    let (pre, architecture) = (metadata.str("tokenizer.ggml.pre"), metadata.str("general.architecture"));
    let is_bpe = metadata.str("tokenizer.ggml.model").is_some_and(|model| ["gpt2", "llama"].contains(&model));
    let form = Form::of_file(metadata.str(normalize::FORM), pre, architecture.unwrap_or_default());
    if let Some(form) = form.ok().flatten().filter(|_| is_bpe) {
        all.push(format!("it does not bring texts to the form {}", form.name()));
    }
    if [gguf::PREFIX, gguf::SUFFIX].into_iter().any(|key| metadata.get(key).is_some()) {
        all.push("it adds at most one token before and one after a text".to_owned());
    }
    if metadata.get(encoders::COLLAPSES).is_some() {
        all.push("it removes the spaces at the end of a text".to_owned());
    }
    all
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
    let steps = normalize::steps(&json["normalizer"]);
    let is_berts = |step: &Json| {
        let is_on = |key: &str| step[key].as_bool().unwrap_or(true);
        step["type"] == "BertNormalizer" && is_on("clean_text") && is_on("handle_chinese_chars")
    };
    let [step] = steps[..] else {
        return Err(invalid(
            "its normalizer is not BERT's, which is the only one that GGUF has for WordPiece",
        ));
    };
    if !is_berts(step) {
        return Err(normalize::unknown_step(step));
    }
    let lowercase = step["lowercase"].as_bool().unwrap_or(true);
    metadata.set("tokenizer.ggml.normalizer.lowercase", Value::Bool(lowercase));
    if let Some(strips) = step["strip_accents"].as_bool().filter(|&strips| strips != lowercase) {
        metadata.set("tokenizer.ggml.normalizer.strip_accents", Value::Bool(strips));
    }
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
    if let Some(step) = normalize::steps(&json["normalizer"]).into_iter().find(|step| !is_sentencepiece(step))
    {
        return Err(normalize::unknown_step(step));
    }
    for (prefix, whitespace) in [(true, true), (true, false), (false, true), (false, false)] {
        metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
        metadata.set("tokenizer.ggml.remove_extra_whitespaces", Value::Bool(whitespace));
        if is_the_same(tokenizer, metadata) {
            return Ok(());
        }
    }
    // Runs of spaces become one, also at the end of a text, where SentencePiece itself removes it.
    metadata.set("tokenizer.ggml.remove_extra_whitespaces", Value::Bool(true));
    metadata.set(encoders::COLLAPSES, Value::Bool(true));
    for prefix in [true, false] {
        metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
        if is_the_same(tokenizer, metadata) {
            return Ok(());
        }
    }
    Err(invalid("it cuts text in a way that GGUF has no name for"))
}

/// True for the steps of normalizers that stand for SentencePiece's; reading compares their effects.
fn is_sentencepiece(step: &Json) -> bool {
    match step["type"].as_str().unwrap_or_default() {
        "Precompiled" | "Strip" => true,
        "Prepend" => step["prepend"] == SPACE,
        "Replace" => {
            let is_space = step["content"] == SPACE || step["content"] == " ";
            is_space && (step["pattern"]["String"] == " " || step["pattern"]["Regex"] == " {2,}")
        }
        _ => false,
    }
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
    let indented = format!("  {PROBE}");
    let prompt = |of: &Tokenizer, special| [PROBE, &indented].map(|text| of.encode_prompt(text, special));
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
