//! Why a model cannot be opened.

use std::path::PathBuf;

use crate::{
    chat::TemplateError,
    gguf::{GgufError, MetadataError},
    tokenizer::TokenizerError,
};

/// Why a model cannot be opened. The messages are for people: they name what is wrong, and what would work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The GGUF file cannot be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file or folder cannot be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A path at which no model lies.
    #[error("no model at `{}`: {problem}", path.display())]
    NotAModel {
        /// The path.
        path: PathBuf,
        /// What is there instead, and what to do.
        problem: String,
    },
    /// A file of a Hugging Face folder that is damaged or not what its name says.
    #[error("`{}`: {problem}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The metadata lacks something that the architecture needs.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A kind of model that Paguro does not know.
    #[error("architecture `{name}` is not supported (supported: {supported})")]
    Architecture {
        /// What the file says.
        name: String,
        /// What would work.
        supported: String,
    },
    /// A known kind of model with a feature that Paguro lacks.
    #[error("{what} is not supported{instead}")]
    Unsupported {
        /// The feature, by the name that the file gives it.
        what: String,
        /// What would work; empty, or begins with a separator.
        instead: String,
    },
    /// Hyperparameters that are missing or contradict each other.
    #[error("the model's configuration is not usable: {0}")]
    Config(String),
    /// A tensor that the architecture needs is not in the file.
    #[error("tensor `{tensor}` is missing (a {architecture} model has it with shape {shape:?})")]
    MissingTensor {
        /// Its name.
        tensor: String,
        /// The architecture that needs it.
        architecture: &'static str,
        /// The shape it should have, outermost dimension first.
        shape: Vec<usize>,
    },
    /// A tensor with another shape than the hyperparameters imply.
    #[error("tensor `{tensor}` has shape {found:?}, expected {expected:?}")]
    Shape {
        /// Its name.
        tensor: String,
        /// Its shape, outermost dimension first.
        found: Vec<usize>,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// A tensor of a type that Paguro does not compute with.
    #[error("tensor `{tensor}` has type {dtype}, which is not supported (supported: {supported})")]
    TensorType {
        /// Its name.
        tensor: String,
        /// Its type, by the name that its format gives it.
        dtype: String,
        /// What would work.
        supported: String,
    },
    /// A tensor that cannot be read from its file, or a file that changed meanwhile.
    #[error("tensor `{tensor}` cannot be read: {problem}")]
    Unreadable {
        /// Its name.
        tensor: String,
        /// The error, and the file that it is about.
        problem: String,
    },
    /// A tensor with infinite values, or values that are no numbers.
    #[error("tensor `{tensor}` does not fit the model: value {index} is not finite; the file is damaged")]
    NotFinite {
        /// Its name.
        tensor: String,
        /// The first such value.
        index: usize,
    },
    /// Tensors that the architecture does not have: ignoring them would give wrong answers.
    #[error("{count} tensors do not belong to a {architecture} model as Paguro knows it: {names}")]
    UnknownTensors {
        /// How many.
        count: usize,
        /// The architecture.
        architecture: &'static str,
        /// The first of them.
        names: String,
    },
    /// A chat template exceeds a bound.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer cannot be built.
    #[error("the model's tokenizer is not usable: {0}")]
    Tokenizer(#[from] TokenizerError),
}

impl ModelError {
    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), instead: String::new() }
    }

    pub(crate) fn unsupported_but(what: impl Into<String>, supported: &str) -> Self {
        Self::Unsupported { what: what.into(), instead: format!(" (supported: {supported})") }
    }
}
