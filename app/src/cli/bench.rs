//! `paguro bench`.

use clap::{Args, builder::ArgPredicate};

use super::{
    Attention, BatchTokensArg, BenchDrafts, DraftArg, KvDtype, ModelArg, Pages, ProjectorArgs, RunOnArgs,
    ShapeFormat, ShapeName, choices,
};
use crate::bench::ImageSize;

/// `paguro bench`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Prefill is measured from a request's submission to its first token, for a prompt of -p random tokens that follows -d \
others. Decoding is measured over -n tokens of each of -b sequences that are -d tokens long, while all of them decode. \
Requests go through the engine as everybody's do. A list (-d 0,2048) measures each value. With several values of -t, \
--kv-dtype, --attention or --pages, each combination has its own engine and copy of the weights, and the rounds go A B A \
B, so that a machine that slows down meanwhile slows all of them.

With --speculate, decoding is measured with drafts: what drafts of a quality would gain on this device. Random texts \
do not repeat themselves, so `auto` shows what looking for drafts costs.

Each row carries its ceiling: the bytes that must be read for a token, at the measured speed, as a share of the read \
bandwidth that a probe measures in the same run. Reading bounds decoding. Prefill is bound by arithmetic, so a low share \
is no fault there. A model that fits into the processor's cache exceeds this ceiling.

Examples:
  paguro bench MODEL.gguf
  paguro bench MODEL.gguf -p 0 -n 64 -d 0,2048,8192 -b 1,8 --kernels
  paguro bench MODEL.gguf -p 0 -n 256 --speculate off,0.7x2,0.7x4,0.7x8,0.7
  paguro bench MODEL.gguf -p 0 -d 4096 --attention paged,gather -r 5
  paguro bench MODEL.gguf --image 1024x1024,1920x1080 --kernels
  paguro bench MODEL.gguf -b 1,16 --lora ADAPTER.gguf")]
pub struct BenchArgs {
    /// See [`ModelArg`].
    #[command(flatten)]
    pub model: ModelArg,

    /// A shape with random weights instead of a model: nothing is read from a file
    #[arg(long, value_enum, ignore_case = true, value_name = "NAME")]
    pub shape: Option<ShapeName>,

    /// Format of the weights of --shape
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        default_value = "Q8_0",
        requires = "shape",
        value_name = "FORMAT"
    )]
    pub format: ShapeFormat,

    /// See [`ProjectorArgs`].
    #[command(flatten)]
    pub projector: ProjectorArgs,

    /// Measure images of these sizes in pixels, such as 1024x768: their time in the vision tower, and until the first token. Without -p
    /// and -n, nothing else is measured
    #[arg(long, value_name = "WxH,...", value_delimiter = ',', conflicts_with = "shape")]
    pub image: Vec<ImageSize>,

    /// Tokens to prefill; 0 leaves the test out
    #[arg(short, long, value_name = "TOKENS,...", value_delimiter = ',', default_value = "512", default_value_if("image", ArgPredicate::IsPresent, "0"), value_parser = choices::whole)]
    pub prefill: Vec<usize>,

    /// Tokens to decode; 0 leaves the test out
    #[arg(short = 'n', long, value_name = "TOKENS,...", value_delimiter = ',', default_value = "64", default_value_if("image", ArgPredicate::IsPresent, "0"), value_parser = choices::whole)]
    pub decode: Vec<usize>,

    /// Tokens of each sequence before the measured ones
    #[arg(short, long, value_name = "TOKENS,...", value_delimiter = ',', default_value = "0", value_parser = choices::whole)]
    pub depth: Vec<usize>,

    /// Number of concurrent sequences
    #[arg(short, long, value_name = "N,...", value_delimiter = ',', default_value = "1", value_parser = choices::positive)]
    pub batch: Vec<usize>,

    /// Temperature of sampling. Greedy texts of random weights repeat themselves; sampled ones do not, so experts change
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = choices::not_negative)]
    pub temperature: f32,

    /// Drafts while decoding: off, auto (the engine's own), those of the head or draft model in every step (model:3), or those of the
    /// known answer whose tokens are right with a chance (0.7), perhaps of a fixed length (0.7x4), perhaps in the place of those of a
    /// model, whose time they take (0.7x4@model)
    #[arg(long, value_name = "DRAFTS,...", value_delimiter = ',', default_value = "off")]
    pub speculate: Vec<BenchDrafts>,

    /// See [`DraftArg`].
    #[command(flatten)]
    pub draft: DraftArg,

    /// Measure with adapters (LoRA) as well, in an engine of its own: a folder of PEFT or mlx-lm, a GGUF file, or one of the
    /// library; repeatable, for sequences with different ones
    #[arg(long = "lora", value_name = "FILE")]
    pub loras: Vec<String>,

    /// Samples of each test
    #[arg(short, long, value_name = "N", default_value_t = 3, value_parser = choices::positive)]
    pub rounds: usize,

    /// See [`BatchTokensArg`].
    #[command(flatten)]
    pub step: BatchTokensArg,

    /// CPU threads [default: all that this process may use]
    #[arg(short, long, env = "PAGURO_THREADS", value_name = "N,...", value_delimiter = ',', value_parser = choices::positive)]
    pub threads: Vec<usize>,

    /// Encodings of the KV cache
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "f16",
        env = "PAGURO_KV_DTYPE",
        hide_possible_values = true,
        value_name = "f16,q8,q4"
    )]
    pub kv_dtype: Vec<KvDtype>,

    /// `paged` reads pages through the block table; `gather` copies them together first, which is slow
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "paged",
        env = "PAGURO_ATTENTION",
        hide_possible_values = true,
        value_name = "paged,gather"
    )]
    pub attention: Vec<Attention>,

    /// Order of pages in memory: in sequence or random
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "ordered",
        hide_possible_values = true,
        value_name = "ordered,scattered"
    )]
    pub pages: Vec<Pages>,

    /// Tokens in a page of the KV cache
    #[arg(long, value_name = "TOKENS", value_parser = choices::positive)]
    pub page_size: Option<usize>,

    /// Show the kernels that ran, with launches and their share of the time
    #[arg(long)]
    pub kernels: bool,

    /// Show the use of slots by experts, for models whose experts are in the host's memory
    #[arg(long)]
    pub experts: bool,

    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,

    /// See [`RunOnArgs`].
    #[command(flatten)]
    pub on: RunOnArgs,
}
