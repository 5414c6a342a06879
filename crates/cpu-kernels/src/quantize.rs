//! Activations in eight bits: quantized once per row, shared by all matmuls of that row.
//!
//! *Ranged* activations are unsigned numbers of seven bits between the least and the largest of a block. With them, processors
//! without dot products of bytes need three instructions for 32 products with signed bytes instead of four, because sums of
//! pairs fit 16 bits. Encoders in Q8_0 use them on all processors.

use crate::simd::{LANES, Simd};

/// Inputs of one block.
pub const BLOCK: usize = 32;

/// 32 activations in one cache line, with all derived values that matmuls with quantized weights need.
///
/// `x[i] ≈ scale * quants[i]`, where `scale = max |x| / 127` is in single precision and quants are rounded to nearest
/// even. Of ranged activations, see [`range_row`].
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantBlock {
    /// Quants in `-127..=127`; ranged: in `0..=127`.
    pub quants: [i8; BLOCK],
    /// Scale of the quants.
    pub scale: f32,
    /// `scale * sum of quants`: the dot product with weights of one; ranged: the least activation.
    pub scaled_sum: f32,
    /// Minus the sum of the quants, for zero points; ranged: this and the following are zero.
    pub negative_sum: i32,
    /// Minus the sums of the halves, for formats with sub-blocks of 16.
    pub half_negative_sums: [i32; 2],
    /// `scale * sum of quants` of each half.
    pub half_scaled_sums: [f32; 2],
    /// [`Self::half_negative_sums`] again, side by side in 32 bits.
    pub half_negative_pair: [i16; 2],
}

impl QuantBlock {
    /// 32 zeros.
    pub const ZERO: Self = Self {
        quants: [0; BLOCK],
        scale: 0.0,
        scaled_sum: 0.0,
        negative_sum: 0,
        half_negative_sums: [0; 2],
        half_scaled_sums: [0.0; 2],
        half_negative_pair: [0; 2],
    };
}

/// Blocks of a quantized row of `cols` activations, padding included: a whole number of the longest super-blocks,
/// whatever format the weights have, and one more cache line, so that the same column of many rows does not fall
/// into the same cache set.
pub const fn row_blocks(cols: usize) -> usize {
    padded_blocks(cols) + 1
}

/// Number of blocks without the additional line.
const fn padded_blocks(cols: usize) -> usize {
    cols.div_ceil(256) * (256 / BLOCK)
}

/// Quantizes one row. `x` has any number of floats; `out` has [`row_blocks`] of them and is padded with zeros.
///
/// A row with an infinity or a NaN gives NaN in every matmul with that block, as in floats.
#[inline(always)]
pub fn quantize_row<S: Simd>(s: S, x: &[f32], out: &mut [QuantBlock]) {
    quantize_blocks::<S, false>(s, x, out);
}

/// Like [`quantize_row`] with ranged activations: `x[i] ≈ scaled_sum + scale * quants[i]`, where `scaled_sum` is the least of a
/// block and `scale = (max x - min x) / 127`.
#[inline(always)]
pub fn range_row<S: Simd>(s: S, x: &[f32], out: &mut [QuantBlock]) {
    quantize_blocks::<S, true>(s, x, out);
}

#[inline(always)]
fn quantize_blocks<S: Simd, const RANGED: bool>(s: S, x: &[f32], out: &mut [QuantBlock]) {
    assert!(out.len() * BLOCK >= x.len(), "{} blocks do not hold {} activations", out.len(), x.len());
    let (blocks, rest) = x.as_chunks::<BLOCK>();
    let (full, padding) = out.split_at_mut(blocks.len());
    for (x, out) in blocks.iter().zip(full) {
        quantize_either::<S, RANGED>(s, x, out);
    }
    padding.fill(QuantBlock::ZERO);
    if !rest.is_empty() {
        let mut x = [0.0; BLOCK];
        x[..rest.len()].copy_from_slice(rest);
        quantize_either::<S, RANGED>(s, &x, &mut padding[0]);
    }
}

#[inline(always)]
fn quantize_either<S: Simd, const RANGED: bool>(s: S, x: &[f32; BLOCK], out: &mut QuantBlock) {
    if RANGED { range_block(s, x, out) } else { quantize_block(s, x, out) }
}

#[inline(always)]
fn quantize_block<S: Simd>(s: S, x: &[f32; BLOCK], out: &mut QuantBlock) {
    let (low, high) = halves(x);
    let (low, high) = (s.load(low), s.load(high));
    let largest = s.reduce_max(s.max(s.abs(low), s.abs(high)));
    // The maximum above may drop a NaN; this product preserves it.
    let poison = s.reduce_sum(s.mul(s.add(low, high), s.zero()));
    let scale = largest / 127.0 + poison;
    // Below, the quotient would overflow; such activations are zeros to every model.
    let inverse = s.splat(if largest > 1e-35 { 127.0 / largest } else { 0.0 });
    let (low, high) = (s.to_i32(s.mul(low, inverse)), s.to_i32(s.mul(high, inverse)));
    let sums = [s.reduce_sum_i32(low), s.reduce_sum_i32(high)];
    let (low_out, high_out) = out.quants.split_at_mut(LANES);
    s.store_i8(low, low_out.first_chunk_mut().expect("half a block"));
    s.store_i8(high, high_out.first_chunk_mut().expect("half a block"));
    out.scale = scale;
    out.scaled_sum = scale * sums[0].wrapping_add(sums[1]) as f32;
    out.negative_sum = sums[0].wrapping_add(sums[1]).wrapping_neg();
    out.half_negative_sums = sums.map(i32::wrapping_neg);
    out.half_scaled_sums = sums.map(|sum| scale * sum as f32);
    // At most 16 * 127, or anything where the scale is not a number.
    out.half_negative_pair = sums.map(|sum| sum.wrapping_neg() as i16);
}

