//! Dense feed-forward networks, as phases of the thread pool: see the table in `forward.rs`.

use paguro_backend::{Activation, Dense, Linear};
use paguro_cpu_kernels::quantize::BLOCK;

use crate::{
    bounds,
    counters::Kernel,
    model::Kinds,
    pass::Pass,
    thread_pool::Chunking,
    worker::{AllPending, Pending},
};

/// Outputs of a row that one worker activates at once: whole blocks of the quantized row.
pub const ACTIVATE_SLICE: usize = 8 * BLOCK;

/// Computes a dense feed-forward network. Returns its output, `[rows, hidden]`.
pub fn dense(pass: &mut Pass<'_>, op: &Dense, pending: AllPending, output: usize) -> Pending {
    let inputs = [op.gate.unwrap_or(op.up), op.up];
    pass.add_norm(op.norm, pending, Kinds::of(pass.model, &inputs));
    if [inputs[0], op.up, op.down].iter().any(|linear| linear.bounds.is_some()) {
        return bounds::bounded_dense(pass, op, output);
    }
    gated(pass, op.gate, op.up, op.width, op.activation, op.down, output);
    Pending { output, bias: op.down.bias, post_norm: op.post_norm, scale: 1.0 }
}

/// Phases: the matmuls of gate and up, the activation, and the matmul of down.
pub fn gated(
    pass: &mut Pass<'_>,
    gate: Option<Linear>,
    up: Linear,
    width: usize,
    activation: Activation,
    down: Linear,
    output: usize,
) {
    let (model, buffers, rows) = (pass.model, pass.buffers, pass.rows());
    match gate {
        Some(gate) => pass.multiply(rows, [(gate.matrix, &buffers.gate), (up.matrix, &buffers.up)]),
        None => pass.multiply(rows, [(up.matrix, &buffers.up)]),
    }
    let slices = width.div_ceil(ACTIVATE_SLICE);
    let kinds = Kinds::of(model, &[down]);
    pass.phase(Kernel::Activate, rows * slices, Chunking::Guided(slices.div_ceil(4)), |worker, range| {
        for unit in range {
            let (row, first) = (unit / slices, unit % slices * ACTIVATE_SLICE);
            let end = width.min(first + ACTIVATE_SLICE);
            let at = row * width + first..row * width + end;
            // SAFETY: only this worker has this slice of this row in this phase.
            let (gates, ups) = unsafe { (buffers.gate.get_mut(at.clone()), buffers.up.get_mut(at)) };
            let bias = |linear: Linear| linear.bias.map(|bias| &model.vector(bias)[first..end]);
            let gates = gate.map(|gate| (gates, bias(gate)));
            let active = model.activate(gates, (ups, bias(up)), activation);
            worker.set_input(&buffers.input, row, first, active, kinds, end == width);
        }
    });
    pass.multiply(rows, [(down.matrix, &buffers.branch_outputs[output])]);
}
