//! Reading of Lark grammars, exactly as their compiler reads them.
//!
//! [`Source::read`] runs the compiler's own automaton over the compiler's tokens. Its lexemes are measured, and the text
//! for the compiler ([`Source::text`]) is written from them: without comments, and without the annotations of schemas. So
//! a part of a grammar is measured or does not reach the compiler.

use std::{io::Cursor, ops::Range};

use llguidance::{
    api::{ParserLimits, RegexExt, SkipSpec},
    derivre::RegexAst,
    earley::{
        lexerspec::LexerSpec,
        regexvec::{RegexVec, StateID},
    },
};
use serde::de::DeserializeOwned;
use serde_json::{Deserializer, Value};

use super::schema_bounds;
use crate::schema;

/// Kind of a lexeme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// A comment, or blanks.
    Skip,
    /// The name of a rule, or a keyword of attributes and parameters.
    Rule,
    /// The name of a terminal.
    Terminal,
    String,
    Regex,
    /// A JSON schema, with its keyword.
    Json,
    /// Options of the compiler, with their keyword.
    Options,
    /// A regular expression in JSON, with its keyword.
    Substring,
    /// The keyword of a nested grammar.
    Nested,
    Newline,
    Open,
    OpenBrace,
    Close,
    CloseBrace,
    Or,
    And,
    /// `*`, `+`, `?`.
    Operator,
    /// A negation or a repetition.
    Tilde,
    Colon,
    Equals,
    /// A keyword that begins a statement.
    Statement,
    Other,
}

/// Tokens that are fixed texts, in the compiler's order.
const FIXED: [(Token, &str); 27] = [
    (Token::Other, "->"),
    (Token::Colon, ":"),
    (Token::Other, ","),
    (Token::Other, "."),
    (Token::Other, ".."),
    (Token::Statement, "%declare"),
    (Token::Options, "%llguidance"),
    (Token::Statement, "%ignore"),
    (Token::Statement, "%import"),
    (Token::Statement, "%override"),
    (Token::Json, "%json"),
    (Token::Substring, "%regex"),
    (Token::Nested, "%lark"),
    (Token::Other, "%if"),
    (Token::Open, "("),
    (Token::Close, ")"),
    (Token::OpenBrace, "{"),
    (Token::CloseBrace, "}"),
    (Token::Open, "["),
    (Token::Close, "]"),
    (Token::Tilde, "~"),
    (Token::Or, "|"),
    (Token::And, "&"),
    (Token::Equals, "="),
    (Token::Other, "#"),
    (Token::Other, "_"),
    (Token::Other, "::"),
];

