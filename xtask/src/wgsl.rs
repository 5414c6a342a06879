//! `cargo xtask test wgsl`: another reading of the GPU's kernels, by Dawn's compiler, which npm has (`crates/backend-wgpu/tests/dawn`).

use std::{fs, path::Path, process::Command};

use anyhow::Result;

use crate::{clients, table::Outcome};

/// Writes one kernel of each name and lets Dawn read them.
pub fn run(root: &Path, mut cargo: Command) -> Result<Outcome> {
    let target = clients::target(root);
    let (installed, kernels) = (target.join("dawn"), target.join("wgsl"));
    fs::create_dir_all(&installed)?;
    let mut tests = match clients::node(&root.join("crates/backend-wgpu/tests/dawn"), &installed)? {
        Err(reason) => return Ok(Outcome::Skipped(reason)),
        Ok(tests) => tests,
    };
    // Kernels of earlier runs must not be checked again.
    if kernels.exists() {
        fs::remove_dir_all(&kernels)?;
    }
    cargo.args(["test", "--workspace", "--locked", "--test", "metal", "kernels_for_another_compiler"]);
    let written = cargo.env("PAGURO_WGSL_TEXT", &kernels).status()?;
    if !written.success() {
        return Ok(Outcome::Failed(format!("the kernels are not written: {written}")));
    }
    if !kernels.exists() {
        return Ok(Outcome::Skipped("no Vulkan driver to describe kernels for".to_owned()));
    }
    let status = tests.env("PAGURO_WGSL_TEXT", &kernels).status()?;
    Ok(match status.success() {
        true => Outcome::Passed(String::new()),
        false => Outcome::Failed(format!("Dawn refuses kernels: {status}")),
    })
}
