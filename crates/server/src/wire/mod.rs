//! Common parts of the APIs' wire formats: reading bodies, the tolerance policy, and types of values.
//!
//! A request type declares the fields that it reads (`Deserialize` and `ToSchema`) and other known fields
//! ([`Body::OTHERS`]). [`read()`] compares a body with both, once for all APIs, so that no type handles unknown fields.

mod read;
mod schema;
mod surrogates;
mod tolerance;
mod values;

pub use read::{read, read_value};
pub use schema::{Schema, Schemas, describe};
pub use tolerance::{LEFT_OUT, Logged, Tolerance, tolerate};
pub use values::{Content, Limit, OneOrMany, Output, arguments, refuse, unreadable};

use serde::de::DeserializeOwned;
use utoipa::ToSchema;

/// The body of a request.
pub trait Body: DeserializeOwned + ToSchema + 'static {
    /// Known fields that the type does not read, as lists that several types share.
    const OTHERS: &'static [&'static [Other]] = &[];
    /// True if the body is a JSON array.
    const IS_LIST: bool = false;
}

/// A known field that a request type does not read.
#[derive(Clone, Copy, Debug)]
pub struct Other {
    /// Its path without indices of lists: `messages[].audio`.
    pub path: &'static str,
    /// Policy for requests with the field.
    pub rule: Rule,
    /// Reason, as the end of a sentence that begins with the field's name.
    pub why: &'static str,
}

/// Policy for a known field without an implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Ignored: the field cannot change the answer.
    NoEffect,
    /// Ignored, and named in the answer. Strict requests are refused.
    LeftOut,
    /// The request is refused: the field would change the answer.
    Refused,
    /// `LeftOut`, except for these neutral values (JSON texts), which match the default behaviour.
    LeftOutUnless(&'static [&'static str]),
    /// `Refused`, except for these neutral values (JSON texts), which match the default behaviour.
    RefusedUnless(&'static [&'static str]),
}

/// Declares a field without effect.
pub const fn no_effect(path: &'static str, why: &'static str) -> Other {
    Other { path, rule: Rule::NoEffect, why }
}

/// Declares a field that is left out.
pub const fn left_out(path: &'static str, neutral: &'static [&'static str], why: &'static str) -> Other {
    let rule = if neutral.is_empty() { Rule::LeftOut } else { Rule::LeftOutUnless(neutral) };
    Other { path, rule, why }
}

/// Declares a field that would change the answer.
pub const fn refused(path: &'static str, neutral: &'static [&'static str], why: &'static str) -> Other {
    let rule = if neutral.is_empty() { Rule::Refused } else { Rule::RefusedUnless(neutral) };
    Other { path, rule, why }
}

impl Rule {
    /// Returns true if requests with the field are refused.
    fn refuses(self) -> bool {
        matches!(self, Self::Refused | Self::RefusedUnless(_))
    }

    /// Returns the values that match the default behaviour.
    fn neutral(self) -> &'static [&'static str] {
        match self {
            Self::LeftOutUnless(values) | Self::RefusedUnless(values) => values,
            Self::NoEffect | Self::LeftOut | Self::Refused => &[],
        }
    }
}
