//! WGSL kernels through wgpu: Apple GPUs through Metal, all others through Vulkan.
//!
//! [`Gpu`] loads a program: weights are packed into planes of 16-byte loads ([`layout`]), the program becomes nodes by passes
//! over data (`lower`, whose head lists all operations with their launches and kernels), the nodes become kernels, buffers and
//! launches (`emit`), and a step is one small upload and a few command buffers (`plan`, `runner`). Kernels are the files of
//! `shaders/`, with constants and repeated lines put in by `template`. Only `emit` names them.
//!
//! | module | subject |
//! |-|-|
//! | `adapter`, `device`, `chain` | GPUs and rules for their drivers; the test of handoff when a device is opened |
//! | `heads` | refusal of programs without kernels |
//! | `lower`, `emit`, `template` | passes over nodes; kernels of WGSL and their pipelines |
//! | `layout`, `matrix`, `pages` | planes of weights; matrices larger than a binding, by rows; pages |
//! | `plan`, `planned`, `flight`, `runner` | a step: its words, launches, command buffers, answers |
//! | `sampler` | sampling on the device |
//! | `pace`, `canary`, `threadgroup`, `hidden` | watchdogs, lost submissions, Metal's workgroup memory, hazards that wgpu does not see |
//! | `kernel_statistics` | launches by name, and their times |
//! | `emulate` | cooperative matrices in plain WGSL, for tests |
//!
//! Each command buffer of a step is twice as long as the one before, so that the device works while the host encodes. On
//! a software driver, where compilation dominates, shapes are arguments of kernels instead of constants.
//!
//! With `--numerics exact`, all kernels sum a row's inputs in one order (decision 6), so logits are batch-invariant on
//! one device with one driver. With `fast`, kernels use cooperative matrices, and results are equal among steps of one
//! batch-size class.

mod adapter;
mod canary;
mod chain;
mod device;
mod emit;
mod emulate;
mod flight;
mod heads;
mod hidden;
mod host;
mod kernel_statistics;
pub mod layout;
mod low_rank;
mod lower;
mod matrix;
mod pace;
mod page_io;
mod pages;
mod pipeline;
mod plan;
mod planned;
mod probe;
mod runner;
mod sampler;
mod target;
mod template;
mod threadgroup;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use paguro_backend::{
    Adaptable, Backend, Capacity, DeviceLayout, KvDtype, Limits, LoadError, Matrix, Pace, PacedRunner,
    Program, Runner, Weights,
};

use self::{
    device::Device,
    emit::Bound,
    heads::KvLayout,
    layout::{BLOCK, Layout},
    lower::Facts,
    probe::Source,
    runner::GpuRunner,
};

/// Version of the bits that this backend computes on one device. It is a part of the format of pages that leave the process, so
/// that pages of other kernels are not read. A test of the kernels' sources fails if they change and it does not.
pub const NUMERICS: u32 = 2;

/// A GPU, opened. Clones share it, with its compiled kernels.
#[derive(Clone)]
pub struct Gpu {
    device: Arc<Device>,
    options: GpuOptions,
}

/// Options of a GPU.
#[derive(Clone, Debug, Default)]
pub struct GpuOptions {
    /// Fills new pages with large finite noise, so that reads of unwritten data are detected. For tests.
    pub poison: bool,
    /// Times every kernel with the device's clock, if it has one: before each step its kernels run once more, one after
    /// the other. Only attention and its merge then use handoff, and are timed together.
    pub timed: bool,
    /// Uses cooperative matrices for matmuls, if available. Their order of sums differs from that of kernels of few
    /// rows, so the last bits of a step's logits depend on its number of rows.
    pub cooperative: bool,
    /// Emulates cooperative matrices on devices without them, which is slow. For tests.
    pub emulated: bool,
    /// True if launches of a step of one row use handoff without barriers, which requires a GPU that starts workgroups
    /// in the order of launches. `None` enables it for known GPUs.
    pub handoff: Option<bool>,
    /// True if [`Gpu::starve_handoff`] can make kernels give up. For tests.
    pub starvable: bool,
    /// Most bytes of the device's memory to use, if it has more.
    pub memory: Option<u64>,
    /// Target for the duration of a submission; `None` for the device's default.
    pub submission: Option<Duration>,
    /// How long a thread that waits for a stage's step asks for its end before it sleeps; `None` for the device's default.
    pub spin: Option<Duration>,
    /// Receives the numbers of compiled kernels of a model and of all its kernels.
    pub progress: Progress,
    /// Called with one line for people when handoff is turned off, because kernels waited for results in vain.
    pub notice: Option<fn(&str)>,
    /// Device whose kernels are compiled. For tests.
    pub profile: Profile,
}

