//! GPUs through Metal or Vulkan. Each is compared with the CPU before it runs a model.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use paguro_backend::{
    Backend, Capacity, DeviceLayout, Digest, KvDtype, Limits, LoadError, Matrix, PacedRunner, Program,
    Runner, Weights, excerpt,
};
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_backend_wgpu::{Gpu, GpuInfo, GpuOptions, NUMERICS, Progress, gpus};
use serde_json::json;

use super::{
    Driver, Kind, Listed, Opened, PROBE_ROUNDS,
    known_answer::{self, Problem},
    suite,
};
use crate::{
    cli::{Device, DevicesArgs, Numerics, RunOnArgs},
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
};

/// The GPUs of this machine.
pub struct Gpus {
    /// File of passed checks; `None` without a home folder.
    checks_file: Option<PathBuf>,
    progress: Progress,
}

impl Gpus {
    /// Returns the driver, which stores passed checks in this file.
    pub fn new(checks_file: Option<PathBuf>) -> Self {
        Self { checks_file, progress: Progress::default() }
    }

    fn options(&self, numerics: Option<Numerics>) -> GpuOptions {
        let notice: fn(&str) = |line| match tracing::dispatcher::has_been_set() {
            true => tracing::warn!("{line}"),
            // Standard error may be closed.
            false => _ = writeln!(std::io::stderr(), "{line}"),
        };
        let cooperative = numerics != Some(Numerics::Exact);
        let progress = self.progress.clone();
        GpuOptions { cooperative, progress, notice: Some(notice), ..GpuOptions::default() }
    }
}

impl Driver for Gpus {
    fn kind(&self) -> Kind {
        Kind::Gpu
    }

    fn summary(&self) -> String {
        let names: Vec<_> = gpus().into_iter().map(|gpu| gpu.name).collect();
        if names.is_empty() { "no GPU".to_owned() } else { names.join(", ") }
    }

    fn automatic(&self) -> Option<usize> {
        gpus().into_iter().find(|gpu| gpu.not_automatic.is_none()).map(|gpu| gpu.index)
    }

    fn open(&self, index: usize, on: &RunOnArgs, _: Option<usize>) -> Outcome<Opened> {
        let memory = on.memory.map(|bytes| bytes.0);
        let gpu = find(index, GpuOptions { timed: on.timed, memory, ..self.options(on.numerics) })?;
        let (numerics, is_fast) = (gpu.numerics(), gpu.exact_rows() > 1);
        let backend = Box::new(Checked { gpu, checks_file: self.checks_file.clone() });
        Ok(Opened { device: Device::Gpu(index), backend, threads: 1, numerics, is_fast })
    }

    fn read_bandwidth(&self, index: usize, _: &RunOnArgs, _: Option<usize>) -> Outcome<f64> {
        let gpu = find(index, GpuOptions::default())?;
        gpu.read_bandwidth(PROBE_ROUNDS).map_err(|error| Failure::from_error(&error))
    }

    fn link(&self, index: usize) -> Outcome<Option<f64>> {
        let gpu = find(index, GpuOptions::default())?;
        gpu.link_bandwidth(PROBE_ROUNDS).map_err(|error| Failure::from_error(&error))
    }

    fn list(&self, only: Option<usize>, numerics: Option<Numerics>) -> Outcome<Vec<Listed>> {
        let gpus = gpus();
        if let Some(index) = only.filter(|&index| index >= gpus.len()) {
            let problem = format!(
                "there is no gpu:{index}: this machine's GPUs are counted from 0, and there are {}",
                gpus.len()
            );
            return Err(Failure::usage(problem).hint(devices()));
        }
        let listed = |info: GpuInfo| {
            let gpu = Gpu::open(info.index, self.options(numerics));
            Listed {
                name: format!("gpu:{}", info.index),
                numerics: gpu.as_ref().map_or_else(|_| String::new(), Gpu::numerics),
                capacity: gpu.map(|gpu| gpu.capacity()),
                features: "with",
                extra: json!({"not_automatic": info.not_automatic, "is_software": info.is_software}),
                not_automatic: info.not_automatic,
            }
        };
        Ok(gpus.into_iter().filter(|gpu| only.is_none_or(|only| only == gpu.index)).map(listed).collect())
    }

    fn compiling(&self) -> Option<String> {
        let (done, all) = self.progress.get()?;
        Some(format!("compiling GPU kernels, {done} of {all}"))
    }

