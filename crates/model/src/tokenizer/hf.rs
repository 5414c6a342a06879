//! `tokenizer.json` and `tokenizer_config.json` of Hugging Face's folders.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::OnceLock,
};

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokenizers::{AddedToken, Encoding, ModelWrapper, PostProcessor, TruncationDirection};

use super::{
    Encoder, SpecialTokens, Tokenizer, TokenizerError,
    bpe::write_name,
    gguf::byte_value,
    limits,
    normalize::Normalizer,
    special::{self, Added, AddedTokens, Fragment},
    stop,
    vocab::{TokenKind, Vocab},
};

use crate::chat::ChatPrompt;

/// Used fields of `tokenizer_config.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// Begins a text.
    pub bos_token: Option<String>,
    /// Ends a text.
    pub eos_token: Option<String>,
    /// Fills up batches.
    pub pad_token: Option<String>,
    /// Token for text that the vocabulary cannot express.
    pub unk_token: Option<String>,
    /// Begins a text of an encoder.
    pub cls_token: Option<String>,
    /// True if prompts begin with BOS; `None` leaves it to `tokenizer.json`.
    pub add_bos_token: Option<bool>,
    /// True if prompts end with EOS; `None` leaves it to `tokenizer.json`.
    pub add_eos_token: Option<bool>,
    /// Chat templates with their names; a file with only one calls it `default`.
    pub chat_templates: Vec<(String, String)>,
}

impl TokenizerConfig {
    /// Reads the file.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] if it is not a JSON object.
    pub fn parse(json: &[u8]) -> Result<Self, TokenizerError> {
        let config: serde_json::Map<String, Value> =
            serde_json::from_slice(json).map_err(|error| invalid("tokenizer_config.json", error))?;
        // A token is a string, or an object with the string in it.
        let token = |key: &str| {
            let value = config.get(key)?;
            value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
        };
        let flag = |key: &str| config.get(key).and_then(Value::as_bool);
        let named = |entry: &Value| {
            Some((entry.get("name")?.as_str()?.to_owned(), entry.get("template")?.as_str()?.to_owned()))
        };
        let chat_templates = match config.get("chat_template") {
            Some(Value::String(template)) => vec![("default".to_owned(), template.clone())],
            Some(Value::Array(templates)) => templates.iter().filter_map(named).collect(),
            _ => Vec::new(),
        };
        Ok(Self {
            bos_token: token("bos_token"),
            eos_token: token("eos_token"),
            pad_token: token("pad_token"),
            unk_token: token("unk_token"),
            cls_token: token("cls_token"),
            add_bos_token: flag("add_bos_token"),
            add_eos_token: flag("add_eos_token"),
            chat_templates,
        })
    }

    /// Returns the template of that name (`default` is the one for plain chats).
    pub fn chat_template(&self, name: &str) -> Option<&str> {
        self.chat_templates.iter().find(|(own, _)| own == name).map(|(_, template)| template.as_str())
    }
}

/// The encoder that `tokenizer.json` describes.
#[derive(Debug)]
pub(super) struct Hf {
    parsing: tokenizers::Tokenizer,
    /// Finds the added tokens of a chat.
    added: AddedTokens,
    /// Made when it is needed first, which is rare in chats.
    as_text: OnceLock<AsText>,
    /// Made when a message names a token first.
    in_chat: OnceLock<AsText>,
}

/// A copy of the tokenizer in which the names of control tokens are text. Control tokens are replaced by a
/// [`PLACEHOLDER`] and one private character, so that a chat in which some names are text is still encoded as a whole.
#[derive(Debug)]
struct AsText {
    tokenizer: tokenizers::Tokenizer,
    /// Tokens of the placeholders in ascending order, with their control tokens.
    tokens: Vec<(u32, u32)>,
}

/// A noncharacter, which is removed from all texts.
const PLACEHOLDER: char = '\u{10fffe}';

/// The first of the private characters.
const PRIVATE: u32 = 0xf_0000;

impl Hf {
    fn new(parsing: tokenizers::Tokenizer, vocab: &Vocab) -> Result<Self, TokenizerError> {
        let decoder = parsing.get_added_tokens_decoder();
        let added = decoder.iter().map(|(&id, token)| Added {
            id,
            text: token.content.clone(),
            kind: vocab.kind(id).unwrap_or(TokenKind::Control),
            strip_left: false,
            strip_right: false,
        });
        let added = AddedTokens::new(added.collect())?;
        Ok(Self { parsing, added, as_text: OnceLock::new(), in_chat: OnceLock::new() })
    }

