//! Arguments and help of the command line.

mod bench;
mod cache;
mod choices;
mod embed;
pub mod foreign;
mod groups;
mod keys;
mod library;
mod model;
mod parse;
mod quantities;
mod quantize;
mod run;
mod sampling;
mod serve;
mod sessions;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use paguro_engine::EngineOptions;

use crate::{failure::Outcome, models::Source, projector::Projector, settings::LibrarySettings};

pub use bench::BenchArgs;
pub use cache::{CacheArgs, CacheCommand};
use choices::Attributes;
pub use choices::{
    Attention, BenchDrafts, ColorChoice, Device, DeviceList, KvDtype, Numerics, Pages, ShapeFormat,
    ShapeName, Speculate, Split,
};
pub use embed::{CutAt, EmbedArgs, RerankArgs};
pub use keys::{KeysArgs, KeysCommand, PsArgs, ServerArgs, UnloadArgs};
pub use library::{
    CpArgs, ImportArgs, ListArgs, Placement, PresetArgs, PruneArgs, PullArgs, RebuildArgs, RmArgs,
    SearchArgs, ShowArgs, VerifyArgs,
};
pub use model::ModelArg;
pub use parse::parse;
pub use quantities::{Bytes, ExpertSlots, Time};
pub use quantize::{ConvertArgs, ImatrixArgs, QuantizeArgs, WriteArgs};
pub use run::RunArgs;
pub use sampling::{GrammarArgs, Limit, SamplingArgs};
pub use serve::{Given, LogFormat, ServeArgs, ServeOptions, SharePrefixes};
pub use sessions::{SessionsArgs, SessionsCommand};

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
  paguro run \"Tell me a story about a shy fox\"   the model in this binary answers
  paguro run qwen3:4b                            chat with a well-known model
  paguro run MODEL.gguf \"What is a crab?\"        ask a model of yours
  paguro serve                                   serve at http://127.0.0.1:11434
  paguro COMMAND --help                          everything about one command")]
pub struct Cli {
    /// The command
    #[command(subcommand)]
    pub command: Command,

    /// No status line, no progress
    #[arg(short, long, global = true)]
    pub quiet: bool,

    /// More output: speeds after each answer of a chat, and everything that a server does
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    pub verbose: bool,

    /// Colors on a terminal; NO_COLOR is honoured
    #[arg(long, global = true, value_enum, default_value = "auto", choice = "auto|always|never")]
    pub color: ColorChoice,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer a prompt, or chat
    #[command(visible_alias = "chat")]
    Run(Box<RunArgs>),
    /// Serve models over HTTP: an OpenAI-, Anthropic- and Ollama-compatible server
    #[command(alias = "start")]
    Serve(Box<ServeArgs>),
    /// List the models that a running server has loaded
    Ps(PsArgs),
    /// Unload models from the memory of a running server
    #[command(visible_alias = "stop")]
    Unload(UnloadArgs),
    /// Manage the keys that clients of the server need
    Keys(KeysArgs),
    /// Show, check or delete what servers keep of earlier prompts on disk
    Cache(CacheArgs),
    /// List or delete conversations that `run --session` keeps
    Sessions(SessionsArgs),
    /// Measure speed, against this machine's own ceiling
    Bench(Box<BenchArgs>),
    /// Measure perplexity on a text
    Eval(EvalArgs),
    /// Compute vectors of texts
    #[command(aliases = ["embedding", "embeddings"])]
    Embed(EmbedArgs),
    /// Score texts for a query, the best first
    Rerank(RerankArgs),
    /// Show how a model splits text into tokens
    Tokenize(TokenizeArgs),
    /// Show the content of a model file and the memory that it needs
    Inspect(InspectArgs),
    /// Write a model to a GGUF file in another weight format
    Quantize(QuantizeArgs),
    /// Compute the importance matrix of a model over a text, for `quantize`
    Imatrix(ImatrixArgs),
    /// Write a Hugging Face folder, or a split model, as one GGUF file
    Convert(ConvertArgs),
    /// Download a model from Hugging Face into the library
    #[command(alias = "download", alias = "get", alias = "install")]
    Pull(PullArgs),
    /// Find models to pull: well-known ones, and those on Hugging Face
    Search(SearchArgs),
    /// Import models of this machine: files, folders, those of Ollama, LM Studio and the Hugging Face cache
    Import(ImportArgs),
    /// List the models in the library
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show what the library knows about a model
    Show(ShowArgs),
    /// Remove models from the library
    #[command(alias = "remove", alias = "delete", alias = "uninstall")]
    Rm(RmArgs),
    /// Give a model of the library a second name
    #[command(alias = "copy")]
    Cp(CpArgs),
    /// Set how servers load and use a model of the library, and its aliases
    Preset(PresetArgs),
    /// Delete leftovers: unfinished downloads and files that no model uses
    Prune(PruneArgs),
    /// Check the files of the library, and download damaged ones again
    Verify(VerifyArgs),
    /// Restore a lost or damaged catalogue of the library
    Rebuild(RebuildArgs),
    /// List the devices that can run models
    Devices(DevicesArgs),
    /// Print completions for a shell, such as bash or zsh
    #[command(alias = "completion")]
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Print the manual page, in roff
    Man,
    /// Print the version, its commit, and the devices of this machine
    Version,
}

