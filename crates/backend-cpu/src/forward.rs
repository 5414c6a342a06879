//! One forward pass as phases of the thread pool.
//!
//! The leader runs through the operations and starts one phase after the other. In a phase every buffer is either read
//! by all workers or written by one worker per row, group of outputs, head or tile. The phases of a layer, for any
//! number of rows:
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | add, norm, quantize | row | `branch_outputs`, `x` | `x`, `rows` |
//! | q, k, v | 16 outputs | `rows` | `q`, `k`, `v` |
//! | rotate, store | row and K/V head | `q`, `k`, `v` | `q`, pages |
//! | attend | tile (and split) | `q`, pages | `attended` or `partials` |
//! | merge, only if splits were shared | tile | `partials` | `attended` |
//! | quantize | row | `attended` | `rows` |
//! | project | 16 outputs | `rows` | `branch_outputs` |
//! | add, norm, quantize | row | `branch_outputs`, `x` | `x`, `rows` |
//! | gate, up | 16 outputs | `rows` | `gate`, `up` |
//! | activate, quantize | row and slice | `gate`, `up` | `gate`, `rows` |
//! | down | 16 outputs | `rows` | `branch_outputs` |
//!
//! Norms of whole rows of queries and keys are a further phase before RoPE, by row. A mixture of experts has the phases
//! of `experts.rs` instead of the last three. Latent attention has those of `latent.rs`, and a mixer with a state those
//! of `recurrent.rs`, instead of the first eight. Embeddings for layers have the phases of `layer_input.rs`, once
//! before the first layer and at the end of each.

use paguro_backend::{
    Branch, Exit, FeedForward, Head, Input, Layer, Mixer, OutputKind, OutputValue, Residual, StepError,
    sampling,
};
use paguro_cpu_kernels::ops;

use crate::{
    attend, bounds, ends, experts, joined, latent, layer_input,
    pass::{self, Answers, Kernel, Pass, put},
    recurrent, row_ops, ssd,
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Pending},
};

/// All operations.
///
/// # Errors
/// A table that cannot be read.
pub fn run(pass: &mut Pass<'_>, answers: &Answers) -> Result<(), StepError> {
    let model = pass.model;
    begin(pass);
    if let Some(op) = model.program.layer_embeds() {
        layer_input::layer_embeds(pass, op)?;
    }
    let mut pending = row_ops::taps(pass, 0, AllPending::NONE, answers);
    for (index, layer) in model.program.layers.iter().enumerate() {
        if let Some((_, tail)) = pass.tail.filter(|(first, _)| *first == index) {
            if tail.rows.is_empty() {
                return Ok(());
            }
            ends::keep_output_rows(pass, tail, pending);
            pass.plan = tail;
        }
        pending = run_layer(pass, layer, pending);
        if index + 1 < model.program.given_parts && !pass.step.given.is_empty() {
            pending = ends::add_given(pass, index + 1, pending);
        }
        pending = row_ops::taps(pass, index + 1, pending, answers);
    }
    match &model.program.exit {
        Exit::Logits(op) => head(pass, op, pending, answers),
        Exit::Rows => ends::rows(pass, pending, answers),
        Exit::Merged(_) => {} // its taps are all
    }
    Ok(())
}

/// Runs a layer. Returns the branches to add to the residual stream.
fn run_layer(pass: &mut Pass<'_>, layer: &Layer, before: AllPending) -> AllPending {
    let mixed = match &layer.mixer {
        Mixer::None => before,
        Mixer::Sum(all) => {
            // They read the same stream, and so write different outputs.
            let (mut branches, mut before) = ([None; 2], before);
            for (output, (to, Branch { mixer, scale })) in branches.iter_mut().zip(all).enumerate() {
                let mixed = mix(pass, mixer, before, output);
                *to = Some(Pending { scale: scale * layer.branch_scale, ..mixed });
                before = AllPending::NONE;
            }
            AllPending { branches, ..AllPending::NONE }
        }
        mixer => AllPending::of(Pending { scale: layer.branch_scale, ..mix(pass, mixer, before, 0) }),
    };
    let mixed = AllPending { norm: mixed.norm.or(layer.norm_after_mixer), ..mixed };
    // Parallel branches also read the same stream.
    let is_parallel = layer.residual == Residual::Parallel && !matches!(layer.mixer, Mixer::None);
    let (before, left, output) = match is_parallel {
        false => (mixed, None, 0),
        true => (AllPending::NONE, mixed.branches[0], 1),
    };
    let fed = match &layer.ffn {
        FeedForward::None => return AllPending { scale: mixed.scale * layer.output_scale, ..mixed },
        FeedForward::Dense(dense) if bounds::are_in(dense) => bounds::dense(pass, dense, before, output),
        FeedForward::Dense(dense) => pass::dense(pass, dense, before, output),
        FeedForward::Experts(experts) => experts::experts(pass, experts, before, output),
    };
    let branches = [left, Some(Pending { scale: layer.branch_scale, ..fed })];
    let mut pending = AllPending { branches, norm: layer.norm_after_ffn, scale: 1.0 };
    if let Some(input) = &layer.input {
        pending = AllPending::of(layer_input::layer_input(pass, input, pending));
    }
    AllPending { scale: layer.output_scale, ..pending }
}

