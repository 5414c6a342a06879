//! Records of a segment: a header of fixed size and its payload.
//!
//! Both have a keyed BLAKE3 hash. The key belongs to the store, and the hash of the header also covers the record's place. So a record
//! of another store, one that was moved, and one whose bytes have changed are all recognized.

use crate::Id;

/// Secret of a store.
pub(crate) type Key = [u8; 32];

/// Version of the format of segments.
const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"pagurokv";

/// Bytes of a header.
pub(crate) const HEADER: usize = 8 + 4 + 4 + 8 + 4 * 32;
/// Bytes of a payload, at most. A length is checked against it before anything is allocated.
pub(crate) const MOST_PAYLOAD: u64 = 1 << 30;

/// The content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An item.
    Item,
    /// Ids of items that were read, in order: their last use is here.
    Uses,
}

/// A header, without what protects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub kind: Kind,
    pub space: Id,
    pub id: Id,
    /// Bytes of the payload.
    pub len: u64,
    pub payload_hash: Id,
}

/// A place in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub segment: u64,
    pub offset: u64,
}

impl Header {
    /// Returns the header of a record with this payload.
    pub fn new(kind: Kind, space: Id, id: Id, payload: &[u8], key: &Key) -> Self {
        let payload_hash = *blake3::keyed_hash(key, payload).as_bytes();
        Self { kind, space, id, len: payload.len() as u64, payload_hash }
    }

    /// Returns its bytes for this place.
    pub fn encode(&self, place: Place, key: &Key) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..56].copy_from_slice(&self.space);
        bytes[56..88].copy_from_slice(&self.id);
        bytes[88..120].copy_from_slice(&self.payload_hash);
        let hash = hash(&bytes[..120], place, key);
        bytes[120..].copy_from_slice(hash.as_bytes());
        bytes
    }

    /// Reads a header. Returns `None` unless this store has written it to this place.
    pub fn decode(bytes: &[u8; HEADER], place: Place, key: &Key) -> Option<Self> {
        // Equality of hashes takes the same time for all bytes.
        let found = blake3::Hash::from_slice(&bytes[120..]).ok()?;
        if bytes[..8] != MAGIC || found != hash(&bytes[..120], place, key) {
            return None;
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let id = |at: usize| {
            let mut id = [0; 32];
            id.copy_from_slice(&bytes[at..at + 32]);
            id
        };
        if word(8) != VERSION {
            return None;
        }
        let kind = [Kind::Item, Kind::Uses].into_iter().find(|kind| *kind as u32 == word(12))?;
        let len = u64::from(word(16)) | u64::from(word(20)) << 32;
        let header = Self { kind, space: id(24), id: id(56), len, payload_hash: id(88) };
        (len <= MOST_PAYLOAD).then_some(header)
    }

    /// Returns true if these are the bytes that the record was written with.
    pub fn is_of(&self, payload: &[u8], key: &Key) -> bool {
        payload.len() as u64 == self.len
            && blake3::keyed_hash(key, payload) == blake3::Hash::from_bytes(self.payload_hash)
    }

    /// Returns the number of bytes of the record.
    pub fn record_bytes(&self) -> u64 {
        HEADER as u64 + self.len
    }
}

fn hash(header: &[u8], place: Place, key: &Key) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&place.segment.to_le_bytes());
    hasher.update(&place.offset.to_le_bytes());
    hasher.update(header);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_only_where_it_was_written_by_its_own_store() {
        let (key, place) = ([7; 32], Place { segment: 3, offset: 4096 });
        let header = Header::new(Kind::Item, [1; 32], [2; 32], b"payload", &key);
        let bytes = header.encode(place, &key);
        assert_eq!(Header::decode(&bytes, place, &key), Some(header));
        assert_eq!(Header::decode(&bytes, Place { offset: 0, ..place }, &key), None);
        assert_eq!(Header::decode(&bytes, Place { segment: 4, ..place }, &key), None);
        assert_eq!(Header::decode(&bytes, place, &[8; 32]), None);
        for bit in 0..HEADER * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&changed, place, &key), None, "bit {bit}");
        }
        assert!(header.is_of(b"payload", &key));
        assert!(!header.is_of(b"payloae", &key) && !header.is_of(b"payloa", &key));
    }

    #[test]
    fn a_length_without_bound_is_refused() {
        let (key, place) = ([7; 32], Place { segment: 0, offset: 0 });
        let header = Header::new(Kind::Item, [1; 32], [2; 32], b"", &key);
        let long = Header { len: MOST_PAYLOAD + 1, ..header };
        assert_eq!(Header::decode(&long.encode(place, &key), place, &key), None);
    }
}
