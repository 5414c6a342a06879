//! A loaded model: the contract's [`Runner`].

use std::sync::{Arc, Mutex, PoisonError};

use paguro_backend::{
    Activation, AttentionMode, FeedForward, InputSquares, KernelCount, Layer, Limits, LoadError, Mixer,
    Outcome, PageContent, PageFormat, PageId, PageMove, Program, Residual, Runner, Step, StepError,
    StepOutput, Ticket, WeightFormat, Weights,
};

use crate::{
    attention::{AttentionKernels, SPLIT, Scores, partial_len},
    counters::Counters,
    delta::{DeltaKernels, DeltaScratch},
    experts::{ExpertBuffers, ExpertSizes, Grouping},
    forward::{Buffers, Input, Model, Own, Pass},
    isa::Isa,
    latent::{LatentBuffers, LatentSizes},
    matrix::{Activations, MatrixKernels, PackedMatrix, Packing, Scratch},
    ops::RowKernels,
    page_format,
    pages::{Arena, PageShape, StoredHead},
    plan::{Heads, Plan},
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
    page_format: PageFormat,
    states: States,
    plan: Plan,
    /// The layers that only rows with outputs need, by the first of them, and the plan of these rows.
    tail: Option<(usize, Plan)>,
    grouping: Grouping,
    counters: Counters,
    /// Working memory by thread.
    own: Vec<Own>,
    /// Outputs of a step.
    answers: Vec<Mutex<Option<Outcome>>>,
    /// Outputs of the step that was submitted last.
    outputs: usize,
    /// Steps submitted, and the ticket of the last one.
    submitted: u64,
}

