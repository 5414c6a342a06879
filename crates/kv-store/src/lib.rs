//! Pages of K and V on disk.
//!
//! A [`Store`] is a folder of append-only segments. It belongs to one process, or is shared by several (`log/shared.rs`). The items of one model under one
//! page format are a [`Space`]; an item is a block's page or the checkpoint after it, named by the block's key. Items are written
//! by one thread and read by another, so no caller waits for the disk.
//!
//! Nothing on disk is trusted: each record has keyed hashes of its header and payload, which also cover its place. A record that is
//! torn, changed, moved, of another store or of another version is not there. The index is in memory, and is rebuilt
//! from the headers.

mod digest;
mod files;
mod index;
mod log;
mod models;
mod record;
mod space;
mod store;
#[cfg(test)]
mod tests;

use std::{io, path::PathBuf};

pub use digest::{ModelFiles, digest_of};
pub use files::{Access, FaultyDisk, free_bytes, replace as write_private};
pub use log::Scan;
pub use models::ModelInfo;
pub use space::{Chunk, Item, Load, Space};
pub use store::{Info, Store, StoreOptions, StoreStats};

/// A BLAKE3 hash.
pub type Id = [u8; 32];

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another process has it open.
    #[error("the cache in {} is in use by another process", dir.display())]
    InUse {
        /// Its folder.
        dir: PathBuf,
    },
    /// The system refuses something.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// A verb: the attempt.
        action: &'static str,
        /// Its file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}
