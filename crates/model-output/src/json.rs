//! Incremental JSON scanner. It reports malformed text at the first wrong character.

use serde_json::value::RawValue;

/// State of a value after a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// The value continues.
    More,
    /// The character ended the value.
    End,
    /// The character is not part of the value: a number ended before it.
    EndBefore,
    /// The text is not JSON.
    Malformed,
}

/// Maximum nesting of arrays and objects; `serde_json` has the same limit.
const MAX_DEPTH: usize = 127;

/// Scanner of one JSON value (RFC 8259).
#[derive(Clone, Debug)]
pub struct Scanner {
    open: Vec<Container>,
    at: At,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Array,
    Object,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before a value.
    Value,
    /// After `[`: a value or `]`.
    FirstItem,
    /// After `{`: a key or `}`.
    FirstKey,
    /// After a comma in an object.
    Key,
    /// After a key.
    Colon,
    /// After a value in a container.
    Next,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    /// Remaining hexadecimal digits.
    Unicode {
        key: bool,
        digits: u8,
    },
    /// Remaining characters of `true`, `false` or `null`.
    Word(&'static str),
    Number(Digits),
}

/// Position in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Digits {
    Minus,
    /// A leading zero: no digit follows.
    Zero,
    Whole,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

impl Scanner {
    /// Creates a scanner before the first character of a value. No whitespace may precede it.
    pub fn new() -> Self {
        Self { open: Vec::new(), at: At::Value }
    }

    /// Scans one character.
    pub fn push(&mut self, c: char) -> Scan {
        let between = !matches!(
            self.at,
            At::Text { .. } | At::Escape { .. } | At::Unicode { .. } | At::Word(_) | At::Number(_)
        );
        if between && is_space(c) {
            return if self.open.is_empty() { Scan::Malformed } else { Scan::More };
        }
        match self.at {
            At::FirstItem if c == ']' => self.close(),
            At::Value | At::FirstItem => self.begin(c),
            At::FirstKey if c == '}' => self.close(),
            At::FirstKey | At::Key if c == '"' => self.go(At::Text { key: true }),
            At::Colon if c == ':' => self.go(At::Value),
            At::Next => match (c, self.open.last()) {
                (',', Some(Container::Array)) => self.go(At::Value),
                (',', Some(Container::Object)) => self.go(At::Key),
                (']', Some(Container::Array)) | ('}', Some(Container::Object)) => self.close(),
                _ => Scan::Malformed,
            },
            At::Text { key } => match c {
                '"' if key => self.go(At::Colon),
                '"' => self.ended(),
                '\\' => self.go(At::Escape { key }),
                '\0'..='\x1f' => Scan::Malformed,
                _ => Scan::More,
            },
            At::Escape { key } => match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.go(At::Text { key }),
                'u' => self.go(At::Unicode { key, digits: 4 }),
                _ => Scan::Malformed,
            },
            At::Unicode { key, digits } if c.is_ascii_hexdigit() => match digits {
                1 => self.go(At::Text { key }),
                _ => self.go(At::Unicode { key, digits: digits - 1 }),
            },
            At::Word(rest) => match rest.strip_prefix(c) {
                Some("") => self.ended(),
                Some(rest) => self.go(At::Word(rest)),
                None => Scan::Malformed,
            },
            At::Number(digits) => self.number(digits, c),
            _ => Scan::Malformed,
        }
    }

    fn go(&mut self, at: At) -> Scan {
        self.at = at;
        Scan::More
    }

    fn begin(&mut self, c: char) -> Scan {
        match c {
            '{' => self.enter(Container::Object, At::FirstKey),
            '[' => self.enter(Container::Array, At::FirstItem),
            '"' => self.go(At::Text { key: false }),
            't' => self.go(At::Word("rue")),
            'f' => self.go(At::Word("alse")),
            'n' => self.go(At::Word("ull")),
            '-' => self.go(At::Number(Digits::Minus)),
            '0' => self.go(At::Number(Digits::Zero)),
            '1'..='9' => self.go(At::Number(Digits::Whole)),
            _ => Scan::Malformed,
        }
    }

    fn enter(&mut self, container: Container, at: At) -> Scan {
        if self.open.len() == MAX_DEPTH {
            return Scan::Malformed;
        }
        self.open.push(container);
        self.go(at)
    }

    fn close(&mut self) -> Scan {
        self.open.pop();
        self.ended()
    }

    fn ended(&mut self) -> Scan {
        self.at = At::Next;
        if self.open.is_empty() { Scan::End } else { Scan::More }
    }

