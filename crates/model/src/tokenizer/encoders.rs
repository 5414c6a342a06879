//! Tokenizers of encoders in GGUF metadata: WordPiece (`bert`) and Unigram (`t5`). The metadata is converted to a
//! `tokenizer.json`, which the tokenizers crate reads.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Map, Value, json};

use super::{
    Tokenizer, TokenizerError, hf,
    spm::SPACE,
    vocab::{TokenKind, Vocab},
};
use crate::gguf::{self, Array, Metadata};

/// Key of Unigram tokenizers of this program: runs of spaces become one, also at the end of a text.
pub(super) const COLLAPSES: &str = "paguro.tokenizer.collapse_spaces";

/// Prefix of the parts of a word but the first.
const CONTINUES: &str = "##";

/// Characters of a word, at most; a longer one is unknown.
const LONGEST_WORD: usize = 100;

/// Reads a WordPiece vocabulary. GGUF files mark the first parts of words with `▁`, and others not at all.
pub(super) fn wordpiece(metadata: &Metadata, vocab: &Vocab) -> Result<Tokenizer, TokenizerError> {
    let mut names = Map::new();
    let mut is_cased = false;
    for (id, kind) in vocab.kinds() {
        let name = name_of(vocab, id);
        let is_special = matches!(kind, TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined);
        let name = match name.strip_prefix(SPACE) {
            _ if is_special => name,
            Some(first) => first.to_owned(),
            None if name.starts_with('[') && name.ends_with(']') => name,
            None => format!("{CONTINUES}{name}"),
        };
        is_cased |= !is_special && !name.starts_with('[') && name.chars().any(char::is_uppercase);
        names.insert(name, json!(id));
    }
    // Defaults are the ids of BERT's vocabulary.
    let named = |key: &str, default: u32| id_of(metadata, vocab, key, default);
    let (cls, sep) = (named("cls", 101)?, named("seperator", 102)?);
    let unknown = named("unknown", 100)?;
    let lowercase = metadata.optional_bool("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(!is_cased);
    // Follows the case without a key.
    let strip_accents = metadata.optional_bool("tokenizer.ggml.normalizer.strip_accents")?;
    read(json!({
        "version": "1.0",
        "added_tokens": added_tokens(vocab),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": strip_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template(vocab, &[cls], &[sep], &[sep], 1),
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": false},
        "model": {
            "type": "WordPiece", "unk_token": name_of(vocab, unknown), "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": LONGEST_WORD, "vocab": names,
        },
    }))
}

/// Reads a Unigram vocabulary.
pub(super) fn unigram(
    metadata: &Metadata,
    vocab: &Vocab,
    scores: &[f32],
) -> Result<Tokenizer, TokenizerError> {
    if scores.len() < vocab.len() {
        return Err(TokenizerError::Invalid {
            what: "tokenizer.ggml.scores".into(),
            problem: format!("{} scores for {} tokens", scores.len(), vocab.len()),
        });
    }
    let flag = |key: &str, default: bool| {
        Ok::<_, TokenizerError>(metadata.optional_bool(&format!("tokenizer.ggml.{key}"))?.unwrap_or(default))
    };
    let (bos, eos) = (id_of(metadata, vocab, "bos", 0)?, id_of(metadata, vocab, "eos", 1)?);
    let before: &[u32] = if flag("add_bos_token", false)? { &[bos] } else { &[] };
    let after: &[u32] = if flag("add_eos_token", true)? { &[eos] } else { &[] };
    // RoBERTa puts two ends between the texts of a pair, and begins the whole with a token.
    let between = if before.is_empty() { after.to_vec() } else { [after, after].concat() };
    let unknown = id_of(metadata, vocab, "unknown", 2)?;
    let names: Vec<Value> =
        vocab.kinds().map(|(id, _)| json!([name_of(vocab, id), f64::from(scores[id as usize])])).collect();
    let mut normalizers = Vec::new();
    if let Some(map) = charsmap(metadata)? {
        normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(map)}));
    }
    let prepends = if flag("add_space_prefix", true)? { "always" } else { "never" };
    let metaspace =
        json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prepends, "split": true});
    let collapses = metadata.optional_bool(COLLAPSES)?.unwrap_or(false);
    if collapses {
        normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}));
    }
    let pre_tokenizer = match flag("remove_extra_whitespaces", true)? && !collapses {
        true => json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}),
        false => metaspace.clone(),
    };
    read(json!({
        "version": "1.0",
        "added_tokens": added_tokens(vocab),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": pre_tokenizer,
        "post_processor": pair_template(vocab, [before, &between, after], 0),
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": names, "byte_fallback": false},
    }))
}

