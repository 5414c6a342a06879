//! The 32-element formats of early ggml: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! One scale per 32 elements. Four-bit quants are in 16 bytes, element `i` in the low half of byte `i` and element `i +
//! 16` in its high half. Formats ending in `_0` are symmetric (`w = d * (q - zero)`), those ending in `_1` have a
//! minimum (`w = d * q + m`).

use super::half_at;

/// ```text
/// block_q4_0, 18 bytes: d: f16 | qs: [u8; 16]
/// w = d * (q - 8)
/// ```
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (i, &byte) in block[2..].iter().enumerate() {
        out[i] = d * (i32::from(byte & 0x0f) - 8) as f32;
        out[i + 16] = d * (i32::from(byte >> 4) - 8) as f32;
    }
}

/// ```text
/// block_q4_1, 20 bytes: d: f16 | m: f16 | qs: [u8; 16]
/// w = d * q + m
/// ```
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let m = half_at(block, 2);
    for (i, &byte) in block[4..].iter().enumerate() {
        out[i] = d * f32::from(byte & 0x0f) + m;
        out[i + 16] = d * f32::from(byte >> 4) + m;
    }
}

/// ```text
/// block_q5_0, 22 bytes: d: f16 | qh: u32 | qs: [u8; 16]
/// bit i of qh is the fifth bit of element i
/// w = d * (q - 16)
/// ```
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let quants = five_bits(&block[2..]);
    for (out, q) in out.iter_mut().zip(quants) {
        *out = d * (i32::from(q) - 16) as f32;
    }
}

/// ```text
/// block_q5_1, 24 bytes: d: f16 | m: f16 | qh: u32 | qs: [u8; 16]
/// w = d * q + m
/// ```
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let m = half_at(block, 2);
    let quants = five_bits(&block[4..]);
    for (out, q) in out.iter_mut().zip(quants) {
        *out = d * f32::from(q) + m;
    }
}

/// ```text
/// block_q8_0, 34 bytes: d: f16 | qs: [i8; 32]
/// w = d * q
/// ```
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(q as i8);
    }
}

/// Joins `qh: u32 | qs: [u8; 16]` to 32 quants of five bits.
fn five_bits(bytes: &[u8]) -> [u8; 32] {
    let (high, low) = bytes.split_at(4);
    let high = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    std::array::from_fn(|i| {
        let low = if i < 16 { low[i] & 0x0f } else { low[i - 16] >> 4 };
        low | ((high >> i & 1) as u8) << 4
    })
}
