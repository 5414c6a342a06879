//! Other people's clients against a running server: `app/tests/clients/README.md`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{ci::quiet, table::Outcome};

#[path = "../../app/tests/common/scripted.rs"]
mod scripted;

/// Installs the clients and runs their tests, with the server that `cargo` builds.
pub fn run(root: &Path, mut cargo: Command) -> Result<Outcome> {
    let target = target(root);
    let binary = program(&target, &mut cargo)?;
    let tests = root.join("app/tests/clients");
    let mut skipped = Vec::new();
    let scripted = target.join("clients/scripted");
    write_models(root, &scripted)?;
    for (install, language) in [(python as Install, "python"), (node, "node"), (node, "programs")] {
        let installed = target.join("clients").join(language);
        fs::create_dir_all(&installed)?;
        match install(&tests.join(language), &installed)? {
            Err(reason) => skipped.push(reason),
            Ok(mut tests) => {
                let status = tests
                    .env(PROGRAM, &binary)
                    .env("PAGURO_SCRIPTED", &scripted)
                    // Without the folder, tests with images are skipped.
                    .env("PAGURO_SEES", root.join("../shared/model/vision/qwen3vl-hf"))
                    .status()?;
                if !status.success() {
                    return Ok(Outcome::Failed(format!("the {language} clients: {status}")));
                }
            }
        }
    }
    Ok(match skipped.len() {
        3 => Outcome::Skipped(skipped.join("; ")),
        _ => Outcome::Passed(skipped.join("; ")),
    })
}

/// Writes the models whose answers are the scripts of the tests with agents.
fn write_models(root: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let tales = fs::read(root.join("models/tales/tales-Q8_0.gguf"))?;
    for script in fs::read_dir(root.join("app/tests/serve/agents"))? {
        let script = script?.path();
        let recorded: Value = serde_json::from_slice(&fs::read(&script)?)?;
        let answers = recorded["answers"].as_array().context("a script without `answers`")?;
        let answers: Vec<_> = answers.iter().filter_map(Value::as_str).collect();
        let name = script.file_stem().context("a script without a name")?;
        fs::write(folder.join(name).with_extension("gguf"), scripted::model(&tales, &answers))?;
    }
    Ok(())
}

/// Writes a model with these answers.
pub fn write_model(tales: &Path, answers: &[&str], path: &Path) -> Result<()> {
    Ok(fs::write(path, scripted::model(&fs::read(tales)?, answers))?)
}

/// Returns the folder of build outputs.
pub fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// Variable with the path of a program that is built already.
pub const PROGRAM: &str = "PAGURO_BINARY";

/// Builds the program as the tests of the workspace have it: built alone, its dependencies' features would differ, and
/// most of them be built once more. Returns its path.
pub fn program(target: &Path, cargo: &mut Command) -> Result<PathBuf> {
    if let Some(program) = std::env::var_os(PROGRAM) {
        return Ok(program.into());
    }
    let build = ["test", "--workspace", "--test", "serve", "--no-run", "--locked"];
    let built = cargo.args(build).status().context("cargo does not start")?;
    if !built.success() {
        bail!("cargo test --no-run: {built}");
    }
    Ok(target.join("debug").join(format!("paguro{}", std::env::consts::EXE_SUFFIX)))
}

/// Installs the clients that the tests in the first folder need into the second. Returns the command that runs the
/// tests, or the reason for which that is not possible here.
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

/// npm installs beside `package.json`, so the tests and the server's module are copied to where that is.
pub fn node(tests: &Path, installed: &Path) -> Result<Result<Command, String>> {
    if !quiet(Command::new("node").arg("--version")) || !quiet(Command::new("npm").arg("--version")) {
        return Ok(Err("no Node with npm (apt-get install npm)".into()));
    }
    for folder in [Some(tests), tests.parent()].into_iter().flatten() {
        for file in fs::read_dir(folder)? {
            let path = file?.path();
            let is_needed =
                path.extension().is_some_and(|extension| extension == "mjs" || extension == "json");
            if let Some(name) = path.file_name().filter(|_| is_needed) {
                fs::copy(&path, installed.join(name))?;
            }
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
