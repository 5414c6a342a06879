//! Encoders of the formats with super-blocks of 256 elements: Q2_K to Q6_K. Layouts are documented at the decoders of
//! `paguro_backend`.
//!
//! Each sub-block gets the best scale (and minimum) on its own. These are quantized, and the elements are rounded again with
//! the scales that a reader will compute.

use half::f16;

use crate::search::{Trials, WEIGHTED, affine, extreme, nearest, positive, symmetric, symmetric_by_descent};

/// Elements of a super-block.
const SUPER: usize = 256;

type Block = [f32; SUPER];
type Codes = [u8; SUPER];

fn blocks<'a>(
    values: &'a [f32],
    importance: Option<&'a [f32]>,
) -> impl Iterator<Item = (&'a Block, Option<&'a Block>)> {
    let importance = importance.map(|importance| importance.as_chunks().0);
    let blocks = values.as_chunks().0.iter().enumerate();
    blocks.map(move |(index, block)| (block, importance.map(|importance| &importance[index])))
}

fn sum_of_squares(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, x| sum + x * x)
}

fn sum(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, x| sum + x)
}

/// Weights of a sub-block: importance, times a magnitude that is never far below that of the super-block.
fn weights<const N: usize>(block: &[f32; N], importance: &[f32; N], mean: f32) -> [f32; N] {
    std::array::from_fn(|i| importance[i] * (mean + block[i] * block[i]).sqrt())
}

/// Stores an f16 and returns the number that it stands for.
fn half(value: f32) -> ([u8; 2], f32) {
    let half = f16::from_f32(value);
    (half.to_le_bytes(), half.to_f32())
}

/// Scales and minima of the sub-blocks of a super-block in Q2_K, Q4_K or Q5_K, before they are quantized.
struct SubBlocks<const COUNT: usize> {
    scales: [f32; COUNT],
    minima: [f32; COUNT],
    /// Sums of the weights, where an importance matrix gives them.
    weights: Option<[f32; COUNT]>,
    codes: Codes,
}

/// Quantized scales and minima, with their common factors as a reader has them.
struct Quantized<const COUNT: usize> {
    scales: [u8; COUNT],
    minima: [u8; COUNT],
    d: [u8; 2],
    d_min: [u8; 2],
}

impl<const COUNT: usize> SubBlocks<COUNT> {
    /// Quantizes to codes from 0 to `levels`, and rounds the elements again to codes from 0 to `last`.
    fn quantize<const N: usize>(&mut self, block: &Block, levels: i32, last: i32) -> Quantized<COUNT> {
        let mut quantized = Quantized { scales: [0; COUNT], minima: [0; COUNT], d: [0; 2], d_min: [0; 2] };
        let factor = |values: &[f32; COUNT], codes: &mut [u8; COUNT]| match &self.weights {
            Some(weights) => positive(values, weights, levels, codes),
            None => {
                let largest = values.iter().fold(0.0f32, |largest, &x| largest.max(x));
                let inverse = if largest > 0.0 { levels as f32 / largest } else { 0.0 };
                *codes = values.map(|x| nearest(inverse * x).clamp(0, levels) as u8);
                largest / levels as f32
            }
        };
        let (d, d_min);
        (quantized.d, d) = half(factor(&self.scales, &mut quantized.scales));
        (quantized.d_min, d_min) = half(factor(&self.minima, &mut quantized.minima));
        let (values, codes) = (block.as_chunks::<N>().0, self.codes.as_chunks_mut::<N>().0);
        for (index, (values, codes)) in values.iter().zip(codes).enumerate() {
            let scale = d * f32::from(quantized.scales[index]);
            if scale == 0.0 {
                continue;
            }
            let minimum = d_min * f32::from(quantized.minima[index]);
            *codes = values.map(|x| nearest((x + minimum) / scale).clamp(0, last) as u8);
        }
        quantized
    }
}

