//! Quantized weights of Hugging Face folders: each set of tensors of one matrix becomes a tensor in a format of
//! backends, converted while it is read.
//!
//! | `quantization_config` | becomes | loss |
//! |-|-|-|
//! | `awq`; `gptq` of 2 and 4 bits with zero points | Q5_0 | none |
//! | `gptq` and `compressed-tensors` of 2 and 4 bits, symmetric | Q4_0 | none |
//! | `gptq` and `compressed-tensors` of 8 bits, symmetric | Q8_0 | none |
//! | MLX, 2 to 4 bits | Q4_1 | none |
//! | MLX, 5 bits | Q5_1 | none |
//! | MLX, 6 and 8 bits; `gptq` in act-order, or of 8 bits with zero points | F16 or BF16 | products are rounded |
//! | `bitsandbytes` in NF4 and FP4 | the type before | none |
//! | `bitsandbytes` in int8 | Q8_0 | scales are rounded |
//! | NVFP4 of `modelopt` and `compressed-tensors` | NVFP4_SCALED | none |
//! | `fp8`, `compressed-tensors` and `modelopt` in FP8 | BF16 | products are rounded |
//!
//! "None" applies to scales that f16 can represent, such as those in f16, and those in bf16 unless they are tiny.

mod codebook;
mod columns;
mod mlx;
mod rows;
mod scheme;

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use half::f16;
use paguro_backend::{Bytes, WeightFormat};
use serde_json::{Map, Value};

pub(crate) use self::scheme::Scheme;
use crate::{
    error::ModelError,
    tensor::{DType, Tensor},
};

/// Inputs of a block in all quantized formats that matrices become.
const BLOCK: usize = 32;

/// The tensors of a folder by name.
struct Folder<'a> {
    tensors: HashMap<&'a str, &'a Tensor>,
}

/// One matrix of a folder.
struct Found {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    bytes: Bytes,
    /// Names of its source tensors.
    used: Vec<String>,
}

/// Replaces the tensors of quantized matrices by one for each. Folders that are not quantized stay as they are.
///
/// # Errors
/// [`ModelError::Unsupported`] for a scheme that is not read, [`ModelError::Config`] for tensors that do not fit together.
pub(crate) fn resolve<'a>(
    config: &Map<String, Value>,
    tensors: &'a [Tensor],
) -> Result<Cow<'a, [Tensor]>, ModelError> {
    let scheme = match Scheme::of(config)? {
        Some(scheme) => scheme,
        None if mlx::is_rearranged(tensors) => return mlx::restore(config, tensors.to_vec()).map(Cow::Owned),
        None => return Ok(Cow::Borrowed(tensors)),
    };
    let folder = Folder { tensors: tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect() };
    let cache = columns::Cache::default();
    let (mut made, mut used) = (HashMap::new(), HashMap::new());
    for tensor in tensors {
        let Some(base) = tensor.name.strip_suffix(scheme.main_tensor()) else { continue };
        let Some(found) = folder.matrix(&scheme, base, tensor, &cache)? else { continue };
        used.extend(found.used.iter().map(|name| (name.clone(), ())));
        let name = format!("{base}.weight");
        let (offset, file) = (tensor.offset, tensor.file);
        // Only stacks of MLX have three dimensions.
        let shape = match tensor.shape[..] {
            [parts, rows, _] => vec![parts, rows, found.cols],
            _ => vec![found.rows, found.cols],
        };
        let dtype = DType::Weight(found.format);
        made.insert(tensor.name.clone(), Tensor { name, dtype, shape, bytes: found.bytes, offset, file });
    }
    let keep = |tensor: &Tensor| match made.remove(&tensor.name) {
        Some(made) => Some(made),
        None if used.contains_key(&tensor.name) || scheme.ignores(&tensor.name) => None,
        None => Some(tensor.clone()),
    };
    let resolved: Vec<Tensor> = tensors.iter().filter_map(keep).collect();
    Ok(Cow::Owned(match scheme {
        Scheme::Mlx { .. } => mlx::restore(config, resolved)?,
        _ => resolved,
    }))
}

