//! `quantization_config`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// Quantization scheme of a folder's matrices.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scheme {
    /// AWQ and GPTQ: `qweight`, `qzeros`, `scales`, with outputs as columns.
    Columns(Columns),
    /// compressed-tensors, `pack-quantized`: `weight_packed`, `weight_scale`.
    Packed(Packed),
    /// One byte per weight, FP8 or int8, and `weight_scale` or `weight_scale_inv`.
    Bytes,
    /// bitsandbytes with four bits: `weight`, `weight.absmax`, `weight.quant_map`.
    Codebook,
    /// MLX: `weight`, `scales`, `biases`.
    Mlx {
        /// Inputs that share a scale.
        group: usize,
        /// The same of matrices that differ, by name.
        groups: BTreeMap<String, usize>,
    },
    /// NVFP4 with a scale for the whole matrix.
    Nvfp4 {
        /// Suffixes of the weights and of the scale of the matrix.
        global: [&'static str; 2],
        /// True if scales are divided by it.
        divides: bool,
    },
}

/// AWQ and GPTQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    pub(crate) bits: usize,
    /// True for eight columns in a word (AWQ), false for several inputs (GPTQ).
    pub(crate) awq: bool,
    /// All zero points are the middle.
    pub(crate) symmetric: bool,
    /// Added to stored zero points: 1 in the first format of GPTQ.
    pub(crate) zero_offset: i32,
}

/// compressed-tensors, `pack-quantized`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) bits: usize,
    pub(crate) symmetric: bool,
}

const SUPPORTED: &str = "awq, gptq, fp8, bitsandbytes, compressed-tensors, modelopt with NVFP4 or FP8, mxfp4 of gpt-oss, and MLX's \
                         affine; quantized models as GGUF";

impl Scheme {
    /// Returns the scheme of a folder with this `config.json`; `None` if its matrices are not quantized, and for MXFP4,
    /// which models of that kind read themselves.
    pub(crate) fn of(config: &Map<String, Value>) -> Result<Option<Self>, ModelError> {
        let nested = config.get("text_config").and_then(|text| text.get("quantization_config"));
        // MLX writes its own under two names; the second one has no method.
        let found = config.get("quantization_config").or(nested).or_else(|| config.get("quantization"));
        let Some(found) = found.filter(|value| !value.is_null()) else { return Ok(None) };
        let text = |key: &str| found.get(key).and_then(Value::as_str);
        let method = text("quant_method");
        let refuse = |what: String| Err(ModelError::unsupported_but(what, SUPPORTED));
        let scheme = match method {
            Some("mxfp4") => return Ok(None),
            Some("awq") => {
                let version = text("version").unwrap_or("gemm");
                if !version.eq_ignore_ascii_case("gemm") {
                    return refuse(format!("AWQ version `{version}`"));
                }
                let symmetric = found.get("zero_point").and_then(Value::as_bool) == Some(false);
                if symmetric {
                    return refuse("AWQ without zero points".into());
                }
                Self::Columns(Columns { bits: bits(found, &[4])?, awq: true, symmetric, zero_offset: 0 })
            }
            Some("gptq") => {
                let format = text("checkpoint_format").unwrap_or("gptq");
                let zero_offset = match format {
                    "gptq" => 1,
                    "gptq_v2" => 0,
                    _ => return refuse(format!("GPTQ's checkpoint format `{format}`")),
                };
                let symmetric = found.get("sym").and_then(Value::as_bool).unwrap_or(true);
                let bits = bits(found, &[2, 4, 8])?;
                Self::Columns(Columns { bits, awq: false, symmetric, zero_offset })
            }
            Some("fp8") => match text("fmt").unwrap_or("e4m3") {
                "e4m3" => Self::Bytes,
                other => return refuse(format!("FP8 in `{other}`")),
            },
            Some("bitsandbytes") => match found.get("load_in_8bit").and_then(Value::as_bool) {
                Some(true) => Self::Bytes,
                _ => Self::Codebook,
            },
            Some("compressed-tensors") => compressed(found)?,
            Some("modelopt") => {
                let quantization = found.get("quantization");
                let nested = quantization.and_then(|it| it.get("quant_algo")).and_then(Value::as_str);
                match text("quant_algo").or(nested) {
                    Some("NVFP4" | "W4A16_NVFP4") => {
                        Self::Nvfp4 { global: [".weight", ".weight_scale_2"], divides: false }
                    }
                    Some("FP8") => Self::Bytes,
                    other => return refuse(format!("modelopt's `{}`", other.unwrap_or("unknown algorithm"))),
                }
            }
            None if found.get("group_size").is_some() && found.get("bits").is_some() => {
                let group = mlx_group(found)?;
                let others = found.as_object().into_iter().flatten();
                let others = others.filter(|(_, own)| own.get("group_size").is_some());
                let groups = others.map(|(name, own)| Ok((name.clone(), mlx_group(own)?)));
                Self::Mlx { group, groups: groups.collect::<Result<_, ModelError>>()? }
            }
            other => {
                let other = other.unwrap_or("unknown method");
                return refuse(format!("a quantized Hugging Face model ({other})"));
            }
        };
        Ok(Some(scheme))
    }

