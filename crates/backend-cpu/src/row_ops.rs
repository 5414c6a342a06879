//! Ends of towers: operations on rows, [`BLOCK_ROWS`] of their results at a time, as phases of the thread pool. Each phase is shared
//! by row, except for matmuls.

use std::{ops::Range, sync::PoisonError};

use paguro_backend::{Norm, OutputValue, Patches, RowOp};

use crate::{
    buffers::BLOCK_ROWS,
    pass::{Answers, Kernel, Pass},
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Worker},
};

/// Rows in one of the buffers.
#[derive(Clone, Copy)]
struct Rows {
    /// Index into [`RowOpBuffers::rows`](crate::buffers::RowOpBuffers::rows).
    at: usize,
    count: usize,
    width: usize,
}

/// Phases: the residual stream before the first layer, of patches.
pub fn patches(pass: &mut Pass<'_>, op: &Patches) {
    let (hidden, count) = (pass.model.program.hidden, pass.rows());
    for first in (0..count).step_by(BLOCK_ROWS) {
        let rows = Rows { at: 0, count: BLOCK_ROWS.min(count - first), width: op.width };
        each(pass, Kernel::Embed, rows, move |worker, row, x| {
            let given = worker.step.given_row(first + row, worker.model.program.given_width());
            x.copy_from_slice(&given.unwrap_or_default()[..op.width]);
        });
        let rows = row_ops(pass, &op.ops, rows, first, op.width);
        each(pass, Kernel::Embed, rows, move |worker, row, x| {
            // SAFETY: the phase is shared by row.
            unsafe { worker.write(&worker.buffers.x, first + row, hidden) }.copy_from_slice(x);
        });
    }
}

/// Phases: the taps after this number of layers. Returns what is still to be added to the stream.
pub fn taps(pass: &mut Pass<'_>, layers: usize, pending: AllPending, answers: &Answers) -> AllPending {
    let model = pass.model;
    let Some(merged) = model.program.merged() else { return pending };
    if !merged.taps.iter().any(|tap| tap.layers == layers) {
        return pending;
    }
    let (hidden, all) = (model.program.hidden, pass.rows());
    pass.phase(Kernel::AddNorm, all, Chunking::Guided(4), |worker, range| {
        range.for_each(|row| worker.add_pending(row, pending));
    });
    let count = all / merged.rows;
    for (index, tap) in merged.taps.iter().enumerate().filter(|(_, tap)| tap.layers == layers) {
        for first in (0..count).step_by(BLOCK_ROWS) {
            let block = first..count.min(first + BLOCK_ROWS);
            let rows = Rows { at: 0, count: block.len() * merged.rows, width: hidden };
            each(pass, Kernel::AddNorm, rows, move |worker, row, x| {
                // SAFETY: no phase of operations on rows writes the stream while it is read.
                let from = unsafe { worker.read(&worker.buffers.x, first * merged.rows + row, hidden) };
                x.copy_from_slice(from);
            });
            let rows = row_ops(pass, &tap.ops, rows, 0, 0);
            answer(pass, block, merged.rows, index, rows, answers);
        }
    }
    AllPending::NONE
}

/// Copies merged rows `block` into the answers that want them, as part `index`.
fn answer(pass: &Pass<'_>, block: Range<usize>, merged: usize, index: usize, rows: Rows, answers: &Answers) {
    let Rows { at, width, count: _ } = rows;
    for (output, answer) in pass.step.outputs.iter().zip(answers) {
        let row = output.row / merged;
        if !block.contains(&row) {
            continue;
        }
        let row = row - block.start;
        // SAFETY: no phase is open.
        let from = unsafe { pass.buffers.row_ops.rows[at].get(row * width..(row + 1) * width) };
        let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
        let all = pass.model.program.residual_width();
        let answer = answer.get_or_insert_with(|| OutputValue::Residual(vec![0.0; all]));
        if let OutputValue::Residual(to) = answer {
            to[index * width..][..width].copy_from_slice(from);
        }
    }
}

