//! The paged kernels against plain attention, and against themselves in other chunks, pages and instruction sets.

use half::f16;
use paguro_backend::{
    KvGroup, KvLayout, hadamard, quantize_kv,
    reference::{AttentionShape, HeadVectors, attention},
};
use paguro_backend_conformance::Rng;

use super::*;
use crate::{
    isa::Isa,
    matrix::{Activations, MatrixKernels},
    ops::RowKernels,
    pages::{Arena, Half, PageShape, Place, StoredHead},
    quantize::BLOCK,
};

/// One sequence.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: KvDtype,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Position of the first row.
    start: usize,
    rows: usize,
    window: Option<u32>,
    soft_cap: Option<f32>,
    scale: f32,
}

const PLAIN: Case = Case {
    dtype: KvDtype::F16,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    start: 0,
    rows: 1,
    window: None,
    soft_cap: None,
    scale: 0.3,
};

/// Arrangement and splits of a case.
#[derive(Clone, Copy, Debug)]
struct Cut {
    block_size: usize,
    /// Rows of a tile.
    tile: usize,
    /// Order of the pages.
    seed: u64,
}

/// Inputs, `[tokens, kv_heads, head_dim]` and `[rows, heads, head_dim]`.
struct Numbers {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Case {
    fn tokens(&self) -> usize {
        self.start + self.rows
    }

    fn numbers(&self) -> Numbers {
        let mut rng = Rng::new(self.tokens() as u64);
        let kv = self.tokens() * self.kv_heads * self.head_dim;
        let mut normal = |count: usize| (0..count).map(|_| rng.normal()).collect();
        Numbers { k: normal(kv), v: normal(kv), q: normal(self.rows * self.heads * self.head_dim) }
    }

    /// K or V as pages store it.
    fn stored(&self, x: &[f32]) -> Vec<f32> {
        let block = |x: &[f32]| {
            let mut quants = vec![0; x.len()];
            let scale = quantize_kv(self.dtype, x, &mut quants).to_f32();
            quants.into_iter().map(move |quant| scale * f32::from(quant)).collect::<Vec<_>>()
        };
        match self.dtype {
            KvDtype::F16 => x.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
            // Queries and results are rotated, too, so that all of this test is.
            KvDtype::Q8 | KvDtype::Q4 => {
                let mut x = x.to_vec();
                x.chunks_mut(self.head_dim).for_each(hadamard);
                let heads = x.chunks(self.head_dim);
                heads.flat_map(|head| head.chunks(KV_BLOCK)).flat_map(block).collect()
            }
        }
    }

    /// Queries as they are multiplied.
    fn multiplied(&self, q: &[f32]) -> Vec<f32> {
        let head = |head: &[f32]| {
            let mut blocks = vec![QuantBlock::ZERO; head.len().div_ceil(BLOCK)];
            MatrixKernels::new(Isa::detect(), Activations::Signed).quantize_row(head, &mut blocks);
            let number = |i: usize| blocks[i / BLOCK].scale * f32::from(blocks[i / BLOCK].quants[i % BLOCK]);
            (0..head.len()).map(number).collect::<Vec<_>>()
        };
        match self.dtype {
            KvDtype::F16 => q.to_vec(),
            KvDtype::Q8 | KvDtype::Q4 => q.chunks(self.head_dim).flat_map(head).collect(),
        }
    }

    fn reference(&self, numbers: &Numbers) -> Vec<f32> {
        let Case { heads, kv_heads, head_dim, start, window, soft_cap, scale, .. } = *self;
        let (len, spans) = (None, None);
        let shape = AttentionShape { heads, kv_heads, head_dim, start, scale, soft_cap, window, len, spans };
        let (k, v) = (self.stored(&numbers.k), self.stored(&numbers.v));
        let mut out = vec![0.0; numbers.q.len()];
        attention(&self.multiplied(&numbers.q), &k, &v, HeadVectors::default(), &shape, &mut out);
        out
    }

