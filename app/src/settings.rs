//! Everything that flags and the environment decide, read once, in `main`.

use std::{
    env,
    io::{self, IsTerminal},
    path::PathBuf,
};

use crate::cli::{Cli, ColorChoice, Command};

/// What the program works from; nothing reads the environment after this has been made.
#[derive(Debug)]
pub struct Settings {
    /// What to do.
    pub command: Command,
    /// How to talk to people.
    pub terminal: Terminal,
    /// Where the chat keeps its history of lines; `None` without a home.
    pub history: Option<PathBuf>,
}

/// What the three standard streams are, and what may be written to them.
#[derive(Clone, Copy, Debug)]
pub struct Terminal {
    /// Standard input is a terminal: a person is there to chat.
    pub interactive: bool,
    /// Colors on standard output.
    pub color: bool,
    /// Colors on standard error.
    pub color_errors: bool,
    /// Moving progress on standard error.
    pub progress: bool,
    /// No status line and no progress.
    pub quiet: bool,
}

impl Settings {
    /// From the parsed command line and the environment.
    pub fn new(cli: Cli) -> Self {
        // An empty NO_COLOR counts as unset: https://no-color.org.
        let wanted = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let capable = env::var_os("TERM").is_none_or(|term| term != "dumb");
        let color = |tty: bool| match cli.color {
            ColorChoice::Auto => tty && wanted && capable,
            ColorChoice::Always => true,
            ColorChoice::Never => false,
        };
        let errors_tty = io::stderr().is_terminal();
        let terminal = Terminal {
            interactive: io::stdin().is_terminal(),
            color: color(io::stdout().is_terminal()),
            color_errors: color(errors_tty),
            progress: errors_tty && capable && !cli.quiet,
            quiet: cli.quiet,
        };
        Self { command: cli.command, terminal, history: state_folder().map(|folder| folder.join("history")) }
    }
}

/// Where programs keep what they remember between runs: XDG's state folder, and its nearest kin elsewhere.
fn state_folder() -> Option<PathBuf> {
    // The specification has relative paths ignored.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = if cfg!(windows) {
        absolute("LOCALAPPDATA")
    } else {
        absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))
    };
    Some(base?.join("paguro"))
}
