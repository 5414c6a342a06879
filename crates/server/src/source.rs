//! The interface through which the application provides models. The server names no device and no file.

use std::{
    fmt::Debug,
    path::{Path, PathBuf},
    sync::Arc,
};

use paguro_engine::{Engine, MemoryPlan};
use paguro_model::{AdapterFile, LoadOptions, Model, ModelError, ModelFile};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

/// All models that requests can name, and the way to run them.
pub trait ModelSource: Debug + Send + Sync + 'static {
    /// Returns all models in order of display. A model that cannot be opened is listed with its [`Details::problem`].
    /// May block.
    ///
    /// # Errors
    /// The library cannot be read.
    fn list(&self) -> Result<Vec<ModelEntry>, LoadError>;

    /// Returns the model with this name. May block.
    ///
    /// # Errors
    /// [`LoadError::NotFound`], or the library cannot be read.
    fn find(&self, name: &str) -> Result<ModelEntry, LoadError>;

    /// Opens a model's file to read its header. May block.
    ///
    /// # Errors
    /// The file cannot be read.
    fn open(&self, entry: &ModelEntry) -> Result<ModelFile, LoadError>;

    /// Computes the memory of a load from the headers alone, for sequences of at least `context` tokens if that exceeds
    /// the settings. May block.
    ///
    /// # Errors
    /// The model or the device does not support the load.
    fn plan(&self, entry: &ModelEntry, context: Option<usize>) -> Result<LoadPlan, LoadError>;

    /// Opens a model and starts an engine. Blocks until the model is loaded.
    ///
    /// # Errors
    /// The model or the device does not support the load.
    fn load(&self, entry: &ModelEntry, grant: Grant) -> Result<Loaded, LoadError>;

    /// Checks that the adapter at `path` fits the model `base`. May block.
    ///
    /// # Errors
    /// It does not, with the names and shapes of both.
    fn check_adapter(&self, path: &Path, base: &str) -> Result<(), LoadError> {
        let unsupported = |error: ModelError| LoadError::Unsupported(error.to_string());
        let model = self.open(&self.find(base)?)?.load(&LoadOptions::default()).map_err(unsupported)?;
        AdapterFile::open(path).and_then(|file| file.fit(&model)).map(drop).map_err(unsupported)
    }

    /// Returns the defaults of a model that differ from the settings of all models. May block.
    ///
    /// # Errors
    /// [`LoadError::NotFound`], or the library's error.
    fn preset(&self, name: &str) -> Result<Presets, LoadError>;

    /// Replaces the defaults of a model that are kept in the library. May block.
    ///
    /// # Errors
    /// [`LoadError::Invalid`] for values that are refused, and for models that are not the library's.
    fn set_preset(&self, name: &str, preset: ModelPreset) -> Result<(), LoadError>;

    /// Deletes the cached data of a removed model's requests. May block.
    fn forget(&self, name: &str) {
        let _ = name;
    }

    /// Returns the place of a model outside of the library; `None` for models of the library and for unknown names.
    fn outside(&self, name: &str) -> Option<Outside>;
}

/// Defaults of one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelPreset {
    /// Maximum tokens of prompt and answer; 0 for the model's trained context.
    pub context: Option<usize>,
    /// Encoding of K and V: `f16`, `q8` or `q4`.
    pub kv_dtype: Option<String>,
    /// A chat template in place of the model's own, in jinja.
    pub chat_template: Option<String>,
    /// System message of chats that have none.
    pub system: Option<String>,
    /// Options of requests that do not set them, with the names of Ollama's API.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub options: Map<String, Value>,
}

/// Defaults of one model, by origin.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Presets {
    /// Stored in the library, and changeable; `None` for models outside of the library.
    pub stored: Option<ModelPreset>,
    /// From the settings file of the server. They take precedence.
    pub settings: ModelPreset,
}

/// Place of a model outside of the library.
#[derive(Clone, Debug)]
pub enum Outside {
    /// Embedded in the program.
    Program {
        /// File name of the model.
        file: &'static str,
        /// Content of the file.
        bytes: &'static [u8],
    },
    /// A file or folder that was given when the server was started.
    Disk(PathBuf),
}

