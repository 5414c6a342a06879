//! The command line: what can be asked for, with its help. Nothing here acts.

mod bench;
mod choices;
mod keys;
mod library;
mod sampling;
mod serve;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use paguro_engine::EngineOptions;

pub use bench::BenchArgs;
pub use choices::{Attention, ColorChoice, Device, KvDtype, Pages, ShapeFormat, ShapeName};
pub use keys::{KeysArgs, KeysCommand, PsArgs};
pub use library::{
    CpArgs, ImportArgs, ListArgs, PruneArgs, PullArgs, RebuildArgs, RmArgs, ShowArgs, VerifyArgs,
};
pub use sampling::{GrammarArgs, SamplingArgs};
pub use serve::{GivenOptions, LogFormat, ServeArgs, ServeOptions};

/// Paguro runs language models on this machine.
#[derive(Debug, Parser)]
#[command(
    name = "paguro",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    max_term_width = 110
)]
#[command(after_help = "\
Examples:
  paguro run \"Tell me a story about a shy fox\"     the model inside this binary answers
  paguro run MODEL.gguf                            chat with a model of yours
  paguro serve                                     an OpenAI-compatible server at http://127.0.0.1:11434
  paguro bench -m MODEL.gguf -p 512 -n 64          how fast it is, and how fast it could be
  paguro COMMAND --help                            everything about one command")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,

    /// No status line, no progress
    #[arg(short, long, global = true)]
    pub quiet: bool,

    /// Colors on a terminal; NO_COLOR is honoured
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "auto",
        hide_possible_values = true,
        value_name = "auto|always|never"
    )]
    pub color: ColorChoice,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer a prompt, or chat
    Run(Box<RunArgs>),
    /// Serve models over HTTP: the APIs of OpenAI, Anthropic and Ollama
    Serve(Box<ServeArgs>),
    /// List the models that a running server has loaded
    Ps(PsArgs),
    /// Manage the keys that clients of the server need
    Keys(KeysArgs),
    /// Measure speed, against this machine's own ceiling
    Bench(BenchArgs),
    /// Measure perplexity on a text
    Eval(EvalArgs),
    /// Show how a model cuts text into tokens
    Tokenize(TokenizeArgs),
    /// Show what is in a model file and what it needs to run
    Inspect(InspectArgs),
    /// Get a model from Hugging Face into the library
    Pull(PullArgs),
    /// Take a model file or folder of this machine into the library
    Import(ImportArgs),
    /// List the models in the library
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show what the library knows about a model
    Show(ShowArgs),
    /// Remove models from the library
    Rm(RmArgs),
    /// Give a model of the library another name, too
    Cp(CpArgs),
    /// Delete leftovers: unfinished downloads and files that no model uses
    Prune(PruneArgs),
    /// Check the files of the library, and get damaged ones again
    Verify(VerifyArgs),
    /// Restore a lost or damaged catalogue of the library
    Rebuild(RebuildArgs),
    /// List the devices that can run models
    Devices(DevicesArgs),
}

/// On what to run; every command that runs a model has these.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Running")]
pub struct RunOnArgs {
    /// Where to run: auto, cpu, gpu or gpu:N
    #[arg(long, default_value = "auto", env = "PAGURO_DEVICE", value_name = "NAME")]
    pub device: Device,

    /// Instruction set of the CPU kernels, for comparison; the best one this machine has unless given
    #[arg(long, hide = true, value_name = "NAME")]
    pub isa: Option<String>,

    /// Whether kernels are timed on devices where that has a cost.
    #[arg(skip)]
    pub timed: bool,
}

/// The number of threads, for commands that take one.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Running")]
pub struct ThreadsArg {
    /// CPU threads [default: all that this process may use]
    #[arg(short, long, env = "PAGURO_THREADS", value_name = "N", value_parser = choices::positive)]
    pub threads: Option<usize>,
}

/// How attention is computed, for commands that take one way.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Running")]
pub struct AttentionArg {
    /// `paged` walks the pages; `gather` copies them together first, the slow way, to check and compare
    #[arg(
        long,
        value_enum,
        default_value = "paged",
        env = "PAGURO_ATTENTION",
        hide_possible_values = true,
        value_name = "paged|gather"
    )]
    pub attention: Attention,
}

