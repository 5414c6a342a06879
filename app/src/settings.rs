//! Everything that flags and the environment decide, read once, in `main`.

use std::{
    env, fmt,
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
    /// The model library.
    pub library: LibrarySettings,
    /// Where the chat keeps its history of lines; `None` without a home.
    pub history: Option<PathBuf>,
}

/// Where models are kept, and where more of them come from.
#[derive(Clone)]
pub struct LibrarySettings {
    /// The library's folder: `PAGURO_HOME`, or one in the user's data folder; `None` without a home.
    pub root: Option<PathBuf>,
    /// `HF_ENDPOINT`.
    pub hf_endpoint: Option<String>,
    /// `HF_TOKEN`.
    pub hf_token: Option<String>,
}

impl fmt::Debug for LibrarySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the token, which is a secret.
        f.debug_struct("LibrarySettings").field("root", &self.root).finish_non_exhaustive()
    }
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
        let text = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let library = LibrarySettings {
            root: env::var_os("PAGURO_HOME")
                .filter(|path| !path.is_empty())
                .map(PathBuf::from)
                .or_else(|| folder("XDG_DATA_HOME", ".local/share")),
            hf_endpoint: text("HF_ENDPOINT"),
            hf_token: text("HF_TOKEN"),
        };
        let history = folder("XDG_STATE_HOME", ".local/state").map(|folder| folder.join("history"));
        Self { command: cli.command, terminal, library, history }
    }
}

/// Our part of one of XDG's folders (state: what programs remember between runs; data: what is the user's), and their
/// nearest kin elsewhere.
fn folder(xdg: &str, in_home: &str) -> Option<PathBuf> {
    // The specification has relative paths ignored.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = if cfg!(windows) {
        absolute("LOCALAPPDATA")
    } else {
        absolute(xdg).or_else(|| Some(absolute("HOME")?.join(in_home)))
    };
    Some(base?.join("paguro"))
}
