//! Folders as mlx-lm writes them: its names and arrangements (`sanitize` in its `models/*.py`), with and without quantization.

use std::{collections::BTreeMap, fs, path::Path};

use half::f16;
use paguro_model::{LoadOptions, Model};
use serde_json::{Value, json};

use super::{
    Backend, CHUNKS, OutputKind, ROUNDING,
    hf::{self, Numbers},
    run, weights,
};

const CONTEXT: usize = 256;
/// Inputs that share a scale.
const GROUP: usize = 32;

/// Cases whose tensors mlx-lm rearranges.
const REARRANGED: [&str; 22] = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "granitemoe",
    "olmoe",
    "glm4_moe",
    "minimax_m2",
    "qwen3_vl_moe",
    "lfm2",
    "lfm2_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe_lite",
    "mamba2",
    "nemotron_h-moe",
    "granitemoehybrid",
    "granitemoehybrid-dense",
    "gemma4-moe",
];

/// Compares folders in the arrangement of mlx-lm with transformers' logits, and quantized ones with folders of the same weights.
pub fn compare(backend: &dyn Backend) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/hf");
    let all: Value = serde_json::from_slice(&fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let positions: Vec<usize> =
        all["positions"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap() as usize).collect();
    let tokens = weights::tokens(positions[positions.len() - 1] + 1, all["vocab"].as_u64().unwrap());
    let logits = |path: &Path| -> Result<Vec<f32>, String> {
        let model = Model::open(path, &LoadOptions { max_context: Some(CONTEXT) });
        let model = model.map_err(|error| error.to_string())?;
        Ok(run(backend, model, CONTEXT, &tokens, &CHUNKS, &positions, OutputKind::Logits).unwrap())
    };
    let case =
        |name: &str| all["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap();
    let mut failures = Vec::new();
    for name in REARRANGED {
        let case = case(name);
        let class = case["config"]["architectures"][0].as_str().unwrap();
        let recorded = fs::read(folder.join(format!("{name}.logits"))).unwrap();
        let recorded: Vec<f32> =
            recorded.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let mut compare = |what: &str, own: Result<Vec<f32>, String>, expected: &[f32]| match own {
            Err(error) => failures.push(format!("{name}, {what}: {error}")),
            Ok(own) => {
                let error = hf::far(&own, expected);
                println!("{name:24} {what:10} error {error:.1e} of {ROUNDING:.1e}");
                if error.is_nan() || error > ROUNDING {
                    failures.push(format!("{name}, {what}: {error:.1e}, more than {ROUNDING:.1e}"));
                }
            }
        };
        let write = |kind: &str, config: &Value, tensors: Vec<Written>| {
            hf::write_folder(&format!("mlx-{kind}-{name}"), config, &all["tokenizer"], tensors.into_iter())
        };
        let path = write(
            "plain",
            &case["config"],
            sanitize(class, hf::tensors(case)).into_iter().map(plain).collect(),
        );
        compare("plain", logits(&path), &recorded);

        let rounded = |tensor: Numbers| match is_quantized(&tensor) {
            true => Numbers { values: quantize(&tensor).1, ..tensor },
            false => tensor,
        };
        let sanitized: Vec<Numbers> = sanitize(class, hf::tensors(case));
        let mut config = case["config"].clone();
        config["quantization"] = json!({"group_size": GROUP, "bits": 4});
        let quantized = sanitized.iter().flat_map(|tensor| match is_quantized(tensor) {
            true => quantize(tensor).0,
            false => vec![plain(Numbers {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                values: tensor.values.clone(),
            })],
        });
        let path = write("4-bit", &config, quantized.collect());
        let own = logits(&path);
        let same = write("same", &case["config"], sanitized.into_iter().map(rounded).map(plain).collect());
        match logits(&same) {
            Ok(expected) => compare("4 bits", own, &expected),
            Err(error) => compare("4 bits", Err(error), &recorded),
        }
    }
    // Its multipliers are part of some matrices.
    let falcon = case("falcon_h1");
    let tensors = sanitize("FalconH1ForCausalLM", hf::tensors(falcon)).into_iter().map(plain);
    let path = hf::write_folder("mlx-falcon", &falcon["config"], &all["tokenizer"], tensors);
    let error = logits(&path).unwrap_err();
    assert!(error.contains("MLX folder of Falcon-H1"), "{error}");
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Name, type, shape and bytes.
type Written = (String, &'static str, Vec<usize>, Vec<u8>);

fn plain(tensor: Numbers) -> Written {
    let bytes = tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect();
    (tensor.name, "F32", tensor.shape, bytes)
}

/// Matrices and stacks of whole groups, except embeddings, and routers, of which a rounding could choose other experts.
fn is_quantized(tensor: &Numbers) -> bool {
    let is_whole =
        tensor.shape.len() > 1 && tensor.shape.last().is_some_and(|cols| cols.is_multiple_of(GROUP));
    let kept = ["gate.weight", "router", "embed", "conv", "visual", "norm"];
    is_whole && tensor.name.ends_with(".weight") && !kept.iter().any(|part| tensor.name.contains(part))
}

/// Returns a matrix in four bits with its scales and minimums in f16, and the weights that these stand for.
fn quantize(tensor: &Numbers) -> (Vec<Written>, Vec<f32>) {
    let (mut words, mut scales, mut biases, mut values) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for group in tensor.values.chunks(GROUP) {
        let low = group.iter().copied().fold(f32::INFINITY, f32::min);
        let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (scale, bias) = (f16::from_f32((high - low) / 15.0), f16::from_f32(low));
        let quants: Vec<u32> = group
            .iter()
            .map(|value| ((value - bias.to_f32()) / scale.to_f32()).round().clamp(0.0, 15.0) as u32)
            .collect();
        values.extend(quants.iter().map(|&quant| scale.to_f32() * quant as f32 + bias.to_f32()));
        words.extend(quants.chunks(8).flat_map(|quants| {
            quants.iter().rev().fold(0, |word: u32, quant| word << 4 | quant).to_le_bytes()
        }));
        scales.extend(scale.to_le_bytes());
        biases.extend(bias.to_le_bytes());
    }
    let shape = |cols: usize| [&tensor.shape[..tensor.shape.len() - 1], &[cols]].concat();
    let cols = tensor.shape[tensor.shape.len() - 1];
    let base = tensor.name.strip_suffix(".weight").unwrap();
    let written = vec![
        (tensor.name.clone(), "U32", shape(cols / 8), words),
        (format!("{base}.scales"), "F16", shape(cols / GROUP), scales),
        (format!("{base}.biases"), "F16", shape(cols / GROUP), biases),
    ];
    (written, values)
}

/// Rearranges tensors of transformers' folders as mlx-lm does.
fn sanitize(class: &str, tensors: Vec<Numbers>) -> Vec<Numbers> {
    let mut done: Vec<Numbers> = Vec::new();
    let mut stacks: BTreeMap<String, BTreeMap<usize, Numbers>> = BTreeMap::new();
    let has_offsets = class.starts_with("Qwen3_5") || class.starts_with("Qwen3Next");
    let is_dense_granite = class == "GraniteMoeHybridForCausalLM"
        && !tensors.iter().any(|tensor| tensor.name.contains("block_sparse_moe"));
    for mut tensor in tensors {
        let name = tensor.name.clone();
        if name.ends_with("conv1d.weight") || name.ends_with("conv.conv.weight") {
            tensor.shape.swap(1, 2);
        }
        let norms = [
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "model.norm.weight",
            "q_norm.weight",
            "k_norm.weight",
        ];
        if has_offsets && norms.iter().any(|norm| name.ends_with(norm)) {
            tensor.values.iter_mut().for_each(|value| *value += 1.0);
        }
        let fused = [
            ("experts.gate_up_proj", ["switch_mlp.gate_proj", "switch_mlp.up_proj"]),
            (
                "block_sparse_moe.input_linear.weight",
                ["block_sparse_moe.switch_mlp.gate_proj", "block_sparse_moe.switch_mlp.up_proj"],
            ),
            ("shared_mlp.input_linear.weight", ["mlp.gate_proj", "mlp.up_proj"]),
        ];
        let fused = fused.iter().find(|(end, _)| {
            name.ends_with(end) && (is_dense_granite || *end != "shared_mlp.input_linear.weight")
        });
        if class.starts_with("GptOss") && name.contains(".experts.") {
            done.extend(gpt_oss(tensor));
        } else if let Some((end, parts)) = fused {
            let before = name.strip_suffix(end).unwrap();
            let stack = if class.starts_with("Gemma4") { "experts.switch_glu" } else { "switch_mlp" };
            for (half, part) in parts.iter().enumerate() {
                let name = format!("{before}{}.weight", part.replace("switch_mlp", stack));
                done.push(rows_of(&tensor, half, name));
            }
        } else if let Some(before) = name.strip_suffix("experts.down_proj") {
            let stack = if class.starts_with("Gemma4") { "experts.switch_glu" } else { "switch_mlp" };
            done.push(Numbers { name: format!("{before}{stack}.down_proj.weight"), ..tensor });
        } else if let Some(before) = name.strip_suffix("block_sparse_moe.output_linear.weight") {
            done.push(Numbers {
                name: format!("{before}block_sparse_moe.switch_mlp.down_proj.weight"),
                ..tensor
            });
        } else if let Some(before) =
            name.strip_suffix("shared_mlp.output_linear.weight").filter(|_| is_dense_granite)
        {
            done.push(Numbers { name: format!("{before}mlp.down_proj.weight"), ..tensor });
        } else if let Some((before, rest)) = name.split_once(".experts.") {
            let (expert, leaf) = rest.split_once('.').unwrap();
            let leaf = match leaf.trim_end_matches(".weight") {
                "w1" => "gate_proj",
                "w2" => "down_proj",
                "w3" => "up_proj",
                "up_proj" if class == "NemotronHForCausalLM" => "fc1",
                "down_proj" if class == "NemotronHForCausalLM" => "fc2",
                other => other,
            };
            let stack = stacks.entry(format!("{before}.switch_mlp.{leaf}.weight")).or_default();
            stack.insert(expert.parse().unwrap(), tensor);
        } else if name.ends_with("kv_b_proj.weight") && class != "DeepseekV2ForCausalLM" {
            done.extend(heads(tensor));
        } else if class.starts_with("Lfm2Moe") && name.contains(".feed_forward.w") {
            let name = [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")]
                .iter()
                .fold(name, |name, (old, new)| name.replace(&format!(".{old}."), &format!(".{new}.")));
            done.push(Numbers { name, ..tensor });
        } else {
            done.push(tensor);
        }
    }
    for (name, experts) in stacks {
        let shape = [&[experts.len()], &experts[&0].shape[..]].concat();
        done.push(Numbers { name, shape, values: experts.into_values().flat_map(|it| it.values).collect() });
    }
    done
}

/// One half of the rows of a matrix, or of each matrix of a stack.
fn rows_of(tensor: &Numbers, half: usize, name: String) -> Numbers {
    let mut shape = tensor.shape.clone();
    let (rows, cols) = (shape[shape.len() - 2], shape[shape.len() - 1]);
    let at = shape.len() - 2;
    shape[at] = rows / 2;
    let part = |matrix: &[f32]| matrix[half * rows / 2 * cols..(half + 1) * rows / 2 * cols].to_vec();
    Numbers { name, shape, values: tensor.values.chunks(rows * cols).flat_map(part).collect() }
}

/// Stacks of gpt-oss: transposed, gates and ups in turn.
fn gpt_oss(tensor: Numbers) -> Vec<Numbers> {
    let (before, leaf) = tensor.name.split_once(".experts.").unwrap();
    let (leaf, suffix) = match leaf.strip_suffix("_bias") {
        Some(leaf) => (leaf, "bias"),
        None => (leaf, "weight"),
    };
    let (parts, columns) = (tensor.shape[0], tensor.shape[tensor.shape.len() - 1]);
    let inputs = if suffix == "bias" { 1 } else { tensor.shape[1] };
    let made = |leaf: &str, first: usize, step: usize| {
        let outputs = columns / step;
        let value = |index: usize| {
            let (part, output, input) =
                (index / (outputs * inputs), index / inputs % outputs, index % inputs);
            tensor.values[(part * inputs + input) * columns + first + output * step]
        };
        let shape = if suffix == "bias" { vec![parts, outputs] } else { vec![parts, outputs, inputs] };
        let values = (0..parts * outputs * inputs).map(value).collect();
        Numbers { name: format!("{before}.experts.{leaf}.{suffix}"), shape, values }
    };
    match leaf {
        "down_proj" => vec![made("down_proj", 0, 1)],
        _ => vec![made("gate_proj", 0, 2), made("up_proj", 1, 2)],
    }
}

/// The matrices of four heads that expand a latent vector: those of K transposed, and those of V.
fn heads(tensor: Numbers) -> Vec<Numbers> {
    const HEADS: usize = 4;
    const PLAIN: usize = 32;
    let (rows, latent) = (tensor.shape[0] / HEADS, tensor.shape[1]);
    let before = tensor.name.strip_suffix("kv_b_proj.weight").unwrap();
    let at = |head: usize, row: usize, col: usize| tensor.values[(head * rows + row) * latent + col];
    let keys = (0..HEADS * latent * PLAIN)
        .map(|index| at(index / (latent * PLAIN), index % PLAIN, index / PLAIN % latent));
    let value_rows = rows - PLAIN;
    let values = (0..HEADS * value_rows * latent)
        .map(|index| at(index / (value_rows * latent), PLAIN + index / latent % value_rows, index % latent));
    vec![
        Numbers {
            name: format!("{before}embed_q.weight"),
            shape: vec![HEADS, latent, PLAIN],
            values: keys.collect(),
        },
        Numbers {
            name: format!("{before}unembed_out.weight"),
            shape: vec![HEADS, value_rows, latent],
            values: values.collect(),
        },
    ]
}
