//! Reading little-endian values from bytes that may be anything.

use super::GgufError;

/// A position in the header of a file. Nothing is allocated for a length before that many bytes are known to be
/// there.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `len` bytes; `what` names them in the error.
    pub(super) fn take(&mut self, len: u64, what: &'static str) -> Result<&'a [u8], GgufError> {
        match usize::try_from(len) {
            Ok(len) if len <= self.remaining() => {
                let taken = &self.bytes[self.at..][..len];
                self.at += len;
                Ok(taken)
            }
            _ => Err(GgufError::Truncated {
                what,
                at: self.at as u64,
                needed: len,
                left: self.remaining() as u64,
            }),
        }
    }

    pub(super) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let bytes = self.take(N as u64, what)?;
        let mut array = [0; N];
        array.copy_from_slice(bytes);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `each` bytes of the file, checked against what is left of it.
    pub(super) fn count(&mut self, each: u64, what: &'static str) -> Result<usize, GgufError> {
        let count = self.u64(what)?;
        self.fits(count, each, what)
    }

    pub(super) fn fits(&self, count: u64, each: u64, what: &'static str) -> Result<usize, GgufError> {
        let needed = count.saturating_mul(each);
        if needed > self.remaining() as u64 {
            let (at, left) = (self.at as u64, self.remaining() as u64);
            return Err(GgufError::Truncated { what, at, needed, left });
        }
        Ok(count as usize) // at most `remaining`, which is a usize
    }

    /// A length-prefixed string, as bytes.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&'a [u8], GgufError> {
        let len = self.u64(what)?;
        self.take(len, what)
    }
}
