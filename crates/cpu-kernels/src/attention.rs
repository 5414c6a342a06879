//! Attention over pages: the kernels read pages through the block table, and every loaded K/V vector serves all query
//! heads of its K/V head and several rows.
//!
//! Prefill and decode are one algorithm, whose results depend on absolute positions only. The context is split at
//! multiples of [`SPLIT`] tokens. For each split, [`AttentionKernels::attend_split`] computes the scores of a tile of
//! queries (with tokens as lanes), their softmax with the split's own maximum, and the weighted sum of V;
//! [`AttentionKernels::merge`] adds splits in order. Tokens outside of a query's mask have weight zero, which changes
//! no bit of any sum. So the result does not depend on chunks, batch, or the thread of a split.
//!
//! A tile is processed in blocks of queries. The first block loads the split's K and V from memory, with prefetches a few
//! pages of tokens before their use; the others find them in the second-level cache. If a block has more queries than there
//! are registers for their sums, its register groups alternate after a few tokens and share the prefetches. Memory is then
//! read continuously, and a group finds the data of the previous one in the first-level cache.
//!
//! The encoding of pages is a parameter of all this ([`Stored`]): half precision ([`mod@f16`]) or integers of eight or four bits
//! ([`quants`]), whose heads, queries and results are rotated by the caller.

#![allow(clippy::needless_range_loop)] // register tiles read best as indices

mod f16;
mod quants;
mod read_order;
#[cfg(test)]
mod tests;

use std::{f32::consts::LOG2_E, ops::Range};

use paguro_backend::{KV_BLOCK, KvDtype, PageId, visible};

use self::{
    f16::F16,
    quants::Quants,
    read_order::{GroupOrder, ReadOrder},
};
use crate::{
    isa::simd_kernels,
    ops::even_share,
    pages::{PageShape, Pages},
    quantize::QuantBlock,
    simd::{self, LANES, Simd},
};

/// Tokens of a split, a multiple of every block size. Long enough that merging costs nothing, short enough that its K
/// and V stay in the second-level cache and that threads can share one sequence.
pub const SPLIT: usize = 512;

/// Queries (rows times heads of a group) that share reads from memory, unless one group has more heads.
pub const TILE: usize = 64;

/// Queries of the largest block.
const QUERY_BLOCK: usize = 8;

/// Queries of the largest register group: those whose sums have registers.
const fn register_queries<S: Simd>() -> usize {
    if S::REGISTERS >= 32 { QUERY_BLOCK } else { 4 }
}

/// Tokens, in units of 16, after which the register groups of a block alternate. Their values are weighted before the sums
/// are stored: few enough that their K or V stays in the first-level cache for all dimensions and groups.
const CHUNK: usize = 4;

