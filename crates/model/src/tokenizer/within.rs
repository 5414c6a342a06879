//! Texts that are longer than a model reads.

use super::{SpecialTokens, Tokenizer};

/// The end of a text that loses tokens if the text is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// The text keeps its beginning.
    #[default]
    End,
    /// The text keeps its end.
    Start,
}

/// Tokens beyond those that are kept that a long text is tokenized to. The tokens where a text is cut differ from those of the
/// whole text, and these few are cut off again.
const MARGIN: usize = 64;

impl Tokenizer {
    /// Returns the tokens of a whole prompt as [`Tokenizer::encode_prompt`] does, at most `most`. A longer text is cut; the tokens
    /// that the model adds around a text stay.
    pub fn encode_within(&self, text: &str, special: SpecialTokens, most: usize, cut: Cut) -> Vec<u32> {
        let mut ids = self.encode_prompt(self.part(text, most, cut), special);
        self.cut(&mut ids, most, cut);
        ids
    }

    /// Cuts the tokens of a whole prompt to at most `most`. The tokens that the model adds around a text stay.
    pub fn cut(&self, ids: &mut Vec<u32>, most: usize, cut: Cut) {
        let Some(excess) = ids.len().checked_sub(most).filter(|&excess| excess > 0) else { return };
        let prefix = if ids.starts_with(&self.prefix) { self.prefix.len() } else { 0 };
        let suffix = if ids.ends_with(&self.suffix) { self.suffix.len() } else { 0 };
        if prefix + suffix > most {
            ids.truncate(most);
            return;
        }
        let from = match cut {
            Cut::Start => prefix,
            Cut::End => ids.len() - suffix - excess,
        };
        ids.drain(from..from + excess);
    }

    /// Returns the part of a text that its first or last `most` tokens come from, and some more.
    pub(crate) fn part<'t>(&self, text: &'t str, most: usize, cut: Cut) -> &'t str {
        // A token has a byte at least.
        if text.len() <= most {
            return text;
        }
        let bytes = self.max_text_bytes(most.saturating_add(MARGIN));
        match cut {
            Cut::End => &text[..text.floor_char_boundary(bytes)],
            Cut::Start => &text[text.ceil_char_boundary(text.len().saturating_sub(bytes))..],
        }
    }
}
