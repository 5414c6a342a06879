//! Pages of eight or four bits: integer dot products with the stored quants, four to a lane.
//!
//! Scores: queries are quantized, once per split, to eight bits with a scale per 32 dimensions, and a score is `Σ_block
//! dot(q, k) * (k scale * q scale)`, blocks in order.
//!
//! Weighted sums: a scale of V belongs to a token, and the sum is over tokens. So weights are first multiplied by the scales,
//! then quantized to `-127..=127`, with one step for the 64 tokens of [`CHUNK`] and 32 dimensions:
//! `sum += dot(weights, v) * step`. The step follows the largest product of weight and scale, so it is as fine as the
//! important tokens among the 64 allow, and the error of a token is at most half a step times its quants.
//!
//! Scales of eight-bit pages are not negative, so quantized weights are not either, and V's quants are the signed factor. Scales of
//! four-bit pages have a sign, and V's quants are stored raised by [`Q4_OFFSET`], which makes them the unsigned factor. Sums of
//! products start at minus the raise times the sum of the other factor.
//!
//! Dot products are exact, and both kinds of steps depend on one query and on absolute positions only. Tokens outside
//! of the mask have weight zero, which gives zero for any quants. So no bit depends on chunks or batch.

use std::ops::Range;

use half::f16;
use paguro_backend::KV_BLOCK;

use super::{CHUNK, GroupOrder, LANES, Row, SplitJob, Stored, partial_len};
use crate::{
    pages::{PageShape, Q4_OFFSET},
    quantize::{QuantBlock, quantize_row},
    simd::Simd,
};

/// Pages of quants with `BITS` bits, 8 or 4; see the [module](self).
pub(super) struct Quants<const BITS: usize>;

/// The largest quant of a weight: with signed quants of V, pairs of products fit 16 bits.
const MOST: f32 = 127.0;

impl<const BITS: usize> Stored for Quants<BITS> {
    type Query = QuantBlock;

    #[inline(always)]
    fn query<S: Simd>(
        s: S,
        job: &SplitJob<'_>,
        index: usize,
        quantized: &mut [QuantBlock],
    ) -> *const QuantBlock {
        quantize_row(s, job.query(index), quantized);
        quantized.as_ptr()
    }

    #[inline(always)]
    fn score<S: Simd, const Q: usize, const N: usize>(
        s: S,
        shape: &PageShape,
        order: GroupOrder<'_>,
        queries: &[*const QuantBlock; Q],
        tile: usize,
        scores: &mut [Row],
    ) {
        // Sums of a block are kept beside sums of all blocks, so only half as many tiles fit into the registers.
        let mut at = tile;
        if N == 4 || (N == 2 && Q <= 4) {
            while at + 2 <= tile + N {
                score_tiles::<S, BITS, Q, 2>(s, shape, order, queries, at, scores);
                at += 2;
            }
        }
        while at < tile + N {
            score_tiles::<S, BITS, Q, 1>(s, shape, order, queries, at, scores);
            at += 1;
        }
    }

    #[inline(always)]
    fn weigh<S: Simd, const Q: usize, const N: usize>(
        s: S,
        shape: &PageShape,
        order: GroupOrder<'_>,
        tiles: Range<usize>,
        _: &Range<usize>,
        weights: &[Row],
        partial: &mut [f32],
    ) {
        for block in 0..shape.blocks() {
            let quantized = &quantize_weights::<S, BITS, Q>(s, block, order, tiles.clone(), weights);
            let mut dim = block * KV_BLOCK;
            let end = shape.head_dim.next_multiple_of(LANES).min(dim + KV_BLOCK);
            if N >= 2 && dim + 2 * LANES == end {
                weigh_dims::<S, BITS, Q, 2>(s, shape, order, tiles.clone(), dim, quantized, partial);
                continue;
            }
            while dim < end {
                weigh_dims::<S, BITS, Q, 1>(s, shape, order, tiles.clone(), dim, quantized, partial);
                dim += LANES;
            }
        }
    }
}

