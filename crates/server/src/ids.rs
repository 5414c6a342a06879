//! Random ids.

use std::fmt::Write;

/// Returns 128 random bits in hexadecimal digits, after a prefix that names the kind of the object.
pub fn new(prefix: &str) -> String {
    let mut bytes = [0; 16];
    fill(&mut bytes);
    bytes.iter().fold(prefix.to_owned(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Fills `bytes` with cryptographically secure random bytes.
pub fn fill(bytes: &mut [u8]) {
    getrandom::fill(bytes).expect("the system has random numbers");
}

/// Returns the time in seconds since 1970.
pub fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}