impl CpuRunner {
    /// Packs the weights on the team and allocates all buffers for `limits`.
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
        squares: Option<Arc<InputSquares>>,
    ) -> Result<Self, LoadError> {
        program.check(&weights)?;
        check_supported(program)?;
        let shapes = PageShape::of_groups(&program.kv, limits.block_size, limits.kv_dtype)?;
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
        let activations = activations_of(program, &weights);
        let mut matrices = Vec::with_capacity(weights.matrices.len());
        // One after the other, so that beside the packed weights, memory holds only the rows that threads are packing.
        for source in &weights.matrices {
            let packing = Packing::new(source, activations)?;
            team.share(threads, Portions::Single, |_, _| packing.work());
            matrices.push(packing.finish()?);
        }
        weights.check_unchanged()?;
        if let Some(squares) = &squares {
            squares.begin(&weights);
        }
        let Weights { vectors, tables, .. } = weights;
        let mut arena = Arena::new(limits.pages, shapes)?;
        let mut states = States::new(&program.state, limits.states)?;
        if poison {
            arena.poison();
            states.poison();
        }

        let sizes = Sizes::new(program, &limits, threads);
        let windows = program.kv.groups.iter().map(|group| group.window);
        let groups: Vec<_> = windows.zip(heads(program)?).collect();
        let plan = Plan::new(&groups, program.bidirectional, &limits, threads, sizes.partial_count);
        let needs_all = limits.attention != AttentionMode::Paged || squares.is_some();
        let tail = tail(program).filter(|_| !needs_all);
        let tail = tail.map(|first| {
            (first, Plan::new(&groups, program.bidirectional, &limits, threads, sizes.partial_count))
        });
        let own = (0..team.threads()).map(|_| Own {
            scratch: Scratch::default(),
            scores: Scores::new(limits.kv_dtype, sizes.head_dim),
            partial: vec![0.0; sizes.tile_partial],
            sums: vec![0.0; sizes.tile_partial],
            row: vec![0.0; sizes.widest],
            stored: StoredHead::new(limits.kv_dtype, sizes.head_dim),
            sampler: paguro_backend::sampling::Scratch::default(),
            delta: DeltaScratch::new(sizes.recurrent.head().0, sizes.recurrent.head().1),
            product: vec![0.0; sizes.recurrent.conv()],
            sum: vec![0.0; sizes.experts.sum],
            encoded: Vec::new(),
            embeds: vec![0.0; sizes.layer_embeds],
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
                vectors,
                tables,
                turn_stride: sizes.turn_stride,
                attention: limits.attention,
                products: MatrixKernels::new(isa, activations),
                rows: RowKernels::new(isa),
                attend: AttentionKernels::new(isa),
                delta: DeltaKernels::new(isa),
                squares,
            },
            team,
            limits,
            page_format: page_format::of(isa, &limits, arena.page_bytes()),
            arena,
            states,
            plan,
            tail,
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
    /// Elements of the largest head.
    head_dim: usize,
    /// Largest dimensions of latent attention.
    latent: LatentSizes,
    /// Elements of a row's embeddings for all layers.
    layer_embeds: usize,
    /// Cosines and sines of a rope and row, at most.
    turn_stride: usize,
    /// Largest dimensions of mixtures of experts.
    experts: ExpertSizes,
    /// Sizes of mixers with a state.
    recurrent: RecurrentSizes,
    /// Elements of gates of attention.
    attention_gate: usize,
    rows: usize,
    hidden: usize,
    /// Elements of the widest row.
    widest: usize,
    /// Elements of the widest row of an expert.
    widest_expert: usize,
    /// Maximum number of partial results of a query with one split.
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
        let heads = heads(program).unwrap_or_default();
        let most_of = |size: fn(&Heads) -> usize| heads.iter().map(size).max().unwrap_or(1);
        let (q, kv) = (most_of(Heads::q_width), most_of(Heads::kv_width));
        let head_dim = most_of(|heads| heads.dim);
        let tile_partial = most_of(|heads| Plan::tile_queries(heads.per_kv()) * partial_len(heads.dim));
        let partial_len = partial_len(head_dim);
        // All heads of all sequences could share all splits; a fixed amount of memory suffices for those that should.
        let splits = limits.max_context.div_ceil(SPLIT) * limits.max_sequences;
        let most = splits.saturating_mul(most_of(|heads| heads.queries));
        let partial_count = if threads > 1 { most.min(PARTIAL_FLOATS / partial_len) } else { 0 };
        let experts = ExpertSizes::of(program);
        let ffn = program.layers.iter().map(|layer| match &layer.ffn {
            FeedForward::Dense(dense) => dense.width,
            _ => experts.shared,
        });
        let embeds = program.embed.layers.as_ref();
        let ffn = ffn.chain(embeds.map(|embeds| embeds.width)).max().unwrap_or(0);
        let layer_embeds = embeds.map_or(0, |embeds| embeds.count * embeds.width);
        let turn_stride = program.ropes.iter().map(|rope| 2 * rope.frequencies.len()).max().unwrap_or(0);
        let hidden = program.hidden;
        let latent = LatentSizes::of(program);
        let recurrent = RecurrentSizes::of(program);
        let has_gate = program.attentions().any(|attention| attention.gate.is_some());
        Self {
            head_dim,
            latent,
            layer_embeds,
            turn_stride,
            experts,
            recurrent,
            attention_gate: if has_gate { rows * q } else { 0 },
            rows,
            hidden,
            widest: hidden
                .max(ffn)
                .max(q)
                .max(experts.count)
                .max(experts.latent)
                .max(recurrent.widest())
                .max(latent.widest()),
            widest_expert: if experts.count > 0 { hidden.max(experts.width).max(experts.latent) } else { 0 },
            partial_count,
            tile_partial,
            q: rows * q,
            kv: rows * kv,
            ffn: rows * ffn,
            turns: program.ropes.len() * rows * turn_stride,
            partials: partial_count * partial_len,
            logits: match program.bidirectional {
                true => program.vocab, // nobody wants logits of encoders
                false => limits.max_outputs.clamp(1, LOGIT_ROWS) * program.vocab,
            },
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
            layer_embeds: floats(self.rows * self.layer_embeds, "embeddings for layers")?,
            latent: LatentBuffers {
                rank: floats(self.rows * self.latent.rank, "ranks of queries")?,
                query: floats(self.rows * self.latent.query, "queries of latent attention")?,
                input: Self::input(self.rows * self.latent.heads, self.latent.input)?,
                heads: floats(
                    self.rows * self.latent.heads * self.latent.output,
                    "heads of latent attention",
                )?,
            },
            experts: ExpertBuffers {
                latent: floats(self.rows * self.experts.latent, "rows of experts")?,
                latent_out: floats(if self.experts.latent > 0 { stream } else { 0 }, "sums of experts")?,
                logits: floats(self.rows * self.experts.count, "a router")?,
                output_gate: floats(self.rows, "a shared expert")?,
                ids: Shared::new(slots, "chosen experts")?,
                weights: floats(slots, "chosen experts")?,
                input: Self::input(slots, self.widest_expert)?,
                gate: floats(slots * self.experts.width, "experts")?,
                up: floats(slots * self.experts.width, "experts")?,
                out: floats(
                    if slots > 0 { slots * self.hidden.max(self.experts.latent) } else { 0 },
                    "experts",
                )?,
            },
        })
    }

    /// Returns the bytes of all buffers, and of the working memory of `threads` threads.
    fn bytes(&self, threads: usize) -> u64 {
        /// A thread's strips of weights, its scores and its stack, as far as it gets resident.
        const THREAD: usize = 512 << 10;
        let slots = self.slots();
        let shared = 3 * self.rows * self.hidden
            + 2 * (self.q + self.kv + self.ffn)
            + self.rows * (self.widest + self.experts.count + 1)
            + slots
                * (2 * self.experts.width + self.widest_expert + self.hidden.max(self.experts.latent) + 2)
            + self.rows * (self.experts.latent + if self.experts.latent > 0 { self.hidden } else { 0 })
            + self.rows * self.recurrent.floats()
            + self.attention_gate
            + self.rows * self.layer_embeds
            + self.rows * self.latent.floats()
            + self.turns
            + self.partials
            + self.logits;
        let (key_dim, value_dim) = self.recurrent.head();
        let own = 2 * self.tile_partial
            + self.widest
            + self.experts.sum
            + self.layer_embeds
            + self.recurrent.conv()
            + DeltaScratch::floats(key_dim, value_dim);
        let floats = (shared + threads * own) * size_of::<f32>();
        let blocks = self.rows * row_blocks(self.widest)
            + slots * row_blocks(self.widest_expert)
            + self.rows * self.latent.heads * row_blocks(self.latent.input);
        (floats + blocks * size_of::<QuantBlock>() + threads * THREAD) as u64
    }
}

