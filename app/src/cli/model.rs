//! The model argument: a word, or `-m`.

use clap::{
    ArgMatches, Args, Command, FromArgMatches,
    error::{Error, ErrorKind},
    parser::ValueSource,
};

/// The model of a command.
#[derive(Clone, Debug, Default)]
pub struct ModelArg {
    /// Name or path; `None` for the embedded model.
    pub name: Option<String>,
}

/// The two forms of the argument.
#[derive(Args)]
struct Given {
    /// The model [default: the one inside this binary]
    #[arg(value_name = "MODEL")]
    word: Option<String>,

    /// The model, as a flag
    #[arg(short, long, env = "PAGURO_MODEL", value_name = "MODEL")]
    model: Option<String>,
}

impl FromArgMatches for ModelArg {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let Given { word, model } = Given::from_arg_matches(matches)?;
        // The environment applies only if the command line names no model.
        let by_flag = matches.value_source("model") == Some(ValueSource::CommandLine);
        match (word, model) {
            (Some(word), Some(model)) if by_flag => Err(given_twice(&word, &model)),
            (word, model) => Ok(Self { name: word.or(model) }),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for ModelArg {
    fn augment_args(command: Command) -> Command {
        Given::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Given::augment_args_for_update(command)
    }
}

/// Returns the error for two models.
fn given_twice(word: &str, flag: &str) -> Error {
    let message = format!("the model is given twice: `{word}` and `--model {flag}`\n");
    Error::raw(ErrorKind::ArgumentConflict, message)
}