    pub(super) fn encode(&self, text: &str, special: SpecialTokens, ids: &mut Vec<u32>) {
        match special {
            SpecialTokens::Parse => encode(&self.parsing, text, ids),
            SpecialTokens::AsText if text.contains(PLACEHOLDER) => {
                encode(&self.as_text().tokenizer, &text.replace(PLACEHOLDER, ""), ids);
            }
            SpecialTokens::AsText => encode(&self.as_text().tokenizer, text, ids),
        }
    }

    /// See [`Tokenizer::encode_pair`].
    pub(super) fn encode_pair(&self, first: &str, second: &str, limit: usize) -> Option<Vec<(u32, u32)>> {
        let encode = |text: &str| self.parsing.encode_fast(text, false).unwrap_or_default();
        let added = self.parsing.get_post_processor().map_or(0, |processor| processor.added_tokens(true));
        let mut texts = [encode(first), encode(second)];
        let truncate = |text: &mut Encoding, len: usize| text.truncate(len, 0, TruncationDirection::Right);
        super::shorten(&mut texts, limit.checked_sub(added)?, Encoding::len, truncate);
        let [first, second] = texts;
        let both = self.parsing.post_process(first, Some(second), true).ok()?;
        Some(both.get_ids().iter().copied().zip(both.get_type_ids().iter().copied()).collect())
    }

    /// Returns true if one token may stand for a word of any length.
    pub(super) fn has_unbounded_tokens(&self) -> bool {
        matches!(
            self.parsing.get_model(),
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) | ModelWrapper::Unigram(_)
        )
    }

    pub(super) fn encode_chat(&self, prompt: &ChatPrompt, ids: &mut Vec<u32>) {
        let fragments = self.added.split_chat(prompt);
        if fragments == self.added.split(&prompt.text, SpecialTokens::Parse) {
            return encode(&self.parsing, &prompt.text, ids);
        }
        let in_chat = self.in_chat();
        let mut text = String::with_capacity(prompt.text.len());
        for fragment in fragments {
            match fragment {
                Fragment::Text(part) => text.extend(part.split(PLACEHOLDER)),
                Fragment::Token(id) => match in_chat.placeholder(id) {
                    Some(placeholder) => text.extend(placeholder),
                    // A token that is no control token is found by its name.
                    None => text.extend(self.parsing.id_to_token(id)),
                },
            }
        }
        let start = ids.len();
        encode(&in_chat.tokenizer, &text, ids);
        for id in &mut ids[start..] {
            if let Ok(at) = in_chat.tokens.binary_search_by_key(id, |&(placeholder, _)| placeholder) {
                *id = in_chat.tokens[at].1;
            }
        }
    }

    fn as_text(&self) -> &AsText {
        self.as_text.get_or_init(|| AsText::new(&self.parsing, |token| token.special))
    }

    /// Returns the copy in which the names of markers are also text.
    fn in_chat(&self) -> &AsText {
        self.in_chat.get_or_init(|| {
            AsText::new(&self.parsing, |token| token.special || special::is_marker(&token.content))
        })
    }
}

impl AsText {
    /// Makes text of the names of added tokens that are `hidden`.
    fn new(parsing: &tokenizers::Tokenizer, hidden: impl Fn(&AddedToken) -> bool) -> Self {
        let mut tokenizer = parsing.clone();
        tokenizer.set_encode_special_tokens(true);
        let added = tokenizer.get_added_tokens_decoder();
        let mut control: Vec<_> = added.into_iter().filter(|(_, token)| hidden(token)).collect();
        control.sort_unstable_by_key(|&(id, _)| id);
        control.truncate(0xfffe);
        // Names of special tokens only are text.
        let others = control.iter().filter(|(_, token)| !token.special);
        let others: Vec<_> = others.map(|(_, token)| AddedToken { special: true, ..token.clone() }).collect();
        let mut tokens = Vec::with_capacity(control.len());
        let mut placeholders = Vec::with_capacity(control.len());
        for (at, (id, mut token)) in control.into_iter().enumerate() {
            token.content = placeholder(at).into_iter().collect();
            token.special = false;
            tokens.push((token.content.clone(), id));
            placeholders.push(token);
        }
        // These fail only where a normalizer fails, and then no name is found at all.
        let _ = tokenizer.add_special_tokens(others);
        let _ = tokenizer.add_tokens(placeholders);
        let mut tokens: Vec<_> =
            tokens.into_iter().filter_map(|(name, id)| Some((tokenizer.token_to_id(&name)?, id))).collect();
        tokens.sort_unstable();
        Self { tokenizer, tokens }
    }

