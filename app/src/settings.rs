//! Settings from flags and the environment, read once in `main`.

use std::{
    env,
    ffi::OsString,
    fmt,
    io::{self, IsTerminal},
    path::PathBuf,
};

use clap::CommandFactory;
use paguro_library::found::Stores;

use crate::{
    cli::{Cli, ColorChoice, Command},
    failure::{Failure, Outcome},
    mcp,
    tokenize::without_mark,
};

/// Settings of the program. The environment is not read after they are created.
#[derive(Debug)]
pub struct Settings {
    /// The command.
    pub command: Command,
    /// Properties of the terminal.
    pub terminal: Terminal,
    /// The model library.
    pub library: LibrarySettings,
    /// File of the chat's history; `None` without a home folder.
    pub history: Option<PathBuf>,
    /// File of the passed known-answer checks of GPUs; `None` without a home.
    pub gpu_checks: Option<PathBuf>,
    /// Default settings file of `paguro serve`; `None` without a home folder.
    pub serve_config: Option<PathBuf>,
    /// Folder of models and keys; `None` without a home folder.
    pub data: Option<PathBuf>,
    /// Environment of tool servers.
    pub tool_environment: Vec<(OsString, OsString)>,
    /// Warnings about environment variables.
    pub warnings: Vec<String>,
}

/// Folder of the models, and the hub.
#[derive(Clone)]
pub struct LibrarySettings {
    /// Folder of the library: `PAGURO_HOME`, or one in the user's data folder; `None` without a home folder.
    pub root: Option<PathBuf>,
    /// `HF_ENDPOINT`.
    pub hf_endpoint: Option<String>,
    /// `HF_TOKEN`.
    pub hf_token: Option<String>,
    /// Models of other programs.
    pub stores: Stores,
}

impl fmt::Debug for LibrarySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is a secret.
        f.debug_struct("LibrarySettings").field("root", &self.root).finish_non_exhaustive()
    }
}

/// Properties of the three standard streams.
#[derive(Clone, Copy, Debug)]
pub struct Terminal {
    /// True if standard input is a terminal.
    pub interactive: bool,
    /// True for colors on standard output.
    pub color: bool,
    /// True for colors on standard error.
    pub color_errors: bool,
    /// True for progress on standard error.
    pub progress: bool,
    /// True to omit status line and progress.
    pub quiet: bool,
    /// True for more output.
    pub verbose: bool,
}

impl Settings {
    /// Reads the settings from the parsed command line and the environment.
    pub fn new(cli: Cli) -> Self {
        let (wanted, capable) = (colors_wanted(), terminal_capable());
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
            verbose: cli.verbose,
        };
        let uses_server = matches!(cli.command, Command::Serve(_) | Command::Ps(_) | Command::Unload(_));
        let text = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let data = data_folder();
        let library = LibrarySettings {
            root: env::var_os("PAGURO_HOME")
                .filter(|path| !path.is_empty())
                .map(PathBuf::from)
                .or(data.clone()),
            hf_endpoint: text("HF_ENDPOINT"),
            hf_token: text("HF_TOKEN").or_else(stored_token),
            stores: stores(),
        };
        Self {
            command: cli.command,
            terminal,
            library,
            history: state_folder().map(|folder| folder.join("history")),
            gpu_checks: state_folder().map(|folder| folder.join("gpu-checks")),
            serve_config: config_folder().map(|folder| folder.join("serve.toml")),
            data,
            tool_environment: mcp::inherited(env::vars_os()),
            warnings: warnings(uses_server),
        }
    }

    /// Returns the file with API keys.
    ///
    /// # Errors
    /// There is no home folder.
    pub fn keys_file(&self) -> Outcome<PathBuf> {
        let none =
            || Failure::new("there is no home folder to keep keys in").hint("set HOME or XDG_DATA_HOME");
        let file = |folder: &PathBuf| folder.join("keys.json");
        let shared = self.data.as_ref().map(file);
        // A library has its own keys. An existing file of all servers stays in use.
        let own = self.library.root.as_ref().map(file);
        let own = own.filter(|own| own.exists() || !shared.as_ref().is_some_and(|shared| shared.exists()));
        own.or(shared).ok_or_else(none)
    }
}

