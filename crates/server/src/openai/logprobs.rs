//! Log-probabilities as OpenAI's API writes them.

use std::collections::BTreeMap;

use paguro_model::tokenizer::Tokenizer;
use serde::Serialize;
use utoipa::ToSchema;

use crate::generate::TokenLogprob;

/// The log-probabilities of an answer's tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// Of its tokens, one after the other.
    content: Vec<ChatTokenLogprob>,
    /// Always `null`: a refusal is text like any other.
    refusal: Option<Vec<ChatTokenLogprob>>,
}

/// A token with its alternatives.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatTokenLogprob {
    /// The token itself.
    #[serde(flatten)]
    token: TopLogprob,
    /// The best tokens in its place.
    top_logprobs: Vec<TopLogprob>,
}

/// A token with its log-probability.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TopLogprob {
    /// Its text; what is not whole characters shows as U+FFFD.
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

/// Tokens as `logprobs` lists them.
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

/// JSON has no infinity; this is what OpenAI's API writes in its place.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// The log-probabilities of a continued text's tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct TextLogprobs {
    /// The tokens' texts.
    tokens: Vec<String>,
    /// Their log-probabilities.
    token_logprobs: Vec<f32>,
    /// The best tokens in each place, with theirs.
    top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Where in the answer each token's text begins, in characters.
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    /// Of these tokens; `offset` is where the first one's text begins, and then where the next one's will.
    pub fn new(tokenizer: &Tokenizer, tokens: &[TokenLogprob], offset: &mut usize) -> Self {
        let text = |token| String::from_utf8_lossy(tokenizer.token_bytes(token)).into_owned();
        let mut logprobs = Self::default();
        for TokenLogprob { token, logprob, top } in tokens {
            let written = text(*token);
            logprobs.text_offset.push(*offset);
            *offset += written.chars().count();
            logprobs.tokens.push(written);
            logprobs.token_logprobs.push(finite(*logprob));
            let top = top.iter().map(|&(token, logprob)| (text(token), finite(logprob)));
            logprobs.top_logprobs.push(top.collect());
        }
        logprobs
    }

    /// Adds what comes after.
    pub fn append(&mut self, mut other: Self) {
        self.tokens.append(&mut other.tokens);
        self.token_logprobs.append(&mut other.token_logprobs);
        self.top_logprobs.append(&mut other.top_logprobs);
        self.text_offset.append(&mut other.text_offset);
    }
}