/// Tokens that are regular expressions, in the compiler's order.
const PATTERNS: [(Token, &str); 10] = [
    (Token::Operator, r"[+*?]"),
    (Token::Rule, r"!?[_?]?[a-z][_a-z0-9\-]*"),
    (Token::Terminal, r"_?[A-Z][_A-Z0-9\-]*"),
    (Token::String, r#""(\\([\"\\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^\"\\\x00-\x1F\x7F])*"(i|)"#),
    (Token::Regex, r"/(\\.|[^/\\])+/[imslux]*"),
    (Token::Other, r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?"),
    (Token::Other, r"0[xX][0-9a-fA-F]+"),
    (Token::Newline, r"(\r?\n)+[ \t]*"),
    (Token::Other, r"<[^<>\s]+>"),
    (Token::Other, r"@[a-zA-Z0-9_\-]+"),
];

/// Comments and blanks.
const SKIPPED: &str = r"((#|//)[^\n]*)|[ \t]+";

/// A part of a grammar's text.
#[derive(Debug)]
pub(super) struct Lexeme {
    pub token: Token,
    /// Bytes of the text, without a value in JSON.
    pub range: Range<usize>,
    /// The value in JSON after the keyword.
    pub value: Option<Json>,
}

/// A value in JSON, without the annotations of a schema.
#[derive(Debug)]
pub(super) struct Json {
    pub value: Value,
    /// Bytes of the text, with the blanks before it.
    pub range: Range<usize>,
    /// True if the value differs from the text.
    is_rewritten: bool,
}

/// A grammar as the compiler reads it.
#[derive(Debug)]
pub(super) struct Source {
    /// The text, with a line break at the end.
    text: String,
    /// All lexemes, also comments and blanks.
    lexemes: Vec<Lexeme>,
}

impl Source {
    /// Reads a grammar.
    ///
    /// # Errors
    /// Line and column of the text that is no lexeme, or the error of a value in JSON.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut automaton = Automaton::new();
        let text = format!("{text}\n");
        let bytes = text.as_bytes();
        let mut lexemes = Vec::new();
        let (mut state, mut start, mut at) = (automaton.start, 0, 0);
        while at <= bytes.len() {
            let step = match bytes.get(at) {
                Some(&byte) => automaton.advance(state, byte),
                None => automaton.end(state),
            };
            match step {
                Step::Error => {
                    let (line, column) = place(&text, at);
                    return Err(format!("at {line}({column}): this character does not continue a token"));
                }
                Step::State(next) => state = next,
                Step::Lexeme { token, begins } => {
                    let mut end = if begins.is_some() || at == bytes.len() { at } else { at + 1 };
                    let range = start..end;
                    let value = match token {
                        Token::Json | Token::Options => Some(json::<Value>(bytes, &mut end)),
                        Token::Substring => Some(json::<RegexExt>(bytes, &mut end).and_then(|value| {
                            serde_json::to_value(value).map_err(|error| error.to_string())
                        })),
                        _ => None,
                    };
                    let value = value.transpose().map_err(|error| {
                        let (line, column) = place(&text, range.start);
                        format!("at {line}({column}): the JSON after `{}`: {error}", &text[range.clone()])
                    })?;
                    let value = value.map(|mut value| {
                        let is_rewritten = token == Token::Json && schema_bounds::strip(&mut value);
                        Json { value, range: range.end..end, is_rewritten }
                    });
                    if value.is_some() {
                        at = end - 1;
                    }
                    lexemes.push(Lexeme { token, range, value });
                    start = end;
                    state = automaton.restart(begins);
                }
            }
            at += 1;
        }
        Ok(Self { text, lexemes })
    }

    /// Returns all lexemes but comments and blanks.
    pub fn lexemes(&self) -> impl Iterator<Item = &Lexeme> {
        self.lexemes.iter().filter(|lexeme| lexeme.token != Token::Skip)
    }

    /// Rewrites the schemas so that every value of theirs fits the grammar's schema, and returns true if there are any.
    ///
    /// # Errors
    /// A keyword that cannot be enforced.
    pub fn narrow_schemas(&mut self) -> Result<bool, String> {
        let mut has_schemas = false;
        for lexeme in self.lexemes.iter_mut().filter(|lexeme| lexeme.token == Token::Json) {
            let Some(json) = &mut lexeme.value else { continue };
            json.value = schema::narrow_embedded(json.value.take())?;
            json.is_rewritten = true;
            has_schemas = true;
        }
        Ok(has_schemas)
    }

    /// Returns the text of a lexeme, without a value in JSON.
    pub fn text_of(&self, lexeme: &Lexeme) -> &str {
        &self.text[lexeme.range.clone()]
    }

    /// Returns an attribute of a rule (`rule[stop="x"]: ...`) that would change the sampling or remove text, if there is
    /// one.
    pub fn unsupported_attribute(&self) -> Option<&str> {
        const REFUSED: [&str; 3] = ["temperature", "stop", "stop_capture"];
        let mut word = "";
        for lexeme in self.lexemes() {
            // An equals sign follows the name of an attribute, and nothing else.
            if lexeme.token == Token::Equals && REFUSED.contains(&word) {
                return Some(word);
            }
            word = self.text_of(lexeme);
        }
        None
    }

    /// Returns the text for the compiler. Comments are blanks, so lines and columns are those of the grammar.
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(self.text.len());
        for lexeme in &self.lexemes {
            let Lexeme { token, range, value } = lexeme;
            if *token == Token::Skip {
                text.extend(range.clone().map(|_| ' '));
            } else {
                text += &self.text[range.clone()];
            }
            let Some(Json { value, range, is_rewritten }) = value else { continue };
            let json = &self.text[range.clone()];
            if *is_rewritten {
                // Blanks before the value keep the places of all that follows.
                let written = value.to_string();
                let (lines, last) = json.rsplit_once('\n').unwrap_or(("", json));
                let breaks = if last.len() < json.len() { lines.matches('\n').count() + 1 } else { 0 };
                text.extend((0..breaks).map(|_| '\n'));
                text.extend((written.len()..last.len()).map(|_| ' '));
                text += &written;
            } else {
                text += json;
            }
        }
        // The compiler adds the last line break as well.
        text.pop();
        text
    }
}

