//! A loaded model: the contract's [`Runner`].

use std::sync::{Mutex, PoisonError};

use paguro_backend::{
    Embed, KernelCount, Limits, LoadError, Op, Outcome, PageMove, Program, Runner, Step, StepError,
    StepOutput, Ticket, Weights,
};

use crate::{
    attention::{AttentionKernels, SPLIT, Scores, partial_len},
    counters::Counters,
    forward::{Buffers, Model, Own, Pass},
    isa::Isa,
    matrix::{MatrixKernels, Packing, Scratch},
    ops::RowKernels,
    pages::{Arena, PageShape, StoredHead},
    plan::Plan,
    quantize::{QuantBlock, row_blocks},
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
        let mut matrices = Vec::with_capacity(weights.matrices.len());
        // One after the other: beside the packed weights, memory holds only the rows that threads are packing.
        for source in &weights.matrices {
            let packing = Packing::new(source)?;
            team.share(threads, Portions::Single, |_, _| packing.work());
            matrices.push(packing.finish()?);
        }
        weights.check_unchanged()?;
        let Weights { vectors, .. } = weights;
        let Some(Op::Embed(Embed { table, .. })) = program.ops.first() else {
            unreachable!("`check_order` has found the embedding in front")
        };
        let mut arena = Arena::new(limits.pages, shape)?;
        if poison {
            arena.poison();
        }

        let sizes = Sizes::new(program, &limits, threads);
        let plan = Plan::new(program.heads, &program.kv, &limits, threads, sizes.partial_count);
        let own = (0..team.threads()).map(|_| Own {
            scratch: Scratch::default(),
            scores: Scores::new(&shape),
            partial: vec![0.0; sizes.tile_partial],
            sums: vec![0.0; sizes.tile_partial],
            row: vec![0.0; sizes.widest],
            stored: StoredHead::new(&shape),
            sampler: paguro_backend::sampling::Scratch::default(),
        });
        Ok(Self {
            own: own.collect(),
            buffers: sizes.allocate()?,
            counters: Counters::new(isa, limits.kv_dtype, &matrices),
            answers: (0..limits.max_outputs).map(|_| Mutex::new(None)).collect(),
            model: Model {
                program: program.clone(),
                matrices,
                table: *table,
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

/// Elements of everything that passes between phases, for the largest step: as [`Buffers`] has it.
struct Sizes {
    /// Elements of the widest row.
    widest: usize,
    quantized_stride: usize,
    /// Partial results of a query with one split that there is room for.
    partial_count: usize,
    /// Floats of the partial results of a tile.
    tile_partial: usize,
    stream: usize,
    quantized: usize,
    float: usize,
    q: usize,
    kv: usize,
    ffn: usize,
    turns: usize,
    partials: usize,
    logits: usize,
}

impl Sizes {
    fn new(program: &Program, limits: &Limits, threads: usize) -> Self {
        let (rows, head_dim) = (limits.max_rows, program.kv.head_dim);
        let (q, kv) = (program.heads * head_dim, program.kv.kv_heads * head_dim);
        let queries = Plan::tile_queries(program.heads / program.kv.kv_heads);
        let partial_len = partial_len(head_dim);
        // All heads of all sequences could share all splits; a fixed amount of memory is enough for those that should.
        let most = (limits.max_context.div_ceil(SPLIT) * limits.max_sequences).saturating_mul(program.heads);
        let partial_count = if threads > 1 { most.min(PARTIAL_FLOATS / partial_len) } else { 0 };
        let widest = program.hidden.max(program.ffn).max(q);
        let quantized_stride = row_blocks(widest);
        Self {
            widest,
            quantized_stride,
            partial_count,
            tile_partial: queries * partial_len,
            stream: rows * program.hidden,
            quantized: rows * quantized_stride,
            float: rows * widest,
            q: rows * q,
            kv: rows * kv,
            ffn: rows * program.ffn,
            turns: program.ropes.len() * rows * head_dim,
            partials: partial_count * partial_len,
            logits: limits.max_outputs.clamp(1, LOGIT_ROWS) * program.vocab,
        }
    }

    fn allocate(&self) -> Result<Buffers, LoadError> {
        let floats = Shared::<f32>::new;
        Ok(Buffers {
            x: floats(self.stream, "the residual stream")?,
            product: floats(self.stream, "products")?,
            quantized: Shared::new(self.quantized, "quantized rows")?,
            float: floats(self.float, "rows")?,
            q: floats(self.q, "queries")?,
            k: floats(self.kv, "keys")?,
            v: floats(self.kv, "values")?,
            attended: floats(self.q, "attention")?,
            gate: floats(self.ffn, "gates")?,
            up: floats(self.ffn, "ups")?,
            turns: floats(self.turns, "rotations")?,
            partials: floats(self.partials, "partial attention")?,
            logits: floats(self.logits, "logits")?,
            quantized_stride: self.quantized_stride,
            float_stride: self.widest,
        })
    }

    /// Bytes of all buffers, and of what each of `threads` threads has for itself.
    fn bytes(&self, threads: usize) -> u64 {
        /// A thread's strips of weights, its scores and its stack, as far as it gets resident.
        const THREAD: usize = 512 << 10;
        let shared = 2 * (self.stream + self.q + self.kv + self.ffn)
            + self.float
            + self.turns
            + self.partials
            + self.logits;
        let own = 2 * self.tile_partial + self.widest;
        let floats = (shared + threads * own) * size_of::<f32>();
        (floats + self.quantized * size_of::<QuantBlock>() + threads * THREAD) as u64
    }
}

/// Bytes that a load allocates beside weights and pages.
pub fn buffer_bytes(program: &Program, limits: &Limits, threads: usize) -> u64 {
    match program.heads.checked_rem(program.kv.kv_heads) {
        Some(0) => Sizes::new(program, limits, threads).bytes(threads),
        // No such program is loaded.
        _ => 0,
    }
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
