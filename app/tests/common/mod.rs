//! Runs of the built binary.
#![allow(dead_code)] // each test file uses its part

pub mod adapters;

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

/// A prompt whose answer is a story.
pub const STORY: &str = "Tell me a story about a shy fox who lost a key";

/// The binary, without the environment of the test.
pub fn paguro(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paguro"));
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("PAGURO_") || name.starts_with("HF_") || name == "NO_COLOR" {
            command.env_remove(&*name);
        }
    }
    // Not the developer's own.
    command.env("PAGURO_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-library"));
    command.env("HF_TOKEN_PATH", Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-token"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Result of a run.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// Standard output of a run that must have succeeded.
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.out
    }

    /// Its only line, as JSON.
    pub fn json(self) -> serde_json::Value {
        let out = self.ok();
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// Its lines, each as JSON.
    pub fn json_lines(self) -> Vec<serde_json::Value> {
        self.ok().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

/// Runs the binary to its end.
pub fn run(args: &[&str]) -> Ran {
    paguro(args).output().unwrap().into()
}

/// Runs it with text on standard input.
pub fn run_with_input(args: &[&str], input: &str) -> Ran {
    let mut child = paguro(args).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap().into()
}

/// A greedy answer of the embedded model.
pub fn greedy(args: &[&str]) -> serde_json::Value {
    run(&[&["run", "--json", "--temperature", "0"], args].concat()).json()
}

/// This machine's first GPU, which may be a software driver; prints a note and returns `None` without one.
#[cfg(any(feature = "gpu", target_os = "macos"))]
pub fn gpu() -> Option<paguro_backend_wgpu::Gpu> {
    use paguro_backend_wgpu::{Gpu, GpuOptions};

    let gpu = Gpu::open(0, GpuOptions { poison: true, ..GpuOptions::default() });
    gpu.inspect_err(|error| println!("skipped: models on a GPU: {error}")).ok()
}

/// Variants of a slow case on this machine's first GPU: all on a real one, a sample on a software driver.
#[cfg(any(feature = "gpu", target_os = "macos"))]
pub fn draw() -> paguro_backend_conformance::Draw {
    use paguro_backend_conformance::Draw;

    let is_software = paguro_backend_wgpu::gpus().first().is_some_and(|gpu| gpu.is_software);
    if is_software { Draw::from_env() } else { Draw::All }
}

/// A file of the shared data beside the checkout; prints a note and returns `None` if it is absent.
pub fn shared(path: &str) -> Option<PathBuf> {
    let folder = env::var_os("PAGURO_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let file = folder.join(path);
    if fs::exists(&file).unwrap_or(false) {
        return Some(file);
    }
    println!("skipped: shared/{path} not present");
    None
}