/// Encodes a row in Q2_K.
pub(crate) fn q2_k(values: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
    const PLAIN: Trials = Trials { from: -0.5, step: 0.1, steps: 15, absolute: true };
    for (block, importance) in blocks(values, importance) {
        let mut found = SubBlocks {
            scales: [0.0; 16],
            minima: [0.0; 16],
            weights: importance.map(|_| [0.0; 16]),
            codes: [0; SUPER],
        };
        let mean = sum_of_squares(block) / SUPER as f32;
        let codes = found.codes.as_chunks_mut::<16>().0;
        for (index, (part, codes)) in block.as_chunks::<16>().0.iter().zip(codes).enumerate() {
            let (weights, trials) = match importance {
                Some(importance) => (weights(part, &importance.as_chunks().0[index], mean), WEIGHTED),
                None => (part.map(f32::abs), PLAIN),
            };
            if let Some(sums) = &mut found.weights {
                sums[index] = sum(&weights);
            }
            (found.scales[index], found.minima[index]) = affine(part, &weights, 3, trials, codes);
        }
        let quantized = found.quantize::<16>(block, 15, 3);
        out.extend((0..16).map(|i| quantized.scales[i] | quantized.minima[i] << 4));
        pack_pairs(&found.codes, out);
        out.extend(quantized.d);
        out.extend(quantized.d_min);
    }
}

/// The lower two bits: element `128 * h + 32 * j + l` at bits `2j`, `2j + 1` of byte `32 * h + l`.
fn pack_pairs(codes: &Codes, out: &mut Vec<u8>) {
    let byte =
        |at: usize| (0..4).fold(0, |byte, j| byte | (codes[at / 32 * 128 + at % 32 + 32 * j] & 3) << (2 * j));
    out.extend((0..64).map(byte));
}

/// Encodes a row in Q3_K.
pub(crate) fn q3_k(values: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
    for (block, importance) in blocks(values, importance) {
        let mut codes: Codes = [0; SUPER];
        let (mut scales, mut sums) = ([0.0; 16], [0.0; 16]);
        let mean = 2.0 * sum_of_squares(block) / SUPER as f32;
        let parts = block.as_chunks::<16>().0;
        for (index, (part, codes)) in parts.iter().zip(codes.as_chunks_mut::<16>().0).enumerate() {
            scales[index] = match importance {
                Some(importance) => {
                    let weights = weights(part, &importance.as_chunks().0[index], mean);
                    sums[index] = sum(&weights);
                    symmetric(part, Some(&weights), 4, codes)
                }
                None => symmetric_by_descent(part, 4, codes),
            };
        }
        // Six bits each, zero at 32.
        let mut stored = [0; 16];
        let d = match importance {
            Some(_) => symmetric(&scales, Some(&sums), 32, &mut stored),
            None => {
                let largest = extreme(&scales);
                let inverse = if largest == 0.0 { 0.0 } else { -32.0 / largest };
                // Without any scale, the stored ones are zero and not 32: their factor is zero.
                if inverse != 0.0 {
                    stored = scales.map(|x| (nearest(inverse * x).clamp(-32, 31) + 32) as u8);
                }
                if inverse == 0.0 { 0.0 } else { 1.0 / inverse }
            }
        };
        let (d_bytes, d) = half(d);
        for (index, (part, codes)) in parts.iter().zip(codes.as_chunks_mut::<16>().0).enumerate() {
            let scale = d * f32::from(i16::from(stored[index]) - 32);
            if scale != 0.0 {
                *codes = part.map(|x| (nearest(x / scale).clamp(-4, 3) + 4) as u8);
            }
        }
        let high = |l: usize| (0..8).fold(0, |byte, bit| byte | (codes[32 * bit + l] >> 2 & 1) << bit);
        out.extend((0..32).map(high));
        pack_pairs(&codes, out);
        out.extend((0..8).map(|i| stored[i] & 0x0f | (stored[i + 8] & 0x0f) << 4));
        out.extend((0..4).map(|i| (0..4).fold(0, |byte, n| byte | (stored[i + 4 * n] >> 4) << (2 * n))));
        out.extend(d_bytes);
    }
}

