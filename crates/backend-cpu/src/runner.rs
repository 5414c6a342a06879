//! A loaded model: the contract's [`Runner`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paguro_backend::{
    AdapterId, AttentionMode, ExpertCount, InputSquares, KernelCount, Limits, LoadError, LowRank, MatrixId,
    OutputKind, OutputValue, Pace, PageContent, PageFormat, PageId, PageMove, Program, Runner, Step,
    StepError, StepOutput, Ticket, WeightFormat, Weights,
};

use crate::{
    adapters::Adapters,
    attention::{AttentionKernels, SPLIT, Scores},
    buffers::{BufferSizes, Buffers},
    counters::Counters,
    delta::{DeltaKernels, DeltaScratch},
    experts::RowsByExpert,
    forward::Pass,
    isa::Isa,
    matrix::{Activations, MatrixKernels, PackedMatrix, Packing, Scratch},
    model::Model,
    ops::RowKernels,
    page_format,
    pages::{Arena, PageShape, StoredHead},
    plan::StepPlan,
    states::States,
    support,
    thread_pool::{Chunking, ThreadPool},
    worker::WorkerScratch,
};

/// A model, its pages, and the thread pool that runs it.
pub struct CpuRunner {
    /// Shared with the heads of the model.
    pool: Arc<Mutex<ThreadPool>>,
    isa: Isa,
    poison: bool,
    model: Model,
    adapters: Adapters,
    limits: Limits,
    buffers: Buffers,
    /// Shared with heads that read its pages.
    arena: Arc<Mutex<Arena>>,
    page_format: PageFormat,
    states: States,
    plan: StepPlan,
    /// The layers that only rows with outputs need, by the first of them, and the plan of these rows.
    tail: Option<(usize, StepPlan)>,
    by_expert: RowsByExpert,
    counters: Counters,
    /// Working memory by thread.
    scratch: Vec<WorkerScratch>,
    /// Outputs of a step.
    answers: Vec<Mutex<Option<OutputValue>>>,
    /// Outputs of the step that was submitted last.
    outputs: usize,
    /// Steps submitted, and the ticket of the last one.
    submitted: u64,
}

impl CpuRunner {
    /// Starts a thread pool, and loads a model for it.
    ///
    /// # Errors
    /// [`LoadError`]
    #[allow(clippy::too_many_arguments)] // two callers
    pub fn load(
        isa: Isa,
        threads: usize,
        program: &Program,
        weights: Weights,
        limits: Limits,
        poison: bool,
        squares: Option<Arc<InputSquares>>,
        pace: Option<Arc<Pace>>,
    ) -> Result<Self, LoadError> {
        let mut pool = ThreadPool::new(threads).map_err(|error| {
            LoadError::Device(format!("cannot start {threads} threads: {error}; use fewer with --threads"))
        })?;
        pool.pace = pace;
        let pool = Arc::new(Mutex::new(pool));
        Self::load_on(pool, isa, program, weights, limits, poison, squares, (&[], None))
    }

