//! Byte-pair encoding of SentencePiece: pieces have scores, and the neighbours that form the piece with the best score
//! merge first. Text without a piece is written as bytes, `<0xAB>`.

use std::collections::HashSet;

use super::{
    TokenizerError,
    merge::{Merge, Merger},
    vocab::Vocab,
};

/// SentencePiece writes a space as this.
pub(super) const SPACE: &str = "▁";

#[derive(Debug)]
pub(super) struct Spm {
    /// Ranks by token: a better score has a lower rank.
    ranks: Vec<u32>,
    /// Text after a special token, and at the beginning, gets a space in front.
    pub(super) add_space_prefix: bool,
    /// For bytes that have no token.
    unknown: Option<u32>,
    /// Characters that some piece has before a space. Before any other space nothing merges, so text is cut there.
    before_space: HashSet<char>,
}

impl Spm {
    pub(super) fn new(
        scores: &[f32],
        vocab: &Vocab,
        add_space_prefix: bool,
        unknown: Option<u32>,
    ) -> Result<Self, TokenizerError> {
        if scores.len() < vocab.len() {
            return Err(TokenizerError::Invalid {
                what: "tokenizer.ggml.scores".into(),
                problem: format!("{} scores for {} tokens", scores.len(), vocab.len()),
            });
        }
        let mut before_space = HashSet::new();
        for (id, _) in vocab.kinds().filter(|(_, kind)| !kind.is_reserved()) {
            let name = String::from_utf8_lossy(vocab.name(id));
            before_space
                .extend(name.match_indices(SPACE).filter_map(|(at, _)| name[..at].chars().next_back()));
        }
        let ranks = scores.iter().map(|&score| rank(score)).collect();
        Ok(Self { ranks, add_space_prefix, unknown, before_space })
    }

    /// Appends the tokens of `text`; `after_special` is true if it begins the text or follows a special token.
    pub(super) fn encode(&self, text: &str, after_special: bool, vocab: &Vocab, ids: &mut Vec<u32>) {
        let mut escaped = String::with_capacity(text.len() + text.len() / 2);
        if self.add_space_prefix && after_special {
            escaped.push_str(SPACE);
        }
        text.split_inclusive(' ').for_each(|part| match part.strip_suffix(' ') {
            Some(word) => escaped.extend([word, SPACE]),
            None => escaped.push_str(part),
        });

        let mut merger = Merger::default();
        let mut start = 0;
        let cuts = escaped.match_indices(SPACE).map(|(at, _)| at).filter(|&at| {
            escaped[..at].chars().next_back().is_some_and(|before| !self.before_space.contains(&before))
        });
        for end in cuts.chain([escaped.len()]) {
            self.encode_word(&escaped[start..end], vocab, &mut merger, ids);
            start = end;
        }
    }

    fn encode_word(&self, word: &str, vocab: &Vocab, merger: &mut Merger, ids: &mut Vec<u32>) {
        let text = word.as_bytes();
        let symbols = word.char_indices().map(|(start, c)| {
            let span = start..start + c.len_utf8();
            (span.clone(), vocab.find_text(&text[span]))
        });
        merger.run(
            symbols,
            |left, right| {
                let token = vocab.find_text(&text[left.span().start..right.span().end])?;
                Some(Merge { rank: self.ranks[token as usize], token })
            },
            |symbol| match symbol.token {
                Some(token) => ids.push(token),
                None => ids.extend(text[symbol.span()].iter().filter_map(|&byte| self.byte(byte, vocab))),
            },
        );
    }

    fn byte(&self, byte: u8, vocab: &Vocab) -> Option<u32> {
        vocab.find_byte(byte).or_else(|| vocab.find_text(&[byte])).or(self.unknown)
    }
}

/// Returns a number that is the lower the higher the score: the bits of a float, ordered as the float is, reversed.
fn rank(score: f32) -> u32 {
    let bits = score.to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_scores_in_reverse() {
        let scores = [f32::INFINITY, 1e9, 1.0, 0.0, -1e-9, -1.0, -2.0, -1e9, f32::NEG_INFINITY];
        assert!(scores.map(rank).is_sorted());
        assert!(rank(-1.0) < rank(-2.0));
    }
}
