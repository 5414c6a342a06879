//! GPUs through Metal or Vulkan. Each is compared with the CPU before it runs a model.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::Write,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use paguro_backend::{
    Backend, Capacity, DeviceLayout, KvDtype, Limits, LoadError, Matrix, Program, Runner, Weights, excerpt,
};
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_backend_wgpu::{Gpu, GpuOptions, gpus};
use serde_json::{Value, json};

use super::{
    Chosen,
    known_answer::{self, Problem},
};
use crate::{
    cli::Numerics,
    failure::{Failure, Outcome},
};

/// File of passed checks; `None` without a home folder.
static CHECKS_FILE: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Sets the file of passed checks.
pub fn set_checks_file(file: Option<PathBuf>) {
    // Set once, at the start.
    let _ = CHECKS_FILE.set(file);
}

/// Returns the first GPU that `auto` may choose.
pub fn automatic() -> Option<usize> {
    gpus().into_iter().find(|gpu| gpu.not_automatic.is_none()).map(|gpu| gpu.index)
}

/// Returns the names of the GPUs.
pub fn summary() -> String {
    let names: Vec<_> = gpus().into_iter().map(|gpu| gpu.name).collect();
    if names.is_empty() { "no GPU".to_owned() } else { names.join(", ") }
}

pub fn open(index: usize, timed: bool, numerics: Option<Numerics>) -> Outcome<Chosen> {
    let gpu = find(index, GpuOptions { timed, ..options(numerics) })?;
    let (numerics, is_fast) = (gpu.numerics(), gpu.exact_rows() > 1);
    Ok(Chosen { backend: Box::new(Checked(gpu)), threads: 1, numerics, is_fast })
}

pub fn read_bandwidth(index: usize, rounds: usize) -> Outcome<f64> {
    find(index, GpuOptions::default())?.read_bandwidth(rounds).map_err(|error| Failure::from_error(&error))
}

pub(super) fn options(numerics: Option<Numerics>) -> GpuOptions {
    let progress: fn(usize, usize) = |done, all| {
        DONE.store(done, Ordering::Relaxed);
        ALL.store(if done < all { all } else { 0 }, Ordering::Relaxed);
    };
    let notice: fn(&str) = |line| match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{line}"),
        // Standard error may be closed.
        false => _ = writeln!(std::io::stderr(), "{line}"),
    };
    let cooperative = numerics != Some(Numerics::Exact);
    GpuOptions { cooperative, progress: Some(progress), notice: Some(notice), ..GpuOptions::default() }
}

/// Number of compiled kernels, and of all that are being compiled; 0 if none is.
static DONE: AtomicUsize = AtomicUsize::new(0);
static ALL: AtomicUsize = AtomicUsize::new(0);

/// Returns the progress of compiling kernels.
pub fn compiling() -> Option<String> {
    let (done, all) = (DONE.load(Ordering::Relaxed), ALL.load(Ordering::Relaxed));
    (all > 0).then(|| format!("compiling GPU kernels, {done} of {all}"))
}

pub(super) fn find(index: usize, options: GpuOptions) -> Outcome<Gpu> {
    Gpu::open(index, options).map_err(|error| Failure::usage(error).hint(devices()))
}

/// Lists the devices of this machine in a sentence.
fn devices() -> String {
    let gpus = gpus().into_iter().map(|gpu| format!("gpu:{} ({})", gpu.index, gpu.name));
    format!("this machine has {}", Vec::from_iter(["cpu".to_owned()].into_iter().chain(gpus)).join(", "))
}

/// A GPU that is compared with the CPU on an excerpt of each model before it loads the model.
struct Checked(Gpu);

impl Checked {
    /// Compares the GPU with the CPU, unless this version has passed the check before.
    fn check(&self, program: &Program, weights: &Weights, limits: Limits) -> Result<(), LoadError> {
        let (program, weights) = excerpt(program, weights);
        let Capacity { description, .. } = self.0.capacity();
        let key = key(&description, &self.0.numerics(), &program, &weights, &limits);
        let file = CHECKS_FILE.get().and_then(Option::as_deref);
        // Kernels may change between builds with assertions.
        if !cfg!(debug_assertions) && file.is_some_and(|file| has(file, &key)) {
            return Ok(());
        }
        let reference = Cpu::new(CpuOptions::default());
        known_answer::check(&self.0, &reference, (&program, &weights), limits).map_err(|problem| {
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
    let mut hasher = DefaultHasher::new();
    let version = (env!("CARGO_PKG_VERSION"), option_env!("PAGURO_COMMIT"));
    (device, numerics, version, format!("{program:?}")).hash(&mut hasher);
    for matrix in &weights.matrices {
        (matrix.rows, matrix.cols, matrix.format.to_string()).hash(&mut hasher);
    }
    let Limits { block_size, max_rows, kv_dtype, attention, .. } = limits;
    format!("{block_size} {max_rows} {kv_dtype:?} {attention:?}").hash(&mut hasher);
    format!("{:016x}", hasher.finish())
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
        self.0.name()
    }

    fn capacity(&self) -> Capacity {
        self.0.capacity()
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        self.0.page_bytes(program, block_size, kv_dtype)
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        self.0.device_layout(matrix)
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        self.0.buffer_bytes(program, limits)
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        self.check(program, &weights, limits)?;
        self.0.load(program, weights, limits)
    }
}

/// A GPU in the output of `paguro devices`.
pub struct Listed {
    /// `gpu:0`.
    pub name: String,
    /// Its capacity, or the reason for which it cannot be opened.
    pub capacity: Result<Capacity, String>,
    /// The effective numerics.
    pub numerics: String,
    /// Reason for which `auto` does not choose it.
    pub not_automatic: Option<String>,
    is_software: bool,
}

impl Listed {
    /// Returns the JSON output.
    pub fn json(&self) -> Value {
        let capacity = self.capacity.as_ref();
        json!({
            "device": self.name,
            "description": capacity.map_or_else(Clone::clone, |capacity| capacity.description.clone()),
            "bytes_free": capacity.map_or(0, |capacity| capacity.bytes_free),
            "features": capacity.map_or(&[][..], |capacity| &capacity.features),
            "numerics": self.numerics,
            "not_automatic": self.not_automatic,
            "is_software": self.is_software,
        })
    }
}

/// Returns `index` if there is such a GPU.
///
/// # Errors
/// There is none; the hint lists the devices.
pub fn exists(index: usize) -> Outcome<usize> {
    let count = gpus().len();
    if index < count {
        return Ok(index);
    }
    let problem =
        format!("there is no gpu:{index}: this machine's GPUs are counted from 0, and there are {count}");
    Err(Failure::usage(problem).hint(devices()))
}

/// Lists all GPUs, or only one.
pub fn list(only: Option<usize>, numerics: Option<Numerics>) -> Vec<Listed> {
    let listed = |info: paguro_backend_wgpu::GpuInfo| {
        let gpu = Gpu::open(info.index, options(numerics));
        Listed {
            name: format!("gpu:{}", info.index),
            numerics: gpu.as_ref().map_or_else(|_| String::new(), Gpu::numerics),
            capacity: gpu.map(|gpu| gpu.capacity()),
            not_automatic: info.not_automatic,
            is_software: info.is_software,
        }
    };
    gpus().into_iter().filter(|gpu| only.is_none_or(|only| only == gpu.index)).map(listed).collect()
}
