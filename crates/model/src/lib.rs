//! Model files, tokenizers and chat templates; lowering of models to programs.
//!
//! [`ModelFile`] is a file or folder that was opened and checked but not interpreted. [`Model`] is the interpreted
//! form: a program with weights, a tokenizer, a chat template. The crate names no device.

mod adapter;
mod arch;
pub mod chat;
mod error;
mod export;
mod file;
pub mod gguf;
mod hf;
mod judge;
mod load;
mod parallel;
mod pooling;
mod prompts;
mod ranker;
mod rearrange;
mod rope;
mod sampling;
pub mod tensor;
mod text_head;
mod token_heads;
pub mod tokenizer;
mod vision;

pub use adapter::AdapterFile;
pub use arch::{MtpHead, is_assistant};
pub use error::ModelError;
pub use judge::Judge;
pub use load::{
    Conversion, Description, GenerationDefaults, LoadOptions, MetadataEntry, Model, ModelFile, ModelShape,
};
pub use parallel::{map_texts, most_text_threads};
pub use pooling::{Pooling, PoolingError};
pub use prompts::{Prompts, TextRole};
pub use ranker::Ranker;
pub use sampling::SamplingOverrides;
pub use text_head::{Classifier, DenseLayer, TextHead};
pub use token_heads::{MultiVectorHead, SparseHead};
pub use vision::{Tower, TowerInput, Vision};

/// Version of the weights that are made of a file. Pages on disk depend on it beside the file and the [digest of the
/// program](paguro_backend::Program::digest), so it changes when the same file and program get other weights.
/// `tests/it/weights.rs` fails if they change and it does not.
pub const WEIGHTS: u32 = 1;
