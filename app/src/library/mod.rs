//! The model library on the command line.

mod change;
mod get;
mod import;
mod ollama;
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

use paguro_library::{
    AdapterDetails, Details, Library, LibraryError, ModelName, ModelRecord,
    found::Program,
    hub::{Hub, HubOptions},
};
use paguro_model::{AdapterFile, LoadOptions, ModelError, ModelFile};

pub use change::{cp, prune, rm};
pub use get::{download, pull};
pub use import::import;
pub use preset::preset;
pub use search::search;
pub use show::{list, show};
pub use verify::{rebuild, verify};

use crate::{
    failure::{Failure, Outcome},
    load,
    models::{EMBEDDED, is_embedded},
    settings::LibrarySettings,
};

/// Time without an answer after which a search fails.
const SHORT_TIMEOUT: Duration = Duration::from_secs(8);

impl LibrarySettings {
    /// Opens the library, and creates it if necessary.
    ///
    /// # Errors
    /// There is no folder for it, or it cannot be opened.
    pub fn open(&self) -> Outcome<Library> {
        Library::open(self.root()?).map_err(failure)
    }

    /// Opens the library if it exists.
    ///
    /// # Errors
    /// The library cannot be opened.
    pub fn open_existing(&self) -> Outcome<Option<Library>> {
        match &self.root {
            Some(root) => Library::open_existing(root).map_err(failure),
            None => Ok(None),
        }
    }

    fn root(&self) -> Outcome<&Path> {
        let problem = "there is no place for a model library: neither PAGURO_HOME nor HOME is set";
        self.root.as_deref().ok_or_else(|| Failure::new(problem))
    }

    /// Returns the hub.
    ///
    /// # Errors
    /// The endpoint is invalid.
    pub fn hub(&self) -> Outcome<Hub> {
        self.hub_with(HubOptions::default())
    }

