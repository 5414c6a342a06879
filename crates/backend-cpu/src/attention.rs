//! Attention over pages: the kernels walk the block table, and every K/V vector that is loaded serves all query heads
//! of its K/V head and all rows of the tile.
//!
//! Prefill and decode are one algorithm, and what is computed for a query depends on absolute positions alone. The
//! context is cut at multiples of [`SPLIT`] tokens. For each split, [`AttentionKernels::attend_split`] computes the
//! scores of a tile of queries (tokens in the lanes), their softmax with the split's own maximum, and the weighted sum
//! of V; [`AttentionKernels::merge`] adds splits up in order. Tokens that a query may not see get the weight zero,
//! which changes no bit of any sum. So the result is the same whatever the chunk, the batch, and the thread that took
//! a split.

use half::f16;
use paguro_backend::PageId;

use crate::{
    isa::simd_kernels,
    pages::Arena,
    simd::{self, LANES, Simd},
};

/// Tokens of a split, a multiple of every block size. Long enough that merging costs nothing, short enough that the
/// scores of a tile stay in the second-level cache and that threads can share one sequence.
pub const SPLIT: usize = 512;

/// Queries (rows times heads of a group) that share the loads of K and V, unless one group has more heads.
pub const TILE: usize = 32;

simd_kernels! {
    /// Attention, for one instruction set.
    pub struct AttentionKernels {
        /// Scores, softmax and weighted sum of one tile over one split.
        fn attend_split(job: &SplitJob<'_>, scores: &mut [f32], partial: &mut [f32]) = attend_split;
        /// Adds a partial result to another; see [`merge`].
        fn merge(sum: &mut [f32], partial: &[f32]) = merge;
        /// Divides by the sum of the weights: the attention of one query.
        fn finish(sum: &[f32], out: &mut [f32]) = finish;
    }
}

/// A partial result of one query: the largest score, the sum of the weights, then the weighted sum of V,
/// `[head_dim]`; padded to whole vectors.
pub const fn partial_len(head_dim: usize) -> usize {
    LANES + head_dim
}

/// A partial result that stands for no token.
pub fn clear_partial(partial: &mut [f32]) {
    partial.fill(0.0);
    partial[0] = f32::NEG_INFINITY;
}

/// One tile of queries over one split of one sequence's K/V head.
pub struct SplitJob<'a> {
    /// The pages.
    pub arena: &'a Arena,
    /// Block table of the sequence, by block.
    pub table: &'a [PageId],
    /// Layer slot in the pages.
    pub slot: usize,
    /// K/V head.
    pub kv_head: usize,
    /// Queries of the tile's rows, all heads of the model: `[rows, row_stride]`.
    pub q: &'a [f32],
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// First element of the first query head of this K/V head.
    pub first_head: usize,
    /// Query heads of this K/V head.
    pub group: usize,
    /// Rows of the tile.
    pub rows: usize,
    /// Position of the first row.
    pub position: usize,
    /// Number of the split.
    pub split: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// `cap * tanh(score / cap)`
    pub soft_cap: Option<f32>,
    /// A row sees `window` tokens, itself included.
    pub window: Option<usize>,
}

impl SplitJob<'_> {
    /// Queries of the tile, by row, then by head.
    fn queries(&self) -> usize {
        self.rows * self.group
    }

    fn query(&self, index: usize, head_dim: usize) -> &[f32] {
        let (row, head) = (index / self.group, index % self.group);
        &self.q[row * self.row_stride + self.first_head + head * head_dim..][..head_dim]
    }

    /// Positions that the row of query `index` sees.
    fn visible(&self, index: usize) -> std::ops::Range<usize> {
        let end = self.position + index / self.group + 1;
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Positions of the split that any row of the tile sees, widened to whole blocks; empty if there are none.
    fn span(&self, block_size: usize) -> std::ops::Range<usize> {
        let first = self.visible(0).start.max(self.split * SPLIT) / block_size * block_size;
        let last = (self.position + self.rows).min((self.split + 1) * SPLIT);
        first..last.next_multiple_of(block_size).max(first)
    }
}

