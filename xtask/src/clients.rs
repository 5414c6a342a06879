//! Other people's clients against a running server: `app/tests/clients/README.md`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{ci::quiet, table::Outcome};

/// Installs the clients and runs their tests, with the server that `cargo` builds.
pub fn run(root: &Path, mut cargo: Command) -> Result<Outcome> {
    let target = target(root);
    let binary = program(&target, &mut cargo)?;
    let tests = root.join("app/tests/clients");
    let mut skipped = Vec::new();
    for (install, language) in [(python as Install, "python"), (node, "node")] {
        let installed = target.join("clients").join(language);
        fs::create_dir_all(&installed)?;
        match install(&tests.join(language), &installed)? {
            Err(reason) => skipped.push(reason),
            Ok(mut tests) => {
                let status = tests.env("PAGURO_BINARY", &binary).status()?;
                if !status.success() {
                    return Ok(Outcome::Failed(format!("the {language} clients: {status}")));
                }
            }
        }
    }
    Ok(match skipped.len() {
        2 => Outcome::Skipped(skipped.join("; ")),
        _ => Outcome::Passed(skipped.join("; ")),
    })
}

/// The folder of what is built.
pub fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// Builds the program as the tests of the workspace have it: built alone, its dependencies' features would differ, and
/// most of them be built once more. Returns its path.
pub fn program(target: &Path, cargo: &mut Command) -> Result<PathBuf> {
    let build = ["test", "--workspace", "--test", "serve", "--no-run", "--locked"];
    let built = cargo.args(build).status().context("cargo does not start")?;
    if !built.success() {
        bail!("cargo test --no-run: {built}");
    }
    Ok(target.join("debug").join(format!("paguro{}", std::env::consts::EXE_SUFFIX)))
}

/// Installs the clients that the tests in the first folder need into the second. Gives what runs the tests, or why
/// that is not possible here.
type Install = fn(&Path, &Path) -> Result<Result<Command, String>>;

fn python(tests: &Path, installed: &Path) -> Result<Result<Command, String>> {
    let bin = installed.join(if cfg!(windows) { "Scripts" } else { "bin" });
    let python = bin.join(format!("python{}", std::env::consts::EXE_SUFFIX));
    if !quiet(Command::new(&python).args(["-m", "pip", "--version"]))
        && !quiet(Command::new("python3").args(["-m", "venv"]).arg(installed))
    {
        return Ok(Err("no Python with venv and pip (apt-get install python3-venv)".into()));
    }
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]);
    if !pip.arg(tests.join("requirements.txt")).status()?.success() {
        return Ok(Err("pip cannot install the Python clients".into()));
    }
    let mut command = Command::new(python);
    command.args(["-m", "unittest", "-v"]).current_dir(tests).env("PYTHONDONTWRITEBYTECODE", "1");
    Ok(Ok(command))
}

/// npm installs beside `package.json`, so the tests are copied to where that is.
pub fn node(tests: &Path, installed: &Path) -> Result<Result<Command, String>> {
    if !quiet(Command::new("node").arg("--version")) || !quiet(Command::new("npm").arg("--version")) {
        return Ok(Err("no Node with npm (apt-get install npm)".into()));
    }
    for file in fs::read_dir(tests)? {
        let file = file?;
        if file.file_type()?.is_file() {
            fs::copy(file.path(), installed.join(file.file_name()))?;
        }
    }
    let npm = ["install", "--silent", "--no-audit", "--no-fund"];
    if !Command::new("npm").args(npm).current_dir(installed).status()?.success() {
        return Ok(Err("npm cannot install the Node clients".into()));
    }
    let mut command = Command::new("node");
    command.arg("--test").current_dir(installed);
    Ok(Ok(command))
}
