//! Model files, tokenizers and chat templates; lowering a model to a Program.
//!
//! [`ModelFile`] is a file or folder that has been opened and checked but not understood; [`Model`] is what becomes of
//! it: a program with weights, a tokenizer, a chat template. Nothing here knows a device.

mod arch;
pub mod chat;
mod error;
mod file;
pub mod gguf;
mod hf;
mod load;
mod pooling;
mod rearrange;
mod rope;
pub mod tensor;
pub mod tokenizer;

pub use error::ModelError;
pub use load::{
    Conversion, Description, GenerationDefaults, LoadOptions, MetadataEntry, Model, ModelFile, ModelShape,
};
pub use pooling::{Pooling, PoolingError};
