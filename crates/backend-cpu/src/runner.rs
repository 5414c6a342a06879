//! A loaded model: the contract's [`Runner`].

use std::sync::{Mutex, PoisonError};

use paguro_backend::{
    Activation, FeedForward, KernelCount, Limits, LoadError, Mixer, Outcome, PageMove, Program, Runner, Step,
    StepError, StepOutput, Ticket, Weights,
};

use crate::{
    attention::{AttentionKernels, SPLIT, Scores, partial_len},
    counters::Counters,
    delta::{DeltaKernels, DeltaScratch},
    experts::{ExpertBuffers, ExpertSizes, Grouping},
    forward::{Buffers, Input, Model, Own, Pass},
    isa::Isa,
    matrix::{MatrixKernels, Packing, Scratch},
    ops::RowKernels,
    pages::{Arena, PageShape, StoredHead},
    plan::Plan,
    quantize::{QuantBlock, row_blocks},
    recurrent::RecurrentSizes,
    shared::Shared,
    states::States,
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
    states: States,
    plan: Plan,
    grouping: Grouping,
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
        check_supported(program)?;
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
        let mut arena = Arena::new(limits.pages, shape)?;
        let mut states = States::new(&program.state, limits.states)?;
        if poison {
            arena.poison();
            states.poison();
        }

        let sizes = Sizes::new(program, &limits, threads);
        let heads = sizes.heads;
        let plan = Plan::new((heads, shape.kv_heads), &program.kv, &limits, threads, sizes.partial_count);
        let own = (0..team.threads()).map(|_| Own {
            scratch: Scratch::default(),
            scores: Scores::new(&shape),
            partial: vec![0.0; sizes.tile_partial],
            sums: vec![0.0; sizes.tile_partial],
            row: vec![0.0; sizes.widest],
            stored: StoredHead::new(&shape),
            sampler: paguro_backend::sampling::Scratch::default(),
            delta: DeltaScratch::new(sizes.recurrent.head().0, sizes.recurrent.head().1),
            product: vec![0.0; sizes.recurrent.conv()],
        });
        Ok(Self {
            own: own.collect(),
            buffers: sizes.allocate()?,
            grouping: Grouping::new(sizes.experts, limits.max_rows),
            counters: Counters::new(isa, limits.kv_dtype, &matrices),
            answers: (0..limits.max_outputs).map(|_| Mutex::new(None)).collect(),
            model: Model {
                program: program.clone(),
                matrices,
                heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                vectors,
                attention: limits.attention,
                products: MatrixKernels::new(isa),
                rows: RowKernels::new(isa),
                attend: AttentionKernels::new(isa),
                delta: DeltaKernels::new(isa),
            },
            team,
            limits,
            arena,
            states,
            plan,
            outputs: 0,
            submitted: 0,
        })
    }
}

impl CpuRunner {
    /// Clears the pages with a part of a state that a step writes K and V to.
    fn clear_written(&mut self, step: &Step<'_>) {
        if self.model.program.state.is_empty() {
            return;
        }
        let groups = self.model.program.kv.groups.len();
        for sequence in step.sequences {
            for group in 0..groups {
                let table = sequence.table(step.pages, group, groups);
                for &page in &table[sequence.start / self.limits.block_size..] {
                    self.arena.clear_state(page);
                }
            }
        }
    }
}

/// Elements of everything that passes between phases, for the largest step: as [`Buffers`] has it.
struct Sizes {
    /// Query heads.
    heads: usize,
    /// Largest dimensions of mixtures of experts.
    experts: ExpertSizes,
    /// And of mixers with a state.
    recurrent: RecurrentSizes,
    /// Elements of gates of attention.
    attention_gate: usize,
    rows: usize,
    hidden: usize,
    /// Elements of the widest row.
    widest: usize,
    /// Elements of the widest row of an expert.
    widest_expert: usize,
    /// Partial results of a query with one split that there is room for.
    partial_count: usize,
    /// Floats of the partial results of a tile.
    tile_partial: usize,
    q: usize,
    kv: usize,
    ffn: usize,
    turns: usize,
    partials: usize,
    logits: usize,
}

