//! The steps that run tests: with nextest where it is installed, with `cargo test` elsewhere.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{
    ci::{cargo, quiet},
    output::Digest,
    sample::{LeftOut, Sample},
    table::Outcome,
};

/// Tests of this package share a device and its compiled kernels, so they share a process.
const GPU: &str = "paguro-backend-wgpu";

/// Variable by which tests draw among the variants of a case (`crates/backend-conformance/src/draw.rs`).
const DRAW: &str = "PAGURO_SAMPLE";

/// Vector widths in bits for which Mesa's software driver has subgroups of 4 and of 16 threads. The default is 8.
const WIDTHS: [&str; 2] = ["128", "512"];

/// Cases that run with each of them: matmuls, and attention in parts.
const WIDTH_CASES: [&str; 3] = ["subgroups_are_as_wide_as_asked_for", "format_q8_0", "long_context"];

/// Time after which a whole run of test processes that no runner watches is ended.
const LIMIT: Duration = Duration::from_secs(45 * 60);

/// Slowest tests that are listed.
const SLOWEST: usize = 20;

/// Runs all tests except slow variants that `sample` does not draw. A test that cannot run here prints a line `skipped:
/// ...`; these lines are collected.
pub fn run(root: &Path, sample: Sample) -> Result<Outcome> {
    let (left_out, variants) = sample.left_out();
    if let Sample::Seed(seed) = sample {
        let drawn = variants - left_out.len();
        println!("{drawn} of {variants} slow variants drawn by --seed {seed}; --all runs all of them");
    }
    let draw = match sample {
        Sample::All => "all".to_owned(),
        Sample::Seed(seed) => seed.to_string(),
    };
    let mut digest = Digest::default();
    let mut statuses = Vec::new();
    if quiet(cargo(root).args(["nextest", "--version"])) {
        let tests = format!("not package({GPU}){}", filter(&left_out));
        statuses.push(nextest(root, &tests, &draw, &mut digest)?);
        statuses.push(libtest(root, &["--workspace", "--doc"], &[], &draw, &mut digest)?);
        statuses.push(on_gpu(root, &left_out, &draw, &mut digest)?);
    } else {
        println!("cargo-nextest is not installed: no times and no limits of single tests");
        let names: Vec<&str> = left_out.iter().flat_map(|test| ["--skip", &test.test]).collect();
        statuses.push(libtest(root, &["--workspace"], &names, &draw, &mut digest)?);
    }
    digest.skipped().iter().for_each(|line| println!("{line}"));
    let slowest = digest.slowest(SLOWEST);
    if !slowest.is_empty() {
        println!("the {} slowest tests:", slowest.len());
        slowest.iter().for_each(|(seconds, name)| println!("{seconds:>8.1} s  {name}"));
    }
    let failed = statuses.into_iter().find(|status| !status.success());
    Ok(match (failed, digest.skipped().len()) {
        (Some(status), _) => Outcome::Failed(format!("{status}: {}", digest.failed().join(", "))),
        (None, 0) => Outcome::Passed(String::new()),
        (None, skipped) => Outcome::Passed(format!("not tested here, listed above: {skipped}")),
    })
}

/// A filter expression that excludes these tests.
fn filter(left_out: &[LeftOut]) -> String {
    let exclude = |LeftOut { package, target, test }: &LeftOut| {
        format!(" and not (binary_id({package}::{target}) and test(={test}))")
    };
    left_out.iter().filter(|test| test.package != GPU).map(exclude).collect()
}

fn nextest(root: &Path, filter: &str, draw: &str, digest: &mut Digest) -> Result<ExitStatus> {
    let mut command = cargo(root);
    command.args(["nextest", "run", "--workspace", "--locked", "--profile", "ci", "--color", "never"]);
    command.args(["-E", filter]);
    // nextest writes results to standard error, and the output of tests with them.
    command.env("RUST_BACKTRACE", "0").env(DRAW, draw);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.context("cargo does not start")?;
    let output = child.stderr.take();
    read(child, output, |line| digest.nextest(line))
}

fn libtest(
    root: &Path,
    build: &[&str],
    tests: &[&str],
    draw: &str,
    digest: &mut Digest,
) -> Result<ExitStatus> {
    let mut command = cargo(root);
    command
        .args(["test", "--locked", "--no-fail-fast"])
        .args(build)
        .args(["--", "--show-output"])
        .args(tests)
        .env(DRAW, draw);
    processes(&mut command, digest)
}

/// The GPU backend's tests, binary by binary, so that each test's time is known.
fn on_gpu(root: &Path, left_out: &[LeftOut], draw: &str, digest: &mut Digest) -> Result<ExitStatus> {
    let mut last = None;
    for (target, binary) in binaries(root)? {
        let mut command = Command::new(&binary);
        command.current_dir(root.join("crates/backend-wgpu"));
        command.args(["--show-output", "--exact", "-Zunstable-options", "--report-time"]);
        // Times are an option that is not stable; this lets the test's own harness have it.
        command.env("RUSTC_BOOTSTRAP", "1").env(DRAW, draw);
        for test in left_out.iter().filter(|test| test.package == GPU && test.target == target) {
            command.args(["--skip", &test.test]);
        }
        let mut runs = vec![(format!("{GPU}::{target}"), command)];
        if target == "conformance" && cfg!(target_os = "linux") {
            runs.extend(WIDTHS.map(|width| {
                let mut command = Command::new(&binary);
                command.current_dir(root.join("crates/backend-wgpu")).env("LP_NATIVE_VECTOR_WIDTH", width);
                command.args(["--show-output", "--exact"]).args(WIDTH_CASES);
                (format!("{GPU}::{target} on a software driver with vectors of {width} bits"), command)
            }));
        }
        for (name, mut command) in runs {
            println!("--- {name}");
            let status = processes(&mut command, digest)?;
            if last.is_none_or(|status: ExitStatus| status.success()) {
                last = Some(status);
            }
        }
    }
    last.with_context(|| format!("{GPU} has no tests"))
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

fn processes(command: &mut Command, digest: &mut Digest) -> Result<ExitStatus> {
    // Some tests panic on purpose, so backtraces are off.
    let child = command.env("RUST_BACKTRACE", "0").stdout(Stdio::piped()).spawn();
    let mut child = child.with_context(|| format!("{command:?} does not start"))?;
    let output = child.stdout.take();
    read(child, output, |line| digest.line(line))
}

/// Prints the lines for which `show` is true, until the child has ended. It is killed after the [limit](LIMIT).
fn read(
    mut child: Child,
    output: Option<impl std::io::Read>,
    mut show: impl FnMut(&str) -> bool,
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
        let line = String::from_utf8_lossy(&line?).into_owned();
        if show(&line) {
            println!("{line}");
        }
    }
    let status = child.wait()?;
    drop(ended);
    let _ = watchdog.join();
    Ok(status)
}