/// Device options of every command that runs a model.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Running")]
pub struct RunOnArgs {
    /// Device: auto, cpu, gpu or gpu:N; or a list such as gpu:0,gpu:1 or gpu,cpu, among which the layers are divided
    #[arg(long, default_value = "auto", env = "PAGURO_DEVICE", value_name = "NAME,...")]
    pub device: DeviceList,

    /// Layers on GPUs, the last ones of the model; the CPU runs those before them [default: as many as fit]
    #[arg(long, env = "PAGURO_GPU_LAYERS", value_parser = choices::layers, value_name = "N")]
    pub gpu_layers: Option<usize>,

    /// Shares of the GPUs in these layers, such as 3,1 [default: by their free memory]
    #[arg(long, env = "PAGURO_SPLIT", value_name = "N,N,...")]
    pub split: Option<Split>,

    /// Sums on a GPU: `fast` with its matrix units, or `exact` in one order for any batch [default: fast; the CPU is
    /// exact]
    #[arg(long, value_enum, env = "PAGURO_NUMERICS", choice = "exact|fast")]
    pub numerics: Option<Numerics>,

    /// Most memory of the device, or of each GPU, that the model may use [default: all that is free]
    #[arg(long, env = "PAGURO_MEMORY", value_name = "BYTES")]
    pub memory: Option<Bytes>,

    /// Experts of each layer that have room in a GPU's memory, where all are in the host's: auto, all, least, a number, bytes, or
    /// all-N for what all layers but N take. `auto` uses the host's memory only for models that do not fit [default: auto]
    #[arg(long, env = "PAGURO_EXPERT_SLOTS", value_name = "N|BYTES|...")]
    pub expert_slots: Option<ExpertSlots>,

    /// True for the whole model on each device, each with an engine: `paguro serve --replicas`.
    #[arg(skip)]
    pub replicas: bool,

    /// Instruction set of the CPU kernels, for comparison; the best one this machine has unless given
    #[arg(long, hide = true, value_name = "NAME")]
    pub isa: Option<String>,

    /// True to time kernels on devices where timing has a cost.
    #[arg(skip)]
    #[cfg_attr(
        not(any(feature = "gpu", target_os = "macos")),
        expect(dead_code, reason = "CPU kernels are always timed")
    )]
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

/// Kind of attention.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Running")]
pub struct AttentionArg {
    /// `paged` reads pages through the block table; `gather` copies them together first, which is slow, to check and
    /// compare
    #[arg(long, value_enum, default_value = "paged", env = "PAGURO_ATTENTION", choice = "paged|gather")]
    pub attention: Attention,
}

/// Encoding of the KV cache.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Running")]
pub struct KvDtypeArg {
    /// Encoding of the KV cache: `f16`, `q8` in about half the memory, or `q4` in about a quarter, with
    /// which answers get worse and some models, such as Qwen 2.5, become useless
    #[arg(long, value_enum, default_value = "f16", env = "PAGURO_KV_DTYPE", choice = "f16|q8|q4")]
    pub kv_dtype: KvDtype,
}

