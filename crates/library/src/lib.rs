//! The model library: the models of this machine, their origins, and downloads.
//!
//! A [`Library`] is a folder. Its catalogue is a SQLite database; the models' files are blobs, named by their content
//! and shared by models. Any number of processes may use it concurrently, and any of them may be killed at any time:
//! the catalogue contains a model only if all of its files are present, complete and verified.
//!
//! An adapter (LoRA) is recorded as a model is, with the model that it changes ([`ModelRecord::find_base`]).
//!
//! The library does not read the content of a model. Its caller opens the model ([`Inspect`]) and reports its
//! properties.

mod adapter;
mod add;
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
mod remove;
mod reserve;
mod store;
mod upload;
mod verify;

pub mod found;
pub mod hub;
pub mod known;

pub use adapter::{AdapterDetails, Base};
pub use add::Taken;
pub use cancel::Cancel;
pub use digest::Digest;
pub use error::LibraryError;
pub use hub::is_public;
pub use import::ImportOptions;
pub use library::{Library, PullOptions, Removed};
pub use name::{LATEST, ModelName, digest_name, plain_name};
pub use rebuild::{Rebuilt, Restored};
pub use record::{Details, FileRecord, Format, Inspect, ModelRecord, OnProgress, Progress, Source, Transfer};
pub use store::Pruned;
pub use upload::Upload;
pub use verify::{Finding, Problem, Repair, Verified, VerifyOptions};
