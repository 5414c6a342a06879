//! Vocabularies in GGUF metadata (docs/gguf.md of the ggml project, with the interpretation of llama.cpp's
//! `llama-vocab.cpp`).

use std::collections::HashSet;

use super::{
    Encoder, Tokenizer, TokenizerError,
    bpe::{Bpe, write_name},
    encoders, limits,
    normalize::{self, Form, Normalizer},
    pretokenize::PreTokenizer,
    special::{Added, AddedTokens},
    spm::{SPACE, Spm},
    stop,
    vocab::{TokenKind, Vocab},
};
use crate::gguf::{Metadata, MetadataError};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";

/// Tokens before and after a text, where they are not BOS and EOS.
pub(super) const PREFIX: &str = "paguro.tokenizer.prefix";
pub(super) const SUFFIX: &str = "paguro.tokenizer.suffix";
/// The model's BOS and EOS, where llama.cpp needs others to add the tokens around a text.
pub(super) const BOS: &str = "paguro.tokenizer.bos_token_id";
pub(super) const EOS: &str = "paguro.tokenizer.eos_token_id";

/// Interpretation of token names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    /// Each character is a byte.
    ByteLevel,
    /// UTF-8 with `▁` for spaces.
    Plain,
}

pub(super) fn read(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    let model = metadata.require_str(MODEL)?;
    let pre_name = metadata.optional_str(PRE)?;
    if ["bert", "t5"].contains(&model) {
        let vocab = read_vocab(metadata, Spelling::Plain)?;
        return match model {
            "bert" => encoders::wordpiece(metadata, &vocab),
            _ => encoders::unigram(metadata, &vocab, &scores(metadata)?),
        };
    }
    let (spelling, pre) = match model {
        "llama" => (Spelling::Plain, None),
        "gpt2" | "gemma4" => {
            let name = if model == "gemma4" { "gemma4" } else { pre_name.unwrap_or("default") };
            let pre = PreTokenizer::new(name)?;
            (if pre.byte_level { Spelling::ByteLevel } else { Spelling::Plain }, Some(pre))
        }
        _ => {
            return Err(TokenizerError::UnsupportedModel {
                name: model.into(),
                supported: "llama (SentencePiece BPE), gpt2 (byte-level BPE), gemma4, bert (WordPiece), t5 (Unigram)",
            });
        }
    };
    let vocab = read_vocab(metadata, spelling)?;

    let id = |key: &str, default: Option<u32>| {
        let id = metadata.optional_u32(&format!("tokenizer.ggml.{key}_token_id"))?.or(default);
        Ok::<_, MetadataError>(id.filter(|&id| (id as usize) < vocab.len()))
    };
    let is_spm = pre.is_none();
    // Defaults of SentencePiece.
    let spm_default = |id: u32| is_spm.then_some(id);
    let bos = id("bos", spm_default(1))?;
    let eos = id("eos", spm_default(2))?;
    let unknown = id("unknown", spm_default(0))?;
    let mut stops = vec![eos];
    for key in ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"] {
        stops.push(id(key, None)?);
    }

    let flag = |key: &str, default: bool| {
        Ok::<_, MetadataError>(metadata.optional_bool(&format!("tokenizer.ggml.{key}"))?.unwrap_or(default))
    };
    // Gemma 4 needs BOS, but early files disable it.
    let add_bos = flag("add_bos_token", pre.as_ref().is_none_or(|pre| pre.add_bos))? || model == "gemma4";
    let add_eos = flag("add_eos_token", false)?;
    let add_space_prefix = flag("add_space_prefix", true)?;

    let mut added = added_tokens(&vocab, metadata.str("general.name"), pre_name);
    let normalizer = normalizer(metadata, pre_name, &vocab, &mut added)?;
    let added = AddedTokens::new(added)?;
    let encoder = match pre {
        None => {
            let scores = scores(metadata)?;
            Encoder::Spm(Spm::new(&scores, &vocab, add_space_prefix, unknown)?, added)
        }
        Some(pre) => {
            let merges = byte_strings(metadata, MERGES)?;
            Encoder::Bpe(Bpe::new(pre, merges.into_iter(), &vocab)?, added)
        }
    };
    // Tokens of files of this program, where llama.cpp has no key for them.
    let own = |key: &str| {
        Ok::<_, MetadataError>(metadata.optional_u32(key)?.filter(|&id| (id as usize) < vocab.len()))
    };
    let listed = |key: &str| match listed(metadata, key, &vocab)? {
        Some(ids) if ids.len() > limits::MAX_TEMPLATE => Err(TokenizerError::Invalid {
            what: key.to_owned(),
            problem: format!("{} tokens; at most {} are accepted", ids.len(), limits::MAX_TEMPLATE),
        }),
        ids => Ok(ids),
    };
    let standard = |id: Option<u32>, is_added: bool| id.filter(|_| is_added).into_iter().collect();
    Ok(Tokenizer {
        stop_tokens: stop::stop_tokens(&vocab, stops.into_iter().flatten()),
        prefix: listed(PREFIX)?.unwrap_or_else(|| standard(bos, add_bos)),
        suffix: listed(SUFFIX)?.unwrap_or_else(|| standard(eos, add_eos)),
        bos: own(BOS)?.or(bos),
        eos: own(EOS)?.or(eos),
        vocab,
        encoder,
        normalizer,
        strips_first_space: is_spm && add_space_prefix,
    })
}