/// Returns the names that [`resolve`] gives to matrices of which some scale or minimum is rounded, because an f16 does not hold it.
///
/// # Errors
/// As [`resolve`]; scales that cannot be read.
pub(crate) fn rounded(
    config: &Map<String, Value>,
    tensors: &[Tensor],
) -> Result<HashSet<String>, ModelError> {
    use WeightFormat::{BF16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    let mut names = HashSet::new();
    let Some(scheme) = Scheme::of(config)? else { return Ok(names) };
    let folder = Folder { tensors: tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect() };
    let cache = columns::Cache::default();
    for tensor in tensors {
        let Some(base) = tensor.name.strip_suffix(scheme.main_tensor()) else { continue };
        let Some(found) = folder.matrix(&scheme, base, tensor, &cache)? else { continue };
        if !matches!(found.format, Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0) {
            continue;
        }
        for scales in found.used.iter().filter_map(|name| folder.get(name)) {
            let Some(format @ (BF16 | F32)) = scales.dtype.weight_format() else { continue };
            let bytes = scales.bytes.read().map_err(|error| bad(&scales.name, &error.to_string()))?;
            let mut values = vec![0.0; scales.elements() as usize];
            format.dequantize(&bytes, &mut values);
            if values.iter().any(|&value| f16::from_f32(value).to_f32() != value) {
                names.insert(format!("{base}.weight"));
            }
        }
    }
    Ok(names)
}

impl<'a> Folder<'a> {
    /// Returns the matrix whose main tensor is `tensor`; `None` if it is not quantized.
    fn matrix(
        &self,
        scheme: &Scheme,
        base: &str,
        tensor: &'a Tensor,
        cache: &columns::Cache,
    ) -> Result<Option<Found>, ModelError> {
        match scheme {
            Scheme::Columns(scheme) => columns::matrix(self, scheme, base, tensor, cache).map(Some),
            Scheme::Packed(scheme) => rows::packed(self, scheme, base, tensor).map(Some),
            Scheme::Bytes => rows::bytes(self, base, tensor),
            Scheme::Codebook => codebook::matrix(self, base, tensor),
            Scheme::Mlx { group, groups } => {
                rows::mlx(self, groups.get(base).copied().unwrap_or(*group), base, tensor)
            }
            Scheme::Nvfp4 { global, divides } => rows::nvfp4(self, base, tensor, global, *divides),
        }
    }

    fn get(&self, name: &str) -> Option<&'a Tensor> {
        self.tensors.get(name).copied()
    }

    fn require(&self, name: &str) -> Result<&'a Tensor, ModelError> {
        self.get(name).ok_or_else(|| bad(name, "it is missing, and the quantized weights need it"))
    }
}

fn bad(tensor: &str, problem: &str) -> ModelError {
    ModelError::Config(format!("tensor `{tensor}`: {problem}"))
}

/// Fails unless the tensor has this type and shape.
fn check(tensor: &Tensor, types: &[&str], shape: &[usize]) -> Result<(), ModelError> {
    let dtype = tensor.dtype.to_string();
    if !types.contains(&dtype.as_str()) {
        return Err(bad(&tensor.name, &format!("it has type {dtype}, expected {}", types.join(" or "))));
    }
    match tensor.shape == shape {
        true => Ok(()),
        false => Err(bad(&tensor.name, &format!("it has shape {:?}, expected {shape:?}", tensor.shape))),
    }
}

/// Returns the two dimensions of a matrix.
fn dims(tensor: &Tensor) -> Result<[usize; 2], ModelError> {
    match tensor.shape[..] {
        [rows, cols] if rows > 0 && cols > 0 => Ok([rows, cols]),
        _ => Err(bad(&tensor.name, &format!("it has shape {:?}, but is a matrix", tensor.shape))),
    }
}

/// Returns the format of scales, a float.
fn float(tensor: &Tensor) -> Result<WeightFormat, ModelError> {
    match tensor.dtype.weight_format() {
        Some(format) if !format.is_quantized() => Ok(format),
        _ => Err(bad(&tensor.name, &format!("it has type {}, but holds scales", tensor.dtype))),
    }
}

/// Inputs that share a scale: `cols` of `groups` groups, which have to be whole blocks.
fn group_of(tensor: &Tensor, cols: usize, groups: usize) -> Result<usize, ModelError> {
    match cols.checked_div(groups) {
        Some(group) if group * groups == cols && group.is_multiple_of(BLOCK) => Ok(group),
        _ => Err(ModelError::unsupported_but(
            format!("`{}`, {groups} groups of {cols} inputs", tensor.name),
            "groups of 32, 64, 96, ... inputs",
        )),
    }
}

/// Encodes 32 whole numbers, which are at least `-zero`, with their scale.
fn put_block(format: WeightFormat, scale: u16, numbers: &[i32; BLOCK], out: &mut Vec<u8>) {
    out.extend(scale.to_le_bytes());
    let q = |i: usize| match format {
        WeightFormat::Q4_0 => (numbers[i] + 8) as u8,
        WeightFormat::Q5_0 => (numbers[i] + 16) as u8,
        _ => numbers[i] as u8,
    };
    match format {
        WeightFormat::Q8_0 => out.extend((0..BLOCK).map(q)),
        _ => {
            if format == WeightFormat::Q5_0 {
                let high = (0..BLOCK).fold(0u32, |high, i| high | u32::from(q(i) >> 4 & 1) << i);
                out.extend(high.to_le_bytes());
            }
            out.extend((0..BLOCK / 2).map(|i| q(i) & 15 | (q(i + 16) & 15) << 4));
        }
    }
}

/// Returns the smallest and the largest number that [`put_block`] accepts.
fn range(format: WeightFormat) -> std::ops::RangeInclusive<i32> {
    match format {
        WeightFormat::Q4_0 => -8..=7,
        WeightFormat::Q5_0 => -16..=15,
        _ => -128..=127,
    }
}

/// Returns number `index` of `bits` bits of a stream, lowest bits first. At most eight bits.
fn bits_at(stream: &[u8], index: usize, bits: usize) -> u8 {
    let at = index * bits;
    let word = u16::from(stream[at / 8]) | u16::from(*stream.get(at / 8 + 1).unwrap_or(&0)) << 8;
    (word >> (at % 8)) as u8 & ((1u16 << bits) - 1) as u8
}
