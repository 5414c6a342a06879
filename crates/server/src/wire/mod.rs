//! Shared parts of the APIs' wire formats: reading bodies, the tolerance policy, and common types of values.
//!
//! A request type says which fields it reads (`Deserialize` and `ToSchema`) and which others it knows ([`Body::OTHERS`]).
//! [`read()`] compares a body with both, once for all APIs, so no type deals with unknown fields itself.

mod read;
mod schema;
mod surrogates;
mod tolerance;
mod values;

pub use read::{read, read_value};
pub use schema::{Schema, Schemas, describe};
pub use tolerance::{LEFT_OUT, Logged, Tolerance, tolerate};
pub use values::{Content, Limit, OneOrMany, refuse, unreadable};

use serde::de::DeserializeOwned;
use utoipa::ToSchema;

/// The body of a request.
pub trait Body: DeserializeOwned + ToSchema + 'static {
    /// Known fields that the type itself does not read, as lists that several types share.
    const OTHERS: &'static [&'static [Other]] = &[];
}

/// A field that is known by name and has no place in a request type.
#[derive(Clone, Copy, Debug)]
pub struct Other {
    /// Its path, where indices of lists are left out: `messages[].audio`.
    pub path: &'static str,
    /// Policy for requests that have it.
    pub rule: Rule,
    /// Why: the end of a sentence that begins with the field's name.
    pub why: &'static str,
}

/// Policy for a known field without an implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Nothing: the field could not change the answer.
    NoEffect,
    /// The request goes on without it, and the answer names it. Strict requests are refused.
    LeftOut,
    /// The request is refused: the field would change the answer.
    Refused,
    /// The same as `LeftOut`, but for these values (JSON texts), which ask for what is the case anyway.
    LeftOutUnless(&'static [&'static str]),
    /// The same as `Refused`, but for these values (JSON texts), which ask for what is the case anyway.
    RefusedUnless(&'static [&'static str]),
}

/// A field without effect.
pub const fn no_effect(path: &'static str, why: &'static str) -> Other {
    Other { path, rule: Rule::NoEffect, why }
}

/// A field that requests go on without.
pub const fn left_out(path: &'static str, neutral: &'static [&'static str], why: &'static str) -> Other {
    let rule = if neutral.is_empty() { Rule::LeftOut } else { Rule::LeftOutUnless(neutral) };
    Other { path, rule, why }
}

/// A field that would change the answer.
pub const fn refused(path: &'static str, neutral: &'static [&'static str], why: &'static str) -> Other {
    let rule = if neutral.is_empty() { Rule::Refused } else { Rule::RefusedUnless(neutral) };
    Other { path, rule, why }
}

impl Rule {
    /// True if a request with the field is refused.
    fn refuses(self) -> bool {
        matches!(self, Self::Refused | Self::RefusedUnless(_))
    }

    /// Values that ask for what is the case anyway.
    fn neutral(self) -> &'static [&'static str] {
        match self {
            Self::LeftOutUnless(values) | Self::RefusedUnless(values) => values,
            Self::NoEffect | Self::LeftOut | Self::Refused => &[],
        }
    }
}
