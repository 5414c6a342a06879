//! A loaded model: the contract's [`Runner`].

use std::sync::{Mutex, PoisonError};

use paguro_backend::{
    Embed, KernelCount, Limits, Linear, LoadError, Op, Outcome, PageMove, Program, Runner, Step, StepError,
    StepOutput, Ticket, Weights,
};

use crate::{
    attention::{AttentionKernels, SPLIT, Scores, partial_len},
    counters::Counters,
    forward::{Buffers, Model, Own, Pass, Table},
    isa::Isa,
    matrix::{MatrixKernels, Packing, Scratch},
    ops::RowKernels,
    pages::{Arena, PageShape, StoredHead},
    plan::Plan,
    quantize::row_blocks,
    shared::Shared,
    team::{Portions, Team},
};

/// Rows whose logits are computed at once: bounds their memory for large vocabularies.
const LOGIT_ROWS: usize = 64;
/// Floats for partial attention of shared splits, at most: 16 MiB.
const PARTIAL_FLOATS: usize = 4 << 20;

/// A model, its pages, and the team that runs it.
pub struct CpuRunner {
    team: Team,
    model: Model,
    limits: Limits,
    buffers: Buffers,
    arena: Arena,
    plan: Plan,
    counters: Counters,
    /// One for each thread of the team.
    own: Vec<Own>,
    /// One for each output of a step.
    answers: Vec<Mutex<Option<Outcome>>>,
    /// Outputs of the step that was submitted last.
    outputs: usize,
    /// Steps submitted, and the ticket of the last one.
    submitted: u64,
}

impl CpuRunner {
    /// Packs the weights on the team and allocates everything that `limits` asks for.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load(
        isa: Isa,
        threads: usize,
        program: &Program,
        weights: Weights,
        limits: Limits,
        poison: bool,
    ) -> Result<Self, LoadError> {
        program.check(&weights)?;
        check_order(program)?;
        let shape = PageShape::new(&program.kv, limits.block_size, limits.kv_dtype)?;
        if !SPLIT.is_multiple_of(limits.block_size) {
            return Err(LoadError::Unsupported {
                device: "cpu".into(),
                what: format!("pages of {} tokens", limits.block_size),
                supported: "16, 32, 64, 128, 256 and 512 work".into(),
            });
        }
        let mut team = Team::new(threads).map_err(|error| {
            LoadError::Device(format!("cannot start {threads} threads: {error}; use fewer with --threads"))
        })?;
        let Weights { matrices: sources, vectors } = weights;
        let multiplied = multiplied(program, sources.len());
        let mut matrices = Vec::with_capacity(sources.len());
        // One after the other, so that the memory of a file that has been packed is free again before the next one.
        for (index, source) in sources.iter().enumerate() {
            matrices.push(match multiplied[index] {
                true => {
                    let packing = Packing::new(source)?;
                    team.share(threads, Portions::Single, |_, _| packing.work());
                    let packed = packing.finish();
                    source.bytes.discard();
                    Some(packed)
                }
                false => None,
            });
        }
        let Some(Op::Embed(Embed { table, .. })) = program.ops.first() else {
            unreachable!("`check_order` has found the embedding in front")
        };
        let table = match multiplied[table.0 as usize] {
            true => Table::Packed(*table),
            false => Table::Plain(sources[table.0 as usize].clone()),
        };
        // Those that are not needed any more may hold a file.
        drop(sources);
        let mut arena = Arena::new(limits.pages, shape)?;
        if poison {
            arena.poison();
        }

        let group = program.heads / program.kv.kv_heads;
        let queries = Plan::tile_queries(group);
        let partial_len = partial_len(shape.head_dim);
        // All heads of all sequences could share all splits; a fixed amount of memory is enough for those that should.
        let most = limits.max_context.div_ceil(SPLIT) * limits.max_sequences * program.heads;
        let partials = if threads > 1 { most.min(PARTIAL_FLOATS / partial_len) } else { 0 };
        let plan = Plan::new(program.heads, &program.kv, &limits, threads, partials);
        let widest = program.hidden.max(program.ffn).max(program.heads * shape.head_dim);
        let own = (0..team.threads()).map(|_| Own {
            scratch: Scratch::default(),
            scores: Scores::new(&shape),
            partial: vec![0.0; queries * partial_len],
            sums: vec![0.0; queries * partial_len],
            row: vec![0.0; widest],
            stored: StoredHead::new(&shape),
            sampler: paguro_backend::sampling::Scratch::default(),
        });
        Ok(Self {
            own: own.collect(),
            buffers: buffers(program, &limits, widest, partials * partial_len)?,
            counters: Counters::new(isa, limits.kv_dtype, &matrices),
            answers: (0..limits.max_outputs).map(|_| Mutex::new(None)).collect(),
            model: Model {
                program: program.clone(),
                matrices,
                table,
                vectors,
                attention: limits.attention,
                products: MatrixKernels::new(isa),
                rows: RowKernels::new(isa),
                attend: AttentionKernels::new(isa),
            },
            team,
            limits,
            arena,
            plan,
            outputs: 0,
            submitted: 0,
        })
    }
}

