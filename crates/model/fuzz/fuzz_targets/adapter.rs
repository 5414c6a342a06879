//! Any bytes as an adapter: a GGUF file, or `adapter_config.json`, a zero byte, then `adapter_model.safetensors`.

#![no_main]

use std::{fs, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use paguro_model::AdapterFile;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

fuzz_target!(|bytes: &[u8]| {
    let path = match bytes.starts_with(b"GGUF") {
        true => {
            let path = FOLDER.path().join("adapter.gguf");
            fs::write(&path, bytes).expect("writing");
            path
        }
        false => {
            let mut parts = bytes.splitn(2, |&byte| byte == 0);
            let (config, weights) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            fs::write(FOLDER.path().join("adapter_config.json"), config).expect("writing");
            fs::write(FOLDER.path().join("adapter_model.safetensors"), weights).expect("writing");
            FOLDER.path().to_owned()
        }
    };
    if let Ok(adapter) = AdapterFile::open(&path) {
        std::hint::black_box((adapter.rank(), adapter.bytes(), adapter.targets().count()));
    }
});
