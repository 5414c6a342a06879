//! The `paguro` binary: the command line, the settings, and the one place that names concrete devices.

mod bench;
mod cli;
mod devices;
mod eval;
mod failure;
mod inspect;
mod interrupt;
mod load;
mod models;
mod output;
mod run;
mod settings;
mod terminal;
mod tokenize;
mod units;

use std::{
    io::{Write, stderr},
    process::ExitCode,
};

use clap::Parser;

use cli::{Cli, Command};
use failure::Outcome;
use settings::Settings;

fn main() -> ExitCode {
    let settings = Settings::new(Cli::parse());
    match execute(&settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(report) = failure.report(settings.terminal.color_errors) {
                // Nobody may be listening there; the exit code says it, too.
                let _ = stderr().write_all(report.as_bytes());
            }
            failure.exit_code()
        }
    }
}

fn execute(settings: &Settings) -> Outcome<()> {
    let terminal = settings.terminal;
    match &settings.command {
        Command::Run(args) => run::run(args, terminal, settings.history.as_deref()),
        Command::Bench(args) => bench::bench(args, terminal),
        Command::Eval(args) => eval::eval(args, terminal),
        Command::Tokenize(args) => tokenize::tokenize(args),
        Command::Inspect(args) => inspect::inspect(args, terminal),
        Command::Devices(args) => devices::devices(args, terminal),
    }
}
