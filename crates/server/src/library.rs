//! Changes of the model library on behalf of requests. [`crate::source`] serves its content.

use std::{error::Error, path::Path, sync::Arc};

use paguro_library::{
    Cancel, Details, Digest, ImportOptions, Library, LibraryError, ModelName, ModelRecord, hub::Hub,
};
use serde_json::{Map, Value};
use tokio::{sync::Semaphore, task::spawn_blocking};

use crate::{error::ApiError, source::Outside};

/// The model library, the source of its downloads, and limits of concurrent work.
#[derive(Clone, Debug)]
pub struct LibraryService {
    /// Models of this machine.
    pub library: Arc<Library>,
    /// Source of downloads.
    pub hub: Arc<Hub>,
    /// Opens a model and returns the properties that the library records.
    pub inspect: fn(&Path) -> Result<Details, Box<dyn Error + Send + Sync>>,
    work: Arc<Work>,
}

/// Cancels an operation when the request that awaits it is dropped.
#[derive(Debug)]
pub struct CancelOnDrop(pub Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Limits of concurrent work on the library, which runs on threads shared with all other requests.
#[derive(Debug)]
struct Work {
    /// Permits for short work.
    short: Arc<Semaphore>,
    /// Permits for work that waits for a network or copies gigabytes.
    long: Arc<Semaphore>,
}

impl LibraryService {
    /// Creates a service for `library`, whose models come from `hub`.
    pub fn new(
        library: Arc<Library>,
        hub: Arc<Hub>,
        inspect: fn(&Path) -> Result<Details, Box<dyn Error + Send + Sync>>,
    ) -> Self {
        let work = Work { short: Arc::new(Semaphore::new(8)), long: Arc::new(Semaphore::new(16)) };
        Self { library, hub, inspect, work: Arc::new(work) }
    }

    /// Runs short work on the library on a blocking thread; it waits for disks and other processes.
    ///
    /// # Errors
    /// The library's error.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, LibraryError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run_in(&self.work.short, work).await
    }

    /// Runs long work on the library on a blocking thread.
    ///
    /// # Errors
    /// The library's error.
    pub async fn run_long<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, LibraryError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run_in(&self.work.long, work).await
    }

    async fn run_in<T: Send + 'static>(
        &self,
        permits: &Arc<Semaphore>,
        work: impl FnOnce(&Self) -> Result<T, LibraryError> + Send + 'static,
    ) -> Result<T, ApiError> {
        // The semaphore is never closed. Work that has begun keeps its permit when the client leaves.
        let permit = permits.clone().acquire_owned().await;
        let service = self.clone();
        let work = move || {
            let _permit = permit;
            work(&service)
        };
        let done = spawn_blocking(work).await;
        done.map_err(|error| ApiError::Internal(format!("the library's work ended: {error}")))?
            .map_err(ApiError::from)
    }

    /// Imports a model from outside of the library: the embedded model is copied, a file stays at its place.
    ///
    /// # Errors
    /// The library's error.
    pub fn import(
        &self,
        outside: &Outside,
        name: &ModelName,
        defaults: Map<String, Value>,
    ) -> Result<ModelRecord, LibraryError> {
        match outside {
            Outside::Program { file, bytes } => {
                let digest = Digest::of(bytes);
                self.library.put_blob(*bytes, digest)?;
                let files = [((*file).to_owned(), digest)];
                self.library.create_from_blobs(name, &files, defaults, &self.inspect)
            }
            Outside::Disk(path) => {
                let options =
                    ImportOptions { name: Some(name.clone()), replace: true, ..ImportOptions::default() };
                self.library.import(path, &options, &self.inspect, &|_| {})?;
                self.library.set_defaults(&name.to_string(), defaults)
            }
        }
    }
}

impl From<LibraryError> for ApiError {
    fn from(error: LibraryError) -> Self {
        use LibraryError as E;
        let message = error.to_string();
        match error {
            E::NotFound { name, .. } => Self::ModelNotFound(name),
            E::NoBlob(_) => Self::NotFound(message),
            E::BadDigest { .. } | E::DigestMismatch { .. } => Self::invalid("digest", message),
            E::Ambiguous { .. }
            | E::BadName { .. }
            | E::NameTaken { .. }
            | E::BadReference { .. }
            | E::NotAModel { .. }
            | E::Inspect { .. }
            | E::CannotRun { .. }
            | E::Choice { .. }
            | E::UnsafeFile { .. }
            | E::NotOnHub { .. }
            | E::Unauthorized { .. } => Self::invalid("model", message),
            E::DiskFull { .. } => Self::InsufficientMemory(message),
            E::Busy
            | E::ReadOnly { .. }
            | E::Status { .. }
            | E::Connection { .. }
            | E::Unreachable { .. }
            | E::BadAnswer { .. }
            | E::Checksum { .. } => Self::Unavailable(message),
            _ => Self::Internal(message),
        }
    }
}