/// Drafts of answers.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Running")]
pub struct SpeculateArg {
    /// Guess tokens of an answer and check several in a step: `auto`, from the text before it or by a head or draft model, where that is
    /// faster; `model:N`, always N tokens by the head or draft model; or `off`. Answers are the same
    #[arg(long, default_value_t, env = "PAGURO_SPECULATE", value_name = "auto|model:N|off")]
    pub speculate: Speculate,

    /// See [`DraftArg`].
    #[command(flatten)]
    pub draft: DraftArg,
}

/// A model that drafts.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Running")]
pub struct DraftArg {
    /// Also let a smaller model with the same tokens, or the model's assistant, draft the answer [default: the assistant beside the
    /// model]
    #[arg(long, value_name = "MODEL")]
    pub draft: Option<String>,
}

impl DraftArg {
    /// Finds the model.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn source(&self, library: &LibrarySettings) -> Outcome<Option<Source>> {
        self.draft.as_deref().map(|name| Source::find(Some(name), library)).transpose()
    }
}

/// Tokens of a step.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Running")]
pub struct BatchTokensArg {
    /// Tokens of a step: prompts are computed in chunks of at most N, and each sequence that answers uses one [default:
    /// 512]
    #[arg(long, env = "PAGURO_BATCH_TOKENS", value_name = "N", value_parser = choices::positive)]
    pub batch_tokens: Option<usize>,
}

impl BatchTokensArg {
    /// Returns the number of tokens for `sequences` sequences, each of which needs one.
    pub fn or_default(self, sequences: usize) -> usize {
        self.batch_tokens.unwrap_or(EngineOptions::default().max_batch_tokens).max(sequences)
    }
}

/// The model and the text of `paguro eval` and `paguro imatrix`.
#[derive(Args, Debug)]
pub struct TextArgs {
    /// The model, unless -m gives it, and the file with the text, unless -f does
    #[arg(value_name = "MODEL | FILE", num_args = 0..=2)]
    pub words: Vec<PathBuf>,

    /// The model [default: the one inside this binary]
    #[arg(short, long, env = "PAGURO_MODEL", value_name = "MODEL")]
    pub model: Option<String>,

    /// The file with the text
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

/// `paguro eval`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The text is cut into windows of --ctx tokens that do not overlap. The first token of each is replaced by BOS where \
the model puts one before every text, and the second half of each window is scored. With --stride S the windows are \
longer (ctx + S/2, rounded up to 256), start S tokens apart, and their last S tokens are scored. Both are what \
llama-perplexity does, so that the numbers can be compared. One newline at the end of the text is dropped.

Examples:
  paguro eval MODEL.gguf wiki.test.raw
  paguro eval -m MODEL.gguf -f text.txt -c 2048 --chunks 8 --json")]
pub struct EvalArgs {
    /// See [`TextArgs`].
    #[command(flatten)]
    pub text: TextArgs,

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
One word is the text. Of several words, the first is the model, unless -m gives it.

Examples:
  paguro tokenize \"Hello world\"               one token per line: id and bytes
  paguro tokenize MODEL.gguf \"Hello world\"    with this model
  paguro tokenize -m MODEL.gguf hello world   the same
  paguro tokenize --ids - < text.txt          only the ids, separated by spaces
  paguro tokenize --special \"<|user|>\\nHi\"    special tokens are recognised")]
pub struct TokenizeArgs {
    /// The text, or the model and the text; - or nothing reads standard input
    #[arg(value_name = "MODEL | TEXT | -")]
    pub words: Vec<String>,

    /// The model [default: the one inside this binary]
    #[arg(short, long, env = "PAGURO_MODEL", value_name = "MODEL")]
    pub model: Option<String>,

    /// Only the ids, on one line
    #[arg(long, conflicts_with = "json")]
    pub ids: bool,

    /// Recognise special tokens in the text (otherwise they are ordinary text)
    #[arg(long)]
    pub special: bool,