/// Phases: operations on rows. `first` is the row of the step that the first one belongs to, and `added` the place in given rows
/// of what is added. Returns the rows at the end.
fn row_ops(pass: &mut Pass<'_>, ops: &[RowOp], mut rows: Rows, first: usize, mut added: usize) -> Rows {
    let (model, buffers) = (pass.model, &pass.buffers.row_ops);
    for op in ops {
        let (count, width) = op.shape(rows.count, rows.width);
        match *op {
            RowOp::Norm(norm) => each(pass, Kernel::AddNorm, rows, move |worker, _, x| {
                normed(worker, norm, x);
            }),
            RowOp::Linear { linear, width, activation } => {
                let kinds = Kinds::of(model, &[linear]);
                each(pass, Kernel::Quantize, rows, move |worker, row, x| {
                    worker.set_input(&buffers.input, row, 0, x, kinds, true);
                });
                let to = 1 - rows.at;
                pass.multiply_rows(&buffers.input, count, &[], [(linear.matrix, &buffers.rows[to])]);
                rows = Rows { at: to, count, width };
                if linear.bias.is_some() || activation.is_some() {
                    each(pass, Kernel::Activate, rows, move |worker, _, x| {
                        if let Some(bias) = linear.bias {
                            worker.model.rows.add(x, worker.model.vector(bias));
                        }
                        if let Some(activation) = activation {
                            worker.model.rows.activate(x, activation);
                        }
                    });
                }
            }
            RowOp::Add => {
                let hidden = model.program.hidden;
                each(pass, Kernel::Embed, rows, move |worker, row, x| {
                    let given = worker.step.given_row(first + row, worker.model.program.given_width());
                    worker.model.rows.add(x, &given.unwrap_or_default()[added..][..hidden]);
                });
                added += hidden;
            }
            RowOp::Join(_) => {}
            RowOp::Mean { rows: joined, scale } => {
                let (from, to) = (rows.at, 1 - rows.at);
                each(pass, Kernel::AddNorm, Rows { at: to, count, width }, move |worker, row, x| {
                    x.fill(0.0);
                    for one in row * joined..(row + 1) * joined {
                        // SAFETY: no worker writes this buffer in this phase.
                        let from = unsafe { worker.read(&worker.buffers.row_ops.rows[from], one, width) };
                        worker.model.rows.add(x, from);
                    }
                    worker.model.rows.scale(x, scale / joined as f32);
                });
                rows.at = to;
            }
            RowOp::Affine { scale, bias } => each(pass, Kernel::AddNorm, rows, move |worker, _, x| {
                let (scale, bias) = (worker.model.vector(scale), worker.model.vector(bias));
                let factors = scale.iter().zip(bias);
                x.iter_mut().zip(factors).for_each(|(x, (scale, bias))| *x = *x * scale + bias);
            }),
            RowOp::Activate { activation, gated: false } => {
                each(pass, Kernel::Activate, rows, move |worker, _, x| {
                    worker.model.rows.activate(x, activation);
                });
            }
            RowOp::Activate { activation, gated: true } => {
                let (from, to) = (rows.at, 1 - rows.at);
                each(pass, Kernel::Activate, Rows { at: to, count, width }, move |worker, row, x| {
                    // SAFETY: no worker writes this buffer in this phase.
                    let from = unsafe { worker.read(&worker.buffers.row_ops.rows[from], row, 2 * width) };
                    let (gate, up) = from.split_at(width);
                    x.copy_from_slice(gate);
                    worker.model.rows.activate_gate(x, up, activation);
                });
                rows.at = to;
            }
        }
        (rows.count, rows.width) = (count, width);
    }
    rows
}

/// Phase: `work` with the number and the elements of each row.
fn each(
    pass: &mut Pass<'_>,
    kernel: Kernel<'_>,
    rows: Rows,
    work: impl Fn(&mut Worker<'_>, usize, &mut [f32]) + Sync,
) {
    let Rows { at, count, width } = rows;
    pass.phase(kernel, count, Chunking::Guided(4), |worker, range| {
        let buffers = worker.buffers;
        for row in range {
            // SAFETY: the phase is shared by row.
            let x = unsafe { buffers.row_ops.rows[at].get_mut(row * width..(row + 1) * width) };
            work(worker, row, x);
        }
    });
}

/// Norms a row in place.
fn normed(worker: &mut Worker<'_>, norm: Norm, x: &mut [f32]) {
    let out = &mut worker.scratch.row[..x.len()];
    worker.model.norm(Some(norm), x, out);
    x.copy_from_slice(out);
}
