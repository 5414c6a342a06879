//! Reasoning with a limit: it is closed with the model's own marker when it has grown long enough.
//!
//! The engine finds where reasoning begins and ends in the bytes of tokens, so markers may be one token or several.

use std::sync::Arc;

use paguro_backend::TokenMask;
use paguro_model::tokenizer::Tokenizer;

/// Bounds the reasoning of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThoughtLimit {
    /// Most tokens between the markers.
    pub max_tokens: usize,
    /// True if the prompt ends within reasoning. Otherwise reasoning begins with `open` at the beginning of the answer.
    pub begun: bool,
    /// The marker that begins reasoning.
    pub open: String,
    /// The marker that ends it.
    pub close: String,
    /// Tokens that end reasoning: `close`, and the text around it.
    pub closing: Vec<u32>,
}

/// A limit with the data that the engine needs to enforce it.
#[derive(Debug)]
pub(crate) struct Watch {
    limit: ThoughtLimit,
    tokenizer: Arc<Tokenizer>,
    /// Masks that allow one of the closing tokens each.
    closing: Vec<Arc<TokenMask>>,
}

impl Watch {
    /// Creates the watch for a vocabulary of `vocab` tokens that contains all closing tokens.
    pub fn new(limit: ThoughtLimit, tokenizer: Arc<Tokenizer>, vocab: usize) -> Self {
        let only = |&token: &u32| {
            let mut bits = vec![0_u32; vocab.div_ceil(32)];
            bits[token as usize / 32] |= 1 << (token % 32);
            Arc::new(TokenMask::new(bits))
        };
        let closing = limit.closing.iter().map(only).collect();
        Self { limit, tokenizer, closing }
    }
}

/// Position of an answer in its reasoning.
#[derive(Clone, Debug)]
pub(crate) struct Thought {
    watch: Arc<Watch>,
    at: At,
}

#[derive(Clone, Debug)]
enum At {
    /// Before the marker that begins reasoning, of which this may be a part.
    Before(Vec<u8>),
    /// After `tokens` tokens of reasoning; the last bytes may be a part of the closing marker.
    Within {
        tokens: usize,
        last: Vec<u8>,
    },
    /// This closing token is next.
    Closing(usize),
    After,
}

impl Thought {
    /// Before the first token of an answer.
    pub fn new(watch: Arc<Watch>) -> Self {
        let at = if watch.limit.begun { At::within(&watch, 0, Vec::new()) } else { At::Before(Vec::new()) };
        Self { watch, at }
    }

    /// Returns the mask that makes the next token a closing one, if it must be.
    pub fn mask(&self) -> Option<&Arc<TokenMask>> {
        match self.at {
            At::Closing(next) => self.watch.closing.get(next),
            _ => None,
        }
    }

    /// Returns true if the token after the next one may have to be a closing one.
    pub fn may_close(&self) -> bool {
        match &self.at {
            At::Before(_) => self.watch.limit.max_tokens == 0,
            At::Within { tokens, .. } => tokens + 1 >= self.watch.limit.max_tokens,
            At::Closing(_) => true,
            At::After => false,
        }
    }

    /// Goes on with a token of the answer.
    pub fn push(&mut self, token: u32) {
        let Self { watch, at } = self;
        let bytes = watch.tokenizer.token_bytes(token);
        *at = match std::mem::replace(at, At::After) {
            At::Before(mut seen) => {
                seen.extend_from_slice(bytes);
                let open = watch.limit.open.as_bytes();
                let text = seen.trim_ascii_start();
                match text.strip_prefix(open) {
                    Some(rest) => At::within(watch, 0, rest.to_vec()),
                    None if open.starts_with(text) => At::Before(text.to_vec()),
                    None => At::After,
                }
            }
            At::Within { tokens, mut last } => {
                last.extend_from_slice(bytes);
                At::within(watch, tokens + 1, last)
            }
            At::Closing(next) if watch.limit.closing.get(next) == Some(&token) => match next + 1 {
                end if end == watch.limit.closing.len() => At::After,
                next => At::Closing(next),
            },
            // A grammar has left no room for it.
            At::Closing(_) | At::After => At::After,
        };
    }
}

impl At {
    /// After `tokens` tokens of reasoning that end with `last`.
    fn within(watch: &Watch, tokens: usize, mut last: Vec<u8>) -> Self {
        let close = watch.limit.close.as_bytes();
        if last.windows(close.len().max(1)).any(|part| part == close) {
            return Self::After;
        }
        if tokens >= watch.limit.max_tokens {
            return Self::Closing(0);
        }
        last.drain(..last.len().saturating_sub(close.len()));
        Self::Within { tokens, last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads an answer whose tokens are single bytes, and forces its closing tokens into it.
    fn read(answer: &str, max_tokens: usize, begun: bool) -> String {
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}, "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "vocab": (b'!'..=b'~').map(|byte| (char::from(byte).to_string(), byte - b'!')).collect::<std::collections::BTreeMap<_, _>>(),
                "merges": []},
        });
        let tokenizer = Arc::new(Tokenizer::from_hf(json.to_string().as_bytes(), None).unwrap());
        let token = |byte: u8| u32::from(byte - b'!');
        let closing = b"</t>!".map(token).to_vec();
        let (open, close) = ("<t>".to_owned(), "</t>".to_owned());
        let limit = ThoughtLimit { max_tokens, begun, open, close, closing };
        let mut thought = Thought::new(Arc::new(Watch::new(limit, tokenizer, 94)));
        let mut answer = answer.bytes();
        let mut text = String::new();
        loop {
            let forced = thought.mask().map(|mask| {
                let bits = mask.bits();
                let token = (0..94).find(|token| bits[token / 32] >> (token % 32) & 1 == 1).unwrap();
                token as u8 + b'!'
            });
            assert!(forced.is_none() || thought.may_close());
            let Some(byte) = forced.or_else(|| answer.next()) else { return text };
            thought.push(token(byte));
            text.push(byte.into());
        }
    }

    #[test]
    fn reasoning_is_closed_at_its_limit() {
        for (answer, max_tokens, begun, expected) in [
            ("abcdef", 3, true, "abc</t>!def"),
            ("abc", 0, true, "</t>!abc"),
            ("a</t>bcdef", 5, true, "a</t>bcdef"),
            ("a</t>bcdef", 4, true, "a</t</t>!>bcdef"),
            ("abcdef", 3, false, "abcdef"),
            ("<t>abcdef", 3, false, "<t>abc</t>!def"),
            ("<t>abcdef", 0, false, "<t></t>!abcdef"),
            ("<b><t>abcdef", 1, false, "<b><t>abcdef"),
            ("<t>a</t>b<t>cdef", 9, false, "<t>a</t>b<t>cdef"),
            ("abcdef", usize::MAX, true, "abcdef"),
        ] {
            assert_eq!(read(answer, max_tokens, begun), expected, "{answer} {max_tokens}");
        }
    }
}