/// Returns true unless NO_COLOR is set. An empty value counts as unset: <https://no-color.org>.
fn colors_wanted() -> bool {
    env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn terminal_capable() -> bool {
    env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Returns true if errors may have colors, before the command line is parsed.
pub fn colors_on_errors() -> bool {
    io::stderr().is_terminal() && colors_wanted() && terminal_capable()
}

/// Variables that are not read by a flag: those of `main`, the GPU backend, builds and tests.
const MORE_VARIABLES: [&str; 15] = [
    "PAGURO_HOME",
    "PAGURO_COMMIT",
    "PAGURO_SHARED",
    "PAGURO_BINARY",
    "PAGURO_SCHEMAS",
    "PAGURO_SCHEMAS_SEED",
    "PAGURO_EXPECT_ISA",
    "PAGURO_EXPECTED_TEXTS",
    "PAGURO_METAL_TEXT",
    "PAGURO_WGSL_TEXT",
    "PAGURO_SAMPLE",
    "PAGURO_FUZZ_CASE",
    "PAGURO_FUZZ_CASES",
    "PAGURO_FUZZ_SEED",
    "PAGURO_KILLS",
];

/// Variables of earlier versions and their replacements.
const REPLACED: [(&str, &str); 2] = [
    ("PAGURO_COOPERATIVE", "--numerics or PAGURO_NUMERICS"),
    ("PAGURO_HAND_OVER", "a check of the GPU when it is opened"),
];

/// Variables of Ollama's server, and their counterparts.
const OLLAMA: [(&str, &str); 8] = [
    ("OLLAMA_HOST", "PAGURO_HOST and PAGURO_PORT"),
    ("OLLAMA_KEEP_ALIVE", "PAGURO_KEEP_ALIVE"),
    ("OLLAMA_CONTEXT_LENGTH", "PAGURO_CTX"),
    ("OLLAMA_NUM_PARALLEL", "PAGURO_PARALLEL"),
    ("OLLAMA_MAX_QUEUE", "PAGURO_MAX_QUEUE"),
    ("OLLAMA_KV_CACHE_TYPE", "PAGURO_KV_DTYPE"),
    ("OLLAMA_ORIGINS", "PAGURO_CORS_ORIGIN"),
    ("OLLAMA_MAX_LOADED_MODELS", "PAGURO_MEMORY, which bounds the memory of all loaded models"),
];

/// Returns the warnings about variables.
fn warnings(uses_server: bool) -> Vec<String> {
    let names = || env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut all = unknown_variables(names());
    if uses_server {
        all.extend(variables_of_ollama(&names().collect::<Vec<_>>()));
    }
    all
}

/// Returns a note for each variable of Ollama without its counterpart.
fn variables_of_ollama(names: &[String]) -> Vec<String> {
    let is_set = |name: &str| names.iter().any(|other| other == name);
    let lacks = |ours: &str| {
        let mut ours = ours.split([' ', ',']).filter(|word| word.starts_with("PAGURO_"));
        !ours.any(is_set)
    };
    let unread = OLLAMA.iter().filter(|(theirs, ours)| is_set(theirs) && lacks(ours));
    unread.map(|(theirs, ours)| format!("{theirs} is Ollama's and is not read; here it is {ours}")).collect()
}

/// Returns a warning for each variable with our prefix that is not read.
fn unknown_variables(names: impl Iterator<Item = String>) -> Vec<String> {
    let known = known_variables();
    let warning = |name: &String| {
        if let Some((_, by)) = REPLACED.iter().find(|(old, _)| old == name) {
            return format!("{name} is set, and nothing reads it: it was replaced by {by}");
        }
        let near = known.iter().map(|other| (strsim::jaro_winkler(name, other), other));
        let near = near.filter(|(like, _)| *like > 0.9).max_by(|a, b| a.0.total_cmp(&b.0));
        let hint = near.map(|(_, other)| format!("; did you mean {other}?")).unwrap_or_default();
        format!("{name} is set, and nothing reads it{hint}")
    };
    let mut unknown: Vec<_> =
        names.filter(|name| name.starts_with("PAGURO_") && !known.contains(name)).collect();
    unknown.sort();
    unknown.iter().map(warning).collect()
}

/// Returns the variables of flags and [`MORE_VARIABLES`].
fn known_variables() -> Vec<String> {
    let cli = Cli::command();
    let arguments = cli.get_subcommands().flat_map(|command| command.get_arguments());
    let mut known: Vec<_> = arguments
        .filter_map(|argument| Some(argument.get_env()?.to_str()?.to_owned()))
        .chain(MORE_VARIABLES.map(str::to_owned))
        .collect();
    known.sort();
    known.dedup();
    known
}

/// Returns the token that `hf auth login` has stored: in `HF_TOKEN_PATH`, or in the folder of Hugging Face's programs.
fn stored_token() -> Option<String> {
    let path = |name: &str| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let home = || path("HOME").or_else(|| path("USERPROFILE"));
    let file = path("HF_TOKEN_PATH")
        .or_else(|| Some(path("HF_HOME")?.join("token")))
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface/token")))
        .or_else(|| Some(home()?.join(".cache/huggingface/token")))?;
    let token = without_mark(std::fs::read_to_string(file).ok()?).trim().to_owned();
    Some(token).filter(|token| !token.is_empty())
}

/// Folder of the models of Ollama where it is a service of Linux.
const OLLAMA_SERVICE: &str = "/usr/share/ollama/.ollama/models";

/// Returns the folders of other programs' models, where their settings and variables have them.
fn stores() -> Stores {
    let path = |name: &str| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let home = path("HOME").or_else(|| path("USERPROFILE"));
    let in_home = |end: &str| home.as_ref().map(|home| home.join(end));
    let ollama = match path("OLLAMA_MODELS") {
        Some(folder) => vec![folder],
        None => in_home(".ollama/models").into_iter().chain([OLLAMA_SERVICE.into()]).collect(),
    };
    // LM Studio can have its home and its models elsewhere.
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    let moved = in_home(".lmstudio-home-pointer").and_then(read).map(|text| PathBuf::from(text.trim()));
    let homes: Vec<_> = moved.into_iter().chain(in_home(".lmstudio")).collect();
    let chosen = homes.iter().filter_map(|home| {
        let settings: serde_json::Value = serde_json::from_str(&read(home.join("settings.json"))?).ok()?;
        Some(PathBuf::from(settings.get("downloadsFolder")?.as_str()?))
    });
    let usual = homes.iter().map(|home| home.join("models"));
    let lm_studio = chosen.chain(usual).chain(in_home(".cache/lm-studio/models")).collect();
    let hf_cache = path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(path("HF_HOME")?.join("hub")))
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| in_home(".cache/huggingface/hub"));
    Stores { ollama, lm_studio, hf_cache: hf_cache.into_iter().collect() }
}

