//! Any bytes as a Hugging Face folder: `config.json`, a zero byte, then `model.safetensors`.

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
    fs::write(FOLDER.path().join("model.safetensors"), weights).expect("writing");
    let Ok(file) = ModelFile::open(FOLDER.path()) else { return };
    let listed = file.metadata().len() + file.tensors().len() + file.description().quantization.len();
    std::hint::black_box(listed);
    if let Ok(model) = file.load(&LoadOptions { max_context: Some(64) }) {
        model.program.check(&model.weights).expect("a lowered program is a valid program");
    }
});
