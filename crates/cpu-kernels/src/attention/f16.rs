//! Half precision: converted to single, which sums are in. A score, and a dimension of a weighted sum, is one chain of fused
//! multiply-adds.

#![allow(clippy::needless_range_loop)] // register tiles read best as indices

use std::ops::Range;

use half::f16;

use super::{CHUNK, GroupOrder, LANES, Row, SplitJob, Stored, partial_len};
use crate::{pages::PageShape, quantize::QuantBlock, simd::Simd};

/// See the [module](self).
pub(super) struct F16;

impl Stored for F16 {
    type Query = f32;

    #[inline(always)]
    fn query<S: Simd>(_: S, job: &SplitJob<'_>, index: usize, _: &mut [QuantBlock]) -> *const f32 {
        job.query(index).as_ptr()
    }

    #[inline(always)]
    fn score<S: Simd, const Q: usize, const N: usize>(
        s: S,
        shape: &PageShape,
        order: GroupOrder<'_>,
        queries: &[*const f32; Q],
        tile: usize,
        scores: &mut [Row],
    ) {
        let head_dim = shape.head_dim;
        let (mut keys, mut prefetch) = ([std::ptr::null::<f16>(); N], [std::ptr::null(); N]);
        for n in 0..N {
            let (key, next) = order.keys(tile + n);
            (keys[n], prefetch[n]) = (key.cast(), next);
        }
        let mut sums = [[s.zero(); N]; Q];
        for pair in 0..head_dim / 2 {
            for n in 0..N {
                // Two dimensions of 16 tokens are a cache line.
                s.prefetch(prefetch[n].wrapping_add(64 * pair));
            }
            for dim in [2 * pair, 2 * pair + 1] {
                // SAFETY: queries have `head_dim` elements, keys 16 for each of them; `head_dim` is even.
                unsafe {
                    let mut k = [s.zero(); N];
                    for n in 0..N {
                        k[n] = s.from_f16(&*keys[n].add(dim * LANES).cast());
                    }
                    for q in 0..Q {
                        let x = s.splat(*queries[q].add(dim));
                        for n in 0..N {
                            sums[q][n] = s.fma(x, k[n], sums[q][n]);
                        }
                    }
                }
            }
        }
        for q in 0..Q {
            let out = scores[q].as_chunks_mut::<LANES>().0;
            for n in 0..N {
                s.store(sums[q][n], &mut out[tile + n]);
            }
        }
    }

    #[inline(always)]
    fn weigh<S: Simd, const Q: usize, const N: usize>(
        s: S,
        shape: &PageShape,
        order: GroupOrder<'_>,
        tiles: Range<usize>,
        seen: &Range<usize>,
        weights: &[Row],
        partial: &mut [f32],
    ) {
        let width = shape.padded_dim();
        let mut token_tiles = [TokenTile::NONE; CHUNK];
        for (tile, token_tile) in tiles.zip(&mut token_tiles) {
            let (values, prefetch) = order.values(tile);
            let start = tile * LANES;
            let (first, end) = (start.max(seen.start), (start + LANES).min(seen.end));
            *token_tile = TokenTile { values: values.cast(), prefetch, start, first, end };
        }
        let mut dim = 0;
        while dim + N * LANES <= width {
            weigh_dims::<S, Q, N>(s, width, dim, &token_tiles, weights, partial);
            dim += N * LANES;
        }
        while dim < width {
            weigh_dims::<S, Q, 1>(s, width, dim, &token_tiles, weights, partial);
            dim += LANES;
        }
    }
}

/// 16 tokens, or those of them that are seen.
#[derive(Clone, Copy)]
struct TokenTile {
    /// `[16][width]`
    values: *const f16,
    prefetch: *const u8,
    first: usize,
    end: usize,
    /// First of the 16.
    start: usize,
}

impl TokenTile {
    const NONE: Self =
        Self { values: std::ptr::null(), prefetch: std::ptr::null(), first: 0, end: 0, start: 0 };
}

/// [`F16::weigh`] for `16 * N` dimensions from `dim` on.
#[inline(always)]
fn weigh_dims<S: Simd, const Q: usize, const N: usize>(
    s: S,
    width: usize, // of a head, in whole vectors
    dim: usize,
    tiles: &[TokenTile; CHUNK],
    weights: &[Row],
    partial: &mut [f32],
) {
    let stride = partial_len(width);
    assert!(partial.len() >= Q * stride && dim + N * LANES <= width);
    let sums_at = partial.as_mut_ptr().wrapping_add(LANES + dim);
    let mut sums = [[s.zero(); N]; Q];
    for q in 0..Q {
        for n in 0..N {
            // SAFETY: a partial result is 16 + width floats, and there are `Q`, asserted above.
            sums[q][n] = s.load(unsafe { &*sums_at.add(q * stride + n * LANES).cast() });
        }
    }
    for tile in tiles {
        for token in tile.first..tile.end {
            let offset = (token - tile.start) * width + dim;
            for line in 0..N.div_ceil(2) {
                s.prefetch(tile.prefetch.wrapping_add(2 * offset + 64 * line));
            }
            // SAFETY: these 16 tokens have `width` values each; a row of weights has all tokens of a split.
            unsafe {
                let values = tile.values.add(offset);
                let mut v = [s.zero(); N];
                for n in 0..N {
                    v[n] = s.from_f16(&*values.add(n * LANES).cast());
                }
                for q in 0..Q {
                    let weight = s.splat(*weights[q].get_unchecked(token));
                    for n in 0..N {
                        sums[q][n] = s.fma(weight, v[n], sums[q][n]);
                    }
                }
            }
        }
    }
    for q in 0..Q {
        for n in 0..N {
            // SAFETY: as above.
            s.store(sums[q][n], unsafe { &mut *sums_at.add(q * stride + n * LANES).cast() });
        }
    }
}