simd_kernels! {
    /// Attention, for one instruction set.
    pub struct AttentionKernels {
        /// [`AttentionKernels::attend_split`] over pages of half precision.
        fn attend_split_f16(job: &SplitJob<'_>, scores: &mut Scores, partial: &mut [f32]) = attend_split_f16;
        /// [`AttentionKernels::attend_split`] over pages of eight bits.
        fn attend_split_q8(job: &SplitJob<'_>, scores: &mut Scores, partial: &mut [f32]) = attend_split_q8;
        /// [`AttentionKernels::attend_split`] over pages of four bits.
        fn attend_split_q4(job: &SplitJob<'_>, scores: &mut Scores, partial: &mut [f32]) = attend_split_q4;
        /// Adds a partial result to another; see [`merge`].
        fn merge(sum: &mut [f32], partial: &[f32]) = merge;
        /// Divides by the sum of the weights: the attention of one query.
        fn finish(sum: &[f32], out: &mut [f32]) = finish;
    }
}

impl AttentionKernels {
    /// Scores, softmax and weighted sum of one tile over one split.
    pub fn attend_split(&self, job: &SplitJob<'_>, scores: &mut Scores, partial: &mut [f32]) {
        match job.pages.shape().dtype {
            KvDtype::F16 => self.attend_split_f16(job, scores, partial),
            KvDtype::Q8 => self.attend_split_q8(job, scores, partial),
            KvDtype::Q4 => self.attend_split_q4(job, scores, partial),
        }
    }
}

/// Scores of a query with the tokens of a split, and then their weights. A cache line longer than a split, so that rows do
/// not all begin in the same cache set.
type Row = [f32; SPLIT + LANES];

/// Working memory of a block of queries over a split.
#[derive(Debug)]
#[repr(align(64))]
pub struct Scores {
    /// Rows by query.
    rows: [Row; QUERY_BLOCK],
    /// Queries in eight bits, `[queries][blocks]`, for quantized pages.
    queries: Vec<QuantBlock>,
}

impl Scores {
    /// For heads of up to `head_dim` elements. On the heap: it is 16 KiB.
    pub fn new(dtype: KvDtype, head_dim: usize) -> Box<Self> {
        let queries = match dtype {
            KvDtype::F16 => Vec::new(),
            KvDtype::Q8 | KvDtype::Q4 => vec![QuantBlock::ZERO; QUERY_BLOCK * head_dim.div_ceil(KV_BLOCK)],
        };
        Box::new(Self { rows: [[0.0; SPLIT + LANES]; QUERY_BLOCK], queries })
    }
}

/// A partial result of one query: the largest score (in powers of two), the sum of the weights, then the weighted sum
/// of V, `[head_dim]`; padded to whole vectors.
pub const fn partial_len(head_dim: usize) -> usize {
    LANES + head_dim.next_multiple_of(LANES)
}

/// Sets a partial result to that of no tokens.
pub fn clear_partial(partial: &mut [f32]) {
    partial.fill(0.0);
    partial[0] = f32::NEG_INFINITY;
}

/// Sets a partial result to that of a sink: a score without a value.
pub fn sink_partial(partial: &mut [f32], sink: f32) {
    partial.fill(0.0);
    partial[0] = sink * LOG2_E;
    partial[1] = 1.0;
}

/// One tile of queries over one split of one sequence's K/V head.
pub struct SplitJob<'a> {
    /// The pages.
    pub pages: Pages<'a>,
    /// Block table of the sequence, by block.
    pub table: &'a [PageId],
    /// Layer slot in the pages.
    pub layer_slot: usize,
    /// K/V head.
    pub kv_head: usize,
    /// Queries of the tile's rows, all heads of the model: `[rows, row_stride]`.
    pub q: &'a [f32],
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// First element of the first query head of this K/V head.
    pub first_head: usize,
    /// Query heads of this K/V head.
    pub queries_per_kv: usize,
    /// Rows of the tile.
    pub rows: usize,
    /// Position of the first row.
    pub position: usize,
    /// Number of the split.
    pub split: usize,
    /// Multiplies the scores, positive.
    pub scale: f32,
    /// `cap * tanh(score / cap)`
    pub soft_cap: Option<f32>,
    /// See [`KvGroup::window`](paguro_backend::KvGroup::window).
    pub window: Option<u32>,
    /// Tokens of the sequence, if rows see later ones.
    pub len: Option<usize>,
    /// Spans of the sequence, if the layer sees them; see [`visible`].
    pub spans: Option<&'a [Range<usize>]>,
    /// Added to scores by distance, `[queries_per_kv, 2 * reach + 1]`; see [`DistanceBias`](paguro_backend::DistanceBias).
    pub biases: Option<&'a [f32]>,
}

impl SplitJob<'_> {
    /// Queries of the tile, by row, then by head.
    fn queries(&self) -> usize {
        self.rows * self.queries_per_kv
    }

    fn query(&self, index: usize) -> &[f32] {
        let (row, head) = (index / self.queries_per_kv, index % self.queries_per_kv);
        let head_dim = self.pages.shape().head_dim;
        &self.q[row * self.row_stride + self.first_head + head * head_dim..][..head_dim]
    }

    /// Returns the tokens of the split that the row of query `index` attends to, relative to the split's start.
    fn visible(&self, index: usize) -> Range<usize> {
        let Range { start, end } =
            visible(self.window, self.len, self.spans, self.position + index / self.queries_per_kv);
        let base = self.split * SPLIT;
        start.saturating_sub(base)..end.saturating_sub(base).min(SPLIT)
    }

    /// Returns the tokens of the split that any of these queries attends to. Rows are in order: the first one attends
    /// to the earliest token, the last one to the latest.
    fn seen(&self, queries: Range<usize>) -> Range<usize> {
        self.visible(queries.start).start..self.visible(queries.end - 1).end
    }
}

/// Type of stored K and V, and its multiplication.
trait Stored {
    /// Type of a query.
    type Query;

    /// Query `index` of the tile; `quantized` has room for it in eight bits.
    fn query<S: Simd>(
        s: S,
        job: &SplitJob<'_>,
        index: usize,
        quantized: &mut [QuantBlock],
    ) -> *const Self::Query;

    /// Scores of `Q` queries with `16 * N` tokens from `tile` on: `scores[query][token] = Σ_d q[query][d] * k[d][token]`.
    fn score<S: Simd, const Q: usize, const N: usize>(
        s: S,
        shape: &PageShape,
        order: GroupOrder<'_>,
        queries: &[*const Self::Query; Q],
        tile: usize,
        scores: &mut [Row],
    );

    /// Adds the tokens of tiles to the weighted sums of V: `partial[query][d] += Σ_token weight[query][token] *
    /// v[token][d]`. The tiles are within one [`CHUNK`], counted from the split's start.
    fn weigh<S: Simd, const Q: usize, const N: usize>(
        s: S,
        shape: &PageShape,
        order: GroupOrder<'_>,
        tiles: Range<usize>,
        seen: &Range<usize>,
        weights: &[Row],
        partial: &mut [f32],
    );
}

#[inline(always)]
fn attend_split_f16<S: Simd>(s: S, job: &SplitJob<'_>, scores: &mut Scores, partial: &mut [f32]) {
    attend_split::<S, F16>(s, job, scores, partial);
}

#[inline(always)]
fn attend_split_q8<S: Simd>(s: S, job: &SplitJob<'_>, scores: &mut Scores, partial: &mut [f32]) {
    attend_split::<S, Quants<8>>(s, job, scores, partial);
}

#[inline(always)]
fn attend_split_q4<S: Simd>(s: S, job: &SplitJob<'_>, scores: &mut Scores, partial: &mut [f32]) {
    attend_split::<S, Quants<4>>(s, job, scores, partial);
}

/// See [`AttentionKernels::attend_split`]. `partial` gets the partial results of the tile's queries.
#[inline(always)]
fn attend_split<S: Simd, K: Stored>(s: S, job: &SplitJob<'_>, scores: &mut Scores, partial: &mut [f32]) {
    let stride = partial_len(job.pages.shape().head_dim);
    let queries = job.queries();
    let partial = &mut partial[..queries * stride];
    for partial in partial.chunks_exact_mut(stride) {
        clear_partial(partial);
    }
    let seen = job.seen(0..queries);
    if seen.is_empty() {
        return;
    }
    let order = &ReadOrder::new(job, seen.start / LANES..seen.end.div_ceil(LANES));
    let count = even_share(queries, QUERY_BLOCK);
    for (index, partial) in partial.chunks_mut(count * stride).enumerate() {
        let first = index * count;
        attend_block::<S, K>(s, job, order, first..first + partial.len() / stride, scores, partial);
    }
}

/// Evaluates a call with `Q` as the number of queries, and `N` as the number of vectors of tokens, or of dimensions,
/// for whose sums there are registers.
macro_rules! for_queries {
    ($s:ident, $count:expr, $call:expr) => {
        if const { $s::REGISTERS >= 32 } {
            for_queries!(@ $count, $call, 1 4, 2 4, 3 4, 4 4, 5 2, 6 2, 7 2, 8 2)
        } else {
            for_queries!(@ $count, $call, 1 2, 2 2, 3 1, 4 1)
        }
    };
    (@ $count:expr, $call:expr, $($q:literal $n:literal),*) => {
        match $count {
            $($q => {
                const Q: usize = $q;
                const N: usize = $n;
                $call
            })*
            count => unreachable!("{count} queries in a register group"),
        }
    };
}

/// Up to [`QUERY_BLOCK`] queries of the tile.
#[inline(always)]
fn attend_block<S: Simd, K: Stored>(
    s: S,
    job: &SplitJob<'_>,
    order: &ReadOrder,
    range: Range<usize>,
    scores: &mut Scores,
    partial: &mut [f32],
) {
    let shape = &job.pages.shape();
    let stride = partial_len(shape.head_dim);
    let (first, count) = (range.start, range.len());
    let seen = job.seen(range);
    if seen.is_empty() {
        return;
    }
    let mut queries = [std::ptr::null(); QUERY_BLOCK];
    let mut quantized = scores.queries.chunks_exact_mut(shape.blocks());
    for (q, query) in queries.iter_mut().enumerate().take(count) {
        *query = K::query(s, job, first + q, quantized.next().unwrap_or_default());
    }
    let size = even_share(count, register_queries::<S>());
    let group_count = count.div_ceil(size);
    let tiles = seen.start / LANES..seen.end.div_ceil(LANES);

    let groups = || {
        let queries = move |group| group * size..count.min((group + 1) * size);
        (0..group_count).map(move |group| (queries(group), GroupOrder { order, group, groups: group_count }))
    };

    for chunk in chunks(&tiles) {
        for (group, order) in groups() {
            let (queries, rows) = (&queries[group.clone()], &mut scores.rows[group]);
            for_queries!(
                S,
                queries.len(),
                score_chunk::<S, K, Q, N>(s, shape, order, queries, chunk.clone(), rows)
            );
        }
    }
    for q in 0..count {
        let (largest, sum) = softmax(s, job, first + q, &mut scores.rows[q], &tiles);
        partial[q * stride] = largest;
        partial[q * stride + 1] = sum;
    }
    for chunk in chunks(&tiles) {
        for (group, order) in groups() {
            let partial = &mut partial[group.start * stride..group.end * stride];
            let rows = &scores.rows[group];
            for_queries!(
                S,
                rows.len(),
                K::weigh::<S, Q, N>(s, shape, order, chunk.clone(), &seen, rows, partial)
            );
        }
    }
}

/// Tiles, [`CHUNK`] of them at a time, counted from the split's start.
fn chunks(tiles: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *tiles;
    (start / CHUNK..end.div_ceil(CHUNK))
        .map(move |chunk| (chunk * CHUNK).max(start)..((chunk + 1) * CHUNK).min(end))
}

/// Scores of `Q` queries with the tokens of tiles, `N` tiles at once.
#[inline(always)]
fn score_chunk<S: Simd, K: Stored, const Q: usize, const N: usize>(
    s: S,
    shape: &PageShape,
    order: GroupOrder<'_>,
    queries: &[*const K::Query],
    tiles: Range<usize>,
    scores: &mut [Row],
) {
    let queries = queries.first_chunk::<Q>().expect("a query for each row");
    let mut tile = tiles.start;
    while tile + N <= tiles.end {
        K::score::<S, Q, N>(s, shape, order, queries, tile, scores);
        tile += N;
    }
    while tile < tiles.end {
        K::score::<S, Q, 1>(s, shape, order, queries, tile, scores);
        tile += 1;
    }
}

/// Converts a query's scores to weights `2^(score - largest)`; scores are in powers of two. Tokens outside of the mask
/// get zero. Returns the largest score and the sum of the weights.
#[inline(always)]
fn softmax<S: Simd>(
    s: S,
    job: &SplitJob<'_>,
    query: usize,
    scores: &mut [f32],
    tiles: &Range<usize>,
) -> (f32, f32) {
    let visible = job.visible(query);
    if visible.is_empty() {
        scores[tiles.start * LANES..tiles.end * LANES].fill(0.0);
        return (f32::NEG_INFINITY, 0.0);
    }
    let vectors = &mut scores.as_chunks_mut::<LANES>().0[tiles.clone()];
    let mut scale = match job.soft_cap {
        None => job.scale * LOG2_E,
        Some(cap) => {
            let (scale, cap) = (s.splat(job.scale), s.splat(cap));
            for score in vectors.iter_mut() {
                let capped = s.mul(simd::tanh(s, s.div(s.mul(s.load(score), scale), cap)), cap);
                s.store(capped, score);
            }
            LOG2_E
        }
    };
    if let Some(biases) = job.biases {
        let width = biases.len() / job.queries_per_kv;
        let own = job.position + query / job.queries_per_kv;
        let first = query % job.queries_per_kv * width + width / 2 + job.split * SPLIT + visible.start - own;
        let factor = scale / LOG2_E;
        for (score, bias) in scores[visible.clone()].iter_mut().zip(&biases[first..][..visible.len()]) {
            *score = *score * factor + bias;
        }
        scale = LOG2_E;
    }
    scores[tiles.start * LANES..visible.start].fill(f32::NEG_INFINITY);
    scores[visible.end..tiles.end * LANES].fill(f32::NEG_INFINITY);

    let vectors = &mut scores.as_chunks_mut::<LANES>().0[tiles.clone()];
    // Several at a time: each comparison waits for the last one.
    let mut largest = [s.splat(f32::NEG_INFINITY); 4];
    let (fours, rest) = vectors.as_chunks::<4>();
    for four in fours {
        for i in 0..4 {
            largest[i] = s.max(s.load(&four[i]), largest[i]);
        }
    }
    for score in rest {
        largest[0] = s.max(s.load(score), largest[0]);
    }
    let [a, b, c, d] = largest;
    // The scale is positive: the largest stays the largest.
    let largest = scale * s.reduce_max(s.max(s.max(a, b), s.max(c, d)));
    let (scale, shift) = (s.splat(scale), s.splat(-largest));
    let mut sum = s.zero();
    for score in vectors {
        let weight = simd::weight(s, s.fma(s.load(score), scale, shift));
        s.store(weight, score);
        sum = s.add(sum, weight);
    }
    (largest, s.reduce_sum(sum))
}

/// Adds the partial result `partial` of a query to `sum`. Splits are added in order.
#[inline(always)]
fn merge<S: Simd>(s: S, sum: &mut [f32], partial: &[f32]) {
    assert_eq!(sum.len(), partial.len());
    let largest = sum[0].max(partial[0]);
    if partial[0] == f32::NEG_INFINITY {
        return;
    }
    let own = simd::weight(s, s.splat(sum[0] - largest));
    let other = simd::weight(s, s.splat(partial[0] - largest));
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
    for (sum, out) in sum[LANES..].as_chunks().0.iter().zip(out.chunks_mut(LANES)) {
        s.store_part(s.div(s.load(sum), total), out);
    }
}
