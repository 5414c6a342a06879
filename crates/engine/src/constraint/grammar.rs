//! Kinds of grammars, and their form for the compiler.

use llguidance::{JsonCompileOptions, api::TopLevelGrammar, toktrie::TokTrie};
use serde_json::{Value, json};

use super::{bounds::Measure, gbnf};
use crate::schema;

/// Grammar of an answer from its first to its last character.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Grammar {
    /// JSON that fits this schema. Properties have the schema's order; an object that names some has no others unless
    /// the schema allows them. Between tokens of JSON there may be one space, or a line break and
    /// up to [`MAX_INDENT`] spaces.
    JsonSchema(Value),
    /// Any JSON object, likewise.
    JsonObject,
    /// Text that this regular expression matches as a whole, in the syntax of the crate `regex`, without
    /// look-around.
    Regex(String),
    /// Text that the rule `start` of this grammar derives, in llguidance's dialect of Lark. A schema in it (`%json`) is
    /// read in the same way as one alone.
    Lark(String),
    /// Text that the rule `root` of this grammar derives, in llama.cpp's GBNF.
    Gbnf(String),
}

/// Blanks that JSON may be indented by. Without a bound, small models write blanks without end.
const MAX_INDENT: usize = 40;

/// Error of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// Tokens without text follow no grammar.
    #[error("grammars need text, and the engine has no tokenizer")]
    NoTokenizer,
    /// The model's vocabulary is out of the ordinary.
    #[error("grammars do not work with this model: {0}")]
    Vocabulary(String),
    /// The grammar is invalid, uses an unsupported feature, or allows no text.
    #[error("the {kind} cannot be followed: {problem}")]
    Invalid {
        /// Kind of constraint: `JSON schema`, `regular expression`, `Lark grammar`, `GBNF grammar`.
        kind: &'static str,
        /// The problem, with the name of the element.
        problem: String,
    },
}

impl Grammar {
    /// Returns a grammar in GBNF or Lark: GBNF if its first rule has `::=`.
    pub fn of_text(text: String) -> Self {
        if gbnf::is_gbnf(&text) { Self::Gbnf(text) } else { Self::Lark(text) }
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) | Self::JsonObject => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "Lark grammar",
            Self::Gbnf(_) => "GBNF grammar",
        }
    }

    /// Refuses a grammar that is too large for the compiler.
    pub(super) fn measure(&self) -> Result<(), String> {
        let mut measure = Measure::default();
        match self {
            Self::JsonSchema(schema) => measure.schema(schema),
            Self::JsonObject => Ok(()),
            Self::Regex(regex) => measure.regex(regex),
            Self::Lark(lark) => measure.lark(lark),
            // Its form in Lark is measured.
            Self::Gbnf(_) => Ok(()),
        }
    }

    pub(super) fn lower(&self, tokens: &TokTrie) -> Result<TopLevelGrammar, String> {
        match self {
            Self::JsonSchema(schema) => json_grammar(schema),
            Self::JsonObject => json_grammar(&json!({"type": "object"})),
            Self::Regex(regex) => Ok(TopLevelGrammar::from_regex(regex)),
            Self::Lark(lark) => match unsupported_attribute(lark) {
                Some(name) => Err(format!("the attribute `{name}` is not supported; leave it out")),
                None => Ok(TopLevelGrammar::from_lark(schema::narrow_lark(lark)?)),
            },
            Self::Gbnf(gbnf) => {
                let lark = gbnf::to_lark(gbnf, tokens)?;
                Measure::default().lark(&lark)?;
                Ok(TopLevelGrammar::from_lark(lark))
            }
        }
    }
}

fn json_grammar(schema: &Value) -> Result<TopLevelGrammar, String> {
    let mut schema = schema::narrow(schema)?;
    let options = JsonCompileOptions {
        whitespace_pattern: Some(format!(r"[ \t]|\r?\n[ \t]{{0,{MAX_INDENT}}}")),
        json_allowed_escapes: Some(schema::escapes(&schema)?),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    Ok(TopLevelGrammar::from_json_schema(schema))
}

/// Returns an attribute of the grammar (`rule[stop="x"]: ...`) that would change the sampling or remove text, if there
/// is one.
fn unsupported_attribute(lark: &str) -> Option<&'static str> {
    let mut rest = lark;
    let mut word = "";
    while let Some(char) = rest.chars().next() {
        let end = match char {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '"' | '/' => literal(rest),
            _ if char.is_alphanumeric() || char == '_' => {
                rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
            }
            _ => char.len_utf8(),
        };
        let (token, after) = rest.split_at(end);
        if token == "=" {
            let refused = ["temperature", "stop", "stop_capture"].into_iter().find(|&name| name == word);
            if refused.is_some() {
                return refused;
            }
        }
        if !token.trim().is_empty() {
            word = token;
        }
        rest = after;
    }
    None
}

/// Returns the number of bytes of the string or regular expression that `text` begins with.
pub(crate) fn literal(text: &str) -> usize {
    let quote = text.as_bytes()[0];
    let mut escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let ends = byte == quote && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}