/// [`Stored::score`] for `M` tiles.
#[inline(always)]
fn score_tiles<S: Simd, const BITS: usize, const Q: usize, const M: usize>(
    s: S,
    shape: &PageShape,
    order: GroupOrder<'_>,
    queries: &[*const QuantBlock; Q],
    tile: usize,
    scores: &mut [Row],
) {
    let (mut keys, mut prefetch) = ([std::ptr::null::<u8>(); M], [std::ptr::null(); M]);
    for m in 0..M {
        (keys[m], prefetch[m]) = order.keys(tile + m);
        prefetch_scales(s, shape, prefetch[m]);
    }
    let first = shape.scale_bytes();
    let mut sums = [[s.zero(); M]; Q];
    for block in 0..shape.blocks() {
        let dims = block * KV_BLOCK..shape.padded_dim().min((block + 1) * KV_BLOCK);
        // A cache line has as many dimensions of each of 16 tokens.
        let line_dims = 32 / BITS;
        let lines = dims.start / line_dims..dims.end / line_dims;
        let mut dots = [[s.splat_i32(0); M]; Q];
        for q in 0..Q {
            // SAFETY: queries have as many blocks as the shape says.
            let negative_sum = unsafe { &*queries[q].add(block) }.negative_sum;
            let start = match BITS {
                8 => s.dot4_offset_start(negative_sum),
                _ => s.splat_i32(i32::from(Q4_OFFSET) * negative_sum),
            };
            dots[q] = [start; M];
        }
        for (step, line) in lines.enumerate() {
            // SAFETY: a tile has its scales, then 64 bytes for each `line_dims` dimensions; a block has a quant for each
            // dimension.
            unsafe {
                for m in 0..M {
                    let at = first + 64 * line;
                    s.prefetch(prefetch[m].wrapping_add(at));
                    let k = s.load_u8(&*keys[m].add(at).cast());
                    if BITS == 8 {
                        for q in 0..Q {
                            let quad = &*(*queries[q].add(block)).quants.as_ptr().add(4 * step).cast();
                            dots[q][m] = s.dot4_offset(dots[q][m], k, quad);
                        }
                    } else {
                        let (low, high) = (s.bits_u8(k, 0, 15), s.bits_u8(k, 4, 15));
                        for q in 0..Q {
                            let quads = (*queries[q].add(block)).quants.as_ptr().add(8 * step);
                            let first = s.dot4(dots[q][m], low, &*quads.cast());
                            dots[q][m] = s.dot4(first, high, &*quads.add(4).cast());
                        }
                    }
                }
            }
        }
        for m in 0..M {
            let scales = scales(s, keys[m], block);
            for q in 0..Q {
                // SAFETY: as above.
                let scale = s.splat(unsafe { &*queries[q].add(block) }.scale);
                sums[q][m] = s.fma(s.to_f32(dots[q][m]), s.mul(scales, scale), sums[q][m]);
            }
        }
    }
    for q in 0..Q {
        let out = scores[q].as_chunks_mut::<LANES>().0;
        for m in 0..M {
            s.store(sums[q][m], &mut out[tile + m]);
        }
    }
}

/// The scales of a block, of 16 tokens.
#[inline(always)]
fn scales<S: Simd>(s: S, tile: *const u8, block: usize) -> S::F32 {
    // SAFETY: a tile begins with 16 scales for each block.
    s.from_f16(unsafe { &*tile.cast::<[f16; LANES]>().add(block) })
}

/// Prefetches the scales of a tile.
#[inline(always)]
fn prefetch_scales<S: Simd>(s: S, shape: &PageShape, tile: *const u8) {
    for line in 0..shape.scale_bytes() / 64 {
        s.prefetch(tile.wrapping_add(64 * line));
    }
}

/// Weights times the scales of V in one block of dimensions.
#[repr(align(64))]
struct QuantizedWeights<const Q: usize> {
    quants: [[i8; CHUNK * LANES]; Q],
    /// The value of a quant of one.
    steps: [f32; Q],
    /// The first summand of dot products with V's quants.
    starts: [i32; Q],
}

