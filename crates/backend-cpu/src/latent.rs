//! Latent attention, as phases of the thread pool:
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | add, norm, quantize | row | `branch_outputs`, `x` | `x`, `rows` |
//! | queries (or their rank), latent vector | 16 outputs | `rows` | `query` (or `rank`), `k` |
//! | norm, quantize, if there is a rank | row | `rank` | `rows` |
//! | queries, if there is a rank | 16 outputs | `rows` | `query` |
//! | split, quantize | row | `query` | `head rows` |
//! | absorb | 16 outputs of a head | `head rows` | `heads` |
//! | rotate, store | row | `heads`, `query`, `k` | `q`, pages |
//! | attend, merge: as in `attend.rs` | | `q`, pages | `attended` |
//! | split, quantize | row | `attended` | `head rows` |
//! | value | 16 outputs of a head | `head rows` | `heads` |
//! | join, quantize | row | `heads` | `rows` |
//! | project | 16 outputs | `rows` | `branch_outputs` |
//!
//! The latent vector is stored as K and again as V, because pages arrange the two differently.
//!
//! The matrices that would expand K and V multiply queries before attention (*absorb*) and its output after it
//! (*value*), head by head.

use paguro_backend::{Latent, LatentQuery, LatentShape, MatrixId, reference};
use paguro_cpu_kernels::{
    matrix::Destination,
    ops,
    pages::{Half, Place},
};

use crate::{
    attend,
    pass::{Kernel, Pass},
    plan::{Attend, Heads},
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Pending, Worker},
};

/// Latent attention. Returns its output, `[rows, hidden]`.
pub fn latent(pass: &mut Pass<'_>, op: &Latent, pending: AllPending, output: usize) -> Pending {
    let (model, buffers, rows) = (pass.model, pass.buffers, pass.rows());
    let latent_buffers = &buffers.latent;
    let LatentShape { heads, plain: _, rotated: _, latent, value } = op.shape;
    let (first, query_bias) = match &op.query {
        LatentQuery::Direct(linear) => ((*linear, &latent_buffers.query), linear.bias),
        LatentQuery::Down { down, rank: _, norm: _, up } => ((*down, &latent_buffers.rank), up.bias),
    };
    pass.add_norm(op.norm, pending, Kinds::of(model, &[first.0, op.down]));
    pass.multiply(rows, [(first.0.matrix, first.1), (op.down.matrix, &buffers.k)]);
    if let LatentQuery::Down { down, rank, norm, up } = &op.query {
        let kinds = Kinds::of(model, &[*up]);
        pass.phase(Kernel::QkNorm, rows, Chunking::Guided(1), |worker, range| {
            for row in range {
                // SAFETY: the phase is shared by row; see the table at the head of this file.
                let x = unsafe { worker.write(&latent_buffers.rank, row, *rank) };
                worker.finish_row(x, down.bias, *norm);
                worker.set_input(&buffers.input, row, 0, x, kinds, true);
            }
        });
        pass.multiply(rows, [(up.matrix, &latent_buffers.query)]);
    }
    let query_head = op.shape.plain + op.shape.rotated;
    let kinds = Kinds::of(model, &[op.absorb]);
    pass.phase(Kernel::LatentSplit, rows, Chunking::Guided(1), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            let query = unsafe { worker.write(&latent_buffers.query, row, op.shape.query_width()) };
            if let Some(bias) = query_bias {
                model.rows.add(query, model.vector(bias));
            }
            for (head, query) in query.chunks_exact(query_head).enumerate() {
                worker.set_input(
                    &latent_buffers.input,
                    head * rows + row,
                    0,
                    &query[..op.shape.plain],
                    kinds,
                    true,
                );
            }
        }
    });
    multiply_heads(pass, op.absorb.matrix, heads);
    pass.phase(Kernel::LatentStore, rows, Chunking::Guided(1), |worker, range| {
        for row in range {
            worker.latent_store(op, row);
        }
    });
    let dim = op.shape.key_dim();
    let (kv, scale, soft_cap, sinks, bias) = (op.kv, op.scale, None, None, None);
    attend::attend(
        pass,
        &Attend { heads: Heads { queries: heads, kv: 1, dim }, kv, scale, soft_cap, sinks, bias },
    );
    let kinds = Kinds::of(model, &[op.value]);
    pass.phase(Kernel::LatentValues, rows, Chunking::Guided(1), |worker, range| {
        for row in range {
            // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
            let attended = unsafe { worker.read(&buffers.attended, row, heads * dim) };
            for (head, attended) in attended.chunks_exact(dim).enumerate() {
                worker.set_input(
                    &latent_buffers.input,
                    head * rows + row,
                    0,
                    &attended[..latent],
                    kinds,
                    true,
                );
            }
        }
    });
    multiply_heads(pass, op.value.matrix, heads);
    let kinds = Kinds::of(model, &[op.out]);
    pass.phase(Kernel::LatentJoin, rows, Chunking::Guided(1), |worker, range| {
        for row in range {
            let mut joined = std::mem::take(&mut worker.scratch.row);
            for (head, to) in joined[..heads * value].chunks_exact_mut(value).enumerate() {
                // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
                to.copy_from_slice(unsafe { worker.read(&latent_buffers.heads, head * rows + row, value) });
            }
            worker.set_input(&buffers.input, row, 0, &joined[..heads * value], kinds, true);
            worker.scratch.row = joined;
        }
    });
    pass.multiply(rows, [(op.out.matrix, &buffers.branch_outputs[output])]);
    Pending { output, bias: op.out.bias, post_norm: op.post_norm, scale: 1.0 }
}

