//! The `paguro` binary: the command line, the settings, and the one place that names concrete devices.

mod adapters;
mod assistant;
mod bench;
mod cache;
mod cli;
mod devices;
mod embed;
mod eval;
mod failure;
mod imatrix;
mod inspect;
mod interrupt;
mod keys;
mod library;
mod load;
mod mcp;
mod models;
mod output;
mod placement;
mod plan;
mod presets;
mod projector;
mod ps;
mod quantize;
mod rerank;
mod run;
mod serve;
mod sessions;
mod settings;
mod table;
mod terminal;
mod tokenize;
mod units;
mod version;
mod words;

use std::{
    ffi::OsString,
    io::{Write, stderr},
    process::ExitCode,
};

use paguro_server::KeyFile;

use cli::Command;
use devices::Devices;
use failure::{Failure, Outcome};
use settings::Settings;

fn main() -> ExitCode {
    quiet_vulkan();
    forget_empty_variables();
    let settings = match cli::parse(std::env::args_os().collect()) {
        Ok(cli) => Settings::new(cli),
        Err(failure) => return end(&failure, settings::colors_on_errors()),
    };
    for warning in &settings.warnings {
        settings.terminal.status(warning);
    }
    match execute(&settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => end(&failure, settings.terminal.color_errors),
    }
}

/// Prints a failure.
fn end(failure: &Failure, color: bool) -> ExitCode {
    if let Some(report) = failure.report_within(color, terminal::columns()) {
        // Standard error may be closed; the exit code also reports the failure.
        let _ = stderr().write_all(report.as_bytes());
    }
    failure.exit_code()
}

/// Turns off Mesa's layer that orders GPUs, because GPUs are ordered here. The layer queries Wayland and prints an
/// error where there is none.
fn quiet_vulkan() {
    #[cfg(all(feature = "gpu", target_os = "linux"))]
    // SAFETY: nothing else runs yet, so nobody reads the environment meanwhile.
    unsafe {
        std::env::set_var("NODEVICE_SELECT", "1");
    }
}

/// Unsets variables without a value, which files of container tools define.
fn forget_empty_variables() {
    let is_empty = |(name, value): &(OsString, OsString)| {
        value.is_empty() && name.to_str().is_some_and(|name| name.starts_with("PAGURO_"))
    };
    for (name, _) in std::env::vars_os().filter(is_empty) {
        // SAFETY: nothing else runs yet, so nobody reads the environment meanwhile.
        unsafe { std::env::remove_var(name) };
    }
}

fn execute(settings: &Settings) -> Outcome<()> {
    let (terminal, library) = (settings.terminal, &settings.library);
    let devices = &Devices::new(settings.gpu_checks.clone());
    match &settings.command {
        Command::Run(args) => run::run(args, library, devices, terminal, settings.history.as_deref()),
        Command::Serve(args) => serve::serve(args, settings, devices),
        Command::Ps(args) => ps::ps(args, settings),
        Command::Unload(args) => ps::unload(args, settings),
        Command::Keys(args) => keys::keys(args, &KeyFile::new(settings.keys_file()?), terminal),
        Command::Cache(args) => cache::cache(args, library, terminal),
        Command::Sessions(args) => sessions::sessions(args, library, terminal),
        Command::Bench(args) => bench::bench(args, library, devices, terminal),
        Command::Eval(args) => eval::eval(args, library, devices, terminal),
        Command::Embed(args) => embed::embed(args, library, devices, terminal),
        Command::Rerank(args) => rerank::rerank(args, library, devices, terminal),
        Command::Tokenize(args) => tokenize::tokenize(args, library),
        Command::Inspect(args) => inspect::inspect(args, library, devices, terminal),
        Command::Imatrix(args) => imatrix::imatrix(args, library, devices, terminal),
        Command::Convert(args) => quantize::convert(args, library, terminal),
        Command::Quantize(args) => quantize::quantize(args, library, terminal),
        Command::Pull(args) => library::pull(args, library, terminal),
        Command::Search(args) => library::search(args, library, terminal),
        Command::Import(args) => library::import(args, library, terminal),
        Command::List(args) => library::list(args, library, terminal),
        Command::Show(args) => library::show(args, library, terminal),
        Command::Rm(args) => library::rm(args, library),
        Command::Cp(args) => library::cp(args, library),
        Command::Preset(args) => library::preset(args, library, terminal),
        Command::Prune(args) => library::prune(args, library),
        Command::Verify(args) => library::verify(args, library, terminal),
        Command::Rebuild(args) => library::rebuild(args, library, terminal),
        Command::Devices(args) => match &args.plan {
            Some(model) => plan::plan(model, args, library, (devices, terminal)),
            None => devices.devices(args, terminal),
        },
        Command::Completions { shell } => version::completions(*shell),
        Command::Man => version::manual(),
        Command::Version => output::Output::new().line(version::long(devices)),
    }
}