/// What the KV cache stores, for commands that take one kind.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Running")]
pub struct KvDtypeArg {
    /// What the KV cache stores: `f16`, or `q8` in about half the memory
    #[arg(
        long,
        value_enum,
        default_value = "f16",
        env = "PAGURO_KV_DTYPE",
        hide_possible_values = true,
        value_name = "f16|q8"
    )]
    pub kv_dtype: KvDtype,
}

/// How much a step computes.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Running")]
pub struct BatchTokensArg {
    /// Tokens of a step: prompts are computed so many at a time, and each sequence that answers takes one [default: 512]
    #[arg(long, env = "PAGURO_BATCH_TOKENS", value_name = "N", value_parser = choices::positive)]
    pub batch_tokens: Option<usize>,
}

impl BatchTokensArg {
    /// For so many sequences, each of which needs one.
    pub fn or_default(self, sequences: usize) -> usize {
        self.batch_tokens.unwrap_or(EngineOptions::default().max_batch_tokens).max(sequences)
    }
}

/// `paguro run`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The first word is a model if it is the name of one (`tales` is inside this binary, `paguro list` shows the
library's), a file or a folder; otherwise everything is the prompt. A first word that looks like a path but is not there is an error.
Text on standard input is the prompt, or follows the prompt after a blank line. With no prompt at all,
`run` is a chat: /help there shows what it understands.

A model with a chat template gets the prompt as the user's message. A model without one, or --raw, continues
the prompt as it stands: the tokens that the model puts before every text (BOS) are added unless the prompt
already begins with them, and with --raw the special tokens written in the prompt are recognised.

Sampling values are the model's own recommendation where it has one, else temperature 0.8, top-k 40,
top-p 0.95, min-p 0.05. The seed is random unless given, and reported.

Exit status: 0 done, 1 failed, 2 wrong command line, 130 stopped with Ctrl-C.

Examples:
  paguro run \"Tell me a story about a shy fox who lost a key\"
  paguro run MODEL.gguf \"What is a hermit crab?\" --temperature 0
  paguro run some/hf-folder --system \"Answer in one sentence.\"
  cat notes.txt | paguro run MODEL.gguf \"Sum this up:\"
  paguro run --json-schema '{\"type\": \"object\", \"required\": [\"name\"]}' \"Name a fox\"
  paguro run --json --seed 7 \"Name a fox\" | jq -r .text")]
pub struct RunArgs {
    /// A model (its name, a GGUF file or a Hugging Face folder), then the prompt; both may be left out
    #[arg(value_name = "MODEL | PROMPT")]
    pub words: Vec<String>,

    /// The model; every other word is then the prompt
    #[arg(short, long, env = "PAGURO_MODEL", value_name = "MODEL")]
    pub model: Option<String>,

    /// The system message, for models with a chat template
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// Continue the prompt as it stands, without the model's chat template
    #[arg(long, conflicts_with = "system")]
    pub raw: bool,

    /// Print one JSON object with the text, token counts, finish reason, timings and seed
    #[arg(long)]
    pub json: bool,

    /// With --json: one JSON object per line, for each piece of text as it arrives, then the result
    #[arg(long, requires = "json")]
    pub stream: bool,

    /// Answer N times, with different draws from the same prompt
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = choices::answers)]
    pub branches: usize,

    /// With --json: report log-probabilities, and those of the K best tokens at each place
    #[arg(long, value_name = "K", requires = "json")]
    pub logprobs: Option<usize>,

    /// How the answer is sampled and when it ends.
    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// What the answer must be.
    #[command(flatten)]
    pub grammar: GrammarArgs,

    /// Tokens that fit, prompt and answer together; 0 for all the model was trained for [default: that, at most 65536, as far as
    /// memory allows]
    #[arg(short, long, value_name = "TOKENS", help_heading = "Running")]
    pub ctx: Option<usize>,

    /// Tokens in a page of the KV cache
    #[arg(long, value_name = "TOKENS", help_heading = "Running", value_parser = choices::positive)]
    pub page_size: Option<usize>,

    /// See [`BatchTokensArg`].
    #[command(flatten)]
    pub batch: BatchTokensArg,

    /// See [`ThreadsArg`].
    #[command(flatten)]
    pub threads: ThreadsArg,

    /// See [`KvDtypeArg`].
    #[command(flatten)]
    pub kv: KvDtypeArg,

    /// See [`AttentionArg`].
    #[command(flatten)]
    pub attention: AttentionArg,

    /// See [`RunOnArgs`].
    #[command(flatten)]
    pub on: RunOnArgs,
}