/// Returns the folder of state between runs: XDG's state folder, or its equivalent.
fn state_folder() -> Option<PathBuf> {
    folder("LOCALAPPDATA", "XDG_STATE_HOME", ".local/state")
}

/// Returns the user's folder of settings.
fn config_folder() -> Option<PathBuf> {
    folder("APPDATA", "XDG_CONFIG_HOME", ".config")
}

/// Returns the user's folder of data.
fn data_folder() -> Option<PathBuf> {
    folder("LOCALAPPDATA", "XDG_DATA_HOME", ".local/share")
}

/// Returns our folder in the one of a variable, or under the home folder.
fn folder(windows: &str, xdg: &str, under_home: &str) -> Option<PathBuf> {
    // The specification requires to ignore relative paths.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = if cfg!(windows) {
        absolute(windows)
    } else {
        absolute(xdg).or_else(|| Some(absolute("HOME")?.join(under_home)))
    };
    Some(base?.join("paguro"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_nothing_reads_are_named() {
        let names = ["PAGURO_PROT", "PAGURO_PORT", "PAGURO_FROBNICATE_ALL", "HOME", "PAGURO_HOME"];
        let warnings = unknown_variables(names.map(str::to_owned).into_iter());
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].starts_with("PAGURO_FROBNICATE_ALL is set"));
        assert!(warnings[1].contains("did you mean PAGURO_PORT?"));
        for (old, by) in REPLACED {
            let warnings = unknown_variables([old.to_owned()].into_iter());
            assert!(warnings[0].contains(old) && warnings[0].contains(by), "{warnings:?}");
        }
    }

    #[test]
    fn variables_of_ollama_have_a_counterpart() {
        let notes = |names: &[&str]| {
            variables_of_ollama(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(
            notes(&["OLLAMA_HOST", "HOME"]),
            ["OLLAMA_HOST is Ollama's and is not read; here it is PAGURO_HOST and PAGURO_PORT"]
        );
        assert!(notes(&["OLLAMA_HOST", "PAGURO_PORT", "OLLAMA_MODELS"]).is_empty());
        let known = known_variables();
        for (_, ours) in OLLAMA {
            let words = ours.split([' ', ',']).filter(|word| word.starts_with("PAGURO_"));
            assert!(words.clone().count() > 0 && words.clone().all(|word| known.contains(&word.to_owned())));
        }
    }

    /// A variable that is read and missing in the list would cause a wrong warning.
    #[test]
    fn all_variables_in_the_code_are_known() {
        let known = known_variables();
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut folders = vec![root.join("app"), root.join("crates")];
        let mut seen = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("settings.rs") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    for quoted in text.split("\"PAGURO_").skip(1) {
                        let rest = quoted.split(|c: char| !c.is_ascii_uppercase() && c != '_').next();
                        let name = format!("PAGURO_{}", rest.unwrap_or_default());
                        seen += 1;
                        assert!(
                            ["PAGURO_", "PAGURO_PROT"].contains(&&*name) || known.contains(&name),
                            "{} reads {name}, which MORE_VARIABLES lacks",
                            path.display()
                        );
                    }
                }
            }
        }
        assert!(seen > 20);
    }
}
