//! The "K" formats: super-blocks of 256 elements with quantized scales inside: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
//!
//! A super-block consists of sub-blocks of 16 or 32 elements. Each has a small integer scale (and in some formats a
//! small integer minimum), which are multiplied by the super-block's f16 `d` (and `dmin`).

use super::half_at;

/// ```text
/// block_q2_K, 84 bytes: scales: [u8; 16] | qs: [u8; 64] | d: f16 | dmin: f16
/// 16 sub-blocks of 16; low half of scales[s] is the scale, high half the minimum of sub-block s
/// element 128*h + 32*j + l is bits 2j, 2j+1 of qs[32*h + l]
/// w = d * scale * q - dmin * minimum
/// ```
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let d = half_at(block, 80);
    let dmin = half_at(block, 82);
    for (i, out) in out.iter_mut().enumerate() {
        let q = quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        let scale = d * f32::from(scales[i / 16] & 0x0f);
        let minimum = dmin * f32::from(scales[i / 16] >> 4);
        *out = scale * f32::from(q) - minimum;
    }
}

/// ```text
/// block_q3_K, 110 bytes: hmask: [u8; 32] | qs: [u8; 64] | scales: [u8; 12] | d: f16
/// 16 sub-blocks of 16 with six-bit scales, zero at 32
/// element 128*h + 32*j + l: low two bits are bits 2j, 2j+1 of qs[32*h + l], the third is bit 4*h + j of hmask[l]
/// w = d * (scale - 32) * (q - 4)
/// ```
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (high, quants, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half_at(block, 108);
    let scales = q3_k_scales(scales);
    for (i, out) in out.iter_mut().enumerate() {
        let low = quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        let high = high[i % 32] >> (i / 32) & 1;
        let q = i32::from(low | high << 2) - 4;
        *out = d * scales[i / 16] as f32 * q as f32;
    }
}

/// Returns the 16 scales of a Q3_K block: the low four bits of scale `s` are in byte `s % 8` (low half for `s < 8`),
/// the high two in byte `8 + s % 4`, at bit `2 * (s / 4)`.
fn q3_k_scales(bytes: &[u8]) -> [i32; 16] {
    std::array::from_fn(|s| {
        let low = bytes[s % 8] >> (s / 8 * 4) & 0x0f;
        let high = bytes[8 + s % 4] >> (s / 4 * 2) & 3;
        i32::from(low | high << 4) - 32
    })
}

/// ```text
/// block_q4_K, 144 bytes: d: f16 | dmin: f16 | scales: [u8; 12] | qs: [u8; 128]
/// 8 sub-blocks of 32 with six-bit scales and minima
/// element 64*j + l is the low, element 64*j + 32 + l the high half of qs[32*j + l]
/// w = d * scale * q - dmin * minimum
/// ```
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (scales, quants) = (&block[4..16], &block[16..]);
    let d = half_at(block, 0);
    let dmin = half_at(block, 2);
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = scale_and_minimum(scales, s);
        let (scale, minimum) = (d * f32::from(scale), dmin * f32::from(minimum));
        for (l, out) in out.iter_mut().enumerate() {
            let q = quants[s / 2 * 32 + l] >> (s % 2 * 4) & 0x0f;
            *out = scale * f32::from(q) - minimum;
        }
    }
}

/// ```text
/// block_q5_K, 176 bytes: d: f16 | dmin: f16 | scales: [u8; 12] | qh: [u8; 32] | qs: [u8; 128]
/// as Q4_K; the fifth bit of element 32*s + l is bit s of qh[l]
/// ```
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (scales, high, quants) = (&block[4..16], &block[16..48], &block[48..]);
    let d = half_at(block, 0);
    let dmin = half_at(block, 2);
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = scale_and_minimum(scales, s);
        let (scale, minimum) = (d * f32::from(scale), dmin * f32::from(minimum));
        for (l, out) in out.iter_mut().enumerate() {
            let low = quants[s / 2 * 32 + l] >> (s % 2 * 4) & 0x0f;
            let high = high[l] >> s & 1;
            *out = scale * f32::from(low | high << 4) - minimum;
        }
    }
}

/// Six-bit scale and minimum of sub-block `s` in the 12 bytes that Q4_K and Q5_K share (`get_scale_min_k4` in
/// ggml): the first four of each fill the low six bits of bytes 0..4 and 4..8; the other four have their low four
/// bits in bytes 8..12 and borrow the top two bits of bytes 0..8.
fn scale_and_minimum(bytes: &[u8], s: usize) -> (u8, u8) {
    if s < 4 {
        (bytes[s] & 63, bytes[s + 4] & 63)
    } else {
        let scale = bytes[s + 4] & 0x0f | bytes[s - 4] >> 6 << 4;
        let minimum = bytes[s + 4] >> 4 | bytes[s] >> 6 << 4;
        (scale, minimum)
    }
}

/// ```text
/// block_q6_K, 210 bytes: ql: [u8; 128] | qh: [u8; 64] | scales: [i8; 16] | d: f16
/// 16 sub-blocks of 16
/// element 128*h + 32*j + l: low four bits are in ql[64*h + 32*(j%2) + l], in the low half for j < 2 and in the
/// high half for the others; the upper two are bits 2j, 2j+1 of qh[32*h + l]
/// w = d * scale * (q - 32)
/// ```
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (i, out) in out.iter_mut().enumerate() {
        let (h, j, l) = (i / 128, i % 128 / 32, i % 32);
        let low = low[64 * h + 32 * (j % 2) + l] >> (j / 2 * 4) & 0x0f;
        let high = high[32 * h + l] >> (2 * j) & 3;
        let q = i32::from(low | high << 4) - 32;
        *out = d * f32::from(scales[i / 16] as i8) * q as f32;
    }
}