    /// Attends in pages full of noise; where the window has passed, the pages are scratch.
    fn paged(&self, isa: Isa, cut: Cut, numbers: &Numbers) -> Vec<f32> {
        let Case { dtype, heads, kv_heads, head_dim, start, rows, window, soft_cap, scale } = *self;
        let blocks = self.tokens().div_ceil(cut.block_size);
        // The second of two layers.
        let kv =
            KvLayout { groups: vec![KvGroup { window, spans: false, layer_slots: 2, kv_heads, head_dim }] };
        let shapes = PageShape::of_groups(&kv, cut.block_size, dtype).unwrap();
        let mut arena = Arena::new(blocks + 1, shapes).unwrap();
        arena.poison();
        let (row_kernels, mut stored) = (RowKernels::new(isa), StoredHead::new(dtype, head_dim));
        let mut table: Vec<PageId> = (1..=blocks as u32).map(PageId).collect();
        Rng::new(cut.seed).shuffle(&mut table);
        let passed = window.map_or(0, |window| (start + 1).saturating_sub(window as usize)) / cut.block_size;
        table[..passed].fill(PageId::SCRATCH);
        for token in passed * cut.block_size..self.tokens() {
            for kv_head in 0..kv_heads {
                let place = Place {
                    group: 0,
                    page: table[token / cut.block_size],
                    layer_slot: 1,
                    kv_head,
                    token: token % cut.block_size,
                };
                let at = (token * kv_heads + kv_head) * head_dim;
                for (half, x) in [(Half::K, &numbers.k), (Half::V, &numbers.v)] {
                    stored.set(&row_kernels, &mut x[at..at + head_dim].to_vec());
                    // SAFETY: nobody else is here.
                    unsafe { arena.write(place, half, &stored) };
                }
            }
        }

        let kernels = AttentionKernels::new(isa);
        let (group, width, stride) = (heads / kv_heads, heads * head_dim, partial_len(head_dim));
        let mut scores = Scores::new(dtype, head_dim);
        let mut out = vec![f32::NAN; numbers.q.len()];
        for first in (0..rows).step_by(cut.tile) {
            let rows = first..rows.min(first + cut.tile);
            for kv_head in 0..kv_heads {
                let queries = rows.len() * group;
                let mut sums = vec![0.0; queries * stride];
                sums.chunks_exact_mut(stride).for_each(clear_partial);
                let mut partial = vec![f32::NAN; queries * stride];
                for split in 0..(start + rows.end).div_ceil(SPLIT) {
                    let job = SplitJob {
                        // SAFETY: nobody writes.
                        pages: unsafe { arena.pages(0) },
                        table: &table,
                        layer_slot: 1,
                        kv_head,
                        q: &numbers.q[rows.start * width..rows.end * width],
                        row_stride: width,
                        first_head: kv_head * group * head_dim,
                        queries_per_kv: group,
                        rows: rows.len(),
                        position: start + rows.start,
                        split,
                        scale,
                        soft_cap,
                        window,
                        len: None,
                        spans: None,
                        biases: None,
                    };
                    kernels.attend_split(&job, &mut scores, &mut partial);
                    for (sum, partial) in sums.chunks_exact_mut(stride).zip(partial.chunks_exact(stride)) {
                        kernels.merge(sum, partial);
                    }
                }
                for (query, sum) in sums.chunks_exact(stride).enumerate() {
                    let head = kv_head * group + query % group;
                    let at = (rows.start + query / group) * width + head * head_dim;
                    kernels.finish(sum, &mut out[at..at + head_dim]);
                }
            }
        }
        out
    }

    /// Agrees with the reference, and with itself however it is cut, whatever pages store.
    fn check(self) {
        for dtype in KvDtype::ALL {
            Self { dtype, ..self }.check_dtype();
        }
    }

