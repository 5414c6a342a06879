//! The model library, for the paths that change it. What is in it is served through [`crate::source`].

use std::{error::Error, path::Path, sync::Arc};

use paguro_registry::{Details, Registry, RegistryError, hub::Hub};
use tokio::task::spawn_blocking;

use crate::error::ApiError;

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
            | E::Choice { .. }
            | E::UnsafeFile { .. }
            | E::NotOnHub { .. }
            | E::Unauthorized { .. } => Self::invalid("model", message),
            E::DiskFull { .. } => Self::InsufficientMemory(message),
            E::Busy | E::Status { .. } | E::Connection { .. } | E::BadAnswer { .. } | E::Checksum { .. } => {
                Self::Unavailable(message)
            }
            _ => Self::Internal(message),
        }
    }
}
