//! `cargo xtask test packaging`: the install script against a server of this machine, the formula, shell scripts, workflows, and the
//! chart of the README.

use std::{fs, path::Path, process::Command};

use anyhow::Result;

use crate::{
    ci::{install, quiet, succeed},
    clients,
    table::Outcome,
};

/// Shell scripts that shellcheck reads.
const SCRIPTS: [&str; 8] = [
    ".ci/run",
    "bench/build_llama.sh",
    "bench/compare.sh",
    "bench/gpu.sh",
    "packaging/archive.sh",
    "packaging/formula.sh",
    "packaging/healthy.sh",
    "packaging/install.sh",
];

/// Runs all parts for which this machine has the tools; the others are named in the outcome.
///
/// # Errors
/// A tool that exists does not start.
pub fn run(root: &Path) -> Result<Outcome> {
    let python = |script: &str| {
        let mut command = Command::new("python3");
        command.arg(script).current_dir(root).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    };
    let mut skipped = Vec::new();
    if quiet(Command::new("python3").arg("--version")) {
        for command in [&mut python("packaging/test_packaging.py"), python("bench/chart.py").arg("--check")] {
            if let failed @ Outcome::Failed(_) = succeed(command)? {
                return Ok(failed);
            }
        }
    } else {
        skipped.push("no Python for the install script's tests".to_owned());
    }
    let shellcheck = || quiet(Command::new("shellcheck").arg("--version"));
    if shellcheck() || install(&["shellcheck"]) && shellcheck() {
        let mut command = Command::new("shellcheck");
        if let failed @ Outcome::Failed(_) = succeed(command.args(SCRIPTS).current_dir(root))? {
            return Ok(failed);
        }
    } else {
        skipped.push("no shellcheck (apt-get install shellcheck)".to_owned());
    }
    let installed = clients::target(root).join("actionlint");
    fs::create_dir_all(&installed)?;
    match clients::node(&root.join("packaging/lint"), &installed)? {
        Ok(mut tests) => {
            if let failed @ Outcome::Failed(_) = succeed(tests.env("PAGURO_ROOT", root))? {
                return Ok(failed);
            }
        }
        Err(reason) => skipped.push(format!("workflows: {reason}")),
    }
    Ok(match skipped.len() {
        3 => Outcome::Skipped(skipped.join("; ")),
        _ => Outcome::Passed(skipped.join("; ")),
    })
}
