//! Concrete devices, which only this folder names, and `paguro devices`, which lists and tests them.

#[cfg(any(feature = "gpu", target_os = "macos"))]
mod gpu;
#[cfg(any(feature = "gpu", target_os = "macos"))]
mod known_answer;
#[cfg(any(feature = "gpu", target_os = "macos"))]
mod suite;

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Once},
};

use paguro_backend::{Backend, Capacity, InputSquares};
use paguro_backend_cpu::{Cpu, CpuOptions, Isa};
use serde_json::json;

use crate::{
    cli::{Device, DevicesArgs, Numerics, RunOnArgs},
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
    units,
};

/// Rounds of the read-bandwidth probe, whose median takes well under a second.
const PROBE_ROUNDS: usize = 3;

/// An opened device.
pub struct Chosen {
    /// The device.
    pub backend: Box<dyn Backend>,
    /// CPU threads it uses.
    pub threads: usize,
    /// Description of its numerics.
    pub numerics: String,
    /// True if sums use matrix units.
    pub is_fast: bool,
}

/// Description of the CPU backend's numerics.
const CPU_NUMERICS: &str = "exact: a token's logits are the same bits whatever else runs with it";

/// Sets the file in which passed checks of GPUs are stored.
pub fn set_checks_file(file: Option<PathBuf>) {
    gpu::set_checks_file(file);
}

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Chosen").field(&self.backend.name()).finish()
    }
}

/// Returns the progress of compiling kernels, if a load waits for it.
pub fn compiling() -> Option<String> {
    gpu::compiling()
}

/// Function that opens a device.
type Opener<'a> = Box<dyn Fn() -> Outcome<Chosen> + 'a>;

/// Calls `start` with the device of the flags. With `auto`, a failure on the GPU leads to a start on the CPU, and
/// `notice` receives the reason.
///
/// # Errors
/// The device does not exist or is not supported by this binary, or the error of `start`.
pub fn with<T>(
    on: &RunOnArgs,
    threads: Option<usize>,
    notice: &dyn Fn(&str),
    mut start: impl FnMut(Chosen) -> Outcome<T>,
) -> Outcome<T> {
    let start = |chosen: Chosen| {
        if let Some(line) = not_fast(on.numerics, &chosen) {
            // `serve` calls this for each model.
            TOLD_NOT_FAST.call_once(|| notice(&line));
        }
        start(chosen)
    };
    let on_cpu: Opener<'_> = Box::new(|| {
        let cpu = cpu(on, threads)?;
        let (threads, numerics) = (cpu.threads(), CPU_NUMERICS.to_owned());
        Ok(Chosen { threads, backend: Box::new(cpu), numerics, is_fast: false })
    });
    let on_gpu = |index: usize| -> Opener<'_> { Box::new(move || gpu::open(index, on.timed, on.numerics)) };
    let openers = match (on.device, &on.isa) {
        (Device::Cpu, _) | (Device::Auto, Some(_)) => vec![on_cpu],
        (Device::Auto, None) => gpu::automatic().map(on_gpu).into_iter().chain([on_cpu]).collect(),
        (Device::Gpu(index), _) => vec![on_gpu(index)],
    };
    first_of(&openers, notice, start)
}

/// Set after the notice that a device has no matrix units.
static TOLD_NOT_FAST: Once = Once::new();

/// Returns the notice for `--numerics fast` on a device with exact numerics.
fn not_fast(numerics: Option<Numerics>, chosen: &Chosen) -> Option<String> {
    let wants = numerics == Some(Numerics::Fast) && !chosen.is_fast;
    wants.then(|| {
        format!("--numerics fast has no effect: the {} has no matrix units: exact", chosen.backend.name())
    })
}

