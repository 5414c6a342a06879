//! Names and arrangements of folders that mlx-lm wrote (`sanitize` in its `models/*.py`), changed back to those of transformers.
//!
//! | mlx-lm | transformers |
//! |-|-|
//! | `switch_mlp.gate_proj`, `[experts, out, in]` | a matrix for each expert, or gates and ups in one stack |
//! | convolutions `[channels, taps, 1]` | `[channels, 1, taps]`, the same numbers |
//! | norms of Qwen 3.5 and Next with one added | differences from one |
//! | `embed_q`, `unembed_out` of each head | `kv_b_proj` |
//! | `gate_proj` of LFM2's networks | `w1` |
//!
//! mlx-lm recognizes its own files by the shape of a convolution, and so does this reader.

use half::f16;
use paguro_backend::WeightFormat;
use serde_json::{Map, Value};

use super::bad;
use crate::{
    arch::{Definition, hf_stacks},
    error::ModelError,
    tensor::{DType, Tensor},
};

/// Beginnings of the names of stacks of experts.
const STACKS: [&str; 3] = [".switch_mlp.", ".switch_glu.", ".experts."];
/// Names of gates, ups and downs.
const LEAVES: [&[&str]; 3] = [&["gate_proj"], &["up_proj", "fc1"], &["down_proj", "fc2"]];
/// Ends of the names of norms to which mlx-lm adds one.
const NORMS: [&str; 5] = [
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
];

/// Returns true for a folder with names or arrangements of mlx-lm alone.
pub(super) fn is_rearranged(tensors: &[Tensor]) -> bool {
    tensors.iter().any(|tensor| {
        is_turned(tensor)
            || tensor.shape.len() == 3 && STACKS.iter().any(|stack| leaf(&tensor.name, stack).is_some())
    })
}

/// True for a convolution with its channels first and one input last.
fn is_turned(tensor: &Tensor) -> bool {
    let is_convolution = tensor.name.ends_with("conv1d.weight") || tensor.name.ends_with("conv.conv.weight");
    is_convolution && matches!(tensor.shape[..], [_, taps, 1] if taps > 1)
}

/// Returns the text before a stack, the number of its part and its suffix: `weight` or `bias`.
fn leaf<'n>(name: &'n str, stack: &str) -> Option<(&'n str, usize, &'n str)> {
    let (before, rest) = name.split_once(stack)?;
    let (leaf, suffix) = rest.rsplit_once('.')?;
    let part = LEAVES.iter().position(|names| names.contains(&leaf))?;
    ["weight", "bias"].contains(&suffix).then_some((before, part, suffix))
}

/// Changes names, shapes and norms back.
///
/// # Errors
/// Changes that cannot be undone; tensors that cannot be read.
pub(super) fn restore(
    config: &Map<String, Value>,
    mut tensors: Vec<Tensor>,
) -> Result<Vec<Tensor>, ModelError> {
    let class = config.get("architectures").and_then(|classes| classes.get(0)?.as_str()).unwrap_or_default();
    let Ok(definition) = Definition::from_hf(class) else { return Ok(tensors) };
    let is_turned = tensors.iter().any(is_turned);
    if is_turned && class.starts_with("FalconH1") {
        return Err(ModelError::unsupported_but(
            "an MLX folder of Falcon-H1, whose matrices include some of its multipliers".to_owned(),
            "the folder of its authors, or GGUF",
        ));
    }
    let has_offsets = is_turned && (class.starts_with("Qwen3_5") || class.starts_with("Qwen3Next"));
    let has_shared = tensors.iter().any(|tensor| tensor.name.contains(".shared_mlp."));
    for tensor in &mut tensors {
        if self::is_turned(tensor) {
            tensor.shape.swap(1, 2);
        }
        if has_offsets && tensor.shape.len() == 1 && NORMS.iter().any(|norm| tensor.name.ends_with(norm)) {
            *tensor = without_one(tensor)?;
        }
        if let Some(name) = restored_name(&tensor.name, tensor.shape.len(), definition, class, has_shared) {
            tensor.name = name;
        }
    }
    Ok(tensors)
}

fn restored_name(
    name: &str,
    dimensions: usize,
    definition: &Definition,
    class: &str,
    has_shared: bool,
) -> Option<String> {
    for stack in STACKS {
        let Some((before, part, suffix)) = leaf(name, stack) else { continue };
        if dimensions != if suffix == "bias" { 2 } else { 3 } {
            continue;
        }
        // A layer's name ends with its number.
        let (layers, rest) = before.split_once(".layers.")?;
        let number = rest.split('.').next()?;
        return Some(format!("{layers}.layers.{number}.{}.{suffix}", hf_stacks(definition)[part]));
    }
    for (own, theirs) in [(".embed_q.", ".k_b_proj."), (".unembed_out.", ".v_b_proj.")] {
        if name.contains(own) {
            return Some(name.replace(own, theirs));
        }
    }
    if class == "Lfm2MoeForCausalLM" {
        let pairs = [("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")];
        let own = |own: &str| format!(".feed_forward.{own}.weight");
        return pairs
            .iter()
            .find(|pair| name.ends_with(&own(pair.0)))
            .map(|pair| name.replace(pair.0, pair.1));
    }
    // The dense network of Granite 4.0-H, whose gates and ups are read under these names as well.
    if class == "GraniteMoeHybridForCausalLM" && !has_shared {
        return name
            .ends_with(".mlp.down_proj.weight")
            .then(|| name.replace(".mlp.down_proj.", ".shared_mlp.output_linear."));
    }
    None
}

/// Returns a norm with one less.
fn without_one(tensor: &Tensor) -> Result<Tensor, ModelError> {
    let Some(format) = tensor.dtype.weight_format().filter(|format| !format.is_quantized()) else {
        return Err(bad(&tensor.name, &format!("it has type {}, but is a norm", tensor.dtype)));
    };
    let unreadable = |error: std::io::Error| ModelError::Unreadable {
        tensor: tensor.name.clone(),
        problem: error.to_string(),
    };
    let bytes = tensor.bytes.read().map_err(unreadable)?;
    let mut values = vec![0.0; tensor.elements() as usize];
    format.dequantize(&bytes, &mut values);
    let bytes: Vec<u8> = values.iter().flat_map(|value| (value - 1.0).to_le_bytes()).collect();
    Ok(Tensor { dtype: DType::Weight(WeightFormat::F32), bytes: bytes.into(), ..tensor.clone() })
}

/// True for matrices that become F32: those that choose experts, which are not rounded any further, and those whose columns become
/// rows.
pub(super) fn becomes_f32(base: &str) -> bool {
    ["kv_b_proj", "gate", "wg", "router.layer", "router.proj", "router", "shared_expert_gate"]
        .iter()
        .any(|leaf| base.strip_suffix(leaf).is_some_and(|before| before.ends_with('.')))
}

/// Appends a number in one of the formats of floats.
pub(super) fn put_float(format: WeightFormat, value: f32, out: &mut Vec<u8>) {
    match format {
        WeightFormat::F32 => out.extend(value.to_le_bytes()),
        WeightFormat::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
        _ => out.extend(half::bf16::from_f32(value).to_le_bytes()),
    }
}
