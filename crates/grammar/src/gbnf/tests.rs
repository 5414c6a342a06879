//! Grammars with texts that they derive and texts that they do not, and grammars that are refused.

use llguidance::{
    ParserFactory, TokenParser,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokEnv},
};
use serde_json::Value;

use super::{is_gbnf, to_lark};

/// A token for each byte, and a few that are special.
fn bytes() -> TokEnv {
    ApproximateTokEnv::single_byte_env()
}

/// Follows texts through grammars, byte by byte.
pub(super) struct Follower {
    environment: TokEnv,
    factory: ParserFactory,
}

impl Default for Follower {
    fn default() -> Self {
        let environment = bytes();
        let mut factory = ParserFactory::new_simple(&environment).unwrap();
        factory.quiet();
        Self { environment, factory }
    }
}

impl Follower {
    /// A compiled grammar.
    pub fn start(&self, grammar: &str) -> Result<TokenParser, String> {
        let lark = to_lark(grammar, self.environment.tok_trie())?;
        let parser = self.factory.create_parser(TopLevelGrammar::from_lark(lark.clone()));
        let mut parser = parser.map_err(|error| format!("{error}\n{lark}"))?;
        assert_eq!(parser.grammar_warnings(), [""; 0], "{lark}");
        parser.start_without_prompt();
        Ok(parser)
    }

    /// Returns whether a grammar derives a text.
    pub fn follow(&self, start: &TokenParser, text: &str) -> Result<bool, String> {
        let mut parser = start.deep_clone();
        for token in self.tokens(text) {
            match parser.compute_mask() {
                Ok(mask) if mask.is_allowed(token) => {}
                // There is no mask where the grammar is at its end.
                _ => return Ok(false),
            }
            parser.consume_token(token).map_err(|error| error.to_string())?;
            if parser.check_stop().unwrap_or(true) && !parser.is_accepting() {
                return Ok(false);
            }
        }
        Ok(parser.is_accepting())
    }

    /// The tokens of a text; `<|tool|>` is one.
    fn tokens(&self, mut text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        while !text.is_empty() {
            let end = text.find("|>").filter(|_| text.starts_with("<|")).map_or(0, |end| end + 2);
            match self.environment.tok_trie().get_special_token(&text[..end]) {
                Some(token) if end > 0 => {
                    tokens.push(token);
                    text = &text[end..];
                }
                _ => {
                    let length = text.chars().next().map_or(1, char::len_utf8);
                    tokens.extend(text.as_bytes()[..length].iter().map(|&byte| u32::from(byte)));
                    text = &text[length..];
                }
            }
        }
        tokens
    }
}

#[test]
fn grammars_derive_their_texts_and_no_others() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("cases.json")).unwrap();
    let follower = Follower::default();
    let mut wrong = Vec::new();
    for case in &cases {
        let grammar = case["grammar"].as_str().unwrap();
        assert!(is_gbnf(grammar), "{grammar}");
        let start = follower.start(grammar).unwrap_or_else(|problem| panic!("{grammar:?}: {problem}"));
        for (key, expected) in [("derives", true), ("never", false)] {
            for text in case[key].as_array().into_iter().flatten().filter_map(Value::as_str) {
                match follower.follow(&start, text) {
                    Ok(derived) if derived == expected => {}
                    Ok(_) => wrong.push(format!("{grammar:?}: {text:?} should be {expected}")),
                    Err(problem) => wrong.push(format!("{grammar:?}: {problem}")),
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn mistakes_are_told_with_their_place() {
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(101), ")".repeat(101));
    let many: String = (0..6_000).map(|i| format!("r{i} ::= \"a\"\n")).collect();
    let long = format!("root ::= \"{}\"", "x".repeat(300 << 10));
    let cases = [
        ("roots ::= \"a\"", "there is no rule `root`"),
        ("root ::= \"a\" b", "line 1, column 14: the rule `b` is not defined"),
        (
            "root ::= \"a\"\n\nroot ::= \"b\"",
            "line 3, column 1: the rule `root` is defined at line 1, column 1 already",
        ),
        ("root ::= \"a", "line 1, column 10: the text that begins here has no closing `\"`"),
        ("root ::= [a", "line 1, column 10: the class that begins here has no closing `]`"),
        ("root ::= [z-a]", "line 1, column 11: the range `z-a` is empty"),
        ("root ::= []", "line 1, column 10: the class is empty"),
        ("root ::= [^\\x00-\\U0010FFFF]", "line 1, column 10: the class leaves no character out"),
        ("root ::= \"\\q\"", "line 1, column 11: `\\q` is no escape"),
        ("root ::= \"\\x4\"", "line 1, column 11: `\\x` needs 2 hexadecimal digits"),
        ("root ::= \"\\u12é\"", "`\\u` needs 4 hexadecimal digits"),
        ("root ::= \"\\uD800\"", "line 1, column 11: `\\uD800` is no character"),
        ("root ::= \"\\UFFFFFFFF\"", "`\\UFFFFFFFF` is no character"),
        ("root ::= * \"a\"", "line 1, column 10: `*` has nothing before it to repeat"),
        ("root ::= \"a\"{,3}", "line 1, column 14: `,` is not expected, and a number of repetitions"),
        ("root ::= \"a\"{3,2}", "line 1, column 13: `{3,2}` repeats nothing"),
        ("root ::= \"a\"{99999999999}", "99999999999 repetitions are too many; at most 100000"),
        ("root ::= \"a\"{2", "the grammar ends, and `}` should be here"),
        (
            "root ::= (\"a\" |\n  (\"b\")\nb ::= \"c\"",
            "line 3, column 3: `:` is not expected, and `)` should be here; the group of line 1, column 10 is open",
        ),
        ("root ::= \"é\" $", "line 1, column 14: `$` is not expected"),
        ("root = \"a\" ::= b", "line 1, column 6: `=` is not expected, and the rule `root` needs `::=`"),
        ("root ::= <[999999]>", "line 1, column 10: there is no token `<[999999]>`: the model has"),
        ("root ::= <[1>", "line 1, column 13: `>` is not expected, and `]` should be here"),
        ("root ::= <nothing>", "line 1, column 10: `<nothing>` is not one token of the model"),
        ("root ::= !\"a\"", "line 1, column 11: `\"` is not expected, and `<` should be here"),
        ("root ::= <a b\n", "line 1, column 10: the token that begins here has no closing `>`"),
        (&deep, "line 1, column 110: more than 100 nested groups"),
        (&many, "it has more than 5000 rules"),
        (&long, "it has 307211 bytes; at most 262144 are compiled"),
    ];
    for (grammar, expected) in cases {
        let problem = to_lark(grammar, bytes().tok_trie()).expect_err(expected);
        assert!(problem.contains(expected), "{problem:?} instead of {expected:?}");
    }
}

#[test]
fn the_first_rule_tells_the_format() {
    let cases = [
        ("root ::= \"a\"", true),
        ("# comment\n\n  other-rule\t::= x\nroot ::= other-rule", true),
        ("start: \"a\"", false),
        ("// root ::= x\nstart: a\na: \"root ::= x\"", false),
        ("%llguidance {}\nstart: \"::=\"", false),
        ("?start: \"::=\"", false),
        ("start[capture]: \"::=\"", false),
        ("= root ::= \"a\"", true),
        ("", false),
    ];
    for (grammar, expected) in cases {
        assert_eq!(is_gbnf(grammar), expected, "{grammar:?}");
    }
}
