//! Gives release builds the commit that they are made of, where git knows it: `paguro --version` shows it. Debug builds
//! go without, so that a commit does not build them again. PAGURO_COMMIT says it for builds without git.

use std::{env, process::Command};

fn main() {
    println!("cargo::rerun-if-env-changed=PAGURO_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("PAGURO_COMMIT").is_some() || env::var("PROFILE").is_ok_and(|profile| profile != "release")
    {
        return;
    }
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
    };
    for path in ["HEAD", "logs/HEAD"] {
        if let Some(file) = git(&["rev-parse", "--git-path", path]) {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    if let Some(commit) = git(&["log", "-1", "--format=%h %cs"]) {
        println!("cargo::rustc-env=PAGURO_COMMIT={commit}");
    }
}
