//! WGSL kernels through wgpu: Apple GPUs through Metal, all others through Vulkan.
//!
//! [`Gpu`] loads a program: weights are packed into planes of 16-byte loads ([`layout`]), the program becomes a fixed list of
//! launches with their kernels and buffers (`lower`), and a step is one small upload and a few command buffers (`plan`,
//! `runner`). Kernels are the files of `shaders/`, with constants and repeated lines put in by `template`.

mod adapter;
mod canary;
mod chain;
mod device;
mod emulate;
mod flight;
mod hidden;
pub mod layout;
mod lower;
mod matrix;
mod ops;
mod pace;
mod page_io;
mod pages;
mod pipeline;
mod plan;
mod planned;
mod probe;
mod runner;
mod sampler;
pub mod suite;
mod tally;
mod template;
mod threadgroup;

use std::{sync::Arc, time::Duration};

use paguro_backend::{Backend, Capacity, Held, KvDtype, Limits, LoadError, Matrix, Program, Runner, Weights};

use self::{
    adapter::Facts,
    device::Device,
    layout::{BLOCK, Layout},
    runner::GpuRunner,
};

/// A GPU, opened. Clones share it, with its compiled kernels.
#[derive(Clone)]
pub struct Gpu {
    device: Arc<Device>,
    options: GpuOptions,
}

/// How to use it.
#[derive(Clone, Copy, Debug, Default)]
pub struct GpuOptions {
    /// Fills new pages with large finite numbers, so that a read of what was never written shows. For tests.
    pub poison: bool,
    /// Times every kernel with the device's clock, where it has one: before each step its kernels run once more, one after the
    /// other. Of these only attention and its merge hand over to each other, and attention's time is that of both.
    pub timed: bool,
    /// Multiplies with cooperative matrices, where there are some. They add up in another order than the kernels of few rows, so a
    /// step's logits then depend in their last bits on how many rows it has.
    pub cooperative: bool,
    /// The same where there are none: by plain code that does what they do, and takes long for it. For tests.
    pub emulated: bool,
    /// Whether launches of a step of one row hand their results over without barriers, which takes a GPU that starts workgroups in the
    /// order of launches. If it is not said, those do that are known to.
    pub hand_over: Option<bool>,
    /// Whether [`Gpu::starve_handoff`] can make kernels give up waiting. For tests.
    pub starvable: bool,
    /// Longest time that a submission should take; `None` is what suits the device.
    pub submission: Option<Duration>,
    /// Told how many kernels of a model have been compiled, and of how many.
    pub progress: Option<fn(usize, usize)>,
    /// Called with one line for people when handoff is turned off, because kernels waited for results in vain.
    pub notice: Option<fn(&str)>,
    /// Whose kernels are compiled. For tests.
    pub profile: Profile,
}

/// A GPU to compile kernels for instead of the one that is present. All kernels can be inspected; those without cooperative
/// matrices can also be run, slowly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Those of the GPU itself.
    #[default]
    Own,
    /// As for NVIDIA's GPUs: subgroups of 32, workgroups of up to 1024 threads.
    Nvidia,
    /// As for Apple's GPUs: subgroups of 32, workgroups of 256 threads, 32 KiB of workgroup memory in each pass.
    Apple,
}

/// What a machine's GPU says of itself.
#[derive(Clone, Debug)]
pub struct GpuInfo {
    /// Its place among this machine's GPUs, as `gpu:N` takes it.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Driver and interface.
    pub driver: String,
    /// Whether it is a processor that plays a GPU: slower than the `cpu` device, for tests.
    pub is_software: bool,
    /// Why it is not chosen without being named; `None` if it may be.
    pub not_automatic: Option<String>,
}

/// The GPUs of this machine, real ones first.
pub fn gpus() -> Vec<GpuInfo> {
    let info = |(index, adapter): (usize, wgpu::Adapter)| {
        let info = adapter.get_info();
        GpuInfo {
            index,
            not_automatic: Facts::of(&adapter).rules().not_automatic,
            driver: format!("{} {} ({:?})", info.driver, info.driver_info, info.backend),
            is_software: info.device_type == wgpu::DeviceType::Cpu,
            name: info.name,
        }
    };
    adapter::adapters().into_iter().enumerate().map(info).collect()
}

