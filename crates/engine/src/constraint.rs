//! Grammars of answers.
//!
//! A [`Grammar`] is read as its compiler reads it ([`lark`], [`schema`]), measured ([`bounds`]), and compiled
//! ([`vocabulary`]) to a [`Constraint`] on its own thread ([`compiler`]). For every sampled token the constraint provides a mask of allowed tokens. Consuming a
//! token is fast, but computing the next mask may be slow, so [`MaskWorkers`] compute it while the device computes the
//! logits, and the sampler waits for it at the end of the step at the latest.
//!
//! The grammar applies to bytes, and each token represents the bytes that it writes, so the model chooses the tokens
//! for a text. Control tokens write nothing. They are in no mask, except those that a Lark grammar names (`<|call|>`),
//! and the model's stop tokens where the grammar may end.

mod bounds;
mod cache;
mod compiler;
mod gbnf;
mod grammar;
mod lark;
mod mask;
mod schema;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::fmt;

pub use self::{
    compiler::COMPILE_TIME,
    grammar::{Grammar, GrammarError, narrow_schema},
    vocabulary::Constraint,
};
pub(crate) use self::{
    mask::{Guide, MaskWorkers},
    vocabulary::Vocabulary,
};

/// Stack of a thread that runs the compiled form of grammars, in bytes, and least stack of one that compiles.
const COMPILER_STACK: usize = 64 << 20;

/// Returns the first line of a library's error, or of the regular expression's error in it, without internal details.
fn message(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let line = text.lines().find_map(|line| line.strip_prefix("error: ")).or(text.lines().next());
    match line.unwrap_or_default() {
        line if line.starts_with("oneOf constraints") => {
            "`oneOf` is not supported where its alternatives may overlap; use `anyOf`".to_owned()
        }
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
