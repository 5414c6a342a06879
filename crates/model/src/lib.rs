//! Model files, tokenizers and chat templates; lowering of models to programs.
//!
//! [`ModelFile`] is a file or folder that was opened and checked but not interpreted. [`Model`] is the interpreted
//! form: a program with weights, a tokenizer, a chat template. The crate names no device.

mod arch;
/// Hash of the sources of this crate, its compiler and its options. Programs and weights depend on them.
pub const SOURCES: &str = env!("PAGURO_SOURCES");

pub mod chat;
mod error;
mod export;
mod file;
pub mod gguf;
mod hf;
mod judge;
mod load;
mod pooling;
mod prompts;
mod ranker;
mod rearrange;
mod rope;
pub mod tensor;
mod text_head;
mod token_heads;
pub mod tokenizer;

pub use error::ModelError;
pub use judge::Judge;
pub use load::{
    Conversion, Description, GenerationDefaults, LoadOptions, MetadataEntry, Model, ModelFile, ModelShape,
};
pub use pooling::{Pooling, PoolingError};
pub use prompts::{Prompts, TextRole};
pub use ranker::Ranker;
pub use text_head::{Classifier, DenseLayer, TextHead};
pub use token_heads::{MultiVectorHead, SparseHead};