#[inline(always)]
fn range_block<S: Simd>(s: S, x: &[f32; BLOCK], out: &mut QuantBlock) {
    let (low, high) = halves(x);
    let (low, high) = (s.load(low), s.load(high));
    let largest = s.reduce_max(s.max(low, high));
    let least = -s.reduce_max(s.sub(s.zero(), s.min(low, high)));
    // Comparisons above may drop a NaN; this product preserves it, and makes one of an infinity.
    let poison = s.reduce_sum(s.mul(s.add(low, high), s.zero()));
    let range = largest - least;
    // Below, the quotient would overflow; such differences are zeros to every model.
    let inverse = s.splat(if range > 1e-35 { 127.0 / range } else { 0.0 });
    let first = s.splat(least);
    let low = s.to_i32(s.mul(s.sub(low, first), inverse));
    let high = s.to_i32(s.mul(s.sub(high, first), inverse));
    let (low_out, high_out) = out.quants.split_at_mut(LANES);
    s.store_i8(low, low_out.first_chunk_mut().expect("half a block"));
    s.store_i8(high, high_out.first_chunk_mut().expect("half a block"));
    *out = QuantBlock {
        quants: out.quants,
        scale: range / 127.0 + poison,
        scaled_sum: least,
        ..QuantBlock::ZERO
    };
}

#[inline(always)]
fn halves(x: &[f32; BLOCK]) -> (&[f32; LANES], &[f32; LANES]) {
    let (low, high) = x.split_at(LANES);
    (low.first_chunk().expect("half a block"), high.first_chunk().expect("half a block"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        isa::Isa,
        matrix::{Activations, MatrixKernels},
    };

    proptest! {
        #[test]
        fn rows_are_rounded_to_nearest_and_summed(
            x in prop::collection::vec(prop_oneof![-1000f32..1000.0, -1e-3f32..1e-3, Just(0.0)], 0..300),
        ) {
            let noise = QuantBlock { quants: [99; BLOCK], scale: 9.0, ..QuantBlock::ZERO };
            let mut first = None;
            for isa in Isa::supported() {
                let mut row = vec![noise; row_blocks(x.len())];
                MatrixKernels::new(isa, Activations::Signed).quantize_row(&x, &mut row);
                for (b, block) in row.iter().enumerate() {
                    let values: Vec<f32> = (0..BLOCK).map(|i| x.get(b * BLOCK + i).copied().unwrap_or(0.0)).collect();
                    let largest = values.iter().fold(0.0, |a: f32, x| a.max(x.abs()));
                    prop_assert_eq!(block.scale, largest / 127.0);
                    for (x, q) in values.iter().zip(block.quants) {
                        // Half a step, and a little for the quotient's own rounding.
                        let error = (f64::from(*x) - f64::from(block.scale) * f64::from(q)).abs();
                        prop_assert!(error <= 0.50002 * f64::from(block.scale), "{} as {}", x, q);
                        prop_assert!(q >= -127);
                    }
                    let sums: Vec<i32> =
                        block.quants.chunks(16).map(|half| half.iter().map(|&q| i32::from(q)).sum()).collect();
                    prop_assert_eq!(block.half_negative_sums.map(|x| -x).to_vec(), sums.clone());
                    prop_assert_eq!(block.half_negative_pair.map(i32::from), block.half_negative_sums);
                    prop_assert_eq!(-block.negative_sum, sums[0] + sums[1]);
                    prop_assert_eq!(block.scaled_sum, block.scale * (sums[0] + sums[1]) as f32);
                    let scaled: Vec<f32> = sums.iter().map(|&sum| block.scale * sum as f32).collect();
                    prop_assert_eq!(block.half_scaled_sums.to_vec(), scaled);
                }
                prop_assert_eq!(first.get_or_insert_with(|| row.clone()), &row, "{}", isa);
            }
        }
    }

    proptest! {
        #[test]
        fn ranged_rows_are_rounded_to_nearest(
            x in prop::collection::vec(prop_oneof![-1000f32..1000.0, 500f32..501.0, -1e-3f32..1e-3, Just(0.0)], 0..300),
        ) {
            let noise = QuantBlock { quants: [99; BLOCK], scale: 9.0, ..QuantBlock::ZERO };
            let mut first = None;
            for isa in Isa::supported() {
                let mut row = vec![noise; row_blocks(x.len())];
                MatrixKernels::new(isa, Activations::Ranged).quantize_row(&x, &mut row);
                for (b, block) in row.iter().enumerate() {
                    let values: Vec<f32> = (0..BLOCK).map(|i| x.get(b * BLOCK + i).copied().unwrap_or(0.0)).collect();
                    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
                    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    prop_assert_eq!((block.scaled_sum, block.scale), (least, (most - least) / 127.0));
                    for (x, q) in values.iter().zip(block.quants) {
                        let number = f64::from(block.scaled_sum) + f64::from(block.scale) * f64::from(q);
                        // Half a step, and a little for the rounding of the difference and the quotient.
                        let error = (f64::from(*x) - number).abs();
                        prop_assert!(error <= 0.5001 * f64::from(block.scale), "{} as {}", x, q);
                        prop_assert!(q >= 0);
                    }
                    let rest = QuantBlock { quants: [0; BLOCK], scale: 0.0, scaled_sum: 0.0, ..*block };
                    prop_assert_eq!(rest, QuantBlock::ZERO);
                }
                prop_assert_eq!(first.get_or_insert_with(|| row.clone()), &row, "{}", isa);
            }
        }
    }

    #[test]
    fn a_block_is_a_cache_line() {
        assert_eq!((size_of::<QuantBlock>(), align_of::<QuantBlock>()), (64, 64));
    }
}
