//! The model library: which models are on this machine, where they came from, and how to get more.
//!
//! A [`Registry`] is a folder. Its catalogue is a SQLite database; the models' files are blobs, named by their content
//! and shared by the models that have them. Any number of processes may use it at once, and any of them may be killed at
//! any moment: a model is in the catalogue only when all of its files are there, complete and checked.
//!
//! The library does not read the content of a model. Its caller opens the model ([`Inspect`]) and reports its properties.

mod cancel;
mod catalogue;
mod digest;
mod error;
mod files;
mod import;
mod library;
mod lock;
mod manifest;
mod name;
mod open;
mod rebuild;
mod record;
mod reserve;
mod store;
mod upload;
mod verify;

pub mod hub;
pub mod known;

pub use cancel::Cancel;
pub use digest::Digest;
pub use error::RegistryError;
pub use import::ImportOptions;
pub use library::{PullOptions, Registry, Removed};
pub use name::{LATEST, ModelName};
pub use rebuild::{Rebuilt, Restored};
pub use record::{Details, FileRecord, Format, Inspect, ModelRecord, OnProgress, Progress, Source, Transfer};
pub use store::Pruned;
pub use upload::Upload;
pub use verify::{Finding, Problem, Repair, Verified, VerifyOptions};
