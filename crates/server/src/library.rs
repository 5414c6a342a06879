//! The model library, for the paths that change it. What is in it is served through [`crate::source`].

use std::{error::Error, path::Path, sync::Arc};

use paguro_registry::{
    Cancel, Details, Digest, ImportOptions, ModelName, ModelRecord, Registry, RegistryError, hub::Hub,
};
use serde_json::{Map, Value};
use tokio::{sync::Semaphore, task::spawn_blocking};

use crate::{error::ApiError, source::Outside};

/// The model library, and where its models come from.
#[derive(Clone, Debug)]
pub struct Library {
    /// The library.
    pub registry: Arc<Registry>,
    /// Where models are pulled from.
    pub hub: Arc<Hub>,
    /// Opens a model, to learn what the library records of it.
    pub inspect: fn(&Path) -> Result<Details, Box<dyn Error + Send + Sync>>,
    work: Arc<Work>,
}

/// Cancels what is not awaited any more.
#[derive(Debug)]
pub struct CancelOnDrop(pub Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// How much is done with the library at a time. The threads on which it blocks are shared with all other requests.
#[derive(Debug)]
struct Work {
    /// Permits for work that ends soon.
    short: Semaphore,
    /// Permits for work that waits for a network or copies gigabytes.
    long: Semaphore,
}

impl Library {
    /// A library whose models come from `hub`.
    pub fn new(
        registry: Arc<Registry>,
        hub: Arc<Hub>,
        inspect: fn(&Path) -> Result<Details, Box<dyn Error + Send + Sync>>,
    ) -> Self {
        let work = Work { short: Semaphore::new(8), long: Semaphore::new(16) };
        Self { registry, hub, inspect, work: Arc::new(work) }
    }

    /// Does something with the library elsewhere that ends soon: it waits for disks and other processes.
    ///
    /// # Errors
    /// What the library says.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, RegistryError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run_in(&self.work.short, work).await
    }

    /// Does something with the library elsewhere that takes long.
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
        // Never closed.
        let _turn = turns.acquire().await;
        let library = self.clone();
        let done = spawn_blocking(move || work(&library)).await;
        done.map_err(|error| ApiError::Internal(format!("the library's work ended: {error}")))?
            .map_err(ApiError::from)
    }

    /// Takes in a model that lies outside: one in the program is copied, a file stays where it is.
    ///
    /// # Errors
    /// What the library says.
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