/// Returns the normalization of texts, and moves the tokens that are found after it out of `added`.
fn normalizer(
    metadata: &Metadata,
    pre_name: Option<&str>,
    vocab: &Vocab,
    added: &mut Vec<Added>,
) -> Result<Normalizer, TokenizerError> {
    let architecture = metadata.str("general.architecture").unwrap_or_default();
    let form = Form::of_file(metadata.optional_str(normalize::FORM)?, pre_name, architecture)?;
    let Some(form) = form else { return Ok(Normalizer::default()) };
    let late = listed(metadata, normalize::FOUND_AFTER, vocab)?.unwrap_or_default();
    let late: HashSet<u32> = late.into_iter().collect();
    let is_late = |token: &Added| late.contains(&token.id) && token.kind == TokenKind::UserDefined;
    let (late, early): (Vec<Added>, Vec<Added>) = added.drain(..).partition(is_late);
    *added = early;
    let late = late.into_iter().map(|token| Added { text: form.apply(&token.text).into_owned(), ..token });
    let late: Vec<Added> = late.collect();
    let after = (!late.is_empty()).then(|| AddedTokens::new(late)).transpose()?;
    Ok(Normalizer { form: Some(form), after })
}

/// Returns the tokens that a key lists, which have to be in the vocabulary.
fn listed(metadata: &Metadata, key: &str, vocab: &Vocab) -> Result<Option<Vec<u32>>, TokenizerError> {
    if metadata.get(key).is_none() {
        return Ok(None);
    }
    let ids = metadata.u32s(key).ok_or_else(|| wrong_type(metadata, key, "an array of u32"))?;
    match ids.iter().find(|&&id| id as usize >= vocab.len()) {
        None => Ok(Some(ids)),
        Some(id) => Err(TokenizerError::Invalid {
            what: key.to_owned(),
            problem: format!("token {id} is not in the vocabulary of {}", vocab.len()),
        }),
    }
}

