//! Mixtures of experts, as phases of the thread pool:
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | dense network beside the experts, if there is one | | `branch_outputs`, `x` | `x`, `branch_outputs` |
//! | add, norm, quantize | row | `branch_outputs`, `x` | `x`, `rows` |
//! | router | 16 experts | `rows` | `logits` |
//! | route | row | `logits` | `ids`, `weights` |
//! | sort | row of an expert | `rows` | `expert rows` |
//! | shared expert, if there is one: gate, up, activate, down | | `rows` | `branch_outputs` |
//! | gate, up | 16 outputs of an expert | `expert rows` | `gate`, `up` |
//! | activate, quantize | row of an expert and slice | `gate`, `up` | `expert rows` |
//! | down | 16 outputs of an expert | `expert rows` | `out` |
//! | combine | row | `out`, `weights`, `branch_outputs` | `branch_outputs` |
//!
//! For experts with rows of their own width, a matmul precedes sorting, and another one is applied to a row's sum
//! before it is added.
//!
//! The leader sorts rows by expert between routing and sorting, so that each expert's weights are read once for all of
//! its rows. A row of an expert is computed like a row of any matmul, and a row's experts are added in ascending order
//! of ids, so results do not depend on the batch.
//!
//! Weights of experts that no row has chosen are not read. Stacked matrices are packed one by one, so no block of 16
//! outputs spans two experts.

mod route;

use paguro_backend::{Activation, Beside, ExpertLatent, Experts, Linear, MatrixId, Router};

use self::route::choose;
use paguro_cpu_kernels::{matrix::Destination, ops, quantize::row_blocks};

use crate::{
    bounds,
    buffers::Shared,
    by_expert::RowsByExpert,
    pass::{self, ACTIVATE_SLICE, Kernel, Pass},
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Pending, Worker},
};

/// Computes a mixture of experts. Returns its output, `[rows, hidden]`.
pub fn experts(pass: &mut Pass<'_>, op: &Experts, mut pending: AllPending, output: usize) -> Pending {
    let (model, buffers, rows) = (pass.model, pass.buffers, pass.rows());
    if let Some(Beside { dense, sum_norm: _ }) = op.beside.as_deref() {
        // The branch output keeps its result until `combine`, which adds bias and norm.
        match bounds::are_in(dense) {
            true => bounds::dense(pass, dense, pending, output),
            false => pass::dense(pass, dense, pending, output),
        };
        pending = AllPending::NONE;
    }
    let inputs = Kinds::of(model, &[op.gate.unwrap_or(op.up), op.up]);
    let mut all = Kinds::of(model, &[op.router.linear]);
    all = all.and(op.latent.map_or(inputs, |latent| Kinds::of(model, &[latent.down])));
    if let Some(norm) = op.router.norm {
        pass.add_norm(Some(norm), pending, Kinds::of(model, &[op.router.linear]));
        route(pass, &op.router, op.count);
        pending = AllPending::NONE;
    }
    if let Some(shared) = &op.shared {
        let or_up = |linear: Option<Linear>| linear.unwrap_or(shared.up);
        let linears = [or_up(shared.gate), shared.up, or_up(shared.output_gate)];
        all = all.and(Kinds::of(model, &linears));
    }
    pass.add_norm(op.norm, pending, all);
    if op.router.norm.is_none() {
        route(pass, &op.router, op.count);
    }
    let by_expert = std::mem::take(pass.by_expert);
    match op.latent {
        None => sort_rows(pass, &by_expert, inputs),
        Some(latent) => {
            pass.multiply(rows, [(latent.down.matrix, &buffers.experts.latent)]);
            pass.add_bias(latent.down, &buffers.experts.latent, latent.width);
            sort_latent(pass, &by_expert, latent.width, inputs);
        }
    }
    if let Some(shared) = &op.shared {
        if let Some(gate) = shared.output_gate {
            pass.multiply(rows, [(gate.matrix, &buffers.experts.output_gate)]);
        }
        pass::gated(pass, shared.gate, shared.up, shared.width, op.activation, shared.down, output);
    }
    let experts = &buffers.experts;
    let up = (op.up.matrix, &experts.up);
    match op.gate {
        Some(gate) => multiply_experts(pass, &by_expert, [(gate.matrix, &experts.gate), up]),
        None => multiply_experts(pass, &by_expert, [up]),
    }
    activate_experts(pass, op, op.activation, &by_expert);
    multiply_experts(pass, &by_expert, [(op.down.matrix, &experts.out)]);
    if let Some(latent) = op.latent {
        combine_latent(pass, op, latent, &by_expert);
    }
    combine(pass, op, &by_expert, output);
    *pass.by_expert = by_expert;
    Pending { output, bias: None, post_norm: op.post_norm, scale: 1.0 }
}

