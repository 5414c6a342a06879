//! Encoders of the formats whose codes index a table of values: IQ4_NL, IQ4_XS, MXFP4. Layouts are documented at the decoders
//! of `paguro_backend`.

use half::f16;
use paguro_backend::format::{IQ4_VALUES, MXFP4_VALUES, e8m0_half};

use crate::search::{extreme, nearest};

/// Elements that share a scale.
const BLOCK: usize = 32;
/// Largest magnitude of a block that counts as zero.
const ZERO: f32 = 1e-15;
/// Scales that are tried on each side of the first one.
const TRIALS: i32 = 7;

/// Encodes a row in IQ4_NL.
pub(crate) fn iq4_nl(values: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
    for (index, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
        let importance = importance.map(|importance| &importance[index * BLOCK..][..BLOCK]);
        let mean = 2.0 * mean_square(block);
        let scale = best_scale(block, importance, mean);
        out.extend(f16::from_f32(scale).to_le_bytes());
        pack(&codes(block, scale), out);
    }
}

/// Encodes a row in IQ4_XS.
pub(crate) fn iq4_xs(values: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
    for (index, block) in values.as_chunks::<256>().0.iter().enumerate() {
        let importance = importance.map(|importance| &importance[index * 256..][..256]);
        let mean = 2.0 * mean_square(block);
        let parts = block.as_chunks::<BLOCK>().0;
        let scales: [f32; 8] = std::array::from_fn(|s| {
            best_scale(&parts[s], importance.map(|importance| &importance[s * BLOCK..][..BLOCK]), mean)
        });
        // The codes are rounded with the factor as computed, not with the f16 that is stored.
        let d = -extreme(&scales) / 32.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let stored = scales.map(|scale| nearest(inverse * scale).clamp(-32, 31));
        out.extend(f16::from_f32(d).to_le_bytes());
        let bits = stored.map(|scale| (scale + 32) as u16);
        let high = bits.iter().enumerate().fold(0, |high, (s, bits)| high | (bits >> 4) << (2 * s));
        out.extend(high.to_le_bytes());
        out.extend((0..4).map(|i| (bits[2 * i] & 0x0f | (bits[2 * i + 1] & 0x0f) << 4) as u8));
        for (part, scale) in parts.iter().zip(stored) {
            pack(&codes(part, d * scale as f32), out);
        }
    }
}

/// Finds the scale with the least weighted squared error. Without importance, each value's weight is its square.
fn best_scale(block: &[f32; BLOCK], importance: Option<&[f32]>, mean: f32) -> f32 {
    let largest = extreme(block);
    if largest.abs() < ZERO {
        return 0.0;
    }
    let weights: [f32; BLOCK] = std::array::from_fn(|i| {
        let square = block[i] * block[i];
        importance.map_or(square, |importance| importance[i] * (mean + square).sqrt())
    });
    let fit = |inverse: f32| {
        let (mut cross, mut square) = (0.0, 0.0);
        for (&x, weight) in block.iter().zip(weights) {
            let value = VALUES[closest(inverse * x)];
            cross += weight * value * x;
            square += weight * value * value;
        }
        (cross, square)
    };
    let first = f32::from(IQ4_VALUES[0]);
    let (cross, square) = fit(1.0 / (-largest / first));
    let mut scale = if square > 0.0 { cross / square } else { 0.0 };
    let mut best = scale * cross;
    for trial in -TRIALS..=TRIALS {
        let (cross, square) = fit((trial as f32 + first) / largest);
        if square > 0.0 && cross * cross > best * square {
            scale = cross / square;
            best = scale * cross;
        }
    }
    scale
}

fn codes(block: &[f32; BLOCK], scale: f32) -> [u8; BLOCK] {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    block.map(|x| closest(inverse * x) as u8)
}

/// Returns the index of the value of IQ4 that is closest to `x`, the upper one of two.
fn closest(x: f32) -> usize {
    // A binary search for the last value that is not above.
    let mut index = 0;
    for step in [8, 4, 2, 1] {
        index += if x >= VALUES[index + step] { step } else { 0 };
    }
    let next = (index + 1).min(15);
    if x - VALUES[index] < VALUES[next] - x { index } else { next }
}

/// [`IQ4_VALUES`] as floats.
const VALUES: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        values[i] = IQ4_VALUES[i] as f32;
        i += 1;
    }
    values
};

/// Elements `i` and `i + 16` in byte `i`.
fn pack(codes: &[u8; BLOCK], out: &mut Vec<u8>) {
    out.extend((0..BLOCK / 2).map(|i| codes[i] | codes[i + BLOCK / 2] << 4));
}

fn mean_square(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, x| sum + x * x) / values.len() as f32
}

/// Encodes blocks in MXFP4: the largest magnitude lies between 4 and 8 times the scale.
pub(crate) fn mxfp4(values: &[f32], out: &mut Vec<u8>) {
    for block in values.as_chunks::<BLOCK>().0 {
        let largest = extreme(block).abs();
        let exponent = match largest > 0.0 {
            true => (largest.log2().floor() as i32 - 2 + 127).clamp(0, 254) as u8,
            false => 0,
        };
        let scale = e8m0_half(exponent);
        out.push(exponent);
        let code = |x: f32| {
            let error = |code: usize| (f32::from(MXFP4_VALUES[code]) * scale - x).abs();
            (1..16).fold(0, |best, code| if error(code) < error(best) { code } else { best }) as u8
        };
        pack(&block.map(code), out);
    }
}
