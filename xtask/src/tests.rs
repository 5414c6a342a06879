//! The steps that run tests: with nextest where it is installed, with `cargo test` elsewhere.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
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
    listing::Listing,
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
    let listing = if has_nextest(root) { Some(Listing::read(root)?) } else { None };
    let mut tests = Tests::new(sample, CPU, listing.as_ref())?;
    if let Some(listing) = &listing {
        check_names(listing)?;
        tests.nextest(root, &format!("not package({GPU}) and not ({APP_ON_GPU})"))?;
        tests.libtest(root, &["--workspace", "--doc"])?;
    } else {
        println!(
            "cargo-nextest is not installed: all variants run, without times and limits of single tests"
        );
        tests.libtest(root, &["--workspace"])?;
    }
    tests.outcome(root, "test")
}

/// Runs the tests on this machine's first GPU, which may be a software driver.
pub fn run_on_gpu(root: &Path, sample: &Sample) -> Result<Outcome> {
    if !has_nextest(root) {
        return Ok(Outcome::Skipped("cargo-nextest is not installed, so `test` runs them".to_owned()));
    }
    let mut tests = Tests::new(sample, GPU, Some(&Listing::read(root)?))?;
    tests.nextest(root, APP_ON_GPU)?;
    tests.gpu_backend(root, sample)?;
    tests.outcome(root, "gpu")
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
    fn new(sample: &Sample, package: &str, listing: Option<&Listing>) -> Result<Self> {
        let (left_out, variants) = listing.map_or(Ok((Vec::new(), 0)), |listing| sample.left_out(listing))?;
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

    fn libtest(&mut self, root: &Path, build: &[&str]) -> Result<()> {
        let mut command = cargo(root);
        command.args(["test", "--locked", "--no-fail-fast"]).args(build);
        command.args(["--", "--show-output"]).env(DRAW, &self.draw).envs(self.seeds.clone());
        self.statuses.push(process(&mut command, |line| {
            if self.digest.line(line) {
                println!("{line}");
            }
        })?);
        Ok(())
    }

    /// Runs the test programs of the GPU backend, so that each test's time is known. Two run at a time: a software driver
    /// compiles the kernels of a device one after the other.
    fn gpu_backend(&mut self, root: &Path, sample: &Sample) -> Result<()> {
        let runs = Mutex::new(self.gpu_programs(root, sample)?.into_iter());
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
    fn gpu_programs(&self, root: &Path, sample: &Sample) -> Result<Vec<(String, Command)>> {
        let mut runs = Vec::new();
        for (target, binary) in binaries(root)? {
            let command = |name: String| {
                let mut command = Command::new(&binary);
                command.current_dir(root.join("crates/backend-wgpu")).env(DRAW, &self.draw);
                command.envs(self.seeds.clone());
                command.args(["--show-output", "--exact", "-Zunstable-options", "--report-time"]);
                // Times are an option that is not stable; this lets the test's own harness have it.
                command.env("RUSTC_BOOTSTRAP", "1");
                (name, command)
            };
            let mut all = command(format!("{GPU}::{target}"));
            for test in self.left_out.iter().filter(|test| test.package == GPU && test.target == target) {
                all.1.args(["--skip", &test.test]);
            }
            runs.push(all);
            if target == "conformance" && cfg!(target_os = "linux") {
                runs.extend(sample.some(GPU, &WIDTHS).iter().map(|width| {
                    let name = format!("{GPU}::{target} on a software driver with vectors of {width} bits");
                    let mut command = command(name);
                    command.1.env("LP_NATIVE_VECTOR_WIDTH", width).args(WIDTH_CASES);
                    command
                }));
            }
        }
        runs.sort_by_key(|(name, _)| !name.contains("::conformance"));
        Ok(runs)
    }
}

/// Builds the tests of the GPU backend, as part of the workspace so that nothing is built twice, and returns their names and files.
fn binaries(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut command = cargo(root);
    command.args([
        "test",
        "--workspace",
        "--locked",
        "--no-run",
        "--message-format",
        "json-render-diagnostics",
    ]);
    let output = command.stderr(Stdio::inherit()).output().context("cargo does not start")?;
    if !output.status.success() {
        bail!("the tests do not compile");
    }
    let mut binaries = Vec::new();
    for line in output.stdout.split(|&byte| byte == b'\n').filter(|line| line.starts_with(b"{")) {
        let message: serde_json::Value = serde_json::from_slice(line)?;
        let of_gpu = message["package_id"].as_str().is_some_and(|id| id.contains("/backend-wgpu"));
        if let (true, Some(file), Some(name)) =
            (of_gpu, message["executable"].as_str(), message["target"]["name"].as_str())
            && message["profile"]["test"] == true
        {
            binaries.push((name.to_owned(), file.into()));
        }
    }
    binaries.sort();
    Ok(binaries)
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