    /// Add the model's initial and final tokens (BOS, EOS)
    #[arg(long)]
    pub around: bool,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The vision tower of a GGUF model.
#[derive(Args, Clone, Debug, Default)]
pub struct ProjectorArgs {
    /// The vision tower of a GGUF model, a projector [default: the mmproj file beside the model]
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,

    /// Load no vision tower: the model reads text only
    #[arg(long, conflicts_with = "mmproj")]
    no_mmproj: bool,
}

impl ProjectorArgs {
    /// Returns the choice.
    pub fn choice(&self) -> Projector {
        Projector::new(self.mmproj.clone(), self.no_mmproj)
    }
}

/// `paguro inspect`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  paguro inspect MODEL.gguf -c 32768         memory for a context of 32768 tokens
  paguro inspect MODEL.gguf --kv-dtype q8    with a KV cache of eight bits
  paguro inspect MODEL.gguf --tensors        with every tensor
  paguro inspect --json some/hf-folder | jq .parameters")]
pub struct InspectArgs {
    /// See [`ModelArg`].
    #[command(flatten)]
    pub model: ModelArg,

    /// See [`ProjectorArgs`].
    #[command(flatten)]
    pub projector: ProjectorArgs,

    /// Context for which the memory is computed [default: the model's trained context]
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
    /// Run the conformance suite on a GPU, which takes a minute or two, and say which of its cases fail
    #[arg(long)]
    pub test: bool,

    /// With --test: every variant of every case, not a sample of them
    #[arg(long, requires = "test")]
    pub all: bool,

    /// With --test: only these cases, as `FAILED` lines name them
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', requires = "test")]
    pub case: Vec<String>,

    /// Show the places of a model's weights on a device, their memory, and the time of a token, for which a part of it is run
    #[arg(long, value_name = "MODEL", conflicts_with = "test")]
    pub plan: Option<String>,

    /// With --plan: tokens of the context
    #[arg(short, long, value_name = "TOKENS", requires = "plan", value_parser = choices::positive)]
    pub ctx: Option<usize>,

    /// With --plan: most memory of the device that the model may use
    #[arg(long, value_name = "BYTES", requires = "plan")]
    pub memory: Option<Bytes>,

    /// With --plan: run no part of the model; the time is the least one then, of reading alone
    #[arg(long, requires = "plan")]
    pub no_trial: bool,

    /// With --plan: slots for experts, as of `paguro run`
    #[arg(long, value_name = "N|BYTES|...", requires = "plan")]
    pub expert_slots: Option<ExpertSlots>,

    /// With --plan: layers on GPUs, as of `paguro run`
    #[arg(long, value_parser = choices::layers, value_name = "N", requires = "plan")]
    pub gpu_layers: Option<usize>,

    /// With --plan: shares of the GPUs in these layers, as of `paguro run`
    #[arg(long, value_name = "N,N,...", requires = "plan")]
    pub split: Option<Split>,

    /// Only this device: auto, cpu, gpu or gpu:N; or a list
    #[arg(long, value_name = "NAME,...")]
    pub device: Option<DeviceList>,

    /// The numerics to show
    #[arg(long, value_enum, env = "PAGURO_NUMERICS", choice = "exact|fast")]
    pub numerics: Option<Numerics>,

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

    /// Prose has no manual line breaks, because the terminal's width breaks it.
    #[test]
    fn help_is_wrapped_once() {
        for width in [80, 100, 140] {
            for command in Cli::command().get_subcommands() {
                let name = command.get_name().to_owned();
                let help = command.clone().term_width(width).render_long_help().to_string();
                let lines: Vec<_> = help.lines().collect();
                for pair in lines.windows(2) {
                    let [line, next] = [pair[0], pair[1]];
                    assert!(line.chars().count() <= width, "`{name}` at {width}: {line}");
                    let prose = |line: &str| {
                        line.contains(' ')
                            && line.starts_with(|c: char| c.is_alphabetic())
                            && !line.ends_with(':')
                    };
                    if prose(line) && prose(next) {
                        let first = next.split(' ').next().unwrap_or_default();
                        let fits = line.chars().count() + 1 + first.chars().count() <= width;
                        assert!(!fits, "`{name}` at {width} is broken by hand: {line}\n{next}");
                    }
                }
            }
        }
    }
}
