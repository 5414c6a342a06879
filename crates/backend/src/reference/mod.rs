//! The naive backend that defines what every operation means.