    fn check_dtype(&self) {
        let tolerance = match self.dtype {
            // Sums of up to thousands of products of order one in f32, and an exponential of them.
            KvDtype::F16 => 2e-5,
            // Weights have seven bits: half a step is 0.4 % of the largest of 64 weights, for each of them, times
            // values of order one. Errors of 64 tokens add up like noise, to 2 % of the largest weight; the worst of
            // thousands of elements is three times that.
            KvDtype::Q8 | KvDtype::Q4 => 6e-2,
        };
        let numbers = self.numbers();
        let expected = self.reference(&numbers);
        let cuts = [
            Cut { block_size: 32, tile: 8, seed: 1 },
            Cut { block_size: 16, tile: 1, seed: 2 },
            Cut { block_size: 64, tile: 5, seed: 3 },
            Cut { block_size: 512, tile: 64, seed: 4 },
        ];
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::supported() {
            for cut in cuts {
                let ours = self.paged(isa, cut, &numbers);
                for (index, (a, b)) in ours.iter().zip(&expected).enumerate() {
                    assert!(
                        (a - b).abs() < tolerance,
                        "{isa}, element {index}: {a} is not {b}\n{self:?}\n{cut:?}"
                    );
                }
                let bits: Vec<u32> = ours.iter().map(|x| x.to_bits()).collect();
                let first = first.get_or_insert_with(|| bits.clone());
                assert!(bits == *first, "{isa} and {cut:?} change bits\n{self:?}");
            }
        }
    }
}

#[test]
fn every_sharing_of_heads() {
    for (heads, kv_heads) in [(1, 1), (4, 4), (6, 2), (5, 1), (7, 1), (8, 1), (9, 1), (14, 2), (71, 1)] {
        Case { heads, kv_heads, start: 37, rows: 3, ..PLAIN }.check();
    }
}

#[test]
fn every_head_dim() {
    for head_dim in [16, 32, 48, 64, 80, 96, 112, 128, 192, 256] {
        Case { head_dim, start: 21, rows: 2, ..PLAIN }.check();
        Case { head_dim, heads: 16, start: 3, rows: 4, ..PLAIN }.check();
    }
}

#[test]
fn around_the_borders_of_tiles_pages_and_splits() {
    for end in [1, 2, 15, 16, 17, 31, 32, 33, 64, 511, 512, 513, 527, 528, 1023, 1024, 1025, 1500] {
        for rows in [1, 2, 17] {
            if rows <= end {
                Case { start: end - rows, rows, ..PLAIN }.check();
            }
        }
    }
    Case { rows: 600, heads: 2, ..PLAIN }.check();
}

#[test]
fn windows_hide_what_they_have_passed() {
    for window in [1, 2, 15, 16, 17, 100, 511, 512, 513, 5000] {
        for (start, rows) in [(0, 40), (500, 30), (1020, 9), (1100, 1)] {
            Case { start, rows, window: Some(window), ..PLAIN }.check();
        }
    }
}

#[test]
fn soft_caps_and_scales() {
    for soft_cap in [None, Some(0.5), Some(30.0)] {
        for scale in [1e-6, 0.01, 2.0] {
            Case { start: 50, rows: 5, soft_cap, scale, ..PLAIN }.check();
        }
    }
}

/// Scores so large that all weights but one vanish, and, where few tokens are seen, so far below zero that all would
/// without the maximum.
#[test]
fn extreme_scores() {
    for window in [None, Some(1), Some(2)] {
        Case { start: 700, rows: 2, scale: 40.0, window, ..PLAIN }.check();
    }
}

/// Pages before the window and the rest of the last page may have any content, which the noise above tests. A split
/// outside of a row's window does not affect its result.
#[test]
fn an_unseen_split_gives_an_empty_partial_result() {
    let case = Case { start: 600, rows: 1, window: Some(10), ..PLAIN };
    let kv = KvLayout {
        groups: vec![KvGroup { window: None, spans: false, layer_slots: 1, kv_heads: 2, head_dim: 64 }],
    };
    let arena = Arena::new(64, PageShape::of_groups(&kv, 16, KvDtype::F16).unwrap()).unwrap();
    let table: Vec<PageId> = (1..=38).map(PageId).collect();
    let numbers = case.numbers();
    for isa in Isa::supported() {
        let job = SplitJob {
            // SAFETY: nobody writes.
            pages: unsafe { arena.pages(0) },
            table: &table,
            layer_slot: 0,
            kv_head: 0,
            q: &numbers.q,
            row_stride: 256,
            first_head: 0,
            queries_per_kv: 2,
            rows: 1,
            position: 600,
            split: 0,
            scale: 1.0,
            soft_cap: None,
            window: Some(10),
            len: None,
            spans: None,
            biases: None,
        };
        let mut partial = vec![1.0; 2 * partial_len(64)];
        let kernels = AttentionKernels::new(isa);
        kernels.attend_split(&job, &mut Scores::new(KvDtype::F16, 64), &mut partial);
        let mut empty = vec![2.0; partial_len(64)];
        clear_partial(&mut empty);
        assert!(partial.chunks_exact(partial_len(64)).all(|partial| partial == empty));
        let mut sum = vec![3.0; partial_len(64)];
        kernels.merge(&mut sum, &empty);
        assert!(sum.iter().all(|&x| x == 3.0));
    }
}
