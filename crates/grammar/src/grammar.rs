//! Kinds of grammars, and their form for the compiler.

use llguidance::{JsonCompileOptions, api::TopLevelGrammar, regex_to_lark, toktrie::TokTrie};
use serde_json::{Value, json};

use super::{
    bounds::{Measure, at_most},
    compiler::COMPILE_TIME,
    gbnf,
    lark::Source,
    schema_bounds,
};
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
    /// Compiling the grammar takes too long.
    #[error(
        "the {kind} takes more than {} s to compile; make it smaller: fewer alternatives, repetitions, optional parts or \
         references", COMPILE_TIME.as_secs()
    )]
    TooSlow {
        /// Kind of constraint, as above.
        kind: &'static str,
    },
    /// Other grammars that take too long are still being compiled.
    #[error(
        "grammars that take too long are being compiled, and more of them have to wait; retry in a minute, or make the {kind} \
         smaller"
    )]
    Busy {
        /// Kind of constraint, as above.
        kind: &'static str,
    },
    /// The caller did not wait for the result.
    #[error("the grammar is no longer wanted")]
    NotWanted,
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

    /// Refuses a schema whose depth would overflow the stack of its caller.
    pub(super) fn check_depth(&self) -> Result<(), String> {
        const MAX: usize = 256;
        let Self::JsonSchema(schema) = self else { return Ok(()) };
        let mut rest = vec![(schema, 1)];
        while let Some((value, depth)) = rest.pop() {
            at_most("levels of nested JSON", depth, MAX)?;
            match value {
                Value::Array(values) => rest.extend(values.iter().map(|value| (value, depth + 1))),
                Value::Object(keys) => rest.extend(keys.values().map(|value| (value, depth + 1))),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the grammar in its form for the compiler.
    ///
    /// # Errors
    /// The grammar is malformed, too large, or uses a part that is not supported.
    pub(super) fn lower(&self, tokens: &TokTrie) -> Result<TopLevelGrammar, String> {
        let lark = match self {
            Self::JsonSchema(schema) => return json_grammar(schema),
            Self::JsonObject => return json_grammar(&json!({"type": "object"})),
            Self::Regex(regex) => {
                Measure::default().regex(regex)?;
                &format!("start: /{}/", regex_to_lark(regex, ""))
            }
            Self::Lark(lark) => lark,
            Self::Gbnf(gbnf) => &gbnf::to_lark(gbnf, tokens)?,
        };
        let mut source = Source::read(lark)?;
        if let Some(name) = source.unsupported_attribute() {
            return Err(format!("the attribute `{name}` is not supported; leave it out"));
        }
        Measure::default().lark(&source)?;
        if source.narrow_schemas()? {
            // Rewriting may have multiplied their parts.
            Measure::default().lark(&source)?;
        }
        Ok(TopLevelGrammar::from_lark(source.text()))
    }
}

fn json_grammar(schema: &Value) -> Result<TopLevelGrammar, String> {
    let mut schema = schema.clone();
    schema_bounds::strip(&mut schema);
    Measure::default().schema(&schema)?;
    let mut schema = schema::narrow(&schema)?;
    // Rewriting may have multiplied its parts.
    Measure::default().schema(&schema)?;
    let options = JsonCompileOptions {
        whitespace_pattern: Some(format!(r"[ \t]|\r?\n[ \t]{{0,{MAX_INDENT}}}")),
        json_allowed_escapes: Some(schema::escapes(&schema)?),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    Ok(TopLevelGrammar::from_json_schema(schema))
}
