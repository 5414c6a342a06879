//! The CPU.

use std::sync::Arc;

use paguro_backend::{Backend, InputSquares};
use paguro_backend_cpu::{Cpu, CpuOptions, Isa};
use serde_json::json;

use super::{Driver, Kind, Listed, Opened, PROBE_ROUNDS};
use crate::{
    cli::{Device, DevicesArgs, Numerics, RunOnArgs},
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
};

/// Description of the CPU backend's numerics.
const NUMERICS: &str = "exact: a token's logits are the same bits whatever else runs with it";

/// The CPU, which is always there and has the index 0.
pub struct Cpus;

impl Driver for Cpus {
    fn kind(&self) -> Kind {
        Kind::Cpu
    }

    fn summary(&self) -> String {
        let cpu = Cpu::new(CpuOptions::default());
        let kernels = cpu.capacity().features.first().map_or_else(String::new, |isa| format!(" {isa}"));
        format!("{}{kernels}", cpu.name())
    }

    fn automatic(&self) -> Option<usize> {
        Some(0)
    }

    fn open(&self, _: usize, on: &RunOnArgs, threads: Option<usize>) -> Outcome<Opened> {
        Ok(opened(cpu(on, threads)?))
    }

    fn read_bandwidth(&self, _: usize, on: &RunOnArgs, threads: Option<usize>) -> Outcome<f64> {
        let threads = cpu(on, threads)?.threads();
        paguro_backend_cpu::read_bandwidth(threads, PROBE_ROUNDS)
            .map_err(|error| Failure::new(format!("cannot probe the memory's speed: {error}")))
    }

    fn link(&self, _: usize) -> Outcome<Option<f64>> {
        Ok(None)
    }

    fn list(&self, _: Option<usize>, _: Option<Numerics>) -> Outcome<Vec<Listed>> {
        let cpu = Cpu::new(CpuOptions::default());
        Ok(vec![Listed {
            name: cpu.name().to_owned(),
            capacity: Ok(cpu.capacity()),
            features: "kernels for",
            numerics: NUMERICS.to_owned(),
            not_automatic: None,
            extra: json!({"threads": cpu.threads()}),
        }])
    }

    fn compiling(&self) -> Option<String> {
        None
    }

    fn test(&self, _: usize, _: &DevicesArgs, _: &mut Output, _: Terminal) -> Outcome<()> {
        Err(Failure::usage("--test is for GPUs; the CPU's kernels are tested where they are built"))
    }
}

/// Opens the CPU, which adds the squares of all inputs of matrices to `squares`.
pub fn with_squares(threads: Option<usize>, squares: Arc<InputSquares>) -> Opened {
    opened(Cpu::new(CpuOptions { threads, squares: Some(squares), ..CpuOptions::default() }))
}

fn opened(cpu: Cpu) -> Opened {
    let (threads, numerics) = (cpu.threads(), NUMERICS.to_owned());
    Opened { device: Device::Cpu, threads, backend: Box::new(cpu), numerics, is_fast: false }
}

fn cpu(on: &RunOnArgs, threads: Option<usize>) -> Outcome<Cpu> {
    let isa = on.isa.as_deref().map(isa).transpose()?;
    let memory = on.memory.map(|bytes| bytes.0);
    Ok(Cpu::new(CpuOptions { threads, isa, memory, ..CpuOptions::default() }))
}

fn isa(name: &str) -> Outcome<Isa> {
    Isa::from_name(name).ok_or_else(|| {
        let names: Vec<_> = Isa::supported().into_iter().map(Isa::name).collect();
        Failure::usage(format!("this machine cannot run `{name}`"))
            .hint(format!("it can run {}", names.join(", ")))
    })
}
