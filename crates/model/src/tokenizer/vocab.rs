//! The vocabulary: what each token is called, what it writes, and which token has a given name.

use std::{collections::hash_map::RandomState, hash::BuildHasher};

/// What a token is for, as `tokenizer.ggml.token_type` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// A piece of text.
    Normal,
    /// Stands for what the vocabulary cannot express.
    Unknown,
    /// Steers the model (begin, end, roles); never part of a text unless the caller says so.
    Control,
    /// A piece that is taken out of the text before anything else looks at it.
    UserDefined,
    /// A piece that the model never saw.
    Unused,
    /// One byte, `<0xAB>`.
    Byte,
}

impl TokenKind {
    /// Whether text is never allowed to become this token by merging.
    pub(super) fn is_reserved(self) -> bool {
        matches!(self, TokenKind::Unknown | TokenKind::Control | TokenKind::Byte)
    }

    /// Whether decoding leaves it out unless asked.
    pub(super) fn is_special(self) -> bool {
        matches!(self, TokenKind::Unknown | TokenKind::Control)
    }
}

/// All tokens, by id and by name. Names and bytes lie in two slabs: a vocabulary of 256k tokens costs two
/// allocations, not half a million.
#[derive(Debug, Default)]
pub(super) struct Vocab {
    names: Slab,
    bytes: Slab,
    kinds: Vec<TokenKind>,
    index: Index,
}

impl Vocab {
    pub(super) fn with_capacity(tokens: usize) -> Self {
        Self { kinds: Vec::with_capacity(tokens), index: Index::with_capacity(tokens), ..Self::default() }
    }

    /// Appends a token: its name in the vocabulary, and the bytes that it writes. Of two tokens with one name, the
    /// later one is found.
    pub(super) fn push(&mut self, name: &[u8], bytes: &[u8], kind: TokenKind) {
        let id = self.kinds.len() as u32;
        self.names.push(name);
        self.bytes.push(bytes);
        self.kinds.push(kind);
        self.index.insert(id, &self.names);
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The token with this name.
    pub(super) fn find(&self, name: &[u8]) -> Option<u32> {
        self.index.find(name, &self.names)
    }

    /// The token with this name, if text may become it by merging.
    pub(super) fn find_text(&self, name: &[u8]) -> Option<u32> {
        self.find(name).filter(|&id| !self.kinds[id as usize].is_reserved())
    }

    /// The byte token `<0xAB>`.
    pub(super) fn find_byte(&self, byte: u8) -> Option<u32> {
        const HEX: &[u8; 16] = b"0123456789ABCDEF";
        self.find(&[b'<', b'0', b'x', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)], b'>'])
    }

    /// The name of a token; nothing where there is no such token.
    pub(super) fn name(&self, id: u32) -> &[u8] {
        self.names.get(id as usize)
    }

    /// What a token writes; nothing where there is no such token.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize)
    }

    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub(super) fn set_kind(&mut self, id: u32, kind: TokenKind) {
        self.kinds[id as usize] = kind;
    }

    /// Ids and kinds of all tokens.
    pub(super) fn kinds(&self) -> impl Iterator<Item = (u32, TokenKind)> {
        self.kinds.iter().enumerate().map(|(id, &kind)| (id as u32, kind))
    }
}

/// Byte strings, one after the other.
#[derive(Debug, Default)]
struct Slab {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Slab {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
    }

    fn get(&self, index: usize) -> &[u8] {
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }
}

/// A hash table of ids whose keys are the names in the slab: open addressing, at most half full.
#[derive(Debug, Default)]
struct Index {
    slots: Vec<u32>,
    used: usize,
    hasher: RandomState,
}

const EMPTY: u32 = u32::MAX;

impl Index {
    fn with_capacity(tokens: usize) -> Self {
        Self { slots: vec![EMPTY; Self::slots_for(tokens)], ..Self::default() }
    }

    fn slots_for(tokens: usize) -> usize {
        (2 * tokens).next_power_of_two().max(16)
    }

    /// Where `name` is, or would be.
    fn slot(&self, name: &[u8], names: &Slab) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(name) as usize & mask;
        while self.slots[slot] != EMPTY && names.get(self.slots[slot] as usize) != name {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn insert(&mut self, id: u32, names: &Slab) {
        if 2 * (self.used + 1) > self.slots.len() {
            let old = std::mem::take(&mut self.slots);
            self.slots = vec![EMPTY; Self::slots_for(self.used + 1).max(2 * old.len())];
            for id in old.into_iter().filter(|&id| id != EMPTY) {
                let slot = self.slot(names.get(id as usize), names);
                self.slots[slot] = id;
            }
        }
        let slot = self.slot(names.get(id as usize), names);
        self.used += usize::from(self.slots[slot] == EMPTY);
        self.slots[slot] = id;
    }

    fn find(&self, name: &[u8], names: &Slab) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let id = self.slots[self.slot(name, names)];
        (id != EMPTY).then_some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_every_name_while_growing() {
        let mut vocab = Vocab::default();
        assert_eq!(vocab.find(b"0"), None);
        for id in 0..1000_u32 {
            vocab.push(id.to_string().as_bytes(), b"", TokenKind::Normal);
        }
        for id in 0..1000_u32 {
            assert_eq!(vocab.find(id.to_string().as_bytes()), Some(id));
            assert_eq!(vocab.name(id), id.to_string().as_bytes());
        }
        assert_eq!(vocab.find(b"1000"), None);
        assert_eq!(vocab.name(1000), b"");
    }

    #[test]
    fn later_of_two_tokens_with_one_name_is_found() {
        let mut vocab = Vocab::with_capacity(2);
        vocab.push(b"a", b"a", TokenKind::Normal);
        vocab.push(b"a", b"a", TokenKind::Control);
        assert_eq!(vocab.find(b"a"), Some(1));
        assert_eq!(vocab.find_text(b"a"), None);
        assert_eq!(vocab.len(), 2);
    }

    #[test]
    fn finds_byte_tokens() {
        let mut vocab = Vocab::default();
        vocab.push(b"<0x0A>", b"\n", TokenKind::Byte);
        vocab.push(b"<0xFF>", b"\xff", TokenKind::Byte);
        assert_eq!((vocab.find_byte(10), vocab.find_byte(255), vocab.find_byte(0)), (Some(0), Some(1), None));
    }
}
