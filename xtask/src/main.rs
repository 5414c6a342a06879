//! The project CI and chores.
fn main() {}
