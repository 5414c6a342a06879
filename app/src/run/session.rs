//! A conversation that outlives the process: `--session`.

use std::{
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use paguro_engine::{DiskCache, Handle};
use paguro_kv_store::{Store, StoreOptions, write_private};

use super::{prompt::Conversation, saved};
use crate::{
    failure::{Failure, Outcome},
    load,
    models::Source,
    serve::disk::{Weights, default_folder, default_size},
    sessions,
    settings::LibrarySettings,
};

/// Time that the end of a run waits for the digest of the model's files.
const PATIENCE: Duration = Duration::from_secs(10);

/// A session that this process has alone.
pub struct Session {
    /// File with the messages.
    messages: PathBuf,
    store: Arc<Store>,
    /// Folder in which digests of models are remembered.
    digests: PathBuf,
    /// Messages so far.
    pub conversation: Conversation,
    /// Name of its last model.
    pub model: Option<String>,
}

impl Session {
    /// Opens a session, or begins one.
    ///
    /// # Errors
    /// A name that cannot be one, a session that another process uses, messages that cannot be read.
    pub fn open(name: &str, library: &LibrarySettings) -> Outcome<Self> {
        let folder = sessions::folder_of(library, name)?;
        let messages = sessions::messages(&folder);
        let cache = sessions::cache(&folder);
        let store = sessions::open_cache(&folder, StoreOptions::new(default_size(&cache)))?;
        let (model, conversation) = match messages.exists() {
            true => saved::load_with_model(&messages)?,
            false => Default::default(),
        };
        let shared = default_folder(library).filter(|folder| folder.is_dir());
        Ok(Self {
            messages,
            digests: shared.unwrap_or(cache),
            store: Arc::new(store),
            conversation,
            model: Some(model).filter(|model| !model.is_empty()),
        })
    }

    /// Writes the messages, for the user alone.
    ///
    /// # Errors
    /// The system's.
    pub fn save(&self, model: &str, conversation: &Conversation) -> Outcome<()> {
        let text = saved::to_text(model, conversation);
        write_private(&self.messages, text.as_bytes())
            .map_err(|error| Failure::new(format!("cannot write {}: {error}", self.messages.display())))
    }

    /// Identifies the files of a model before it is opened. `None` if they cannot be read; opening then returns the error.
    pub fn weights(&self, source: &Source) -> Option<Weights> {
        Weights::of(&self.digests, source, &load::file(source).ok()?).ok()
    }

    /// Returns the cache of the session, for a model.
    pub fn cache(&self, model: &str, weights: &Weights) -> DiskCache {
        DiskCache::new(self.store.clone(), model, weights.digest.as_ref().map(|id| &id[..]))
    }

    /// Computes the digest of the model's files in the background, unless it is known.
    pub fn read_later(&self, weights: Weights, engine: Handle, model: &str) -> DigestThread {
        DigestThread(weights.read_later(&self.digests, engine, model))
    }
}

/// Computes a digest. Its end is waited for, because without the digest nothing is saved.
pub struct DigestThread(Option<JoinHandle<()>>);

impl Drop for DigestThread {
    fn drop(&mut self) {
        let end = Instant::now() + PATIENCE;
        while self.0.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
}