/// Parses the JSON at `end`, and sets `end` to the byte after it.
fn json<T: DeserializeOwned>(bytes: &[u8], end: &mut usize) -> Result<T, String> {
    // The compiler reads from a reader as well: its number of bytes may differ from that of a slice.
    let mut values = Deserializer::from_reader(Cursor::new(&bytes[*end..])).into_iter::<T>();
    match values.next() {
        Some(Ok(value)) => {
            *end += values.byte_offset();
            Ok(value)
        }
        Some(Err(error)) => Err(error.to_string()),
        None => Err("it is missing".into()),
    }
}

/// Returns line and column of a byte, from 1. Columns are counted in bytes.
fn place(text: &str, byte: usize) -> (usize, usize) {
    let before = &text.as_bytes()[..byte.min(text.len())];
    let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
    let column = before.iter().rev().take_while(|&&byte| byte != b'\n').count() + 1;
    (line, column)
}

/// The automaton of the compiler's lexer.
struct Automaton {
    states: RegexVec,
    /// Kinds of the automaton's expressions.
    tokens: Vec<Token>,
    start: StateID,
    /// Bytes that begin a lexeme.
    first: Vec<bool>,
}

/// Result of a byte.
enum Step {
    State(StateID),
    /// A lexeme is complete. `begins` is the byte of the next one, if the byte is no part of this one.
    Lexeme {
        token: Token,
        begins: Option<u8>,
    },
    Error,
}

impl Automaton {
    fn new() -> Self {
        let build = || {
            let mut spec = LexerSpec::new()?;
            spec.setup_lexeme_class_with_skip(SkipSpec::unbounded(RegexAst::Regex(SKIPPED.into())))?;
            let mut tokens = vec![Token::Skip];
            for (token, text) in FIXED {
                spec.add_simple_literal(text.into(), text, false)?;
                tokens.push(token);
            }
            for (token, pattern) in PATTERNS {
                let pattern = RegexAst::Regex(pattern.into());
                spec.add_greedy_lexeme(format!("{token:?}"), pattern, false, None, usize::MAX)?;
                tokens.push(token);
            }
            let mut states = spec.to_regex_vec(&mut ParserLimits::default())?;
            let start = states.initial_state(&spec.all_lexemes());
            let first = (0..=u8::MAX).map(|byte| !states.transition(start, byte).is_dead()).collect();
            Ok::<_, Box<dyn std::error::Error>>(Self { states, tokens, start, first })
        };
        build().unwrap_or_else(|error| unreachable!("the lexer's expressions are constants: {error}"))
    }