    fn number(&mut self, digits: Digits, c: char) -> Scan {
        use Digits::{E, Exponent, Fraction, Minus, Point, Sign, Whole, Zero};
        let next = match (digits, c) {
            (Minus, '0') => Zero,
            (Minus | Whole, '0'..='9') => Whole,
            (Zero | Whole, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Whole | Fraction, 'e' | 'E') => E,
            (E, '+' | '-') => Sign,
            (E | Sign | Exponent, '0'..='9') => Exponent,
            (Zero, '0'..='9') | (Minus | Point | E | Sign, _) => return Scan::Malformed,
            _ if self.open.is_empty() => return Scan::EndBefore,
            // The number has ended before this character.
            _ => {
                self.at = At::Next;
                return self.push(c);
            }
        };
        self.go(At::Number(next))
    }
}

/// Returns true for JSON's whitespace.
pub fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

/// Removes the whitespace between the tokens of JSON, including line breaks. Values are not converted, so numbers
/// outside of `f64` are unchanged.
///
/// # Errors
/// The text is not JSON.
pub fn one_line(json: &str) -> Result<Box<RawValue>, serde_json::Error> {
    let (mut in_string, mut escaped) = (false, false);
    let kept = |c: &char| {
        let string = in_string;
        in_string ^= *c == '"' && !escaped;
        escaped = string && *c == '\\' && !escaped;
        string || !is_space(*c)
    };
    RawValue::from_string(json.chars().filter(kept).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Scans a text: `ok` for a whole value, `more` for a prefix of one, otherwise the place of the error.
    fn scan(text: &str) -> String {
        let mut scanner = Scanner::new();
        for (at, c) in text.char_indices() {
            let rest = &text[at + c.len_utf8()..];
            match scanner.push(c) {
                Scan::More => {}
                Scan::End => return format!("ok{}{rest}", if rest.is_empty() { "" } else { ", then " }),
                Scan::EndBefore => return format!("ok, then {c}{rest}"),
                Scan::Malformed => return format!("malformed at {c}{rest}"),
            }
        }
        "more".into()
    }

    #[test]
    fn values_end_where_they_end_and_break_where_they_break() {
        let cases = [
            ("{}", "ok"),
            ("[]x", "ok, then x"),
            (r#"{"a": [1, -2.5e+3, true, null], "b": {"c": "d\"\u00e9"}}"#, "ok"),
            ("12 ", "ok, then  "),
            ("-", "more"),
            ("01", "malformed at 1"),
            ("1.x", "malformed at x"),
            ("[1,]", "malformed at ]"),
            (r#"{"a":1,}"#, "malformed at }"),
            (r#"{"a" 1"#, "malformed at 1"),
            (r#"{a"#, "malformed at a"),
            ("[1}", "malformed at }"),
            ("[nul]", "malformed at ]"),
            ("\"a\nb", "malformed at \nb"),
            (r#""\x""#, "malformed at x\""),
            (r#""\u12g""#, "malformed at g\""),
            (r#"{"a": "un"#, "more"),
        ];
        for (text, expected) in cases {
            assert_eq!(scan(text), expected, "{text}");
        }
        assert!(scan(&"[".repeat(MAX_DEPTH + 1)).starts_with("malformed"));
    }

    #[test]
    fn one_line_has_no_space_between() {
        let text = "{ \"a b\\\\\" :\n[1e999 , \"\\\" \\ud800\"]\t}";
        assert_eq!(one_line(text).expect("JSON").get(), r#"{"a b\\":[1e999,"\" \ud800"]}"#);
        one_line("{\"a\": 1").expect_err("half of one");
    }

    proptest! {
        #[test]
        fn it_takes_what_serde_json_takes(text in r#"[\[\]{},:"0-2.eE+\-truefalsn \\u/d]{0,12}"#) {
            // A number ends with the next character, so a space is appended.
            let padded = format!("{} ", text.trim_start_matches(is_space));
            let parsed = serde_json::from_str::<serde_json::Value>(&padded).map(drop);
            let out_of_range = parsed.as_ref().is_err_and(|error| {
                let message = error.to_string();
                message.contains("out of range") || message.contains("surrogate") || message.contains("hex escape")
            });
            let scanned = scan(&padded);
            let complete = scanned.strip_prefix("ok").is_some_and(|rest| rest.trim_start_matches(", then ").trim().is_empty());
            prop_assert!(out_of_range || complete == parsed.is_ok(), "{padded:?}: {scanned}, {parsed:?}");
        }
    }
}