    /// Returns the characters that replace a control token.
    fn placeholder(&self, id: u32) -> Option<[char; 2]> {
        // Control tokens and placeholders were numbered in the same order.
        self.tokens.binary_search_by_key(&id, |&(_, control)| control).ok().map(placeholder)
    }
}

fn placeholder(at: usize) -> [char; 2] {
    [PLACEHOLDER, char::from_u32(PRIVATE + at as u32).unwrap_or(PLACEHOLDER)]
}

/// Encodes a text. Encoding can fail if a file's regular expression exceeds its steps; the halves of the text need
/// fewer.
fn encode(tokenizer: &tokenizers::Tokenizer, text: &str, ids: &mut Vec<u32>) {
    match tokenizer.encode_fast(text, false) {
        Ok(encoding) => ids.extend_from_slice(encoding.get_ids()),
        Err(_) => {
            let middle = text.ceil_char_boundary(text.len() / 2);
            if middle > 0 && middle < text.len() {
                encode(tokenizer, &text[..middle], ids);
                encode(tokenizer, &text[middle..], ids);
            }
        }
    }
}

/// More tokens than any vocabulary has; ids above would only cost memory.
const MAX_TOKENS: u32 = 1 << 24;

pub(super) fn read(tokenizer_json: &[u8], config: &TokenizerConfig) -> Result<Tokenizer, TokenizerError> {
    check_syntax(tokenizer_json)?;
    limits::check_json(tokenizer_json)?;
    let mut tokenizer = guarded(|| tokenizers::Tokenizer::from_bytes(tokenizer_json))?;
    // Some files carry the settings of a training run.
    tokenizer.with_truncation(None).map_err(|error| invalid("tokenizer.json", error))?;
    tokenizer.with_padding(None);
    tokenizer.set_encode_special_tokens(false);

    let rules = DecodeRules::new(&tokenizer)?;
    let vocab = read_vocab(&tokenizer, &rules)?;
    let find = |name: &Option<String>| vocab.find(name.as_deref()?.as_bytes());
    let (bos, eos) = (find(&config.bos_token), find(&config.eos_token));
    let (mut prefix, mut suffix) = template(&tokenizer)?;
    let set = |tokens: &mut Vec<u32>, token: Option<u32>, wanted: Option<bool>| match (token, wanted) {
        (Some(token), Some(true)) if !tokens.contains(&token) => tokens.push(token),
        (Some(token), Some(false)) => tokens.retain(|&other| other != token),
        _ => {}
    };
    set(&mut prefix, bos, config.add_bos_token);
    set(&mut suffix, eos, config.add_eos_token);
    let encoder = Encoder::Hf(Box::new(Hf::new(tokenizer, &vocab)?));
    Ok(Tokenizer {
        stop_tokens: stop::stop_tokens(&vocab, eos),
        vocab,
        encoder,
        normalizer: Normalizer::default(),
        bos,
        eos,
        prefix,
        suffix,
        strips_first_space: rules.strips_first_space,
    })
}

/// Returns the tokens that the post-processor adds around a text.
fn template(tokenizer: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>), TokenizerError> {
    let encoding = guarded(|| tokenizer.encode("a", true))?;
    let (ids, mask) = (encoding.get_ids(), encoding.get_special_tokens_mask());
    let prefix = mask.iter().take_while(|&&special| special == 1).count();
    let suffix = mask[prefix..].iter().rev().take_while(|&&special| special == 1).count();
    if prefix.max(suffix) > limits::MAX_TEMPLATE {
        let problem = format!("{prefix} tokens before and {suffix} after each text");
        return Err(invalid("tokenizer.json", problem));
    }
    Ok((ids[..prefix].to_vec(), ids[ids.len() - suffix..].to_vec()))
}

fn read_vocab(tokenizer: &tokenizers::Tokenizer, rules: &DecodeRules) -> Result<Vocab, TokenizerError> {
    let added = tokenizer.get_added_tokens_decoder();
    let mut names: Vec<(u32, String)> =
        tokenizer.get_vocab(true).into_iter().map(|(name, id)| (id, name)).collect();
    // Some fine-tuned models redefine tokens by added ones; encoding produces the added ones.
    names.sort_unstable_by_key(|(id, name)| (*id, added.get(id).is_none_or(|token| token.content != *name)));
    names.dedup_by_key(|(id, _)| *id);
    if let Some((id, _)) = names.last().filter(|(id, _)| *id >= MAX_TOKENS) {
        return Err(invalid("tokenizer.json", format!("token id {id} is too large")));
    }
    let mut vocab = Vocab::with_capacity(names.len());
    for (id, name) in names {
        limits::check_name("tokenizer.json", id as usize, name.as_bytes())?;
        // Ids that no token has.
        while vocab.len() < id as usize {
            vocab.push(format!("[EMPTY_{}]", vocab.len()).as_bytes(), TokenKind::Unused, |_| {});
        }
        let (bytes, kind) = match added.get(&id) {
            Some(token) => {
                let kind = if token.special { TokenKind::Control } else { TokenKind::UserDefined };
                (rules.added(&name), kind)
            }
            None => rules.normal(&name),
        };
        vocab.push(name.as_bytes(), kind, |written| written.extend_from_slice(&bytes));
    }
    Ok(vocab)
}