fn read_vocab(metadata: &Metadata, spelling: Spelling) -> Result<Vocab, TokenizerError> {
    let names = byte_strings(metadata, TOKENS)?;
    if names.is_empty() || names.len() >= u32::MAX as usize {
        return Err(TokenizerError::Invalid {
            what: TOKENS.into(),
            problem: format!("{} tokens", names.len()),
        });
    }
    let types = match metadata.get(TYPES) {
        None => None,
        Some(_) => Some(metadata.i32s(TYPES).ok_or_else(|| wrong_type(metadata, TYPES, "an array of i32"))?),
    };
    if let Some(types) = types.filter(|types| types.len() < names.len()) {
        return Err(TokenizerError::Invalid {
            what: TYPES.into(),
            problem: format!("{} types for {} tokens", types.len(), names.len()),
        });
    }
    let mut vocab = Vocab::with_capacity(names.len());
    for (id, name) in names.into_iter().enumerate() {
        let kind = match types.map_or(1, |types| types[id]) {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            6 => TokenKind::Byte,
            _ => TokenKind::Unused,
        };
        limits::check_name(TOKENS, id, name)?;
        if name.is_empty() {
            // Tokens without a name must not be found by an empty name.
            vocab.push(format!("[EMPTY_{id}]").as_bytes(), TokenKind::Unused, |_| {});
        } else {
            vocab.push(name, kind, |bytes| write(name, kind, spelling, bytes));
        }
    }
    stop::mark_control(&mut vocab);
    Ok(vocab)
}

/// Appends the bytes that a token writes.
fn write(name: &[u8], kind: TokenKind, spelling: Spelling, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    let is_written = std::str::from_utf8(name).is_ok_and(|text| match (kind, spelling) {
        (TokenKind::Byte, _) => byte_value(text).map(|byte| bytes.push(byte)).is_some(),
        (TokenKind::Normal | TokenKind::Unused, Spelling::Plain) if text.contains(SPACE) => {
            bytes.extend_from_slice(text.replace(SPACE, " ").as_bytes());
            true
        }
        (TokenKind::Normal | TokenKind::Unused, Spelling::ByteLevel) => write_name(text, bytes),
        _ => false,
    });
    if !is_written {
        bytes.truncate(start);
        bytes.extend_from_slice(name);
    }
}

/// Returns the byte of `<0xAB>`.
pub(super) fn byte_value(name: &str) -> Option<u8> {
    let hex = name.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = hex.len() == 2 && hex.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(hex, 16).ok().filter(|_| is_hex)
}

/// Returns the tokens that are matched in text, with their effect on the whitespace around them. Files do not contain
/// it; llama.cpp derives it from the model's name.
fn added_tokens(vocab: &Vocab, model_name: Option<&str>, pre_name: Option<&str>) -> Vec<Added> {
    let model_name = model_name.unwrap_or_default().to_lowercase();
    let is_phi3 = model_name.contains("phi-3") || model_name.contains("phi3");
    let is_jina = pre_name.is_some_and(|pre| ["jina-v2-de", "jina-v2-es", "jina-v2-code"].contains(&pre));
    let is_modern_bert = model_name.contains("modern-bert");
    let is_added = |kind| matches!(kind, TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown);
    let tokens = vocab.kinds().filter(|&(_, kind)| is_added(kind));
    let tokens = tokens.filter_map(|(id, kind)| {
        let text = std::str::from_utf8(vocab.name(id)).ok()?.to_owned();
        let strip_left = (is_jina && text == "<mask>") || (is_modern_bert && text == "[MASK]");
        let strip_right = is_phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&text.as_str());
        Some(Added { id, text, kind, strip_left, strip_right })
    });
    tokens.collect()
}

fn scores(metadata: &Metadata) -> Result<Vec<f32>, TokenizerError> {
    let floats = || metadata.f32s(SCORES).map(<[f32]>::to_vec);
    let integers = || metadata.i32s(SCORES).map(|scores| scores.iter().map(|&score| score as f32).collect());
    let scores = floats().or_else(integers);
    scores.ok_or_else(|| wrong_type(metadata, SCORES, "an array of f32"))
}

fn byte_strings<'m>(metadata: &'m Metadata, key: &str) -> Result<Vec<&'m [u8]>, TokenizerError> {
    metadata.byte_strings(key).ok_or_else(|| wrong_type(metadata, key, "an array of strings"))
}

fn wrong_type(metadata: &Metadata, key: &str, expected: &'static str) -> TokenizerError {
    let key = key.to_owned();
    TokenizerError::Metadata(match metadata.get(&key) {
        None => MetadataError::Missing { key },
        Some(value) => MetadataError::WrongType { key, found: value.type_name().into(), expected },
    })
}
