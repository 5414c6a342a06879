//! The paguro binary.
fn main() {}
