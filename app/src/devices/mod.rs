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
    cli::{Device, DevicesArgs, Numerics, RunOnArgs, Split},
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
    units,
};

/// Rounds of the read-bandwidth probe, whose median takes well under a second.
const PROBE_ROUNDS: usize = 3;

/// An opened device.
pub struct Opened {
    /// Its name: the CPU, or a GPU by index.
    pub device: Device,
    /// The device.
    pub backend: Box<dyn Backend>,
    /// CPU threads it uses.
    pub threads: usize,
    /// Description of its numerics.
    pub numerics: String,
    /// True if sums use matrix units.
    pub is_fast: bool,
}

/// Opened devices for a model: one, several for its stages, or several for engines of the whole model.
pub struct Chosen {
    /// The devices in the order of their stages: the CPU is the first one, because embeddings are looked up and a head is a matmul.
    opened: Vec<Opened>,
    /// Number of layers on GPUs, if it was given.
    pub gpu_layers: Option<usize>,
    /// Shares of the GPUs in these layers, if they were given.
    pub split: Option<Split>,
    /// True if each device runs the whole model.
    pub replicas: bool,
}

impl Chosen {
    /// Returns the devices of each engine.
    pub fn engines(self) -> Vec<Self> {
        match self.replicas {
            true => self.opened.into_iter().map(Self::from).collect(),
            false => vec![self],
        }
    }

    /// Returns the largest number of engines on one device.
    pub fn engines_on_one(&self) -> u64 {
        let same = |one: &Opened| self.opened.iter().filter(|other| other.device == one.device).count();
        self.opened.iter().map(same).max().map_or(1, |count| count as u64)
    }

    /// Returns the device that runs a model alone if the model fits there: the first GPU, or the CPU without one.
    pub fn main(&self) -> &Opened {
        self.gpus().next().unwrap_or(&self.opened[0])
    }

    /// Returns all devices, in the order of their stages.
    pub fn all(&self) -> &[Opened] {
        &self.opened
    }

    /// Returns the GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = &Opened> {
        self.opened.iter().filter(|opened| opened.device != Device::Cpu)
    }

    /// Returns true if the layers are divided whatever the memory of the main device.
    pub fn is_divided(&self) -> bool {
        self.gpu_layers.is_some() || self.gpus().count() > 1
    }

    /// Returns a device by its name.
    pub fn find(&self, device: Device) -> Option<&Opened> {
        self.opened.iter().find(|opened| opened.device == device)
    }

    /// Returns the free memory for an engine: that of the GPUs, or that of the CPU without any; of replicas, the least that one has.
    pub fn free(&self) -> u64 {
        let of = |opened: &Opened| opened.backend.capacity().bytes_free;
        match self.gpus().next() {
            _ if self.replicas => self.opened.iter().map(of).min().unwrap_or(0) / self.engines_on_one(),
            Some(_) => self.gpus().map(of).fold(0, u64::saturating_add),
            None => of(self.main()),
        }
    }
}

impl From<Opened> for Chosen {
    fn from(opened: Opened) -> Self {
        Self { opened: vec![opened], gpu_layers: None, split: None, replicas: false }
    }
}

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.opened.iter().map(|opened| opened.device)).finish()
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
    fn open(&self, index: usize, on: &RunOnArgs, threads: Option<usize>) -> Outcome<Opened>;

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

/// Function that opens the devices for a model.
type Opener<'a> = Box<dyn Fn() -> Outcome<Chosen> + 'a>;

/// Hint for devices of which none is a GPU.
const NAME_A_GPU: &str = "--device gpu,cpu divides the layers between the two";

