//! Changes of the model library. [`crate::source`] serves its content.

use std::{error::Error, path::Path, sync::Arc};

use paguro_registry::{
    Cancel, Details, Digest, ImportOptions, ModelName, ModelRecord, Registry, RegistryError, hub::Hub,
};
use serde_json::{Map, Value};
use tokio::{sync::Semaphore, task::spawn_blocking};

use crate::{error::ApiError, source::Outside};

/// The model library and the source of its downloads.
#[derive(Clone, Debug)]
pub struct Library {
    /// The library.
    pub registry: Arc<Registry>,
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
    short: Semaphore,
    /// Permits for work that waits for a network or copies gigabytes.
    long: Semaphore,
}

impl Library {
    /// Creates a library whose models come from `hub`.
    pub fn new(
        registry: Arc<Registry>,
        hub: Arc<Hub>,
        inspect: fn(&Path) -> Result<Details, Box<dyn Error + Send + Sync>>,
    ) -> Self {
        let work = Work { short: Semaphore::new(8), long: Semaphore::new(16) };
        Self { registry, hub, inspect, work: Arc::new(work) }
    }

    /// Runs short work on the library on a blocking thread; it waits for disks and other processes.
    ///
    /// # Errors
    /// The library's error.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, RegistryError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run_in(&self.work.short, work).await
    }

    /// Runs long work on the library on a blocking thread.
    ///
    /// # Errors
    /// The library's error.
    pub async fn run_long<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, RegistryError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run_in(&self.work.long, work).await
    }

    async fn run_in<T: Send + 'static>(
        &self,
        turns: &Semaphore,
        work: impl FnOnce(&Self) -> Result<T, RegistryError> + Send + 'static,
    ) -> Result<T, ApiError> {
        // The semaphore is never closed.
        let _turn = turns.acquire().await;
        let library = self.clone();
        let done = spawn_blocking(move || work(&library)).await;
        done.map_err(|error| ApiError::Internal(format!("the library's work ended: {error}")))?
            .map_err(ApiError::from)
    }

    /// Imports a model from outside of the library: the embedded model is copied, a file stays at its place.
    ///
    /// # Errors
    /// The library's error.
    pub fn take_in(
        &self,
        outside: &Outside,
        name: &ModelName,
        parameters: Map<String, Value>,
    ) -> Result<ModelRecord, RegistryError> {
        match outside {
            Outside::Program { file, bytes } => {
                let digest = Digest::of(bytes);
                self.registry.put_blob(*bytes, digest)?;
                let files = [((*file).to_owned(), digest)];
                self.registry.create_from_blobs(name, &files, parameters, &self.inspect)
            }
            Outside::Disk(path) => {
                let options =
                    ImportOptions { name: Some(name.clone()), replace: true, ..ImportOptions::default() };
                self.registry.import(path, &options, &self.inspect, &|_| {})?;
                self.registry.set_parameters(&name.to_string(), parameters)
            }
        }
    }
}

impl From<RegistryError> for ApiError {
    fn from(error: RegistryError) -> Self {
        use RegistryError as E;
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
