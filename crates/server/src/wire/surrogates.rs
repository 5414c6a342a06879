//! Lone surrogates in JSON strings. Clients that cut text at UTF-16 units send them (`"\ud83d"`), and a strict parser
//! would refuse all later requests of the conversation.

use std::borrow::Cow;

/// Replaces each lone surrogate by U+FFFD; borrowed if there is none. Both escapes have six bytes, so positions do not
/// change.
pub fn mend(json: &[u8]) -> Cow<'_, [u8]> {
    let mut mended = Cow::Borrowed(json);
    let mut at = 0;
    while let Some(escape) = next_escape(json, at) {
        at = match unit(json, escape) {
            Some(0xd800..0xdc00) if matches!(unit(json, escape + 6), Some(0xdc00..0xe000)) => escape + 12,
            Some(0xd800..0xe000) => {
                mended.to_mut()[escape + 2..escape + 6].copy_from_slice(b"fffd");
                escape + 6
            }
            Some(_) => escape + 6,
            // Another escape, of two bytes.
            None => escape + 2,
        };
    }
    mended
}

/// Returns the place of the next backslash. Most megabytes of a body are images without one.
fn next_escape(json: &[u8], mut at: usize) -> Option<usize> {
    for part in json.get(at..)?.chunks(1024) {
        // This search has no branch for each byte.
        if part.contains(&b'\\') {
            return part.iter().position(|&byte| byte == b'\\').map(|found| at + found);
        }
        at += part.len();
    }
    None
}

/// Returns the UTF-16 unit of an escape `\uXXXX` at this position.
fn unit(json: &[u8], at: usize) -> Option<u16> {
    let digits = json.get(at..at + 6)?.strip_prefix(b"\\u")?;
    let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
    u16::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lone_surrogates_become_the_replacement_character() {
        for (json, expected) in [
            (r#""fox \ud83d cut""#, "fox \u{fffd} cut"),
            (r#""\ude00\ud83d""#, "\u{fffd}\u{fffd}"),
            (r#""\ud83d\ud83d\ude00""#, "\u{fffd}😀"),
            (r#""\ud83d\ude00 \\ud83d \u00e9""#, "😀 \\ud83d é"),
            (r#""\ud83d\n""#, "\u{fffd}\n"),
            (r#""\\\ud83d""#, "\\\u{fffd}"),
        ] {
            let text: String = serde_json::from_slice(&mend(json.as_bytes())).unwrap();
            assert_eq!(text, expected, "{json}");
        }
        for broken in [&b"\"\\"[..], b"\"\\u", b"\"\\ud83", b"\\ud83d", b"\"\\u+123\""] {
            let _ = mend(broken);
        }
        assert!(matches!(mend(br#"{"a":"b\n"}"#), Cow::Borrowed(_)));
    }
}
