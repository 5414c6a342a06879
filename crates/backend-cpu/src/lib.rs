//! The forward pass on the CPU: the backend that always works.
//!
//! [`Cpu`] loads a program: weights are packed for vectors of 16 outputs, pages are laid out for loads from front to
//! back, and one thread pool (`thread_pool`) then runs every step as a list of phases (`forward`). The kernels are those
//! of `paguro_cpu_kernels`. Begin with `forward`.
//!
//! | module | subject | decision |
//! |-|-|-|
//! | `forward` | a step from the first row to the outputs, layer by layer; the table of phases | |
//! | `pass`, `worker` | what layers share: phases of the pool and their statistics, matmuls, dense networks; one thread in a phase, and the model | |
//! | `thread_pool`, `plan` | phases by all threads; division of a step | |
//! | `attend` | phases of attention | |
//! | `experts`, `latent`, `recurrent`, `ssd`, `layer_input`, `row_ops`, `ends` | phases of layers and ends of other kinds | |
//! | `adapters` | low-rank changes beside the base | 20 |
//! | `gather` | the reference path of attention, which copies pages together first | |
//!
//! Every sum has one order, attention is split at fixed positions, and no result depends on the thread that computes it.
//! So logits are equal bit for bit in any batch, for any chunks, with and without cached prefixes, after preemption, and
//! with any number of threads.

mod adapters;
mod attend;
mod bounds;
mod buffers;
mod by_expert;
mod ends;
mod experts;
mod forward;
mod gather;
mod joined;
mod latent;
mod layer_input;
mod machine;
mod page_format;
mod pass;
mod plan;
mod probe;
mod recurrent;
mod row_ops;
mod runner;
mod ssd;
mod states;
mod support;
mod thread_pool;
mod worker;

use std::sync::Arc;

use paguro_backend::{
    Backend, Capacity, DeviceLayout, InputSquares, KvDtype, Limits, LoadError, Matrix, Pace, PacedRunner,
    Program, Runner, Weights,
};

pub use machine::memory_available;
pub use paguro_cpu_kernels::isa::Isa;
use paguro_cpu_kernels::{
    matrix::{Activations, PackedMatrix},
    pages::PageShape,
};
pub use probe::read_bandwidth;
use runner::CpuRunner;
use states::States;

/// Version of the bits that this backend computes. It is a part of the format of pages that leave the process, so that pages
/// of other kernels are not read. `tests/numerics.rs` fails if the bits change and it does not.
pub const NUMERICS: u32 = 1;

/// This machine's processor.
#[derive(Clone, Debug)]
pub struct Cpu {
    options: CpuOptions,
}

/// Options of the backend.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Number of threads; `None` for the number that the system permits this process.
    pub threads: Option<usize>,
    /// Instruction set; `None` for the best.
    pub isa: Option<Isa>,
    /// Most bytes of memory to use, if more are free.
    pub memory: Option<u64>,
    /// Fills new pages with large finite noise, so that reads of unwritten data are detected. For tests.
    pub poison: bool,
    /// Receives the squares of all inputs of matrices; steps are slower then.
    pub squares: Option<Arc<InputSquares>>,
}

impl Cpu {
    /// Returns a backend with these options.
    pub fn new(options: CpuOptions) -> Self {
        Self { options }
    }

    /// Returns the number of threads of a load.
    pub fn threads(&self) -> usize {
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        self.options.threads.unwrap_or_else(available).max(1)
    }

    /// Instruction set that kernels will be chosen for.
    pub fn isa(&self) -> Isa {
        self.options.isa.unwrap_or_else(Isa::detect)
    }
}

impl Backend for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }

    fn capacity(&self) -> Capacity {
        let (threads, isa) = (self.threads(), self.isa());
        let plural = if threads == 1 { "" } else { "s" };
        Capacity {
            description: format!("{}, {threads} thread{plural}, {isa}", machine::processor_name()),
            bytes_free: self
                .options
                .memory
                .map_or_else(memory_available, |most| most.min(memory_available())),
            host_free: 0,
            step_rows: 512,
            features: Isa::supported().into_iter().map(|isa| isa.name().to_owned()).collect(),
        }
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        // Sizes that this device refuses are refused by `load`; until then any number does.
        PageShape::of_groups(&program.kv, block_size, kv_dtype)
            .map_or(0, |groups| PageShape::page_bytes(&groups))
    }

    fn state_bytes(&self, program: &Program) -> usize {
        States::slot_bytes(&program.state)
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        DeviceLayout { bytes: PackedMatrix::packed_bytes(matrix, Activations::Signed), converted_to: None }
    }

    fn weight_bytes(&self, program: &Program, weights: &Weights) -> u64 {
        runner::packed_bytes(program, weights)
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        buffers::buffer_bytes(program, limits, self.threads())
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        Ok(Box::new(CpuRunner::load(self, program, weights, limits, None)?))
    }

    fn runs_tower(&self, _: &Program) -> bool {
        true
    }

    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError> {
        let pace = Arc::<Pace>::default();
        let runner = CpuRunner::load(self, program, weights, limits, Some(Arc::clone(&pace)))?;
        Ok(PacedRunner { runner: Box::new(runner), pace })
    }
}