/// Bytes that a load allocates beside weights and pages.
pub fn buffer_bytes(program: &Program, limits: &Limits, threads: usize) -> u64 {
    match heads(program) {
        Ok(_) => Sizes::new(program, limits, threads).bytes(threads),
        // No such program is loaded.
        Err(_) => 0,
    }
}

/// Returns the form of quantized activations. Rows of encoders in Q8_0 are ranged. Decoders keep the eighth bit,
/// which blocks around zero would lose; their steps of few rows wait for memory and not for instructions.
fn activations_of(program: &Program, weights: &Weights) -> Activations {
    let mut quantized =
        weights.matrices.iter().map(|matrix| matrix.format).filter(|format| format.is_quantized());
    let is_ranged = program.bidirectional && quantized.all(|format| format == WeightFormat::Q8_0);
    if is_ranged { Activations::Ranged } else { Activations::Signed }
}

/// Bytes of all packed matrices.
pub fn packed_bytes(program: &Program, weights: &Weights) -> u64 {
    let activations = activations_of(program, weights);
    let bytes = weights.matrices.iter().map(|matrix| PackedMatrix::packed_bytes(matrix, activations) as u64);
    bytes.fold(0, u64::saturating_add)
}

/// Heads of the layers of each K/V group.
///
/// # Errors
/// [`LoadError::Unsupported`] for layers of a group that differ.
fn heads(program: &Program) -> Result<Vec<Heads>, LoadError> {
    Heads::of_groups(program).ok_or_else(|| LoadError::Unsupported {
        device: "cpu".into(),
        what: "query heads that differ between layers with the same window and K/V heads".into(),
        supported: "as many query heads in all of these layers work".into(),
    })
}

/// The first of the last layers that store nothing for later rows, if there are some (Gemma 4 E2B: 20 of 35; a feed-forward
/// network of Nemotron-H at the end).
fn tail(program: &Program) -> Option<usize> {
    let stores = |layer: &Layer| {
        layer.mixer.parts().any(|mixer| !matches!(mixer, Mixer::Attention(op) if op.k.is_none()))
    };
    let first = program.layers.iter().rposition(stores).map_or(0, |last| last + 1);
    (first < program.layers.len()).then_some(first)
}

/// Refuses unsupported operations by name.
fn check_supported(program: &Program) -> Result<(), LoadError> {
    let unsupported = |what: String, supported: &str| {
        Err(LoadError::Unsupported { device: "cpu".into(), what, supported: supported.into() })
    };
    for layer in &program.layers {
        let is_known = |mixer: &Mixer| {
            matches!(
                mixer,
                Mixer::Attention(_) | Mixer::Latent(_) | Mixer::Conv(_) | Mixer::DeltaRule(_) | Mixer::Ssd(_)
            )
        };
        if let Some(mixer) = layer.mixer.parts().find(|mixer| !is_known(mixer)) {
            return unsupported(
                format!("{mixer:?}"),
                "attention, latent attention, short convolutions, gated delta rules and scans work",
            );
        }
        if let Mixer::Sum(branches) = &layer.mixer {
            let is_parallel = layer.residual == Residual::Parallel;
            if branches.len() > 2 || is_parallel {
                let beside = if is_parallel { " beside a feed-forward network" } else { "" };
                let what = format!("a sum of {} mixers{beside}", branches.len());
                return unsupported(what, "sums of two before a network work");
            }
        }
        let activation = match &layer.ffn {
            FeedForward::None => continue,
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
    heads(program).map(|_| ())
}

impl Runner for CpuRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.model.program, &self.limits)?;
        step.carries_nothing()?;
        self.clear_written(step);
        self.plan.make(step);
        let Self {
            team, model, buffers, arena, states, plan, tail, grouping, counters, own, answers, ..
        } = self;
        let tail = tail.as_mut().filter(|_| plan.output_rows.len() < plan.rows.len()).map(|(first, tail)| {
            tail.make_outputs(step, plan);
            (*first, &*tail)
        });
        Pass { model, buffers, arena, states, step, plan, counters, team, own, grouping, tail }
            .run(answers)?;
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

    fn page_format(&self) -> Option<PageFormat> {
        Some(self.page_format.clone())
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.page_format.check(pages, out.len(), &self.limits)?;
        for (&page, out) in pages.iter().zip(out.chunks_exact_mut(self.page_format.page_bytes)) {
            out.copy_from_slice(self.arena.bytes(page));
        }
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError> {
        self.page_format.check(pages, bytes.len(), &self.limits)?;
        for (&page, bytes) in pages.iter().zip(bytes.chunks_exact(self.page_format.page_bytes)) {
            self.arena.fill(page, bytes, content);
        }
        Ok(())
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        self.counters.snapshot()
    }
}
