//! Random names.

use std::fmt::Write;

/// 128 random bits as text, after a prefix that says what they name.
pub fn new(prefix: &str) -> String {
    let mut bytes = [0; 16];
    fill(&mut bytes);
    bytes.iter().fold(prefix.to_owned(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Random bytes that nobody can guess.
pub fn fill(bytes: &mut [u8]) {
    getrandom::fill(bytes).expect("the system has random numbers");
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}
