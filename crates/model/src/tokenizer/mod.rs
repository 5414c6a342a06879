//! Text to tokens and back.
//!
//! Three kinds of encoders implement [`Tokenizer`]: SentencePiece's byte-pair encoding and GPT-2's, both read from GGUF
//! metadata, and the encoders of `tokenizer.json`. Decoding is common: a token writes bytes, and bytes become text.

mod bpe;
mod breakers;
mod encoders;
mod export;
mod fim;
mod gguf;
mod hf;
mod limits;
mod merge;
mod normalize;
mod pretokenize;
mod special;
mod spm;
mod stop;
mod stream;
mod vocab;
mod within;

use std::{borrow::Cow, sync::Arc};

use normalize::Normalizer;
use special::{AddedTokens, Fragment};
use vocab::{TokenKind, Vocab};

use crate::{
    chat::{ChatPrompt, ControlNames},
    gguf::{Metadata, MetadataError, Value},
};

pub use breakers::SEQUENCE_BREAKERS;
pub use fim::Gap;
pub use hf::TokenizerConfig;
pub use stream::DecodeStream;
pub use within::Cut;

/// Interpretation of control token names in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// `<|end|>` is the token of that name: for prompts that a chat template made.
    Parse,
    /// `<|end|>` is seven characters, for text from other sources. Tokens that a vocabulary defines as ordinary text,
    /// such as runs of spaces, are still matched.
    AsText,
}

/// Display of control tokens in decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialText {
    /// They write nothing.
    Hide,
    /// They write their names.
    Show,
}

/// A vocabulary with its rules. Cheap to use from many threads at once.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    encoder: Encoder,
    /// Of texts between control tokens; a `tokenizer.json` has its own.
    normalizer: Normalizer,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Tokens before each prompt.
    prefix: Vec<u32>,
    /// Tokens after each prompt.
    suffix: Vec<u32>,
    /// The first space of a text is an artefact of encoding.
    strips_first_space: bool,
    stop_tokens: Vec<u32>,
}

#[derive(Debug)]
enum Encoder {
    Spm(spm::Spm, AddedTokens),
    Bpe(bpe::Bpe, AddedTokens),
    Hf(Box<hf::Hf>),
}

