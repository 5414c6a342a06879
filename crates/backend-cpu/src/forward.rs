//! One forward pass as phases of the thread team.
//!
//! The leader runs through the operations and starts one phase after the other. In a phase every buffer is either read
//! by all members or written by one member per row, group of outputs, head or tile. The phases of a layer, for any
//! number of rows:
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | add, norm, quantize | row | `product`, `x` | `x`, `rows` |
//! | q, k, v | 16 outputs | `rows` | `q`, `k`, `v` |
//! | rotate, store | row and K/V head | `q`, `k`, `v` | `q`, pages |
//! | attend | tile (and split) | `q`, pages | `attended` or `partials` |
//! | merge, only if splits were shared | tile | `partials` | `attended` |
//! | quantize | row | `attended` | `rows` |
//! | project | 16 outputs | `rows` | `product` |
//! | add, norm, quantize | row | `product`, `x` | `x`, `rows` |
//! | gate, up | 16 outputs | `rows` | `gate`, `up` |
//! | activate, quantize | row and slice | `gate`, `up` | `gate`, `rows` |
//! | down | 16 outputs | `rows` | `product` |
//!
//! Norms of whole rows of queries and keys are a further phase before RoPE, by row. A mixture of experts has the phases
//! of `experts.rs` instead of the last three. Latent attention has those of `latent.rs`, and a mixer with a state those
//! of `recurrent.rs`, instead of the first eight. Embeddings for layers have the phases of `layer_input.rs`, once
//! before the first layer and at the end of each.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use paguro_backend::{
    Activation, AttentionMode, Branch, Dense, FeedForward, Head, InputSquares, Layer, Linear, Matrix,
    MatrixId, Mixer, Norm, NormKind, Outcome, Program, Residual, Step, StepError, VectorId, sampling,
};

use crate::{
    attention::{AttentionKernels, Scores},
    counters::{Counters, Kernel},
    delta::{DeltaKernels, DeltaScratch},
    experts::{ExpertBuffers, Grouping},
    latent::LatentBuffers,
    matrix::{MatrixKernels, Output, PackedMatrix, RowKind, Rows, Scratch},
    ops::{self, RowKernels},
    pages::{Arena, StoredHead},
    plan::Plan,
    quantize::{BLOCK, QuantBlock, row_blocks},
    recurrent::RecurrentBuffers,
    shared::Shared,
    states::States,
    team::{Portions, Team},
};

/// Outputs of a row that one member activates at once: whole blocks of the quantized row.
const ACTIVATE_SLICE: usize = 8 * BLOCK;

/// The model and its kernels; nothing of it changes after load.
pub struct Model {
    /// The program.
    pub program: Program,
    /// Matrices by [`MatrixId`].
    pub matrices: Vec<PackedMatrix>,
    /// Vectors by [`VectorId`].
    pub vectors: Vec<Vec<f32>>,
    /// Tables by [`TableId`](paguro_backend::TableId).
    pub tables: Vec<Matrix>,
    /// Cosines and sines of a rope and row, at most.
    pub turn_stride: usize,
    /// Paged or gathered.
    pub attention: AttentionMode,
    /// Products.
    pub products: MatrixKernels,
    /// Row operations.
    pub rows: RowKernels,
    /// Attention.
    pub attend: AttentionKernels,
    /// Mixers with a state.
    pub delta: DeltaKernels,
    /// Receives the squares of all inputs of matrices.
    pub squares: Option<Arc<InputSquares>>,
}

impl Model {
    pub fn matrix(&self, id: MatrixId) -> &PackedMatrix {
        &self.matrices[id.0 as usize]
    }

    pub fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    /// Adds biases and applies the activation; returns where the result is.
    pub fn activate<'a>(
        &self,
        gate: Option<(&'a mut [f32], Option<&[f32]>)>,
        (up, up_bias): (&'a mut [f32], Option<&[f32]>),
        activation: Activation,
    ) -> &'a [f32] {
        if let Some(bias) = up_bias {
            self.rows.add(up, bias);
        }
        let Some((gate, gate_bias)) = gate else {
            self.rows.activate(up, activation);
            return up;
        };
        if let Some(bias) = gate_bias {
            self.rows.add(gate, bias);
        }
        self.rows.activate_gate(gate, up, activation);
        gate
    }

