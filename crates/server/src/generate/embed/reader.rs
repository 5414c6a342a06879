//! Tokens of texts, within the bounds of a request.

use paguro_model::{Model, tokenizer::SpecialTokens};

use super::{
    super::{Prompt, request::check_text},
    Field, Truncation,
};
use crate::{count::ClientCount, error::ApiError};

/// Tokenizer of a request's texts.
pub struct TextReader<'m> {
    pub model: &'m Model,
    /// Most tokens that the model reads.
    pub most: usize,
    pub truncation: Truncation,
    pub field: Field,
}

impl TextReader<'_> {
    /// Returns the tokens of the text at `index` with `before` before it.
    pub fn tokens(&self, before: &str, input: Prompt, index: usize) -> Result<Vec<u32>, ApiError> {
        let tokenizer = &self.model.tokenizer;
        match input {
            Prompt::Tokens(mut tokens) => {
                if let Truncation::Cut { at, tokens: limit } = self.truncation {
                    tokenizer.cut(&mut tokens, self.limit(limit)?, at);
                }
                if tokens.len() > self.most {
                    return Err(self.too_long(index, tokens.len(), true));
                }
                Ok(tokens)
            }
            Prompt::Text(text) | Prompt::Gap { prefix: text, .. } | Prompt::Images { text, .. } => {
                let text = if before.is_empty() { text } else { format!("{before}{text}") };
                self.encode(&text, index)
            }
        }
    }

    /// Returns the tokens of a whole text.
    pub fn encode(&self, text: &str, index: usize) -> Result<Vec<u32>, ApiError> {
        let tokenizer = &self.model.tokenizer;
        if let Truncation::Cut { at, tokens } = self.truncation {
            let tokens = tokenizer.encode_within(text, SpecialTokens::Parse, self.limit(tokens)?, at);
            return self.not_empty(tokens, index);
        }
        // A text that is certainly too long is not tokenized.
        if let Err(ApiError::ContextTooLong { tokens, .. }) =
            check_text(text, self.model, self.most.saturating_mul(2))
        {
            return Err(self.too_long(index, tokens, false));
        }
        let tokens = tokenizer.encode_prompt(text, SpecialTokens::Parse);
        if tokens.len() > self.most {
            return Err(self.too_long(index, tokens.len(), true));
        }
        self.not_empty(tokens, index)
    }

    /// Returns the most tokens of a text that is cut.
    fn limit(&self, requested: Option<(ClientCount, &'static str)>) -> Result<usize, ApiError> {
        requested.map_or(Ok(self.most), |(count, param)| count.within(1..=self.most, param))
    }

    fn not_empty(&self, tokens: Vec<u32>, index: usize) -> Result<Vec<u32>, ApiError> {
        if tokens.is_empty() {
            let param = self.field.at(index);
            let message = format!("`{param}` has no tokens, so it has no embedding; leave it out");
            return Err(ApiError::invalid(param, message));
        }
        Ok(tokens)
    }

    fn too_long(&self, index: usize, tokens: usize, is_exact: bool) -> ApiError {
        ApiError::InputTooLong { param: self.field.at(index), tokens, is_exact, limit: self.most }
    }
}