    fn advance(&mut self, state: StateID, byte: u8) -> Step {
        let next = self.states.transition(state, byte);
        if next.is_dead() {
            if self.first[usize::from(byte)] { self.accepted(state, Some(byte)) } else { Step::Error }
        } else if next.has_lowest_match() {
            let lexeme = self.states.state_desc(next).lazy_accepting.first();
            lexeme.map_or(Step::Error, |lexeme| Step::Lexeme {
                token: self.tokens[lexeme.as_usize()],
                begins: None,
            })
        } else {
            Step::State(next)
        }
    }

    fn end(&self, state: StateID) -> Step {
        self.accepted(state, None)
    }

    /// Returns the lexeme that ends in a state.
    fn accepted(&self, state: StateID, begins: Option<u8>) -> Step {
        let lexeme = self.states.state_desc(state).greedy_accepting.first();
        lexeme.map_or(Step::Error, |lexeme| Step::Lexeme { token: self.tokens[lexeme.as_usize()], begins })
    }

    /// Returns the state after the first byte of a lexeme. After a value in JSON, the compiler repeats the byte before
    /// the value, which only blanks survive.
    fn restart(&mut self, first: Option<u8>) -> StateID {
        first.map_or(self.start, |byte| self.states.transition(self.start, byte))
    }
}

#[cfg(test)]
mod tests {
    use llguidance::api::{GrammarInit, TopLevelGrammar};

    use super::*;

    /// Pieces of texts that two lexers could read differently.
    const PIECES: [&str; 62] = [
        "\"a\"",
        "\"",
        "\"\\\"\"",
        "\"#\"",
        "\"\\x41\"i",
        "/b/",
        "/\\//",
        "/#\"/is",
        "/",
        "//",
        "# x",
        "# it's 5\" long",
        "#\"",
        "//\"",
        "<a>",
        "<[1-2,^*]>",
        "<\">",
        "</>",
        "<#>",
        "< ",
        "@g",
        "%json {\"a\": \"//#\\\"\"}",
        "%json",
        "%json{}",
        "%json [1.5e3,\n {\"description\": \"#\"}]",
        "%json 1 ",
        "%json \"#\"",
        "%regex {\"substring_chars\": \"#\"}",
        "%regex {}",
        "%lark {",
        "%lark",
        "}",
        "%llguidance {\"no_forcing\": true}",
        "\n",
        "\n\n  ",
        "\r\n",
        "\r",
        " ",
        "\t",
        "start:",
        "x",
        "T",
        "|",
        "&",
        "~",
        "?",
        "[",
        "]",
        "{2,3}",
        "~2",
        "0x1",
        "-1.5e3",
        "->",
        "::",
        "_",
        "[temperature=0.0]:",
        "\u{e9}",
        "\"\u{1f98a}\"",
        "\u{0}",
        "\\",
        ",",
        "%ignore",
    ];

    /// Returns the first line of the compiler's error.
    fn compile(text: &str) -> Result<(), String> {
        let grammar = GrammarInit::Serialized(TopLevelGrammar::from_lark(text.into()));
        let compiled = grammar.to_internal(None, ParserLimits::default());
        compiled.map(drop).map_err(|error| error.to_string().lines().next().unwrap_or_default().to_owned())
    }