/// Rules of decoding a token's name.
#[derive(Debug, Default)]
struct DecodeRules {
    byte_level: bool,
    byte_fallback: bool,
    replacements: Vec<(String, String)>,
    /// Prefix of the parts of a word but the first; others begin with a space.
    continues: Option<String>,
    strips_first_space: bool,
}

const DECODERS: &str =
    "ByteLevel, ByteFallback, Metaspace, WordPiece, Replace of a string, Fuse, Strip of one leading space";

impl DecodeRules {
    fn new(tokenizer: &tokenizers::Tokenizer) -> Result<Self, TokenizerError> {
        let decoder = serde_json::to_value(tokenizer.get_decoder());
        let decoder = decoder.map_err(|error| invalid("tokenizer.json", error))?;
        let mut rules = Self::default();
        rules.add(&decoder)?;
        Ok(rules)
    }

    fn add(&mut self, decoder: &Value) -> Result<(), TokenizerError> {
        let kind = decoder["type"].as_str().unwrap_or("none");
        match kind {
            "Sequence" => {
                decoder["decoders"].as_array().into_iter().flatten().try_for_each(|d| self.add(d))?
            }
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => {}
            "WordPiece" => {
                self.continues = Some(decoder["prefix"].as_str().unwrap_or("##").to_owned());
                self.strips_first_space = true;
            }
            "Metaspace" => {
                let replacement = decoder["replacement"].as_str().unwrap_or(super::spm::SPACE);
                self.replacements.push((replacement.to_owned(), " ".to_owned()));
                self.strips_first_space |= decoder["prepend_scheme"] != "never";
            }
            "Replace" if decoder["pattern"]["String"].is_string() && decoder["content"].is_string() => {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                self.replacements.push((text(&decoder["pattern"]["String"]), text(&decoder["content"])));
            }
            "Strip" if decoder["content"] == " " && decoder["start"] == 1 && decoder["stop"] == 0 => {
                self.strips_first_space = true;
            }
            _ => {
                return Err(TokenizerError::UnsupportedDecoder { name: kind.into(), supported: DECODERS });
            }
        }
        Ok(())
    }

    fn normal(&self, name: &str) -> (Vec<u8>, TokenKind) {
        match byte_value(name).filter(|_| self.byte_fallback) {
            Some(byte) => (vec![byte], TokenKind::Byte),
            None => {
                let name = self.replaced(name);
                let mut bytes = Vec::with_capacity(name.len());
                if !(self.byte_level && write_name(&name, &mut bytes)) {
                    bytes = name.into_bytes();
                }
                (bytes, TokenKind::Normal)
            }
        }
    }

    fn added(&self, name: &str) -> Vec<u8> {
        self.replaced(name).into_bytes()
    }

    fn replaced(&self, name: &str) -> String {
        if let Some(continues) = &self.continues {
            return name.strip_prefix(continues).map_or_else(|| format!(" {name}"), str::to_owned);
        }
        self.replacements.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
    }
}

/// The tokenizers crate panics where a decoder is not well-formed JSON, so that is found out first.
fn check_syntax(json: &[u8]) -> Result<(), TokenizerError> {
    serde_json::from_slice::<WellFormed>(json).map(|_| ()).map_err(|error| invalid("tokenizer.json", error))
}

/// Any JSON, parsed like [`Value`] and discarded. Serde's `IgnoredAny` does not check strings.
struct WellFormed;

impl<'de> Deserialize<'de> for WellFormed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for WellFormed {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self, A::Error> {
        while entries.next_entry::<Self, Self>()?.is_some() {}
        Ok(self)
    }
}

/// Calls the tokenizers crate, which panics on files that contradict themselves, such as a template that names a token it
/// does not define.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TokenizerError> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| invalid("tokenizer.json", error)),
        Err(_) => Err(invalid("tokenizer.json", "its parts contradict each other")),
    }
}

fn invalid(what: &str, problem: impl ToString) -> TokenizerError {
    TokenizerError::Invalid { what: what.into(), problem: problem.to_string() }
}
