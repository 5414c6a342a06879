//! Encoders of the formats with one scale for 32 elements, and of the ternary ones. Layouts are documented at the decoders of
//! `paguro_backend`.

use half::f16;
use paguro_backend::WeightFormat;

use crate::search::{WEIGHTED, affine, extreme, symmetric};

/// Elements of a block.
const BLOCK: usize = 32;

/// Encodes a row in Q4_0 or Q5_0: codes from `-half` to `half - 1`.
pub(crate) fn signed(values: &[f32], importance: Option<&[f32]>, half: i32, out: &mut Vec<u8>) {
    let mean = mean_square(values);
    for (index, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
        let mut codes = [0; BLOCK];
        let scale = match importance {
            Some(importance) => {
                let weights = weights(block, &importance[index * BLOCK..], mean);
                symmetric(block, Some(&weights), half, &mut codes)
            }
            None => {
                let scale = extreme(block) / -half as f32;
                let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                let (zero, last) = (half as f32 + 0.5, (2 * half - 1) as u8);
                codes = block.map(|x| ((x * inverse + zero) as u8).min(last));
                scale
            }
        };
        out.extend(f16::from_f32(scale).to_le_bytes());
        pack(&codes, half > 8, out);
    }
}

/// Encodes a row in Q4_1 or Q5_1: codes from 0 to `levels`, and a minimum.
pub(crate) fn unsigned(values: &[f32], importance: Option<&[f32]>, levels: i32, out: &mut Vec<u8>) {
    let mean = mean_square(values);
    for (index, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
        let mut codes = [0; BLOCK];
        let (scale, low) = match importance {
            Some(importance) => {
                let weights = weights(block, &importance[index * BLOCK..], mean);
                let (scale, minimum) = affine(block, &weights, levels, WEIGHTED, &mut codes);
                (scale, -minimum)
            }
            None => {
                let low = block.iter().copied().fold(f32::MAX, f32::min);
                let high = block.iter().copied().fold(-f32::MAX, f32::max);
                let scale = (high - low) / levels as f32;
                let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                codes = block.map(|x| (((x - low) * inverse + 0.5) as u8).min(levels as u8));
                (scale, low)
            }
        };
        out.extend(f16::from_f32(scale).to_le_bytes());
        out.extend(f16::from_f32(low).to_le_bytes());
        pack(&codes, levels > 15, out);
    }
}

/// The fifth bits, if there are any, then the lower four of elements `i` and `i + 16` in byte `i`.
fn pack(codes: &[u8; BLOCK], fifth: bool, out: &mut Vec<u8>) {
    if fifth {
        let high =
            codes.iter().enumerate().fold(0u32, |high, (i, &code)| high | u32::from(code >> 4 & 1) << i);
        out.extend(high.to_le_bytes());
    }
    out.extend((0..BLOCK / 2).map(|i| codes[i] & 0x0f | (codes[i + BLOCK / 2] & 0x0f) << 4));
}

fn mean_square(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, x| sum + x * x) / values.len() as f32
}

fn weights(block: &[f32; BLOCK], importance: &[f32], mean: f32) -> [f32; BLOCK] {
    std::array::from_fn(|i| importance[i] * (mean + block[i] * block[i]).sqrt())
}

/// Encodes blocks of 256 in TQ1_0 or TQ2_0: -1, 0 or 1 times the largest magnitude.
pub(crate) fn ternary(format: WeightFormat, values: &[f32], out: &mut Vec<u8>) {
    for block in values.as_chunks::<256>().0 {
        let largest = extreme(block).abs();
        let inverse = if largest == 0.0 { 0.0 } else { 1.0 / largest };
        let trits = block.map(|x| ((x * inverse).round() as i32 + 1) as u8);
        if format == WeightFormat::TQ2_0 {
            let byte = |at: usize| {
                (0..4).fold(0, |byte, n| byte | trits[at / 32 * 128 + at % 32 + 32 * n] << (2 * n))
            };
            out.extend((0..64).map(byte));
        } else {
            // Five trits in a byte, as a fraction of 256; the last four bytes have four trits each.
            let byte = |first: usize, step: usize, count: usize| {
                let number = (0..5).fold(0u16, |number, n| {
                    number * 3 + if n < count { u16::from(trits[first + step * n]) } else { 0 }
                });
                (number * 256).div_ceil(243) as u8
            };
            out.extend((0..32).map(|i| byte(i, 32, 5)));
            out.extend((0..16).map(|i| byte(160 + i, 16, 5)));
            out.extend((0..4).map(|i| byte(240 + i, 4, 4)));
        }
        out.extend(f16::from_f32(largest).to_le_bytes());
    }
}

/// Encodes blocks of 128 in Q1_0: signs, times the mean magnitude.
pub(crate) fn q1_0(values: &[f32], out: &mut Vec<u8>) {
    for block in values.as_chunks::<128>().0 {
        let scale = block.iter().fold(0.0, |sum, x| sum + x.abs()) / 128.0;
        out.extend(f16::from_f32(scale).to_le_bytes());
        let byte = |bits: &[f32; 8]| bits.iter().rev().fold(0, |byte, &x| byte << 1 | u8::from(x >= 0.0));
        out.extend(block.as_chunks::<8>().0.iter().map(byte));
    }
}

/// Encodes blocks of 64 in Q2_0: -1, 0, 1 or 2 times the largest magnitude.
pub(crate) fn q2_0(values: &[f32], out: &mut Vec<u8>) {
    for block in values.as_chunks::<64>().0 {
        let largest = extreme(block).abs();
        let inverse = if largest == 0.0 { 0.0 } else { 1.0 / largest };
        out.extend(f16::from_f32(largest).to_le_bytes());
        let code = |x: f32| ((x * inverse).round() as i32 + 1).clamp(0, 3) as u8;
        let byte = |four: &[f32; 4]| four.iter().rev().fold(0, |byte, &x| byte << 2 | code(x));
        out.extend(block.as_chunks::<4>().0.iter().map(byte));
    }
}