/// Runs a mixer, which writes branch output number `output`.
fn mix(pass: &mut Pass<'_>, mixer: &Mixer, before: AllPending, output: usize) -> Pending {
    match mixer {
        Mixer::Attention(op) => attend::attention(pass, op, before, output),
        Mixer::Latent(op) => latent::latent(pass, op, before, output),
        Mixer::Conv(op) => recurrent::short_conv(pass, op, before, output),
        Mixer::DeltaRule(op) => recurrent::delta_rule(pass, op, before, output),
        Mixer::Ssd(op) => ssd::ssd(pass, op, before, output),
        Mixer::None | Mixer::Sum(_) => unreachable!("`run_layer` has handled it"),
    }
}

/// Phase: the residual stream before the first layer, and the rotations of all rows.
fn begin(pass: &mut Pass<'_>) {
    let rows = pass.rows();
    let joined = match &pass.model.program.input {
        Input::Patches(patches) => {
            row_ops::patches(pass, patches);
            false
        }
        Input::Tokens(embed) => joined::joined(pass, embed),
        Input::Rows => false,
    };
    pass.phase(Kernel::Embed, rows, Chunking::Guided(4), |worker, range| {
        let (model, buffers) = (worker.model, worker.buffers);
        for row in range {
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            let x = unsafe { worker.write(&buffers.x, row, model.program.hidden) };
            match &model.program.input {
                _ if joined => {}       // made before
                Input::Patches(_) => {} // made before
                input => match (worker.given(row, 0), input) {
                    (Some(given), _) => x.copy_from_slice(given),
                    (None, Input::Tokens(embed)) => worker.embed(embed, row, x),
                    (None, _) => unreachable!("a valid step gives all rows"),
                },
            }
            let position = worker.plan.positions[row];
            let coordinates = worker.step.coordinates_of(row, position);
            for (index, rope) in model.program.ropes.iter().enumerate() {
                // SAFETY: the phase is shared by row; see the table at the head of this file.
                let rope_row =
                    unsafe { worker.write(&buffers.rope_table, index * rows + row, model.rope_stride) };
                ops::rope_row(rope, position, coordinates, &mut rope_row[..2 * rope.frequencies.len()]);
            }
        }
    });
}

/// Runs the end of rows with outputs, a slice of rows at a time: embeddings, then logits where they are needed, and
/// the outputs; at last, means of rows.
fn head(pass: &mut Pass<'_>, op: &Head, pending: AllPending, answers: &Answers) {
    let (model, buffers, plan) = (pass.model, pass.buffers, pass.plan);
    let (hidden, vocab) = (model.program.hidden, model.program.vocab);
    let projection = op.projection;
    let kinds = match projection {
        Some(projection) => Kinds::of(model, &[op.linear, projection.linear]),
        None => Kinds::of(model, &[op.linear]),
    };
    let slice = buffers.logits.len() / vocab;
    let mut first = 0;
    while first < plan.outputs.rows.len() {
        let logit_rows = (plan.outputs.logit_rows - plan.outputs.logit_rows.min(first)).min(slice);
        // Rows without logits come last, all at once.
        let end = if logit_rows > 0 { first + logit_rows } else { plan.outputs.rows.len() };
        let (start, rows) = (first, &plan.outputs.rows[first..end]);
        first = end;
        pass.phase(Kernel::AddNorm, rows.len(), Chunking::Guided(1), |worker, range| {
            for at in range {
                worker.add_pending(rows[at], pending);
                worker.norm_row(rows[at], Some(op.norm));
                let mut is_of_mean = false;
                for &output in plan.outputs.outputs_of(start + at) {
                    match &worker.step.outputs[output].kind {
                        OutputKind::Embedding if projection.is_some() => {}
                        OutputKind::Embedding => {
                            let embedding = worker.scratch.row[..hidden].to_vec();
                            put(&answers[output], OutputValue::Embedding(embedding));
                        }
                        OutputKind::Residual => put(&answers[output], worker.residual(rows[at])),
                        OutputKind::Mean => is_of_mean = true,
                        OutputKind::Sample(_)
                        | OutputKind::Score { token: _, top: _ }
                        | OutputKind::Logits => {}
                    }
                }
                if is_of_mean {
                    // SAFETY: the phase is shared by row; see the table at the head of this file.
                    let x = unsafe { worker.write(&buffers.x, rows[at], hidden) };
                    x.copy_from_slice(&worker.scratch.row[..hidden]);
                }
                if at < logit_rows || projection.is_some() {
                    worker.set_input(&buffers.input, at, 0, &worker.scratch.row[..hidden], kinds, true);
                }
            }
        });
        if let Some(projection) = projection {
            ends::project(pass, projection, start, rows.len(), answers);
        }
        if logit_rows == 0 {
            continue;
        }
        let adapted = plan.adapted_of(&rows[..logit_rows]);
        let linears = [(op.linear.matrix, &buffers.logits)];
        pass.multiply_rows(&buffers.input, logit_rows, &adapted, linears);
        pass.phase(Kernel::Sample, logit_rows, Chunking::Single, |worker, range| {
            for at in range {
                // SAFETY: the phase is shared by row; see the table at the head of this file.
                let logits = unsafe { worker.write(&buffers.logits, at, vocab) };
                if let Some(bias) = op.linear.bias {
                    model.rows.add(logits, model.vector(bias));
                }
                if op.scale != 1.0 {
                    model.rows.scale(logits, op.scale);
                }
                if let Some(cap) = op.soft_cap {
                    model.rows.soft_cap(logits, cap);
                }
                for &output in plan.outputs.outputs_of(start + at) {
                    let kind = &worker.step.outputs[output].kind;
                    if let Some(outcome) = sampling::answer(logits, kind, &mut worker.scratch.sampler) {
                        put(&answers[output], outcome);
                    }
                }
            }
        });
    }
    if !plan.outputs.means.is_empty() {
        ends::means(pass, answers);
    }
}
