//! `cargo xtask test aarch64`: the vector code of another processor, compiled and run by an emulator.
//!
//! QEMU translates each instruction separately, so results equal those of the architecture manual bit for bit, but
//! speed is not measured, and a processor's own defects are not found.

use std::{path::Path, process::Command};

use anyhow::Result;

use crate::{
    ci::{cargo, install, quiet, rust_target, succeed},
    listing::Listing,
    sample::Sample,
    table::Outcome,
};

/// The kernels, and the backend that runs them.
const KERNELS: &str = "paguro-cpu-kernels";
const BACKEND: &str = "paguro-backend-cpu";

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// A processor that QEMU pretends to be.
struct Processor {
    name: &'static str,
    /// The instruction set that detection must choose on it.
    isa: &'static str,
    /// Prefixes of the kernels' own tests.
    kernels: &'static [&'static str],
    /// Prefixes of the conformance suite's tests.
    conformance: &'static [&'static str],
}

/// The first one supports all instruction sets, and the kernels' tests compare all of a machine, so all of them run
/// there. The others show that no unsupported instruction is used. Chunks, pages, threads and the contract are the same
/// on every processor; the conformance suite tests them on the host.
const PROCESSORS: [Processor; 3] = [
    Processor {
        name: "max",
        isa: "neoni8mm",
        kernels: &["isa::", "simd::", "quantize::", "ops::", "matrix::", "attention::tests::every_"],
        conformance: &["best::format_q8_0", "best::format_q4_k", "best::head_dims", "best::batch_invariance"],
    },
    Processor { name: "neoverse-n1", isa: "neondot", kernels: OLDER, conformance: &["best::format_q8_0"] },
    Processor { name: "cortex-a53", isa: "neon", kernels: OLDER, conformance: &["best::format_q8_0"] },
];

const OLDER: &[&str] = &["isa::", "simd::", "matrix::tests::q"];

/// Debian's packages of a linker and C library for the target, and of the emulator.
const EMULATOR: [&str; 3] = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"];

/// Random inputs per property: emulation takes some thirty times as long.
const RANDOM_INPUTS: &str = "12";

/// Returns prefixes of names that no test has.
pub fn missing(listing: &Listing) -> Vec<String> {
    let lacks = |id: &str, prefix: &str| !listing.tests(id).any(|test| test.starts_with(prefix));
    let suite = format!("{BACKEND}::conformance");
    let of = |id: &str, prefixes: &[&str]| {
        let missing = prefixes.iter().filter(|prefix| lacks(id, prefix));
        missing.map(|prefix| format!("{id}: `{prefix}`")).collect::<Vec<_>>()
    };
    PROCESSORS
        .iter()
        .flat_map(|processor| [of(KERNELS, processor.kernels), of(&suite, processor.conformance)].concat())
        .collect()
}

/// The step. A sample compiles the kernels; `--all` also emulates all processors.
pub fn run(root: &Path, sample: &Sample) -> Result<Outcome> {
    if cfg!(target_arch = "aarch64") {
        return Ok(Outcome::Skipped("this machine is one: `test` has run them".to_owned()));
    }
    if !rust_target(TARGET) {
        return Ok(Outcome::Skipped(format!("no compiler for it: rustup target add {TARGET}")));
    }
    // A dependency has code in C.
    let there = || works("qemu-aarch64") && works("aarch64-linux-gnu-gcc");
    if !(there() || install(&EMULATOR) && there()) {
        return Ok(Outcome::Skipped(format!("no tools for it: apt-get install {}", EMULATOR.join(" "))));
    }
    if let failed @ Outcome::Failed(_) =
        succeed(cpu(root, "clippy", &[KERNELS, BACKEND]).args(["--", "-D", "warnings"]))?
    {
        return Ok(failed);
    }
    if *sample != Sample::All {
        return Ok(Outcome::Passed("compiled; `--all` emulates it".to_owned()));
    }
    for Processor { name, isa, kernels, conformance } in &PROCESSORS {
        println!("--- aarch64: {isa}, on QEMU's {name}");
        let targets =
            [(KERNELS, &["--lib"][..], kernels), (BACKEND, &["--test", "conformance"], conformance)];
        for (package, target, cases) in &targets {
            let mut test = cpu(root, "test", &[package]);
            test.args(*target).arg("--").args(**cases);
            test.env("QEMU_CPU", name).env("PAGURO_EXPECT_ISA", isa).env("PROPTEST_CASES", RANDOM_INPUTS);
            if let Outcome::Failed(how) = succeed(&mut test)? {
                return Ok(Outcome::Failed(format!("{isa}: {how}")));
            }
        }
    }
    Ok(Outcome::Passed("emulated".to_owned()))
}

/// `cargo {subcommand}` on packages of the CPU, for the target, with the emulator.
fn cpu(root: &Path, subcommand: &str, packages: &[&str]) -> Command {
    let mut command = cargo(root);
    command.args([subcommand, "--locked", "--target", TARGET]);
    for package in packages {
        command.args(["--package", package]);
    }
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", "qemu-aarch64 -L /usr/aarch64-linux-gnu");
    command
}

fn works(program: &str) -> bool {
    quiet(Command::new(program).arg("--version"))
}
