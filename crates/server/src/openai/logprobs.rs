//! Log-probabilities in the format of OpenAI's API.

use std::collections::BTreeMap;

use paguro_model::tokenizer::Tokenizer;
use serde::Serialize;
use utoipa::ToSchema;

use crate::generate::{PromptLogprobs, TokenLogprob};

/// The log-probabilities of an answer's tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// Tokens of the answer in order.
    content: Vec<ChatTokenLogprob>,
    /// Always `null`: refusals are ordinary text.
    refusal: Option<Vec<ChatTokenLogprob>>,
}

/// A token with its alternatives.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatTokenLogprob {
    /// The token itself.
    #[serde(flatten)]
    token: TopLogprob,
    /// The most probable tokens at its position.
    top_logprobs: Vec<TopLogprob>,
}

/// A token with its log-probability.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TopLogprob {
    /// Its text, with U+FFFD for incomplete characters.
    token: String,
    /// Natural logarithm of its probability.
    logprob: f32,
    /// Its bytes.
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Adds tokens.
    pub fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[TokenLogprob]) {
        self.content.extend(chat_logprobs(tokenizer, tokens));
    }
}

/// Converts tokens for `logprobs`.
pub fn chat_logprobs(tokenizer: &Tokenizer, tokens: &[TokenLogprob]) -> Vec<ChatTokenLogprob> {
    let of = |&(token, logprob): &(u32, f32)| {
        let bytes = tokenizer.token_bytes(token).to_vec();
        TopLogprob { token: String::from_utf8_lossy(&bytes).into_owned(), logprob: finite(logprob), bytes }
    };
    let all = |token: &TokenLogprob| ChatTokenLogprob {
        token: of(&(token.token, token.logprob)),
        top_logprobs: token.top.iter().map(of).collect(),
    };
    tokens.iter().map(all).collect()
}

/// Replaces infinities, which JSON does not have, by the value of OpenAI's API.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// Log-probabilities of the tokens of a continuation, and of the prompt if the answer contains it.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct TextLogprobs {
    /// Texts of the tokens; the last one may be the stop token, which is not part of the answer.
    tokens: Vec<String>,
    /// Log-probabilities, each conditioned on all tokens before it; `null` for the first token of the prompt.
    token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens at each position and the token itself; `null` for the first token of the prompt.
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Offset of each token's text in the answer, in characters.
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    /// Converts tokens of the answer. `end` is the number of characters before them, and is increased by theirs.
    pub fn new<'t>(
        tokenizer: &Tokenizer,
        tokens: impl IntoIterator<Item = &'t TokenLogprob>,
        end: &mut usize,
    ) -> Self {
        let mut logprobs = Self::default();
        for token in tokens {
            let hidden = tokenizer.is_special(token.token);
            let written = if hidden { &[] } else { tokenizer.token_bytes(token.token) };
            logprobs.push(tokenizer, token.token, Some(token), offset(written, *end));
            *end += characters(written);
        }
        logprobs
    }

    /// Converts the tokens of a prompt that is the beginning `text` of the answer.
    pub fn of_prompt(tokenizer: &Tokenizer, prompt: &PromptLogprobs, text: &str) -> Self {
        let mut logprobs = Self::default();
        let (mut rest, mut end) = (text.as_bytes(), 0);
        let first = std::iter::once((prompt.first, None));
        for (token, likely) in first.chain(prompt.rest.iter().map(|token| (token.token, Some(token)))) {
            logprobs.push(tokenizer, token, likely, offset(rest, end));
            let (own, others) = rest.split_at(written_length(tokenizer, token, rest));
            end += characters(own);
            rest = others;
        }
        logprobs
    }

    fn push(&mut self, tokenizer: &Tokenizer, token: u32, likely: Option<&TokenLogprob>, offset: usize) {
        let text = |token| String::from_utf8_lossy(tokenizer.token_bytes(token)).into_owned();
        self.tokens.push(text(token));
        self.token_logprobs.push(likely.map(|likely| finite(likely.logprob)));
        self.top_logprobs.push(likely.map(|TokenLogprob { token, logprob, top }| {
            let mut by_text = BTreeMap::new();
            for &(token, logprob) in top.iter().chain([&(*token, *logprob)]) {
                // Incomplete characters have one text; the most probable one is kept.
                by_text.entry(text(token)).or_insert(finite(logprob));
            }
            by_text
        }));
        self.text_offset.push(offset);
    }

    /// Appends later tokens.
    pub fn append(&mut self, mut other: Self) {
        self.tokens.append(&mut other.tokens);
        self.token_logprobs.append(&mut other.token_logprobs);
        self.top_logprobs.append(&mut other.top_logprobs);
        self.text_offset.append(&mut other.text_offset);
    }
}

