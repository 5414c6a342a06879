//! Folders as GGUF files: the same logits, tokens and templates.

use std::{fs, path::Path, sync::Arc};

use crate::{
    shared,
    tiny::{
        models::{self, VOCAB},
        run,
    },
};
use paguro_backend::Mixer;
use paguro_model::{LoadOptions, Model, ModelFile, tokenizer::SpecialTokens};
use serde_json::{Map, Value, json};

/// Writes a folder's contents as they are and opens them.
fn convert(folder: &Path) -> Result<Model, String> {
    let contents = ModelFile::open(folder).unwrap().contents().map_err(|error| error.to_string())?;
    let bytes = contents.write(Vec::new()).unwrap();
    let file = ModelFile::from_bytes("converted", Arc::new(bytes)).unwrap();
    Ok(file.load(&LoadOptions::default()).unwrap_or_else(|error| panic!("{}: {error}", folder.display())))
}

#[track_caller]
fn check(name: &str, folder: &Path, tokens: &[u32]) {
    let model = Model::open(folder, &LoadOptions::default()).unwrap();
    let converted = convert(folder).unwrap_or_else(|error| panic!("{name}: {error}"));
    converted.program.check(&converted.weights).unwrap();
    let (a, b) = (run::logits(&model, tokens), run::logits(&converted, tokens));
    let largest = a.iter().flatten().fold(0f32, |most, value| most.max(value.abs()));
    let worst = a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // Where RoPE pairs other elements, or heads have another order, sums run in another order.
    let has_order = |model: &Model| {
        let sharing = model.program.mixers().find_map(|mixer| match mixer {
            Mixer::DeltaRule(rule) => Some(rule.sharing),
            _ => None,
        });
        (model.program.ropes[0].style, sharing)
    };
    let allowed = if has_order(&model) == has_order(&converted) { 0.0 } else { 1e-4 };
    assert!(worst <= allowed * largest, "{name}: logits of {largest} differ by {worst}");
    for text in ["Once upon a time, there was a fox.", "  12345 naïve\n\n\tÀ日本 don't", "<|user|> x"] {
        for special in [SpecialTokens::AsText, SpecialTokens::Parse] {
            let encode = |model: &Model| model.tokenizer.encode_prompt(text, special);
            assert_eq!(encode(&model), encode(&converted), "{name}: {text:?}, {special:?}");
        }
    }
    assert_eq!(model.stop_tokens, converted.stop_tokens, "{name}");
    assert_eq!(model.chat_template.is_some(), converted.chat_template.is_some(), "{name}");
    assert_eq!(model.context_length, converted.context_length, "{name}");
    assert_eq!(model.defaults.recommended, converted.defaults.recommended, "{name}");
}

/// A tokenizer of bytes, as GPT-2 writes them.
fn byte_level() -> Value {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256..;
    let bytes = (0..256).map(|byte| if printable(byte) { byte } else { others.next().unwrap() });
    let special = ["<unk>", "<s>", "</s>"].map(str::to_owned);
    let names = special.into_iter().chain(bytes.map(|char| char::from_u32(char).unwrap().to_string()));
    let mut names: Vec<String> = names.collect();
    names.extend((names.len()..VOCAB).map(|id| format!("piece {id}")));
    let vocab: Map<_, _> = names.into_iter().enumerate().map(|(id, name)| (name, json!(id))).collect();
    let added = ["<unk>", "<s>", "</s>"].iter().enumerate().map(|(id, name)| {
        json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false})
    });
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    })
}

#[test]
fn tiny_models_are_the_same_afterwards() {
    let tokens: Vec<u32> = (0..40).map(|i| 3 + (i * i * 31 + 7 * i) % (VOCAB as u32 - 3)).collect();
    for model in models::all() {
        let folder = tempfile::tempdir().unwrap();
        model.write_hf(folder.path());
        fs::write(folder.path().join("tokenizer.json"), byte_level().to_string()).unwrap();
        check(model.name, folder.path(), &tokens);
    }
}

#[test]
fn trained_models_are_the_same_afterwards() {
    let Some(folder) = shared::folder("model/hf") else { return };
    let tokens: Vec<u32> = (0..24).map(|i| 6 + 37 * i % 4000).collect();
    check("tales", &folder, &tokens);
    for name in ["dsv3-hf", "gemma4-hf", "gptoss-hf", "qwen35-hf"] {
        let Some(folder) = shared::folder(&format!("model/families/{name}")) else { return };
        check(name, &folder, &tokens);
    }
}