/// Devices of a model, in the order of its stages, by their drivers.
type Candidate<'a> = Vec<(&'a dyn Driver, usize)>;

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

    /// Calls `start` with the devices of the flags. With `auto`, a failure on the GPU leads to a start on the CPU, and
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
        let mut openers: Vec<Opener<'_>> = Vec::new();
        for devices in self.candidates(on, notice)? {
            openers.push(Box::new(move || {
                // `--memory` bounds GPUs, or the CPU without any.
                let beside = RunOnArgs { memory: None, ..on.clone() };
                let is_beside = |driver: &dyn Driver| driver.kind() == Kind::Cpu && devices.len() > 1;
                let threads =
                    if on.replicas { Some(threads_of_each(threads, devices.len())) } else { threads };
                let open = |&(driver, index): &(&dyn Driver, usize)| {
                    driver.open(index, if is_beside(driver) { &beside } else { on }, threads)
                };
                let opened = devices.iter().map(open).collect::<Outcome<_>>()?;
                let (gpu_layers, split) = (on.gpu_layers, on.split.clone());
                Ok(Chosen { opened, gpu_layers, split, replicas: on.replicas })
            }));
        }
        first_of(&openers, notice, start)
    }

    /// Returns the sets of devices that flags name, in the order in which they are tried. Each has the order of stages.
    fn candidates(&self, on: &RunOnArgs, notice: &dyn Fn(&str)) -> Outcome<Vec<Candidate<'_>>> {
        let cpu = (self.driver(Kind::Cpu)?, 0);
        let gpu = |index| Ok::<_, Failure>((self.driver(Kind::Gpu)?, index));
        let is_divided = on.gpu_layers.is_some_and(|layers| layers > 0) || on.split.is_some();
        let without_gpus = |problem: &str| Err(Failure::usage(problem.to_owned()).hint(NAME_A_GPU));
        let listed = on.device.all();
        if on.replicas {
            check_replicas(on)?;
            let all = listed.iter().map(|device| match device {
                Device::Gpu(index) => gpu(*index),
                Device::Auto | Device::Cpu => Ok(cpu),
            });
            return Ok(vec![all.collect::<Outcome<_>>()?]);
        }
        if let Some(at) = (1..listed.len()).find(|&at| listed[..at].contains(&listed[at])) {
            let failure = Failure::usage(format!("--device lists {} twice", listed[at]));
            return Err(failure.hint("each device of a list runs other layers"));
        }
        match listed {
            _ if on.gpu_layers == Some(0) => Ok(vec![vec![cpu]]),
            [Device::Auto] if on.isa.is_some() => Ok(vec![vec![cpu]]),
            [Device::Auto] => {
                if let Some(split) = &on.split {
                    let gpus = (0..split.shares().len()).map(gpu).collect::<Outcome<Vec<_>>>()?;
                    let cpu = on.gpu_layers.map(|_| cpu);
                    return Ok(vec![cpu.into_iter().chain(gpus).collect()]);
                }
                let automatic: Vec<_> = self.automatic().collect();
                if is_divided && automatic.len() < 2 {
                    notice("--gpu-layers has no effect: there is no GPU that --device auto would choose");
                }
                // The CPU runs the layers that do not fit the GPU.
                let with_cpu = automatic.into_iter().map(|(driver, index)| match driver.kind() {
                    Kind::Gpu => vec![cpu, (driver, index)],
                    Kind::Cpu => vec![cpu],
                });
                Ok(with_cpu.collect())
            }
            [Device::Cpu] if is_divided => without_gpus("the layers of a model are divided only with a GPU"),
            devices => {
                let indices = devices.iter().filter_map(|device| match device {
                    Device::Gpu(index) => Some(*index),
                    Device::Auto | Device::Cpu => None,
                });
                let gpus = indices.map(gpu).collect::<Outcome<Vec<_>>>()?;
                if on.split.as_ref().is_some_and(|split| split.shares().len() != gpus.len()) {
                    let problem =
                        format!("--split has shares of other GPUs than the {} of --device", gpus.len());
                    return Err(Failure::usage(problem).hint("it has a number for each GPU of the list"));
                }
                let has_cpu = devices.contains(&Device::Cpu) || on.gpu_layers.is_some();
                Ok(vec![has_cpu.then_some(cpu).into_iter().chain(gpus).collect()])
            }
        }
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
        cpu::with_squares(threads, squares).into()
    }

    /// Measures the bandwidth at which devices read their stages of a model, one after the other, in bytes per second.
    ///
    /// # Errors
    /// The probe cannot allocate memory or start threads.
    pub fn read_bandwidth(
        &self,
        on: &RunOnArgs,
        stages: &[(Device, u64)],
        threads: Option<usize>,
    ) -> Outcome<f64> {
        let (mut bytes, mut time) = (0.0, 0.0);
        for &(device, own) in stages {
            let own = own.max(1) as f64;
            let bandwidth = match self.named(device)?.first() {
                Some((driver, index)) => driver.read_bandwidth(*index, on, threads)?,
                None => return Err(Failure::new("there is no device")),
            };
            (bytes, time) = (bytes + own, time + own / bandwidth);
        }
        Ok(bytes / time)
    }

    /// Measures the bandwidth at which a device reads the host's memory, in bytes per second; `None` where it is the device's own.
    ///
    /// # Errors
    /// The probe cannot allocate memory.
    pub fn link(&self, device: Device) -> Outcome<Option<f64>> {
        match self.named(device)?.first() {
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
            let device = args.device.as_ref().map_or(Device::Auto, |list| list.all()[0]);
            // The suite is a test of GPUs' drivers; the CPU is tested if it is named.
            let is_tested =
                |(driver, _): &(&dyn Driver, usize)| driver.kind() == Kind::Gpu || device == Device::Cpu;
            let tested = self.named(device)?.into_iter().find(is_tested);
            let (driver, index) = tested.ok_or_else(|| self.no_gpu(args.numerics))?;
            return driver.test(index, args, &mut out, terminal);
        }
        let mut all = Vec::new();
        match &args.device {
            Some(list) => {
                for &device in list.all() {
                    let (driver, index) =
                        *self.named(device)?.first().ok_or_else(|| Failure::new("there is no device"))?;
                    all.extend(driver.list(Some(index), args.numerics)?);
                }
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
            Ok(Capacity { description, bytes_free, host_free, step_rows: _, features }) => {
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

/// Checks the flags beside `--replicas`.
///
/// # Errors
/// A flag divides the model, or the devices cannot be equal.
fn check_replicas(on: &RunOnArgs) -> Outcome<()> {
    let divides = [
        ("--gpu-layers", on.gpu_layers.is_some()),
        ("--split", on.split.is_some()),
        ("--expert-slots", on.expert_slots.is_some()),
    ];
    if let Some((flag, _)) = divides.into_iter().find(|(_, is_given)| *is_given) {
        let failure = Failure::usage(format!("--replicas runs whole models on each device, without {flag}"));
        return Err(
            failure.hint(format!("leave out {flag}, or --replicas to divide a model among the devices"))
        );
    }
    let devices = on.device.all();
    if devices.len() < 2 {
        let failure =
            Failure::usage(format!("--replicas needs several devices, but --device is {}", devices[0]));
        return Err(failure.hint("--device gpu:0,gpu:1 --replicas runs an engine on each of two GPUs"));
    }
    if devices.contains(&Device::Cpu) && devices.iter().any(|device| *device != Device::Cpu) {
        let failure =
            Failure::usage("--replicas needs equal devices: answers of the CPU would take much longer");
        return Err(failure.hint("leave cpu out of --device, or leave out --replicas to divide the layers"));
    }
    Ok(())
}

/// Returns the number of CPU threads of each of `count` engines.
fn threads_of_each(threads: Option<usize>, count: usize) -> usize {
    let all = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    (all / count).max(1)
}

/// Returns the notice for `--numerics fast` on a device with exact numerics.
fn not_fast(numerics: Option<Numerics>, chosen: &Chosen) -> Option<String> {
    let main = chosen.main();
    let wants = numerics == Some(Numerics::Fast) && !main.is_fast;
    wants.then(|| {
        format!("--numerics fast has no effect: the {} has no matrix units: exact", main.backend.name())
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
        let (device, numerics) = (Device::Cpu, name.to_owned());
        Ok(Opened { device, backend, threads: 1, numerics, is_fast: false }.into())
    }

    #[test]
    fn whole_models_run_on_each_device_of_equal_kind() {
        let devices = Devices::new(None);
        let on = |list: &str, replicas: bool| RunOnArgs {
            device: list.parse().unwrap(),
            gpu_layers: None,
            split: None,
            numerics: None,
            memory: None,
            expert_slots: None,
            replicas,
            isa: None,
            timed: false,
        };
        let split = |on: RunOnArgs| RunOnArgs { split: Some("1,1".parse().unwrap()), ..on };
        let layers = |on: RunOnArgs| RunOnArgs { gpu_layers: Some(3), ..on };
        let slots = |on: RunOnArgs| RunOnArgs { expert_slots: Some(Default::default()), ..on };
        for (on, problem) in [
            (on("auto", true), "--replicas needs several devices, but --device is auto"),
            (on("gpu:1", true), "but --device is gpu:1"),
            (on("gpu:0,cpu", true), "needs equal devices"),
            (split(on("cpu,cpu", true)), "without --split"),
            (layers(on("gpu:0,gpu:1", true)), "without --gpu-layers"),
            (slots(on("gpu:0,gpu:1", true)), "without --expert-slots"),
            (on("cpu,cpu", false), "--device lists cpu twice"),
            (on("gpu,gpu:0", false), "--device lists gpu:0 twice"),
        ] {
            let refused = devices.candidates(&on, &|_| ()).err().expect(problem);
            assert!(refused.message().contains(problem), "{}", refused.message());
        }
        let chosen = devices.open(&on("cpu,cpu", true), Some(5), &|_| ()).unwrap();
        assert_eq!((chosen.all().len(), chosen.engines_on_one(), chosen.all()[1].threads), (2, 2, 2));
        assert!(chosen.free() <= chosen.main().backend.capacity().bytes_free * 6 / 10);
        let engines = chosen.engines();
        assert!(
            engines.len() == 2 && engines.iter().all(|engine| !engine.replicas && engine.all().len() == 1)
        );
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
            let started =
                first_of(&openers, &notice, |chosen| match fails_on.contains(&chosen.main().numerics) {
                    true => Err(Failure::new(format!("{} cannot load", chosen.main().numerics))),
                    false => Ok(chosen.main().numerics.clone()),
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
