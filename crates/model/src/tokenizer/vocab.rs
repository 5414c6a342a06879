//! The vocabulary: names, texts and kinds of tokens.

use std::{collections::hash_map::RandomState, hash::BuildHasher, sync::OnceLock};

/// Kind of a token, as in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// A piece of text.
    Normal,
    /// Represents text that the vocabulary cannot express.
    Unknown,
    /// Controls the model (begin, end, roles); part of a text only on request.
    Control,
    /// A piece that is matched before all others.
    UserDefined,
    /// A piece that the model never saw.
    Unused,
    /// One byte, `<0xAB>`.
    Byte,
}

impl TokenKind {
    /// Returns true if merging must never produce this token.
    pub(super) fn is_reserved(self) -> bool {
        matches!(self, TokenKind::Unknown | TokenKind::Control | TokenKind::Byte)
    }

    /// Returns true if decoding omits it by default.
    pub(super) fn is_special(self) -> bool {
        matches!(self, TokenKind::Unknown | TokenKind::Control)
    }
}

/// All tokens, by id and by name.
#[derive(Debug, Default)]
pub(super) struct Vocab {
    names: Names,
    bytes: Slab,
    kinds: Vec<TokenKind>,
    /// Bytes of the longest token, once they were asked for.
    longest: OnceLock<usize>,
}

impl Vocab {
    pub(super) fn with_capacity(tokens: usize) -> Self {
        Self {
            names: Names::with_capacity(tokens),
            bytes: Slab::default(),
            kinds: Vec::with_capacity(tokens),
            longest: OnceLock::new(),
        }
    }

    /// Returns the number of bytes of the longest token. The vocabulary must be complete.
    pub(super) fn longest(&self) -> usize {
        let longest = || (0..self.len() as u32).map(|id| self.bytes(id).len()).max().unwrap_or(0);
        *self.longest.get_or_init(longest)
    }

    /// Appends a token with its name; `write` appends its bytes. Of two tokens with one name, the later one is found.
    pub(super) fn push(&mut self, name: &[u8], kind: TokenKind, write: impl FnOnce(&mut Vec<u8>)) {
        self.names.push(name, Duplicate::Replaces);
        write(&mut self.bytes.bytes);
        self.bytes.ends.push(self.bytes.bytes.len());
        self.kinds.push(kind);
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Returns the token with this name.
    pub(super) fn find(&self, name: &[u8]) -> Option<u32> {
        self.names.find(&[name])
    }

    /// Returns the token with this name, if text may become it by merging.
    pub(super) fn find_text(&self, name: &[u8]) -> Option<u32> {
        self.find_joined(&[name])
    }

    /// Finds a token by the parts of its name.
    pub(super) fn find_joined(&self, name: &[&[u8]]) -> Option<u32> {
        self.names.find(name).filter(|&id| !self.kinds[id as usize].is_reserved())
    }

    /// Returns the byte token `<0xAB>`.
    pub(super) fn find_byte(&self, byte: u8) -> Option<u32> {
        const HEX: &[u8; 16] = b"0123456789ABCDEF";
        self.find(&[b'<', b'0', b'x', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)], b'>'])
    }

    /// Returns the name of a token; empty if it does not exist.
    pub(super) fn name(&self, id: u32) -> &[u8] {
        self.names.get(id)
    }

    /// Returns the bytes that a token writes; empty if it does not exist.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize)
    }

    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub(super) fn set_kind(&mut self, id: u32, kind: TokenKind) {
        self.kinds[id as usize] = kind;
    }

    /// Returns the ids and kinds of all tokens.
    pub(super) fn kinds(&self) -> impl Iterator<Item = (u32, TokenKind)> {
        self.kinds.iter().enumerate().map(|(id, &kind)| (id as u32, kind))
    }
}

/// Byte strings, one after the other: 256k names cost two allocations.
#[derive(Debug, Default)]
struct Slab {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Slab {
    fn get(&self, index: usize) -> &[u8] {
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }
}

/// Choice between two equal names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Duplicate {
    /// The later one.
    Replaces,
    /// The earlier one.
    IsHidden,
}

/// Numbered names, found by number or by name: a hash table with open addressing, at most half full, whose slots
/// are a part of the hash and the number. Loading a vocabulary is mostly filling these, so they are made for it.
#[derive(Debug)]
pub(super) struct Names {
    slab: Slab,
    slots: Vec<u64>,
    used: usize,
    /// Random, so that no file can be made whose names all fall together.
    seed: u64,
}

const EMPTY: u64 = u64::MAX;