impl Sizes {
    fn new(program: &Program, limits: &Limits, threads: usize) -> Self {
        let rows = limits.max_rows;
        let (heads, kv_heads, head_dim) = heads(program).unwrap_or((1, 1, 1));
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let queries = Plan::tile_queries(heads / kv_heads);
        let partial_len = partial_len(head_dim);
        // All heads of all sequences could share all splits; a fixed amount of memory is enough for those that should.
        let most = (limits.max_context.div_ceil(SPLIT) * limits.max_sequences).saturating_mul(heads);
        let partial_count = if threads > 1 { most.min(PARTIAL_FLOATS / partial_len) } else { 0 };
        let experts = ExpertSizes::of(program);
        let ffn = program.layers.iter().map(|layer| match &layer.ffn {
            FeedForward::Dense(dense) => dense.width,
            _ => experts.shared,
        });
        let ffn = ffn.max().unwrap_or(0);
        let hidden = program.hidden;
        let recurrent = RecurrentSizes::of(program);
        let has_gate = program.attentions().any(|attention| attention.gate.is_some());
        Self {
            heads,
            experts,
            recurrent,
            attention_gate: if has_gate { rows * q } else { 0 },
            rows,
            hidden,
            widest: hidden.max(ffn).max(q).max(experts.count).max(recurrent.widest()),
            widest_expert: if experts.count > 0 { hidden.max(experts.width) } else { 0 },
            partial_count,
            tile_partial: queries * partial_len,
            q: rows * q,
            kv: rows * kv,
            ffn: rows * ffn,
            turns: program.ropes.len() * rows * head_dim,
            partials: partial_count * partial_len,
            logits: limits.max_outputs.clamp(1, LOGIT_ROWS) * program.vocab,
        }
    }

    /// Rows of experts.
    fn slots(&self) -> usize {
        self.rows * self.experts.used
    }

    fn input(rows: usize, width: usize) -> Result<Input, LoadError> {
        Ok(Input {
            quantized: Shared::new(rows * row_blocks(width), "quantized rows")?,
            float: Shared::new(rows * width, "rows")?,
            quantized_stride: row_blocks(width),
            float_stride: width,
        })
    }

    fn allocate(&self) -> Result<Buffers, LoadError> {
        let floats = Shared::<f32>::new;
        let (slots, stream) = (self.slots(), self.rows * self.hidden);
        Ok(Buffers {
            x: floats(stream, "the residual stream")?,
            products: [floats(stream, "products")?, floats(stream, "products")?],
            input: Self::input(self.rows, self.widest)?,
            q: floats(self.q, "queries")?,
            k: floats(self.kv, "keys")?,
            v: floats(self.kv, "values")?,
            attended: floats(self.q, "attention")?,
            attention_gate: floats(self.attention_gate, "gates of attention")?,
            gate: floats(self.ffn, "gates")?,
            up: floats(self.ffn, "ups")?,
            turns: floats(self.turns, "rotations")?,
            partials: floats(self.partials, "partial attention")?,
            logits: floats(self.logits, "logits")?,
            recurrent: self.recurrent.allocate(self.rows)?,
            experts: ExpertBuffers {
                logits: floats(self.rows * self.experts.count, "a router")?,
                output_gate: floats(self.rows, "a shared expert")?,
                ids: Shared::new(slots, "chosen experts")?,
                weights: floats(slots, "chosen experts")?,
                input: Self::input(slots, self.widest_expert)?,
                gate: floats(slots * self.experts.width, "experts")?,
                up: floats(slots * self.experts.width, "experts")?,
                out: floats(if slots > 0 { slots * self.hidden } else { 0 }, "experts")?,
            },
        })
    }