    /// `out = norm(x)`, a copy without a norm; both of its width.
    pub fn norm(&self, norm: Option<Norm>, x: &[f32], out: &mut [f32]) {
        let Some(norm) = norm else { return out.copy_from_slice(x) };
        let weight = self.vector(norm.weight);
        match norm.kind {
            NormKind::Rms => self.rows.rms_norm(x, weight, norm.eps, out),
            NormKind::Layer => self.rows.layer_norm(x, weight, norm.eps, out),
        }
        if let Some(bias) = norm.bias {
            self.rows.add(out, self.vector(bias));
        }
    }
}

/// Buffers between phases, allocated at load for the largest step.
pub struct Buffers {
    /// Residual stream, `[rows, hidden]`.
    pub x: Shared<f32>,
    /// Outputs of a layer's branches, `[rows, hidden]` each.
    pub products: [Shared<f32>; 2],
    /// Inputs of the next product.
    pub input: Input,
    /// Queries, `[rows, heads * head_dim]`.
    pub q: Shared<f32>,
    /// Keys of the step's rows, `[rows, kv_heads * head_dim]`.
    pub k: Shared<f32>,
    /// Values of the step's rows, `[rows, kv_heads * head_dim]`.
    pub v: Shared<f32>,
    /// Output of attention, `[rows, heads * head_dim]`.
    pub attended: Shared<f32>,
    /// Gates of attention, `[rows, heads * head_dim]`.
    pub attention_gate: Shared<f32>,
    /// Gates, `[rows, ffn]`.
    pub gate: Shared<f32>,
    /// Ups, `[rows, ffn]`.
    pub up: Shared<f32>,
    /// Cosines and sines by rope and row, `[ropes, rows, turn_stride]`.
    pub turns: Shared<f32>,
    /// Partial attention of shared splits, by tile, split and query.
    pub partials: Shared<f32>,
    /// Logits of a slice of the output rows, `[slice, vocab]`.
    pub logits: Shared<f32>,
    /// Buffers of mixtures of experts.
    pub experts: ExpertBuffers,
    /// Buffers of mixers with a state.
    pub recurrent: RecurrentBuffers,
    /// Embeddings for layers, `[rows, count * width]`.
    pub layer_embeds: Shared<f32>,
    /// Buffers of latent attention.
    pub latent: LatentBuffers,
}

/// Rows that products read.
pub struct Input {
    /// For quantized weights, `[rows, quantized_stride]`.
    pub quantized: Shared<QuantBlock>,
    /// For weights in floats, `[rows, float_stride]`.
    pub float: Shared<f32>,
    /// Blocks from one quantized row to the next.
    pub quantized_stride: usize,
    /// Floats from one float row to the next.
    pub float_stride: usize,
}

impl Input {
    /// Returns rows `rows` of the kind that a matrix multiplies.
    ///
    /// # Safety
    /// No thread writes them while they are used.
    pub unsafe fn rows(&self, kind: RowKind, rows: Range<usize>) -> Rows<'_> {
        // SAFETY: the caller keeps writers away.
        unsafe {
            match kind {
                RowKind::Quantized => Rows::Quantized {
                    blocks: self
                        .quantized
                        .get(rows.start * self.quantized_stride..rows.end * self.quantized_stride),
                    stride: self.quantized_stride,
                },
                RowKind::Float => Rows::Float {
                    values: self.float.get(rows.start * self.float_stride..rows.end * self.float_stride),
                    stride: self.float_stride,
                },
            }
        }
    }
}

/// Working memory of a member.
pub struct Own {
    /// Scratch of matmuls.
    pub scratch: Scratch,
    /// Scores of a few queries over a split.
    pub scores: Box<Scores>,
    /// Partial attention of a tile's queries over one split.
    pub partial: Vec<f32>,
    /// Scores and partial results, summed over splits.
    pub sums: Vec<f32>,
    /// A row, `[widest]`.
    pub row: Vec<f32>,
    /// K or V of one head.
    pub stored: StoredHead,
    /// Scratch of the sampler.
    pub sampler: sampling::Scratch,
    /// Scratch of the delta rule.
    pub delta: DeltaScratch,
    /// An input of a short convolution.
    pub product: Vec<f32>,
    /// Sum of a row's experts, where a dense network is beside them.
    pub sum: Vec<f32>,
    /// A row of a table, encoded.
    pub encoded: Vec<u8>,
    /// The decoded row.
    pub embeds: Vec<f32>,
}