/// Chooses the experts of each row, and sorts rows by them.
fn route(pass: &mut Pass<'_>, router: &Router, count: usize) {
    let (model, rows) = (pass.model, pass.rows());
    let buffers = &pass.buffers.experts;
    pass.multiply(rows, [(router.linear.matrix, &buffers.logits)]);
    let used = router.used;
    pass.phase(Kernel::Route, rows, Chunking::Guided(4), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            let logits = unsafe { worker.write(&buffers.logits, row, count) };
            if let Some(bias) = router.linear.bias {
                model.rows.add(logits, model.vector(bias));
            }
            let at = row * used..(row + 1) * used;
            // SAFETY: only this worker has this row in this phase.
            let (ids, weights) = unsafe { (buffers.ids.get_mut(at.clone()), buffers.weights.get_mut(at)) };
            let bias = router.selection_bias.map(|bias| model.vector(bias));
            choose(logits, &mut worker.scratch.row, router, bias, ids, weights);
            if let Some(scales) = router.expert_scale {
                let scales = model.vector(scales);
                ids.iter().zip(weights).for_each(|(&id, weight)| *weight *= scales[id as usize]);
            }
        }
    });
    // SAFETY: no phase is open.
    let ids = unsafe { buffers.ids.get(0..rows * used) };
    pass.by_expert.sort(ids, used, count);
}

/// Copies rows of the input into the order of their experts.
fn sort_rows(pass: &mut Pass<'_>, by_expert: &RowsByExpert, kinds: Kinds) {
    let hidden = pass.model.program.hidden;
    let (from, to) = (&pass.buffers.input, &pass.buffers.experts.input);
    pass.phase(Kernel::Sort, by_expert.rows.len(), Chunking::Guided(4), |_, range| {
        for slot in range {
            let row = by_expert.rows[slot];
            if kinds.quantized {
                let (from_start, to_start) = (row * from.quantized_stride, slot * to.quantized_stride);
                let blocks = row_blocks(hidden);
                // SAFETY: only this worker writes this slot, and nobody writes rows in this phase.
                unsafe {
                    to.quantized
                        .get_mut(to_start..to_start + blocks)
                        .copy_from_slice(from.quantized.get(from_start..from_start + blocks));
                }
            }
            if kinds.float {
                let (from_start, to_start) = (row * from.float_stride, slot * to.float_stride);
                // SAFETY: as above.
                unsafe {
                    to.float
                        .get_mut(to_start..to_start + hidden)
                        .copy_from_slice(from.float.get(from_start..from_start + hidden));
                }
            }
        }
    });
}

/// Copies rows of the experts' own width into the order of their experts.
fn sort_latent(pass: &mut Pass<'_>, by_expert: &RowsByExpert, width: usize, kinds: Kinds) {
    let buffers = &pass.buffers.experts;
    pass.phase(Kernel::Sort, by_expert.rows.len(), Chunking::Guided(4), |worker, range| {
        for slot in range {
            // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
            let row = unsafe { worker.read(&buffers.latent, by_expert.rows[slot], width) };
            worker.set_input(&buffers.input, slot, 0, row, kinds, true);
        }
    });
}

/// Multiplies the rows of each expert with its matrices; groups of outputs of all experts are shared as one list.
fn multiply_experts<const N: usize>(
    pass: &mut Pass<'_>,
    by_expert: &RowsByExpert,
    linears: [(MatrixId, &Shared<f32>); N],
) {
    let model = pass.model;
    let ids = linears.map(|(id, _)| id);
    let per_expert: usize = ids.iter().map(|&id| model.matrix(id).groups()).sum();
    let input = &pass.buffers.experts.input;
    for &expert in &by_expert.experts {
        pass.add_squares(&ids, expert, input, by_expert.slots_of(expert));
    }
    let count = per_expert * by_expert.experts.len();
    pass.phase(Kernel::Matmul(&ids), count, Chunking::Guided(4), |worker, range| {
        for index in range.start / per_expert..range.end.div_ceil(per_expert) {
            let expert = by_expert.experts[index];
            let slots = by_expert.slots_of(expert);
            let groups = ops::part(&range, index * per_expert, per_expert);
            let mut offset = 0;
            for (id, out) in linears {
                let matrix = model.matrix(id);
                let part = ops::part(&groups, offset, matrix.groups());
                offset += matrix.groups();
                let width = matrix.rows();
                let rows = slots.start * width..slots.end * width;
                assert!(rows.end <= out.len());
                // SAFETY: the range is inside, see above; it is written by group of outputs of an expert in this
                // phase, and read by nobody.
                let out = unsafe { Destination::from_raw(out.as_ptr().add(rows.start), rows.len(), width) };
                // SAFETY: inputs are only read in this phase.
                let input = unsafe { input.rows(matrix.row_kind(), slots.clone()) };
                let scratch = &mut worker.scratch.matmul;
                matrix.multiply(&model.matmul, expert, input, slots.len(), part, &out, scratch);
            }
        }
    });
}

