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

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use paguro_backend::{
    Attend, AttentionMode, DownAdd, Embed, Linear, MatrixId, Norm, NormGateUp, NormLogits, NormQkvRopeStore,
    Op, Outcome, Program, ProjectAdd, RopeStyle, Step, VectorId, sampling,
};

use crate::{
    attention::{AttentionKernels, Scores, SplitJob, clear_partial, partial_len},
    counters::{Counters, Kernel},
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
    /// The embedding table, which is often the head, too.
    pub table: MatrixId,
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
    fn matrix(&self, id: MatrixId) -> &PackedMatrix {
        &self.matrices[id.0 as usize]
    }

    fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    fn head_dim(&self) -> usize {
        self.program.kv.head_dim
    }
}

/// Everything that passes between phases, allocated at load for the largest step.
pub struct Buffers {
    /// Residual stream, `[rows, hidden]`.
    pub x: Shared<f32>,
    /// What the last product adds to it, `[rows, hidden]`.
    pub product: Shared<f32>,
    /// Input of the next product for quantized weights, `[rows, quantized_stride]`.
    pub quantized: Shared<QuantBlock>,
    /// Input of the next product for weights in floats, `[rows, float_stride]`.
    pub float: Shared<f32>,
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
    /// Blocks from one quantized row to the next.
    pub quantized_stride: usize,
    /// Floats from one float row to the next.
    pub float_stride: usize,
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

/// A product's result that has not been added to the residual stream yet: the next phase that reads a row adds it.
#[derive(Clone, Copy)]
struct Pending {
    bias: Option<VectorId>,
    post_norm: Option<Norm>,
}

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
}

/// One member's share of a phase.
struct Member<'a> {
    model: &'a Model,
    buffers: &'a Buffers,
    arena: &'a Arena,
    step: &'a Step<'a>,
    plan: &'a Plan,
    own: &'a mut Own,
}

/// The answer to each of the step's outputs.
pub type Answers = [Mutex<Option<Outcome>>];

