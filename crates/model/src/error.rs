//! Errors of opening a model.

use std::path::PathBuf;

use crate::{
    chat::TemplateError,
    gguf::{GgufError, MetadataError},
    tokenizer::TokenizerError,
};

/// Reason for which a model cannot be opened. The messages name the problem and a solution.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The GGUF file cannot be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file or folder cannot be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The path is not a model.
    #[error("no model at `{}`: {problem}", path.display())]
    NotAModel {
        /// The path.
        path: PathBuf,
        /// Description of the path, and a hint.
        problem: String,
    },
    /// A file of a Hugging Face folder is damaged or malformed.
    #[error("`{}`: {problem}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The metadata lacks something that the architecture needs.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The architecture is not supported.
    #[error("architecture `{name}` is not supported (supported: {supported})")]
    Architecture {
        /// Name of the architecture in the file.
        name: String,
        /// Supported alternatives.
        supported: String,
    },
    /// A known kind of model with a feature that Paguro lacks.
    #[error("{what} is not supported{instead}")]
    Unsupported {
        /// Name of the feature in the file.
        what: String,
        /// Supported alternatives; empty, or begins with a separator.
        instead: String,
    },
    /// An assistant that is no model by itself.
    #[error("`{0}` is an assistant: it drafts for its model, and writes no text by itself")]
    AssistantAlone(String),
    /// An assistant of another model.
    #[error("the assistant `{assistant}` does not fit the model `{model}`: {problem}")]
    Assistant {
        /// Name of the assistant.
        assistant: String,
        /// Name of the model.
        model: String,
        /// The difference.
        problem: String,
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
        /// Name of the type in its format.
        dtype: String,
        /// Supported alternatives.
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
    /// Tensors that the architecture does not define: ignoring them would give wrong answers.
    #[error("{count} tensors do not belong to a {architecture} model as Paguro knows it: {names}")]
    UnknownTensors {
        /// Number of tensors.
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
