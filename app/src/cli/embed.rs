//! `paguro embed` and `paguro rerank`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{RunOnArgs, ThreadsArg, choices};

/// `paguro embed`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Each line is a text, unless --whole-files is given; blank lines are left out. The output has one JSON object per text, in the order of the input, \
with the file, the line, the number of tokens and the vector. --output writes a file instead: a NumPy array if its name \
ends with .npy, otherwise JSON lines. --sparse adds `lexical_weights`, the weights of tokens by their ids, and \
--multi-vector adds `colbert_vecs`.

Examples:
  paguro embed Qwen/Qwen3-Embedding-0.6B-GGUF notes.txt > vectors.jsonl
  paguro embed MODEL.gguf --whole-files docs/*.md --output docs.npy
  echo \"Who lost a key?\" | paguro embed MODEL --prompt-name query")]
pub struct EmbedArgs {
    /// The model
    #[arg(value_name = "MODEL")]
    pub model: String,

    /// Write vectors to this file: .npy or .jsonl
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Put this prompt of the model before each text; `paguro inspect` lists them
    #[arg(long, value_name = "NAME")]
    pub prompt_name: Option<String>,

    /// Keep this many leading values, and normalize again
    #[arg(long, value_name = "N", value_parser = choices::positive)]
    pub dimensions: Option<usize>,

    /// Keep vectors as the model computes them, instead of normalizing their length to 1
    #[arg(long)]
    pub no_normalize: bool,

    /// Add the weights of each text's tokens, of models like bge-m3
    #[arg(long)]
    pub sparse: bool,

    /// Add a vector of each token, of models like bge-m3
    #[arg(long)]
    pub multi_vector: bool,

    /// Show the kernels that ran, with launches and their share of the time, which then takes longer
    #[arg(long, requires = "output")]
    pub kernels: bool,

    /// See [`TextArgs`].
    #[command(flatten)]
    pub texts: TextArgs,
}

/// `paguro rerank`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Each line is a text, unless --whole-files is given; blank lines are left out. The best text comes first, with its score, its file and its line.

Examples:
  paguro rerank Qwen/Qwen3-Reranker-0.6B \"Who lost a key?\" notes.txt
  paguro rerank MODEL.gguf \"How is a page evicted?\" --whole-files docs/*.md --top-n 3
  grep -rh fox notes/ | paguro rerank MODEL \"Where do foxes sleep?\" --json")]
pub struct RerankArgs {
    /// The reranker
    #[arg(value_name = "MODEL")]
    pub model: String,

    /// The query that texts are scored for
    #[arg(value_name = "QUERY")]
    pub query: String,

    /// Print only the best texts
    #[arg(short = 'n', long, value_name = "N", value_parser = choices::positive)]
    pub top_n: Option<usize>,

    /// The task, for rerankers that read one
    #[arg(long, value_name = "TEXT")]
    pub instruction: Option<String>,

    /// Print logits instead of scores between 0 and 1
    #[arg(long)]
    pub raw_scores: bool,

    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,

    /// See [`TextArgs`].
    #[command(flatten)]
    pub texts: TextArgs,
}

/// Texts, and the device that computes them.
#[derive(Args, Debug)]
pub struct TextArgs {
    /// Files with texts; - or nothing reads standard input
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Each file is one text
    #[arg(long)]
    pub whole_files: bool,

    /// Cut texts that are too long at this end, instead of refusing them
    #[arg(long, value_name = "end|start", value_enum, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_missing_value = "end")]
    pub truncate: Option<CutAt>,

    /// See [`ThreadsArg`].
    #[command(flatten)]
    pub threads: ThreadsArg,

    /// See [`RunOnArgs`].
    #[command(flatten)]
    pub on: RunOnArgs,
}

/// The end of a text that loses tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CutAt {
    /// The end.
    End,
    /// The beginning.
    Start,
}
