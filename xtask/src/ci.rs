//! `cargo xtask test`: the steps, mostly in order of how soon they find something.

use std::{
    ffi::OsStr,
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::{
    aarch64, beside, clients, macos, packaging,
    sample::Sample,
    seed::Seeds,
    table::{self, Outcome, Row},
    tests, tidy, ui, wgsl,
};

struct Step {
    name: &'static str,
    group: Group,
    run: fn(&Path, &Sample) -> Result<Outcome>,
}

/// Steps of the last two groups run at the same time, after those of the first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    /// Steps that find most defects, and tests that depend on time.
    Alone,
    /// Steps that only compute. They have a lower priority, so that they use the time in which the others wait.
    Computing,
    /// Steps that wait for downloads, browsers and clients.
    Waiting,
}

const STEPS: [Step; 14] = [
    Step { name: "fmt", group: Group::Alone, run: |root, _| fmt(root) },
    Step { name: "tidy", group: Group::Alone, run: |root, _| tidy(root) },
    Step { name: "clippy", group: Group::Alone, run: |root, _| clippy(root) },
    Step { name: "test", group: Group::Alone, run: test },
    Step { name: "requests", group: Group::Alone, run: requests },
    Step { name: "gpu", group: Group::Computing, run: gpu },
    Step { name: "macos", group: Group::Computing, run: |root, _| macos::run(root) },
    Step { name: "fuzz", group: Group::Computing, run: |root, _| fuzz(root) },
    Step { name: "doc", group: Group::Computing, run: |root, _| doc(root) },
    Step { name: "aarch64", group: Group::Computing, run: aarch64::run },
    Step { name: "wgsl", group: Group::Computing, run: |root, _| wgsl::run(root, cargo(root)) },
    Step { name: "ui", group: Group::Waiting, run: |root, _| ui(root) },
    Step { name: "clients", group: Group::Waiting, run: |root, _| clients(root) },
    Step { name: "packaging", group: Group::Waiting, run: |root, _| packaging::run(root) },
];

/// Tests of the step `requests`: their program, and their name.
pub const RANDOM_REQUESTS: (&str, &str) = ("paguro::requests", "random_requests_are_answered_or_refused");
pub const RANDOM_PEERS: (&str, &str) =
    ("paguro-server", "kv_events::tests::fuzz::random_peers_cost_a_subscriber_no_batch");

/// Steps that a run without names and without `--all` may leave out: their package, and the number of which one run has them.
const DRAWN: [(&str, &str, u64); 1] = [("aarch64", "paguro-backend-cpu", 4)];

/// Runs these steps, or all, and continues after a failure. Returns true if all passed.
///
/// `--all` among the steps runs every step and every slow variant of a test, which the files of the crates draw otherwise.
///
/// # Errors
/// An unknown step or option.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool> {
    let (options, only): (Vec<_>, Vec<_>) = arguments.iter().partition(|argument| argument.starts_with('-'));
    let sample = match options.as_slice() {
        [] => Sample::Drawn(Seeds::read(root)?),
        [all] if *all == "--all" => Sample::All,
        [other, ..] => bail!("there is no option `{other}`; `--all` runs every variant of a test"),
    };
    if let Some(unknown) = only.iter().find(|name| !STEPS.iter().any(|step| step.name == **name)) {
        bail!("there is no step `{unknown}`; the steps are {}", STEPS.map(|step| step.name).join(", "));
    }
    let begin = Instant::now();
    let of = |group: Group| {
        let of_group = move |step: &&Step| step.group == group;
        let is_chosen = |step: &&Step| only.is_empty() || only.iter().any(|name| *name == step.name);
        STEPS.iter().filter(of_group).filter(is_chosen).collect::<Vec<_>>()
    };
    let [alone, computing, waiting] = [Group::Alone, Group::Computing, Group::Waiting].map(of);
    let perform = |step: &&Step| {
        let Step { name, run, .. } = **step;
        println!("--- {name}");
        let start = Instant::now();
        let left_out = DRAWN.iter().find(|(step, package, one_in)| {
            step == &name && only.is_empty() && !sample.draws(package, step, *one_in)
        });
        let outcome = match left_out {
            Some((_, package, one_in)) => Outcome::Skipped(format!(
                "1 of {one_in} contents of {package} draws it; `cargo xtask test {name}` runs it"
            )),
            None => run(root, &sample).unwrap_or_else(|error| Outcome::Failed(format!("{error:#}"))),
        };
        Row { step: name, outcome, time: start.elapsed() }
    };
    let mut rows: Vec<Row> = alone.iter().map(perform).collect();
    if computing.is_empty() || waiting.is_empty() {
        rows.extend(computing.iter().chain(&waiting).map(perform));
    } else {
        let names: Vec<_> = waiting.iter().map(|step| step.name).collect();
        let others = beside::start(root, &names, sample == Sample::All)?;
        beside::lower_priority();
        rows.extend(computing.iter().map(perform));
        rows.extend(others.finish()?);
    }
    print!("{}", table::render(&rows, begin.elapsed()));
    Ok(table::passed(&rows))
}

