//! `cargo xtask test macos`: the whole workspace for macOS, including the GPU backend, checked and linted on another
//! system.
//!
//! It neither links nor runs. The standard library is a rustup target, or is built from Debian's sources by Debian's
//! compiler, whose packages CI machines can install when rustup's servers are unreachable.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::Result;

use crate::{
    ci::{cargo, install, rust_target, succeed, without_package},
    table::Outcome,
};

const TARGET: &str = "aarch64-apple-darwin";

/// Debian's compiler, its linter, and the sources of its standard library.
const DEBIAN: [&str; 4] = ["cargo-web", "rust-web-clippy", "rust-web-src", "rustc-web"];
/// Folder of their programs.
const DEBIAN_BIN: &str = "/usr/bin";

/// The step.
pub fn run(root: &Path) -> Result<Outcome> {
    if cfg!(target_os = "macos") {
        return Ok(Outcome::Skipped("this machine is one: `clippy` and `test` have done it".to_owned()));
    }
    let mut check = if rust_target(TARGET) {
        let mut command = cargo(root);
        command.arg("clippy");
        command
    } else if debian_compiler() || install(&DEBIAN) && debian_compiler() {
        let mut command = Command::new(format!("{DEBIAN_BIN}/cargo"));
        command.current_dir(root).args(["clippy", "-Zbuild-std=std,panic_abort"]);
        without_package(&mut command);
        // Variables that `cargo` of a toolchain sets for its children would lead this one astray.
        for name in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"] {
            command.env_remove(name);
        }
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{DEBIAN_BIN}:{path}")).env("RUSTC", format!("{DEBIAN_BIN}/rustc"));
        // Its release is a stable one, and building the standard library is not stable.
        command.env("RUSTC_BOOTSTRAP", "1");
        command
    } else {
        let packages = DEBIAN.join(" ");
        return Ok(Outcome::Skipped(format!(
            "no compiler: rustup target add {TARGET}, or apt-get install {packages}"
        )));
    };
    check.args(["--workspace", "--all-targets", "--locked", "--target", TARGET]);
    check.arg("--target-dir").arg(root.join("target/macos"));
    // C libraries would only compile to objects that are not linked, and Apple's headers are not available.
    for tool in ["CC", "CXX", "AR"] {
        check.env(format!("{tool}_{}", TARGET.replace('-', "_")), "true");
    }
    check.env("SDKROOT", "/").args(["--", "-D", "warnings"]);
    succeed(&mut check)
}

/// Returns true if Debian's compiler is complete and recent enough for this workspace.
fn debian_compiler() -> bool {
    let program = |name: &str| Path::new(DEBIAN_BIN).join(name);
    let says = |arguments: &[&str]| {
        let output = Command::new(program("rustc")).args(arguments).stderr(Stdio::null()).output();
        output.map_or_else(
            |_| String::new(),
            |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        )
    };
    let sources = Path::new(&says(&["--print", "sysroot"])).join("lib/rustlib/src/rust/library/std");
    sources.is_dir()
        && program("cargo").is_file()
        && program("cargo-clippy").is_file()
        && release(&says(&["--version"])) >= release(env!("CARGO_PKG_RUST_VERSION"))
}

/// The two numbers of a release of Rust, in `1.96` and in `rustc 1.96.0 (…)`.
fn release(text: &str) -> Option<[u32; 2]> {
    let version = text.trim_start_matches("rustc ");
    let mut numbers = version.split(['.', ' ']).map_while(|number| number.parse().ok());
    Some([numbers.next()?, numbers.next()?])
}

#[cfg(test)]
mod tests {
    use super::release;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        assert_eq!(release("rustc 1.96.0 (ac68faa20 2026-05-25)"), Some([1, 96]));
        assert!(release("rustc 1.100.1") > release("1.96") && release("") < release("1.96"));
    }
}
