//! Attention: its definition over contiguous K and V, and the mixer around it.

use std::ops::Range;

use super::{Half, ReferenceRunner, ops};
use crate::{AXES, Attention, AttentionMode, Linear, Norm, QkNormKind, Step, StepSequence, VectorId};

/// Shape of an [`attention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape<'a> {
    /// Query heads.
    pub heads: usize,
    /// K/V heads; each serves `heads / kv_heads` consecutive query heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Position of the first query row; row `i` is at `start + i`.
    pub start: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// `cap * tanh(score / cap)` after scaling.
    pub soft_cap: Option<f32>,
    /// A query at position `p` attends to keys at positions `> p - window`, and `<= p` or, in both directions,
    /// `< p + window`; `None` to all.
    pub window: Option<u32>,
    /// Number of tokens that queries see in any order, see [`Program::seen_tokens`](crate::Program::seen_tokens).
    pub len: Option<usize>,
    /// Positions of the spans of the sequence, in a group that sees them only; see [`visible`](crate::visible).
    pub spans: Option<&'a [Range<usize>]>,
}

impl AttentionShape<'_> {
    /// Returns the positions of the keys that a query at `position` sees.
    pub fn visible(&self, position: usize) -> Range<usize> {
        crate::visible(self.window, self.len, self.spans, position)
    }
}

/// Vectors of an attention.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadVectors<'a> {
    /// `[heads]`: one more term of the softmax, which takes its share and has no value.
    pub sinks: Option<&'a [f32]>,
    /// `[heads, 2 * reach + 1]`: added to scores by distance, see [`DistanceBias`](crate::DistanceBias).
    pub biases: Option<&'a [f32]>,
}

/// `out = softmax(cap(q·Kᵀ * scale) + bias)·V` for rows of one sequence. Scores, softmax and sums in f64.
///
/// - `q`, `out`: `[rows, heads, head_dim]`
/// - `k`, `v`: `[tokens, kv_heads, head_dim]`, by position from 0. Keys that no row
///   [attends to](AttentionShape::visible) are not read.
///
/// The work can be divided by calls for fewer rows (with their own `start`), or for one K/V head and its query heads
/// with slices of those alone.
///
/// # Panics
/// If the slices are shorter than the shape requires.
pub fn attention(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    let AttentionShape { heads, kv_heads, head_dim, start, .. } = *shape; // `visible` has the others
    let mut scores = Vec::new();
    let mut sums = vec![0.0; head_dim];
    for (index, (q, out)) in q.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)).enumerate() {
        let (row, head) = (index / heads, index % heads);
        let kv_head = head / (heads / kv_heads);
        let own = start + row;
        let Range { start: begin, end } = shape.visible(own);
        let bias = |position: usize| {
            let Some(biases) = vectors.biases else { return 0.0 };
            let width = biases.len() / heads;
            f64::from(biases[head * width..][..width][width / 2 + position - own])
        };
        let at = |position: usize| {
            (position * kv_heads + kv_head) * head_dim..(position * kv_heads + kv_head + 1) * head_dim
        };

        scores.clear();
        scores.extend((begin..end).map(|position| {
            let score = dot(q, &k[at(position)]) * f64::from(shape.scale);
            let score = match shape.soft_cap.map(f64::from) {
                Some(cap) => cap * (score / cap).tanh(),
                None => score,
            };
            score + bias(position)
        }));
        let sink = vectors.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
        let largest = scores.iter().copied().fold(sink, f64::max);
        scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
        let total = scores.iter().sum::<f64>() + (sink - largest).exp();

        sums.fill(0.0);
        for (position, weight) in (begin..end).zip(&scores) {
            for (sum, &v) in sums.iter_mut().zip(&v[at(position)]) {
                *sum += weight * f64::from(v);
            }
        }
        for (out, sum) in out.iter_mut().zip(&sums) {
            *out = (sum / total) as f32;
        }
    }
}

/// Dot product in f64, in eight partial sums: one would wait for itself at every step.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    sums.iter().sum::<f64>() + rest
}