    #[test]
    fn random_texts_are_read_as_the_compiler_reads_them() {
        let mut random = 1u64;
        let mut next = |end: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % end
        };
        let mut counts = [0; 4];
        for case in 0..2_000 {
            let mut text = String::from("start: ");
            for end in [next(8), 1] {
                for _ in 0..end {
                    text += PIECES[next(PIECES.len())];
                    text += ["", " ", "\n| "][next(3)];
                }
                // Nothing opens this bracket, so the compiler names it where it is no part of another lexeme.
                text += " ) ";
            }
            let (read, compiled) = (Source::read(&text), compile(&text));
            let problem = compiled.as_ref().err().cloned().unwrap_or_default();
            let is_unreadable = problem.ends_with("lexer error") || problem.starts_with("failed to parse");
            assert_eq!(read.is_err(), is_unreadable, "case {case}: {text:?}: {read:?} and {problem}");
            let Ok(source) = read else {
                counts[0] += 1;
                continue;
            };
            assert_eq!(compile(&source.text()), compiled, "case {case}: {text:?} as {:?}", source.text());
            let lexemes: Vec<_> = source.lexemes().map(|lexeme| source.text_of(lexeme)).collect();
            match problem.rsplit_once("(at ").and_then(|(_, named)| Some(named.rsplit_once(" (")?.0)) {
                Some("{ ...json... }") => counts[1] += 1,
                Some(named) => {
                    let found = lexemes.iter().any(|text| format!("{text:?}") == named);
                    assert!(found, "case {case}: {text:?}: {named} of {problem} is not in {lexemes:?}");
                    counts[2] += 1;
                }
                None => {
                    assert!(!lexemes.contains(&")"), "case {case}: {text:?}: {lexemes:?}, but {problem}");
                    counts[3] += 1;
                }
            }
        }
        // All kinds of texts have occurred.
        assert!(counts.iter().all(|&count| count > 5), "{counts:?}");
    }

    #[test]
    fn comments_and_annotations_do_not_reach_the_compiler() {
        let text = "# it's 5\" long\nstart: x // \"\nx: \"# \\\" //\" | /#\\/\"/ | %json {\"title\": \"#\", \"type\": \"null\"} # y";
        let expected = "              \nstart: x     \nx: \"# \\\" //\" | /#\\/\"/ | %json                {\"type\":\"null\"}    ";
        let source = Source::read(text).unwrap();
        assert_eq!(source.text(), expected);
    }

    #[test]
    fn schemas_in_grammars_are_narrowed_and_cannot_be_loosened() {
        let narrowed = |text: &str| {
            let mut source = Source::read(text).unwrap();
            source.narrow_schemas().map(|_| source.text())
        };
        let text = "// %json {\nstart: \"%json\" x\nx: %json {\"format\": \"color\",\n \"type\": \"null\"}\ny: \"b\"";
        let written = narrowed(text).unwrap();
        assert!(!written.contains("color") && written.lines().count() == text.lines().count(), "{written}");
        let problem = narrowed("start: %json {\"x-guidance\": {\"lenient\": true}}").unwrap_err();
        assert!(problem.contains("`lenient`"), "{problem}");
    }

    #[test]
    fn an_attribute_is_found_where_the_compiler_finds_it() {
        let cases = [
            ("start[temperature=0.0]: \"a\"", Some("temperature")),
            ("# \"\nstart[temperature=0.0]: \"a\"", Some("temperature")),
            ("start: x // \"\nx[capture, stop = \"b\"]: /a/", Some("stop")),
            ("start: %lark {\nstart[suffix=\"b\",\tstop_capture=\"c\"]: /a/\n}", Some("stop_capture")),
            (
                "start: \"[stop=\" x # [temperature=1]\nx[capture=\"stop\", max_tokens=3, lazy]: /[temperature=1]/",
                None,
            ),
            ("start: stop temperature\nstop: \"a\"\ntemperature: %json {\"stop=\": 1}", None),
        ];
        for (text, expected) in cases {
            assert_eq!(Source::read(text).unwrap().unsupported_attribute(), expected, "{text}");
        }
    }

    #[test]
    fn a_text_that_is_no_lexeme_is_named_by_its_place() {
        let cases = [
            ("start: \"a\nb\"", "at 1(10): "),
            ("start: x\nx: \u{e9}", "at 2(4): "),
            ("start: %json {\"a\": }", "at 1(8): the JSON after `%json`: expected value"),
            ("start: %regex {\"x\": 1}", "the JSON after `%regex`: unknown field `x`"),
        ];
        for (text, expected) in cases {
            let problem = Source::read(text).unwrap_err();
            assert!(problem.contains(expected), "{text}: {problem}");
        }
    }
}
