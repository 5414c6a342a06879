//! One forward pass, written down as phases of the team.
//!
//! The leader walks the operations and opens one phase after the other. In a phase every buffer is either read by all
//! members or written by one member per row, group of outputs, head or tile. The phases of a layer, for any number of
//! rows:
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
//! Norms of whole rows of queries and keys are one more phase before rotation, by row. A mixture of experts has the
//! phases of `experts.rs` instead of the last three.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use paguro_backend::{
    Activation, Attention, AttentionMode, Dense, FeedForward, Head, Layer, Linear, MatrixId, Mixer, Norm,
    NormKind, Outcome, Program, QkNorm, QkNormKind, Residual, RopeStyle, Step, VectorId, reference, sampling,
};

use crate::{
    attention::{AttentionKernels, Scores, SplitJob, clear_partial, partial_len, sink_partial},
    counters::{Counters, Kernel},
    experts::{ExpertBuffers, Grouping},
    gather,
    matrix::{MatrixKernels, Output, PackedMatrix, RowKind, Rows, Scratch},
    ops::{self, RowKernels},
    pages::{Arena, Half, Place, StoredHead},
    plan::{Plan, Tile},
    quantize::{BLOCK, QuantBlock, row_blocks},
    shared::Shared,
    team::{Portions, Team},
};

/// Outputs of a row that one member activates at once: whole blocks of the quantized row.
const ACTIVATE_SLICE: usize = 8 * BLOCK;

/// The model and its kernels; nothing of it changes after load.
pub struct Model {
    /// What to run.
    pub program: Program,
    /// By [`MatrixId`].
    pub matrices: Vec<PackedMatrix>,
    /// Query heads of each layer.
    pub heads: usize,
    /// K/V heads of each layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// By [`VectorId`].
    pub vectors: Vec<Vec<f32>>,
    /// Paged or gathered.
    pub attention: AttentionMode,
    /// Products.
    pub products: MatrixKernels,
    /// Row operations.
    pub rows: RowKernels,
    /// Attention.
    pub attend: AttentionKernels,
}

impl Model {
    pub fn matrix(&self, id: MatrixId) -> &PackedMatrix {
        &self.matrices[id.0 as usize]
    }

