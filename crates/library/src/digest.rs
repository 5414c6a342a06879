//! SHA-256 digests, as names of content.

use std::{fmt, str::FromStr};

use sha2::{Digest as _, Sha256};

use crate::error::LibraryError;

/// A SHA-256 digest, formatted as `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Returns the digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Returns the digest of a hasher's input.
    pub(crate) fn finish(hasher: Sha256) -> Self {
        Self(hasher.finalize().into())
    }

    /// Returns the 64 digits alone.
    pub fn hex(&self) -> String {
        hex(&self.0)
    }

    /// Returns the name of the blob's file.
    pub(crate) fn file_name(&self) -> String {
        format!("sha256-{}", self.hex())
    }
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = LibraryError;

    /// `sha256:…`, `sha256-…` (as in file names) or the 64 digits alone.
    fn from_str(text: &str) -> Result<Self, LibraryError> {
        let digits = text.strip_prefix("sha256:").or_else(|| text.strip_prefix("sha256-")).unwrap_or(text);
        let bad = || LibraryError::BadDigest { text: text.chars().take(100).collect() };
        if digits.len() != 64 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_and_written() {
        let digest = Digest::of(b"abc");
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest.to_string(), format!("sha256:{hex}"));
        for text in [hex.to_owned(), format!("sha256:{hex}"), format!("sha256-{}", hex.to_uppercase())] {
            assert_eq!(text.parse::<Digest>().unwrap(), digest);
        }
        let not_ascii = "é".repeat(32);
        for bad in ["", "sha256:", "sha256:ab", "sha1:abc", "../../etc/passwd", &hex[1..], &not_ascii] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
