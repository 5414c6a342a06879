//! Hugging Face folders of models that exist as GGUF files only: the same weights under the names, and in the
//! arrangement, that transformers writes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use half::f16;
use paguro_backend::WeightFormat;
use paguro_model::{ModelFile, tensor::Tensor};
use serde_json::{Map, Value, json};

use crate::common::shared;

/// Writes a folder with these tensors, and with the tokenizer that all of these models share.
fn write(name: &str, config: &Value, tensors: Vec<(String, Entry)>) -> Option<PathBuf> {
    let tokenizer = shared("model/families/gptoss-hf/tokenizer.json")?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    fs::copy(tokenizer, folder.join("tokenizer.json")).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, Entry { dtype, shape, bytes }) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    Some(folder)
}

/// A tensor of a safetensors file.
struct Entry {
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A tensor decoded: to half precision if that is asked for and the file has no single.
fn decoded(tensor: &Tensor, to_half: bool) -> Entry {
    let bytes = tensor.bytes.read().unwrap();
    let format = tensor.dtype.weight_format().unwrap();
    let mut values = vec![0.0_f32; tensor.elements() as usize];
    format.dequantize(&bytes, &mut values);
    let shape = tensor.shape.clone();
    match to_half && format != WeightFormat::F32 {
        false => {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            Entry { dtype: "F32", shape, bytes }
        }
        true => {
            let bytes = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
            Entry { dtype: "F16", shape, bytes }
        }
    }
}

/// The name of a tensor beside experts, without its ending.
fn hf_name(name: &str, router: &str) -> String {
    let known = [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("output", "lm_head"),
        ("attn_norm", "input_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_sinks", "self_attn.sinks"),
        ("ffn_norm", "post_attention_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_gate_inp", router),
    ];
    let of = |part: &str| known.iter().find(|known| known.0 == part).map(|known| known.1.to_owned());
    let found = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => of(part).map(|part| format!("model.layers.{layer}.{part}")),
        None => of(name),
    };
    found.unwrap_or_else(|| panic!("no name for {name}"))
}

/// Fields that the `config.json` of both models share.
fn config(class: &str) -> Value {
    json!({
        "architectures": [class], "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096, "max_position_embeddings": 2048,
        "num_experts_per_tok": 2,
    })
}

fn with(mut config: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("an object") };
    config.as_object_mut().unwrap().extend(more);
    config
}

/// `Qwen3MoeForCausalLM` in half precision, one tensor for each matrix of an expert.
pub fn qwen3moe() -> Option<PathBuf> {
    let file = ModelFile::open(&shared("model/families/tales-qwen3moe-Q8_0.gguf")?).unwrap();
    let mut tensors = Vec::new();
    for tensor in file.tensors() {
        let (name, ending) = tensor.name.rsplit_once('.').unwrap();
        let Some((layer, part)) = name.strip_suffix("_exps").and_then(|name| name.split_once(".ffn_")) else {
            tensors.push((format!("{}.{ending}", hf_name(name, "mlp.gate")), decoded(tensor, true)));
            continue;
        };
        let Entry { dtype, shape, bytes } = decoded(tensor, true);
        let layer = layer.trim_start_matches("blk.");
        for (expert, bytes) in bytes.chunks_exact(bytes.len() / shape[0]).enumerate() {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
            tensors.push((name, Entry { dtype, shape: shape[1..].to_vec(), bytes: bytes.to_vec() }));
        }
    }
    let config = with(
        config("Qwen3MoeForCausalLM"),
        json!({
            "model_type": "qwen3_moe", "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 6,
            "norm_topk_prob": true, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
        }),
    );
    write("qwen3moe-hf", &config, tensors)
}

/// `GptOssForCausalLM` with experts in MXFP4, blocks and exponents apart, as the published models have them.
pub fn gpt_oss_mxfp4() -> Option<PathBuf> {
    let file = ModelFile::open(&shared("model/families/tales-gptoss-MXFP4.gguf")?).unwrap();
    let find = |name: &str| file.tensors().iter().find(|tensor| tensor.name == name).unwrap();
    let mut tensors = Vec::new();
    for tensor in file.tensors() {
        let (name, ending) = tensor.name.rsplit_once('.').unwrap();
        let Some((layer, part)) = name.strip_suffix("_exps").and_then(|name| name.split_once(".ffn_")) else {
            let (name, dot) =
                if ending == "weight" && name.ends_with("sinks") { (name, "") } else { (name, ".") };
            let ending = if dot.is_empty() { "" } else { ending };
            tensors.push((format!("{}{dot}{ending}", hf_name(name, "mlp.router")), decoded(tensor, false)));
            continue;
        };
        let experts = format!("model.layers.{}.mlp.experts", layer.trim_start_matches("blk."));
        // Rows of gate and up take turns.
        let (name, sources) = match part {
            "gate" => ("gate_up_proj", vec![tensor, find(&tensor.name.replace("gate", "up"))]),
            "up" => continue,
            _ => ("down_proj", vec![tensor]),
        };
        let bytes: Vec<_> = sources.iter().map(|tensor| tensor.bytes.read().unwrap()).collect();
        let shape = &tensor.shape;
        if ending == "bias" {
            let elements = bytes[0].len() / 4;
            let element = |at: usize| bytes.iter().flat_map(move |bytes| &bytes[4 * at..4 * at + 4]).copied();
            let bytes = (0..elements).flat_map(element).collect();
            let shape = vec![shape[0], sources.len() * shape[1]];
            tensors.push((format!("{experts}.{name}_bias"), Entry { dtype: "F32", shape, bytes }));
            continue;
        }
        let (count, rows, blocks) = (shape[0], shape[1], shape[2] / 32);
        let (mut quants, mut scales) = (Vec::new(), Vec::new());
        for row in 0..count * rows {
            for bytes in &bytes {
                for block in bytes[17 * row * blocks..17 * (row + 1) * blocks].chunks_exact(17) {
                    scales.push(block[0]);
                    let element = |i: usize| block[1 + i % 16] >> (i / 16 * 4) & 15;
                    // Neighbours share a byte here; in GGUF files, elements 16 apart do.
                    quants.extend((0..16).map(|i| element(2 * i) | element(2 * i + 1) << 4));
                }
            }
        }
        let rows = sources.len() * rows;
        let entry = |shape, bytes| Entry { dtype: "U8", shape, bytes };
        tensors.push((format!("{experts}.{name}_blocks"), entry(vec![count, rows, blocks, 16], quants)));
        tensors.push((format!("{experts}.{name}_scales"), entry(vec![count, rows, blocks], scales)));
    }
    let config = with(
        config("GptOssForCausalLM"),
        json!({
            "model_type": "gpt_oss", "intermediate_size": 256, "num_local_experts": 6, "sliding_window": 128,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
            "quantization_config": {"quant_method": "mxfp4"},
            "rope_parameters": {
                "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                "original_max_position_embeddings": 256, "rope_theta": 150000.0,
            },
        }),
    );
    write("gptoss-mxfp4-hf", &config, tensors)
}
