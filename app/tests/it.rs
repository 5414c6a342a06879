//! The binary and the engine on the embedded model. All in one program: linking costs more than most of these tests.

mod architectures;
mod chat;
mod common;
mod constraints;
mod crowd;
mod errors;
mod families;
mod grammars;
mod library;
mod measure;
mod reference;
mod run;
mod schemas;
mod tools;
