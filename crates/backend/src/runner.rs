//! The two traits that a device implements.

use crate::{
    AdapterId, ExpertBytes, ExpertCount, KernelCount, KvDtype, LowRank, Matrix, MatrixId, OutputKind,
    PacedRunner, PageContent, PageFormat, PageId, Program, StateId, Step, StepOutput, WeightFormat, Weights,
};

/// A device that can load programs. Stays alive to load more than one model.
pub trait Backend: Send + Sync {
    /// Returns the short name for `--device`: `cpu`.
    fn name(&self) -> &str;

    /// Returns the free memory and a description of the device.
    fn capacity(&self) -> Capacity;

    /// Returns the number of bytes of one page of this program in the backend's own arrangement.
    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize;

    /// Returns the number of bytes of the states of one sequence in the backend's own arrangement.
    fn state_bytes(&self, program: &Program) -> usize;

    /// Returns the pages of a copy of one sequence's states; 0 if the program has none.
    fn checkpoint_pages(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        if program.state.is_empty() {
            return 0;
        }
        self.state_bytes(program).div_ceil(self.page_bytes(program, block_size, kv_dtype).max(1))
    }

    /// Returns the arrangement of a matrix in the device's memory.
    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout;

    /// Returns the bytes of all matrices in the device's memory: [those](Weights::bytes_on) of [`Backend::device_layout`], unless
    /// their arrangement depends on the program.
    fn weight_bytes(&self, program: &Program, weights: &Weights) -> u64;

    /// Returns the number of bytes of everything that a load allocates beside weights and pages.
    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64;

    /// Allocates all memory for `limits`, repacks the weights, and returns a runner. An operation, weight format or
    /// [`KvDtype`] that is not supported fails here, by name, never during a request. A program that [shares
    /// pages](Program::shares_pages) is loaded by the runner that has them.
    ///
    /// # Errors
    /// [`LoadError`].
    fn load(&self, program: &Program, weights: Weights, limits: Limits)
    -> Result<Box<dyn Runner>, LoadError>;

    /// Returns true if the device runs this tower for images, and text models with given rows, coordinates and spans.
    fn runs_tower(&self, tower: &Program) -> bool;

    /// Loads a tower for images like [`Backend::load`]: a program whose steps take long and pause for others.
    ///
    /// # Errors
    /// [`LoadError`].
    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError>;
}

/// Sums of a backend's answers. They are no methods of the trait, so that no backend has others.
impl dyn Backend + '_ {
    /// Computes the bytes of [`Backend::load`] for this program from shapes and formats alone, without reading. The
    /// result is arbitrary for a program that `load` refuses.
    pub fn plan(&self, program: &Program, weights: &Weights, limits: &Limits) -> MemoryPlan {
        let vectors = weights.vectors.iter().map(|vector| size_of_val(vector.as_slice()) as u64);
        let page_bytes = self.page_bytes(program, limits.block_size, limits.kv_dtype) as u64;
        let bytes_of = |matrix| self.device_layout(weights.matrix(matrix)).bytes as u64;
        let experts = limits.expert_slots.map(|slots| program.expert_bytes(slots, bytes_of));
        let ExpertBytes { host, slots, staging } = experts.unwrap_or_default();
        let all = vectors.fold(self.weight_bytes(program, weights), u64::saturating_add);
        MemoryPlan {
            weights: all.saturating_sub(host).saturating_add(slots).saturating_add(staging),
            host,
            kv: if program.shares_pages { 0 } else { (limits.pages as u64).saturating_mul(page_bytes) },
            states: (limits.states as u64).saturating_mul(self.state_bytes(program) as u64),
            buffers: self.buffer_bytes(program, limits),
        }
    }
}

/// A loaded model with its arena of pages.
pub trait Runner: Send {
    /// Starts one forward pass. All memory whose size depends on the model is allocated at load; a step allocates lists of its
    /// rows, launches and outputs at most.
    ///
    /// # Errors
    /// [`StepError`]; the pages and states that the step would have written are then undefined, all others untouched.
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError>;

    /// Waits for a pass and fills `out` in the order of the step's outputs.
    ///
    /// # Errors
    /// [`StepError`], as for [`Runner::submit`].
    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError>;

    /// Returns true if the next step may be submitted before this output is collected, with its token as an input
    /// ([`Step::carried`]) or its embedding as a given row ([`Carried::given`](crate::Carried::given)), and if that step's output may be
    /// carried as well. Steps are computed in the order of
    /// submission, so a page may be reused by the next step. Devices that compute concurrently with the host support
    /// it, so that they do not wait for the host.
    fn carries(&self, kind: &OutputKind<'_>) -> bool;

    /// Returns the number of steps that may be in flight without [carried](Step::carried) tokens. A device of several stages computes
    /// that many at once. Steps pass each stage in the order of submission, so chunks of one prompt may be in several of them, and a
    /// page may be reused by the next step.
    fn lanes(&self) -> usize {
        1
    }

    /// Loads a head of this runner's model: a program whose steps alternate with this runner's, and which has matrices in common
    /// with it. `shared` lists them by their numbers in the head and in the model; they are in memory once. A head that [shares
    /// pages](Program::shares_pages) reads those of this runner, with the same limits of pages.
    ///
    /// # Errors
    /// [`LoadError`], as for [`Backend::load`]. A device that runs no heads refuses them by name.
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

/// Description of a device.
#[derive(Clone, Debug)]
pub struct Capacity {
    /// Description in one line: the device and its used features.
    pub description: String,
    /// Bytes available for weights and pages, as far as the device reports them.
    pub bytes_free: u64,
    /// Bytes of the host's memory that kernels of the device can read. Only a device with memory of its own has some.
    pub host_free: u64,
    /// Rows of a step with which matmuls reach their full speed.
    pub step_rows: usize,
    /// Instruction sets or features that the kernels were chosen for.
    pub features: Vec<String>,
}

/// Memory of a loaded model, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights as the device holds them.
    pub weights: u64,
    /// Experts in the host's memory, of layers that have slots for some of them. It is no part of the sums.
    pub host: u64,
    /// All pages of K and V.
    pub kv: u64,
    /// All slots for states.
    pub states: u64,
    /// Buffers between operations, for the largest step.
    pub buffers: u64,
}

impl MemoryPlan {
    /// Returns all of it.
    pub fn total(&self) -> u64 {
        self.fixed().saturating_add(self.kv)
    }

