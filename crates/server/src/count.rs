//! Numbers of clients. None of them sizes an allocation, a loop or a wait before it was checked.

use std::{fmt, ops::RangeInclusive};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ApiError;

/// A number from a client. It can be compared and displayed; its value is available only through a bound.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct ClientCount(usize);

impl ClientCount {
    /// Returns the number if it is in `range`.
    ///
    /// # Errors
    /// The number is out of range; `param` names its field.
    pub fn within(self, range: RangeInclusive<usize>, param: &str) -> Result<usize, ApiError> {
        if range.contains(&self.0) {
            return Ok(self.0);
        }
        let (least, most) = range.into_inner();
        let message = format!("`{param}` is {self}; it must be between {least} and {most}");
        Err(ApiError::invalid(param, message))
    }

    /// Returns the smaller of the number and `most`, for limits that are capped.
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

/// Checks the length of a list.
///
/// # Errors
/// It has more than `most` elements; `param` names its field.
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