/// The output of a branch that has not been added to the residual stream yet: the next phase that norms a row adds it.
#[derive(Clone, Copy)]
pub struct Pending {
    /// Index into [`Buffers::products`].
    pub product: usize,
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
    pub buffers: &'a Buffers,
    pub arena: &'a Arena,
    pub states: &'a States,
    pub step: &'a Step<'a>,
    pub plan: &'a Plan,
    pub counters: &'a Counters,
    pub team: &'a mut Team,
    /// Working memory by thread.
    pub own: &'a mut [Own],
    /// Rows of each expert.
    pub grouping: &'a mut Grouping,
    /// From this layer on, only rows with outputs are computed, because no later row reads other data of these layers.
    pub tail: Option<(usize, &'a Plan)>,
}

/// A member in a phase.
pub struct Member<'a> {
    pub model: &'a Model,
    pub buffers: &'a Buffers,
    pub arena: &'a Arena,
    pub states: &'a States,
    pub step: &'a Step<'a>,
    pub plan: &'a Plan,
    pub own: &'a mut Own,
}

/// The answer to each of the step's outputs.
pub type Answers = [Mutex<Option<Outcome>>];

impl Pass<'_> {
    /// All operations.
    ///
    /// # Errors
    /// A table that cannot be read.
    pub fn run(&mut self, answers: &Answers) -> Result<(), StepError> {
        let model = self.model;
        self.embed();
        if let Some(op) = &model.program.embed.layers {
            self.layer_embeds(op)?;
        }
        let mut pending = AllPending::NONE;
        for (index, layer) in model.program.layers.iter().enumerate() {
            if let Some((_, tail)) = self.tail.filter(|(first, _)| *first == index) {
                if tail.rows.is_empty() {
                    return Ok(());
                }
                self.keep_output_rows(tail, pending);
                self.plan = tail;
            }
            pending = self.layer(layer, pending);
        }
        self.head(&model.program.head, pending, answers);
        Ok(())
    }

    /// Runs a layer. Returns the branches to add to the residual stream.
    fn layer(&mut self, layer: &Layer, before: AllPending) -> AllPending {
        let mixed = match &layer.mixer {
            Mixer::None => before,
            Mixer::Sum(all) => {
                // They read the same stream, and so write different products.
                let (mut branches, mut before) = ([None; 2], before);
                for (product, (to, Branch { mixer, scale })) in branches.iter_mut().zip(all).enumerate() {
                    let mixed = self.mix(mixer, before, product);
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
        let (before, left, product) = match is_parallel {
            false => (mixed, None, 0),
            true => (AllPending::NONE, mixed.branches[0], 1),
        };
        let fed = match &layer.ffn {
            FeedForward::None => return AllPending { scale: mixed.scale * layer.output_scale, ..mixed },
            FeedForward::Dense(dense) => self.dense(dense, before, product),
            FeedForward::Experts(experts) => self.experts(experts, before, product),
            other => unreachable!("load refuses {other:?}"),
        };
        let branches = [left, Some(Pending { scale: layer.branch_scale, ..fed })];
        let mut pending = AllPending { branches, norm: layer.norm_after_ffn, scale: 1.0 };
        if let Some(input) = &layer.input {
            pending = AllPending::of(self.layer_input(input, pending));
        }
        AllPending { scale: layer.output_scale, ..pending }
    }

    /// A mixer, which writes its output to a product.
    fn mix(&mut self, mixer: &Mixer, before: AllPending, product: usize) -> Pending {
        match mixer {
            Mixer::Attention(op) => self.attention(op, before, product),
            Mixer::Latent(op) => self.latent(op, before, product),
            Mixer::Conv(op) => self.short_conv(op, before, product),
            Mixer::DeltaRule(op) => self.delta_rule(op, before, product),
            Mixer::Ssd(op) => self.ssd(op, before, product),
            other => unreachable!("load refuses {other:?}"),
        }
    }

    /// Rows that are computed.
    pub fn rows(&self) -> usize {
        self.plan.rows.len()
    }

    /// Moves the rows that have outputs to the front.
    fn keep_output_rows(&mut self, tail: &Plan, pending: AllPending) {
        let (hidden, buffers) = (self.model.program.hidden, self.buffers);
        let embeds = self.model.program.embed.layers.as_ref().map_or(0, |embeds| embeds.count * embeds.width);
        let pending = pending.branches.iter().flatten().map(|branch| &buffers.products[branch.product]);
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

    /// Runs a phase, timed on the leader: members perform `work` for all of `0..count`.
    pub fn phase(
        &mut self,
        kernel: Kernel<'_>,
        count: usize,
        portions: Portions,
        work: impl Fn(&mut Member<'_>, Range<usize>) + Sync,
    ) {
        let start = Instant::now();
        let Self { model, buffers, arena, states, step, plan, .. } = *self;
        self.team.share_with(self.own, count, portions, |own, range| {
            work(&mut Member { model, buffers, arena, states, step, plan, own }, range);
        });
        self.counters.launched(kernel, start.elapsed());
    }

    fn embed(&mut self) {
        let rows = self.rows();
        self.phase(Kernel::Embed, rows, Portions::Guided(4), |member, range| {
            let (model, buffers) = (member.model, member.buffers);
            let embed = &model.program.embed;
            for row in range {
                let x = member.write(&buffers.x, row, model.program.hidden);
                let id = member.step.tokens[row] as usize;
                let (kind, token) = (id / model.program.vocab, id % model.program.vocab);
                model.matrix(embed.table).dequantize_row(token, x);
                if embed.scale != 1.0 {
                    model.rows.scale(x, embed.scale);
                }
                let position = member.plan.positions[row];
                if let Some(positions) = &embed.positions {
                    let learned = &mut member.own.row[..x.len()];
                    model.matrix(positions.table).dequantize_row(position, learned);
                    model.rows.add(x, learned);
                }
                if let Some(types) = &embed.types {
                    model.rows.add(x, &model.vector(types.table)[kind * x.len()..][..x.len()]);
                }
                if let Some(norm) = embed.norm {
                    member.finish_row(x, None, norm);
                }
                for (index, rope) in model.program.ropes.iter().enumerate() {
                    let turns = member.write(&buffers.turns, index * rows + row, model.turn_stride);
                    ops::turns(rope, position, &mut turns[..2 * rope.frequencies.len()]);
                }
            }
        });
    }

    /// Phase: adds pending branches, norms, and writes the result as input of the next matmuls.
    pub fn add_norm(&mut self, norm: Option<Norm>, pending: AllPending, kinds: Kinds) {
        let hidden = self.model.program.hidden;
        self.phase(Kernel::AddNorm, self.rows(), Portions::Guided(1), |member, range| {
            for row in range {
                member.add_pending(row, pending);
                member.norm_row(row, norm);
                member.set_input(&member.buffers.input, row, 0, &member.own.row[..hidden], kinds, true);
            }
        });
    }

    /// Phase: multiplies `count` rows of the input with several matrices, whose groups of outputs are shared as one
    /// list.
    pub fn multiply<const N: usize>(&mut self, count: usize, products: [(MatrixId, &Shared<f32>); N]) {
        let model = self.model;
        self.add_squares(&products.map(|(id, _)| id), 0, &self.buffers.input, 0..count);
        let groups: usize = products.iter().map(|(id, _)| model.matrix(*id).groups()).sum();
        let ids = products.map(|(id, _)| id);
        let floats = ids.iter().any(|&id| model.matrix(id).row_kind() == RowKind::Float);
        // The groups that kernels multiply at once. More if the rows exceed the second-level cache, so that a member
        // reads them less often.
        let unit = match (floats, count) {
            (true, _) => 4,
            (false, ..=64) => 2,
            (false, _) => (groups / (4 * self.team.threads())).clamp(2, 8),
        };
        self.phase(Kernel::Products(&ids), groups, Portions::Guided(unit), |member, range| {
            let buffers = member.buffers;
            let mut offset = 0;
            for (id, out) in products {
                let matrix = model.matrix(id);
                let part = ops::part(&range, offset, matrix.groups());
                offset += matrix.groups();
                let width = matrix.rows();
                // SAFETY: the buffer is written by group of outputs in this phase, and read by nobody.
                let out = unsafe { Output::from_raw(out.as_ptr(), out.len(), width) };
                // SAFETY: inputs are only read in this phase.
                let rows = unsafe { buffers.input.rows(matrix.row_kind(), 0..count) };
                matrix.multiply(&model.products, 0, rows, count, part, &out, &mut member.own.scratch);
            }
        });
    }

    /// Adds rows of part `part` of matrices to the [sums of squares](InputSquares), if they are collected. No phase is open.
    pub fn add_squares(&self, ids: &[MatrixId], part: usize, input: &Input, rows: Range<usize>) {
        let Some(squares) = &self.model.squares else { return };
        let stride = input.float_stride;
        // SAFETY: no phase is open, so nobody writes.
        let values = unsafe { input.float.get(rows.start * stride..rows.end * stride) };
        ids.iter().for_each(|&id| squares.add(id, part, values, stride));
    }

    /// A dense feed-forward network. Returns its output, `[rows, hidden]`.
    pub fn dense(&mut self, op: &Dense, pending: AllPending, product: usize) -> Pending {
        let inputs = [op.gate.unwrap_or(op.up), op.up];
        self.add_norm(op.norm, pending, Kinds::of(self.model, &inputs));
        self.gated(op.gate, op.up, op.width, op.activation, op.down, product);
        Pending { product, bias: op.down.bias, post_norm: op.post_norm, scale: 1.0 }
    }

    /// Phases of the input's products with gate and up, of the activation, and of the product with down.
    pub fn gated(
        &mut self,
        gate: Option<Linear>,
        up: Linear,
        width: usize,
        activation: Activation,
        down: Linear,
        product: usize,
    ) {
        let (model, buffers, rows) = (self.model, self.buffers, self.rows());
        match gate {
            Some(gate) => self.multiply(rows, [(gate.matrix, &buffers.gate), (up.matrix, &buffers.up)]),
            None => self.multiply(rows, [(up.matrix, &buffers.up)]),
        }
        let slices = width.div_ceil(ACTIVATE_SLICE);
        let kinds = Kinds::of(model, &[down]);
        self.phase(Kernel::Activate, rows * slices, Portions::Guided(slices.div_ceil(4)), |member, range| {
            for unit in range {
                let (row, first) = (unit / slices, unit % slices * ACTIVATE_SLICE);
                let end = width.min(first + ACTIVATE_SLICE);
                let at = row * width + first..row * width + end;
                // SAFETY: only this member has this slice of this row in this phase.
                let (gates, ups) = unsafe { (buffers.gate.get_mut(at.clone()), buffers.up.get_mut(at)) };
                let bias = |linear: Linear| linear.bias.map(|bias| &model.vector(bias)[first..end]);
                let gates = gate.map(|gate| (gates, bias(gate)));
                let active = model.activate(gates, (ups, bias(up)), activation);
                member.set_input(&buffers.input, row, first, active, kinds, end == width);
            }
        });
        self.multiply(rows, [(down.matrix, &buffers.products[product])]);
    }

    /// Runs the end of rows with outputs, a slice of rows at a time: embeddings, then logits where they are needed, and
    /// the outputs.
    fn head(&mut self, op: &Head, pending: AllPending, answers: &Answers) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        let Program { hidden, vocab, .. } = model.program;
        let kinds = Kinds::of(model, &[op.linear]);
        let slice = buffers.logits.len() / vocab;
        let mut first = 0;
        while first < plan.output_rows.len() {
            let logit_rows = (plan.logit_rows - plan.logit_rows.min(first)).min(slice);
            // Rows of which only embeddings are wanted come last, all at once.
            let end = if logit_rows > 0 { first + logit_rows } else { plan.output_rows.len() };
            let (start, rows) = (first, &plan.output_rows[first..end]);
            first = end;
            self.phase(Kernel::AddNorm, rows.len(), Portions::Guided(1), |member, range| {
                for at in range {
                    member.add_pending(rows[at], pending);
                    member.norm_row(rows[at], Some(op.norm));
                    for &output in plan.outputs_of(start + at) {
                        if !member.step.outputs[output].want.needs_logits() {
                            let embedding = Outcome::Embedding(member.own.row[..hidden].to_vec());
                            put(&answers[output], embedding);
                        }
                    }
                    if at < logit_rows {
                        member.set_input(&buffers.input, at, 0, &member.own.row[..hidden], kinds, true);
                    }
                }
            });
            if logit_rows == 0 {
                continue;
            }
            self.multiply(logit_rows, [(op.linear.matrix, &buffers.logits)]);
            self.phase(Kernel::Sample, logit_rows, Portions::Single, |member, range| {
                for at in range {
                    let logits = member.write(&buffers.logits, at, vocab);
                    if let Some(bias) = op.linear.bias {
                        model.rows.add(logits, model.vector(bias));
                    }
                    if op.scale != 1.0 {
                        model.rows.scale(logits, op.scale);
                    }
                    if let Some(cap) = op.soft_cap {
                        model.rows.soft_cap(logits, cap);
                    }
                    for &output in plan.outputs_of(start + at) {
                        let want = &member.step.outputs[output].want;
                        if let Some(outcome) = sampling::answer(logits, want, &mut member.own.sampler) {
                            put(&answers[output], outcome);
                        }
                    }
                }
            });
        }
    }
}

fn put(answer: &Mutex<Option<Outcome>>, outcome: Outcome) {
    *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
}

impl Member<'_> {
    /// A row of a buffer that this member reads in this phase.
    pub fn read<'b>(&self, buffer: &'b Shared<f32>, row: usize, width: usize) -> &'b [f32] {
        // SAFETY: read-only in this phase, or only this member has this row; see the table above.
        unsafe { buffer.get(row * width..(row + 1) * width) }
    }

    /// A row of a buffer, or a head of one, that only this member has in this phase.
    #[allow(clippy::mut_from_ref)]
    pub fn write<'b>(&self, buffer: &'b Shared<f32>, row: usize, width: usize) -> &'b mut [f32] {
        // SAFETY: the phase shares the work by row, or by K/V head of a row; see the table above.
        unsafe { buffer.get_mut(row * width..(row + 1) * width) }
    }

    /// Adds pending branches to a row of the residual stream.
    fn add_pending(&mut self, row: usize, pending: AllPending) {
        let (model, buffers) = (self.model, self.buffers);
        let hidden = model.program.hidden;
        for Pending { product, bias, post_norm, scale } in pending.branches.into_iter().flatten() {
            let x = self.write(&buffers.x, row, hidden);
            let product = self.write(&buffers.products[product], row, hidden);
            if let Some(bias) = bias {
                model.rows.add(product, model.vector(bias));
            }
            let added = match post_norm {
                Some(_) => {
                    let normed = &mut self.own.row[..hidden];
                    model.norm(post_norm, product, normed);
                    normed
                }
                None => product,
            };
            match scale {
                1.0 => model.rows.add(x, added),
                scale => model.rows.add_scaled(x, added, scale),
            }
        }
        if let Some(norm) = pending.norm {
            self.finish_row(self.write(&buffers.x, row, hidden), None, norm);
        }
        if pending.scale != 1.0 {
            model.rows.scale(self.write(&buffers.x, row, hidden), pending.scale);
        }
    }

    /// Makes `input`, whose first element is number `first` of row `row`, a multiple of the block, part of the next
    /// product's input. The last part also fills the padding of the row.
    pub fn set_input(&self, to: &Input, row: usize, first: usize, input: &[f32], kinds: Kinds, last: bool) {
        if kinds.quantized {
            let start = row * to.quantized_stride + first / BLOCK;
            let end = match last {
                true => row * to.quantized_stride + row_blocks(first + input.len()),
                false => start + input.len() / BLOCK,
            };
            // SAFETY: only this member has this slice of this row in this phase.
            let out = unsafe { to.quantized.get_mut(start..end) };
            self.model.products.quantize_row(input, out);
        }
        if kinds.float {
            let start = row * to.float_stride + first;
            // SAFETY: as above.
            unsafe { to.float.get_mut(start..start + input.len()) }.copy_from_slice(input);
        }
    }

    fn norm_row(&mut self, row: usize, norm: Option<Norm>) {
        let (model, hidden) = (self.model, self.model.program.hidden);
        let x = self.read(&self.buffers.x, row, hidden);
        model.norm(norm, x, &mut self.own.row[..hidden]);
    }
}

/// Forms of a matmul's input: matrices of one operation may differ.
#[derive(Clone, Copy)]
pub struct Kinds {
    pub quantized: bool,
    pub float: bool,
}

impl Kinds {
    /// Returns the forms that both need.
    pub fn and(self, other: Self) -> Self {
        Self { quantized: self.quantized || other.quantized, float: self.float || other.float }
    }

    pub fn of(model: &Model, linears: &[Linear]) -> Self {
        let any = |kind| linears.iter().any(|linear| model.matrix(linear.matrix).row_kind() == kind);
        // Squares are those of rows before they are quantized.
        let float = any(RowKind::Float) || model.squares.is_some();
        Self { quantized: any(RowKind::Quantized), float }
    }
}