    /// Returns the number of bytes that do not depend on the number of pages.
    pub fn fixed(&self) -> u64 {
        self.weights.saturating_add(self.states).saturating_add(self.buffers)
    }
}

/// Arrangement of a matrix in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLayout {
    /// Bytes of the matrix.
    pub bytes: usize,
    /// The format that it is converted to at load, where the kernels do not read its own.
    pub converted_to: Option<WeightFormat>,
}

/// Limits of a load, for which memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens in a page.
    pub block_size: usize,
    /// Pages in the arena, page 0 (scratch) included.
    pub pages: usize,
    /// Rows in a step.
    pub max_rows: usize,
    /// Sequences in a step.
    pub max_sequences: usize,
    /// Outputs in a step.
    pub max_outputs: usize,
    /// Tokens in a sequence.
    pub max_context: usize,
    /// Slots for the states of sequences; 0 if the program has none.
    pub states: usize,
    /// Type of stored K and V.
    pub kv_dtype: KvDtype,
    /// Paged, or the reference way.
    pub attention: AttentionMode,
    /// Slots for experts in each layer that has more of them: the device's memory has as many experts, and the host's memory has
    /// all. A row's experts need slots. With `None`, all experts are in the device's memory. Results are the same.
    pub expert_slots: Option<usize>,
}

/// Kind of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AttentionMode {
    /// Kernels read pages through the block table.
    #[default]
    Paged,
    /// The pages of each sequence are copied into one contiguous K and V for plain attention. It exists to check the
    /// paged kernels and to measure their benefit.
    Gather,
}

impl AttentionMode {
    /// Returns the name in formats of pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Paged => "paged",
            Self::Gather => "gather",
        }
    }
}

/// A submitted step. At most [`Runner::lanes`] are in flight, or two if the second one uses [tokens of the first](Step::carried).
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
        /// Number of the part: the state is cut into parts of a page each, `checkpoint_pages` of the [`Backend`] in all.
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

impl LoadError {
    /// Returns the error for a program that [shares pages](Program::shares_pages) with another one than that of the runner which loads it.
    pub fn no_shared_pages(found: &str) -> Self {
        Self::BadProgram(format!("a program that reads the pages of another one, but {found}"))
    }

    /// Returns the refusal of a head for multi-token prediction, or of an assistant, by a device that has no kernels for them.
    pub fn no_heads(device: &str, program: &Program) -> Self {
        let what = match program.shares_pages {
            true => "assistants, which read the pages of their model",
            false => "heads for multi-token prediction",
        };
        Self::Unsupported {
            device: device.to_owned(),
            what: what.to_owned(),
            supported: "--device cpu does".to_owned(),
        }
    }

    /// Returns the refusal of [`Limits::expert_slots`] by a device that has no memory of its own.
    pub fn no_slots(device: &str) -> Self {
        Self::Unsupported {
            device: device.to_owned(),
            what: "experts in slots".to_owned(),
            supported: "it reads all of them in the host's memory; leave out --expert-slots".to_owned(),
        }
    }
}

/// Reason for which a program cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// An operation or a variant of one that the backend has no kernel for.
    #[error("{device} cannot run {what}; {supported}")]
    Unsupported {
        /// The device.
        device: String,
        /// The operation or format, by name.
        what: String,
        /// Supported alternatives.
        supported: String,
    },
    /// Weights that do not fit the program: a wrong shape, a wrong number of bytes.
    #[error("tensor `{tensor}` does not fit the model: {problem}")]
    BadWeights {
        /// The tensor.
        tensor: String,
        /// The problem.
        problem: String,
    },
    /// Weights that cannot be read from their file, or a file that changed while it was read.
    #[error("tensor `{tensor}` cannot be read: {problem}")]
    Unreadable {
        /// The tensor.
        tensor: String,
        /// The error, and the file that it is about.
        problem: String,
    },
    /// Weights with which the model computes infinite numbers or NaN on every device.
    #[error(
        "the model computes {0}: its weights are damaged; download the file again (`paguro verify` checks what is in the library)"
    )]
    Damaged(f32),
    /// A program that makes no sense by itself: a defect of the lowering, named.
    #[error("invalid program: {0}")]
    BadProgram(String),
    /// Not enough memory for weights or pages.
    #[error("{device} cannot allocate {needed} bytes for {what}; use a smaller context or fewer pages")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Purpose of the memory.
        what: String,
        /// Bytes.
        needed: u64,
    },
    /// The device itself failed.
    #[error("{0}")]
    Device(String),
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