/// Returns the number of bytes of a prompt's `rest` that belong to this token. They may differ from the token's text: a
/// control token may have no text, a first token may have an additional space, and a tokenizer may have normalized the
/// text.
fn written_length(tokenizer: &Tokenizer, token: u32, rest: &[u8]) -> usize {
    let written = tokenizer.token_bytes(token);
    let in_place = [Some(written), written.strip_prefix(b" ")];
    match in_place.into_iter().flatten().find(|written| rest.starts_with(written)) {
        Some(written) => written.len(),
        None if tokenizer.is_special(token) => 0,
        None => {
            let count = String::from_utf8_lossy(written).chars().count();
            let begins = |&(_, byte): &(usize, &u8)| begins_character(*byte);
            rest.iter().enumerate().filter(begins).nth(count).map_or(rest.len(), |(at, _)| at)
        }
    }
}

/// Counts the characters that begin in these bytes.
fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| begins_character(byte)).count()
}

/// Returns the offset of a text after `end` characters; a text that begins inside of a character has that character's
/// offset.
fn offset(text: &[u8], end: usize) -> usize {
    let inside = text.first().is_some_and(|&byte| !begins_character(byte));
    end.saturating_sub(usize::from(inside))
}

/// Returns true for the first byte of a UTF-8 character.
fn begins_character(byte: u8) -> bool {
    byte & 0xc0 != 0x80
}

#[cfg(test)]
mod tests {
    use paguro_model::gguf::{Array, Metadata, Value};

    use super::*;

    /// Control tokens, the bytes of a character, and words: token `i` is number `i`.
    const TOKENS: [(&str, i32); 9] = [
        ("<unk>", 2),
        ("<s>", 3),
        ("</s>", 3),
        ("<0xE6>", 6),
        ("<0x97>", 6),
        ("<0xA5>", 6),
        ("▁Once", 1),
        ("▁a", 1),
        ("n", 1),
    ];

    fn tokenizer() -> Tokenizer {
        let (names, kinds) = TOKENS.map(|(name, kind)| (name.to_owned(), kind)).into_iter().unzip();
        let mut metadata = Metadata::default();
        for (key, value) in [
            ("model", Value::String("llama".into())),
            ("tokens", Value::Array(Array::Strings(names))),
            ("token_type", Value::Array(Array::I32(kinds))),
            ("scores", Value::Array(Array::F32(vec![0.0; TOKENS.len()]))),
        ] {
            metadata.insert(format!("tokenizer.ggml.{key}"), value);
        }
        Tokenizer::from_gguf(&metadata).unwrap()
    }

    fn logprob(token: u32) -> TokenLogprob {
        TokenLogprob { token, logprob: -1.0, top: Vec::new() }
    }

    #[test]
    fn offsets_are_places_in_the_text() {
        let tokenizer = tokenizer();
        for (text, tokens, offsets) in [
            // A control token and a first space that are not in the text.
            ("Once an", &[1, 6, 7, 8][..], &[0, 0, 4, 6][..]),
            ("<s>Once</s>n", &[1, 6, 2, 8], &[0, 3, 7, 11]),
            (" Once", &[6, 8], &[0, 5]),
            // A character of three tokens.
            ("Once日n", &[6, 3, 4, 5, 8], &[0, 4, 4, 4, 5]),
            // Normalized text: the token has the same number of characters as the text.
            ("Once än", &[6, 7, 8], &[0, 4, 6]),
        ] {
            let rest = tokens[1..].iter().map(|&token| logprob(token)).collect();
            let prompt = PromptLogprobs { first: tokens[0], rest };
            let logprobs = TextLogprobs::of_prompt(&tokenizer, &prompt, text);
            assert_eq!(logprobs.text_offset, offsets, "{text:?}");
            assert_eq!((logprobs.token_logprobs[0], &logprobs.top_logprobs[0]), (None, &None));
        }
        let mut end = 4;
        let logprobs = TextLogprobs::new(&tokenizer, &[7, 3, 4, 5, 2].map(logprob), &mut end);
        assert_eq!((logprobs.text_offset.as_slice(), end), (&[4, 6, 6, 6, 7][..], 7));
    }

    #[test]
    fn the_best_tokens_and_the_token_itself_are_told_by_their_texts() {
        let token = TokenLogprob { token: 8, logprob: -9.0, top: vec![(4, -1.0), (3, -2.0), (6, -3.0)] };
        let logprobs = TextLogprobs::new(&tokenizer(), [&token], &mut 0);
        let expected = BTreeMap::from([("\u{fffd}", -1.0), (" Once", -3.0), ("n", -9.0)]);
        let top: BTreeMap<_, _> = logprobs.top_logprobs[0]
            .iter()
            .flatten()
            .map(|(text, &logprob)| (text.as_str(), logprob))
            .collect();
        assert_eq!(top, expected);
    }
}
