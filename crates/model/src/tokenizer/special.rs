//! Finding added tokens (roles, begin, end, runs of spaces) in a text before anything else looks at it.

use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind, Input, MatchKind};

use super::{SpecialTokens, TokenizerError, limits, vocab::TokenKind};

use crate::chat::ChatPrompt;

/// Most bytes of patterns for which a table of all transitions is made.
const MAX_DFA: usize = 4096;

/// A stretch of the text that still has to be encoded, or an added token that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

/// A token to be found as it is written.
#[derive(Clone, Debug)]
pub(super) struct Added {
    pub(super) id: u32,
    pub(super) text: String,
    pub(super) kind: TokenKind,
    /// Swallows the whitespace before it.
    pub(super) strip_left: bool,
    /// Swallows the whitespace after it.
    pub(super) strip_right: bool,
}

/// Finder of added tokens in one pass: from left to right, the longest of those that begin at one position.
#[derive(Debug)]
pub(super) struct AddedTokens {
    /// With control tokens.
    all: Finder,
    /// Finder for plain text: only tokens that are always matched.
    user_defined: Finder,
}

#[derive(Debug)]
struct Finder {
    tokens: Vec<Added>,
    /// `None` without patterns.
    automaton: Option<AhoCorasick>,
}

impl AddedTokens {
    pub(super) fn new(tokens: Vec<Added>) -> Result<Self, TokenizerError> {
        let user_defined =
            tokens.iter().filter(|token| token.kind == TokenKind::UserDefined).cloned().collect();
        Ok(Self { all: Finder::new(tokens)?, user_defined: Finder::new(user_defined)? })
    }

    /// Cuts `text` at the added tokens; no fragment is empty.
    pub(super) fn split<'t>(&self, text: &'t str, special: SpecialTokens) -> Vec<Fragment<'t>> {
        match special {
            SpecialTokens::Parse => self.all.split(text, |_| false),
            SpecialTokens::AsText => self.user_defined.split(text, |_| false),
        }
    }

    /// Splits a chat, in which only control tokens and markers of its template are matched.
    pub(super) fn split_chat<'t>(&self, prompt: &'t ChatPrompt) -> Vec<Fragment<'t>> {
        self.all.split(&prompt.text, |range| prompt.is_literal(range))
    }
}

/// True for names with the form of a marker: `<think>`, `[TOOL_CALLS]`.
pub(super) fn is_marker(name: &str) -> bool {
    let is_bracketed =
        name.starts_with('<') && name.ends_with('>') || name.starts_with('[') && name.ends_with(']');
    is_bracketed && name.len() > 2
}

impl Finder {
    fn new(tokens: Vec<Added>) -> Result<Self, TokenizerError> {
        let patterns: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
        let bytes = patterns.iter().map(|pattern| pattern.len()).sum();
        limits::check_added("added tokens", bytes)?;
        // The faster automaton uses a kilobyte for each byte of a pattern.
        let kind = if bytes > MAX_DFA { AhoCorasickKind::ContiguousNFA } else { AhoCorasickKind::DFA };
        let mut builder = AhoCorasick::builder();
        let mut build = || builder.match_kind(MatchKind::LeftmostLongest).kind(Some(kind)).build(&patterns);
        let automaton = (!patterns.is_empty()).then(&mut build).transpose();
        let automaton = automaton.map_err(|error| TokenizerError::Invalid {
            what: "added tokens".into(),
            problem: error.to_string(),
        })?;
        Ok(Self { tokens, automaton })
    }

    /// Cuts `text` at the tokens, except where one `is_text`.
    fn split<'t>(&self, text: &'t str, is_text: impl Fn(Range<usize>) -> bool) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        let (mut rest, mut from) = (0, 0);
        if let Some(automaton) = &self.automaton {
            while let Some(found) = automaton.find(Input::new(text).span(from..text.len())) {
                if is_text(found.range()) {
                    from = text.ceil_char_boundary(found.start() + 1);
                    continue;
                }
                let token = &self.tokens[found.pattern()];
                let mut before = &text[rest..found.start()];
                if token.strip_left {
                    before = before.trim_end_matches(is_c_space);
                }
                if !before.is_empty() {
                    fragments.push(Fragment::Text(before));
                }
                fragments.push(Fragment::Token(token.id));
                rest = found.end();
                if token.strip_right {
                    rest = text.len() - text[rest..].trim_start_matches(is_c_space).len();
                }
                from = rest;
            }
        }
        if rest < text.len() {
            fragments.push(Fragment::Text(&text[rest..]));
        }
        fragments
    }
}

/// Returns true for whitespace of C's `isspace`.
fn is_c_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\u{b}' | '\u{c}' | '\r')
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn check(text: &str, special: SpecialTokens, expected: Expect) {
        let added = |id, text: &str, kind| Added {
            id,
            text: text.into(),
            kind,
            strip_left: false,
            strip_right: false,
        };
        let tokens = AddedTokens::new(vec![
            added(0, "<a>", TokenKind::Control),
            added(1, "<a>b", TokenKind::Control),
            added(2, "  ", TokenKind::UserDefined),
            added(3, "    ", TokenKind::UserDefined),
            Added { strip_left: true, strip_right: true, ..added(4, "<m>", TokenKind::Control) },
        ])
        .unwrap();
        let shown: Vec<String> = tokens
            .split(text, special)
            .into_iter()
            .map(|fragment| match fragment {
                Fragment::Text(text) => format!("{text:?}"),
                Fragment::Token(id) => id.to_string(),
            })
            .collect();
        expected.assert_eq(&shown.join(" "));
    }

    #[test]
    fn the_longest_token_wins() {
        check("x<a>bc<a>", SpecialTokens::Parse, expect![[r#""x" 1 "c" 0"#]]);
        check("       x", SpecialTokens::Parse, expect![[r#"3 2 " x""#]]);
    }

    #[test]
    fn control_tokens_are_text_unless_parsed() {
        check("<a>  <a>b", SpecialTokens::AsText, expect![[r#""<a>" 2 "<a>b""#]]);
        check("", SpecialTokens::Parse, expect![[""]]);
    }

    #[test]
    fn some_tokens_swallow_whitespace() {
        check("x \n<m>\t \u{a0}y", SpecialTokens::Parse, expect![[r#""x" 4 "\u{a0}y""#]]);
        check("<m> ", SpecialTokens::Parse, expect!["4"]);
    }
}
