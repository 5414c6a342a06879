//! Counts that clients give. Nothing may be allocated, repeated or waited for by such a number before it is checked.

use std::{fmt, ops::RangeInclusive};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ApiError;

/// A count that a client has given. It can be compared and shown; the number comes out of it only through a bound.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct ClientCount(usize);

impl ClientCount {
    /// The number, if it is in `range`.
    ///
    /// # Errors
    /// It is not; `param` is the field that it was in.
    pub fn within(self, range: RangeInclusive<usize>, param: &str) -> Result<usize, ApiError> {
        if range.contains(&self.0) {
            return Ok(self.0);
        }
        let (least, most) = range.into_inner();
        let message = format!("`{param}` is {self}; it must be between {least} and {most}");
        Err(ApiError::invalid(param, message))
    }

    /// The number, or `most` if it is larger: for limits, of which a larger one bounds nothing more.
    pub fn at_most(self, most: usize) -> usize {
        self.0.min(most)
    }
}

impl From<usize> for ClientCount {
    fn from(count: usize) -> Self {
        Self(count)
    }
}

impl fmt::Display for ClientCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for ClientCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Refuses a list that is too long.
///
/// # Errors
/// It has more than `most` elements; `param` is the field that it was in.
pub fn check_length(length: usize, most: usize, param: &str) -> Result<(), ApiError> {
    if length <= most {
        return Ok(());
    }
    Err(ApiError::invalid(param, format!("`{param}` has {length} elements; one request can have {most}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_bounded_or_refused() {
        let huge = ClientCount::from(usize::MAX);
        assert_eq!(huge.at_most(7), 7);
        let refused = huge.within(1..=64, "n").unwrap_err().to_string();
        assert_eq!(refused, format!("`n` is {}; it must be between 1 and 64", usize::MAX));
        assert_eq!(ClientCount::from(64).within(1..=64, "n"), Ok(64));
        assert!(ClientCount::from(0).within(1..=64, "n").is_err());
    }
}
