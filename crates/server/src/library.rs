//! The model library, for the paths that change it. What is in it is served through [`crate::source`].

use std::{error::Error, path::Path, sync::Arc};

use paguro_registry::{
    Details, Digest, ImportOptions, ModelName, ModelRecord, Registry, RegistryError, hub::Hub,
};
use serde_json::{Map, Value};
use tokio::task::spawn_blocking;

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
}

impl Library {
    /// Does something with the library elsewhere: it waits for disks, networks and other processes.
    ///
    /// # Errors
    /// What the library says.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, RegistryError> + Send + 'static,
    ) -> Result<T, ApiError> {
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