impl ReferenceRunner {
    /// Returns the output of attention for each row.
    pub(super) fn attention(&mut self, op: &Attention, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let groups = self.program.kv.groups.len();
        let mut added = Vec::with_capacity(x.len());
        for sequence in step.sequences {
            let table = sequence.table(step.pages, op.kv.group, groups);
            let mut queries = Vec::new();
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let h = self.optional_norm(op.norm, &x[row]);
                let place = (position, step.coordinates_of(row, position));
                queries.extend(self.queries(op, row, &h, place));
                if let Some(k) = &op.k {
                    let [k, v] = self.keys_values(op, k, row, &h, place);
                    let mut arena = self.arena();
                    arena.store(table, op.kv, Half::K, position, &k);
                    arena.store(table, op.kv, Half::V, position, &v);
                }
            }
            let mut attended = self.attend(op, step, sequence, &queries);
            let width = op.heads * self.program.kv_group(op).head_dim;
            for (a, row) in attended.chunks_exact_mut(width).zip(sequence.rows.clone()) {
                if let Some(gate) = &op.gate {
                    let gate = self.linear(gate, row, &self.optional_norm(op.norm, &x[row]));
                    a.iter_mut().zip(gate).for_each(|(a, gate)| *a = ops::sigmoid_gate(gate, *a));
                }
                added.push(self.optional_norm(op.post_norm, &self.linear(&op.out, row, a)));
            }
        }
        self.count("store");
        self.count(match self.limits.attention {
            AttentionMode::Paged => "attend",
            AttentionMode::Gather => "attend_gather",
        });
        added
    }

    /// Queries of row `row` with the input `h` at a position and its coordinates, `[heads * head_dim]`.
    fn queries(&self, op: &Attention, row: usize, h: &[f32], place: (usize, [usize; AXES])) -> Vec<f32> {
        let norm = op.qk_norm.map(|norm| (norm.q, norm.kind));
        let mut q = self.norm_and_rotate(op, self.linear(&op.q, row, h), norm, place);
        if let Some(scale) = &op.position_scale {
            let factor = ops::position_scale(scale, place.0);
            q.iter_mut().for_each(|q| *q *= factor);
        }
        q
    }

    /// Keys and values of row `row` with the input `h` at a position and its coordinates, `[kv_heads * head_dim]` each.
    fn keys_values(
        &self,
        op: &Attention,
        k: &Linear,
        row: usize,
        h: &[f32],
        place: (usize, [usize; AXES]),
    ) -> [Vec<f32>; 2] {
        let k = self.linear(k, row, h);
        let mut v = op.v.map_or_else(|| k.clone(), |v| self.linear(&v, row, h));
        if let Some(norm) = &op.v_norm {
            for head in v.chunks_exact_mut(self.program.kv_group(op).head_dim) {
                head.copy_from_slice(&self.norm(norm, head));
            }
        }
        let norm = op.qk_norm.map(|norm| (norm.k, norm.kind));
        [self.norm_and_rotate(op, k, norm, place), v]
    }

    /// Norms and rotates a row of queries or keys.
    fn norm_and_rotate(
        &self,
        op: &Attention,
        mut row: Vec<f32>,
        norm: Option<(Norm, QkNormKind)>,
        (position, coordinates): (usize, [usize; AXES]),
    ) -> Vec<f32> {
        if let Some((norm, QkNormKind::Row)) = norm {
            row = self.norm(&norm, &row);
        }
        for head in row.chunks_exact_mut(self.program.kv_group(op).head_dim) {
            if let Some((norm, QkNormKind::Head)) = norm {
                head.copy_from_slice(&self.norm(&norm, head));
            }
            if let Some(rope) = op.rope {
                ops::rotate(head, position, coordinates, &self.program.ropes[rope]);
            }
            if let Some((norm, QkNormKind::HeadAfterRope)) = norm {
                head.copy_from_slice(&self.norm(&norm, head));
            }
        }
        row
    }

    /// Attention of the rows of one sequence, `[rows, heads * head_dim]`.
    fn attend(&self, op: &Attention, step: &Step<'_>, sequence: &StepSequence, q: &[f32]) -> Vec<f32> {
        let group = self.program.kv_group(op);
        let table = sequence.table(step.pages, op.kv.group, self.program.kv.groups.len());
        let spans: Vec<_> = step.spans_of(sequence).collect();
        let shape = AttentionShape {
            heads: op.heads,
            kv_heads: group.kv_heads,
            head_dim: group.head_dim,
            start: sequence.start,
            scale: op.scale,
            soft_cap: op.soft_cap,
            window: group.window,
            len: self.program.seen_tokens(sequence),
            spans: group.spans.then_some(&spans[..]),
        };
        let [k, v] = [Half::K, Half::V].map(|half| self.arena().gather(table, op.kv, half));
        let vector = |id: Option<VectorId>| id.map(|id| self.vector(id));
        let vectors =
            HeadVectors { sinks: vector(op.sinks), biases: vector(op.distance_bias.map(|bias| bias.table)) };
        let mut out = vec![0.0; q.len()];
        (self.attention)(q, &k, &v, vectors, &shape, &mut out);
        out
    }
}
