//! Encoders of the formats that are simple to write: for tests and for small matrices made at load. Models arrive
//! encoded.

use half::{bf16, f16};

/// Elements of a Q4_0 and a Q8_0 block.
const BLOCK: usize = 32;

pub(super) fn f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(super) fn f16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect()
}

pub(super) fn bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
}

/// Like `quantize_row_q4_0_ref` of ggml: the value of largest magnitude becomes -8, so that it is exact.
pub(super) fn q4_0(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() / BLOCK * 18);
    for block in values.chunks_exact(BLOCK) {
        let extreme = block.iter().copied().fold(0.0, |a: f32, x| if x.abs() > a.abs() { x } else { a });
        let d = extreme / -8.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let quant = |x: f32| (x * inverse + 8.5).clamp(0.0, 15.0) as u8;
        bytes.extend(f16::from_f32(d).to_le_bytes());
        bytes.extend((0..BLOCK / 2).map(|i| quant(block[i]) | quant(block[i + BLOCK / 2]) << 4));
    }
    bytes
}

/// Like `quantize_row_q8_0_ref` of ggml.
pub(super) fn q8_0(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() / BLOCK * 34);
    for block in values.chunks_exact(BLOCK) {
        let d = block.iter().fold(0.0, |a: f32, x| a.max(x.abs())) / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        bytes.extend(f16::from_f32(d).to_le_bytes());
        bytes.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
    }
    bytes
}
