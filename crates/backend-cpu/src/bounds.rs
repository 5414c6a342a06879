//! Layers whose matrices have bounds of their inputs and outputs (Gemma 4 E2B and E4B's tower), as further phases: the input of each
//! matrix is written again with its own bounds. Only towers have them, so that other programs have no branch for each row.

use paguro_backend::{Attention, Bounds, Dense, Linear, Norm};

use crate::{
    buffers::Shared,
    pass::{Kernel, Pass},
    plan::Heads,
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Pending},
};

/// Phases: the matmuls of queries, keys and values. The residual stream is complete.
pub fn bounded_qkv(pass: &mut Pass<'_>, op: &Attention) {
    let (buffers, heads) = (pass.buffers, Heads::of(&pass.model.program, op));
    bounded(pass, op.norm, op.q, &buffers.q, heads.q_width());
    for (linear, out) in [(op.k, &buffers.k), (op.v, &buffers.v)] {
        if let Some(linear) = linear {
            bounded(pass, op.norm, linear, out, heads.kv_width());
        }
    }
}

/// Returns true if matrices of a dense feed-forward network have bounds.
pub fn are_in(op: &Dense) -> bool {
    [op.gate.unwrap_or(op.up), op.up, op.down].iter().any(|linear| linear.bounds.is_some())
}

/// Phases: a dense feed-forward network with bounds.
pub fn dense(pass: &mut Pass<'_>, op: &Dense, pending: AllPending, output: usize) -> Pending {
    let (model, buffers, rows, width) = (pass.model, pass.buffers, pass.rows(), op.width);
    // Completes the residual stream.
    pass.add_norm(op.norm, pending, Kinds::of(model, &[op.up]));
    if let Some(gate) = op.gate {
        bounded(pass, op.norm, gate, &buffers.gate, width);
    }
    bounded(pass, op.norm, op.up, &buffers.up, width);
    let kinds = Kinds::of(model, &[op.down]);
    pass.phase(Kernel::Activate, rows, Chunking::Guided(1), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row.
            let (gate, up) =
                unsafe { (worker.write(&buffers.gate, row, width), worker.write(&buffers.up, row, width)) };
            let active = model.activate(op.gate.map(|_| (gate, None)), (up, None), op.activation);
            if let Some(bounds) = &op.down.bounds {
                bounds.clamp_input(active);
            }
            worker.set_input(&buffers.input, row, 0, active, kinds, true);
        }
    });
    pass.multiply(rows, [(op.down.matrix, &buffers.branch_outputs[output])]);
    clamp_output(pass, op.down, &buffers.branch_outputs[output], model.program.hidden);
    Pending { output, bias: op.down.bias, post_norm: op.post_norm, scale: 1.0 }
}

/// Phases: the norm of the residual stream within the bounds of a matrix, the matmul, and the bounds of its output.
fn bounded(pass: &mut Pass<'_>, norm: Option<Norm>, linear: Linear, out: &Shared<f32>, width: usize) {
    let (hidden, rows, kinds) = (pass.model.program.hidden, pass.rows(), Kinds::of(pass.model, &[linear]));
    pass.phase(Kernel::AddNorm, rows, Chunking::Guided(1), |worker, range| {
        for row in range {
            worker.norm_row(row, norm);
            let normed = &mut worker.scratch.row[..hidden];
            if let Some(bounds) = &linear.bounds {
                bounds.clamp_input(normed);
            }
            worker.set_input(&worker.buffers.input, row, 0, &worker.scratch.row[..hidden], kinds, true);
        }
    });
    pass.multiply(rows, [(linear.matrix, out)]);
    clamp_output(pass, linear, out, width);
}

/// Phase: the bounds of the output of a matrix, if it has some.
pub fn clamp_output(pass: &mut Pass<'_>, linear: Linear, out: &Shared<f32>, width: usize) {
    let Some(bounds) = linear.bounds else { return };
    pass.phase(Kernel::Activate, pass.rows(), Chunking::Guided(4), move |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row.
            Bounds::clamp_output(&bounds, unsafe { worker.write(out, row, width) });
        }
    });
}
