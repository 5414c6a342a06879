//! Reference path of attention: the pages of a sequence are copied into one contiguous K and V for plain attention. It
//! exists to check the paged kernels and to measure their benefit (`--attention gather`).

use paguro_backend::{
    Program, Step, StepSequence, hadamard,
    reference::{AttentionShape, HeadVectors, attention},
};
use paguro_cpu_kernels::pages::{Pages, Place};

use crate::{
    buffers::Shared,
    pass::{Kernel, Pass},
    plan::{Attend, Heads},
    thread_pool::Chunking,
};

/// Computes attention of queries over pages.
pub fn attend(pass: &mut Pass<'_>, op: &Attend) {
    let model = pass.model;
    let (step, kv_heads) = (pass.step, op.heads.kv);
    let heads = step.sequences.len() * kv_heads;
    pass.phase(Kernel::AttendGather, heads, Chunking::Single, |worker, range| {
        for unit in range {
            let head = HeadAttention {
                program: &model.program,
                // SAFETY: nobody writes pages in the phase that attends.
                pages: unsafe { worker.arena.pages(op.kv.group) },
                step,
                sequence: &step.sequences[unit / kv_heads],
                op,
                kv_head: unit % kv_heads,
                vectors: HeadVectors {
                    sinks: op.sinks.map(|sinks| model.vector(sinks)),
                    biases: op.bias.map(|bias| model.vector(bias)),
                },
            };
            // SAFETY: queries are only read in this phase, and only this worker has these heads of these rows.
            unsafe { head.run(&worker.buffers.q, &worker.buffers.attended) };
        }
    });
}

/// One K/V head of one sequence.
struct HeadAttention<'a> {
    program: &'a Program,
    pages: Pages<'a>,
    step: &'a Step<'a>,
    sequence: &'a StepSequence,
    op: &'a Attend,
    kv_head: usize,
    /// Of all heads.
    vectors: HeadVectors<'a>,
}

impl HeadAttention<'_> {
    /// Computes attention. Both buffers are `[rows, heads, head_dim]`.
    ///
    /// # Safety
    /// Meanwhile no thread writes the sequence's queries, and no other thread uses the query heads of this K/V head in
    /// the sequence's rows of `attended`.
    unsafe fn run(&self, q: &Shared<f32>, attended: &Shared<f32>) {
        let kv = &self.program.kv;
        let group = kv.groups[self.op.kv.group];
        let spans: Vec<_> = self.step.spans_of(self.sequence).collect();
        let Heads { queries: heads, dim: head_dim, .. } = self.op.heads;
        let queries_per_kv = self.op.heads.per_kv();
        let block_size = self.pages.shape().block_size;
        let table = self.sequence.table(self.step.pages, self.op.kv.group, kv.groups.len());

        let mut k = vec![0.0; table.len() * block_size * head_dim]; // [tokens, head_dim]
        let mut v = k.clone();
        for (block, &page) in table.iter().enumerate() {
            for token in 0..block_size {
                let kv = self.op.kv;
                let place =
                    Place { group: kv.group, page, layer_slot: kv.layer_slot, kv_head: self.kv_head, token };
                let at = (block * block_size + token) * head_dim..(block * block_size + token + 1) * head_dim;
                self.pages.token(place, &mut k[at.clone()], &mut v[at]);
            }
        }

        let attention_shape = AttentionShape {
            heads: queries_per_kv,
            kv_heads: 1,
            head_dim,
            start: self.sequence.start,
            scale: self.op.scale,
            soft_cap: self.op.soft_cap,
            window: group.window,
            len: self.program.seen_tokens(self.sequence),
            spans: group.spans.then_some(&spans[..]),
        };
        let mut out = vec![0.0; self.sequence.rows.len() * queries_per_kv * head_dim];
        let heads_of = |row: usize| {
            let start = (row * heads + self.kv_head * queries_per_kv) * head_dim;
            start..start + queries_per_kv * head_dim
        };
        // SAFETY: the caller keeps writers away.
        let q: Vec<f32> =
            self.sequence.rows.clone().flat_map(|row| unsafe { q.get(heads_of(row)) }).copied().collect();
        let own = self.kv_head * queries_per_kv..(self.kv_head + 1) * queries_per_kv;
        let vectors = HeadVectors {
            sinks: self.vectors.sinks.map(|sinks| &sinks[own.clone()]),
            biases: self.vectors.biases.map(|biases| {
                let width = biases.len() / heads;
                &biases[own.start * width..own.end * width]
            }),
        };
        attention(&q, &k, &v, vectors, &attention_shape, &mut out);
        if self.pages.shape().dtype.is_quantized() {
            out.chunks_exact_mut(head_dim).for_each(hadamard);
        }
        for (row, out) in self.sequence.rows.clone().zip(out.chunks_exact(queries_per_kv * head_dim)) {
            // SAFETY: these heads of this row are ours.
            unsafe { attended.get_mut(heads_of(row)) }.copy_from_slice(out);
        }
    }
}