impl Gpu {
    /// Opens the GPU in this place of [`gpus`].
    ///
    /// # Errors
    /// There is none, or it does not open, in words.
    pub fn open(index: usize, options: GpuOptions) -> Result<Self, String> {
        let adapters = adapter::adapters();
        let adapter = adapters.get(index).ok_or_else(|| match adapters.len() {
            0 => "this machine has no GPU with a Vulkan or Metal driver".to_owned(),
            count => format!("there is no GPU {index}: this machine has {count}, counted from 0"),
        })?;
        Ok(Self { device: Arc::new(Device::open(adapter, options)?), options })
    }

    /// Rows from which on a step's logits are the same bits in any company: with cooperative matrices, products of fewer rows add up
    /// in another order than those of more.
    pub fn exact_rows(&self) -> usize {
        lower::exact_rows(&self.device)
    }

    /// The numerics in force, for people.
    pub fn numerics(&self) -> String {
        match (self.device.cooperative, self.device.rules.keeps_order) {
            (Some(_), _) => {
                "fast: in its last bits, a token's logits depend on how many rows run with it; --numerics exact has equal bits in \
                 any batch, and slower prompts"
            }
            (None, true) => "exact: a token's logits are the same bits whatever else runs with it",
            (None, false) => {
                "exact: sums have one order; but Metal's compiler may change it, so equal bits in any batch are not promised"
            }
        }
        .to_owned()
    }

    /// Bytes per second that plain reading of the GPU's memory reaches: the median of some rounds.
    ///
    /// # Errors
    /// No memory to read; the device failed.
    pub fn read_bandwidth(&self, rounds: usize) -> Result<f64, LoadError> {
        probe::read_bandwidth(&self.device, rounds, None)
    }

    /// The same for reading pieces of so many bytes, a power of two and at least 16, in random order, as pages may lie: what scattering
    /// costs before any kernel attends.
    ///
    /// # Errors
    /// No memory to read; the device failed.
    pub fn scattered_read_bandwidth(&self, rounds: usize, piece: usize) -> Result<f64, LoadError> {
        probe::read_bandwidth(&self.device, rounds, Some(piece))
    }
}

impl Gpu {
    /// Bytes that have been allocated on the device since it was opened.
    pub fn allocated(&self) -> u64 {
        self.device.allocated.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Encodes the submission of a step's commands that follows `after` others, but does not submit it, as if the device had failed
    /// to run it. For tests.
    pub fn lose_submission(&self, after: u32) {
        self.device.lose_submission(after);
    }

    /// Turns handoff on, and makes the kernels of one submission give up at once where they wait for another kernel's results. `after`
    /// submissions of launches come before it. Needs [`GpuOptions::starvable`]. For tests.
    pub fn starve_handoff(&self, after: u32) {
        self.device.starve_handoff(after);
    }

    /// Does from now on as if a kernel had given up waiting for what another one was to hand over. For tests.
    pub fn doubt_handoff(&self) {
        self.device.in_doubt.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// Lowers a model without compiling its kernels, so that [`Gpu::kernels`] has them.
    ///
    /// # Errors
    /// As [`Backend::load`], except errors of a compiler.
    pub fn lower(&self, program: &Program, weights: &Weights, limits: &Limits) -> Result<(), LoadError> {
        program.check(weights)?;
        let fused = ops::Program::new(program, &self.device.name)?;
        lower::Lowering::new(&self.device, &fused, weights, limits)?.lower().map(|_| ())
    }

    /// Name and source of every kernel that was compiled for the models loaded so far.
    pub fn kernels(&self) -> Vec<(String, String)> {
        self.device.kernels()
    }
}

impl Backend for Gpu {
    fn name(&self) -> &str {
        "gpu"
    }

    fn capacity(&self) -> Capacity {
        let device = &self.device;
        Capacity {
            description: format!("{}, {}", device.name, device.driver),
            bytes_free: device.rules.bytes_free,
            features: device::feature_names(device),
        }
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        // `load` refuses a program that this device cannot run; the number for such a program is never used.
        ops::Program::new(program, &self.device.name)
            .map_or(0, |program| pages::page_bytes(&program.kv, block_size, kv_dtype))
    }

    fn held(&self, matrix: &Matrix) -> Held {
        let words = Layout::of(matrix.format).row_words(matrix.cols.div_ceil(BLOCK));
        let bytes = 4 * matrix.parts * matrix.rows * words.iter().sum::<usize>();
        Held { bytes, converted_to: Layout::converts(matrix.format) }
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        ops::Program::new(program, &self.device.name)
            .map_or(0, |program| lower::buffer_bytes(&self.device, &program, limits))
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let runner = GpuRunner::load(self.device.clone(), program, weights, limits, self.options)?;
        Ok(Box::new(runner))
    }
}
