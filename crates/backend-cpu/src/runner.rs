//! A loaded model: the contract's [`Runner`].

mod load;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paguro_backend::{
    AdapterId, ExpertCount, KernelCount, Limits, LoadError, LowRank, MatrixId, OutputKind, OutputValue,
    PageContent, PageFormat, PageId, PageMove, Program, Runner, Step, StepError, StepOutput, Ticket, Weights,
};
use paguro_cpu_kernels::{isa::Isa, pages::Arena};

use self::load::LoadContext;
pub use self::load::packed_bytes;
use crate::{
    adapters::Adapters,
    buffers::Buffers,
    by_expert::RowsByExpert,
    forward,
    pass::{Counters, Pass},
    plan::StepPlan,
    states::States,
    thread_pool::ThreadPool,
    worker::{Model, WorkerScratch},
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
        let mut pass = Pass {
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
        };
        forward::run(&mut pass, answers)?;
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
        let (pool, isa, poison) = (self.pool.clone(), self.isa, self.poison);
        let context =
            LoadContext { pool, isa, poison, squares: None, packed: &packed, pages: Some(&self.arena) };
        let head = Self::load_on(context, program, weights, limits)?;
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
