//! A loaded model, which runs steps.

use std::time::Duration;

use crate::{
    AdapterId, ExpertCount, KernelCount, Limits, LoadError, LowRank, MatrixId, OutputKind, PageContent,
    PageFormat, PageId, Program, StateId, Step, StepOutput, Weights,
};

/// A loaded model with its arena of pages.
pub trait Runner: Send {
    /// Starts one forward pass. All memory whose size depends on the model is allocated at load; a step allocates lists of its
    /// rows, launches and outputs at most.
    ///
    /// # Errors
    /// [`StepError`]; the pages and states that the step would have written are then undefined, all others untouched.
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError>;

    /// Prepares a pass, some of whose inputs are not known yet, for [`Runner::submit_prepared`]. In `step`, tokens or given rows have their
    /// sizes and places, and arbitrary values; no token is carried. Returns false if this runner has one step in flight and prepares
    /// none; otherwise two may be in flight, and this is possible while the one before is. Another submission drops what is prepared.
    ///
    /// # Errors
    /// As [`Runner::submit`].
    fn prepare(&mut self, _step: &Step<'_>) -> Result<bool, StepError> {
        Ok(false)
    }

    /// Starts the pass that was prepared last, with its inputs.
    ///
    /// # Errors
    /// As [`Runner::submit`].
    fn submit_prepared(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        self.submit(step)
    }

    /// Returns true if [`Runner::collect`] is known not to wait for this pass.
    fn is_done(&self, _ticket: &Ticket) -> bool {
        true
    }

    /// Waits for a pass and fills `out` in the order of the step's outputs.
    ///
    /// # Errors
    /// [`StepError`], as for [`Runner::submit`].
    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError>;

    /// Returns true if a later step may be submitted before this output of the oldest step in flight is collected, with its token as an
    /// input ([`Step::carried`]) or its embedding as a given row ([`Carried::given`](crate::Carried::given)), and if that step's output
    /// may be carried as well. Steps are computed in the order of submission, so a page may be reused by the next step. Devices that
    /// compute concurrently with the host support it, so that they do not wait for the host.
    fn carries(&self, kind: &OutputKind<'_>) -> bool;

    /// Returns the number of steps that may be in flight without [carried](Step::carried) tokens. A device of several stages computes
    /// that many at once. Steps pass each stage in the order of submission, so chunks of one prompt may be in several of them, and a
    /// page may be reused by the next step.
    fn lanes(&self) -> usize {
        1
    }

    /// Returns how long a thread that waits for this runner may ask again and again before it sleeps: being woken takes tens of
    /// microseconds. Not at all where the runner needs the processor.
    fn spin(&self) -> Duration {
        Duration::ZERO
    }

    /// Loads a head of this runner's model: a program whose steps alternate with this runner's, and which has matrices in common
    /// with it. `shared` lists them by their numbers in the head and in the model; they are in memory once. A head that [shares
    /// pages](Program::shares_pages) reads those of this runner, with the same limits of pages.
    ///
    /// # Errors
    /// [`LoadError`], as for [`Backend::load`](crate::Backend::load). A device that runs no heads refuses them by name.
    fn load_head(
        &mut self,
        program: &Program,
        weights: Weights,
        shared: &[(MatrixId, MatrixId)],
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError>;

    /// Moves whole pages and states, in order.
    ///
    /// # Errors
    /// [`StepError::Invalid`] if a page or state does not exist, [`StepError::Device`]. All destinations are then
    /// undefined.
    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError>;

    /// Returns the format of pages outside of the device, or `None` if their bytes cannot leave it.
    fn page_format(&self) -> Option<PageFormat>;

    /// Copies the bytes of whole pages into `out`, one page after the other. They are the bytes after all steps that were
    /// submitted before.
    ///
    /// # Errors
    /// [`StepError::Invalid`] if a page does not exist, if `out` has another size, or without a
    /// [format](Runner::page_format); [`StepError::Device`].
    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError>;

    /// Fills whole pages with bytes that were read from a runner of the same model and
    /// [format](Runner::page_format), and that have this content. They have them after all steps that were submitted before.
    ///
    /// # Errors
    /// As [`Runner::read_pages`]. The pages are then undefined, all others untouched.
    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError>;

    /// Adds changes to an adapter, which exists from the first call on. The engine calls it with a few pairs at a time,
    /// between two steps. A device that supports no adapters refuses them by name.
    ///
    /// # Errors
    /// [`LoadError`]. The adapter is then incomplete, and the engine unloads it.
    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError>;

    /// Returns work that steps with the loaded adapters need, such as compiling kernels, if there is some. It is done on another
    /// thread, beside steps. A step that needs it and comes earlier does it itself.
    fn prepare_adapters(&mut self) -> Option<AdapterWork> {
        None
    }

    /// Removes an adapter, if it exists. No step that was submitted later uses it.
    fn unload_adapter(&mut self, id: AdapterId);

    /// Returns the kernel statistics since load, by name.
    fn kernel_counts(&self) -> Vec<KernelCount>;

    /// Returns the use of slots by experts since load, for each layer that has slots.
    ///
    /// # Errors
    /// [`StepError::Device`]
    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError>;
}

/// Work of [`Runner::prepare_adapters`].
pub type AdapterWork = Box<dyn FnOnce() -> Result<(), LoadError> + Send>;

/// A submitted step. At most [`Runner::lanes`] are in flight, and one more that uses [tokens of the oldest one](Step::carried).
/// They are collected in order.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a submitted step must be collected"]
pub struct Ticket(pub u64);

/// A copy of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageMove {
    /// Copies a page inside the arena: copy-on-write.
    Copy {
        /// Source.
        from: PageId,
        /// Destination; its old content is lost.
        to: PageId,
    },
    /// Copies a part of a state into a page. A page that is written by a step afterwards holds K and V again.
    SaveState {
        /// Source.
        state: StateId,
        /// Number of the part: the state is cut into parts of a page each, `checkpoint_pages` of the [`Backend`](crate::Backend) in all.
        part: usize,
        /// Destination; its old content is lost.
        to: PageId,
    },
    /// Copies a part of a state back from the page in which it was saved. A state whose parts have all been restored is
    /// the one that was saved, in any slot.
    RestoreState {
        /// Source.
        from: PageId,
        /// Number of the part.
        part: usize,
        /// Destination.
        state: StateId,
    },
}

impl PageMove {
    /// Checks that the page and the state of a move exist, for a runner whose states have `parts` parts.
    ///
    /// # Errors
    /// [`StepError::Invalid`]
    pub fn check(&self, limits: &Limits, parts: usize) -> Result<(), StepError> {
        let (pages, part, state) = match *self {
            Self::Copy { from, to } => ([from, to], None, None),
            Self::SaveState { state, part, to: page } | Self::RestoreState { from: page, part, state } => {
                ([page, page], Some(part), Some(state))
            }
        };
        let exists = pages.iter().all(|page| (page.0 as usize) < limits.pages)
            && part.is_none_or(|part| part < parts)
            && state.is_none_or(|state| (state.0 as usize) < limits.states);
        if exists {
            return Ok(());
        }
        let (pages, states) = (limits.pages, limits.states);
        Err(StepError::Invalid(format!("{self:?} with {pages} pages and {states} states of {parts} parts")))
    }
}

/// Reason of a failed step.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The step violates the contract, which is a defect of the caller. Nothing was computed.
    #[error("invalid step: {0}")]
    Invalid(String),
    /// The device failed or was lost.
    #[error("{0}")]
    Device(String),
}
