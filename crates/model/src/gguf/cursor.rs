//! Reading little-endian values from a source that may hold anything.

use std::borrow::Cow;

use paguro_backend::ByteSource;

use super::GgufError;

/// Bytes of a file's header, at most: some 20 times those of the largest vocabularies.
const MAX_HEADER: u64 = 256 << 20;
/// Bytes that are read from a file at a time.
const READ_BYTES: u64 = 1 << 20;

/// A position in the header of a file. Memory is allocated only for lengths whose bytes exist in the file.
pub(super) struct Cursor<'a> {
    source: &'a dyn ByteSource,
    /// Bytes of the source that have been read and are still of use.
    window: Cow<'a, [u8]>,
    /// Start of the window.
    start: u64,
    at: u64,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(source: &'a dyn ByteSource) -> Self {
        let window = Cow::Borrowed(source.in_memory().unwrap_or_default());
        Self { source, window, start: 0, at: 0 }
    }

    /// Returns the number of bytes read so far.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    pub(super) fn remaining(&self) -> u64 {
        self.source.size() - self.at
    }

    /// Returns the next `len` bytes; `what` is their name in errors.
    pub(super) fn take(&mut self, len: u64, what: &'static str) -> Result<&[u8], GgufError> {
        if len > self.remaining() {
            return Err(GgufError::Truncated { what, at: self.at, needed: len, left: self.remaining() });
        }
        let end = self.at + len;
        if end > MAX_HEADER {
            return Err(GgufError::LargeHeader { what, at: self.at, needed: len, limit: MAX_HEADER });
        }
        if end > self.start + self.window.len() as u64 {
            let read = len.max(READ_BYTES).min(self.remaining());
            let mut window = vec![0; read as usize];
            self.source.read_at(self.at, &mut window).map_err(GgufError::Read)?;
            (self.window, self.start) = (Cow::Owned(window), self.at);
        }
        let from = (self.at - self.start) as usize;
        self.at = end;
        Ok(&self.window[from..][..len as usize])
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

    /// Reads a number of elements of at least `each` bytes, checked against the rest of the file and of the maximum
    /// header.
    pub(super) fn count(&mut self, each: u64, what: &'static str) -> Result<usize, GgufError> {
        let count = self.u64(what)?;
        self.fits(count, each, what)
    }

    pub(super) fn fits(&self, count: u64, each: u64, what: &'static str) -> Result<usize, GgufError> {
        let (at, needed, left) = (self.at, count.saturating_mul(each), self.remaining());
        if needed > left {
            return Err(GgufError::Truncated { what, at, needed, left });
        }
        if needed > MAX_HEADER {
            return Err(GgufError::LargeHeader { what, at, needed, limit: MAX_HEADER });
        }
        Ok(count as usize) // less than `MAX_HEADER`
    }

    /// Returns a length-prefixed string, as bytes.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&[u8], GgufError> {
        let len = self.u64(what)?;
        self.take(len, what)
    }
}
