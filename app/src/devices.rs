//! The concrete devices: this file alone names them. And `paguro devices`, which lists them.

use std::fmt;

use paguro_backend::{Backend, Capacity};
use paguro_backend_cpu::{Cpu, CpuOptions, Isa};
use serde_json::json;

use crate::{
    cli::{Device, DevicesArgs, RunOnArgs},
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
    units,
};

/// Rounds of the read-bandwidth probe: the median of three, in well under a second.
const PROBE_ROUNDS: usize = 3;

/// A device that was chosen.
pub struct Chosen {
    /// The device.
    pub backend: Box<dyn Backend>,
    /// CPU threads it uses.
    pub threads: usize,
}

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Chosen").field(&self.backend.name()).finish()
    }
}

/// The device that the flags ask for.
///
/// # Errors
/// One that this machine does not have, or this binary cannot use.
pub fn open(on: &RunOnArgs, threads: Option<usize>) -> Outcome<Chosen> {
    let on_cpu = || {
        let cpu = cpu(on, threads)?;
        Ok(Chosen { threads: cpu.threads(), backend: Box::new(cpu) })
    };
    match (on.device, &on.isa) {
        (Device::Cpu, _) | (Device::Auto, Some(_)) => on_cpu(),
        (Device::Auto, None) => gpu::fastest(on.timed).map_or_else(on_cpu, Ok),
        (Device::Gpu(index), _) => gpu::open(index, on.timed),
    }
}

/// Bytes per second that the device's memory can be read with.
///
/// # Errors
/// No memory to read, no threads.
pub fn read_bandwidth(on: &RunOnArgs, threads: Option<usize>) -> Outcome<f64> {
    let failed = |error: &dyn fmt::Display| Failure::new(format!("cannot probe the memory's speed: {error}"));
    let gpu = match (on.device, &on.isa) {
        (Device::Gpu(index), _) => Some(index),
        (Device::Auto, None) => gpu::fastest_index(),
        _ => None,
    };
    match gpu {
        Some(index) => gpu::read_bandwidth(index, PROBE_ROUNDS),
        None => {
            let threads = cpu(on, threads)?.threads();
            paguro_backend_cpu::read_bandwidth(threads, PROBE_ROUNDS).map_err(|error| failed(&error))
        }
    }
}

/// GPUs, through Metal or Vulkan.
#[cfg(any(feature = "gpu", target_os = "macos"))]
mod gpu {
    use std::env;

    use paguro_backend_wgpu::{Gpu, GpuOptions, gpus};

    use super::Chosen;
    use crate::failure::{Failure, Outcome};

    /// The first real one; a processor that plays a GPU is slower than the processor itself.
    pub fn fastest_index() -> Option<usize> {
        gpus().into_iter().find(|gpu| gpu.not_automatic.is_none()).map(|gpu| gpu.index)
    }

    /// The GPUs that there are.
    pub fn summary() -> String {
        let names: Vec<_> = gpus().into_iter().map(|gpu| gpu.name).collect();
        if names.is_empty() { "no GPU".to_owned() } else { names.join(", ") }
    }

    /// The first real one, if it opens.
    pub fn fastest(timed: bool) -> Option<Chosen> {
        open(fastest_index()?, timed).ok()
    }

    pub fn open(index: usize, timed: bool) -> Outcome<Chosen> {
        Ok(Chosen { backend: Box::new(find(index, timed)?), threads: 1 })
    }

    pub fn read_bandwidth(index: usize, rounds: usize) -> Outcome<f64> {
        find(index, false)?.read_bandwidth(rounds).map_err(|error| Failure::from_error(&error))
    }

    fn find(index: usize, timed: bool) -> Outcome<Gpu> {
        let cooperative = switch("PAGURO_COOPERATIVE")?.unwrap_or(false);
        let hand_over = switch("PAGURO_HAND_OVER")?;
        Gpu::open(index, GpuOptions { timed, cooperative, hand_over, ..GpuOptions::default() })
            .map_err(|error| Failure::usage(error).hint("`paguro devices` lists what there is"))
    }

