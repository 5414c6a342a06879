//! The arrows of ARCHITECTURE.md: which crate of the workspace may use which.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Report;

/// A crate, and the crates of the workspace on which it may depend in any kind of dependency, including tests. A `*`
/// ends a prefix of names.
const ARROWS: &[(&str, &[&str])] = &[
    ("paguro", &["paguro-*"]),
    (
        "paguro-server",
        &[
            "paguro-engine",
            "paguro-model",
            "paguro-model-output",
            "paguro-library",
            "paguro-mcp",
            "paguro-vision",
        ],
    ),
    ("paguro-model-output", &[]),
    ("paguro-mcp", &[]),
    ("paguro-library", &[]),
    (
        "paguro-engine",
        &[
            "paguro-grammar",
            "paguro-model",
            "paguro-backend",
            "paguro-backend-conformance",
            "paguro-kv-store",
            "paguro-vision",
        ],
    ),
    // The tests read the tokens of a model.
    ("paguro-grammar", &["paguro-backend", "paguro-model"]),
    ("paguro-kv-store", &[]),
    ("paguro-model", &["paguro-backend", "paguro-vision"]),
    ("paguro-vision", &[]),
    ("paguro-quantize", &["paguro-model", "paguro-backend"]),
    ("paguro-backend-conformance", &["paguro-backend"]),
    // Its tests divide models among devices of its own.
    ("paguro-backend-wgpu", &["paguro-backend", "paguro-backend-conformance", "paguro-backend-stages"]),
    ("paguro-backend-cpu", &["paguro-cpu-kernels", "paguro-backend", "paguro-backend-conformance"]),
    ("paguro-backend-*", &["paguro-backend", "paguro-backend-conformance"]),
    ("paguro-cpu-kernels", &["paguro-backend", "paguro-backend-conformance"]),
    ("paguro-backend", &["paguro-backend-conformance"]),
    ("xtask", &[]),
];

pub fn check(root: &Path, report: &mut Report) -> Result<()> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps", "--locked"])
        .current_dir(root)
        .output()
        .context("cargo metadata does not start")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    report.errors.extend(broken(&metadata));
    Ok(())
}

/// The dependencies in `cargo metadata`'s answer that no arrow allows.
fn broken(metadata: &Value) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let packages = list(&metadata["packages"]);
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let members: Vec<String> = packages.iter().map(name).collect();
    let mut errors = Vec::new();
    for package in &packages {
        let from = name(package);
        let Some((_, allowed)) = ARROWS.iter().find(|(pattern, _)| stands_for(pattern, &from)) else {
            errors.push(format!("crate `{from}` has no place in the arrows of xtask/src/tidy/arrows.rs"));
            continue;
        };
        for to in list(&package["dependencies"]).iter().map(name) {
            if members.contains(&to) && !allowed.iter().any(|pattern| stands_for(pattern, &to)) {
                let may = if allowed.is_empty() { "none".to_owned() } else { allowed.join(", ") };
                errors
                    .push(format!("`{from}` must not depend on `{to}`; of the workspace it may use: {may}"));
            }
        }
    }
    errors
}

fn stands_for(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workspace(dependencies: &[(&str, &[&str])]) -> Value {
        let package = |(name, uses): &(&str, &[&str])| {
            let uses: Vec<_> = uses.iter().map(|name| json!({ "name": name })).collect();
            json!({ "name": name, "dependencies": uses })
        };
        json!({ "packages": dependencies.iter().map(package).collect::<Vec<_>>() })
    }

    #[test]
    fn arrows_that_are_drawn_pass() {
        let good = workspace(&[
            ("paguro", &["clap", "paguro-engine", "paguro-backend-cpu"]),
            ("paguro-engine", &["paguro-grammar", "paguro-model", "paguro-backend", "tokio"]),
            ("paguro-grammar", &["paguro-backend", "llguidance"]),
            ("paguro-model", &["paguro-backend", "paguro-vision"]),
            ("paguro-vision", &[]),
            ("paguro-quantize", &["paguro-model", "paguro-backend"]),
            ("paguro-backend-cpu", &["paguro-cpu-kernels", "paguro-backend"]),
            ("paguro-cpu-kernels", &["paguro-backend"]),
            ("paguro-backend", &["half"]),
        ]);
        assert_eq!(broken(&good), Vec::<String>::new());
    }

    #[test]
    fn arrows_that_are_not_drawn_fail() {
        let bad = workspace(&[
            ("paguro-engine", &["paguro-backend-cpu"]),
            ("paguro-backend", &["paguro-model"]),
            ("paguro-backend-cpu", &["paguro-backend"]),
            ("paguro-model", &[]),
            ("helper", &[]),
        ]);
        assert_eq!(
            broken(&bad),
            [
                "`paguro-engine` must not depend on `paguro-backend-cpu`; of the workspace it may use: paguro-grammar, paguro-model, paguro-backend, paguro-backend-conformance, paguro-kv-store, paguro-vision",
                "`paguro-backend` must not depend on `paguro-model`; of the workspace it may use: paguro-backend-conformance",
                "crate `helper` has no place in the arrows of xtask/src/tidy/arrows.rs",
            ]
        );
    }
}
