//! The steps that run tests: with nextest where it is installed, with `cargo test` elsewhere.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{
    aarch64,
    ci::{RANDOM_PEERS, RANDOM_REQUESTS, cargo, quiet},
    clients, junit,
    listing::{Listing, Program},
    output::Digest,
    sample::{LeftOut, Sample},
    table::Outcome,
};

/// Tests of this package share a device and its compiled kernels, so they share a process.
const GPU: &str = "paguro-backend-wgpu";

/// Tests of this package draw among formats and shapes, besides those of [`GPU`].
const CPU: &str = "paguro-backend-cpu";

/// Variable by which tests draw among the variants of a case (`crates/backend-conformance/src/draw.rs`).
const DRAW: &str = "PAGURO_SAMPLE";

/// Vector widths in bits for which Mesa's software driver has subgroups of 4 and of 16 threads. The default is 8.
const WIDTHS: [&str; 2] = ["128", "512"];

/// Cases that run with one of them, or with each: matmuls, and attention in parts.
const WIDTH_CASES: [&str; 3] = ["subgroups_are_as_wide_as_asked_for", "format_q8_0", "long_context"];

/// Time after which a whole run of test processes that no runner watches is ended.
const LIMIT: Duration = Duration::from_secs(45 * 60);

/// Slowest tests that are listed.
const SLOWEST: usize = 20;

/// Tests of the application on a GPU, as a filter of nextest.
const APP_ON_GPU: &str = "binary_id(paguro::it) and test(/(^|::)gpu::|on_a_gpu/)";

/// Runs all tests except those on a GPU. A test that cannot run here prints a line `skipped: ...`; these lines are
/// collected.
pub fn run(root: &Path, sample: &Sample) -> Result<Outcome> {
    let programs = Program::all(root)?;
    let listing = Listing::read(&programs)?;
    check_names(&listing)?;
    let mut tests = Tests::new(sample, CPU, &listing)?;
    if has_nextest(root) {
        tests.nextest(root, &format!("not package({GPU}) and not ({APP_ON_GPU})"))?;
    } else {
        println!("cargo-nextest is not installed: tests run without times and limits");
        tests.programs(programs.iter().filter(|program| !is_of_gpu(program)))?;
    }
    tests.doc(root)?;
    tests.outcome(root, "test")
}

/// Runs the tests on this machine's first GPU, which may be a software driver.
pub fn run_on_gpu(root: &Path, sample: &Sample) -> Result<Outcome> {
    let programs = Program::all(root)?;
    let mut tests = Tests::new(sample, GPU, &Listing::read(&programs)?)?;
    // Without nextest, they ran with the other tests of their program.
    if has_nextest(root) {
        tests.nextest(root, APP_ON_GPU)?;
    }
    tests.gpu_backend(programs, sample)?;
    tests.outcome(root, "gpu")
}

fn is_of_gpu(program: &Program) -> bool {
    program.id.strip_prefix(GPU).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Checks the names of tests in other lists of this program.
fn check_names(listing: &Listing) -> Result<()> {
    let conformance = format!("{GPU}::conformance");
    let widths = WIDTH_CASES.iter().filter(|case| !listing.has(&conformance, case));
    let random =
        [RANDOM_REQUESTS, RANDOM_PEERS].into_iter().filter(|(program, test)| !listing.has(program, test));
    let random = random.map(|(program, test)| format!("{program}: `{test}`"));
    let missing: Vec<String> = widths
        .map(|case| format!("{conformance}: `{case}`"))
        .chain(aarch64::missing(listing))
        .chain(random)
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        bail!("tests that are listed and do not exist: {}", missing.join(", "))
    }
}

fn has_nextest(root: &Path) -> bool {
    quiet(cargo(root).args(["nextest", "--version"]))
}

