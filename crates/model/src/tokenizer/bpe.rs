//! Byte-pair encoding by a list of merges, as in GPT-2: text is split into words, words into bytes, and the pair that
//! is first in the list merges first.

use super::{
    TokenizerError,
    merge::{Merge, Merger, Symbol},
    pretokenize::PreTokenizer,
    spm::SPACE,
    vocab::{Duplicate, Names, Vocab},
};

#[derive(Debug)]
pub(super) struct Bpe {
    pre: PreTokenizer,
    /// The lines of the list, `left right`, by rank.
    merges: Names,
    /// The token of each byte, for byte-level vocabularies.
    byte_tokens: Vec<Option<u32>>,
}

impl Bpe {
    /// `merges` are lines of two names with a space between them, best first.
    pub(super) fn new<'m>(
        pre: PreTokenizer,
        merges: impl ExactSizeIterator<Item = &'m [u8]>,
        vocab: &Vocab,
    ) -> Result<Self, TokenizerError> {
        // Resolving the tokens of all lines would take longer than the rest of loading a model. A prompt needs few of
        // them, and resolves them by name.
        let mut names = Names::with_capacity(merges.len());
        for (rank, line) in merges.enumerate() {
            if line.len() < 3 || !line[1..line.len() - 1].contains(&b' ') {
                return Err(TokenizerError::Invalid {
                    what: "tokenizer.ggml.merges".into(),
                    problem: format!("line {rank}, {:?}, is not a pair", String::from_utf8_lossy(line)),
                });
            }
            names.push(line, Duplicate::IsHidden);
        }
        let byte_token = |byte| vocab.find_text(byte_to_char(byte).encode_utf8(&mut [0; 4]).as_bytes());
        let byte_tokens = (0..=255).map(byte_token).collect();
        Ok(Self { pre, merges: names, byte_tokens })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, text: &str, vocab: &Vocab, ids: &mut Vec<u32>) {
        let mut merger = Merger::default();
        if self.pre.byte_level {
            let mut name = String::new();
            for word in self.pre.words(text) {
                let word = &text.as_bytes()[word];
                if self.pre.ignore_merges {
                    name.clear();
                    name.extend(word.iter().map(|&byte| byte_to_char(byte)));
                    if let Some(token) = vocab.find_text(name.as_bytes()) {
                        ids.push(token);
                        continue;
                    }
                }
                let symbols = word.iter().enumerate().map(|(at, &byte)| (at..at + 1, self.byte_token(byte)));
                // A byte without a token is lost, as it is in the original tokenizers.
                merger.run(
                    symbols,
                    |left, right| self.merge(left, right, vocab),
                    |symbol| ids.extend(symbol.token),
                );
            }
        } else {
            let text = text.replace(' ', SPACE);
            for word in self.pre.words(&text) {
                let word = &text[word];
                // Gemma 4 has tokens for runs of line breaks, but no merges that make them.
                let is_newlines = word.bytes().all(|byte| byte == b'\n');
                if let Some(token) = vocab.find_text(word.as_bytes()).filter(|_| is_newlines) {
                    ids.push(token);
                    continue;
                }
                let symbols = word.char_indices().map(|(at, c)| {
                    let span = at..at + c.len_utf8();
                    (span.clone(), vocab.find_text(word[span].as_bytes()))
                });
                merger.run(
                    symbols,
                    |left, right| self.merge(left, right, vocab),
                    |symbol| match symbol.token {
                        Some(token) => ids.push(token),
                        None => {
                            ids.extend(word[symbol.span()].bytes().filter_map(|byte| vocab.find_byte(byte)))
                        }
                    },
                );
            }
        }
    }

    fn byte_token(&self, byte: u8) -> Option<u32> {
        self.byte_tokens[usize::from(byte)]
    }

    fn merge(&self, left: &Symbol, right: &Symbol, vocab: &Vocab) -> Option<Merge> {
        let (left, right) = (vocab.name(left.token?), vocab.name(right.token?));
        let rank = self.merges.find(&[left, b" ", right])?;
        // A pair whose union is no token cannot merge.
        let token = vocab.find_joined(&[left, right])?;
        Some(Merge { rank, token })
    }
}

/// Returns the printable character by which GPT-2's vocabularies write a byte: itself where it is printable in Latin-1,
/// else the next free one from U+0100 on (`bytes_to_unicode` in GPT-2's `encoder.py`).
pub(super) fn byte_to_char(byte: u8) -> char {
    let code = match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
        0..=0x20 => 0x100 + u32::from(byte),
        0x7f..=0xa0 => 0x121 + u32::from(byte - 0x7f),
        0xad => 0x143,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Returns the inverse of [`byte_to_char`].
pub(super) fn char_to_byte(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    Some(byte as u8)
}

/// Appends the bytes of a name in a byte-level vocabulary. Returns false, after appending some of them, if a character
/// represents no byte.
pub(super) fn write_name(name: &str, bytes: &mut Vec<u8>) -> bool {
    name.chars().all(|c| char_to_byte(c).map(|byte| bytes.push(byte)).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_characters_are_one_to_one() {
        for byte in 0..=255 {
            assert_eq!(char_to_byte(byte_to_char(byte)), Some(byte));
        }
        // From GPT-2's table.
        assert_eq!(
            [b' ', b'\n', 0, 0x7f, 0xa0, 0xad, 0xff].map(byte_to_char),
            ['Ġ', 'Ċ', 'Ā', 'ġ', 'ł', 'Ń', 'ÿ']
        );
        assert_eq!(char_to_byte('\u{144}'), None);
        assert_eq!(char_to_byte(' '), None);
    }
}
