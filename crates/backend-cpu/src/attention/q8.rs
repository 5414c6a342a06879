//! Eight bits: integer dot products with the stored quants, four to a lane.
//!
//! Scores: queries are quantized, once per split, to eight bits with a scale per 32 dimensions, and a score is `Σ_block
//! dot(q, k) * (k scale * q scale)`, blocks in order.
//!
//! Weighted sums: a scale of V belongs to a token, and the sum is over tokens. So weights are first multiplied by the
//! scales, then quantized to seven bits (they are not negative), with one step for the 64 tokens of [`TURN`] and 32
//! dimensions: `sum += dot(weights, v) * step`. The step is derived from the largest product of weight and scale, so
//! its precision is that of the most important of the 64 tokens, and the error of a token is at most half a step times
//! its quants.
//!
//! Dot products are exact, and both kinds of steps depend on one query and on absolute positions only. Tokens outside
//! of the mask have weight zero, which gives zero for any quants. So no bit depends on chunks or batch.

use std::ops::Range;

use half::f16;
use paguro_backend::KV_BLOCK;

use super::{LANES, PartWalk, Row, SplitJob, Stored, TURN, partial_len};
use crate::{
    pages::PageShape,
    quantize::{QuantBlock, quantize_row},
    simd::Simd,
};

/// See the [module](self).
pub(super) struct Q8;

/// The largest quant of a weight: with signed quants of V, pairs of products fit 16 bits.
const MOST: f32 = 127.0;

impl Stored for Q8 {
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
        walk: PartWalk<'_>,
        queries: &[*const QuantBlock; Q],
        tile: usize,
        scores: &mut [Row],
    ) {
        // Sums of a block are kept beside sums of all blocks, so only half as many tiles fit into the registers.
        let mut at = tile;
        if N == 4 || (N == 2 && Q <= 4) {
            while at + 2 <= tile + N {
                score_tiles::<S, Q, 2>(s, shape, walk, queries, at, scores);
                at += 2;
            }
        }
        while at < tile + N {
            score_tiles::<S, Q, 1>(s, shape, walk, queries, at, scores);
            at += 1;
        }
    }

    #[inline(always)]
    fn weigh<S: Simd, const Q: usize, const N: usize>(
        s: S,
        shape: &PageShape,
        walk: PartWalk<'_>,
        tiles: Range<usize>,
        _: &Range<usize>,
        weights: &[Row],
        partial: &mut [f32],
    ) {
        for block in 0..shape.blocks() {
            let quantized = &quantize_weights::<S, Q>(s, block, walk, tiles.clone(), weights);
            let mut dim = block * KV_BLOCK;
            let end = shape.padded_dim().min(dim + KV_BLOCK);
            if N >= 2 && dim + 2 * LANES == end {
                weigh_dims::<S, Q, 2>(s, shape, walk, tiles.clone(), dim, quantized, partial);
                continue;
            }
            while dim < end {
                weigh_dims::<S, Q, 1>(s, shape, walk, tiles.clone(), dim, quantized, partial);
                dim += LANES;
            }
        }
    }
}

