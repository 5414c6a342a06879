//! The store of K and V on disk that the server's models share.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use paguro_kv_store::{Digest, Store, StoreError, StoreOptions, free_bytes};
use paguro_model::ModelFile;

use crate::{
    cli::ServeOptions,
    models::{EMBEDDED_FILE, Source},
    settings::LibrarySettings,
    units,
};

/// Maximum default size of a store.
const MOST_BYTES: u64 = 16_000_000_000;
/// Default size of a store on a disk whose free space is unknown.
const UNKNOWN_DISK_BYTES: u64 = 4_000_000_000;
/// Minimum size of a store. A smaller one holds no conversation.
const LEAST_BYTES: u64 = 16 << 20;

/// Returns the default folder of a store; `None` without a home folder.
pub fn default_folder(settings: &LibrarySettings) -> Option<PathBuf> {
    Some(settings.root.as_ref()?.join("kv"))
}

/// Opens the store; `None` if it is off or unusable, which is logged.
pub fn open(options: &ServeOptions, settings: &LibrarySettings) -> Option<Arc<Store>> {
    let dir = options.kv_disk_dir.clone().or_else(|| default_folder(settings))?;
    let bound = match options.kv_disk {
        Some(size) => size.0?,
        None => default_size(&dir),
    };
    if bound < LEAST_BYTES {
        let (bound, least) = (units::bytes(bound), units::bytes(LEAST_BYTES));
        tracing::warn!("the cache on disk is off: {bound} for it are less than {least}");
        return None;
    }
    let notice = |line: &str| tracing::warn!("{line}");
    match Store::open(&dir, StoreOptions { notice, ..StoreOptions::new(bound) }) {
        Ok(store) => {
            let stats = store.stats();
            let (used, bound) = (units::bytes(stats.bytes), units::bytes(bound));
            tracing::info!(dir = %dir.display(), used, bound, "cache on disk");
            if stats.damaged > 0 {
                tracing::warn!(
                    damaged = stats.damaged,
                    "some of the cache on disk is damaged and will not be used"
                );
            }
            Some(Arc::new(store))
        }
        Err(error @ StoreError::InUse { .. }) => {
            tracing::warn!(
                "{error}; this server keeps its cache in memory only, or use another --kv-disk-dir"
            );
            None
        }
        Err(error) => {
            tracing::warn!("the cache on disk is off: {error}");
            None
        }
    }
}

/// Returns a tenth of the free space, which includes the bytes of the store.
fn default_size(dir: &Path) -> u64 {
    let used = Store::size(dir);
    free_bytes(dir).map_or(UNKNOWN_DISK_BYTES, |free| (free.saturating_add(used) / 10).min(MOST_BYTES))
}

/// Computes the digest of a model's files.
///
/// # Errors
/// The files cannot be read.
pub fn digest(store: &Store, source: &Source, file: &ModelFile) -> std::io::Result<Digest> {
    match source {
        Source::Embedded => Ok(Digest::of_bytes(EMBEDDED_FILE)),
        Source::Path(_) | Source::Library { .. } => Digest::of_files(store.dir(), file.files()),
    }
}
