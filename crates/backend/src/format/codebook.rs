//! Formats whose four bits index a table of values: IQ4_NL, IQ4_XS, MXFP4, NVFP4.
//!
//! In groups of 32 (NVFP4: of 16), element `i` is the low half of byte `i` and element `i + 16` (`i + 8`) its high half.

use super::half_at;

/// The values of IQ4_NL and IQ4_XS (`kvalues_iq4nl` in ggml): denser around zero, where weights are.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Values of MXFP4: twice the E2M1 numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; [`e8m0_half`] halves the
/// scale.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// ```text
/// block_iq4_nl, 18 bytes: d: f16 | qs: [u8; 16]
/// w = d * value[q]
/// ```
pub(super) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    look_up(&block[2..], &IQ4_VALUES, half_at(block, 0), out);
}

/// ```text
/// block_iq4_xs, 136 bytes: d: f16 | scales_h: u16 | scales_l: [u8; 4] | qs: [u8; 128]
/// 8 sub-blocks of 32 with six-bit scales, zero at 32: the low four bits of scale s are in scales_l[s / 2] (low
/// half for even s), the high two are bits 2s, 2s+1 of scales_h
/// w = d * (scale - 32) * value[q]
/// ```
pub(super) fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    let scales_high = u16::from_le_bytes([block[2], block[3]]);
    let (scales_low, quants) = (&block[4..8], &block[8..]);
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = scales_low[s / 2] >> (s % 2 * 4) & 0x0f;
        let high = (scales_high >> (2 * s) & 3) as u8;
        let scale = i32::from(low | high << 4) - 32;
        look_up(&quants[16 * s..][..16], &IQ4_VALUES, d * scale as f32, out);
    }
}

/// ```text
/// block_mxfp4, 17 bytes: e: u8 | qs: [u8; 16]
/// w = 2^(e - 127) * E2M1(q)
/// ```
/// The microscaling format of the Open Compute Project (MX v1.0). Like ggml, the exponent 255, which that standard
/// makes a NaN, is read as a number.
pub(super) fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    look_up(&block[1..], &MXFP4_VALUES, e8m0_half(block[0]), out);
}

/// Returns half of `2^(e - 127)`: the scale for the doubled [`MXFP4_VALUES`].
pub fn e8m0_half(e: u8) -> f32 {
    // 2^-128 and 2^-127 are subnormal.
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 })
}

/// ```text
/// block_nvfp4, 36 bytes: scales: [u8; 4] | qs: [u8; 32]
/// 4 sub-blocks of 16 with E4M3 scales
/// w = scale * E2M1(q)
/// ```
pub(super) fn nvfp4(block: &[u8; 36], out: &mut [f32; 64]) {
    for (s, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = e4m3_half(block[s]);
        for (i, &byte) in block[4 + 8 * s..][..8].iter().enumerate() {
            out[i] = scale * f32::from(MXFP4_VALUES[usize::from(byte & 0x0f)]);
            out[i + 8] = scale * f32::from(MXFP4_VALUES[usize::from(byte >> 4)]);
        }
    }
}

/// ```text
/// 40 bytes: whole: f32 | block_nvfp4
/// w = whole * scale * E2M1(q)
/// ```
/// NVFP4 with the scale of the whole matrix, which files store in a separate tensor; each block contains it.
pub(super) fn nvfp4_scaled(block: &[u8; 40], out: &mut [f32; 64]) {
    let whole = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    for (s, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = whole * e4m3_half(block[4 + s]);
        for (i, &byte) in block[8 + 8 * s..][..8].iter().enumerate() {
            out[i] = scale * f32::from(MXFP4_VALUES[usize::from(byte & 0x0f)]);
            out[i + 8] = scale * f32::from(MXFP4_VALUES[usize::from(byte >> 4)]);
        }
    }
}

/// Returns half of an E4M3 number without its sign: the scale for the doubled [`MXFP4_VALUES`]. As in ggml, 0x7F (NaN
/// in the standard) is zero.
pub fn e4m3_half(e: u8) -> f32 {
    if e == 0x7f {
        return 0.0;
    }
    // The bits of an f32 that is too small by a factor of 2^120, including subnormals.
    f32::from_bits(u32::from(e & 0x7f) << 20) * f32::from_bits((127 + 119) << 23)
}

fn look_up(bytes: &[u8], values: &[i8; 16], scale: f32, out: &mut [f32; 32]) {
    for (i, &byte) in bytes.iter().enumerate() {
        out[i] = scale * f32::from(values[usize::from(byte & 0x0f)]);
        out[i + 16] = scale * f32::from(values[usize::from(byte >> 4)]);
    }
}