/// Multiplies each head's rows with its matrix; groups of outputs of all heads are shared as one list.
fn multiply_heads(pass: &mut Pass<'_>, id: MatrixId, heads: usize) {
    let (model, rows) = (pass.model, pass.rows());
    let latent_buffers = &pass.buffers.latent;
    let matrix = model.matrix(id);
    let (groups, width) = (matrix.groups(), matrix.rows());
    for head in 0..heads {
        pass.add_squares(&[id], head, &latent_buffers.input, head * rows..(head + 1) * rows);
    }
    pass.phase(Kernel::Matmul(&[id]), groups * heads, Chunking::Guided(4), |worker, range| {
        for head in range.start / groups..range.end.div_ceil(groups) {
            let part = ops::part(&range, head * groups, groups);
            let at = head * rows * width..(head + 1) * rows * width;
            assert!(at.end <= latent_buffers.heads.len());
            // SAFETY: the range is inside, see above; it is written by group of outputs of a head in this phase, and
            // read by nobody.
            let out = unsafe {
                Destination::from_raw(latent_buffers.heads.as_ptr().add(at.start), at.len(), width)
            };
            // SAFETY: inputs are only read in this phase.
            let input =
                unsafe { latent_buffers.input.rows(matrix.row_kind(), head * rows..(head + 1) * rows) };
            matrix.multiply(&model.matmul, head, input, rows, part, &out, &mut worker.scratch.matmul);
        }
    });
}

impl Worker<'_> {
    /// Absorbed and rotated queries of a row, and its latent vector into the page.
    fn latent_store(&mut self, op: &Latent, row: usize) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        let LatentShape { heads, plain, rotated, latent, value: _ } = op.shape;
        let (rows, dim) = (plan.rows.len(), op.shape.key_dim());
        let rope = &model.program.ropes[op.rope];
        let table_row = op.rope * self.step.tokens.len() + plan.rows[row];
        // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
        let rope_row = &unsafe { self.read(&buffers.rope_table, table_row, model.rope_stride) }
            [..2 * rope.frequencies.len()];
        let scale =
            op.position_scale.map(|scale| reference::ops::position_scale(&scale, plan.positions[row]));
        // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
        let query = unsafe { self.read(&buffers.latent.query, row, op.shape.query_width()) };
        for (head, query) in query.chunks_exact(plain + rotated).enumerate() {
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            let q = unsafe { self.write(&buffers.q, row * heads + head, dim) };
            // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
            q[..latent]
                .copy_from_slice(unsafe { self.read(&buffers.latent.heads, head * rows + row, latent) });
            q[latent..].copy_from_slice(&query[plain..]);
            model.rows.rotate(&mut q[latent..], rope_row, rope.style);
            if let Some(scale) = scale.filter(|&scale| scale != 1.0) {
                model.rows.scale(q, scale);
            }
            if self.arena.is_quantized() {
                model.rows.hadamard(q);
            }
        }
        // SAFETY: the phase is shared by row; see the table at the head of this file.
        let k = unsafe { self.write(&buffers.k, row, dim) };
        if let Some(bias) = op.down.bias {
            model.rows.add(k, model.vector(bias));
        }
        let (vector, rotated) = k.split_at_mut(latent);
        self.finish_row(vector, None, op.latent_norm);
        model.rows.rotate(rotated, rope_row, rope.style);
        let (page, token) = plan.place(self.step, row, op.kv.group);
        let place = Place { group: op.kv.group, page, layer_slot: op.kv.layer_slot, kv_head: 0, token };
        self.scratch.stored.set(&model.rows, k);
        for half in [Half::K, Half::V] {
            // SAFETY: in this phase each row's slot is written by one worker, and nobody reads pages.
            unsafe { self.arena.write(place, half, &self.scratch.stored) };
        }
    }
}