impl Default for Names {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl Names {
    pub(super) fn with_capacity(names: usize) -> Self {
        let slots = vec![EMPTY; (2 * names).next_power_of_two().max(16)];
        let slab = Slab { bytes: Vec::with_capacity(8 * names), ends: Vec::with_capacity(names) };
        Self { slab, slots, used: 0, seed: RandomState::new().hash_one(0) }
    }

    /// Returns the name with this number.
    fn get(&self, number: u32) -> &[u8] {
        self.slab.get(number as usize)
    }

    /// FNV-1a with a random start, and its bits mixed at the end (the finalizer of MurmurHash3).
    fn hash(&self, parts: &[&[u8]]) -> u64 {
        let bytes = parts.iter().flat_map(|part| part.iter());
        let hash =
            bytes.fold(self.seed, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let hash = (hash ^ hash >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^ hash >> 33
    }

    /// Returns the slot where a name is, or would be, for a name with this hash that `is` recognizes.
    fn slot(&self, hash: u64, is: impl Fn(&[u8]) -> bool) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            let found = self.slots[slot];
            // The upper half of a slot is that of the hash; few names get as far as being compared.
            if found == EMPTY || (found >> 32 == hash >> 32 && is(self.get(found as u32))) {
                return slot;
            }
            slot = (slot + 1) & mask;
        }
    }

    /// Appends a name.
    pub(super) fn push(&mut self, name: &[u8], duplicate: Duplicate) {
        let number = self.slab.ends.len() as u32;
        self.slab.bytes.extend_from_slice(name);
        self.slab.ends.push(self.slab.bytes.len());
        if 2 * (self.used + 1) > self.slots.len() {
            self.grow();
        }
        let hash = self.hash(&[name]);
        let slot = self.slot(hash, |other| other == name);
        let is_new = self.slots[slot] == EMPTY;
        self.used += usize::from(is_new);
        if is_new || duplicate == Duplicate::Replaces {
            self.slots[slot] = hash >> 32 << 32 | u64::from(number);
        }
    }

    fn grow(&mut self) {
        let doubled = vec![EMPTY; 2 * self.slots.len()];
        for entry in std::mem::replace(&mut self.slots, doubled) {
            if entry != EMPTY {
                let hash = self.hash(&[self.get(entry as u32)]);
                let slot = self.slot(hash, |_| false);
                self.slots[slot] = entry;
            }
        }
    }

    /// Returns the number of a name, given in parts.
    pub(super) fn find(&self, parts: &[&[u8]]) -> Option<u32> {
        let is = |name: &[u8]| {
            let rest = parts.iter().try_fold(name, |rest, part| rest.strip_prefix(*part));
            rest.is_some_and(<[u8]>::is_empty)
        };
        let entry = self.slots[self.slot(self.hash(parts), is)];
        (entry != EMPTY).then_some(entry as u32)
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
            vocab.push(id.to_string().as_bytes(), TokenKind::Normal, |_| {});
        }
        for id in 0..1000_u32 {
            let name = id.to_string();
            assert_eq!(vocab.find(name.as_bytes()), Some(id));
            assert_eq!(vocab.find_joined(&[&name.as_bytes()[..1], &name.as_bytes()[1..]]), Some(id));
            assert_eq!(vocab.name(id), id.to_string().as_bytes());
        }
        assert_eq!(vocab.find(b"1000"), None);
        assert_eq!(vocab.name(1000), b"");
    }

    #[test]
    fn later_of_two_tokens_with_one_name_is_found() {
        let mut vocab = Vocab::with_capacity(2);
        vocab.push(b"a", TokenKind::Normal, |bytes| bytes.extend(b"x"));
        vocab.push(b"a", TokenKind::Control, |bytes| bytes.extend(b"yz"));
        assert_eq!(vocab.find(b"a"), Some(1));
        assert_eq!(vocab.find_text(b"a"), None);
        assert_eq!((vocab.bytes(0), vocab.bytes(1), vocab.bytes(2)), (&b"x"[..], &b"yz"[..], &b""[..]));
        assert_eq!(vocab.len(), 2);
    }

    #[test]
    fn finds_byte_tokens() {
        let mut vocab = Vocab::default();
        vocab.push(b"<0x0A>", TokenKind::Byte, |bytes| bytes.push(10));
        vocab.push(b"<0xFF>", TokenKind::Byte, |bytes| bytes.push(255));
        assert_eq!((vocab.find_byte(10), vocab.find_byte(255), vocab.find_byte(0)), (Some(0), Some(1), None));
    }
}
