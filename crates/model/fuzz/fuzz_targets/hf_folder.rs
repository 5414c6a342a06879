//! Any bytes as a Hugging Face folder: `config.json`, a zero byte, then `model.safetensors`, or `pytorch_model.bin` if the
//! rest begins like a zip archive.

#![no_main]

use std::{fs, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use paguro_model::{LoadOptions, ModelFile};
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = r#"{"version": "1.0", "decoder": {"type": "Fuse"}, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
    fs::write(folder.path().join("tokenizer.json"), tokenizer).expect("writing");
    folder
});

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(2, |&byte| byte == 0);
    let (config, weights) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    fs::write(FOLDER.path().join("config.json"), config).expect("writing");
    let (name, other) = match weights.starts_with(b"PK") {
        true => ("pytorch_model.bin", "model.safetensors"),
        false => ("model.safetensors", "pytorch_model.bin"),
    };
    let _ = fs::remove_file(FOLDER.path().join(other));
    fs::write(FOLDER.path().join(name), weights).expect("writing");
    let Ok(file) = ModelFile::open(FOLDER.path()) else { return };
    let listed = file.metadata().len() + file.tensors().len() + file.description().quantization.len();
    std::hint::black_box(listed);
    if let Ok(model) = file.load(&LoadOptions { max_context: Some(64) }) {
        model.program.check(&model.weights).expect("a lowered program is a valid program");
    }
});
