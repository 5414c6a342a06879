//! Grammars of answers.
//!
//! A [`Grammar`] is measured ([`bounds`]) and compiled ([`vocabulary`]) to a [`Constraint`] on its own thread with a large
//! stack, because the compiler recurses. For every sampled token the constraint provides a mask of allowed tokens. Consuming a
//! token is fast, but computing the next mask may be slow, so [`MaskWorkers`] compute it while the device computes the
//! logits, and the sampler waits for it at the end of the step at the latest.
//!
//! The grammar applies to bytes, and each token represents the bytes that it writes, so the model chooses the tokens
//! for a text. Control tokens write nothing. They are in no mask, except those that a Lark grammar names (`<|call|>`),
//! and the model's stop tokens where the grammar may end.

mod bounds;
mod cache;
mod gbnf;
pub(crate) mod grammar;
mod mask;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::fmt;

pub use self::{
    grammar::{Grammar, GrammarError},
    vocabulary::Constraint,
};
pub(crate) use self::{
    mask::{Guide, MaskWorkers},
    vocabulary::Vocabulary,
};

/// Stack of the thread that compiles grammars, in bytes. The deepest grammar that [`bounds`] allows uses a quarter of
/// it.
const COMPILER_STACK: usize = 64 << 20;

/// Returns the first line of a library's error, or of the regular expression's error in it, without internal details.
fn message(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let line = text.lines().find_map(|line| line.strip_prefix("error: ")).or(text.lines().next());
    line.unwrap_or_default().to_owned()
}
