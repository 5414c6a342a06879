//! Matrices whose files have outputs as rows: each row is converted when it is read.

use std::{io, ops::Range, sync::Arc};

use half::{bf16, f16};
use paguro_backend::{ByteSource, Bytes, WeightFormat, format::e4m3_half};

use super::{
    BLOCK, Folder, Found, bad, bits_at, check, dims, float, group_of,
    mlx::{becomes_f32, put_float},
    put_block,
    scheme::Packed,
};
use crate::{
    error::ModelError,
    tensor::{DType, Tensor},
};

/// Rows that are converted while they are read.
pub(super) struct ByRows<F> {
    pub(super) rows: usize,
    pub(super) row_bytes: usize,
    pub(super) sources: Vec<Bytes>,
    /// Returns some rows.
    pub(super) convert: F,
}

pub(super) type Converted = io::Result<Vec<u8>>;

impl<F: Fn(Range<usize>) -> Converted + Send + Sync + 'static> ByRows<F> {
    pub(super) fn found(self, format: WeightFormat, cols: usize, used: Vec<String>) -> Found {
        let (rows, len) = (self.rows, self.rows * self.row_bytes);
        Found { format, rows, cols, bytes: Bytes::new(Arc::new(self), 0, len), used }
    }
}

impl<F: Fn(Range<usize>) -> Converted + Send + Sync> ByteSource for ByRows<F> {
    fn size(&self) -> u64 {
        (self.rows * self.row_bytes) as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        let first = start / self.row_bytes;
        let last = (start + out.len()).div_ceil(self.row_bytes);
        if last > self.rows {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let bytes = (self.convert)(first..last)?;
        let from = start - first * self.row_bytes;
        out.copy_from_slice(&bytes[from..from + out.len()]);
        Ok(())
    }

    fn check_unchanged(&self) -> io::Result<()> {
        self.sources.iter().try_for_each(Bytes::check_unchanged)
    }
}

/// Rows of a tensor, which has `rows` in all.
#[derive(Clone)]
pub(super) struct Rows {
    pub(super) bytes: Bytes,
    pub(super) stride: usize,
}

impl Rows {
    fn of(tensor: &Tensor, rows: usize) -> Self {
        Self { bytes: tensor.bytes.clone(), stride: tensor.bytes.len() / rows }
    }