#[inline(always)]
fn quantize_weights<S: Simd, const BITS: usize, const Q: usize>(
    s: S,
    block: usize,
    order: GroupOrder<'_>,
    tiles: Range<usize>,
    weights: &[Row],
) -> QuantizedWeights<Q> {
    let mut out = QuantizedWeights { quants: [[0; CHUNK * LANES]; Q], steps: [0.0; Q], starts: [0; Q] };
    let mut v_scales = [s.zero(); CHUNK];
    for (tile, v_scales) in tiles.clone().zip(&mut v_scales) {
        *v_scales = scales(s, order.values(tile).0, block);
    }
    for q in 0..Q {
        let rows = weights[q].as_chunks::<LANES>().0;
        let mut products = [s.zero(); CHUNK];
        let mut largest = s.zero();
        for (i, tile) in tiles.clone().enumerate() {
            products[i] = s.mul(s.load(&rows[tile]), v_scales[i]);
            largest = s.max(if BITS == 8 { products[i] } else { s.abs(products[i]) }, largest);
        }
        let largest = s.reduce_max(largest);
        // Below, the quotient would overflow; such weights are zeros next to any others.
        let inverse = s.splat(if largest > 1e-35 { MOST / largest } else { 0.0 });
        let mut sum = s.splat_i32(0);
        for (i, quants) in out.quants[q].as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            // The product of an unused token slot may be no number. Its quant is zero, whatever its other bits are.
            s.store_i8(s.to_i32(s.mul(products[i], inverse)), quants);
            sum = s.add_i32(sum, s.from_i8(quants));
        }
        if BITS == 4 {
            out.starts[q] = -i32::from(Q4_OFFSET) * s.reduce_sum_i32(sum);
        }
        out.steps[q] = largest / MOST;
    }
    out
}

/// [`Stored::weigh`] for `16 * M` dimensions from `dim` on, of one block.
#[inline(always)]
fn weigh_dims<S: Simd, const BITS: usize, const Q: usize, const M: usize>(
    s: S,
    shape: &PageShape,
    order: GroupOrder<'_>,
    tiles: Range<usize>,
    dim: usize,
    weights: &QuantizedWeights<Q>,
    partial: &mut [f32],
) {
    let (width, stride) = (shape.padded_dim(), partial_len(shape.head_dim));
    assert!(partial.len() >= Q * stride && dim + M * LANES <= width && tiles.len() <= CHUNK);
    // Bytes of four tokens, and the first of these dimensions among them. With four bits, 16 dimensions share bytes with the next 16.
    let four_bytes = width * BITS / 2;
    let first = shape.scale_bytes() + if BITS == 8 { 4 * dim } else { dim / KV_BLOCK * 4 * LANES };
    let mut dots = [[s.splat_i32(0); M]; Q];
    if BITS == 4 {
        for q in 0..Q {
            dots[q] = [s.splat_i32(weights.starts[q]); M];
        }
    }
    for (i, tile) in tiles.enumerate() {
        let (values, prefetch) = order.values(tile);
        if dim == 0 {
            prefetch_scales(s, shape, prefetch);
        }
        for four in 0..LANES / 4 {
            let at = first + four * four_bytes;
            // SAFETY: a tile has its scales, then `four_bytes` for each four tokens; there are weights for all tokens of
            // `CHUNK` tiles.
            unsafe {
                let mut v = [s.splat_u8(0); M];
                if BITS == 8 {
                    for m in 0..M {
                        s.prefetch(prefetch.wrapping_add(at + 64 * m));
                        v[m] = s.load_u8(&*values.add(at + 64 * m).cast());
                    }
                } else {
                    s.prefetch(prefetch.wrapping_add(at));
                    let both = s.load_u8(&*values.add(at).cast());
                    for m in 0..M {
                        let is_high = (dim / LANES + m) % 2 == 1;
                        v[m] = if is_high { s.bits_u8(both, 4, 15) } else { s.bits_u8(both, 0, 15) };
                    }
                }
                for q in 0..Q {
                    let quad = &*weights.quants[q].as_ptr().add(LANES * i + 4 * four).cast();
                    for m in 0..M {
                        dots[q][m] = match BITS {
                            8 => s.dot4_i8(dots[q][m], v[m], quad),
                            _ => s.dot4(dots[q][m], v[m], quad),
                        };
                    }
                }
            }
        }
    }
    for q in 0..Q {
        let step = s.splat(weights.steps[q]);
        let sums = partial[q * stride + LANES + dim..][..M * LANES].as_chunks_mut::<LANES>().0;
        for m in 0..M {
            s.store(s.fma(s.to_f32(dots[q][m]), step, s.load(&sums[m])), &mut sums[m]);
        }
    }
}