/// See [`AttentionKernels::attend_split`]. `scores` holds `queries * SPLIT` floats, `partial` gets `queries` partial
/// results.
#[inline(always)]
fn attend_split<S: Simd>(s: S, job: &SplitJob<'_>, scores: &mut [f32], partial: &mut [f32]) {
    let shape = job.arena.shape();
    let (block_size, head_dim) = (shape.block_size, shape.head_dim);
    let queries = job.queries();
    let stride = partial_len(head_dim);
    assert!(scores.len() >= queries * SPLIT && partial.len() >= queries * stride);
    partial[..queries * stride].chunks_exact_mut(stride).for_each(clear_partial);
    let span = job.span(block_size);
    if span.is_empty() {
        return;
    }

    let base = job.split * SPLIT;
    for (block, tokens) in blocks(&span, block_size) {
        // SAFETY: K and V of earlier phases; nobody writes pages in the phase that attends.
        let (k, _) = unsafe { job.arena.read(job.table[block], job.slot, job.kv_head) };
        for tile in (0..block_size).step_by(LANES) {
            let at = tokens - base + tile;
            let mut query = 0;
            if S::REGISTERS >= 32 {
                while query + 16 <= queries {
                    score_tile::<S, 16>(s, job, k, tile, query, &mut scores[at..]);
                    query += 16;
                }
                while query + 8 <= queries {
                    score_tile::<S, 8>(s, job, k, tile, query, &mut scores[at..]);
                    query += 8;
                }
            }
            while query + 4 <= queries {
                score_tile::<S, 4>(s, job, k, tile, query, &mut scores[at..]);
                query += 4;
            }
            while query < queries {
                score_tile::<S, 1>(s, job, k, tile, query, &mut scores[at..]);
                query += 1;
            }
        }
    }

    let (from, to) = (span.start - base, span.end - base);
    for query in 0..queries {
        let scores = &mut scores[query * SPLIT..][from..to];
        let partial = &mut partial[query * stride..][..stride];
        let (largest, sum) = softmax(s, job, scores, span.start, job.visible(query));
        partial[0] = largest;
        partial[1] = sum;
    }

    let mut query = 0;
    if S::REGISTERS >= 32 {
        while query + 8 <= queries {
            weigh::<S, 8>(s, job, &span, query, scores, partial);
            query += 8;
        }
    }
    while query + 4 <= queries {
        weigh::<S, 4>(s, job, &span, query, scores, partial);
        query += 4;
    }
    while query < queries {
        weigh::<S, 1>(s, job, &span, query, scores, partial);
        query += 1;
    }
}

/// Blocks of a span with the position of their first token.
fn blocks(span: &std::ops::Range<usize>, block_size: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
    (span.start / block_size..span.end / block_size).map(move |block| (block, block * block_size))
}

/// Scores of `Q` queries with 16 tokens: `scores[query][token] = Σ_d q[query][d] * k[d][token]`.
#[inline(always)]
fn score_tile<S: Simd, const Q: usize>(
    s: S,
    job: &SplitJob<'_>,
    k: &[f16], // [head_dim][block_size]
    tile: usize,
    first: usize,
    scores: &mut [f32], // [queries][SPLIT], from the tile's first token
) {
    let shape = job.arena.shape();
    let queries: [&[f32]; Q] = std::array::from_fn(|index| job.query(first + index, shape.head_dim));
    let mut sums = [s.zero(); Q];
    for (dim, k) in k.chunks_exact(shape.block_size).enumerate() {
        let k = s.from_f16(k[tile..tile + LANES].first_chunk().expect("16 tokens"));
        for (sum, query) in sums.iter_mut().zip(&queries) {
            // SAFETY: every query has `head_dim` elements, and `k` as many rows.
            *sum = s.fma(s.splat(unsafe { *query.get_unchecked(dim) }), k, *sum);
        }
    }
    for (index, &sum) in sums.iter().enumerate() {
        s.store(sum, scores[(first + index) * SPLIT..].first_chunk_mut().expect("a tile of scores"));
    }
}

/// Turns scores, of tokens from position `start` on, into weights `exp(score - largest)`; invisible tokens get zero.
/// Returns the largest score and the sum of the weights.
#[inline(always)]
fn softmax<S: Simd>(
    s: S,
    job: &SplitJob<'_>,
    scores: &mut [f32],
    start: usize,
    visible: std::ops::Range<usize>,
) -> (f32, f32) {
    let scale = s.splat(job.scale);
    let hidden = s.splat(f32::NEG_INFINITY);
    let (begin, end) = (s.splat(visible.start as f32), s.splat(visible.end as f32));
    let first = std::array::from_fn(|lane| lane as f32);
    let mut position = s.add(s.load(&first), s.splat(start as f32));
    let step = s.splat(LANES as f32);
    let mut largest = hidden;
    let (tiles, _) = scores.as_chunks_mut::<LANES>();
    for tile in tiles.iter_mut() {
        let mut score = s.mul(s.load(tile), scale);
        if let Some(cap) = job.soft_cap {
            score = s.mul(simd::tanh(s, s.div(score, s.splat(cap))), s.splat(cap));
        }
        // Positions are exact in f32 up to 2^24.
        score = s.select_lt(position, end, score, hidden);
        score = s.select_lt(position, begin, hidden, score);
        s.store(score, tile);
        largest = s.max(largest, score);
        position = s.add(position, step);
    }
    let largest = s.reduce_max(largest);
    // All hidden: with zero for the maximum, all weights become zero.
    let shift = s.splat(if largest == f32::NEG_INFINITY { 0.0 } else { largest });
    let mut sum = s.zero();
    for tile in tiles {
        let weight = simd::exp(s, s.sub(s.load(tile), shift));
        s.store(weight, tile);
        sum = s.add(sum, weight);
    }
    (largest, s.reduce_sum(sum))
}