impl Tokenizer {
    /// Reads the vocabulary of a GGUF file (`tokenizer.ggml.*`): the models `llama` (SentencePiece), `gpt2`
    /// (byte-level, with llama.cpp's pre-tokenizers) and `gemma4`.
    ///
    /// # Errors
    /// [`TokenizerError`], with the missing or unsupported part.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        gguf::read(metadata)
    }

    /// Returns the names of the tokens of a GGUF file; `None` if it has no tokenizer. Files with the same names have no
    /// [difference](Tokenizer::difference).
    pub(crate) fn listed_in(metadata: &Metadata) -> Option<&Value> {
        metadata.get(gguf::TOKENS)
    }

    /// Reads Hugging Face's `tokenizer.json`. `tokenizer_config.json` determines BOS and EOS, and whether they are
    /// added.
    ///
    /// # Errors
    /// [`TokenizerError`], if a file is malformed or its decoder is not supported.
    pub fn from_hf(tokenizer_json: &[u8], tokenizer_config: Option<&[u8]>) -> Result<Self, TokenizerError> {
        let config = tokenizer_config.map(TokenizerConfig::parse).transpose()?.unwrap_or_default();
        hf::read(tokenizer_json, &config)
    }

    /// Writes the tokenizer of a folder as metadata of a GGUF file, with at least `size` tokens.
    pub(crate) fn write_gguf(
        &self,
        tokenizer_json: &[u8],
        config: &TokenizerConfig,
        size: usize,
        metadata: &mut Metadata,
    ) -> Result<(), TokenizerError> {
        export::write(self, tokenizer_json, config, size, metadata)
    }

    /// Returns what llama.cpp does otherwise with the tokenizer of a file that [`Tokenizer::write_gguf`] wrote, as phrases.
    pub(crate) fn differences_in_llama_cpp(metadata: &Metadata) -> Vec<String> {
        export::differences(metadata)
    }

    /// Returns true if prompts have tokens at both ends, which texts of encoders have and chats do not.
    fn is_around_texts(&self) -> bool {
        !self.prefix.is_empty() && !self.suffix.is_empty()
    }

    /// Returns the tokens of `text`, with nothing added.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_into(text, special, &mut ids);
        ids
    }

    /// Returns the tokens of a whole prompt: those of [`Tokenizer::encode`], between the model's initial and final
    /// tokens. They are not added twice, because clients that write a chat's template begin with the initial token. Models
    /// with both read texts and not chats, and get all tokens of the text and their own, as transformers adds them.
    pub fn encode_prompt(&self, text: &str, special: SpecialTokens) -> Vec<u32> {
        if !self.is_around_texts() {
            return self.whole_prompt(|ids| self.encode_into(text, special, ids));
        }
        let mut ids = self.prefix.clone();
        self.encode_into(text, special, &mut ids);
        ids.extend_from_slice(&self.suffix);
        ids
    }

    /// Returns the tokens of a chat between the model's initial and final tokens, which are not added twice. Only names that
    /// the template wrote become control tokens.
    pub fn encode_chat(&self, prompt: &ChatPrompt) -> Vec<u32> {
        self.whole_prompt(|ids| self.encode_chat_into(prompt, ids))
    }

    /// Returns the tokens of a chat with nothing added.
    pub(crate) fn encode_parts(&self, prompt: &ChatPrompt) -> Vec<u32> {
        let mut ids = Vec::new();
        self.encode_chat_into(prompt, &mut ids);
        ids
    }

    fn encode_chat_into(&self, prompt: &ChatPrompt, ids: &mut Vec<u32>) {
        match &self.encoder {
            Encoder::Spm(_, added) | Encoder::Bpe(_, added) => {
                self.encode_fragments(added.split_chat(prompt), ids);
            }
            Encoder::Hf(hf) => hf.encode_chat(prompt, ids),
        }
    }

    fn whole_prompt(&self, encode: impl FnOnce(&mut Vec<u32>)) -> Vec<u32> {
        let mut ids = self.prefix.clone();
        encode(&mut ids);
        let added = self.prefix.len();
        if added > 0 && ids[added..].starts_with(&self.prefix) {
            ids.drain(..added);
        }
        if !ids.ends_with(&self.suffix) {
            ids.extend_from_slice(&self.suffix);
        }
        ids
    }

    /// Returns the tokens of a pair of texts with the tokens that the model adds, at most `limit`, and the type of
    /// each: 0 or 1. If there are too many, the longer text loses its end. `None` if `limit` has no room for any.
    pub fn encode_pair(&self, first: &str, second: &str, limit: usize) -> Option<Vec<(u32, u32)>> {
        if let Encoder::Hf(hf) = &self.encoder {
            return hf.encode_pair(first, second, limit);
        }
        let mut texts = [first, second].map(|text| self.encode(text, SpecialTokens::Parse));
        let end = match self.suffix.is_empty() {
            true => self.eos.into_iter().collect(),
            false => self.suffix.clone(),
        };
        let room = limit.checked_sub(self.prefix.len() + end.len() + self.suffix.len())?;
        shorten(&mut texts, room, Vec::len, Vec::truncate);
        let [first, second] = texts;
        let ids = self.prefix.iter().chain(&first).chain(&end).chain(&second).chain(&self.suffix);
        Some(ids.map(|&id| (id, 0)).collect())
    }

    /// Returns the names of the tokens that only a template may write: control tokens, and user-defined ones with the
    /// form of a marker that `template` writes. Others are markup that models read in any text, such as `<table>`.
    pub(crate) fn control_names(&self, template: &str) -> ControlNames {
        let of_kind = |is_wanted: fn(TokenKind) -> bool| {
            let tokens = self.vocab.kinds().filter(move |(_, kind)| is_wanted(*kind));
            tokens.filter_map(|(id, _)| std::str::from_utf8(self.vocab.name(id)).ok())
        };
        let control = of_kind(TokenKind::is_special);
        let is_marker = |name: &&str| special::is_marker(name) && template.contains(name);
        let user_defined = of_kind(|kind| kind == TokenKind::UserDefined);
        ControlNames::new(control, user_defined.filter(is_marker))
    }

    fn encode_into(&self, text: &str, special: SpecialTokens, ids: &mut Vec<u32>) {
        match &self.encoder {
            Encoder::Spm(_, added) | Encoder::Bpe(_, added) => {
                self.encode_fragments(added.split(text, special), ids);
            }
            Encoder::Hf(hf) => hf.encode(text, special, ids),
        }
    }

    fn encode_fragments(&self, fragments: Vec<Fragment<'_>>, ids: &mut Vec<u32>) {
        let mut after_special = true;
        let mut encode = |fragment: Fragment<'_>| {
            match (fragment, &self.encoder) {
                (Fragment::Token(id), _) => ids.push(id),
                (Fragment::Text(text), Encoder::Spm(spm, _)) => {
                    spm.encode(text, after_special, &self.vocab, ids)
                }
                (Fragment::Text(text), Encoder::Bpe(bpe, _)) => bpe.encode(text, &self.vocab, ids),
                (Fragment::Text(text), Encoder::Hf(hf)) => hf.encode(text, SpecialTokens::AsText, ids),
            }
            after_special = matches!(fragment, Fragment::Token(_));
        };
        for fragment in fragments {
            match fragment {
                Fragment::Text(text) => self.normalizer.fragments(text, &mut encode),
                token => encode(token),
            }
        }
    }

    /// Returns the text of `ids`. Bytes that are not UTF-8 become U+FFFD, as [`String::from_utf8_lossy`] does it; ids
    /// outside of the vocabulary write nothing.
    pub fn decode(&self, ids: &[u32], special: SpecialText) -> String {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            bytes.extend_from_slice(self.written(id, special));
        }
        let stripped = if self.strips_first_space { bytes.strip_prefix(b" ") } else { None };
        String::from_utf8_lossy(stripped.unwrap_or(&bytes)).into_owned()
    }

    /// Decodes one token after the other; control tokens write nothing.
    pub fn stream(self: &Arc<Self>) -> DecodeStream {
        self.stream_with(SpecialText::Hide)
    }

    /// Decodes one token after the other.
    pub fn stream_with(self: &Arc<Self>, special: SpecialText) -> DecodeStream {
        DecodeStream::new(self.clone(), special)
    }

    fn written(&self, id: u32, special: SpecialText) -> &[u8] {
        match special {
            SpecialText::Hide if self.is_special(id) => &[],
            _ => self.vocab.bytes(id),
        }
    }

    /// Returns the bytes that a token writes, control tokens their names; not always whole characters, and nothing for
    /// ids outside of the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocab.bytes(id)
    }

    /// Returns the name of a token in the vocabulary: `Ġthe`, `▁the`, `<0x0A>`.
    pub fn token_name(&self, id: u32) -> Cow<'_, str> {
        String::from_utf8_lossy(self.vocab.name(id))
    }

    /// Returns the token with this name in the vocabulary.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.vocab.find(name.as_bytes())
    }

    /// Returns true for a control token, which writes no text: begin, end, roles, unknown.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocab.kind(id).is_some_and(TokenKind::is_special)
    }

    /// Returns the token that begins a text, whether or not prompts get it.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Returns the maximum bytes of a text of `tokens` tokens, [`usize::MAX`] if one token may be a word of any length.
    pub fn max_text_bytes(&self, tokens: usize) -> usize {
        if matches!(&self.encoder, Encoder::Hf(hf) if hf.has_unbounded_tokens()) {
            return usize::MAX;
        }
        let longest = self.vocab.longest();
        // Normalizers may make a text shorter before it is cut into tokens: composed characters, blanks that are stripped.
        let normalizes = matches!(self.encoder, Encoder::Hf(_)) || self.normalizer.form.is_some();
        let shrinks = if normalizes { 4 } else { 1 };
        tokens.saturating_mul(longest.max(1)).saturating_mul(shrinks)
    }

    /// Returns the number of tokens. The model's own vocabulary may be padded to more.
    pub fn vocab_size(&self) -> usize {
        self.vocab.len()
    }

    /// Returns the first token that another tokenizer has otherwise, as a sentence; `None` if all tokens that both have are equal.
    /// One of them may have more: vocabularies are padded.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let shared = self.vocab_size().min(other.vocab_size()) as u32;
        let unused = |id| [self, other].iter().all(|it| it.vocab.kind(id) == Some(TokenKind::Unused));
        let id = (0..shared).find(|&id| self.vocab.name(id) != other.vocab.name(id) && !unused(id))?;
        let [own, others] = [self, other].map(|it| it.token_name(id));
        Some(format!("its token {id} is `{others}`, and that of the model is `{own}`"))
    }

    /// Returns the tokens that end an answer: end of text, of turn, of message; those of the file, and those with known
    /// names. Sorted.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }
}

