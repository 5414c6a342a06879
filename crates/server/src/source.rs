//! Where models come from. The server names no device and no file: whoever starts it brings these.

use std::{fmt::Debug, path::PathBuf, sync::Arc};

use paguro_engine::Engine;
use paguro_model::{Model, ModelFile};
use serde_json::{Map, Value};

/// All models that can be asked for by name, and the way to run them.
pub trait ModelSource: Debug + Send + Sync + 'static {
    /// All models, in the order in which they are to be shown. May block.
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

    /// Opens a model and starts an engine on it. Blocks, for as long as that takes.
    ///
    /// # Errors
    /// What is wrong with the model, or the device.
    fn load(&self, entry: &ModelEntry) -> Result<Loaded, LoadError>;

    /// Where a model lies that is not the library's; `None` for those that are, and for names that nobody has.
    fn outside(&self, name: &str) -> Option<Outside>;
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
    /// Bytes that it takes: weights and pages.
    pub bytes: u64,
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
    /// It does not fit.
    #[error("{0}")]
    TooLarge(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}
