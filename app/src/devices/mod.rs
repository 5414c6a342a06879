//! Concrete devices, which only this folder names, and `paguro devices`, which lists and tests them.

mod cpu;
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
use serde_json::{Value, json};

use self::cpu::Cpus;
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

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Chosen").field(&self.backend.name()).finish()
    }
}

/// A device in the output of `paguro devices`.
struct Listed {
    /// `cpu`, `gpu:0`.
    name: String,
    /// Its capacity, or the reason for which it cannot be opened.
    capacity: Result<Capacity, String>,
    /// Words between the memory and the features.
    features: &'static str,
    /// The effective numerics.
    numerics: String,
    /// Reason for which `auto` does not choose it.
    not_automatic: Option<String>,
    /// More fields of the JSON output.
    extra: Value,
}

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cpu,
    Gpu,
}

/// All devices of one kind.
trait Driver: Send + Sync {
    /// Returns the kind.
    fn kind(&self) -> Kind;

    /// Returns a description for `paguro version`.
    fn summary(&self) -> String;

    /// Returns the first device that `auto` may choose.
    fn automatic(&self) -> Option<usize>;

    /// Opens a device with these flags.
    fn open(&self, index: usize, on: &RunOnArgs, threads: Option<usize>) -> Outcome<Chosen>;

    /// Measures the read bandwidth of a device, in bytes per second.
    fn read_bandwidth(&self, index: usize, on: &RunOnArgs, threads: Option<usize>) -> Outcome<f64>;

    /// Measures the bandwidth at which kernels read the host's memory, in bytes per second; `None` where it is the device's own.
    fn link(&self, index: usize) -> Outcome<Option<f64>>;

    /// Lists all devices, or only one, which must exist.
    fn list(&self, only: Option<usize>, numerics: Option<Numerics>) -> Outcome<Vec<Listed>>;

    /// Returns the progress of compiling kernels, if a load waits for it.
    fn compiling(&self) -> Option<String>;

    /// Runs the conformance suite on a device.
    fn test(&self, index: usize, args: &DevicesArgs, out: &mut Output, terminal: Terminal) -> Outcome<()>;
}

/// The devices of this machine, and everything that their drivers share. `main` creates it.
#[derive(Clone)]
pub struct Devices {
    /// Drivers in the order in which `auto` tries their devices. Only a binary with GPU kernels has one of GPUs.
    drivers: Vec<Arc<dyn Driver>>,
    /// Done after the notice that a device has no matrix units.
    told_not_fast: Arc<Once>,
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Devices").finish_non_exhaustive()
    }
}

/// Function that opens a device.
type Opener<'a> = Box<dyn Fn() -> Outcome<Chosen> + 'a>;

impl Devices {
    /// Returns the devices. GPUs store their passed checks in this file.
    pub fn new(
        #[cfg_attr(not(any(feature = "gpu", target_os = "macos")), expect(unused))] checks_file: Option<
            PathBuf,
        >,
    ) -> Self {
        let drivers: Vec<Arc<dyn Driver>> = vec![
            #[cfg(any(feature = "gpu", target_os = "macos"))]
            Arc::new(gpu::Gpus::new(checks_file)),
            Arc::new(Cpus),
        ];
        Self { drivers, told_not_fast: Arc::new(Once::new()) }
    }

    /// Returns the driver of a kind of device.
    ///
    /// # Errors
    /// The binary has none.
    fn driver(&self, kind: Kind) -> Outcome<&dyn Driver> {
        let driver = self.drivers.iter().find(|driver| driver.kind() == kind);
        driver.map(Arc::as_ref).ok_or_else(|| {
            Failure::usage("this binary was built without GPU kernels")
                .hint("build it with its default features, or use --device cpu")
        })
    }

    /// Returns the devices that `auto` tries, in order.
    fn automatic(&self) -> impl Iterator<Item = (&dyn Driver, usize)> {
        self.drivers.iter().filter_map(|driver| Some((driver.as_ref(), driver.automatic()?)))
    }

    /// Returns the devices that a flag names, in the order in which they are tried.
    ///
    /// # Errors
    /// The binary has no driver for it.
    fn named(&self, device: Device) -> Outcome<Vec<(&dyn Driver, usize)>> {
        Ok(match device {
            Device::Auto => self.automatic().collect(),
            Device::Cpu => vec![(self.driver(Kind::Cpu)?, 0)],
            Device::Gpu(index) => vec![(self.driver(Kind::Gpu)?, index)],
        })
    }

    /// Returns the progress of compiling kernels, if a load waits for it.
    pub fn compiling(&self) -> Option<String> {
        self.drivers.iter().find_map(|driver| driver.compiling())
    }

    /// Calls `start` with the device of the flags. With `auto`, a failure on the GPU leads to a start on the CPU, and
    /// `notice` receives the reason.
    ///
    /// # Errors
    /// The device does not exist or is not supported by this binary, or the error of `start`.
    pub fn with<T>(
        &self,
        on: &RunOnArgs,
        threads: Option<usize>,
        notice: &dyn Fn(&str),
        mut start: impl FnMut(Chosen) -> Outcome<T>,
    ) -> Outcome<T> {
        let start = |chosen: Chosen| {
            if let Some(line) = not_fast(on.numerics, &chosen) {
                // `serve` calls this for each model.
                self.told_not_fast.call_once(|| notice(&line));
            }
            start(chosen)
        };
        let device = match (on.device, &on.isa) {
            (Device::Auto, Some(_)) => Device::Cpu,
            (device, _) => device,
        };
        let mut openers: Vec<Opener<'_>> = Vec::new();
        for (driver, index) in self.named(device)? {
            openers.push(Box::new(move || driver.open(index, on, threads)));
        }
        first_of(&openers, notice, start)
    }

