//! The readers of model files, tokenizers and chat templates. All in one program: linking costs more than most of these tests.

mod adapters;
mod architectures;
mod chat_prompt;
mod convert;
mod gguf;
mod hf;
mod hf_config;
mod hostile_templates;
mod hostile_tokenizers;
mod mutations;
mod projectors;
mod quantized;
mod refusals;
mod shared;
mod tales;
mod templates;
mod tiny;
mod tokenizer;
mod tokenizer_export;
mod tokenizer_hf;
mod vocabs;
mod weights;
