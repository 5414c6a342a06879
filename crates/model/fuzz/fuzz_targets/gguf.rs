//! Any bytes as a GGUF file: opened, listed, its tokenizer made, lowered.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use paguro_model::{LoadOptions, ModelFile};

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = ModelFile::from_bytes("fuzz", Arc::new(bytes.to_vec())) else { return };
    let listed = file.metadata().len() + file.tensors().len() + file.description().quantization.len();
    std::hint::black_box(listed);
    if let Ok(model) = file.load(&LoadOptions { max_context: Some(64) }) {
        // A lowered model must be a program that backends can index without checks.
        model.program.check(&model.weights).expect("a lowered program is a valid program");
    }
});
