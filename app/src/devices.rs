//! The concrete devices: this file alone names them. And `paguro devices`, which lists them.

use paguro_backend::Backend;
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

/// The device that the flags ask for.
///
/// # Errors
/// One that this machine does not have.
pub fn open(on: &RunOnArgs, threads: Option<usize>) -> Outcome<Chosen> {
    match on.device {
        // The only one so far.
        Device::Auto | Device::Cpu => {
            let cpu = cpu(on, threads)?;
            Ok(Chosen { threads: cpu.threads(), backend: Box::new(cpu) })
        }
    }
}

/// Bytes per second that the device's memory can be read with.
///
/// # Errors
/// No memory to read, no threads.
pub fn read_bandwidth(on: &RunOnArgs, threads: Option<usize>) -> Outcome<f64> {
    match on.device {
        Device::Auto | Device::Cpu => {
            let threads = cpu(on, threads)?.threads();
            paguro_backend_cpu::read_bandwidth(threads, PROBE_ROUNDS)
                .map_err(|error| Failure::new(format!("cannot probe the memory's speed: {error}")))
        }
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

/// Runs `paguro devices`.
///
/// # Errors
/// Standard output's.
pub fn devices(args: &DevicesArgs, terminal: Terminal) -> Outcome<()> {
    let cpu = Cpu::new(CpuOptions::default());
    let (name, threads, capacity) = (cpu.name(), cpu.threads(), cpu.capacity());
    let mut out = Output::new();
    if args.json {
        return out.json(&json!({
            "device": name,
            "description": capacity.description,
            "bytes_free": capacity.bytes_free,
            "features": capacity.features,
            "threads": threads,
        }));
    }
    out.line(format_args!("{}  {}", terminal.bold(name), capacity.description))?;
    out.line(format_args!(
        "     {} free, kernels for {}",
        units::bytes(capacity.bytes_free),
        capacity.features.join(", ")
    ))
}
