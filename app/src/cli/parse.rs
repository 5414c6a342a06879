//! Parsing of the command line, with errors that suggest a solution.

use std::{ffi::OsString, path::Path};

use clap::{
    CommandFactory, FromArgMatches,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};
use paguro_library::known::Short;

use super::{Cli, foreign, groups};
use crate::{
    devices::Devices,
    failure::{Failure, Outcome},
    version,
};

/// Parses the command line. Prints help or the version and exits, if requested.
///
/// # Errors
/// A usage error.
pub fn parse(words: Vec<OsString>) -> Outcome<Cli> {
    let words = foreign::translate(words)?;
    let matches = groups::grouped(Cli::command()).try_get_matches_from(words.clone());
    match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => Ok(cli),
        Err(error) => Err(match error.kind() {
            ErrorKind::DisplayVersion if words.iter().any(|word| word == "--version") => {
                println!("{}", version::long(&Devices::new(None)));
                std::process::exit(0)
            }
            ErrorKind::UnknownArgument => unknown_flag(&error, &words),
            ErrorKind::InvalidSubcommand => unknown_command(&error, &words),
            ErrorKind::ArgumentConflict => conflict(&error),
            ErrorKind::MissingSubcommand if words[1..] == ["-v"] => {
                println!("{}", version::long(&Devices::new(None)));
                std::process::exit(0)
            }
            ErrorKind::MissingSubcommand => {
                Failure::usage("no command is given").hint("`paguro --help` lists the commands")
            }
            ErrorKind::InvalidValue | ErrorKind::ValueValidation => match bad_variable(&error, &words) {
                Some(failure) => failure,
                None => error.exit(),
            },
            // Help, and errors that clap explains well.
            _ => error.exit(),
        }),
    }
}

fn context(error: &Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        // The nearest one is the last.
        ContextValue::Strings(texts) => texts.last().cloned(),
        _ => None,
    }
}

fn unknown_flag(error: &Error, words: &[OsString]) -> Failure {
    let flag = context(error, ContextKind::InvalidArg).unwrap_or_default();
    let cli = Cli::command();
    let command = words.iter().skip(1).filter_map(|word| word.to_str()).find(|word| !word.starts_with('-'));
    let command = command.and_then(|word| cli.find_subcommand(word));
    let place =
        command.map_or_else(|| "paguro".to_owned(), |command| format!("paguro {}", command.get_name()));
    if !flag.starts_with('-') {
        let failure = Failure::usage(format!("`{place}` takes no further argument: `{flag}`"));
        return failure
            .hint(format!("`{place} --help` lists the arguments; put a text with spaces into quotes"));
    }
    let failure = Failure::usage(format!("`{flag}` is not an option of `{place}`"));
    if let Some(near) = context(error, ContextKind::SuggestedArg) {
        return failure.hint(format!("did you mean `{near}`?"));
    }
    let has_it = |command: &&clap::Command| {
        let mut arguments = command.get_arguments();
        arguments.any(|argument| argument.get_long().is_some_and(|long| flag == format!("--{long}")))
    };
    match cli.get_subcommands().find(has_it) {
        Some(other) => failure.hint(format!("it is one of `paguro {}`", other.get_name())),
        None => failure.hint(format!("`{place} --help` lists the options")),
    }
}

/// Returns the error for a value from an environment variable; `None` if a flag set it.
fn bad_variable(error: &Error, words: &[OsString]) -> Option<Failure> {
    let argument = context(error, ContextKind::InvalidArg)?;
    let value = context(error, ContextKind::InvalidValue)?;
    let long = argument.split([' ', '=', '[']).next()?.strip_prefix("--")?;
    let cli = Cli::command();
    let command = words.iter().skip(1).find_map(|word| cli.find_subcommand(word))?;
    let of_flag = |argument: &&clap::Arg| argument.get_long() == Some(long);
    let variable = command.get_arguments().find(of_flag)?.get_env()?.to_str()?;
    let is_value = std::env::var(variable).is_ok_and(|set| set == value);
    // A flag takes precedence over the variable.
    let is_flag = |word: &str| {
        let short = command.get_arguments().find(of_flag).and_then(clap::Arg::get_short);
        word == format!("--{long}")
            || word.starts_with(&format!("--{long}="))
            || short.is_some_and(|short| word.starts_with(&format!("-{short}")))
    };
    if !is_value || words.iter().filter_map(|word| word.to_str()).any(is_flag) {
        return None;
    }
    let rule = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) if !values.is_empty() => {
            format!("must be one of {}", values.join(", "))
        }
        _ => std::error::Error::source(error)?.to_string(),
    };
    let failure = Failure::usage(format!("the environment variable {variable} is {value:?}: {rule}"));
    Some(failure.hint(format!("unset {variable}, or give --{long} on the command line")))
}

/// Returns the error for two arguments that exclude each other.
fn conflict(error: &Error) -> Failure {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    Failure::usage(first.trim_start_matches("error: ")).hint("leave one of them out")
}

/// Returns the command that differs from `word` by one or two letters, or by their order.
fn near_command(word: &str) -> Option<String> {
    let cli = Cli::command();
    let names = cli.get_subcommands().flat_map(|command| {
        [command.get_name()]
            .into_iter()
            .chain(command.get_all_aliases())
            .map(str::to_owned)
            .collect::<Vec<_>>()
    });
    let distance = |name: &String| strsim::osa_distance(name, word);
    let allowed = if word.chars().count() < 5 { 1 } else { 2 };
    names.filter(|name| distance(name) <= allowed).min_by_key(distance)
}

fn unknown_command(error: &Error, words: &[OsString]) -> Failure {
    let word = context(error, ContextKind::InvalidSubcommand)
        .or_else(|| words.get(1)?.to_str().map(str::to_owned))
        .unwrap_or_default();
    let failure = Failure::usage(format!("`{word}` is not a command of paguro"));
    let is_model = Short::find(&word).is_some()
        || Path::new(&word).exists()
        || word.to_lowercase().ends_with(".gguf")
        || word.starts_with("hf");
    if let Some(hint) = foreign::command(&word) {
        failure.hint(hint)
    } else if word.contains(char::is_whitespace) {
        failure.hint(format!("to ask the built-in model: paguro run {word:?}"))
    } else if let Some(near) =
        near_command(&word).or_else(|| context(error, ContextKind::SuggestedSubcommand))
    {
        failure.hint(format!("did you mean `{near}`?"))
    } else if is_model {
        failure.hint(format!("to run a model: paguro run {word}"))
    } else {
        failure.hint("`paguro --help` lists the commands")
    }
}
