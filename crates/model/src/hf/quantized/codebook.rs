//! bitsandbytes' four bits, NF4 and FP4: a table of 16 values, and a scale for each block of the flattened matrix.
//!
//! | tensor | content |
//! |-|-|
//! | `weight` | `[elements / 2, 1]` bytes, the first element of each in the high half |
//! | `weight.quant_map` | 16 values |
//! | `weight.absmax` | a float for each block; or a byte, an index into `weight.nested_quant_map` |
//! | `weight.nested_absmax` | floats, which multiply blocks of these values; an offset is added |
//! | `weight.quant_state.bitsandbytes__nf4` | JSON: the shape, the type and the sizes of blocks |

use half::{bf16, f16};
use paguro_backend::WeightFormat;
use serde_json::Value;

use super::{
    Folder, Found, bad, check, float,
    rows::{ByRows, Rows},
};
use crate::{
    error::ModelError,
    tensor::{DType, Tensor},
};

/// Converts a matrix to floats of the type from which it was quantized, as bitsandbytes itself does.
pub(super) fn matrix(folder: &Folder<'_>, base: &str, tensor: &Tensor) -> Result<Option<Found>, ModelError> {
    if !matches!(&tensor.dtype, DType::Other(name) if name == "U8") {
        return Ok(None);
    }
    let name = |part: &str| format!("{base}.weight.{part}");
    let states = ["nf4", "fp4"].map(|kind| name(&format!("quant_state.bitsandbytes__{kind}")));
    let state = match folder.get(&states[0]) {
        Some(state) => state,
        None => folder.require(&states[1])?,
    };
    let wrong = |problem: &str| bad(&state.name, problem);
    let json = read(state)?;
    let json: Value = serde_json::from_slice(&json).map_err(|error| wrong(&error.to_string()))?;
    let number = |key: &str| {
        let number = json.get(key).and_then(Value::as_u64).filter(|number| (1..=1 << 32).contains(number));
        number.map(|number| number as usize).ok_or_else(|| wrong(&format!("no `{key}`")))
    };
    let shape: Option<Vec<usize>> = json.get("shape").and_then(Value::as_array).and_then(|shape| {
        shape
            .iter()
            .map(|dim| dim.as_u64().filter(|dim| (1..=1 << 32).contains(dim)).map(|dim| dim as usize))
            .collect()
    });
    let Some([rows, cols]) = shape.as_deref().and_then(|shape| <[usize; 2]>::try_from(shape).ok()) else {
        return Err(wrong("no `shape` of a matrix"));
    };
    let block = number("blocksize")?;
    let blocks = tensor.bytes.len().saturating_mul(2).div_ceil(block);
    if rows.checked_mul(cols) != tensor.bytes.len().checked_mul(2) || !cols.is_multiple_of(2) {
        return Err(wrong(&format!("{rows} x {cols} weights in {} bytes", tensor.bytes.len())));
    }
    let format = match json.get("dtype").and_then(Value::as_str) {
        Some("float16") => WeightFormat::F16,
        Some("float32") => WeightFormat::F32,
        _ => WeightFormat::BF16,
    };
    let mut used = vec![tensor.name.clone(), state.name.clone(), name("quant_map"), name("absmax")];
    let table = floats(folder.require(&used[2])?, 16)?;
    let absmax = folder.require(&used[3])?;
    let scales = match float(absmax) {
        Ok(_) => floats(absmax, blocks)?,
        Err(_) => {
            check(absmax, &["U8"], &[blocks])?;
            used.extend([name("nested_quant_map"), name("nested_absmax")]);
            let nested = number("nested_blocksize")?;
            let offset = json.get("nested_offset").and_then(Value::as_f64).unwrap_or(0.0) as f32;
            let values = floats(folder.require(&used[4])?, 256)?;
            let factors = floats(folder.require(&used[5])?, blocks.div_ceil(nested))?;
            let scale =
                |(index, &byte): (usize, &u8)| values[usize::from(byte)] * factors[index / nested] + offset;
            read(absmax)?.iter().enumerate().map(scale).collect()
        }
    };
    let quants = Rows { bytes: tensor.bytes.clone(), stride: cols / 2 };
    let (sources, row_bytes) = (vec![quants.bytes.clone()], format.row_bytes(cols));
    let convert = move |range: std::ops::Range<usize>| {
        let mut out = Vec::with_capacity(range.len() * row_bytes);
        for (index, byte) in quants.read(range.clone())?.into_iter().enumerate() {
            for (half, quant) in [byte >> 4, byte & 15].into_iter().enumerate() {
                let at = range.start * cols + 2 * index + half;
                let value = table[usize::from(quant)] * scales[at / block];
                match format {
                    WeightFormat::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
                    WeightFormat::F32 => out.extend(value.to_le_bytes()),
                    _ => out.extend(bf16::from_f32(value).to_le_bytes()),
                }
            }
        }
        Ok(out)
    };
    Ok(Some(ByRows { rows, row_bytes, sources, convert }.found(format, cols, used)))
}

fn read(tensor: &Tensor) -> Result<Vec<u8>, ModelError> {
    let unreadable = |error: std::io::Error| ModelError::Unreadable {
        tensor: tensor.name.clone(),
        problem: error.to_string(),
    };
    Ok(tensor.bytes.read().map_err(unreadable)?.into_owned())
}

/// Returns a vector of `len` floats.
fn floats(tensor: &Tensor, len: usize) -> Result<Vec<f32>, ModelError> {
    let format = float(tensor)?;
    check(tensor, &[format.name()], &[len])?;
    let mut values = vec![0.0; len];
    format.dequantize(&read(tensor)?, &mut values);
    Ok(values)
}