/// Numbers of compiled kernels, which clones share.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<[AtomicUsize; 2]>);

impl Progress {
    /// Returns the number of kernels that have been compiled, and of all that are being compiled; `None` if none is.
    pub fn get(&self) -> Option<(usize, usize)> {
        let [done, all] = self.0.each_ref().map(|number| number.load(Ordering::Relaxed));
        (done < all).then_some((done, all))
    }

    fn set(&self, done: usize, all: usize) {
        let [own_done, own_all] = &*self.0;
        own_done.store(done, Ordering::Relaxed);
        own_all.store(all, Ordering::Relaxed);
    }
}

/// A GPU to compile kernels for instead of the one that is present. All kernels can be inspected; those without cooperative
/// matrices can also be run, slowly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Kernels of the GPU itself.
    #[default]
    Actual,
    /// Kernels of NVIDIA's GPUs: subgroups of 32, workgroups of up to 1024 threads.
    Nvidia,
    /// Kernels of Apple's GPUs: subgroups of 32, workgroups of 256 threads, 32 KiB of workgroup memory in each pass.
    Apple,
}

/// Description of a GPU.
#[derive(Clone, Debug)]
pub struct GpuInfo {
    /// Index of the GPU, as in `gpu:N`.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Driver and interface.
    pub driver: String,
    /// True for a software driver: slower than the `cpu` device, for tests.
    pub is_software: bool,
    /// Reason for which `auto` does not choose it; `None` if it may.
    pub not_automatic: Option<String>,
}

/// The GPUs of this machine, real ones first.
pub fn gpus() -> Vec<GpuInfo> {
    let info = |(index, adapter): (usize, wgpu::Adapter)| {
        let info = adapter.get_info();
        GpuInfo {
            index,
            not_automatic: adapter::Facts::of(&adapter).rules().not_automatic,
            driver: format!("{} {} ({:?})", info.driver, info.driver_info, info.backend),
            is_software: info.device_type == wgpu::DeviceType::Cpu,
            name: info.name,
        }
    };
    adapter::adapters().into_iter().enumerate().map(info).collect()
}

impl Gpu {
    /// Opens the GPU with this index of [`gpus`].
    ///
    /// # Errors
    /// The GPU does not exist or does not open.
    pub fn open(index: usize, options: GpuOptions) -> Result<Self, String> {
        let adapters = adapter::adapters();
        let adapter = adapters.get(index).ok_or_else(|| match adapters.len() {
            0 => "this machine has no GPU with a Vulkan or Metal driver".to_owned(),
            count => format!("there is no GPU {index}: this machine has {count}, counted from 0"),
        })?;
        Ok(Self { device: Arc::new(Device::open(adapter, options.clone())?), options })
    }

    /// Returns the number of rows from which a step's logits are bitwise equal in any batch. With cooperative matrices,
    /// matmuls of fewer rows sum in another order than those of more.
    pub fn exact_rows(&self) -> usize {
        lower::exact_rows(&self.device.target)
    }

    /// The numerics in force, for people.
    pub fn numerics(&self) -> String {
        match (self.device.target.cooperative, self.device.rules.keeps_order) {
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
        probe::read_bandwidth(&self.device, rounds, Source::Device)
    }

    /// Measures the read bandwidth for pieces of `piece` bytes in random order, as pages may be placed; `piece` is a
    /// power of two and at least 16. This is the cost of scattered pages without attention.
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn scattered_read_bandwidth(&self, rounds: usize, piece: usize) -> Result<f64, LoadError> {
        probe::read_bandwidth(&self.device, rounds, Source::Scattered(piece))
    }

    /// Measures the bandwidth at which kernels read the host's memory; `None` if they do not, or if it is the device's memory.
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn link_bandwidth(&self, rounds: usize) -> Result<Option<f64>, LoadError> {
        let has_host = self.device.target.has_host_memory;
        has_host.then(|| probe::read_bandwidth(&self.device, rounds, Source::Host)).transpose()
    }
}

impl Gpu {
    /// Bytes that have been allocated on the device since it was opened.
    pub fn allocated(&self) -> u64 {
        self.device.allocated.load(Ordering::Relaxed)
    }

