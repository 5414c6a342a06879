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

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use paguro_backend::{
    Activation, Branch, Dense, Exit, FeedForward, Head, Input, Layer, Linear, MatrixId, Mixer, Norm,
    OutputKind, OutputValue, Projection, Residual, Step, StepError, VectorId, sampling,
};

use crate::{
    adapters::{AdaptedRows, Adapters, Changes},
    buffers::{Buffers, MatmulInput},
    counters::{Counters, Kernel},
    experts::RowsByExpert,
    matrix::{Destination, RowKind},
    model::{Kinds, Model},
    ops,
    pages::Arena,
    plan::StepPlan,
    quantize::BLOCK,
    shared::Shared,
    states::States,
    thread_pool::{Chunking, ThreadPool},
    worker::{Worker, WorkerScratch},
};

/// Rows that a runner multiplies between two pauses at most: a portion of 64 outputs takes some milliseconds.
const PACED_ROWS: usize = 512;

/// Outputs of a row that one worker activates at once: whole blocks of the quantized row.
const ACTIVATE_SLICE: usize = 8 * BLOCK;

/// The output of a branch that has not been added to the residual stream yet: the next phase that norms a row adds it.
#[derive(Clone, Copy)]
pub struct Pending {
    /// Index into [`Buffers::branch_outputs`].
    pub output: usize,
    pub bias: Option<VectorId>,
    pub post_norm: Option<Norm>,
    pub scale: f32,
}

/// Outputs of branches that are not in the residual stream yet. The next phase that norms a row adds them.
#[derive(Clone, Copy)]
pub struct AllPending {
    /// At most one for each branch of a layer.
    pub branches: [Option<Pending>; 2],
    /// Norm of the stream after that.
    pub norm: Option<Norm>,
    /// Multiplies the stream at the end.
    pub scale: f32,
}

impl AllPending {
    /// No branches.
    pub const NONE: Self = Self { branches: [None; 2], norm: None, scale: 1.0 };

    /// Returns one branch.
    pub fn of(branch: Pending) -> Self {
        Self { branches: [Some(branch), None], ..Self::NONE }
    }
}

/// One pass over a step, from the leader's view.
pub struct Pass<'a> {
    pub model: &'a Model,
    pub adapters: &'a Adapters,
    pub buffers: &'a Buffers,
    pub arena: &'a Arena,
    pub states: &'a States,
    pub step: &'a Step<'a>,
    pub plan: &'a StepPlan,
    pub counters: &'a Counters,
    pub pool: &'a mut ThreadPool,
    /// Working memory by thread.
    pub scratch: &'a mut [WorkerScratch],
    /// Rows of each expert.
    pub by_expert: &'a mut RowsByExpert,
    /// From this layer on, only rows with outputs are computed, because no later row reads other data of these layers.
    pub tail: Option<(usize, &'a StepPlan)>,
}

/// The answer to each of the step's outputs.
pub type Answers = [Mutex<Option<OutputValue>>];

