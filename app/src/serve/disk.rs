//! The store of K and V on disk that the server's models share, also with other servers.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
};

use paguro_engine::Handle;
use paguro_kv_store::{Id, ModelFiles, Store, StoreError, StoreOptions, digest_of, free_bytes};
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
    match Store::open(&dir, StoreOptions { notice, is_shared: true, ..StoreOptions::new(bound) }) {
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
                "{error}, which does not share it: an older version, or `paguro cache`; this server keeps its cache in memory \
                 only, or use another --kv-disk-dir"
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
pub fn default_size(dir: &Path) -> u64 {
    let used = Store::size(dir);
    free_bytes(dir).map_or(UNKNOWN_DISK_BYTES, |free| (free.saturating_add(used) / 10).min(MOST_BYTES))
}

/// Files of a model that is loaded, and their digest.
#[derive(Debug)]
pub struct Weights {
    /// `None` for the model in the binary.
    files: Option<ModelFiles>,
    /// `None` if the files must be read for it.
    pub digest: Option<Id>,
}

impl Weights {
    /// Looks at the files of a model that is opened afterwards. `dir` is the folder of a store, which remembers digests.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn of(dir: &Path, source: &Source, file: &ModelFile) -> std::io::Result<Self> {
        Ok(match source {
            Source::Embedded => Self { files: None, digest: Some(digest_of(EMBEDDED_FILE)) },
            Source::Path(_) | Source::Library { .. } => {
                let files = ModelFiles::of(file.files())?;
                Self { digest: files.known_digest(dir), files: Some(files) }
            }
        })
    }

    /// Returns true if the files are the same as before.
    pub fn is_current(&self) -> bool {
        self.files.as_ref().is_none_or(ModelFiles::is_current)
    }

    /// Reads the files on a thread of its own, unless the digest is known, and passes the digest to the engine: its cache on disk begins
    /// then.
    pub fn read_later(self, dir: &Path, engine: Handle, model: &str) -> Option<JoinHandle<()>> {
        let Self { files: Some(files), digest: None } = self else { return None };
        let (dir, model) = (dir.to_owned(), model.to_owned());
        let work = move || {
            let digest = files.digest(&dir, &|| !engine.has_stopped());
            if let Err(error) = &digest
                && !engine.has_stopped()
            {
                tracing::warn!(model, "no cache on disk for this model: {error}");
            }
            engine.set_weights_digest(digest.as_ref().ok().map(|id| &id[..]));
        };
        let thread = thread::Builder::new().name("paguro-digest".into()).spawn(work);
        let warn = |error: &std::io::Error| {
            tracing::warn!("no thread for the digest of a model, which has no cache on disk: {error}");
        };
        thread.inspect_err(warn).ok()
    }
}