/// Encodes a row in Q4_K or Q5_K: codes from 0 to `last`.
pub(crate) fn q4_k_or_q5_k(values: &[f32], importance: Option<&[f32]>, last: i32, out: &mut Vec<u8>) {
    let plain = match last {
        15 => Trials { from: -1.0, step: 0.1, steps: 20, absolute: false },
        _ => Trials { from: -0.5, step: 0.1, steps: 15, absolute: false },
    };
    for (block, importance) in blocks(values, importance) {
        let mut found = SubBlocks {
            scales: [0.0; 8],
            minima: [0.0; 8],
            weights: importance.map(|_| [0.0; 8]),
            codes: [0; SUPER],
        };
        let mean = 2.0 * sum_of_squares(block) / SUPER as f32;
        let codes = found.codes.as_chunks_mut::<32>().0;
        for (index, (part, codes)) in block.as_chunks::<32>().0.iter().zip(codes).enumerate() {
            let (weights, trials) = match importance {
                Some(importance) => (weights(part, &importance.as_chunks().0[index], mean), WEIGHTED),
                None => {
                    let magnitude = (sum_of_squares(part) / 32.0).sqrt();
                    (part.map(|x| magnitude + x.abs()), plain)
                }
            };
            if let Some(sums) = &mut found.weights {
                sums[index] = sum(&weights);
            }
            (found.scales[index], found.minima[index]) = affine(part, &weights, last, trials, codes);
        }
        let quantized = found.quantize::<32>(block, 63, last);
        out.extend(quantized.d);
        out.extend(quantized.d_min);
        let (scales, minima) = (&quantized.scales, &quantized.minima);
        out.extend((0..4).map(|i| scales[i] | scales[i + 4] >> 4 << 6));
        out.extend((0..4).map(|i| minima[i] | minima[i + 4] >> 4 << 6));
        out.extend((4..8).map(|i| scales[i] & 0x0f | (minima[i] & 0x0f) << 4));
        let codes = &found.codes;
        if last > 15 {
            out.extend((0..32).map(|l| (0..8).fold(0, |byte, s| byte | (codes[32 * s + l] >> 4) << s)));
        }
        let byte = |at: usize| {
            let low = at / 32 * 64 + at % 32;
            codes[low] & 0x0f | (codes[low + 32] & 0x0f) << 4
        };
        out.extend((0..128).map(byte));
    }
}

/// Encodes a row in Q6_K.
pub(crate) fn q6_k(values: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
    /// Bytes of a block.
    const BYTES: usize = 210;
    /// Scales below this are zero.
    const ZERO: f32 = 1e-15;
    for (block, importance) in blocks(values, importance) {
        let mut codes: Codes = [0; SUPER];
        let mut scales = [0.0; 16];
        let parts = block.as_chunks::<16>().0;
        for (index, (part, codes)) in parts.iter().zip(codes.as_chunks_mut::<16>().0).enumerate() {
            let weights = importance.map(|importance| importance.as_chunks::<16>().0[index].as_slice());
            scales[index] = symmetric(part, weights, 32, codes);
        }
        let largest = extreme(&scales);
        if largest.abs() < ZERO {
            out.resize(out.len() + BYTES, 0);
            continue;
        }
        let inverse = -128.0 / largest;
        let (d_bytes, d) = half(1.0 / inverse);
        let stored = scales.map(|x| nearest(inverse * x).clamp(-128, 127) as i8);
        for (index, (part, codes)) in parts.iter().zip(codes.as_chunks_mut::<16>().0).enumerate() {
            let scale = d * f32::from(stored[index]);
            if scale != 0.0 {
                *codes = part.map(|x| (nearest(x / scale).clamp(-32, 31) + 32) as u8);
            }
        }
        let low = |at: usize| {
            let first = at / 64 * 128 + at % 64;
            codes[first] & 0x0f | (codes[first + 64] & 0x0f) << 4
        };
        out.extend((0..128).map(low));
        let high = |at: usize| {
            (0..4).fold(0, |byte, j| byte | (codes[at / 32 * 128 + at % 32 + 32 * j] >> 4) << (2 * j))
        };
        out.extend((0..64).map(high));
        out.extend(stored.map(|scale| scale as u8));
        out.extend(d_bytes);
    }
}
