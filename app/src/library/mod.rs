//! The model library on the command line.

mod change;
mod get;
mod preset;
mod progress;
mod search;
mod show;
mod verify;

use std::{
    error::Error,
    path::Path,
    sync::LazyLock,
    time::{Duration, UNIX_EPOCH},
};

use paguro_model::{LoadOptions, ModelError, ModelFile};
use paguro_registry::{
    Details, ModelName, Registry, RegistryError,
    hub::{Hub, HubOptions},
};

pub use change::{cp, prune, rm};
pub use get::{download, import, pull};
pub use preset::preset;
pub use search::search;
pub use show::{list, show};
pub use verify::{rebuild, verify};

use crate::{
    failure::{Failure, Outcome},
    models::{EMBEDDED, is_embedded},
    settings::LibrarySettings,
};

/// Time without an answer after which a search fails.
const SHORT_SILENCE: Duration = Duration::from_secs(8);

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
        self.hub_with(HubOptions::default())
    }

    /// The same for a person who waits for a short answer: nothing is tried twice.
    ///
    /// # Errors
    /// As for [`Self::hub`].
    pub fn impatient_hub(&self) -> Outcome<Hub> {
        self.hub_with(HubOptions { retries: 0, silence: SHORT_SILENCE, ..HubOptions::default() })
    }

    fn hub_with(&self, defaults: HubOptions) -> Outcome<Hub> {
        let options = HubOptions {
            endpoint: self.hf_endpoint.clone().unwrap_or(defaults.endpoint),
            token: self.hf_token.clone(),
            ..defaults
        };
        Hub::new(options).map_err(failure)
    }
}

/// The context that a model must be able to run with: what `run` and `serve` give it unless told otherwise.
const DEFAULT_CONTEXT: usize = 8192;

/// Names this build of the program: another one may be able to run other models.
pub static VERSION: LazyLock<String> = LazyLock::new(|| {
    let built = || {
        let modified = std::env::current_exe().ok()?.metadata().ok()?.modified().ok()?;
        modified.duration_since(UNIX_EPOCH).ok()
    };
    format!("{} {}", env!("CARGO_PKG_VERSION"), built().map_or(0, |since| since.as_secs()))
});

/// Opens a model to learn what the library records of it; the library itself does not look into files.
pub fn inspect(path: &Path) -> Result<Details, Box<dyn Error + Send + Sync>> {
    inspect_with_chat(path).map(|(details, _)| details)
}

/// [`inspect`], and the reason why the model's chat template is of no use, if it has one and it fails.
fn inspect_with_chat(path: &Path) -> Result<(Details, Option<String>), Box<dyn Error + Send + Sync>> {
    let file = ModelFile::open(path)?;
    file.check_templates()?;
    let description = file.description();
    // Everything but reading the weights: the architecture, the tensors and their formats, the tokenizer.
    let (problem, chat_problem) = match file.load(&LoadOptions { max_context: Some(DEFAULT_CONTEXT) }) {
        Ok(model) => (None, model.chat_problem()),
        // Not the model's fault, and perhaps over the next time.
        Err(error @ ModelError::Io { .. }) => return Err(error.into()),
        Err(error) => (Some(error.to_string()), None),
    };
    let details = Details {
        architecture: file.architecture().map(str::to_owned),
        parameters: description.parameters,
        quantization: description.quantization,
        problem,
        inspected_by: VERSION.clone(),
    };
    Ok((details, chat_problem))
}

/// The library's errors as the program's: what was asked for cannot be, or could not be done.
pub fn failure(error: RegistryError) -> Failure {
    use RegistryError as E;
    match error {
        E::Unreachable { .. } => Failure::new(error)
            .hint("is this machine online? HTTPS_PROXY (a proxy) and HF_ENDPOINT (another hub) are honoured"),
        E::CannotRun { .. } => Failure::new(error).hint("--force takes it into the library all the same"),
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

/// The error about a name that no model of the library has: the library is empty.
fn empty(name: &str) -> Failure {
    or_embedded(Failure::usage(format!("there is no model `{name}`: the library is empty")), name)
}

/// The library's error about a model of this name.
fn failure_of(name: &str, error: RegistryError) -> Failure {
    or_embedded(failure(error), name)
}

/// Adds a hint where the name is that of the model in the binary, which is not in the library.
fn or_embedded(failure: Failure, name: &str) -> Failure {
    if !is_embedded(name) {
        return failure;
    }
    failure.hint(format!(
        "`{EMBEDDED}` is the model inside this binary and not in the library: `paguro inspect {EMBEDDED}` shows it, `paguro run {EMBEDDED}` runs it"
    ))
}

/// Refuses a name that could never be reached.
fn usable(name: &ModelName) -> Outcome<()> {
    if is_embedded(&name.short()) {
        return Err(Failure::usage(format!("`{EMBEDDED}` is the model inside this binary"))
            .hint("give another name with --name"));
    }
    Ok(())
}