    /// Encodes the submission of a step's commands that follows `after` others, but does not submit it, as if the device had failed
    /// to run it. For tests.
    pub fn lose_submission(&self, after: u32) {
        self.device.lose_submission(after);
    }

    /// Enables handoff, and makes the waiting kernels of one submission give up at once, after `after` submissions.
    /// Requires [`GpuOptions::starvable`]. For tests.
    pub fn starve_handoff(&self, after: u32) {
        self.device.starve_handoff(after);
    }

    /// Disables handoff as after a kernel that gave up. For tests.
    pub fn doubt_handoff(&self) {
        self.device.in_doubt.store(true, Ordering::Relaxed);
    }

    /// Lowers a model without compiling its kernels, so that [`Gpu::kernels`] has them, with those of adapters.
    ///
    /// # Errors
    /// As [`Backend::load`], except errors of a compiler.
    pub fn lower(&self, program: &Program, weights: &Weights, limits: &Limits) -> Result<(), LoadError> {
        program.check(weights)?;
        let target = self.device.now();
        let kv = KvLayout::of(program, &target.name)?;
        let mut facts = Facts::new(target, program, &kv, Some(weights), limits)?;
        let model = emit::emit(&self.device, &facts, weights, Bound::default())?;
        let sites = lower::sites(&facts, &Adaptable::of(program, weights))?;
        let adapted = lower::Adapted { sites, ..lower::Adapted::default() };
        facts.adapted = Some(&adapted);
        emit::emit(&self.device, &facts, weights, model.bound).map(|_| ())
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
            description: format!("{}, {}", device.target.name, device.driver),
            bytes_free: device.bytes_free,
            host_free: device.rules.host_free,
            step_rows: device.target.step_rows(),
            features: device::feature_names(device),
        }
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        // `load` refuses a program that this device cannot run; the number for such a program is never used.
        KvLayout::of(program, &self.device.target.name)
            .map_or(0, |kv| pages::page_bytes(&kv, block_size, kv_dtype))
    }

    fn lanes(&self, program: &Program) -> usize {
        runner::lanes(program)
    }

    fn state_bytes(&self, program: &Program) -> usize {
        program.state.bytes()
    }

    fn weight_bytes(&self, _: &Program, weights: &Weights) -> u64 {
        weights.bytes_on(self)
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        let words = Layout::of(matrix.format).row_words(matrix.cols.div_ceil(BLOCK));
        let bytes = 4 * matrix.parts * matrix.rows * words.iter().sum::<usize>();
        DeviceLayout { bytes, converted_to: Layout::converts(matrix.format) }
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        // A load fails with the error, and the number is never used.
        let Ok(kv) = KvLayout::of(program, &self.device.target.name) else { return 0 };
        let facts = Facts::new(self.device.now(), program, &kv, None, limits);
        facts.map_or(0, |facts| emit::buffer_bytes(&facts))
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let runner =
            GpuRunner::load(self.device.clone(), program, weights, limits, Bound::default(), &self.options)?;
        Ok(Box::new(runner))
    }

    fn runs_tower(&self, tower: &Program) -> bool {
        let kv = KvLayout::of(tower, &self.device.target.name);
        kv.is_ok_and(|kv| kv.groups.iter().all(|group| group.head_dim.is_multiple_of(8)))
    }

    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError> {
        let pace = Arc::new(Pace::default());
        let runner =
            GpuRunner::load(self.device.clone(), program, weights, limits, Bound::default(), &self.options)?;
        Ok(PacedRunner { runner: Box::new(runner.paced(pace.clone())), pace })
    }
}