    /// Opens the device of the flags.
    ///
    /// # Errors
    /// The device does not exist or is not supported by this binary.
    pub fn open(&self, on: &RunOnArgs, threads: Option<usize>, notice: &dyn Fn(&str)) -> Outcome<Chosen> {
        self.with(on, threads, notice, Ok)
    }

    /// Opens the CPU, which adds the squares of all inputs of matrices to `squares`.
    pub fn cpu_with_squares(&self, threads: Option<usize>, squares: Arc<InputSquares>) -> Chosen {
        cpu::with_squares(threads, squares)
    }

    /// Measures the read bandwidth of the device with this name, in bytes per second.
    ///
    /// # Errors
    /// The probe cannot allocate memory or start threads.
    pub fn read_bandwidth(&self, on: &RunOnArgs, device: &str, threads: Option<usize>) -> Outcome<f64> {
        let named = if device == "cpu" { Device::Cpu } else { on.device };
        match self.named(named)?.first() {
            Some((driver, index)) => driver.read_bandwidth(*index, on, threads),
            None => Err(Failure::new("there is no device")),
        }
    }

    /// Measures the bandwidth at which the device with this name reads the host's memory, in bytes per second; `None` where it is the
    /// device's own.
    ///
    /// # Errors
    /// The probe cannot allocate memory.
    pub fn link(&self, on: &RunOnArgs, device: &str) -> Outcome<Option<f64>> {
        let named = if device == "cpu" { Device::Cpu } else { on.device };
        match self.named(named)?.first() {
            Some((driver, index)) => driver.link(*index),
            None => Err(Failure::new("there is no device")),
        }
    }

    /// Returns the CPU's instruction set and the names of the GPUs, for `paguro version`.
    pub fn summary(&self) -> Vec<String> {
        let summary = |kind| self.driver(kind).map_or_else(|_| "no GPU kernels".to_owned(), Driver::summary);
        [Kind::Cpu, Kind::Gpu].map(summary).into()
    }

    /// Runs `paguro devices`.
    ///
    /// # Errors
    /// The error of standard output, an unknown device, or failed cases of the suite.
    pub fn devices(&self, args: &DevicesArgs, terminal: Terminal) -> Outcome<()> {
        let mut out = Output::new();
        if args.test {
            let named = self.named(args.device.unwrap_or(Device::Auto))?;
            // The suite is a test of GPUs' drivers; the CPU is tested if it is named.
            let tested = named
                .into_iter()
                .find(|(driver, _)| driver.kind() == Kind::Gpu || args.device == Some(Device::Cpu));
            let (driver, index) = tested.ok_or_else(|| self.no_gpu(args.numerics))?;
            return driver.test(index, args, &mut out, terminal);
        }
        let mut all = Vec::new();
        match args.device {
            Some(device) => {
                let (driver, index) =
                    *self.named(device)?.first().ok_or_else(|| Failure::new("there is no device"))?;
                all.extend(driver.list(Some(index), args.numerics)?);
            }
            None => {
                for driver in self.drivers.iter().rev() {
                    all.extend(driver.list(None, args.numerics)?);
                }
            }
        }
        all.iter().try_for_each(|listed| listed.print(&mut out, args.json, terminal))
    }

    /// Returns the error if `auto` would choose no GPU.
    fn no_gpu(&self, numerics: Option<Numerics>) -> Failure {
        let gpus = self.driver(Kind::Gpu).and_then(|gpus| gpus.list(None, numerics)).unwrap_or_default();
        match gpus.first() {
            None => Failure::new("there is no GPU on this machine, or it has no driver for Vulkan or Metal")
                .hint("docs/gpu.md lists drivers; `paguro devices --test --device cpu` tests the CPU"),
            Some(gpu) => Failure::new("there is no GPU that --device auto would choose")
                .hint(format!("name one: --device {}", gpu.name)),
        }
    }
}

impl Listed {
    /// Returns the JSON output.
    fn json(&self) -> Value {
        let capacity = self.capacity.as_ref();
        let mut json = json!({
            "device": self.name,
            "description": capacity.map_or_else(Clone::clone, |capacity| capacity.description.clone()),
            "bytes_free": capacity.map_or(0, |capacity| capacity.bytes_free),
            "host_free": capacity.map_or(0, |capacity| capacity.host_free),
            "features": capacity.map_or(&[][..], |capacity| &capacity.features),
            "numerics": self.numerics,
        });
        let extra = self.extra.as_object().cloned().unwrap_or_default();
        if let Some(fields) = json.as_object_mut() {
            fields.extend(extra);
        }
        json
    }

    fn print(&self, out: &mut Output, as_json: bool, terminal: Terminal) -> Outcome<()> {
        let name = terminal.bold(&self.name);
        match &self.capacity {
            _ if as_json => out.json(&self.json()),
            Ok(Capacity { description, bytes_free, host_free, features }) => {
                out.line(format_args!("{name}  {description}"))?;
                let (free, words) = (units::bytes(*bytes_free), self.features);
                out.line(format_args!("     {free} free, {words} {}", features.join(", ")))?;
                if *host_free > 0 {
                    let host = units::bytes(*host_free);
                    out.line(format_args!("     {host} of the host's memory for experts"))?;
                }
                out.line(format_args!("     numerics {}", self.numerics))?;
                match &self.not_automatic {
                    Some(reason) => out.line(format_args!("     not chosen by --device auto: {reason}")),
                    None => Ok(()),
                }
            }
            Err(error) => out.line(format_args!("{name}  {error}")),
        }
    }
}

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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use paguro_backend_cpu::{Cpu, CpuOptions};

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