    /// What a variable of the environment says, if it says something.
    fn switch(name: &str) -> Outcome<Option<bool>> {
        match env::var(name).as_deref() {
            Err(_) | Ok("") => Ok(None),
            Ok("0") => Ok(Some(false)),
            Ok("1") => Ok(Some(true)),
            Ok(other) => Err(Failure::usage(format!("{name} is `{other}`, and must be 0 or 1"))),
        }
    }
}

/// What a binary without GPU kernels says.
#[cfg(not(any(feature = "gpu", target_os = "macos")))]
mod gpu {
    use super::Chosen;
    use crate::failure::{Failure, Outcome};

    pub fn fastest_index() -> Option<usize> {
        None
    }

    pub fn summary() -> String {
        "no GPU kernels".to_owned()
    }

    pub fn fastest(_timed: bool) -> Option<Chosen> {
        None
    }

    pub fn open(_index: usize, _timed: bool) -> Outcome<Chosen> {
        Err(absent())
    }

    pub fn read_bandwidth(_index: usize, _rounds: usize) -> Outcome<f64> {
        Err(absent())
    }

    fn absent() -> Failure {
        Failure::usage("this binary was built without GPU kernels")
            .hint("build it with `cargo build --release --features gpu`, or use --device cpu")
    }
}

fn cpu(on: &RunOnArgs, threads: Option<usize>) -> Outcome<Cpu> {
    let isa = on.isa.as_deref().map(isa).transpose()?;
    Ok(Cpu::new(CpuOptions { threads, isa, ..CpuOptions::default() }))
}

fn isa(name: &str) -> Outcome<Isa> {
    Isa::from_name(name).ok_or_else(|| {
        let names: Vec<_> = Isa::supported().into_iter().map(Isa::name).collect();
        Failure::usage(format!("this machine cannot run `{name}`"))
            .hint(format!("it can run {}", names.join(", ")))
    })
}

/// What this machine runs models on, in a few words for the version: the kernels of the CPU, and GPUs.
pub fn summary() -> Vec<String> {
    let cpu = Cpu::new(CpuOptions::default());
    let kernels = cpu.capacity().features.first().map_or_else(String::new, |isa| format!(" {isa}"));
    vec![format!("{}{kernels}", cpu.name()), gpu::summary()]
}

/// Runs `paguro devices`.
///
/// # Errors
/// Standard output's.
pub fn devices(args: &DevicesArgs, terminal: Terminal) -> Outcome<()> {
    let cpu = Cpu::new(CpuOptions::default());
    let (name, threads, capacity) = (cpu.name(), cpu.threads(), cpu.capacity());
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "device": name,
            "description": capacity.description,
            "bytes_free": capacity.bytes_free,
            "features": capacity.features,
            "threads": threads,
        }))?;
        #[cfg(any(feature = "gpu", target_os = "macos"))]
        for info in paguro_backend_wgpu::gpus() {
            let capacity =
                paguro_backend_wgpu::Gpu::open(info.index, Default::default()).map(|gpu| gpu.capacity());
            let capacity = capacity.as_ref();
            out.json(&json!({
                "device": format!("gpu:{}", info.index),
                "description": capacity.map_or_else(Clone::clone, |capacity| capacity.description.clone()),
                "bytes_free": capacity.map_or(0, |capacity| capacity.bytes_free),
                "features": capacity.map_or(&[][..], |capacity| &capacity.features),
                "is_software": info.is_software,
            }))?;
        }
        return Ok(());
    }
    show(&mut out, name, &capacity, "kernels for", terminal)?;
    #[cfg(any(feature = "gpu", target_os = "macos"))]
    for info in paguro_backend_wgpu::gpus() {
        let name = format!("gpu:{}", info.index);
        match paguro_backend_wgpu::Gpu::open(info.index, Default::default()) {
            Ok(gpu) => show(&mut out, &name, &gpu.capacity(), "with", terminal)?,
            Err(error) => out.line(format_args!("{}  {error}", terminal.bold(&name)))?,
        }
    }
    Ok(())
}

fn show(
    out: &mut Output,
    name: &str,
    capacity: &Capacity,
    features: &str,
    terminal: Terminal,
) -> Outcome<()> {
    out.line(format_args!("{}  {}", terminal.bold(name), capacity.description))?;
    out.line(format_args!(
        "     {} free, {features} {}",
        units::bytes(capacity.bytes_free),
        capacity.features.join(", ")
    ))
}