/// Shortens the longer one of two texts until both have `room` tokens.
fn shorten<T>(texts: &mut [T; 2], room: usize, len: fn(&T) -> usize, truncate: fn(&mut T, usize)) {
    let [first, second] = [len(&texts[0]), len(&texts[1])];
    if first + second <= room {
        return;
    }
    let half = room / 2;
    let first = first.min(half.max(room.saturating_sub(second)));
    truncate(&mut texts[0], first);
    truncate(&mut texts[1], room - first);
}

/// Reason for which there is no tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key of the metadata that is missing, or of the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A kind of tokenizer that does not exist here.
    #[error("tokenizer model `{name}` is not supported (supported: {supported})")]
    UnsupportedModel {
        /// `tokenizer.ggml.model`.
        name: String,
        /// Supported alternatives.
        supported: &'static str,
    },
    /// A pre-tokenizer that does not exist here.
    #[error("pre-tokenizer `{name}` is not supported (supported: {supported})")]
    UnsupportedPreTokenizer {
        /// `tokenizer.ggml.pre`.
        name: String,
        /// Supported alternatives.
        supported: String,
    },
    /// A file that decodes tokens in a way that does not exist here.
    #[error("tokenizer.json: decoder `{name}` is not supported (supported: {supported})")]
    UnsupportedDecoder {
        /// Its type.
        name: String,
        /// Supported alternatives.
        supported: &'static str,
    },
    /// Data that contradicts itself.
    #[error("{what}: {problem}")]
    Invalid {
        /// Name of the data.
        what: String,
        /// The problem.
        problem: String,
    },
}
