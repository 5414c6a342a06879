//! The library through its public interface, in one program because linking takes longer than most of the tests.

#[path = "../common/mod.rs"]
mod common;
mod damage;
mod imports;
mod library;
mod pull;
mod records;