impl Pass<'_> {
    /// All operations.
    ///
    /// # Errors
    /// A table that cannot be read.
    pub fn run(&mut self, answers: &Answers) -> Result<(), StepError> {
        let model = self.model;
        self.begin();
        if let Some(op) = model.program.layer_embeds() {
            self.layer_embeds(op)?;
        }
        let mut pending = self.taps(0, AllPending::NONE, answers);
        for (index, layer) in model.program.layers.iter().enumerate() {
            if let Some((_, tail)) = self.tail.filter(|(first, _)| *first == index) {
                if tail.rows.is_empty() {
                    return Ok(());
                }
                self.keep_output_rows(tail, pending);
                self.plan = tail;
            }
            pending = self.layer(layer, pending);
            if index + 1 < model.program.given_parts && !self.step.given.is_empty() {
                pending = self.add_given(index + 1, pending);
            }
            pending = self.taps(index + 1, pending, answers);
        }
        match &model.program.exit {
            Exit::Logits(head) => self.head(head, pending, answers),
            Exit::Rows => self.end(pending, answers),
            Exit::Merged(_) => {} // its taps are all
        }
        Ok(())
    }

    /// Runs a layer. Returns the branches to add to the residual stream.
    fn layer(&mut self, layer: &Layer, before: AllPending) -> AllPending {
        let mixed = match &layer.mixer {
            Mixer::None => before,
            Mixer::Sum(all) => {
                // They read the same stream, and so write different outputs.
                let (mut branches, mut before) = ([None; 2], before);
                for (output, (to, Branch { mixer, scale })) in branches.iter_mut().zip(all).enumerate() {
                    let mixed = self.mix(mixer, before, output);
                    *to = Some(Pending { scale: scale * layer.branch_scale, ..mixed });
                    before = AllPending::NONE;
                }
                AllPending { branches, ..AllPending::NONE }
            }
            mixer => AllPending::of(Pending { scale: layer.branch_scale, ..self.mix(mixer, before, 0) }),
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
            FeedForward::Dense(dense) => self.dense(dense, before, output),
            FeedForward::Experts(experts) => self.experts(experts, before, output),
        };
        let branches = [left, Some(Pending { scale: layer.branch_scale, ..fed })];
        let mut pending = AllPending { branches, norm: layer.norm_after_ffn, scale: 1.0 };
        if let Some(input) = &layer.input {
            pending = AllPending::of(self.layer_input(input, pending));
        }
        AllPending { scale: layer.output_scale, ..pending }
    }

    /// Runs a mixer, which writes branch output number `output`.
    fn mix(&mut self, mixer: &Mixer, before: AllPending, output: usize) -> Pending {
        match mixer {
            Mixer::Attention(op) => self.attention(op, before, output),
            Mixer::Latent(op) => self.latent(op, before, output),
            Mixer::Conv(op) => self.short_conv(op, before, output),
            Mixer::DeltaRule(op) => self.delta_rule(op, before, output),
            Mixer::Ssd(op) => self.ssd(op, before, output),
            Mixer::None | Mixer::Sum(_) => unreachable!("`layer` has handled it"),
        }
    }

    /// Returns the number of rows that are computed.
    pub fn rows(&self) -> usize {
        self.plan.rows.len()
    }

    /// Moves the rows that have outputs to the front.
    fn keep_output_rows(&mut self, tail: &StepPlan, pending: AllPending) {
        let (hidden, buffers) = (self.model.program.hidden, self.buffers);
        let embeds = self.model.program.layer_embeds().map_or(0, |embeds| embeds.count * embeds.width);
        let pending = pending.branches.iter().flatten().map(|branch| &buffers.branch_outputs[branch.output]);
        let moved = pending.chain([&buffers.x]).map(|buffer| (buffer, hidden));
        for (buffer, width) in moved.chain([(&buffers.layer_embeds, embeds)]) {
            // Rows are ascending, so that none is overwritten before it is moved.
            for (to, &from) in tail.rows.iter().enumerate().filter(|(to, from)| to != *from) {
                // SAFETY: no phase is open, and these are two rows.
                let (from, to) = unsafe {
                    (
                        buffer.get(from * width..(from + 1) * width),
                        buffer.get_mut(to * width..(to + 1) * width),
                    )
                };
                to.copy_from_slice(from);
            }
        }
    }

    /// Runs a phase, timed on the leader: workers perform `work` for all of `0..count`.
    pub fn phase(
        &mut self,
        kernel: Kernel<'_>,
        count: usize,
        chunking: Chunking,
        work: impl Fn(&mut Worker<'_>, Range<usize>) + Sync,
    ) {
        let start = Instant::now();
        let Self { model, buffers, arena, states, step, plan, .. } = *self;
        self.pool.run_with(self.scratch, count, chunking, |scratch, range| {
            work(&mut Worker { model, buffers, arena, states, step, plan, scratch }, range);
        });
        self.counters.launched(kernel, start.elapsed());
    }

    /// Phase: the residual stream before the first layer, and the rotations of all rows.
    fn begin(&mut self) {
        let rows = self.rows();
        let joined = match &self.model.program.input {
            Input::Patches(patches) => {
                self.patches(patches);
                false
            }
            Input::Tokens(embed) => self.joined(embed),
            Input::Rows => false,
        };
        self.phase(Kernel::Embed, rows, Chunking::Guided(4), |worker, range| {
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

    /// Phase: adds pending branches, and part `part` of given rows.
    fn add_given(&mut self, part: usize, pending: AllPending) -> AllPending {
        self.phase(Kernel::AddNorm, self.rows(), Chunking::Guided(4), |worker, range| {
            let hidden = worker.model.program.hidden;
            for row in range {
                worker.add_pending(row, pending);
                if let Some(given) = worker.given(row, part) {
                    // SAFETY: the phase is shared by row; see the table at the head of this file.
                    worker.model.rows.add(unsafe { worker.write(&worker.buffers.x, row, hidden) }, given);
                }
            }
        });
        AllPending::NONE
    }

    /// Phase: adds pending branches, norms, and writes the result as input of the next matmuls.
    pub fn add_norm(&mut self, norm: Option<Norm>, pending: AllPending, kinds: Kinds) {
        let hidden = self.model.program.hidden;
        self.phase(Kernel::AddNorm, self.rows(), Chunking::Guided(1), |worker, range| {
            for row in range {
                worker.add_pending(row, pending);
                worker.norm_row(row, norm);
                worker.set_input(&worker.buffers.input, row, 0, &worker.scratch.row[..hidden], kinds, true);
            }
        });
    }

    /// Phase: multiplies `count` rows of the input with several matrices, whose groups of outputs are shared as one
    /// list.
    pub fn multiply<const N: usize>(&mut self, count: usize, linears: [(MatrixId, &Shared<f32>); N]) {
        let plan = self.plan;
        self.multiply_rows(&self.buffers.input, count, &plan.adapted, linears);
    }

    /// Phase: multiplies `count` rows of any input, of which some use adapters. Runners that pause have a phase for each block of rows.
    pub fn multiply_rows<const N: usize>(
        &mut self,
        input: &MatmulInput,
        count: usize,
        adapted: &[AdaptedRows],
        linears: [(MatrixId, &Shared<f32>); N],
    ) {
        let model = self.model;
        self.add_squares(&linears.map(|(id, _)| id), 0, input, 0..count);
        let groups: usize = linears.iter().map(|(id, _)| model.matrix(*id).groups()).sum();
        let ids = linears.map(|(id, _)| id);
        let floats = ids.iter().any(|&id| model.matrix(id).row_kind() == RowKind::Float);
        // The groups that kernels multiply at once. More if the rows exceed the second-level cache, so that a worker
        // reads them less often.
        let unit = match (floats, count) {
            (true, _) => 4,
            (false, ..=64) => 2,
            (false, _) => (groups / (4 * self.pool.threads())).clamp(2, 8),
        };
        let changes = self.changes(adapted, &ids);
        let block = if self.pool.pace.is_some() { PACED_ROWS } else { count.max(1) };
        for first in (0..count).step_by(block) {
            let rows = first..count.min(first + block);
            // The first phase also has the adapters' part for all rows.
            let changes = (first == 0).then_some(&changes);
            self.multiply_block(input, rows, linears, (groups, unit), changes);
        }
        self.apply(&changes, input, &linears.map(|(_, out)| out));
    }

    /// Phase: multiplies these rows, in units of `unit` of all `groups` groups of outputs, and all adapted ones of `changes` with the
    /// first matrices of their adapters.
    fn multiply_block<const N: usize>(
        &mut self,
        input: &MatmulInput,
        rows: Range<usize>,
        linears: [(MatrixId, &Shared<f32>); N],
        (groups, unit): (usize, usize),
        changes: Option<&Changes<'_>>,
    ) {
        let (model, ids) = (self.model, linears.map(|(id, _)| id));
        let units = changes.map_or(0, Changes::units);
        self.phase(Kernel::Matmul(&ids), units + groups, Chunking::Guided(unit), |worker, range| {
            if let Some(changes) = changes {
                changes.down(0, &range, &model.matmul, input, &mut worker.scratch.matmul);
            }
            let mut offset = units;
            for (id, out) in linears {
                let matrix = model.matrix(id);
                let part = ops::part(&range, offset, matrix.groups());
                offset += matrix.groups();
                let width = matrix.rows();
                let start = rows.start * width;
                let length = out.len().checked_sub(start).expect("the rows are in the buffer");
                // SAFETY: `start` is in the buffer, which is written by group of outputs in this phase, and read by nobody.
                let out = unsafe { Destination::from_raw(out.as_ptr().add(start), length, width) };
                // SAFETY: inputs are only read in this phase.
                let input = unsafe { input.rows(matrix.row_kind(), rows.clone()) };
                matrix.multiply(&model.matmul, 0, input, rows.len(), part, &out, &mut worker.scratch.matmul);
            }
        });
    }

    /// Adds rows of part `part` of matrices to the [sums of squares](paguro_backend::InputSquares), if they are collected.
    /// No phase is open.
    pub fn add_squares(&self, ids: &[MatrixId], part: usize, input: &MatmulInput, rows: Range<usize>) {
        let Some(squares) = &self.model.squares else { return };
        let stride = input.float_stride;
        // SAFETY: no phase is open, so nobody writes.
        let values = unsafe { input.float.get(rows.start * stride..rows.end * stride) };
        ids.iter().for_each(|&id| squares.add(id, part, values, stride));
    }

    /// Computes a dense feed-forward network. Returns its output, `[rows, hidden]`.
    pub fn dense(&mut self, op: &Dense, pending: AllPending, output: usize) -> Pending {
        let inputs = [op.gate.unwrap_or(op.up), op.up];
        self.add_norm(op.norm, pending, Kinds::of(self.model, &inputs));
        if [inputs[0], op.up, op.down].iter().any(|linear| linear.bounds.is_some()) {
            return self.bounded_dense(op, output);
        }
        self.gated(op.gate, op.up, op.width, op.activation, op.down, output);
        Pending { output, bias: op.down.bias, post_norm: op.post_norm, scale: 1.0 }
    }

    /// Phases: the matmuls of gate and up, the activation, and the matmul of down.
    pub fn gated(
        &mut self,
        gate: Option<Linear>,
        up: Linear,
        width: usize,
        activation: Activation,
        down: Linear,
        output: usize,
    ) {
        let (model, buffers, rows) = (self.model, self.buffers, self.rows());
        match gate {
            Some(gate) => self.multiply(rows, [(gate.matrix, &buffers.gate), (up.matrix, &buffers.up)]),
            None => self.multiply(rows, [(up.matrix, &buffers.up)]),
        }
        let slices = width.div_ceil(ACTIVATE_SLICE);
        let kinds = Kinds::of(model, &[down]);
        self.phase(Kernel::Activate, rows * slices, Chunking::Guided(slices.div_ceil(4)), |worker, range| {
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
        self.multiply(rows, [(down.matrix, &buffers.branch_outputs[output])]);
    }

    /// Phase: the rows of the residual stream that have outputs.
    fn end(&mut self, pending: AllPending, answers: &Answers) {
        let plan = self.plan;
        let rows = &plan.outputs.rows;
        if rows.is_empty() {
            return;
        }
        self.phase(Kernel::AddNorm, rows.len(), Chunking::Guided(4), |worker, range| {
            for at in range {
                worker.add_pending(rows[at], pending);
                for &output in plan.outputs.outputs_of(at) {
                    put(&answers[output], worker.residual(rows[at]));
                }
            }
        });
    }

    /// Runs the end of rows with outputs, a slice of rows at a time: embeddings, then logits where they are needed, and
    /// the outputs.
    fn head(&mut self, op: &Head, pending: AllPending, answers: &Answers) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
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
            self.phase(Kernel::AddNorm, rows.len(), Chunking::Guided(1), |worker, range| {
                for at in range {
                    worker.add_pending(rows[at], pending);
                    worker.norm_row(rows[at], Some(op.norm));
                    for &output in plan.outputs.outputs_of(start + at) {
                        match &worker.step.outputs[output].kind {
                            OutputKind::Embedding if projection.is_some() => {}
                            OutputKind::Embedding => {
                                let embedding = worker.scratch.row[..hidden].to_vec();
                                put(&answers[output], OutputValue::Embedding(embedding));
                            }
                            OutputKind::Residual => put(&answers[output], worker.residual(rows[at])),
                            OutputKind::Sample(_)
                            | OutputKind::Score { token: _, top: _ }
                            | OutputKind::Logits => {}
                        }
                    }
                    if at < logit_rows || projection.is_some() {
                        worker.set_input(&buffers.input, at, 0, &worker.scratch.row[..hidden], kinds, true);
                    }
                }
            });
            if let Some(projection) = projection {
                self.project(projection, start, rows.len(), answers);
            }
            if logit_rows == 0 {
                continue;
            }
            let adapted = plan.adapted_of(&rows[..logit_rows]);
            let linears = [(op.linear.matrix, &buffers.logits)];
            self.multiply_rows(&buffers.input, logit_rows, &adapted, linears);
            self.phase(Kernel::Sample, logit_rows, Chunking::Single, |worker, range| {
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
    }
}

impl Pass<'_> {
    /// Phases: projects the next matmul's input, which has `rows` rows with outputs from number `first` on, and returns the results as
    /// embeddings.
    fn project(&mut self, op: Projection, first: usize, rows: usize, answers: &Answers) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        self.multiply_rows(&buffers.input, rows, &[], [(op.linear.matrix, &buffers.projected)]);
        self.phase(Kernel::AddNorm, rows, Chunking::Guided(1), |worker, range| {
            for at in range {
                // SAFETY: the phase is shared by row; see the table at the head of this file.
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
}

fn put(answer: &Mutex<Option<OutputValue>>, outcome: OutputValue) {
    *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
}
