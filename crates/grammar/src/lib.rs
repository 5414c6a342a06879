//! Grammars of answers: JSON schemas, regular expressions, llama.cpp's GBNF and llguidance's Lark.
//!
//! A [`Vocabulary`] has the tokens of one model, [`Vocabulary::compile`] makes a [`Constraint`] of a grammar, and a
//! [`Guide`] follows one answer through it. Read `vocabulary` and `mask` first; `schema` and `gbnf` are translations to
//! the form of the compiler, llguidance. The crate knows neither requests nor models: of the contract of devices it uses
//! the type of a mask alone, and its caller gives [`MaskTask`]s to threads.
//!
//! A [`Grammar`] is read as its compiler reads it ([`lark`], [`schema_bounds`]), measured ([`bounds`]), and compiled
//! ([`vocabulary`]) to a [`Constraint`] on its own thread ([`compiler`]). Every sampled token of an answer starts a
//! computation of the mask of allowed next tokens. It usually takes some dozens of microseconds, and seconds for hostile
//! grammars.
//!
//! The grammar applies to bytes, and each token represents the bytes that it writes, so the model chooses the tokens
//! for a text. Control tokens write nothing. They are in no mask, except those that a Lark grammar names (`<|call|>`),
//! and the model's stop tokens where the grammar may end.

mod bounds;
mod cache;
mod clock;
mod compiler;
mod gbnf;
mod grammar;
mod lark;
mod mask;
mod schema;
mod schema_bounds;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::fmt;

pub use self::{
    clock::ThreadClock,
    compiler::COMPILE_TIME,
    grammar::{Grammar, GrammarError},
    mask::{Answer, Computation, Drafted, Guide, MaskError, MaskTask, PROMPT, Verdict},
    vocabulary::{Constraint, TokenText, Vocabulary},
};

/// Stack of a thread that runs the compiled form of grammars, in bytes, and least stack of one that compiles.
pub const COMPILER_STACK: usize = 64 << 20;

/// Returns the first line of a library's error, or of the regular expression's error in it, without internal details.
fn message(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let line = text.lines().find_map(|line| line.strip_prefix("error: ")).or(text.lines().next());
    match line.unwrap_or_default() {
        line if ["lexer precomputation", "initial lexer configuration", "fuel exhausted"]
            .iter()
            .any(|problem| line.contains(problem)) =>
        {
            "its terminals or patterns are too complex together; make them shorter, or divide them into rules"
                .to_owned()
        }
        line if line.starts_with("panic: ") => {
            "the compiler has failed; make it smaller, or leave out its rare parts".to_owned()
        }
        line => line.to_owned(),
    }
}
