//! Adapters (LoRA) for the embedded model, with random values.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

const LAYERS: usize = 6;
const RANK: usize = 8;

fn random(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Writes an adapter of PEFT.
pub fn write(folder: &Path, seed: u64, hidden: usize) {
    let mut random = random(seed);
    let (mut header, mut data) = (Map::new(), Vec::new());
    for layer in 0..LAYERS {
        for (part, out) in [("self_attn.q_proj", 512), ("self_attn.v_proj", 256), ("mlp.gate_proj", 1536)] {
            for (side, shape, spread) in [("A", [RANK, hidden], 0.2), ("B", [out, RANK], 1.0)] {
                let begin = data.len();
                let values = (0..shape[0] * shape[1]).map(|_| spread * random());
                data.extend(values.flat_map(f32::to_le_bytes));
                let name = format!("base_model.model.model.layers.{layer}.{part}.lora_{side}.weight");
                let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
                header.insert(name, entry);
            }
        }
    }
    let header = Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    let config = json!({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none",
        "base_model_name_or_path": "our/tales"});
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("adapter_model.safetensors"), bytes).unwrap();
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

/// Returns an adapter in GGUF.
pub fn gguf(seed: u64, hidden: usize) -> Vec<u8> {
    const OUT: usize = 1536;
    let mut random = random(seed);
    let mut file = b"GGUF".to_vec();
    let text = |file: &mut Vec<u8>, text: &str| {
        file.extend((text.len() as u64).to_le_bytes());
        file.extend(text.as_bytes());
    };
    let metadata = [("general.type", "adapter"), ("general.architecture", "llama"), ("adapter.type", "lora")];
    file.extend(3u32.to_le_bytes());
    file.extend((2 * LAYERS as u64).to_le_bytes());
    file.extend((metadata.len() as u64 + 1).to_le_bytes());
    for (key, value) in metadata {
        text(&mut file, key);
        file.extend(8u32.to_le_bytes());
        text(&mut file, value);
    }
    text(&mut file, "adapter.lora.alpha");
    file.extend(6u32.to_le_bytes());
    file.extend((RANK as f32).to_le_bytes());
    let mut data = Vec::new();
    for layer in 0..LAYERS {
        // GGUF has the innermost dimension first.
        for (side, shape, spread) in [("a", [hidden, RANK], 0.2), ("b", [RANK, OUT], 1.0)] {
            text(&mut file, &format!("blk.{layer}.ffn_gate.weight.lora_{side}"));
            file.extend(2u32.to_le_bytes());
            shape.iter().for_each(|&len| file.extend((len as u64).to_le_bytes()));
            file.extend(0u32.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend((0..shape[0] * shape[1]).flat_map(|_| (spread * random()).to_le_bytes()));
            data.resize(data.len().next_multiple_of(32), 0u8);
        }
    }
    file.resize(file.len().next_multiple_of(32), 0);
    [file, data].concat()
}