    /// Packs the weights on the thread pool and allocates all buffers for `limits`. Matrices in `packed` are packed already, and `pages`
    /// are those of a program that shares pages.
    ///
    /// # Errors
    /// [`LoadError`]
    #[allow(clippy::too_many_arguments)] // two callers
    fn load_on(
        shared_pool: Arc<Mutex<ThreadPool>>,
        isa: Isa,
        program: &Program,
        weights: Weights,
        limits: Limits,
        poison: bool,
        squares: Option<Arc<InputSquares>>,
        (packed, pages): (&[(MatrixId, Arc<PackedMatrix>)], Option<&Arc<Mutex<Arena>>>),
    ) -> Result<Self, LoadError> {
        let mut pool = lock(&shared_pool);
        let threads = pool.threads();
        program.check(&weights)?;
        support::check(program)?;
        if limits.expert_slots.is_some() {
            return Err(LoadError::no_slots("cpu"));
        }
        let shapes = PageShape::of_groups(&program.kv, limits.block_size, limits.kv_dtype)?;
        if !SPLIT.is_multiple_of(limits.block_size) {
            return Err(LoadError::Unsupported {
                device: "cpu".into(),
                what: format!("pages of {} tokens", limits.block_size),
                supported: "16, 32, 64, 128, 256 and 512 work".into(),
            });
        }
        let activations = activations_of(program, &weights);
        let mut matrices = Vec::with_capacity(weights.matrices.len());
        // One after the other, so that beside the packed weights, memory holds only the rows that threads are packing.
        for (id, source) in weights.matrices.iter().enumerate() {
            if let Some((_, packed)) = packed.iter().find(|(shared, _)| shared.0 as usize == id) {
                matrices.push(packed.clone());
                continue;
            }
            let packing = Packing::new(source, activations)?;
            pool.run(threads, Chunking::Single, |_, _| packing.work());
            matrices.push(Arc::new(packing.finish()?));
        }
        weights.check_unchanged()?;
        if let Some(squares) = &squares {
            squares.begin(&weights);
        }
        let adapters = Adapters::new(program, &weights, limits.max_rows)?;
        let Weights { matrices: _, vectors, tables } = weights;
        let mut states = States::new(&program.state, limits.states)?;
        if poison {
            states.poison();
        }
        let arena = match pages.filter(|_| program.shares_pages) {
            Some(arena) if lock(arena).has_shape(limits.pages, &shapes) => Arc::clone(arena),
            Some(_) => return Err(LoadError::no_shared_pages("these have another shape")),
            None if program.shares_pages => {
                return Err(LoadError::no_shared_pages("no runner has loaded it"));
            }
            None => {
                let mut arena = Arena::new(limits.pages, shapes)?;
                if poison {
                    arena.poison();
                }
                Arc::new(Mutex::new(arena))
            }
        };

        let page_format = page_format::of(isa, &limits, lock(&arena).page_bytes());
        let sizes = BufferSizes::new(program, &limits, threads);
        let groups: Vec<_> = program.kv.groups.iter().copied().zip(support::heads(program)?).collect();
        let plan = StepPlan::new(&groups, &limits, threads, sizes.partial_count);
        let needs_all = limits.attention != AttentionMode::Paged || squares.is_some();
        let tail = support::tail(program).filter(|_| !needs_all);
        let tail = tail.map(|first| (first, StepPlan::new(&groups, &limits, threads, sizes.partial_count)));
        drop(pool);
        let scratch = (0..threads).map(|_| WorkerScratch {
            matmul: Scratch::default(),
            scores: Scores::new(limits.kv_dtype, sizes.head_dim),
            partial: vec![0.0; sizes.tile_partial],
            sums: vec![0.0; sizes.tile_partial],
            row: vec![0.0; sizes.widest.max(sizes.row_ops.widest)],
            stored: StoredHead::new(limits.kv_dtype, sizes.head_dim),
            sampler: paguro_backend::sampling::Scratch::default(),
            delta: DeltaScratch::new(sizes.recurrent.head().0, sizes.recurrent.head().1),
            conv_input: vec![0.0; sizes.recurrent.conv()],
            sum: vec![0.0; sizes.experts.sum],
            encoded: Vec::new(),
            embeds: vec![0.0; sizes.layer_embeds],
        });
        Ok(Self {
            scratch: scratch.collect(),
            buffers: sizes.allocate()?,
            by_expert: RowsByExpert::new(sizes.experts, limits.max_rows),
            counters: Counters::new(isa, limits.kv_dtype, &matrices),
            answers: (0..limits.max_outputs).map(|_| Mutex::new(None)).collect(),
            model: Model {
                program: program.clone(),
                matrices,
                vectors,
                tables,
                rope_stride: sizes.rope_stride,
                attention: limits.attention,
                matmul: MatrixKernels::new(isa, activations),
                rows: RowKernels::new(isa),
                attend: AttentionKernels::new(isa),
                delta: DeltaKernels::new(isa),
                squares,
                adapted: false,
            },
            adapters,
            pool: shared_pool.clone(),
            isa,
            poison,
            limits,
            page_format,
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
        let mut arena = lock(&self.arena);
        for sequence in step.sequences {
            for group in 0..groups {
                let table = sequence.table(step.pages, group, groups);
                for &page in &table[sequence.start / self.limits.block_size..] {
                    arena.clear_state(page);
                }
            }
        }
    }
}

/// Locks the thread pool or the pages, which one runner uses at a time.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the form of quantized activations. Rows of encoders in Q8_0 are ranged. Decoders keep the eighth bit,
/// which blocks around zero would lose; their steps of few rows wait for memory and not for instructions.
fn activations_of(program: &Program, weights: &Weights) -> Activations {
    let mut quantized =
        weights.matrices.iter().map(|matrix| matrix.format).filter(|format| format.is_quantized());
    let is_ranged = program.bidirectional && quantized.all(|format| format == WeightFormat::Q8_0);
    if is_ranged { Activations::Ranged } else { Activations::Signed }
}

/// Returns the bytes of all packed matrices.
pub fn packed_bytes(program: &Program, weights: &Weights) -> u64 {
    let activations = activations_of(program, weights);
    let bytes = weights.matrices.iter().map(|matrix| PackedMatrix::packed_bytes(matrix, activations) as u64);
    bytes.fold(0, u64::saturating_add)
}
impl Runner for CpuRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.model.program, &self.limits)?;
        step.carries_nothing()?;
        step.has_adapters(|id| self.adapters.has(id))?;
        self.model.adapted = !step.adapters.is_empty();
        self.clear_written(step);
        self.plan.make(step, |sequence| self.model.program.seen_tokens(sequence));
        let Self {
            pool,
            model,
            adapters,
            buffers,
            arena,
            states,
            plan,
            tail,
            by_expert,
            counters,
            scratch,
            answers,
            ..
        } = self;
        let (mut pool, arena) = (lock(pool), lock(arena));
        let tail =
            tail.as_mut().filter(|_| plan.outputs.rows.len() < plan.rows.len()).map(|(first, tail)| {
                tail.make_outputs(step, plan);
                (*first, &*tail)
            });
        Pass {
            model,
            adapters,
            buffers,
            arena: &arena,
            states,
            step,
            plan,
            counters,
            pool: &mut pool,
            scratch,
            by_expert,
            tail,
        }
        .run(answers)?;
        if pool.pace.as_ref().is_some_and(|pace| pace.is_abandoned()) {
            return Err(StepError::Device("the step was abandoned".into()));
        }
        drop((pool, arena));
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