    /// Suffix of the tensor that holds the quants of a matrix.
    pub(super) fn main_tensor(&self) -> &'static str {
        match self {
            Self::Columns(_) => ".qweight",
            Self::Packed(_) => ".weight_packed",
            Self::Bytes | Self::Codebook | Self::Mlx { .. } => ".weight",
            Self::Nvfp4 { global, .. } => global[0],
        }
    }

    /// Returns true for a tensor about the quantization of activations, which is not used.
    pub(super) fn ignores(&self, name: &str) -> bool {
        [
            ".input_scale",
            ".input_global_scale",
            ".input_zero_point",
            ".k_scale",
            ".v_scale",
            ".activation_scale",
        ]
        .iter()
        .any(|suffix| name.ends_with(suffix))
    }

    /// Returns the name that people use.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Columns(Columns { bits, awq: true, .. }) => format!("AWQ {bits}-bit"),
            Self::Columns(Columns { bits, .. }) => format!("GPTQ {bits}-bit"),
            Self::Packed(Packed { bits, .. }) => format!("W{bits}A16"),
            Self::Bytes => "8-bit".to_owned(),
            Self::Codebook => "bitsandbytes 4-bit".to_owned(),
            Self::Mlx { .. } => "MLX".to_owned(),
            Self::Nvfp4 { .. } => "NVFP4".to_owned(),
        }
    }
}

/// Returns the inputs that share a scale in MLX's quantization of a folder or of one matrix.
fn mlx_group(found: &Value) -> Result<usize, ModelError> {
    let mode = found.get("mode").and_then(Value::as_str).unwrap_or("affine");
    let group = found.get("group_size").and_then(Value::as_u64).unwrap_or(0);
    match (mode, group) {
        ("affine", 32 | 64 | 128) => Ok(group as usize),
        ("affine", _) => {
            Err(ModelError::unsupported_but(format!("MLX's quantization in groups of {group}"), SUPPORTED))
        }
        _ => Err(ModelError::unsupported_but(format!("MLX's quantization in mode `{mode}`"), SUPPORTED)),
    }
}

fn bits(found: &Value, supported: &[usize]) -> Result<usize, ModelError> {
    let bits = found.get("bits").or_else(|| found.get("w_bit")).and_then(Value::as_u64);
    match bits {
        Some(bits) if supported.contains(&(bits as usize)) => Ok(bits as usize),
        bits => {
            let supported: Vec<_> = supported.iter().map(ToString::to_string).collect();
            let what = bits
                .map_or("quantization without `bits`".into(), |bits| format!("quantization to {bits} bits"));
            Err(ModelError::unsupported_but(what, &format!("{} bits", supported.join(", "))))
        }
    }
}

/// compressed-tensors: all groups of a folder have to be of one kind.
fn compressed(found: &Value) -> Result<Scheme, ModelError> {
    let refuse = |what: String| {
        Err(ModelError::unsupported_but(
            what,
            "compressed-tensors' pack-quantized with 4 or 8 bits, int-quantized with 8, float-quantized and \
             nvfp4-pack-quantized",
        ))
    };
    let format = found.get("format").and_then(Value::as_str).unwrap_or("unknown format");
    let groups = found.get("config_groups").and_then(Value::as_object);
    let mut schemes = Vec::new();
    for group in groups.into_iter().flat_map(Map::values) {
        let weights = group.get("weights").unwrap_or(&Value::Null);
        let number = |key: &str| weights.get(key).and_then(Value::as_u64).unwrap_or(0) as usize;
        let kind = weights.get("type").and_then(Value::as_str).unwrap_or("int");
        let symmetric = weights.get("symmetric").and_then(Value::as_bool).unwrap_or(true);
        let format = group.get("format").and_then(Value::as_str).unwrap_or(format);
        let scheme = match (format, kind, number("num_bits")) {
            ("pack-quantized", "int", bits @ (4 | 8)) if symmetric || bits == 4 => {
                Scheme::Packed(Packed { bits, symmetric })
            }
            ("int-quantized", "int", 8) if symmetric => Scheme::Bytes,
            ("float-quantized" | "naive-quantized", "float", 8) => Scheme::Bytes,
            ("nvfp4-pack-quantized", "float", 4) => {
                Scheme::Nvfp4 { global: [".weight_packed", ".weight_global_scale"], divides: true }
            }
            (format, kind, bits) => {
                let symmetry = if symmetric { "" } else { ", asymmetric" };
                return refuse(format!("compressed-tensors' `{format}` ({kind}, {bits} bits{symmetry})"));
            }
        };
        schemes.push(scheme);
    }
    schemes.dedup();
    match schemes.len() {
        1 => Ok(schemes.remove(0)),
        0 => refuse(format!("compressed-tensors' `{format}` without groups")),
        _ => refuse(format!("compressed-tensors with groups of {} kinds", schemes.len())),
    }
}