    /// Returns a hub for interactive requests, without retries.
    ///
    /// # Errors
    /// As for [`Self::hub`].
    pub fn impatient_hub(&self) -> Outcome<Hub> {
        self.hub_with(HubOptions { retries: 0, read_timeout: SHORT_TIMEOUT, ..HubOptions::default() })
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

/// Identity of this build. Another build may support other models.
pub static VERSION: LazyLock<String> = LazyLock::new(|| {
    let built = || {
        let modified = std::env::current_exe().ok()?.metadata().ok()?.modified().ok()?;
        modified.duration_since(UNIX_EPOCH).ok()
    };
    format!("{} {}", env!("CARGO_PKG_VERSION"), built().map_or(0, |since| since.as_secs()))
});

/// Opens a model and returns the properties that the library records.
pub fn inspect(path: &Path) -> Result<Details, Box<dyn Error + Send + Sync>> {
    inspect_with_chat(path).map(|(details, _)| details)
}

/// Chat template of an inspected model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Chat {
    /// The file has none, or cannot run.
    #[default]
    None,
    /// The model is an assistant, which drafts for its model.
    Assistant,
    /// The model is an encoder, which computes vectors, or scores if `true`.
    Encoder(bool),
    /// It compiles.
    Works,
    /// It fails with this error.
    Broken(String),
}

/// Returns [`inspect`]'s result, and the state of the model's chat template.
fn inspect_with_chat(path: &Path) -> Result<(Details, Chat), Box<dyn Error + Send + Sync>> {
    if AdapterFile::is_at(path) {
        return Ok((inspect_adapter(path)?, Chat::None));
    }
    let file = ModelFile::open(path)?;
    file.check_templates()?;
    let description = file.description();
    // As `run` and `serve` would load it.
    let max_context = Some(load::default_context(&file));
    // Everything except the weights is read: architecture, tensors and their formats, tokenizer.
    let of_encoder = || Chat::Encoder(matches!(file.has_scores(), Ok(true)));
    let (problem, chat) = match file.load(&LoadOptions { max_context }) {
        Err(ModelError::AssistantAlone(_)) => (None, Chat::Assistant),
        Ok(model) => {
            let chat = match (model.chat_problem(), &model.chat_template) {
                _ if model.is_encoder() => of_encoder(),
                (Some(problem), _) => Chat::Broken(problem),
                (None, Some(_)) => Chat::Works,
                (None, None) => Chat::None,
            };
            (None, chat)
        }
        // An I/O error may be transient.
        Err(error @ ModelError::Io { .. }) => return Err(error.into()),
        Err(error) => (Some(error.to_string()), Chat::None),
    };
    let details = Details {
        architecture: file.architecture().map(str::to_owned),
        parameters: description.parameters,
        quantization: description.quantization,
        adapter: None,
        problem,
        inspected_by: VERSION.clone(),
    };
    Ok((details, chat))
}

/// Opens an adapter and returns the properties that the library records.
fn inspect_adapter(path: &Path) -> Result<Details, Box<dyn Error + Send + Sync>> {
    let inspected_by = VERSION.clone();
    match AdapterFile::open(path) {
        Ok(file) => {
            let trained_for = file.base().map(str::to_owned);
            Ok(Details {
                architecture: None,
                parameters: file.parameters(),
                quantization: file.weight_format().to_owned(),
                adapter: Some(AdapterDetails { trained_for, rank: file.rank() }),
                problem: None,
                inspected_by,
            })
        }
        Err(error @ ModelError::Io { .. }) => Err(error.into()),
        Err(error) => {
            let (adapter, problem) = (Some(AdapterDetails::default()), Some(error.to_string()));
            Ok(Details { adapter, problem, inspected_by, ..Details::default() })
        }
    }
}

/// Converts an error of the library to a failure.
pub fn failure(error: LibraryError) -> Failure {
    use LibraryError as E;
    match error {
        E::Unreachable { .. } => Failure::new(error)
            .hint("is this machine online? HTTPS_PROXY (a proxy) and HF_ENDPOINT (another hub) are honoured"),
        E::CannotRun { .. } => Failure::new(error)
            .hint("`paguro search` lists other models; --force imports this one anyway, for a later version"),
        E::Cancelled => Failure::interrupted(),
        E::NotFound { .. }
        | E::Ambiguous { .. }
        | E::BadName { .. }
        | E::BadReference { .. }
        | E::NameTaken { .. }
        | E::Choice { .. }
        | E::NotFoundThere { .. }
        | E::BadEndpoint { .. } => Failure::usage(error),
        // Messages that include their causes.
        _ => Failure::new(error),
    }
}

/// Returns the error for a program without models on this machine.
fn empty_store(program: Program, problems: &[String]) -> Failure {
    if !problems.is_empty() {
        return Failure::new(problems.join("; "))
            .hint(format!("your user needs the permission to read the models of {program}"));
    }
    let failure = Failure::usage(format!("{program} has no models on this machine"));
    match program {
        Program::Ollama => {
            failure.hint("OLLAMA_MODELS is the folder of its models, if it is not the usual one")
        }
        Program::LmStudio => failure.hint("to import another folder of models: paguro import FOLDER"),
        Program::HfCache | Program::Folder => {
            failure.hint("HF_HOME is the folder with `hub`, if it is not the usual one")
        }
    }
}

/// Returns the error for an unknown name in an empty library.
fn empty(name: &str) -> Failure {
    or_embedded(Failure::usage(format!("there is no model `{name}`: the library is empty")), name)
}

/// Converts the library's error about a model of this name.
fn failure_of(name: &str, error: LibraryError) -> Failure {
    or_embedded(failure(error), name)
}

/// Adds a hint if the name is that of the embedded model, which is not in the library.
fn or_embedded(failure: Failure, name: &str) -> Failure {
    if !is_embedded(name) {
        return failure;
    }
    failure.hint(format!(
        "`{EMBEDDED}` is the model inside this binary and not in the library: `paguro inspect {EMBEDDED}` shows it, `paguro run {EMBEDDED}` runs it"
    ))
}

/// Returns the library's model of this name. The name of the embedded model stands for no other one.
fn find(library: &Library, name: &str) -> Outcome<ModelRecord> {
    match library.find(name) {
        Ok(record) if is_embedded(name) == is_embedded(&record.name.short()) => Ok(record),
        Ok(_) | Err(LibraryError::Ambiguous { .. }) if is_embedded(name) => {
            Err(or_embedded(Failure::usage(format!("there is no model `{name}` in the library")), name))
        }
        Ok(record) => Ok(record),
        Err(error) => Err(failure_of(name, error)),
    }
}

/// Refuses the name of the embedded model, which would hide a model of the library.
fn usable(name: &ModelName) -> Outcome<()> {
    if is_embedded(&name.short()) {
        return Err(Failure::usage(format!("`{EMBEDDED}` is the model inside this binary"))
            .hint("choose another name"));
    }
    Ok(())
}
