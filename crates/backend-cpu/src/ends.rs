//! Rows that a step of plain tokens has not, as phases of the thread pool: given rows of later layers, the rows that go on to the last
//! layers, rows that leave a stage, means, and rows that the head projects.

use paguro_backend::{OutputKind, OutputValue, Projection, mean_of_rows};

use crate::{
    pass::{Answers, Kernel, Pass, put},
    plan::StepPlan,
    thread_pool::Chunking,
    worker::AllPending,
};

/// Moves the rows that have outputs to the front.
pub fn keep_output_rows(pass: &mut Pass<'_>, tail: &StepPlan, pending: AllPending) {
    let (hidden, buffers) = (pass.model.program.hidden, pass.buffers);
    let embeds = pass.model.program.layer_embeds().map_or(0, |embeds| embeds.count * embeds.width);
    let pending = pending.branches.iter().flatten().map(|branch| &buffers.branch_outputs[branch.output]);
    let moved = pending.chain([&buffers.x]).map(|buffer| (buffer, hidden));
    for (buffer, width) in moved.chain([(&buffers.layer_embeds, embeds)]) {
        // Rows are ascending, so that none is overwritten before it is moved.
        for (to, &from) in tail.rows.iter().enumerate().filter(|(to, from)| to != *from) {
            // SAFETY: no phase is open, and these are two rows.
            let (from, to) = unsafe {
                (buffer.get(from * width..(from + 1) * width), buffer.get_mut(to * width..(to + 1) * width))
            };
            to.copy_from_slice(from);
        }
    }
}

/// Phase: adds pending branches, and part `part` of given rows.
pub fn add_given(pass: &mut Pass<'_>, part: usize, pending: AllPending) -> AllPending {
    pass.phase(Kernel::AddNorm, pass.rows(), Chunking::Guided(4), |worker, range| {
        let hidden = worker.model.program.hidden;
        for row in range {
            worker.add_pending(row, pending);
            if let Some(given) = worker.given(row, part) {
                // SAFETY: the phase is shared by row; see the table in `forward.rs`.
                worker.model.rows.add(unsafe { worker.write(&worker.buffers.x, row, hidden) }, given);
            }
        }
    });
    AllPending::NONE
}

/// Phase: the rows of the residual stream that have outputs.
pub fn rows(pass: &mut Pass<'_>, pending: AllPending, answers: &Answers) {
    let plan = pass.plan;
    let rows = &plan.outputs.rows;
    if rows.is_empty() {
        return;
    }
    pass.phase(Kernel::AddNorm, rows.len(), Chunking::Guided(4), |worker, range| {
        for at in range {
            worker.add_pending(rows[at], pending);
            for &output in plan.outputs.outputs_of(at) {
                put(&answers[output], worker.residual(rows[at]));
            }
        }
    });
}

/// Phase: the means of rows, which have been normed in the residual stream.
pub fn means(pass: &mut Pass<'_>, answers: &Answers) {
    let plan = pass.plan;
    pass.phase(Kernel::AddNorm, plan.outputs.means.len(), Chunking::Guided(1), |worker, range| {
        let hidden = worker.model.program.hidden;
        for (output, rows) in &plan.outputs.means[range] {
            // SAFETY: nobody writes the stream in this phase.
            let row = |&row: &usize| unsafe { worker.read(&worker.buffers.x, row, hidden) };
            let mean = mean_of_rows(plan.outputs.rows[rows.clone()].iter().map(row), hidden);
            put(&answers[*output], OutputValue::Embedding(mean));
        }
    });
}

/// Phases: projects the next matmul's input, which has `rows` rows with outputs from number `first` on, and returns the results as
/// embeddings.
pub fn project(pass: &mut Pass<'_>, op: Projection, first: usize, rows: usize, answers: &Answers) {
    let (model, buffers, plan) = (pass.model, pass.buffers, pass.plan);
    pass.multiply_rows(&buffers.input, rows, &[], [(op.linear.matrix, &buffers.projected)]);
    pass.phase(Kernel::AddNorm, rows, Chunking::Guided(1), |worker, range| {
        for at in range {
            // SAFETY: the phase is shared by row; see the table in `forward.rs`.
            let row = unsafe { worker.write(&buffers.projected, at, op.width) };
            if let Some(bias) = op.linear.bias {
                model.rows.add(row, model.vector(bias));
            }
            for &output in plan.outputs.outputs_of(first + at) {
                if matches!(worker.step.outputs[output].kind, OutputKind::Embedding) {
                    put(&answers[output], OutputValue::Embedding(row.to_vec()));
                }
            }
        }
    });
}
