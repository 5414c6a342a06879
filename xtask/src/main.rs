//! The project's tests and chores: `cargo xtask <command>`.

mod aarch64;
mod beside;
mod ci;
mod clients;
mod junit;
mod listing;
mod macos;
mod output;
mod packaging;
mod sample;
mod seed;
mod table;
mod tests;
mod tidy;
mod ui;
mod wgsl;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

const HELP: &str = "\
usage: cargo xtask <command>

  test [STEP...] every check and test that a change needs, or only these steps:
                 fmt, tidy, clippy, test, requests, gpu, macos, fuzz, doc, aarch64, wgsl, ui,
                 clients, packaging
                 --all      every slow variant of a test and every step, not the sample that
                            the files of the crates draw
  tidy           the project's own rules: arrows between crates, invariants, lengths of files,
                 words, links
  clients        other people's clients and programs against a server, as the step of `test`
  bench [ARGS]   runs Paguro and llama.cpp alternately (bench/compare.sh with these arguments)
  help           this text
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let root = root();
    let outcome = match arguments.split_first().map(|(command, rest)| (command.as_str(), rest)) {
        // `ci` is the older name.
        Some(("test" | "ci", steps)) => ci::run(&root, steps),
        Some((step @ ("tidy" | "clients"), [])) => ci::run(&root, &[step.to_owned()]),
        Some(("bench", rest)) => bench(&root, rest),
        Some(("help" | "-h" | "--help", _)) => {
            print!("{HELP}");
            Ok(true)
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench(root: &Path, arguments: &[String]) -> anyhow::Result<bool> {
    let script = root.join("bench/compare.sh");
    Ok(std::process::Command::new(script).args(arguments).current_dir(root).status()?.success())
}

/// The workspace's folder.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