    pub(super) fn read(&self, rows: Range<usize>) -> Converted {
        let mut bytes = vec![0; rows.len() * self.stride];
        self.bytes.read_at(rows.start * self.stride, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads floats.
    fn floats(&self, format: WeightFormat, rows: Range<usize>) -> io::Result<Vec<f32>> {
        let bytes = self.read(rows)?;
        let mut values = vec![0.0; bytes.len() / format.block_bytes()];
        format.dequantize(&bytes, &mut values);
        Ok(values)
    }
}

/// `weight_packed` `[rows, cols * bits / 32]`, words with the lowest input in the lowest bits, offset by half of the
/// range; `weight_scale` `[rows, groups]`; `weight_shape`; and for asymmetric matrices `weight_zero_point` `[rows *
/// bits / 32, groups]`, words.
pub(super) fn packed(
    folder: &Folder<'_>,
    scheme: &Packed,
    base: &str,
    tensor: &Tensor,
) -> Result<Found, ModelError> {
    let Packed { bits, symmetric } = *scheme;
    let [rows, words] = dims(tensor)?;
    let cols = words * 32 / bits;
    check(tensor, &["I32", "U32"], &[rows, words])?;
    let name = |part: &str| format!("{base}.weight_{part}");
    let mut used = vec![tensor.name.clone(), name("shape"), name("scale")];
    if folder.get(&name("g_idx")).is_some() {
        return Err(ModelError::unsupported(format!("`{}` (an order of activations)", name("g_idx"))));
    }
    let scales = folder.require(&used[2])?;
    let [_, groups] = dims(scales)?;
    let scale_format = float(scales)?;
    check(scales, &[scale_format.name()], &[rows, groups])?;
    let group = group_of(scales, cols, groups)?;
    let middle = 1i32 << (bits - 1);
    let per_word = 32 / bits;
    let zeros = match symmetric {
        true => None,
        false => {
            used.push(name("zero_point"));
            let zeros = folder.require(&used[3])?;
            check(zeros, &["I32", "U32"], &[rows.div_ceil(per_word), groups])?;
            Some(Rows::of(zeros, rows.div_ceil(per_word)))
        }
    };
    let format = match (bits, symmetric) {
        (8, _) => WeightFormat::Q8_0,
        (_, true) => WeightFormat::Q4_0,
        _ => WeightFormat::Q5_0,
    };
    let (quants, scales) = (Rows::of(tensor, rows), Rows::of(scales, rows));
    let mut sources = vec![quants.bytes.clone(), scales.bytes.clone()];
    sources.extend(zeros.as_ref().map(|zeros| zeros.bytes.clone()));
    let row_bytes = format.row_bytes(cols);
    let convert = move |range: Range<usize>| {
        let mut out = Vec::with_capacity(range.len() * row_bytes);
        let (bytes, scales) = (quants.read(range.clone())?, scales.floats(scale_format, range.clone())?);
        for (index, (row, scales)) in
            bytes.chunks_exact(quants.stride).zip(scales.chunks_exact(groups)).enumerate()
        {
            let output = range.start + index;
            let zeros = match &zeros {
                Some(zeros) => Some(zeros.read(output / per_word..output / per_word + 1)?),
                None => None,
            };
            for first in (0..cols).step_by(BLOCK) {
                let at = first / group;
                let zero = zeros.as_ref().map_or(middle, |words| {
                    i32::from(bits_at(&words[4 * at..][..4], output % per_word, bits))
                });
                let numbers = std::array::from_fn(|i| i32::from(bits_at(row, first + i, bits)) - zero);
                put_block(format, f16::from_f32(scales[at]).to_bits(), &numbers, &mut out);
            }
        }
        Ok(out)
    };
    Ok(ByRows { rows, row_bytes, sources, convert }.found(format, cols, used))
}

/// `weight` of one byte each; scales of the matrix, of rows, of groups of inputs or of blocks `[height, width]`, as
/// `weight_scale` or `weight_scale_inv`: both are multiplied. bitsandbytes' int8 has the largest value of each row, `SCB`, instead.
pub(super) fn bytes(folder: &Folder<'_>, base: &str, tensor: &Tensor) -> Result<Option<Found>, ModelError> {
    let is_float = match &tensor.dtype {
        DType::Other(name) if name == "F8_E4M3" => true,
        DType::Other(name) if name == "I8" => false,
        DType::Other(name) => return Err(bad(&tensor.name, &format!("weights in {name} are not supported"))),
        DType::Weight(_) => return Ok(None),
    };
    let [rows, cols] = dims(tensor)?;
    let names = ["weight_scale_inv", "SCB", "weight_scale"].map(|part| format!("{base}.{part}"));
    let is_largest = folder.get(&names[1]).is_some();
    let scales = match names.iter().find_map(|name| folder.get(name)) {
        Some(scales) => scales,
        None => folder.require(&names[2])?,
    };
    let scale_format = float(scales)?;
    let [down, across] = match scales.shape[..] {
        [] | [1] => [1, 1],
        [down] => [down, 1],
        [down, across] if down > 0 && across > 0 => [down, across],
        _ => return Err(bad(&scales.name, &format!("it has shape {:?}", scales.shape))),
    };
    // The last blocks may be smaller.
    let size = |len: usize, blocks: usize| match len {
        _ if blocks == 1 => Some(len),
        _ => Some(len.div_ceil(blocks).next_power_of_two()).filter(|size| len.div_ceil(*size) == blocks),
    };
    let (height, width) =
        if down == rows { (Some(1), size(cols, across)) } else { (size(rows, down), size(cols, across)) };
    let (Some(height), Some(width)) = (height, width) else {
        return Err(bad(&scales.name, &format!("{down} x {across} scales for {rows} x {cols} weights")));
    };
    let format = match is_float {
        false if width.is_multiple_of(BLOCK) && cols.is_multiple_of(BLOCK) => WeightFormat::Q8_0,
        _ => WeightFormat::BF16,
    };
    let mut used = vec![tensor.name.clone(), scales.name.clone()];
    if is_largest {
        // Other numbers are arrangements for some GPUs.
        let arrangement = folder.require(&format!("{base}.weight_format"))?;
        check(arrangement, &["U8"], &[])?;
        if arrangement.bytes.read().map_or(1, |bytes| bytes[0]) != 0 {
            return Err(ModelError::unsupported(format!("`{}` that is not 0", arrangement.name)));
        }
        used.push(arrangement.name.clone());
    }
    let (quants, scales) = (Rows::of(tensor, rows), Rows::of(scales, down));
    let sources = vec![quants.bytes.clone(), scales.bytes.clone()];
    let row_bytes = format.row_bytes(cols);
    let convert = move |range: Range<usize>| {
        let mut out = Vec::with_capacity(range.len() * row_bytes);
        let bytes = quants.read(range.clone())?;
        let first_scale = range.start / height;
        let mut scales = scales.floats(scale_format, first_scale..range.end.div_ceil(height))?;
        if is_largest {
            scales.iter_mut().for_each(|scale| *scale *= 1.0 / 127.0);
        }
        for (row, bytes) in range.zip(bytes.chunks_exact(cols)) {
            let scales = &scales[(row / height - first_scale) * across..][..across];
            if format == WeightFormat::Q8_0 {
                for (block, bytes) in bytes.as_chunks::<BLOCK>().0.iter().enumerate() {
                    let scale = f16::from_f32(scales[block * BLOCK / width]).to_bits();
                    put_block(format, scale, &bytes.map(|byte| i32::from(byte as i8)), &mut out);
                }
                continue;
            }
            for (input, &byte) in bytes.iter().enumerate() {
                let value = if is_float { e4m3(byte) } else { f32::from(byte as i8) };
                out.extend(bf16::from_f32(value * scales[input / width]).to_le_bytes());
            }
        }
        Ok(out)
    };
    Ok(Some(ByRows { rows, row_bytes, sources, convert }.found(format, cols, used)))
}

/// Returns an E4M3 number with its sign; NaN stays NaN.
fn e4m3(byte: u8) -> f32 {
    match byte & 0x7f {
        0x7f => f32::NAN,
        magnitude => {
            let value = 2.0 * e4m3_half(magnitude);
            if byte >= 0x80 { -value } else { value }
        }
    }
}

/// `weight` `[rows, cols * bits / 32]`, words with the lowest input in the lowest bits; `scales` and `biases` `[rows,
/// groups]`: `w = scale * q + bias`.
pub(super) fn mlx(
    folder: &Folder<'_>,
    group: usize,
    base: &str,
    tensor: &Tensor,
) -> Result<Option<Found>, ModelError> {
    let used = vec![tensor.name.clone(), format!("{base}.scales"), format!("{base}.biases")];
    // Layers may be left as they are.
    let Some(scales) = folder.get(&used[1]) else { return Ok(None) };
    let biases = folder.require(&used[2])?;
    // A matrix, or a stack of matrices.
    let (outer, words) = match tensor.shape.split_last() {
        Some((&words, outer)) if [1, 2].contains(&outer.len()) && words > 0 => (outer, words),
        _ => return Err(bad(&tensor.name, &format!("it has shape {:?}, but is a matrix", tensor.shape))),
    };
    let rows: usize = outer.iter().product();
    check(tensor, &["U32", "I32"], &tensor.shape)?;
    let groups = scales.shape.last().copied().unwrap_or(0);
    let scale_format = float(scales)?;
    for numbers in [scales, biases] {
        check(numbers, &[scale_format.name()], &[outer, &[groups]].concat())?;
    }
    if rows == 0 || groups == 0 {
        return Err(bad(&tensor.name, &format!("it has shape {:?}", tensor.shape)));
    }
    let cols = groups * group;
    let bits = match words * 32 / cols {
        bits @ (2..=6 | 8) if bits * cols == words * 32 => bits,
        _ => {
            let problem = format!("{words} words a row for {groups} groups of {group} inputs");
            return Err(bad(&tensor.name, &problem));
        }
    };
    let format = match (bits, scale_format) {
        _ if becomes_f32(base) => WeightFormat::F32,
        (..=4, _) => WeightFormat::Q4_1,
        (5, _) => WeightFormat::Q5_1,
        (_, WeightFormat::F16) => WeightFormat::F16,
        _ => WeightFormat::BF16,
    };
    let (quants, scales, biases) = (Rows::of(tensor, rows), Rows::of(scales, rows), Rows::of(biases, rows));
    let sources = vec![quants.bytes.clone(), scales.bytes.clone(), biases.bytes.clone()];
    let row_bytes = format.row_bytes(cols);
    let convert = move |range: Range<usize>| {
        let mut out = Vec::with_capacity(range.len() * row_bytes);
        let bytes = quants.read(range.clone())?;
        let (scales, biases) =
            (scales.floats(scale_format, range.clone())?, biases.floats(scale_format, range)?);
        let rows = bytes.chunks_exact(quants.stride).zip(scales.chunks_exact(groups));
        for ((row, scales), biases) in rows.zip(biases.chunks_exact(groups)) {
            for first in (0..cols).step_by(BLOCK) {
                let (scale, bias) = (scales[first / group], biases[first / group]);
                let q = |i: usize| bits_at(row, first + i, bits);
                match format {
                    WeightFormat::Q4_1 | WeightFormat::Q5_1 => {
                        out.extend([scale, bias].map(|x| f16::from_f32(x).to_le_bytes()).as_flattened());
                        if format == WeightFormat::Q5_1 {
                            let high = (0..BLOCK).fold(0u32, |high, i| high | u32::from(q(i) >> 4) << i);
                            out.extend(high.to_le_bytes());
                        }
                        out.extend((0..BLOCK / 2).map(|i| q(i) & 15 | (q(i + 16) & 15) << 4));
                    }
                    _ => (0..BLOCK).for_each(|i| put_float(format, scale * f32::from(q(i)) + bias, &mut out)),
                }
            }
        }
        Ok(out)
    };
    Ok(Some(ByRows { rows, row_bytes, sources, convert }.found(format, cols, used)))
}

/// Two E2M1 numbers in a byte, the first in its low half; `weight_scale` in E4M3 for each 16 inputs, and a scale of the
/// matrix.
pub(super) fn nvfp4(
    folder: &Folder<'_>,
    base: &str,
    tensor: &Tensor,
    global: &[&str; 2],
    divides: bool,
) -> Result<Option<Found>, ModelError> {
    if tensor.dtype.weight_format().is_some() {
        return Ok(None);
    }
    let [rows, half] = dims(tensor)?;
    let cols = 2 * half;
    check(tensor, &["U8"], &[rows, half])?;
    let used = vec![tensor.name.clone(), format!("{base}.weight_scale"), format!("{base}{}", global[1])];
    let scales = folder.require(&used[1])?;
    check(scales, &["F8_E4M3"], &[rows, cols / 16])?;
    let whole = folder.require(&used[2])?;
    if whole.elements() != 1 {
        return Err(bad(&whole.name, &format!("it has shape {:?}, but is one number", whole.shape)));
    }
    let whole = Rows::of(whole, 1)
        .floats(float(whole)?, 0..1)
        .map_err(|error| ModelError::Unreadable { tensor: used[2].clone(), problem: error.to_string() })?[0];
    let whole = if divides { 1.0 / whole } else { whole };
    let format = WeightFormat::NVFP4_SCALED;
    if !cols.is_multiple_of(format.block_len()) {
        return Err(ModelError::unsupported(format!("`{}`, {cols} inputs in blocks of 64", tensor.name)));
    }
    let (quants, scales) = (Rows::of(tensor, rows), Rows::of(scales, rows));
    let sources = vec![quants.bytes.clone(), scales.bytes.clone()];
    let row_bytes = format.row_bytes(cols);
    let convert = move |range: Range<usize>| {
        let (bytes, scales) = (quants.read(range.clone())?, scales.read(range.clone())?);
        let mut out = Vec::with_capacity(range.len() * row_bytes);
        for (quants, scales) in bytes.as_chunks::<32>().0.iter().zip(scales.as_chunks::<4>().0) {
            out.extend(whole.to_le_bytes());
            out.extend(scales);
            // Converts pairs to halves of 16 elements.
            for part in quants.as_chunks::<8>().0 {
                let element = |i: usize| part[i / 2] >> (i % 2 * 4) & 15;
                out.extend((0..8).map(|i| element(i) | element(i + 8) << 4));
            }
        }
        Ok(out)
    };
    Ok(Some(ByRows { rows, row_bytes, sources, convert }.found(format, cols, used)))
}