/// [`Q8::score`] for `M` tiles.
#[inline(always)]
fn score_tiles<S: Simd, const Q: usize, const M: usize>(
    s: S,
    shape: &PageShape,
    walk: PartWalk<'_>,
    queries: &[*const QuantBlock; Q],
    tile: usize,
    scores: &mut [Row],
) {
    let (mut keys, mut ahead) = ([std::ptr::null::<u8>(); M], [std::ptr::null(); M]);
    for m in 0..M {
        (keys[m], ahead[m]) = walk.keys(tile + m);
        prefetch_scales(s, shape, ahead[m]);
    }
    let first = shape.scale_bytes();
    let mut sums = [[s.zero(); M]; Q];
    for block in 0..shape.blocks() {
        let lines = block * KV_BLOCK / 4..shape.padded_dim().min((block + 1) * KV_BLOCK) / 4;
        let mut dots = [[s.splat_i32(0); M]; Q];
        for q in 0..Q {
            // SAFETY: queries have as many blocks as the shape says.
            dots[q] = [s.dot4_offset_start(unsafe { &*queries[q].add(block) }.negative_sum); M];
        }
        for (step, line) in lines.enumerate() {
            // SAFETY: a tile has its scales, then 64 bytes for each four dimensions; a block has a quant for each
            // dimension.
            unsafe {
                for m in 0..M {
                    let at = first + 64 * line;
                    s.prefetch(ahead[m].wrapping_add(at));
                    let k = s.load_u8(&*keys[m].add(at).cast());
                    for q in 0..Q {
                        let quad = &*(*queries[q].add(block)).quants.as_ptr().add(4 * step).cast();
                        dots[q][m] = s.dot4_offset(dots[q][m], k, quad);
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

/// Asks for the scales of a tile.
#[inline(always)]
fn prefetch_scales<S: Simd>(s: S, shape: &PageShape, tile: *const u8) {
    for line in 0..shape.scale_bytes() / 64 {
        s.prefetch(tile.wrapping_add(64 * line));
    }
}

/// Weights times the scales of V in one block of dimensions.
#[repr(align(64))]
struct QuantizedWeights<const Q: usize> {
    quants: [[i8; TURN * LANES]; Q],
    /// Step of the quants.
    steps: [f32; Q],
}

#[inline(always)]
fn quantize_weights<S: Simd, const Q: usize>(
    s: S,
    block: usize,
    walk: PartWalk<'_>,
    tiles: Range<usize>,
    weights: &[Row],
) -> QuantizedWeights<Q> {
    let mut out = QuantizedWeights { quants: [[0; TURN * LANES]; Q], steps: [0.0; Q] };
    let mut v_scales = [s.zero(); TURN];
    for (tile, v_scales) in tiles.clone().zip(&mut v_scales) {
        *v_scales = scales(s, walk.values(tile).0, block);
    }
    for q in 0..Q {
        let rows = weights[q].as_chunks::<LANES>().0;
        let mut products = [s.zero(); TURN];
        let mut largest = s.zero();
        for (i, tile) in tiles.clone().enumerate() {
            products[i] = s.mul(s.load(&rows[tile]), v_scales[i]);
            largest = s.max(products[i], largest);
        }
        let largest = s.reduce_max(largest);
        // Below, the quotient would overflow; such weights are zeros next to any others.
        let inverse = s.splat(if largest > 1e-35 { MOST / largest } else { 0.0 });
        for (i, quants) in out.quants[q].as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            s.store_i8(s.to_i32(s.mul(products[i], inverse)), quants);
        }
        out.steps[q] = largest / MOST;
    }
    out
}

/// [`Q8::weigh`] for `16 * M` dimensions from `dim` on, of one block.
#[inline(always)]
fn weigh_dims<S: Simd, const Q: usize, const M: usize>(
    s: S,
    shape: &PageShape,
    walk: PartWalk<'_>,
    tiles: Range<usize>,
    dim: usize,
    weights: &QuantizedWeights<Q>,
    partial: &mut [f32],
) {
    let (width, stride) = (shape.padded_dim(), partial_len(shape.head_dim));
    assert!(partial.len() >= Q * stride && dim + M * LANES <= width && tiles.len() <= TURN);
    let first = shape.scale_bytes() + 4 * dim;
    let mut dots = [[s.splat_i32(0); M]; Q];
    for (i, tile) in tiles.enumerate() {
        let (values, ahead) = walk.values(tile);
        if dim == 0 {
            prefetch_scales(s, shape, ahead);
        }
        for four in 0..LANES / 4 {
            let at = first + 4 * four * width;
            // SAFETY: a tile has its scales, then four bytes for each dimension and four tokens; there are weights for
            // all tokens of `TURN` tiles.
            unsafe {
                let mut v = [s.splat_u8(0); M];
                for m in 0..M {
                    s.prefetch(ahead.wrapping_add(at + 64 * m));
                    v[m] = s.load_u8(&*values.add(at + 64 * m).cast());
                }
                for q in 0..Q {
                    let quad = &*weights.quants[q].as_ptr().add(LANES * i + 4 * four).cast();
                    for m in 0..M {
                        dots[q][m] = s.dot4_i8(dots[q][m], v[m], quad);
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