    /// Bytes of all buffers, and of what each of `threads` threads has for itself.
    fn bytes(&self, threads: usize) -> u64 {
        /// A thread's strips of weights, its scores and its stack, as far as it gets resident.
        const THREAD: usize = 512 << 10;
        let slots = self.slots();
        let shared = 3 * self.rows * self.hidden
            + 2 * (self.q + self.kv + self.ffn)
            + self.rows * (self.widest + self.experts.count + 1)
            + slots * (2 * self.experts.width + self.widest_expert + self.hidden + 2)
            + self.rows * self.recurrent.floats()
            + self.attention_gate
            + self.turns
            + self.partials
            + self.logits;
        let (key_dim, value_dim) = self.recurrent.head();
        let own = 2 * self.tile_partial
            + self.widest
            + self.recurrent.conv()
            + DeltaScratch::floats(key_dim, value_dim);
        let floats = (shared + threads * own) * size_of::<f32>();
        let blocks = self.rows * row_blocks(self.widest) + slots * row_blocks(self.widest_expert);
        (floats + blocks * size_of::<QuantBlock>() + threads * THREAD) as u64
    }
}

/// Bytes that a load allocates beside weights and pages.
pub fn buffer_bytes(program: &Program, limits: &Limits, threads: usize) -> u64 {
    match heads(program) {
        Some(_) => Sizes::new(program, limits, threads).bytes(threads),
        // No such program is loaded.
        None => 0,
    }
}

/// Query heads, K/V heads and their size, if they are the same in all layers.
fn heads(program: &Program) -> Option<(usize, usize, usize)> {
    let shape = |attention: &paguro_backend::Attention| {
        let group = program.kv.groups.get(attention.kv.group)?;
        let divides = group.kv_heads > 0 && attention.heads.is_multiple_of(group.kv_heads);
        divides.then_some((attention.heads, group.kv_heads, group.head_dim))
    };
    let mut shapes = program.attentions().map(shape);
    let first = shapes.next()??;
    shapes.all(|shape| shape == Some(first)).then_some(first)
}

/// Refuses, by name, what this version has no kernels for.
fn check_supported(program: &Program) -> Result<(), LoadError> {
    let unsupported = |what: String, supported: &str| {
        Err(LoadError::Unsupported { device: "cpu".into(), what, supported: supported.into() })
    };
    for layer in &program.layers {
        if !matches!(layer.mixer, Mixer::Attention(_) | Mixer::Conv(_) | Mixer::DeltaRule(_)) {
            return unsupported(
                format!("{:?}", layer.mixer),
                "attention, short convolutions and gated delta rules work",
            );
        }
        let activation = match &layer.ffn {
            FeedForward::Dense(dense) => dense.activation,
            FeedForward::Experts(experts) => {
                if !matches!(
                    experts.router.scores,
                    paguro_backend::Scores::Softmax | paguro_backend::Scores::Sigmoid
                ) {
                    let what = format!("a router with {:?}", experts.router.scores);
                    return unsupported(what, "softmax and sigmoid work");
                }
                experts.activation
            }
            other => return unsupported(format!("{other:?}"), "dense networks and experts work"),
        };
        match activation {
            Activation::Silu
            | Activation::GeluTanh
            | Activation::Gelu
            | Activation::Relu2
            | Activation::ClampedSwiglu { .. } => {}
            other => return unsupported(format!("the activation {other:?}"), "SiLU, GELU and ReLU² work"),
        }
    }
    if heads(program).is_none() {
        return unsupported(
            "query heads or K/V heads that differ between layers".into(),
            "as many heads of one size in all layers work",
        );
    }
    Ok(())
}

impl Runner for CpuRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.model.program, &self.limits)?;
        step.carries_nothing()?;
        self.clear_written(step);
        self.plan.make(step);
        let Self { team, model, buffers, arena, states, plan, grouping, counters, own, answers, .. } = self;
        Pass { model, buffers, arena, states, step, plan, counters, team, own, grouping }.run(answers);
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
        let parts = self.states.bytes_of_slot().div_ceil(self.arena.page_bytes());
        for &page_move in moves {
            page_move.check(&self.limits, parts)?;
            match page_move {
                PageMove::Copy { from, to } => self.arena.copy(from, to),
                PageMove::SaveState { state, part, to } => {
                    self.arena.save(to, self.states.bytes(state), part)
                }
                PageMove::RestoreState { from, part, state } => {
                    self.arena.restore(from, self.states.bytes_mut(state), part);
                }
                other => return Err(StepError::Invalid(format!("no such move here: {other:?}"))),
            }
        }
        Ok(())
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        self.counters.snapshot()
    }
}