fn read(json: Value) -> Result<Tokenizer, TokenizerError> {
    let bytes = serde_json::to_vec(&json).map_err(|error| TokenizerError::Invalid {
        what: "the tokenizer".into(),
        problem: error.to_string(),
    })?;
    hf::read(&bytes, &hf::TokenizerConfig::default())
}

/// Returns the id of a key, or `default`, where there is such a token.
fn id_of(metadata: &Metadata, vocab: &Vocab, key: &str, default: u32) -> Result<u32, TokenizerError> {
    let full = format!("tokenizer.ggml.{key}_token_id");
    let id = metadata.optional_u32(&full)?.unwrap_or(default);
    match (id as usize) < vocab.len() {
        true => Ok(id),
        false => Err(TokenizerError::Invalid {
            what: full,
            problem: format!("token {id} is not in the vocabulary of {}", vocab.len()),
        }),
    }
}

fn name_of(vocab: &Vocab, id: u32) -> String {
    String::from_utf8_lossy(vocab.name(id)).into_owned()
}

/// Returns the tokens that are found in texts by their names.
fn added_tokens(vocab: &Vocab) -> Vec<Value> {
    let is_added = |kind| matches!(kind, TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown);
    let tokens = vocab.kinds().filter(|&(_, kind)| is_added(kind));
    let token = |(id, kind): (u32, TokenKind)| {
        let name = name_of(vocab, id);
        json!({
            "id": id, "special": kind != TokenKind::UserDefined, "normalized": false, "single_word": false,
            "lstrip": name == "<mask>", "rstrip": false, "content": name,
        })
    };
    tokens.map(token).collect()
}

/// Returns the template of single texts and of pairs, whose second text has type `kind`.
fn template(vocab: &Vocab, before: &[u32], between: &[u32], after: &[u32], kind: u32) -> Value {
    pair_template(vocab, [before, between, after], kind)
}

fn pair_template(vocab: &Vocab, [before, between, after]: [&[u32]; 3], kind: u32) -> Value {
    let special =
        |kind: u32| move |&id: &u32| json!({"SpecialToken": {"id": name_of(vocab, id), "type_id": kind}});
    let text = |name: &str, kind: u32| json!({"Sequence": {"id": name, "type_id": kind}});
    let first = || before.iter().map(special(0)).chain([text("A", 0)]);
    let single: Vec<Value> = first().chain(after.iter().map(special(0))).collect();
    let second = [text("B", kind)].into_iter().chain(after.iter().map(special(kind)));
    let pair: Vec<Value> = first().chain(between.iter().map(special(0))).chain(second).collect();
    let tokens = before.iter().chain(between).chain(after);
    let tokens: Map<String, Value> = tokens
        .map(|&id| {
            let name = name_of(vocab, id);
            (name.clone(), json!({"id": name, "ids": [id], "tokens": [name]}))
        })
        .collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens})
}

/// SentencePiece's precompiled map of characters, if the file has one.
fn charsmap(metadata: &Metadata) -> Result<Option<Vec<u8>>, TokenizerError> {
    const KEY: &str = "tokenizer.ggml.precompiled_charsmap";
    if metadata.get(KEY).is_none() {
        return Ok(None);
    }
    match metadata.get(KEY) {
        Some(gguf::Value::Array(Array::U8(map))) => Ok(Some(map.clone())),
        Some(gguf::Value::Array(Array::I8(map))) => Ok(Some(map.iter().map(|&byte| byte as u8).collect())),
        _ => Err(TokenizerError::Invalid { what: KEY.into(), problem: "it is not an array of bytes".into() }),
    }
}
