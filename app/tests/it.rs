//! The binary and the engine on the embedded model. All in one program: linking costs more than most of these tests.

mod architectures;
mod chat;
mod common;
mod constraints;
mod errors;
mod families;
mod grammars;
mod library;
mod many_sequences;
mod measure;
mod reference;
mod run;
mod schema_keywords;
mod schemas;
mod tools;
mod vision;
