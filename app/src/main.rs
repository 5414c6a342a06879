//! The `paguro` binary: the command line, the settings, and the one place that names concrete devices.

mod cli;
mod failure;
mod interrupt;
mod models;
mod output;
mod run;
mod settings;
mod terminal;
mod units;

use std::{io::Write, process::ExitCode};

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
                let _ = std::io::stderr().write_all(report.as_bytes());
            }
            failure.exit_code()
        }
    }
}

fn execute(settings: &Settings) -> Outcome<()> {
    match &settings.command {
        _ => Ok(()),
    }
}