fn first_of<T>(
    openers: &[Opener<'_>],
    notice: &dyn Fn(&str),
    mut start: impl FnMut(Chosen) -> Outcome<T>,
) -> Outcome<T> {
    let Some((last, others)) = openers.split_last() else { return Err(Failure::new("there is no device")) };
    let mut reason = None;
    for opener in others {
        match opener().and_then(&mut start) {
            Ok(started) => return Ok(started),
            Err(failure) => reason = Some(failure),
        }
    }
    let started = last().and_then(start)?;
    // A failure on both devices is not caused by the GPU, so it is reported as an error and not as a fallback.
    if let Some(reason) = reason {
        notice(&format!("the GPU is not used, the CPU is: {}", reason.message()));
    }
    Ok(started)
}

/// Opens the CPU, which adds the squares of all inputs of matrices to `squares`.
pub fn cpu_with_squares(threads: Option<usize>, squares: Arc<InputSquares>) -> Chosen {
    let cpu = Cpu::new(CpuOptions { threads, squares: Some(squares), ..CpuOptions::default() });
    let (threads, numerics) = (cpu.threads(), CPU_NUMERICS.to_owned());
    Chosen { threads, backend: Box::new(cpu), numerics, is_fast: false }
}

/// Opens the device of the flags.
///
/// # Errors
/// The device does not exist or is not supported by this binary.
pub fn open(on: &RunOnArgs, threads: Option<usize>, notice: &dyn Fn(&str)) -> Outcome<Chosen> {
    with(on, threads, notice, Ok)
}

/// Measures the read bandwidth of the device with this name, in bytes per second.
///
/// # Errors
/// The probe cannot allocate memory or start threads.
pub fn read_bandwidth(on: &RunOnArgs, device: &str, threads: Option<usize>) -> Outcome<f64> {
    let failed = |error: &dyn fmt::Display| Failure::new(format!("cannot probe the memory's speed: {error}"));
    let gpu = match on.device {
        Device::Gpu(index) => Some(index),
        Device::Auto if device != "cpu" => gpu::automatic(),
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

/// Errors of a binary without GPU kernels.
#[cfg(not(any(feature = "gpu", target_os = "macos")))]
mod gpu {
    use std::path::PathBuf;

    use super::Chosen;
    use crate::{
        cli::Numerics,
        failure::{Failure, Outcome},
    };

    pub fn set_checks_file(_file: Option<PathBuf>) {}

    pub fn automatic() -> Option<usize> {
        None
    }

    pub fn compiling() -> Option<String> {
        None
    }

    pub fn summary() -> String {
        "no GPU kernels".to_owned()
    }

    pub fn open(_index: usize, _timed: bool, _numerics: Option<Numerics>) -> Outcome<Chosen> {
        Err(absent())
    }

    pub fn read_bandwidth(_index: usize, _rounds: usize) -> Outcome<f64> {
        Err(absent())
    }

    pub fn absent() -> Failure {
        Failure::usage("this binary was built without GPU kernels")
            .hint("build it with its default features, or use --device cpu")
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

/// Returns the CPU's instruction set and the names of the GPUs, for `paguro version`.
pub fn summary() -> Vec<String> {
    let cpu = Cpu::new(CpuOptions::default());
    let kernels = cpu.capacity().features.first().map_or_else(String::new, |isa| format!(" {isa}"));
    vec![format!("{}{kernels}", cpu.name()), gpu::summary()]
}

/// Runs `paguro devices`.
///
/// # Errors
/// The error of standard output, an unknown device, or failed cases of the suite.
pub fn devices(args: &DevicesArgs, terminal: Terminal) -> Outcome<()> {
    let mut out = Output::new();
    let only = match args.device {
        Some(Device::Auto) if args.test => None,
        Some(Device::Auto) => Some(gpu::automatic().map_or(Device::Cpu, Device::Gpu)),
        named => named,
    };
    if args.test {
        return test(only, args, &mut out, terminal);
    }
    if matches!(only, None | Some(Device::Cpu)) {
        let cpu = Cpu::new(CpuOptions::default());
        let (name, threads, capacity) = (cpu.name(), cpu.threads(), cpu.capacity());
        if args.json {
            out.json(&json!({
                "device": name,
                "description": capacity.description,
                "bytes_free": capacity.bytes_free,
                "features": capacity.features,
                "threads": threads,
                "numerics": CPU_NUMERICS,
            }))?;
        } else {
            show(&mut out, name, &capacity, "kernels for", CPU_NUMERICS, terminal)?;
        }
    }
    show_gpus(only, args, &mut out, terminal)
}

#[cfg(any(feature = "gpu", target_os = "macos"))]
fn show_gpus(only: Option<Device>, args: &DevicesArgs, out: &mut Output, terminal: Terminal) -> Outcome<()> {
    let only = match only {
        Some(Device::Gpu(index)) => Some(gpu::exists(index)?),
        Some(_) => return Ok(()),
        None => None,
    };
    for gpu in gpu::list(only, args.numerics) {
        match &gpu.capacity {
            _ if args.json => out.json(&gpu.json())?,
            Ok(capacity) => {
                show(out, &gpu.name, capacity, "with", &gpu.numerics, terminal)?;
                if let Some(reason) = &gpu.not_automatic {
                    out.line(format_args!("     not chosen by --device auto: {reason}"))?;
                }
            }
            Err(error) => out.line(format_args!("{}  {error}", terminal.bold(&gpu.name)))?,
        }
    }
    Ok(())
}

#[cfg(not(any(feature = "gpu", target_os = "macos")))]
fn show_gpus(
    only: Option<Device>,
    _args: &DevicesArgs,
    _out: &mut Output,
    _terminal: Terminal,
) -> Outcome<()> {
    if matches!(only, Some(Device::Gpu(_))) { Err(gpu::absent()) } else { Ok(()) }
}

/// Runs the conformance suite on a GPU.
fn test(only: Option<Device>, args: &DevicesArgs, out: &mut Output, terminal: Terminal) -> Outcome<()> {
    let index = match only {
        Some(Device::Gpu(index)) => index,
        Some(Device::Cpu) => {
            return Err(Failure::usage(
                "--test is for GPUs; the CPU's kernels are tested where they are built",
            ));
        }
        _ => gpu::automatic().ok_or_else(|| {
            Failure::new("there is no GPU that --device auto would choose").hint("name one: --device gpu:0")
        })?,
    };
    #[cfg(any(feature = "gpu", target_os = "macos"))]
    return suite::test(index, args, out, terminal);
    #[cfg(not(any(feature = "gpu", target_os = "macos")))]
    {
        let _ = (index, args, out, terminal);
        Err(gpu::absent())
    }
}

fn show(
    out: &mut Output,
    name: &str,
    capacity: &Capacity,
    features: &str,
    numerics: &str,
    terminal: Terminal,
) -> Outcome<()> {
    out.line(format_args!("{}  {}", terminal.bold(name), capacity.description))?;
    out.line(format_args!(
        "     {} free, {features} {}",
        units::bytes(capacity.bytes_free),
        capacity.features.join(", ")
    ))?;
    out.line(format_args!("     numerics {numerics}"))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn opened(name: &str) -> Outcome<Chosen> {
        let backend = Box::new(Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }));
        Ok(Chosen { backend, threads: 1, numerics: name.to_owned(), is_fast: false })
    }

    #[test]
    fn whatever_fails_on_the_gpu_ends_on_the_cpu() {
        let cases: [(Opener<'_>, &str, Option<&str>); 4] = [
            (Box::new(|| opened("gpu")), "none", None),
            (Box::new(|| Err(Failure::new("it does not open"))), "none", Some("it does not open")),
            (Box::new(|| opened("gpu")), "gpu", Some("gpu cannot load")),
            (Box::new(|| opened("gpu")), "gpu and cpu", None),
        ];
        for (opener, fails_on, reason) in cases {
            let openers = [opener, Box::new(|| opened("cpu"))];
            let notices = RefCell::new(Vec::new());
            let notice = |line: &str| notices.borrow_mut().push(line.to_owned());
            let started = first_of(&openers, &notice, |chosen| match fails_on.contains(&chosen.numerics) {
                true => Err(Failure::new(format!("{} cannot load", chosen.numerics))),
                false => Ok(chosen.numerics),
            });
            let notices = notices.into_inner();
            match reason {
                Some(reason) => {
                    assert_eq!(started.unwrap(), "cpu");
                    assert!(notices.len() == 1 && notices[0].contains(reason) && !notices[0].contains('\n'));
                }
                None => {
                    assert_eq!(started.ok().as_deref(), if fails_on == "none" { Some("gpu") } else { None });
                    assert_eq!(notices, [""; 0]);
                }
            }
        }
        // A named device is used or refused.
        let named: Opener<'_> = Box::new(|| opened("gpu"));
        let refused = first_of(&[named], &|_| (), |_| Err::<(), _>(Failure::new("numbers are wrong")));
        assert_eq!(refused.unwrap_err().message(), "numbers are wrong");
    }
}