fn test(root: &Path, sample: &Sample) -> Result<Outcome> {
    vulkan_driver();
    tests::run(root, sample)
}

fn gpu(root: &Path, sample: &Sample) -> Result<Outcome> {
    vulkan_driver();
    tests::run_on_gpu(root, sample)
}

fn fmt(root: &Path) -> Result<Outcome> {
    component("rustfmt", "fmt")?;
    succeed(cargo(root).args(["fmt", "--all", "--check"]))
}

fn tidy(root: &Path) -> Result<Outcome> {
    let report = tidy::check(root)?;
    report.warnings.iter().for_each(|warning| println!("warning: {warning}"));
    report.errors.iter().for_each(|error| println!("error: {error}"));
    Ok(match (report.errors.len(), report.warnings.len()) {
        (0, 0) => Outcome::Passed(String::new()),
        (0, warnings) => Outcome::Passed(format!("{warnings} warnings")),
        (errors, _) => Outcome::Failed(format!("{errors} rules broken")),
    })
}

fn clippy(root: &Path) -> Result<Outcome> {
    component("clippy", "clippy")?;
    let clippy = |features: &[&str]| {
        let mut command = cargo(root);
        command.args(["clippy", "--workspace", "--all-targets", "--locked"]).args(features);
        succeed(command.args(["--", "-D", "warnings"]))
    };
    match clippy(&[])? {
        // The program without GPUs must also compile.
        Outcome::Passed(_) => clippy(&["--no-default-features"]),
        failed => Ok(failed),
    }
}

/// Sends random requests, and random peers to the sockets of KV events. The output has the seeds.
fn requests(root: &Path, sample: &Sample) -> Result<Outcome> {
    let [requests, peers] = if *sample == Sample::All { ["20000", "20000"] } else { ["1500", "4000"] };
    let fuzz = |cases: &str, target: &[&str], test: &str| {
        let mut command = cargo(root);
        command.args(["test", "--workspace", "--locked"]).args(target).args([
            "--",
            test,
            "--exact",
            "--nocapture",
        ]);
        command.envs(sample.seeds()).env("PAGURO_FUZZ_CASES", cases);
        succeed(&mut command)
    };
    match fuzz(requests, &["--test", "requests"], RANDOM_REQUESTS.1)? {
        Outcome::Passed(_) => fuzz(peers, &["--lib"], RANDOM_PEERS.1),
        failed => Ok(failed),
    }
}

