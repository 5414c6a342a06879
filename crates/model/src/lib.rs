//! Model files, tokenizers and chat templates; lowering a model to a Program.

pub mod chat;
pub mod gguf;
mod mapped;
pub mod tensor;
pub mod tokenizer;