/// `paguro eval`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The text is cut into windows of --ctx tokens that do not overlap; the first token of each is replaced by BOS where
the model puts one before every text, and the second half of each window is scored. With --stride S the windows are
longer (ctx + S/2, rounded up to 256), start S tokens apart, and their last S tokens are scored. Both are what
llama-perplexity does, so that the numbers can be compared. One newline at the end of the text is dropped.

Examples:
  paguro eval -m MODEL.gguf -f wiki.test.raw
  paguro eval -m MODEL.gguf -f text.txt -c 2048 --chunks 8 --json")]
pub struct EvalArgs {
    /// The model [default: the one inside this binary]
    #[arg(short, long, env = "PAGURO_MODEL", value_name = "MODEL")]
    pub model: Option<String>,

    /// The text
    #[arg(short, long, value_name = "TEXT")]
    pub file: PathBuf,

    /// Tokens in a window
    #[arg(short, long, value_name = "TOKENS", default_value_t = 512, value_parser = choices::window)]
    pub ctx: usize,

    /// Distance between the starts of overlapping windows
    #[arg(long, value_name = "TOKENS", value_parser = choices::positive)]
    pub stride: Option<usize>,

    /// Only this many windows
    #[arg(long, value_name = "N", value_parser = choices::positive)]
    pub chunks: Option<usize>,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,

    /// See [`ThreadsArg`].
    #[command(flatten)]
    pub threads: ThreadsArg,

    /// See [`KvDtypeArg`].
    #[command(flatten)]
    pub kv: KvDtypeArg,

    /// See [`AttentionArg`].
    #[command(flatten)]
    pub attention: AttentionArg,

    /// See [`RunOnArgs`].
    #[command(flatten)]
    pub on: RunOnArgs,
}

/// `paguro tokenize`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  paguro tokenize \"Hello world\"              one token per line: its id and its bytes
  paguro tokenize --ids - < text.txt         only the ids, separated by spaces
  paguro tokenize --special \"<|user|>\\nHi\"   special tokens are recognised in the text")]
pub struct TokenizeArgs {
    /// The text; - or nothing reads standard input
    #[arg(value_name = "TEXT | -")]
    pub text: Option<String>,

    /// The model [default: the one inside this binary]
    #[arg(short, long, env = "PAGURO_MODEL", value_name = "MODEL")]
    pub model: Option<String>,

    /// Only the ids, on one line
    #[arg(long, conflicts_with = "json")]
    pub ids: bool,

    /// Recognise special tokens in the text (otherwise they are text like any other)
    #[arg(long)]
    pub special: bool,

    /// Add what the model puts around every text (BOS, EOS)
    #[arg(long)]
    pub around: bool,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `paguro inspect`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  paguro inspect MODEL.gguf -c 32768         what it needs for a context of 32768 tokens
  paguro inspect MODEL.gguf --kv-dtype q8    ... with a KV cache of eight bits
  paguro inspect MODEL.gguf --tensors        every tensor, too
  paguro inspect --json some/hf-folder | jq .parameters")]
pub struct InspectArgs {
    /// The model [default: the one inside this binary]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,

    /// Context whose memory is worked out [default: what the model was trained for]
    #[arg(short, long, value_name = "TOKENS", value_parser = choices::positive)]
    pub ctx: Option<usize>,

    /// List every tensor
    #[arg(long)]
    pub tensors: bool,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,

    /// See [`KvDtypeArg`].
    #[command(flatten)]
    pub kv: KvDtypeArg,

    /// See [`RunOnArgs`].
    #[command(flatten)]
    pub on: RunOnArgs,
}

/// `paguro devices`.
#[derive(Args, Debug)]
pub struct DevicesArgs {
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_has_help() {
        for command in Cli::command().get_subcommands() {
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
            }
        }
    }
}