    fn test(&self, index: usize, args: &DevicesArgs, out: &mut Output, terminal: Terminal) -> Outcome<()> {
        let open = |numerics| find(index, GpuOptions { poison: true, ..self.options(Some(numerics)) });
        suite::test(index, &open, args, out, terminal)
    }
}

fn find(index: usize, options: GpuOptions) -> Outcome<Gpu> {
    Gpu::open(index, options).map_err(|error| Failure::usage(error).hint(devices()))
}

/// Lists the devices of this machine in a sentence.
fn devices() -> String {
    let gpus = gpus().into_iter().map(|gpu| format!("gpu:{} ({})", gpu.index, gpu.name));
    format!("this machine has {}", Vec::from_iter(["cpu".to_owned()].into_iter().chain(gpus)).join(", "))
}

/// A GPU that is compared with the CPU on an excerpt of each model before it loads the model.
struct Checked {
    gpu: Gpu,
    /// See [`Gpus::checks_file`].
    checks_file: Option<PathBuf>,
}

impl Checked {
    /// Compares the GPU with the CPU, unless this version has passed the check before.
    fn check(&self, program: &Program, weights: &Weights, limits: Limits) -> Result<(), LoadError> {
        let (program, weights) = excerpt(program, weights);
        let description = self.gpu.capacity().description;
        let key = key(&description, &self.gpu.numerics(), &program, &weights, &limits);
        let file = self.checks_file.as_deref();
        // Kernels may change between builds with assertions.
        if !cfg!(debug_assertions) && file.is_some_and(|file| has(file, &key)) {
            return Ok(());
        }
        let reference = Cpu::new(CpuOptions::default());
        known_answer::check(&self.gpu, &reference, (&program, &weights), limits).map_err(|problem| {
            match problem {
                Problem::Load(error) => error,
                Problem::Model(number) => LoadError::Damaged(number),
                Problem::Reference(problem) => LoadError::Device(format!(
                    "the CPU cannot check {description} with this model: {problem}"
                )),
                Problem::Device(problem) => LoadError::Device(format!(
                    "{description} computes something else than the CPU for this model: {problem}; \
                 `paguro devices --test` shows details, --device cpu avoids the GPU"
                )),
            }
        })?;
        if let Some(file) = file {
            // If the result cannot be written, the next load checks again.
            let _ = keep(file, &key, &description);
        }
        Ok(())
    }
}

/// Returns the key of a check: device, driver, version, and the model's shapes.
fn key(device: &str, numerics: &str, program: &Program, weights: &Weights, limits: &Limits) -> String {
    let mut digest = Digest::default();
    let version = (env!("CARGO_PKG_VERSION"), option_env!("PAGURO_COMMIT").unwrap_or_default());
    digest.bytes(format!("{device}\n{numerics}\n{} {} {NUMERICS}\n", version.0, version.1).as_bytes());
    digest.bytes(&program.digest());
    for matrix in &weights.matrices {
        digest.bytes(format!("{} {} {}\n", matrix.rows, matrix.cols, matrix.format).as_bytes());
    }
    let Limits {
        block_size,
        pages: _,
        max_rows,
        max_sequences: _,
        max_outputs: _,
        max_context: _,
        states: _,
        kv_dtype,
        attention,
        expert_slots,
    } = limits;
    let (kv, attention) = (kv_dtype.name(), attention.name());
    digest.bytes(format!("{block_size} {max_rows} {kv} {attention} {expert_slots:?}").as_bytes());
    digest.finish()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn has(file: &Path, key: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.lines().any(|line| line.starts_with(key)))
}

fn keep(file: &Path, key: &str, device: &str) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut file = fs::OpenOptions::new().create(true).append(true).open(file)?;
    writeln!(file, "{key} {device}")
}

impl Backend for Checked {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn capacity(&self) -> Capacity {
        self.gpu.capacity()
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        self.gpu.page_bytes(program, block_size, kv_dtype)
    }

    fn state_bytes(&self, program: &Program) -> usize {
        self.gpu.state_bytes(program)
    }

    fn weight_bytes(&self, program: &Program, weights: &Weights) -> u64 {
        self.gpu.weight_bytes(program, weights)
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        self.gpu.device_layout(matrix)
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        self.gpu.buffer_bytes(program, limits)
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        self.check(program, &weights, limits)?;
        self.gpu.load(program, weights, limits)
    }

    fn runs_tower(&self, tower: &Program) -> bool {
        self.gpu.runs_tower(tower)
    }

    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError> {
        self.check(program, &weights, limits)?;
        self.gpu.load_tower(program, weights, limits)
    }
}