/// Test programs of a step, and their results.
struct Tests {
    left_out: Vec<LeftOut>,
    /// Value of [`DRAW`].
    draw: String,
    /// Variables with the seeds of random tests.
    seeds: [(&'static str, String); 2],
    digest: Digest,
    statuses: Vec<ExitStatus>,
}

impl Tests {
    /// Prints how many slow variants are left out. `package` draws among formats and shapes.
    fn new(sample: &Sample, package: &str, listing: &Listing) -> Result<Self> {
        let (left_out, variants) = sample.left_out(listing)?;
        if let (Sample::Drawn(seeds), true) = (sample, variants > 0) {
            let (drawn, seed) = (variants - left_out.len(), seeds.get(package));
            println!(
                "{drawn} of {variants} slow variants run, drawn by the files of crates; {package} has the seed {seed}"
            );
        }
        let draw = sample.of_cases(package);
        let seeds = sample.seeds();
        Ok(Self { left_out, draw, seeds, digest: Digest::default(), statuses: Vec::new() })
    }

    /// Prints the skipped tests and the slowest ones, and writes the times of all to a file.
    fn outcome(self, root: &Path, step: &str) -> Result<Outcome> {
        let Self { digest, statuses, .. } = self;
        digest.skipped().iter().for_each(|line| println!("{line}"));
        let times: Vec<String> =
            digest.times().iter().map(|(s, name)| format!("{s:>8.1} s  {name}")).collect();
        let file = format!("target/ci-times-{step}.txt");
        fs::write(root.join(&file), times.join("\n") + "\n")
            .with_context(|| format!("{file} cannot be written"))?;
        println!("the slowest of {} tests, all of which are in {file}:", times.len());
        times.iter().take(SLOWEST).for_each(|line| println!("{line}"));
        let failed = statuses.into_iter().find(|status| !status.success());
        Ok(match (failed, digest.skipped().len()) {
            (Some(status), _) => Outcome::Failed(format!("{status}: {}", digest.failed().join(", "))),
            (None, 0) => Outcome::Passed(String::new()),
            (None, skipped) => Outcome::Passed(format!("not tested here, listed above: {skipped}")),
        })
    }

    /// Runs the drawn tests of this filter expression.
    fn nextest(&mut self, root: &Path, tests: &str) -> Result<()> {
        let exclude = |LeftOut { package, target, test }: &LeftOut| {
            format!(" and not (binary_id({package}::{target}) and test(={test}))")
        };
        let others = self.left_out.iter().filter(|test| test.package != GPU);
        let filter = format!("({tests}){}", others.map(exclude).collect::<String>());
        let results = clients::target(root).join(junit::FILE);
        // Without the file of an earlier run, a run that does not start has none.
        let _ = fs::remove_file(&results);
        let mut command = cargo(root);
        command.args(["nextest", "run", "--workspace", "--locked", "--profile", "ci", "--color", "never"]);
        command
            .args(["-E", &filter])
            .env("RUST_BACKTRACE", "0")
            .env(DRAW, &self.draw)
            .envs(self.seeds.clone());
        let status = command.stdout(Stdio::null()).status().context("cargo does not start")?;
        let text =
            fs::read_to_string(&results).with_context(|| format!("nextest: {status}, without results"))?;
        junit::read(&text)?.into_iter().for_each(|case| self.digest.case(case));
        self.statuses.push(status);
        Ok(())
    }

    /// Runs the drawn tests of these programs, one program after the other.
    fn programs<'a>(&mut self, programs: impl Iterator<Item = &'a Program>) -> Result<()> {
        for program in programs {
            let mut command = self.command(program);
            self.libtest(&mut command)?;
        }
        Ok(())
    }

    /// Runs the examples of the documentation.
    fn doc(&mut self, root: &Path) -> Result<()> {
        let mut command = cargo(root);
        command.args(["test", "--workspace", "--locked", "--no-fail-fast", "--doc", "--", "--show-output"]);
        command.env(DRAW, &self.draw).envs(self.seeds.clone());
        self.libtest(&mut command)
    }

    fn libtest(&mut self, command: &mut Command) -> Result<()> {
        self.statuses.push(process(command, |line| {
            if self.digest.line(line) {
                println!("{line}");
            }
        })?);
        Ok(())
    }

    /// Returns a command that runs the drawn tests of a program.
    fn command(&self, program: &Program) -> Command {
        let mut command = program.command();
        command.env(DRAW, &self.draw).envs(self.seeds.clone()).args(["--show-output", "--exact"]);
        for LeftOut { package, target, test } in &self.left_out {
            if program.id == format!("{package}::{target}") {
                command.args(["--skip", test]);
            }
        }
        command
    }

    /// Runs the test programs of the GPU backend, so that each test's time is known. Two run at a time: a software driver
    /// compiles the kernels of a device one after the other.
    fn gpu_backend(&mut self, programs: Vec<Program>, sample: &Sample) -> Result<()> {
        let runs = Mutex::new(self.gpu_programs(programs, sample).into_iter());
        let results = Mutex::new(Vec::new());
        let next = || lock(&runs).next();
        let work = || {
            while let Some((name, mut command)) = next() {
                let (mut digest, mut shown) = (Digest::default(), format!("--- {name}\n"));
                let status = process(&mut command, |line| {
                    if digest.line(line) {
                        shown.extend([line, "\n"]);
                    }
                });
                print!("{shown}");
                lock(&results).push((digest, status));
            }
        };
        thread::scope(|scope| (0..2).for_each(|_| _ = scope.spawn(work)));
        let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        if results.is_empty() {
            bail!("{GPU} has no tests");
        }
        for (digest, status) in results {
            self.digest.add(digest);
            self.statuses.push(status?);
        }
        Ok(())
    }

    /// Test programs of the GPU backend with their names, the slowest first.
    fn gpu_programs(&self, programs: Vec<Program>, sample: &Sample) -> Vec<(String, Command)> {
        let mut runs = Vec::new();
        for program in programs.into_iter().filter(is_of_gpu) {
            let timed = || {
                let mut command = self.command(&program);
                // Times are an option that is not stable; this lets the test's own harness have it.
                command.args(["-Zunstable-options", "--report-time"]).env("RUSTC_BOOTSTRAP", "1");
                command
            };
            runs.push((program.id.clone(), timed()));
            if program.id.ends_with("::conformance") && cfg!(target_os = "linux") {
                runs.extend(sample.some(GPU, &WIDTHS).iter().map(|width| {
                    let name = format!("{} on a software driver with vectors of {width} bits", program.id);
                    let mut command = timed();
                    command.env("LP_NATIVE_VECTOR_WIDTH", width).args(WIDTH_CASES);
                    (name, command)
                }));
            }
        }
        runs.sort_by_key(|(name, _)| !name.contains("::conformance"));
        runs
    }
}

/// Calls `see` for each line that a test program writes.
fn process(command: &mut Command, see: impl FnMut(&str)) -> Result<ExitStatus> {
    // Some tests panic on purpose, so backtraces are off.
    let child = command.env("RUST_BACKTRACE", "0").stdout(Stdio::piped()).spawn();
    let mut child = child.with_context(|| format!("{command:?} does not start"))?;
    let output = child.stdout.take();
    read(child, output, see)
}

/// Calls `see` for each line until the child has ended. It is killed after the [limit](LIMIT).
fn read(
    mut child: Child,
    output: Option<impl std::io::Read>,
    mut see: impl FnMut(&str),
) -> Result<ExitStatus> {
    let (ended, watch) = mpsc::channel::<()>();
    let id = child.id();
    let watchdog = thread::spawn(move || {
        if watch.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            println!("error: no end after {} minutes: killed", LIMIT.as_secs() / 60);
            let kill = if cfg!(windows) { "taskkill" } else { "kill" };
            quiet(Command::new(kill).arg(id.to_string()));
        }
    });
    for line in output.into_iter().flat_map(|output| BufReader::new(output).split(b'\n')) {
        see(&String::from_utf8_lossy(&line?));
    }
    let status = child.wait()?;
    drop(ended);
    let _ = watchdog.join();
    Ok(status)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
