//! Projectors (mmproj files) that do not fit, by name.

use std::{fs, path::Path};

use crate::tiny::{gguf::Writer, models};
use expect_test::{Expect, expect};
use paguro_model::{LoadOptions, ModelFile, gguf::Value};

/// Checks the error of a tiny model with a projector of these keys and no tensors.
#[track_caller]
fn check(keys: &[(&str, Value)], expected: Expect) {
    let folder = tempfile::tempdir().unwrap();
    let (text, projector) = (folder.path().join("model.gguf"), folder.path().join("mmproj.gguf"));
    fs::write(&text, models::llama().gguf().write()).unwrap();
    let keys = keys.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    fs::write(&projector, Writer::new(keys, &[]).write()).unwrap();
    let error = load(&text, &projector).unwrap_err();
    expected.assert_eq(&error.replace(&projector.display().to_string(), "mmproj.gguf"));
}

fn load(text: &Path, projector: &Path) -> Result<(), String> {
    let file = ModelFile::open(text).and_then(|file| file.with_projector(projector));
    let file = file.map_err(|error| error.to_string())?;
    file.load(&LoadOptions::default()).map(|_| ()).map_err(|error| error.to_string())
}

fn clip(projector: &str) -> Vec<(&'static str, Value)> {
    let text = |text: &str| Value::String(text.to_owned());
    vec![("general.architecture", text("clip")), ("clip.projector_type", text(projector))]
}

#[test]
fn families_without_a_tower_are_named() {
    check(
        &clip("resampler"),
        expect![
            "the projector `resampler` of MiniCPM-V is not supported (supported: qwen3vl_merger, qwen2.5vl_merger, gemma3, gemma4v, gemma4uv, pixtral, idefics3, internvl, lfm2, glm4v, paddleocr, kimivl, kimik25)"
        ],
    );
    check(
        &clip("new"),
        expect![
            "the projector `new` is not supported (supported: qwen3vl_merger, qwen2.5vl_merger, gemma3, gemma4v, gemma4uv, pixtral, idefics3, internvl, lfm2, glm4v, paddleocr, kimivl, kimik25)"
        ],
    );
}

#[test]
fn files_that_are_no_projectors_are_named() {
    let llama = vec![("general.architecture", Value::String("llama".to_owned()))];
    check(
        &llama,
        expect![
            "no model at `mmproj.gguf`: it is a file of architecture `llama`, no projector (mmproj, architecture `clip`)"
        ],
    );
}

#[test]
fn numbers_without_a_meaning_are_named() {
    check(
        &clip("qwen3vl_merger"),
        expect![
            "the model's configuration is not usable: the projector's metadata has no `clip.vision.embedding_length`"
        ],
    );
    let mut huge = clip("gemma3");
    for key in ["embedding_length", "attention.head_count", "block_count", "feed_forward_length"] {
        huge.push((Box::leak(format!("clip.vision.{key}").into_boxed_str()), Value::U32(u32::MAX)));
    }
    check(
        &huge,
        expect![
            "the model's configuration is not usable: the vision tower has 4294967295 layers of 4294967295 heads of 1, rows of 4294967295 and 4294967295 numbers, and 0 tensors"
        ],
    );
}
