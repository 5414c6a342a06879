//! The full version, for bug reports, and shell completions and the manual.

use std::io::Write;

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::{cli::Cli, devices::Devices, failure::Outcome, output::Output};

/// Returns the version: `paguro 0.1.0 (45791ba 2026-11-25, avx512vnni, no GPU kernels)`.
pub fn long(devices: &Devices) -> String {
    let commit = option_env!("PAGURO_COMMIT").filter(|commit| !commit.is_empty()).map(str::to_owned);
    let parts: Vec<_> = commit.into_iter().chain(devices.summary()).collect();
    format!("paguro {} ({})", env!("CARGO_PKG_VERSION"), parts.join(", "))
}

/// Prints completions for a shell.
///
/// # Errors
/// The error of standard output.
pub fn completions(shell: Shell) -> Outcome<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "paguro", &mut script);
    Output::new().bytes(&script)
}

/// Prints the manual: a page with a section for each command.
///
/// # Errors
/// The error of standard output.
pub fn manual() -> Outcome<()> {
    let mut cli = Cli::command();
    cli.build();
    let mut page = Vec::new();
    clap_mangen::Man::new(cli.clone()).render(&mut page)?;
    for command in cli.get_subcommands().filter(|command| !command.is_hide_set()) {
        section(command, &mut page)?;
    }
    Output::new().bytes(&page)
}

/// Writes one command as a section of the page.
fn section(command: &Command, page: &mut Vec<u8>) -> Outcome<()> {
    let man = clap_mangen::Man::new(command.clone());
    writeln!(page, ".SH \"PAGURO {}\"", command.get_name().to_uppercase())?;
    let mut body = Vec::new();
    man.render_synopsis_section(&mut body)?;
    man.render_description_section(&mut body)?;
    man.render_options_section(&mut body)?;
    man.render_extra_section(&mut body)?;
    // Sections of the command become subsections.
    page.extend(String::from_utf8_lossy(&body).replace("\n.SH ", "\n.SS ").bytes());
    Ok(())
}