    fn carries(&self, _: &OutputKind<'_>) -> bool {
        false
    }

    fn load_head(
        &mut self,
        program: &Program,
        weights: Weights,
        shared: &[(MatrixId, MatrixId)],
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let packed = shared.iter().map(|&(own, id)| (own, Arc::clone(&self.model.matrices[id.0 as usize])));
        let packed: Vec<_> = packed.collect();
        let (pool, squares, shared) = (self.pool.clone(), None, (&packed[..], Some(&self.arena)));
        let head = Self::load_on(pool, self.isa, program, weights, limits, self.poison, squares, shared)?;
        Ok(Box::new(head))
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        let mut arena = lock(&self.arena);
        let parts = self.states.bytes_of_slot().div_ceil(arena.page_bytes());
        for &page_move in moves {
            page_move.check(&self.limits, parts)?;
            match page_move {
                PageMove::Copy { from, to } => arena.copy(from, to),
                PageMove::SaveState { state, part, to } => arena.save(to, self.states.bytes(state), part),
                PageMove::RestoreState { from, part, state } => {
                    arena.restore(from, self.states.bytes_mut(state), part);
                }
            }
        }
        Ok(())
    }

    fn page_format(&self) -> Option<PageFormat> {
        Some(self.page_format.clone())
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.page_format.check(pages, out.len(), &self.limits)?;
        let arena = lock(&self.arena);
        for (&page, out) in pages.iter().zip(out.chunks_exact_mut(self.page_format.page_bytes)) {
            out.copy_from_slice(arena.bytes(page));
        }
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError> {
        self.page_format.check(pages, bytes.len(), &self.limits)?;
        let mut arena = lock(&self.arena);
        for (&page, bytes) in pages.iter().zip(bytes.chunks_exact(self.page_format.page_bytes)) {
            arena.fill(page, bytes, content);
        }
        Ok(())
    }

    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        self.adapters.load(id, pairs)
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.adapters.unload(id);
    }

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        Ok(Vec::new())
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        self.counters.snapshot()
    }
}
