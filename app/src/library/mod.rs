//! The model library on the command line.

mod change;
mod get;
mod progress;
mod show;

use std::{error::Error, path::Path};

use paguro_model::ModelFile;
use paguro_registry::{
    Details, ModelName, Registry, RegistryError,
    hub::{Hub, HubOptions},
};

pub use change::{cp, prune, rm};
pub use get::{import, pull};
pub use show::{list, show};

use crate::{
    failure::{Failure, Outcome},
    models::EMBEDDED,
    settings::LibrarySettings,
};

impl LibrarySettings {
    /// The library, made if there is none.
    ///
    /// # Errors
    /// No place for it; a library that cannot be opened.
    pub fn open(&self) -> Outcome<Registry> {
        Registry::open(self.root()?).map_err(failure)
    }

    /// The library, if there is one: looking for a model makes none.
    ///
    /// # Errors
    /// A library that cannot be opened.
    pub fn open_existing(&self) -> Outcome<Option<Registry>> {
        match &self.root {
            Some(root) => Registry::open_existing(root).map_err(failure),
            None => Ok(None),
        }
    }

    fn root(&self) -> Outcome<&Path> {
        let problem = "there is no place for a model library: neither PAGURO_HOME nor HOME is set";
        self.root.as_deref().ok_or_else(|| Failure::new(problem))
    }

    /// Where models are pulled from.
    ///
    /// # Errors
    /// An endpoint that is none.
    pub fn hub(&self) -> Outcome<Hub> {
        let defaults = HubOptions::default();
        let options = HubOptions {
            endpoint: self.hf_endpoint.clone().unwrap_or(defaults.endpoint),
            token: self.hf_token.clone(),
            ..defaults
        };
        Hub::new(options).map_err(failure)
    }
}

/// What the library wants to know about a model; the library itself does not look into files.
pub fn inspect(path: &Path) -> Result<Details, Box<dyn Error + Send + Sync>> {
    let file = ModelFile::open(path)?;
    file.check_templates()?;
    let description = file.description();
    Ok(Details {
        architecture: file.architecture().map(str::to_owned),
        parameters: description.parameters,
        quantization: description.quantization,
    })
}

/// The library's errors as the program's: what was asked for cannot be, or could not be done.
pub fn failure(error: RegistryError) -> Failure {
    use RegistryError as E;
    match error {
        E::Cancelled => Failure::interrupted(),
        E::NotFound { .. }
        | E::Ambiguous { .. }
        | E::BadName { .. }
        | E::BadReference { .. }
        | E::NameTaken { .. }
        | E::Choice { .. }
        | E::BadEndpoint { .. } => Failure::usage(error),
        // Their messages have the causes already.
        _ => Failure::new(error),
    }
}

/// Refuses a name that could never be reached.
fn usable(name: &ModelName) -> Outcome<()> {
    if name.short().eq_ignore_ascii_case(EMBEDDED) {
        return Err(Failure::usage(format!("`{EMBEDDED}` is the model inside this binary"))
            .hint("give another name with --name"));
    }
    Ok(())
}