/// Weighted sums of V for `Q` queries: `partial[query][d] = Σ_token weight[query][token] * v[token][d]`.
#[inline(always)]
fn weigh<S: Simd, const Q: usize>(
    s: S,
    job: &SplitJob<'_>,
    span: &std::ops::Range<usize>,
    first: usize,
    weights: &[f32], // [queries][SPLIT]
    partial: &mut [f32],
) {
    let head_dim = job.arena.shape().head_dim;
    let mut dim = 0;
    while dim + 2 * LANES <= head_dim {
        weigh_dims::<S, Q, 2>(s, job, span, first, dim, weights, partial);
        dim += 2 * LANES;
    }
    if dim < head_dim {
        weigh_dims::<S, Q, 1>(s, job, span, first, dim, weights, partial);
    }
}

/// [`weigh`] for `16 * D` dimensions from `dim` on.
#[inline(always)]
fn weigh_dims<S: Simd, const Q: usize, const D: usize>(
    s: S,
    job: &SplitJob<'_>,
    span: &std::ops::Range<usize>,
    first: usize,
    dim: usize,
    weights: &[f32],
    partial: &mut [f32],
) {
    let shape = job.arena.shape();
    let base = job.split * SPLIT;
    let weights: [&[f32]; Q] =
        std::array::from_fn(|index| &weights[(first + index) * SPLIT..][..span.end - base]);
    let mut sums = [[s.zero(); D]; Q];
    for (block, tokens) in blocks(span, shape.block_size) {
        // SAFETY: K and V of earlier phases; nobody writes pages in the phase that attends.
        let (_, v) = unsafe { job.arena.read(job.table[block], job.slot, job.kv_head) };
        let at = tokens - base;
        assert!(at + shape.block_size <= span.end - base);
        for (token, v) in v.chunks_exact(shape.head_dim).enumerate() {
            let v = &v[dim..dim + D * LANES];
            let v: [S::F32; D] =
                std::array::from_fn(|d| s.from_f16(v[d * LANES..].first_chunk().expect("16 dimensions")));
            for (sums, weights) in sums.iter_mut().zip(&weights) {
                // SAFETY: the weights reach to the span's end, asserted above for this block.
                let weight = s.splat(unsafe { *weights.get_unchecked(at + token) });
                for (sum, &v) in sums.iter_mut().zip(&v) {
                    *sum = s.fma(weight, v, *sum);
                }
            }
        }
    }
    for (index, sums) in sums.iter().enumerate() {
        let out = &mut partial[(first + index) * partial_len(shape.head_dim) + LANES + dim..];
        for (&sum, out) in sums.iter().zip(out.as_chunks_mut().0) {
            s.store(sum, out);
        }
    }
}

/// Adds the partial results `partial` of some queries to `sum`, query by query. Splits are added in order.
#[inline(always)]
fn merge<S: Simd>(s: S, sum: &mut [f32], partial: &[f32]) {
    assert_eq!(sum.len(), partial.len());
    let largest = sum[0].max(partial[0]);
    if partial[0] == f32::NEG_INFINITY {
        return;
    }
    let own = simd::exp(s, s.splat(sum[0] - largest));
    let other = simd::exp(s, s.splat(partial[0] - largest));
    sum[0] = largest;
    sum[1] = s.reduce_max(own) * sum[1] + s.reduce_max(other) * partial[1];
    let (sums, _) = sum[LANES..].as_chunks_mut::<LANES>();
    for (sum, partial) in sums.iter_mut().zip(partial[LANES..].as_chunks().0) {
        let merged = s.fma(s.load(sum), own, s.mul(s.load(partial), other));
        s.store(merged, sum);
    }
}

/// See [`AttentionKernels::finish`].
#[inline(always)]
fn finish<S: Simd>(s: S, sum: &[f32], out: &mut [f32]) {
    let total = s.splat(sum[1]);
    for (sum, out) in sum[LANES..].as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        s.store(s.div(s.load(sum), total), out);
    }
}