fn activate_experts(pass: &mut Pass<'_>, op: &Experts, activation: Activation, by_expert: &RowsByExpert) {
    let (model, buffers, width) = (pass.model, &pass.buffers.experts, op.width);
    let slices = width.div_ceil(ACTIVATE_SLICE);
    let kinds = Kinds::of(model, &[op.down]);
    let count = by_expert.rows.len() * slices;
    pass.phase(Kernel::Activate, count, Chunking::Guided(slices.div_ceil(4)), |worker, range| {
        for unit in range {
            let (slot, first) = (unit / slices, unit % slices * ACTIVATE_SLICE);
            let end = width.min(first + ACTIVATE_SLICE);
            let at = slot * width + first..slot * width + end;
            let expert = by_expert.expert_of(slot);
            let bias =
                |linear: Linear| linear.bias.map(|bias| &model.vector(bias)[expert * width..][first..end]);
            // SAFETY: only this worker has this slice of this slot in this phase.
            let (gate, up) = unsafe { (buffers.gate.get_mut(at.clone()), buffers.up.get_mut(at)) };
            let gate = op.gate.map(|linear| (gate, bias(linear)));
            let active = model.activate(gate, (up, bias(op.up)), activation);
            worker.set_input(&buffers.input, slot, first, active, kinds, end == width);
        }
    });
}

/// Adds up the experts of each row, of their own width, and multiplies the sums with their matrix.
fn combine_latent(pass: &mut Pass<'_>, op: &Experts, latent: ExpertLatent, by_expert: &RowsByExpert) {
    let (buffers, width) = (pass.buffers, latent.width);
    let kinds = Kinds::of(pass.model, &[latent.up]);
    pass.phase(Kernel::CombineLatent, pass.rows(), Chunking::Guided(1), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            let sum = unsafe { worker.write(&buffers.experts.latent, row, width) };
            sum.fill(0.0);
            worker.add_experts(op, by_expert, row, sum);
            worker.set_input(&buffers.input, row, 0, sum, kinds, true);
        }
    });
    pass.multiply(pass.rows(), [(latent.up.matrix, &buffers.experts.latent_out)]);
}

/// Adds up the experts of each row.
fn combine(pass: &mut Pass<'_>, op: &Experts, by_expert: &RowsByExpert, output: usize) {
    let hidden = pass.model.program.hidden;
    pass.phase(Kernel::Combine, pass.rows(), Chunking::Guided(1), |worker, range| {
        for row in range {
            worker.combine_row(op, by_expert, output, row, hidden);
        }
    });
}

impl Worker<'_> {
    fn combine_row(
        &mut self,
        op: &Experts,
        by_expert: &RowsByExpert,
        output: usize,
        row: usize,
        hidden: usize,
    ) {
        let (model, buffers) = (self.model, &self.buffers.experts);
        // SAFETY: the phase is shared by row; see the table at the head of this file.
        let output = unsafe { self.write(&self.buffers.branch_outputs[output], row, hidden) };
        let mut own_sum = std::mem::take(&mut self.scratch.sum);
        // With a network beside the experts, the branch output has its result.
        let sum = if op.beside.is_some() { &mut own_sum[..hidden] } else { &mut *output };
        match &op.shared {
            None => sum.fill(0.0),
            Some(shared) => {
                if let Some(bias) = shared.down.bias {
                    model.rows.add(sum, model.vector(bias));
                }
                if let Some(gate) = &shared.output_gate {
                    let bias = gate.bias.map_or(0.0, |bias| model.vector(bias)[0]);
                    // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
                    let logit = unsafe { self.read(&buffers.output_gate, row, 1) }[0] + bias;
                    model.rows.scale(sum, 1.0 / (1.0 + (-logit).exp()));
                }
            }
        }
        match op.latent {
            None => self.add_experts(op, by_expert, row, sum),
            Some(latent) => {
                self.add_row_bias(latent.up.bias, sum);
                // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
                model.rows.add(sum, unsafe { self.read(&buffers.latent_out, row, hidden) });
            }
        }
        if let Some(Beside { dense, sum_norm }) = op.beside.as_deref() {
            if let Some(bias) = dense.down.bias {
                model.rows.add(output, model.vector(bias));
            }
            let normed = &mut self.scratch.row[..hidden];
            model.norm(Some(*sum_norm), &own_sum[..hidden], normed);
            model.norm(dense.post_norm, output, &mut own_sum[..hidden]);
            output.copy_from_slice(&own_sum[..hidden]);
            model.rows.add(output, normed);
        }
        self.scratch.sum = own_sum;
    }
}

impl Worker<'_> {
    /// Adds the weighted outputs of a row's experts.
    fn add_experts(&self, op: &Experts, by_expert: &RowsByExpert, row: usize, sum: &mut [f32]) {
        let (model, buffers) = (self.model, &self.buffers.experts);
        let (used, width) = (op.router.used, sum.len());
        for choice in row * used..(row + 1) * used {
            // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
            let (slot, weight) =
                (by_expert.slots[choice], unsafe { self.read(&buffers.weights, choice, 1) }[0]);
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            let out = unsafe { self.write(&buffers.out, slot, width) };
            if let Some(bias) = op.down.bias {
                let expert = by_expert.expert_of(slot);
                model.rows.add(out, &model.vector(bias)[expert * width..][..width]);
            }
            model.rows.add_scaled(sum, out, weight);
        }
    }
}