/// Allocates what passes between phases, for the largest step.
fn buffers(program: &Program, limits: &Limits, widest: usize, partials: usize) -> Result<Buffers, LoadError> {
    let rows = limits.max_rows;
    let head_dim = program.kv.head_dim;
    let (q, kv) = (program.heads * head_dim, program.kv.kv_heads * head_dim);
    let floats = Shared::<f32>::new;
    let quantized_stride = row_blocks(widest);
    Ok(Buffers {
        x: floats(rows * program.hidden, "the residual stream")?,
        product: floats(rows * program.hidden, "products")?,
        quantized: Shared::new(rows * quantized_stride, "quantized rows")?,
        float: floats(rows * widest, "rows")?,
        q: floats(rows * q, "queries")?,
        k: floats(rows * kv, "keys")?,
        v: floats(rows * kv, "values")?,
        attended: floats(rows * q, "attention")?,
        gate: floats(rows * program.ffn, "gates")?,
        up: floats(rows * program.ffn, "ups")?,
        turns: floats(program.ropes.len() * rows * head_dim, "rotations")?,
        partials: floats(partials, "partial attention")?,
        logits: floats(limits.max_outputs.clamp(1, LOGIT_ROWS) * program.vocab, "logits")?,
        quantized_stride,
        float_stride: widest,
    })
}

/// Which matrices the program multiplies with, by [`MatrixId`](paguro_backend::MatrixId). [`Program::check`] has passed.
fn multiplied(program: &Program, matrices: usize) -> Vec<bool> {
    let mut multiplied = vec![false; matrices];
    for op in &program.ops {
        let linears: &[&Linear] = match op {
            Op::NormQkvRopeStore(op) => &[&op.q, &op.k, &op.v],
            Op::ProjectAdd(op) => &[&op.project],
            Op::NormGateUp(op) => &[&op.gate, &op.up],
            Op::DownAdd(op) => &[&op.down],
            Op::NormLogits(op) => &[&op.head],
            _ => &[],
        };
        linears.iter().for_each(|linear| multiplied[linear.matrix.0 as usize] = true);
    }
    multiplied
}

/// The passes rely on this order: what one operation leaves in the buffers, the next one uses.
fn check_order(program: &Program) -> Result<(), LoadError> {
    let layers = program.ops.len().saturating_sub(2) / 5;
    let expected = std::iter::once("embed")
        .chain(
            (0..layers)
                .flat_map(|_| ["norm_qkv_rope_store", "attend", "project_add", "norm_gate_up", "down_add"]),
        )
        .chain(["norm_logits"]);
    let ops = program.ops.iter().map(Op::name);
    if ops.eq(expected) {
        return Ok(());
    }
    Err(LoadError::Unsupported {
        device: "cpu".into(),
        what: "this order of operations".into(),
        supported: "an embedding, layers of attention and feed-forward, and a head work".into(),
    })
}

impl Runner for CpuRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.model.program, &self.limits)?;
        step.carries_nothing()?;
        self.plan.make(step);
        let Self { team, model, buffers, arena, plan, counters, own, answers, .. } = self;
        Pass { model, buffers, arena, step, plan, counters, team, own }.run(answers);
        self.outputs = step.outputs.len();
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        if ticket != Ticket(self.submitted) {
            return Err(StepError::Invalid(format!("step {} was never submitted or is long over", ticket.0)));
        }
        out.outcomes.clear();
        for answer in &mut self.answers[..self.outputs] {
            let outcome = answer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            let outcome =
                outcome.ok_or_else(|| StepError::Invalid("this step was collected before".into()))?;
            out.outcomes.push(outcome);
        }
        Ok(())
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        for &page_move in moves {
            if let PageMove::Copy { from, to } = page_move
                && from.0.max(to.0) as usize >= self.limits.pages
            {
                let pages = self.limits.pages;
                return Err(StepError::Invalid(format!(
                    "cannot copy page {} to {} of {pages}",
                    from.0, to.0
                )));
            }
        }
        self.arena.move_pages(moves);
        Ok(())
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        self.counters.snapshot()
    }
}