/// The documentation, with private items: most readers of this project read its source.
fn doc(root: &Path) -> Result<Outcome> {
    let mut command = cargo(root);
    command.args(["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"]);
    succeed(command.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links"))
}

/// Type-checks the fuzz targets, which are workspaces of their own. To run one: docs/contributing.md.
fn fuzz(root: &Path) -> Result<Outcome> {
    let mut manifests = Vec::new();
    for folder in std::iter::once(root.to_owned()).chain(subfolders(&root.join("crates"))) {
        let manifest = folder.join("fuzz/Cargo.toml");
        if manifest.is_file() {
            manifests.push(manifest);
        }
    }
    if manifests.is_empty() {
        return Ok(Outcome::Skipped("there are no fuzz targets".to_owned()));
    }
    // libFuzzer itself is C++.
    if !cpp_compiler() {
        return Ok(Outcome::Skipped("no C++ compiler for libFuzzer (apt-get install g++)".to_owned()));
    }
    for manifest in manifests {
        let mut command = cargo(root);
        command.args(["check", "--locked", "--manifest-path"]).arg(manifest);
        command.env("CARGO_TARGET_DIR", root.join("target/fuzz")).env("RUSTFLAGS", "-D warnings");
        if let failed @ Outcome::Failed(_) = succeed(&mut command)? {
            return Ok(failed);
        }
    }
    Ok(Outcome::Passed(String::new()))
}

/// Other people's clients against the server.
fn clients(root: &Path) -> Result<Outcome> {
    clients::run(root, cargo(root))
}

/// The page: its build, and a browser in front of the server.
fn ui(root: &Path) -> Result<Outcome> {
    ui::run(root, cargo(root))
}

/// Returns true if there is one, after an attempt to install it.
fn cpp_compiler() -> bool {
    let works = || quiet(Command::new("c++").arg("--version"));
    works() || install(&["g++"]) && works()
}

/// Installs a Vulkan driver for the GPU backend's tests, if only a software driver. Without one the tests are skipped
/// with a note.
fn vulkan_driver() {
    let there =
        std::fs::read_dir("/usr/share/vulkan/icd.d").is_ok_and(|mut drivers| drivers.next().is_some());
    if cfg!(target_os = "linux") && !there {
        install(&["mesa-vulkan-drivers", "libvulkan1"]);
    }
}

/// Installs these Debian packages, and returns true if they are available. Only root on a CI machine tries.
pub fn install(packages: &[&str]) -> bool {
    let apt = |arguments: &[&str]| quiet(Command::new("apt-get").args(arguments));
    let arguments = [&["install", "-y", "--no-install-recommends"], packages].concat();
    // apt does not wait for another apt, which steps of the other process may have started.
    let alone = File::create(std::env::temp_dir().join("xtask-apt.lock"));
    std::env::var_os("CI").is_some()
        && is_root()
        && apt(&["--version"])
        && alone.as_ref().is_ok_and(|file| file.lock().is_ok())
        // Package lists of an image may be missing or outdated, so that packages are not found.
        && (apt(&["update"]) && apt(&arguments) || apt(&arguments))
}

fn is_root() -> bool {
    let output = Command::new("id").arg("-u").output();
    output.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Makes sure of a part of the toolchain that `cargo {subcommand}` needs.
fn component(name: &str, subcommand: &str) -> Result<()> {
    let there = || quiet(Command::new("cargo").args([subcommand, "--version"]));
    if there() || quiet(Command::new("rustup").args(["component", "add", name])) && there() {
        return Ok(());
    }
    bail!("`cargo {subcommand}` is missing: install it with `rustup component add {name}`")
}

/// Returns true if rustup's toolchain has a standard library for this target, after an attempt to install it.
pub fn rust_target(target: &str) -> bool {
    let listed = Command::new("rustup").args(["target", "list", "--installed"]).output();
    listed.is_ok_and(|listed| String::from_utf8_lossy(&listed.stdout).lines().any(|line| line == target))
        || quiet(Command::new("rustup").args(["target", "add", target]))
}

/// The cargo that runs this.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").as_deref().unwrap_or(OsStr::new("cargo")));
    command.current_dir(root);
    without_package(&mut command);
    if std::env::var_os("CI").is_some() {
        // No crate is built twice there, so incremental state would only cost time and space.
        command.env("CARGO_INCREMENTAL", "0");
    }
    command
}

/// Removes the variables with which cargo describes xtask to it. Build scripts that read variables of these names, such
/// as ring's, would run again, and all that depends on them be compiled again, after each change between `cargo xtask`
/// and other cargo commands.
pub fn without_package(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
        {
            command.env_remove(name);
        }
    }
}

/// Runs a command with its output.
pub fn succeed(command: &mut Command) -> Result<Outcome> {
    let status = command.status().with_context(|| format!("{command:?} does not start"))?;
    Ok(if status.success() { Outcome::Passed(String::new()) } else { Outcome::Failed(status.to_string()) })
}

/// Returns true if a command succeeds; its output is discarded.
pub fn quiet(command: &mut Command) -> bool {
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}