impl Pass<'_> {
    /// All operations.
    pub fn run(&mut self, answers: &Answers) {
        let model = self.model;
        let (mut pending, mut gate_up) = (None, None);
        for op in &model.program.ops {
            match op {
                Op::Embed(op) => self.embed(op),
                Op::NormQkvRopeStore(op) => self.norm_qkv_rope_store(op, pending.take()),
                Op::Attend(op) => self.attend(op),
                Op::ProjectAdd(op) => pending = Some(self.project(op)),
                Op::NormGateUp(op) => {
                    self.norm_gate_up(op, pending.take());
                    gate_up = Some(op);
                }
                Op::DownAdd(op) => {
                    let gate_up = gate_up.take().expect("load has checked the order of operations");
                    pending = Some(self.down(gate_up, op));
                }
                Op::NormLogits(op) => self.norm_logits(op, pending.take(), answers),
                other => unreachable!("load refuses `{}`", other.name()),
            }
        }
    }

    fn rows(&self) -> usize {
        self.step.tokens.len()
    }

    /// One phase, timed on the leader: `work` is done for all of `0..count`, by any members.
    fn phase(
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

    fn embed(&mut self, op: &Embed) {
        let rows = self.rows();
        self.phase(Kernel::Embed, rows, Portions::Guided(4), |member, range| {
            let (model, buffers) = (member.model, member.buffers);
            for row in range {
                let x = member.write(&buffers.x, row, model.program.hidden);
                let token = member.step.tokens[row] as usize;
                model.matrix(model.table).dequantize_row(token, x);
                if op.scale != 1.0 {
                    model.rows.scale(x, op.scale);
                }
                for (index, rope) in model.program.ropes.iter().enumerate() {
                    let turns = member.write(&buffers.turns, index * rows + row, model.head_dim());
                    ops::turns(rope, member.plan.positions[row], &mut turns[..2 * rope.frequencies.len()]);
                }
            }
        });
    }

    /// Phase: adds what is pending, norms, and makes the result the next products' input.
    fn add_norm(&mut self, norm: Norm, pending: Option<Pending>, kinds: Kinds) {
        let hidden = self.model.program.hidden;
        self.phase(Kernel::AddNorm, self.rows(), Portions::Guided(1), |member, range| {
            for row in range {
                member.add_pending(row, pending);
                member.norm_row(row, norm);
                member.set_input(row, 0, &member.own.row[..hidden], kinds, true);
            }
        });
    }

    /// Phase: multiplies `count` rows of the input with several matrices, whose groups of outputs are shared as one
    /// list.
    fn multiply<const N: usize>(&mut self, count: usize, products: [(MatrixId, &Shared<f32>); N]) {
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
                let rows = unsafe {
                    match matrix.row_kind() {
                        RowKind::Quantized => Rows::Quantized {
                            blocks: buffers.quantized.get(0..count * buffers.quantized_stride),
                            stride: buffers.quantized_stride,
                        },
                        RowKind::Float => Rows::Float {
                            values: buffers.float.get(0..count * buffers.float_stride),
                            stride: buffers.float_stride,
                        },
                    }
                };
                matrix.multiply(&model.products, rows, count, part, &out, &mut member.own.scratch);
            }
        });
    }

    fn norm_qkv_rope_store(&mut self, op: &NormQkvRopeStore, pending: Option<Pending>) {
        let (model, buffers) = (self.model, self.buffers);
        self.add_norm(op.norm, pending, Kinds::of(model, &[op.q, op.k, op.v]));
        self.multiply(
            self.rows(),
            [(op.q.matrix, &buffers.q), (op.k.matrix, &buffers.k), (op.v.matrix, &buffers.v)],
        );
        let kv_heads = model.program.kv.kv_heads;
        self.phase(Kernel::RopeStore, self.rows() * kv_heads, Portions::Guided(8), |member, range| {
            for unit in range {
                member.rope_store(op, unit / kv_heads, unit % kv_heads);
            }
        });
    }

    fn attend(&mut self, op: &Attend) {
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
                    member.merge_shared(&cuts.tiles[tile]);
                }
            });
        }
    }

    /// The reference way, for comparison: see [`gather`].
    fn attend_gather(&mut self, op: &Attend) {
        let model = self.model;
        let (step, kv_heads) = (self.step, model.program.kv.kv_heads);
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
                    };
                    // SAFETY: queries are only read in this phase, and only this member has these heads of these rows.
                    unsafe { job.run(&member.buffers.q, &member.buffers.attended) };
                }
            },
        );
    }

    fn project(&mut self, op: &ProjectAdd) -> Pending {
        let (model, buffers) = (self.model, self.buffers);
        let width = model.program.heads * model.head_dim();
        let kinds = Kinds::of(model, &[op.project]);
        self.phase(Kernel::Quantize, self.rows(), Portions::Guided(2), |member, range| {
            for row in range {
                member.set_input(row, 0, member.read(&buffers.attended, row, width), kinds, true);
            }
        });
        self.multiply(self.rows(), [(op.project.matrix, &buffers.product)]);
        Pending { bias: op.project.bias, post_norm: op.post_norm }
    }

    fn norm_gate_up(&mut self, op: &NormGateUp, pending: Option<Pending>) {
        let (model, buffers) = (self.model, self.buffers);
        self.add_norm(op.norm, pending, Kinds::of(model, &[op.gate, op.up]));
        self.multiply(self.rows(), [(op.gate.matrix, &buffers.gate), (op.up.matrix, &buffers.up)]);
    }

    fn down(&mut self, gate_up: &NormGateUp, op: &DownAdd) -> Pending {
        let (model, buffers) = (self.model, self.buffers);
        let ffn = model.program.ffn;
        let slices = ffn.div_ceil(ACTIVATE_SLICE);
        let kinds = Kinds::of(model, &[op.down]);
        self.phase(
            Kernel::Activate,
            self.rows() * slices,
            Portions::Guided(slices.div_ceil(4)),
            |member, range| {
                for unit in range {
                    let (row, first) = (unit / slices, unit % slices * ACTIVATE_SLICE);
                    let end = ffn.min(first + ACTIVATE_SLICE);
                    let at = row * ffn + first..row * ffn + end;
                    // SAFETY: only this member has this slice of this row in this phase.
                    let (gate, up) = unsafe { (buffers.gate.get_mut(at.clone()), buffers.up.get_mut(at)) };
                    for (x, linear) in [(&mut *gate, gate_up.gate), (&mut *up, gate_up.up)] {
                        if let Some(bias) = linear.bias {
                            model.rows.add(x, &model.vector(bias)[first..end]);
                        }
                    }
                    model.rows.activate(gate, up, gate_up.activation);
                    member.set_input(row, first, gate, kinds, end == ffn);
                }
            },
        );
        self.multiply(self.rows(), [(op.down.matrix, &buffers.product)]);
        Pending { bias: op.down.bias, post_norm: op.post_norm }
    }

    /// The ends of the rows that outputs ask for, a slice of rows at a time: embeddings, then logits where they are
    /// needed, and the answers from them.
    fn norm_logits(&mut self, op: &NormLogits, pending: Option<Pending>, answers: &Answers) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        let Program { hidden, vocab, .. } = model.program;
        let kinds = Kinds::of(model, &[op.head]);
        let slice = buffers.logits.len() / vocab;
        for (index, rows) in plan.output_rows.chunks(slice).enumerate() {
            let logit_rows = plan.logit_rows.saturating_sub(index * slice).min(rows.len());
            self.phase(Kernel::AddNorm, rows.len(), Portions::Guided(1), |member, range| {
                for at in range {
                    member.add_pending(rows[at], pending);
                    member.norm_row(rows[at], op.norm);
                    for &output in plan.outputs_of(index * slice + at) {
                        if !member.step.outputs[output].want.needs_logits() {
                            let embedding = Outcome::Embedding(member.own.row[..hidden].to_vec());
                            put(&answers[output], embedding);
                        }
                    }
                    if at < logit_rows {
                        member.set_input(at, 0, &member.own.row[..hidden], kinds, true);
                    }
                }
            });
            if logit_rows == 0 {
                continue;
            }
            self.multiply(logit_rows, [(op.head.matrix, &buffers.logits)]);
            self.phase(Kernel::Sample, logit_rows, Portions::Single, |member, range| {
                for at in range {
                    let logits = member.write(&buffers.logits, at, vocab);
                    if let Some(bias) = op.head.bias {
                        model.rows.add(logits, model.vector(bias));
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
    fn read<'b>(&self, buffer: &'b Shared<f32>, row: usize, width: usize) -> &'b [f32] {
        // SAFETY: read-only in this phase, or only this member has this row; see the table above.
        unsafe { buffer.get(row * width..(row + 1) * width) }
    }

    /// A row of a buffer, or a head of one, that only this member has in this phase.
    #[allow(clippy::mut_from_ref)]
    fn write<'b>(&self, buffer: &'b Shared<f32>, row: usize, width: usize) -> &'b mut [f32] {
        // SAFETY: the phase shares the work by row, or by K/V head of a row; see the table above.
        unsafe { buffer.get_mut(row * width..(row + 1) * width) }
    }

    /// Adds what is pending to a row of the residual stream.
    fn add_pending(&mut self, row: usize, pending: Option<Pending>) {
        let (model, buffers) = (self.model, self.buffers);
        let hidden = model.program.hidden;
        let Some(Pending { bias, post_norm }) = pending else { return };
        let x = self.write(&buffers.x, row, hidden);
        let product = self.write(&buffers.product, row, hidden);
        if let Some(bias) = bias {
            model.rows.add(product, model.vector(bias));
        }
        match post_norm {
            Some(norm) => {
                let normed = &mut self.own.row[..hidden];
                model.rows.rms_norm(product, model.vector(norm.weight), norm.eps, normed);
                model.rows.add(x, normed);
            }
            None => model.rows.add(x, product),
        }
    }

    /// Makes `input`, whose first element is number `first` of row `row`, a multiple of the block, part of the next
    /// product's input. The last part also fills the padding of the row.
    fn set_input(&self, row: usize, first: usize, input: &[f32], kinds: Kinds, last: bool) {
        let buffers = self.buffers;
        if kinds.quantized {
            let start = row * buffers.quantized_stride + first / BLOCK;
            let end = match last {
                true => row * buffers.quantized_stride + row_blocks(first + input.len()),
                false => start + input.len() / BLOCK,
            };
            // SAFETY: only this member has this slice of this row in this phase.
            let out = unsafe { buffers.quantized.get_mut(start..end) };
            self.model.products.quantize_row(input, out);
        }
        if kinds.float {
            let start = row * buffers.float_stride + first;
            // SAFETY: as above.
            unsafe { buffers.float.get_mut(start..start + input.len()) }.copy_from_slice(input);
        }
    }

    fn norm_row(&mut self, row: usize, norm: Norm) {
        let (model, hidden) = (self.model, self.model.program.hidden);
        let x = self.read(&self.buffers.x, row, hidden);
        model.rows.rms_norm(x, model.vector(norm.weight), norm.eps, &mut self.own.row[..hidden]);
    }

    /// Bias, head norm and rotation of one K/V head and its query heads in one row; K and V into the page.
    fn rope_store(&mut self, op: &NormQkvRopeStore, row: usize, kv_head: usize) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        let (head_dim, kv_heads, heads) = (model.head_dim(), model.program.kv.kv_heads, model.program.heads);
        let group = heads / kv_heads;
        let rope = &model.program.ropes[op.rope];
        let turns = self.read(&buffers.turns, op.rope * self.step.tokens.len() + row, head_dim);
        let turns = &turns[..2 * rope.frequencies.len()];
        for head in kv_head * group..(kv_head + 1) * group {
            let q = self.write(&buffers.q, row * heads + head, head_dim);
            self.finish_head(q, head, &op.q, op.q_norm, Some((turns, rope.style)));
        }
        let k = self.write(&buffers.k, row * kv_heads + kv_head, head_dim);
        self.finish_head(k, kv_head, &op.k, op.k_norm, Some((turns, rope.style)));
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

    /// Bias, norm and rotation of one head of a product, each where there is one.
    fn finish_head(
        &mut self,
        x: &mut [f32],
        head: usize,
        linear: &Linear,
        norm: Option<Norm>,
        turns: Option<(&[f32], RopeStyle)>,
    ) {
        let model = self.model;
        if let Some(bias) = linear.bias {
            model.rows.add(x, &model.vector(bias)[head * x.len()..][..x.len()]);
        }
        if let Some(norm) = norm {
            let normed = &mut self.own.row[..x.len()];
            model.rows.rms_norm(x, model.vector(norm.weight), norm.eps, normed);
            x.copy_from_slice(normed);
        }
        if let Some((turns, style)) = turns {
            model.rows.rotate(x, turns, style);
        }
    }

    /// One tile over one split.
    fn attend_split(&mut self, op: &Attend, tile: &Tile, split: usize) {
        let (model, step) = (self.model, self.step);
        let (head_dim, heads) = (model.head_dim(), model.program.heads);
        let width = heads * head_dim;
        let kv = &model.program.kv;
        let group = heads / kv.kv_heads;
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

    /// A tile over all of its splits, one after the other.
    fn attend_tile(&mut self, op: &Attend, tile: &Tile) {
        let model = self.model;
        let len = self.plan.queries(tile) * partial_len(model.head_dim());
        self.own.sums[..len].chunks_exact_mut(partial_len(model.head_dim())).for_each(clear_partial);
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
        let len = partial_len(self.model.head_dim());
        start * len..(start + queries) * len
    }

    /// One split of a tile whose splits members share.
    fn attend_shared(&mut self, op: &Attend, tile: &Tile, split: usize) {
        self.attend_split(op, tile, split);
        let range = self.partials(tile, split);
        let len = range.len();
        // SAFETY: only this member has this split of this tile.
        let out = unsafe { self.buffers.partials.get_mut(range) };
        out.copy_from_slice(&self.own.partial[..len]);
    }

    /// Adds up the splits of a tile, in order.
    fn merge_shared(&mut self, tile: &Tile) {
        let model = self.model;
        let len = self.plan.queries(tile) * partial_len(model.head_dim());
        self.own.sums[..len].chunks_exact_mut(partial_len(model.head_dim())).for_each(clear_partial);
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
        let (head_dim, heads) = (model.head_dim(), model.program.heads);
        let group = heads / model.program.kv.kv_heads;
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
    let len = partial_len(model.head_dim());
    for (sum, partial) in sums.chunks_exact_mut(len).zip(partials.chunks_exact(len)) {
        model.attend.merge(sum, partial);
    }
}

/// In which forms a product's input is needed: matrices of one operation may differ.
#[derive(Clone, Copy)]
struct Kinds {
    quantized: bool,
    float: bool,
}

impl Kinds {
    fn of(model: &Model, linears: &[Linear]) -> Self {
        let any = |kind| linears.iter().any(|linear| model.matrix(linear.matrix).row_kind() == kind);
        Self { quantized: any(RowKind::Quantized), float: any(RowKind::Float) }
    }
}