    pub fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    /// Query heads that share a K/V head.
    fn queries_per_kv(&self) -> usize {
        self.heads / self.kv_heads
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
    fn norm(&self, norm: Option<Norm>, x: &[f32], out: &mut [f32]) {
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

/// Everything that passes between phases, allocated at load for the largest step.
pub struct Buffers {
    /// Residual stream, `[rows, hidden]`.
    pub x: Shared<f32>,
    /// What the branches of a layer add to it, `[rows, hidden]` each.
    pub products: [Shared<f32>; 2],
    /// Inputs of the next product.
    pub input: Input,
    /// Queries, `[rows, heads * head_dim]`.
    pub q: Shared<f32>,
    /// Keys of the step's rows, `[rows, kv_heads * head_dim]`.
    pub k: Shared<f32>,
    /// Values of the step's rows, `[rows, kv_heads * head_dim]`.
    pub v: Shared<f32>,
    /// What attention gives, `[rows, heads * head_dim]`.
    pub attended: Shared<f32>,
    /// Gates, `[rows, ffn]`.
    pub gate: Shared<f32>,
    /// Ups, `[rows, ffn]`.
    pub up: Shared<f32>,
    /// Cosines and sines by rope and row, `[ropes, rows, head_dim]`.
    pub turns: Shared<f32>,
    /// Partial attention of shared splits, by tile, split and query.
    pub partials: Shared<f32>,
    /// Logits of a slice of the output rows, `[slice, vocab]`.
    pub logits: Shared<f32>,
    /// Of mixtures of experts.
    pub experts: ExpertBuffers,
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
    /// Rows `rows` of the kind that a matrix multiplies.
    ///
    /// # Safety
    /// While they are used, nobody writes them.
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

/// What a member needs for itself.
pub struct Own {
    /// Of the products.
    pub scratch: Scratch,
    /// Scores of a few queries over a split.
    pub scores: Box<Scores>,
    /// Partial attention of a tile's queries over one split.
    pub partial: Vec<f32>,
    /// The same, summed over splits.
    pub sums: Vec<f32>,
    /// A row, `[widest]`.
    pub row: Vec<f32>,
    /// K or V of one head.
    pub stored: StoredHead,
    /// Of the sampler.
    pub sampler: sampling::Scratch,
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

/// At most one for each branch of a layer.
type AllPending = [Option<Pending>; 2];

/// One pass over a step, as the leader sees it.
pub struct Pass<'a> {
    pub model: &'a Model,
    pub buffers: &'a Buffers,
    pub arena: &'a Arena,
    pub step: &'a Step<'a>,
    pub plan: &'a Plan,
    pub counters: &'a Counters,
    pub team: &'a mut Team,
    /// One for each thread of the team.
    pub own: &'a mut [Own],
    /// Which rows each expert has.
    pub grouping: &'a mut Grouping,
}

/// One member's share of a phase.
pub struct Member<'a> {
    pub model: &'a Model,
    pub buffers: &'a Buffers,
    arena: &'a Arena,
    step: &'a Step<'a>,
    plan: &'a Plan,
    pub own: &'a mut Own,
}

/// The answer to each of the step's outputs.
pub type Answers = [Mutex<Option<Outcome>>];

impl Pass<'_> {
    /// All operations.
    pub fn run(&mut self, answers: &Answers) {
        let model = self.model;
        self.embed();
        let mut pending = [None; 2];
        for layer in &model.program.layers {
            pending = self.layer(layer, pending);
        }
        self.head(&model.program.head, pending, answers);
    }

    /// A layer. Returns what is to be added to the residual stream.
    fn layer(&mut self, layer: &Layer, before: AllPending) -> AllPending {
        let mixed = match &layer.mixer {
            Mixer::Attention(attention) => self.attention(attention, before),
            other => unreachable!("load refuses {other:?}"),
        };
        let mixed = Pending { scale: layer.branch_scale, ..mixed };
        // Parallel branches read the same stream, and so write different products.
        let (before, left, product) = match layer.residual {
            Residual::Sequential => ([Some(mixed), None], None, 0),
            Residual::Parallel => ([None; 2], Some(mixed), 1),
        };
        let fed = match &layer.ffn {
            FeedForward::Dense(dense) => self.dense(dense, before, product),
            FeedForward::Experts(experts) => self.experts(experts, before, product),
            other => unreachable!("load refuses {other:?}"),
        };
        [left, Some(Pending { scale: layer.branch_scale, ..fed })]
    }

    pub fn rows(&self) -> usize {
        self.step.tokens.len()
    }

    /// One phase, timed on the leader: `work` is done for all of `0..count`, by any members.
    pub fn phase(
        &mut self,
        kernel: Kernel<'_>,
        count: usize,
        portions: Portions,
        work: impl Fn(&mut Member<'_>, Range<usize>) + Sync,
    ) {
        let start = Instant::now();
        let Self { model, buffers, arena, step, plan, .. } = *self;
        self.team.share_with(self.own, count, portions, |own, range| {
            work(&mut Member { model, buffers, arena, step, plan, own }, range);
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
                let token = member.step.tokens[row] as usize;
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
                for (index, rope) in model.program.ropes.iter().enumerate() {
                    let turns = member.write(&buffers.turns, index * rows + row, model.head_dim);
                    ops::turns(rope, position, &mut turns[..2 * rope.frequencies.len()]);
                }
            }
        });
    }

    /// Phase: adds what is pending, norms, and makes the result the next products' input.
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
        let groups: usize = products.iter().map(|(id, _)| model.matrix(*id).groups()).sum();
        let ids = products.map(|(id, _)| id);
        let floats = ids.iter().any(|&id| model.matrix(id).row_kind() == RowKind::Float);
        // As many groups as the kernels multiply at once; more with so many rows that they leave the second-level cache, which
        // a member then fetches less often.
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

    /// Attention. Returns its output, `[rows, hidden]`.
    fn attention(&mut self, op: &Attention, pending: AllPending) -> Pending {
        let (model, buffers) = (self.model, self.buffers);
        self.add_norm(op.norm, pending, Kinds::of(model, &[op.q, op.k, op.v]));
        self.multiply(
            self.rows(),
            [(op.q.matrix, &buffers.q), (op.k.matrix, &buffers.k), (op.v.matrix, &buffers.v)],
        );
        if let Some(norm @ QkNorm { kind: QkNormKind::Row, .. }) = op.qk_norm {
            self.phase(Kernel::QkNorm, self.rows(), Portions::Guided(1), |member, range| {
                for row in range {
                    for (x, heads, linear, norm) in [
                        (&buffers.q, model.heads, &op.q, norm.q),
                        (&buffers.k, model.kv_heads, &op.k, norm.k),
                    ] {
                        let x = member.write(x, row, heads * model.head_dim);
                        member.finish_row(x, linear.bias, norm);
                    }
                }
            });
        }
        let kv_heads = model.kv_heads;
        self.phase(Kernel::RopeStore, self.rows() * kv_heads, Portions::Guided(8), |member, range| {
            for unit in range {
                member.rope_store(op, unit / kv_heads, unit % kv_heads);
            }
        });
        self.attend(op);
        let width = model.heads * model.head_dim;
        let kinds = Kinds::of(model, &[op.out]);
        self.phase(Kernel::Quantize, self.rows(), Portions::Guided(2), |member, range| {
            for row in range {
                let attended = member.read(&buffers.attended, row, width);
                member.set_input(&buffers.input, row, 0, attended, kinds, true);
            }
        });
        self.multiply(self.rows(), [(op.out.matrix, &buffers.products[0])]);
        Pending { product: 0, bias: op.out.bias, post_norm: op.post_norm, scale: 1.0 }
    }

    fn attend(&mut self, op: &Attention) {
        if self.model.attention == AttentionMode::Gather {
            return self.attend_gather(op);
        }
        let cuts = self.plan.cuts(op.kv.group);
        self.phase(Kernel::Attend, cuts.items.len(), Portions::Single, |member, range| {
            for item in &cuts.items[range] {
                let tile = &cuts.tiles[item.tile];
                match tile.first_partial {
                    Some(_) => item.splits.clone().for_each(|split| member.attend_shared(op, tile, split)),
                    None => member.attend_tile(op, tile),
                }
            }
        });
        if !cuts.shared.is_empty() {
            self.phase(Kernel::AttendMerge, cuts.shared.len(), Portions::Guided(1), |member, range| {
                for &tile in &cuts.shared[range] {
                    member.merge_shared(op, &cuts.tiles[tile]);
                }
            });
        }
    }

    /// The reference way, for comparison: see [`gather`].
    fn attend_gather(&mut self, op: &Attention) {
        let model = self.model;
        let (step, kv_heads) = (self.step, model.kv_heads);
        self.phase(
            Kernel::AttendGather,
            step.sequences.len() * kv_heads,
            Portions::Single,
            |member, range| {
                for unit in range {
                    let (sequence, kv_head) = (&step.sequences[unit / kv_heads], unit % kv_heads);
                    let job = gather::Job {
                        program: &model.program,
                        // SAFETY: nobody writes pages in the phase that attends.
                        pages: unsafe { member.arena.pages() },
                        step,
                        sequence,
                        op,
                        kv_head,
                        sinks: op.sinks.map(|sinks| model.vector(sinks)),
                    };
                    // SAFETY: queries are only read in this phase, and only this member has these heads of these rows.
                    unsafe { job.run(&member.buffers.q, &member.buffers.attended) };
                }
            },
        );
    }

    /// A dense feed-forward network. Returns its output, `[rows, hidden]`.
    fn dense(&mut self, op: &Dense, pending: AllPending, product: usize) -> Pending {
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

    /// The ends of the rows that outputs ask for, a slice of rows at a time: embeddings, then logits where they are
    /// needed, and the answers from them.
    fn head(&mut self, op: &Head, pending: AllPending, answers: &Answers) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        let Program { hidden, vocab, .. } = model.program;
        let kinds = Kinds::of(model, &[op.linear]);
        let slice = buffers.logits.len() / vocab;
        for (index, rows) in plan.output_rows.chunks(slice).enumerate() {
            let logit_rows = plan.logit_rows.saturating_sub(index * slice).min(rows.len());
            self.phase(Kernel::AddNorm, rows.len(), Portions::Guided(1), |member, range| {
                for at in range {
                    member.add_pending(rows[at], pending);
                    member.norm_row(rows[at], Some(op.norm));
                    for &output in plan.outputs_of(index * slice + at) {
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
                    for &output in plan.outputs_of(index * slice + at) {
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

    /// Adds what is pending to a row of the residual stream.
    fn add_pending(&mut self, row: usize, pending: AllPending) {
        let (model, buffers) = (self.model, self.buffers);
        let hidden = model.program.hidden;
        for Pending { product, bias, post_norm, scale } in pending.into_iter().flatten() {
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

    /// Bias and norm of a whole row, in place.
    fn finish_row(&mut self, x: &mut [f32], bias: Option<VectorId>, norm: Norm) {
        let model = self.model;
        if let Some(bias) = bias {
            model.rows.add(x, model.vector(bias));
        }
        let normed = &mut self.own.row[..x.len()];
        model.norm(Some(norm), x, normed);
        x.copy_from_slice(normed);
    }

    /// Bias, head norm and rotation of one K/V head and its query heads in one row; K and V into the page.
    fn rope_store(&mut self, op: &Attention, row: usize, kv_head: usize) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        let Model { head_dim, heads, kv_heads, .. } = *model;
        let group = model.queries_per_kv();
        let turns = op.rope.map(|index| {
            let rope = &model.program.ropes[index];
            let turns = self.read(&buffers.turns, index * self.step.tokens.len() + row, head_dim);
            (&turns[..2 * rope.frequencies.len()], rope.style)
        });
        let scale = op
            .position_scale
            .map(|scale| reference::ops::position_scale(&scale, plan.positions[row]))
            .filter(|&scale| scale != 1.0);
        let norms = op.qk_norm.map(|norm| (norm.q, norm.k, norm.kind));
        for head in kv_head * group..(kv_head + 1) * group {
            let q = self.write(&buffers.q, row * heads + head, head_dim);
            self.finish_head(q, head, &op.q, norms.map(|norms| (norms.0, norms.2)), turns);
            if let Some(scale) = scale {
                model.rows.scale(q, scale);
            }
        }
        let k = self.write(&buffers.k, row * kv_heads + kv_head, head_dim);
        self.finish_head(k, kv_head, &op.k, norms.map(|norms| (norms.1, norms.2)), turns);
        let v = self.write(&buffers.v, row * kv_heads + kv_head, head_dim);
        self.finish_head(v, kv_head, &op.v, None, None);
        let (page, token) = plan.place(self.step, row, op.kv.group);
        let place = Place { page, slot: op.kv.slot, kv_head, token };
        for (half, x) in [(Half::K, k), (Half::V, v)] {
            self.own.stored.set(&model.rows, x);
            // SAFETY: in this phase each row's slot is written by one member, and nobody reads pages.
            unsafe { self.arena.write(place, half, &self.own.stored) };
        }
    }

    /// Bias, norm and rotation of one head of a product, each where there is one. Rows that were normed as a whole have
    /// their bias already.
    fn finish_head(
        &mut self,
        x: &mut [f32],
        head: usize,
        linear: &Linear,
        norm: Option<(Norm, QkNormKind)>,
        turns: Option<(&[f32], RopeStyle)>,
    ) {
        let model = self.model;
        let of_kind = |wanted| norm.filter(|(_, kind)| *kind == wanted).map(|(norm, _)| norm);
        let bias = linear.bias.filter(|_| of_kind(QkNormKind::Row).is_none());
        if let Some(bias) = bias {
            model.rows.add(x, &model.vector(bias)[head * x.len()..][..x.len()]);
        }
        if let Some(norm) = of_kind(QkNormKind::Head) {
            self.finish_row(x, None, norm);
        }
        if let Some((turns, style)) = turns {
            model.rows.rotate(x, turns, style);
        }
        if let Some(norm) = of_kind(QkNormKind::HeadAfterRope) {
            self.finish_row(x, None, norm);
        }
    }

    /// One tile over one split.
    fn attend_split(&mut self, op: &Attention, tile: &Tile, split: usize) {
        let (model, step) = (self.model, self.step);
        let (head_dim, group) = (model.head_dim, model.queries_per_kv());
        let width = model.heads * head_dim;
        let kv = &model.program.kv;
        let job = SplitJob {
            // SAFETY: K and V of earlier phases; nobody writes pages in the phase that attends.
            pages: unsafe { self.arena.pages() },
            table: step.sequences[tile.sequence].table(step.pages, op.kv.group, kv.groups.len()),
            slot: op.kv.slot,
            kv_head: tile.kv_head,
            // SAFETY: queries are only read in this phase.
            q: unsafe { self.buffers.q.get(tile.rows.start * width..tile.rows.end * width) },
            row_stride: width,
            first_head: tile.kv_head * group * head_dim,
            group,
            rows: tile.rows.len(),
            position: tile.position,
            split,
            scale: op.scale,
            soft_cap: op.soft_cap,
            window: kv.groups[op.kv.group].window.map(|window| window as usize),
        };
        model.attend.attend_split(&job, &mut self.own.scores, &mut self.own.partial);
    }

    /// Sets `self.own.sums` to what the splits of a tile are added to: nothing, or the sinks. Returns their length.
    fn start_sums(&mut self, op: &Attention, tile: &Tile) -> usize {
        let (model, group) = (self.model, self.model.queries_per_kv());
        let partial = partial_len(model.head_dim);
        let len = self.plan.queries(tile) * partial;
        for (query, sum) in self.own.sums[..len].chunks_exact_mut(partial).enumerate() {
            match op.sinks {
                None => clear_partial(sum),
                Some(sinks) => sink_partial(sum, model.vector(sinks)[tile.kv_head * group + query % group]),
            }
        }
        len
    }

    /// A tile over all of its splits, one after the other.
    fn attend_tile(&mut self, op: &Attention, tile: &Tile) {
        let model = self.model;
        let len = self.start_sums(op, tile);
        for split in tile.splits.clone() {
            self.attend_split(op, tile, split);
            let own = &mut *self.own;
            merge_all(model, &mut own.sums[..len], &own.partial[..len]);
        }
        self.finish_tile(tile);
    }

    /// Where a split of a tile whose splits members share has its partial results.
    fn partials(&self, tile: &Tile, split: usize) -> Range<usize> {
        let first = tile.first_partial.expect("the plan shares the splits of this tile");
        let queries = self.plan.queries(tile);
        let start = first + (split - tile.splits.start) * queries;
        let len = partial_len(self.model.head_dim);
        start * len..(start + queries) * len
    }

    /// One split of a tile whose splits members share.
    fn attend_shared(&mut self, op: &Attention, tile: &Tile, split: usize) {
        self.attend_split(op, tile, split);
        let range = self.partials(tile, split);
        let len = range.len();
        // SAFETY: only this member has this split of this tile.
        let out = unsafe { self.buffers.partials.get_mut(range) };
        out.copy_from_slice(&self.own.partial[..len]);
    }

    /// Adds up the splits of a tile, in order.
    fn merge_shared(&mut self, op: &Attention, tile: &Tile) {
        let model = self.model;
        let len = self.start_sums(op, tile);
        for split in tile.splits.clone() {
            let range = self.partials(tile, split);
            // SAFETY: partial results are only read in this phase.
            let partials = unsafe { self.buffers.partials.get(range) };
            merge_all(model, &mut self.own.sums[..len], partials);
        }
        self.finish_tile(tile);
    }

    /// Writes a tile's attention from `self.own.sums`.
    fn finish_tile(&mut self, tile: &Tile) {
        let model = self.model;
        let (head_dim, heads, group) = (model.head_dim, model.heads, model.queries_per_kv());
        let sums = self.own.sums.chunks_exact(partial_len(head_dim));
        for (query, sum) in sums.take(self.plan.queries(tile)).enumerate() {
            let (row, head) = (tile.rows.start + query / group, tile.kv_head * group + query % group);
            let start = (row * heads + head) * head_dim;
            // SAFETY: only this member has this tile.
            model.attend.finish(sum, unsafe { self.buffers.attended.get_mut(start..start + head_dim) });
        }
    }
}

/// Adds partial results query by query.
fn merge_all(model: &Model, sums: &mut [f32], partials: &[f32]) {
    let len = partial_len(model.head_dim);
    for (sum, partial) in sums.chunks_exact_mut(len).zip(partials.chunks_exact(len)) {
        model.attend.merge(sum, partial);
    }
}

/// In which forms a product's input is needed: matrices of one operation may differ.
#[derive(Clone, Copy)]
pub struct Kinds {
    pub quantized: bool,
    pub float: bool,
}

impl Kinds {
    pub fn of(model: &Model, linears: &[Linear]) -> Self {
        let any = |kind| linears.iter().any(|linear| model.matrix(linear.matrix).row_kind() == kind);
        Self { quantized: any(RowKind::Quantized), float: any(RowKind::Float) }
    }
}