/// A model that can be loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelEntry {
    /// Canonical name: two names of one model (an alias, a short form) have the same entry.
    pub name: String,
    /// Digest of the content. It distinguishes this model from an earlier one of the same name that may still be
    /// loaded.
    pub version: String,
    /// Time at which it was added, in seconds since 1970.
    pub created: u64,
    /// Bytes of its weights, as far as known before loading.
    pub bytes: u64,
    /// Defaults of its requests, in the format of the library.
    pub defaults: Map<String, Value>,
    /// Chat template that replaces its own.
    pub chat_template: Option<Arc<str>>,
    /// Properties that are known without loading it.
    pub details: Details,
    /// Place of an adapter, which changes another model; `None` for models.
    pub adapter: Option<AdapterPlace>,
}

/// Place of an adapter (LoRA).
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterPlace {
    /// Its name, also in entries of its aliases.
    pub name: String,
    /// Name of the model that it changes; empty if there is none, with the reason in [`Details::problem`].
    pub base: String,
    /// Its file or folder.
    pub path: PathBuf,
    /// Chat template that replaces its own.
    pub template: Option<Arc<str>>,
    /// True for an adapter of the library.
    pub in_library: bool,
}

impl ModelEntry {
    /// Returns the model's digest: its version, if that is a digest, otherwise a hash of name and version.
    pub fn digest(&self) -> String {
        if self.version.len() == 64 && self.version.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return self.version.clone();
        }
        let digest = Sha256::digest(format!("{} {}", self.name, self.version));
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Properties of a model that is not loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// `gguf` or `safetensors`.
    pub format: &'static str,
    /// Architecture as the file names it: `llama`, `LlamaForCausalLM`.
    pub architecture: Option<String>,
    /// Number of weights.
    pub parameters: u64,
    /// Encoding of most weights: `Q4_K_M`.
    pub quantization: String,
    /// Maximum tokens of prompt and answer, as it would be loaded.
    pub context: Option<usize>,
    /// Number of sequences that it would run concurrently.
    pub sequences: usize,
    /// Use of an encoder, which writes no text: `embedding` or `rerank`; `None` for models that write.
    pub encodes_for: Option<&'static str>,
    /// Kind of its vision tower, such as `qwen3vl_merger`; `None` if it reads text only.
    pub projector: Option<String>,
    /// Memory of a load.
    pub plan: Option<LoadPlan>,
    /// True if its files are outside of the library, and stay when it is deleted.
    pub in_place: bool,
    /// True if it came from a hub, and can be pulled again.
    pub pulled: bool,
    /// Reason for which it cannot be opened or run.
    pub problem: Option<String>,
}

/// Memory of a load, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadPlan {
    /// Weights as the device holds them.
    pub weights: u64,
    /// Buffers between operations.
    pub buffers: u64,
    /// Adapters (LoRA) of the settings, and those that requests have named.
    pub adapters: u64,
    /// Minimum K and V: enough for a short conversation.
    pub kv_least: u64,
    /// K and V of one sequence of `context` tokens.
    pub kv_enough: u64,
    /// K and V for several sequences, as set.
    pub kv_most: u64,
    /// Maximum tokens of a sequence with enough K and V.
    pub context: usize,
}

impl LoadPlan {
    /// Returns the total with `kv` bytes for K and V.
    pub fn with(&self, kv: u64) -> u64 {
        [self.buffers, self.adapters, kv].into_iter().fold(self.weights, u64::saturating_add)
    }
}

/// Memory and context that a load may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Bytes for K and V.
    pub kv: u64,
    /// Tokens of the longest requested sequence.
    pub context: usize,
}

/// A running model.
#[derive(Debug)]
pub struct Loaded {
    /// The model.
    pub model: Arc<Model>,
    /// Its engine.
    pub engine: Engine,
    /// The device's name.
    pub device: String,
    /// Memory of the load.
    pub memory: MemoryPlan,
    /// Tokens in a page.
    pub block_size: usize,
}

/// Reason for which a model is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No model has this name.
    #[error("there is no model `{0}`")]
    NotFound(String),
    /// A short form of several names.
    #[error("{0}")]
    Ambiguous(String),
    /// The model exists and is not supported.
    #[error("{0}")]
    Unsupported(String),
    /// An invalid value.
    #[error("{0}")]
    Invalid(String),
    /// The model does not fit into memory.
    #[error("{0}")]
    TooLarge(String),
    /// Any other error.
    #[error("{0}")]
    Failed(String),
}
