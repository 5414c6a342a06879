//! Where models come from. The server names no device and no file: whoever starts it brings these.

use std::{fmt::Debug, path::PathBuf, sync::Arc};

use paguro_engine::{Engine, MemoryPlan};
use paguro_model::{Model, ModelFile};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// All models that can be asked for by name, and the way to run them.
pub trait ModelSource: Debug + Send + Sync + 'static {
    /// All models, in the order in which they are to be shown. A model that cannot be opened is one of them, with its
    /// [`Details::problem`]. May block.
    ///
    /// # Errors
    /// What is wrong with the library.
    fn list(&self) -> Result<Vec<ModelEntry>, LoadError>;

    /// The model that a name means. May block.
    ///
    /// # Errors
    /// [`LoadError::NotFound`], or what is wrong with the library.
    fn find(&self, name: &str) -> Result<ModelEntry, LoadError>;

    /// Opens a model's file, to see what it says of itself. May block.
    ///
    /// # Errors
    /// What is wrong with it.
    fn open(&self, entry: &ModelEntry) -> Result<ModelFile, LoadError>;

    /// Computes what loading a model would take, for sequences of at least `context` tokens where that is more than
    /// settings say. Reads headers only. May block.
    ///
    /// # Errors
    /// The fault of the model or the device.
    fn plan(&self, entry: &ModelEntry, context: Option<usize>) -> Result<LoadPlan, LoadError>;

    /// Opens a model and starts an engine on it. Blocks, for as long as that takes.
    ///
    /// # Errors
    /// What is wrong with the model, or the device.
    fn load(&self, entry: &ModelEntry, grant: Grant) -> Result<Loaded, LoadError>;

    /// Returns the defaults of a model, as far as they differ from the settings of all models. May block.
    ///
    /// # Errors
    /// [`LoadError::NotFound`], or the library's error.
    fn preset(&self, name: &str) -> Result<Presets, LoadError>;

    /// Replaces the defaults of a model that are kept in the library. May block.
    ///
    /// # Errors
    /// [`LoadError::Invalid`] for values that are refused, and for models that are not the library's.
    fn set_preset(&self, name: &str, preset: ModelPreset) -> Result<(), LoadError>;

    /// Forgets everything that was kept of a model's requests, because the model was removed. May block.
    fn forget(&self, name: &str) {
        let _ = name;
    }

    /// Where a model lies that is not the library's; `None` for those that are, and for names that nobody has.
    fn outside(&self, name: &str) -> Option<Outside>;
}

/// Defaults of one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelPreset {
    /// Most tokens of prompt and answer; 0 is what the model was trained for.
    pub context: Option<usize>,
    /// Encoding of K and V: `f16` or `q8`.
    pub kv_dtype: Option<String>,
    /// A chat template in place of the model's own, in jinja.
    pub chat_template: Option<String>,
    /// System message of chats that have none.
    pub system: Option<String>,
    /// Options of requests that do not set them, in the words of Ollama's API.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub options: Map<String, Value>,
}

/// Defaults of one model, by where they are kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Presets {
    /// Kept in the library, and can be changed; `None` for models that are not the library's.
    pub stored: Option<ModelPreset>,
    /// Of the file with the server's settings. These are stronger.
    pub settings: ModelPreset,
}

/// Where a model lies that is not the library's.
#[derive(Clone, Debug)]
pub enum Outside {
    /// In the program.
    Program {
        /// The name that its file would have.
        file: &'static str,
        /// What would be in it.
        bytes: &'static [u8],
    },
    /// In a file or folder that whoever started the server has named.
    Disk(PathBuf),
}

/// A model that can be loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelEntry {
    /// Its one name: two names of the same model (an alias, a short form) have the same entry.
    pub name: String,
    /// What distinguishes its content from what had this name before and may still be loaded: a digest.
    pub version: String,
    /// When it came here, in seconds since 1970.
    pub created: u64,
    /// Bytes of its weights, as far as is known before they are loaded.
    pub bytes: u64,
    /// What its requests begin with, as the library keeps it.
    pub parameters: Map<String, Value>,
    /// Chat template that it is loaded with in place of its own.
    pub chat_template: Option<Arc<str>>,
    /// Facts that are known without loading it.
    pub details: Details,
}

/// Facts about a model that is not loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// `gguf` or `safetensors`.
    pub format: &'static str,
    /// As its files name it: `llama`, `LlamaForCausalLM`.
    pub architecture: Option<String>,
    /// Number of weights.
    pub parameters: u64,
    /// How most of them are encoded: `Q4_K_M`.
    pub quantization: String,
    /// Most tokens of a prompt with its answer, as it would be loaded.
    pub context: Option<usize>,
    /// Sequences that it would run at the same time.
    pub sequences: usize,
    /// Bytes that loading it would take.
    pub plan: Option<LoadPlan>,
    /// Why it cannot be opened or run.
    pub problem: Option<String>,
}

/// Bytes that loading a model would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadPlan {
    /// Weights as the device holds them.
    pub weights: u64,
    /// Buffers between operations.
    pub buffers: u64,
    /// The least K and V: enough for a short conversation.
    pub kv_least: u64,
    /// K and V of one sequence of `context` tokens.
    pub kv_enough: u64,
    /// K and V as settings want them, for several sequences.
    pub kv_most: u64,
    /// Most tokens of a sequence, if K and V get enough.
    pub context: usize,
}

impl LoadPlan {
    /// Bytes with this much for K and V.
    pub fn with(&self, kv: u64) -> u64 {
        self.weights.saturating_add(self.buffers).saturating_add(kv)
    }
}

/// Memory and context that a load may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Bytes for K and V.
    pub kv: u64,
    /// Tokens of the longest sequence that is wanted.
    pub context: usize,
}

/// A model that runs.
#[derive(Debug)]
pub struct Loaded {
    /// The model.
    pub model: Arc<Model>,
    /// Its engine.
    pub engine: Engine,
    /// The device's name.
    pub device: String,
    /// Bytes that it takes.
    pub memory: MemoryPlan,
    /// Tokens in a page.
    pub block_size: usize,
}

/// Why a model is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Nothing has this name.
    #[error("there is no model `{0}`")]
    NotFound(String),
    /// A short form of several names.
    #[error("{0}")]
    Ambiguous(String),
    /// It is there and cannot be run, now or later.
    #[error("{0}")]
    Unsupported(String),
    /// A value that is refused.
    #[error("{0}")]
    Invalid(String),
    /// It does not fit.
    #[error("{0}")]
    TooLarge(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}
