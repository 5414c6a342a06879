//! `paguro quantize`, `paguro imatrix` and `paguro convert`.

use std::path::PathBuf;

use clap::Args;
use paguro_quantize::Mixture;

use super::{TextArgs, ThreadsArg, choices};

/// `paguro quantize`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The model is a GGUF file, a Hugging Face folder, or a model of the library. Formats are named as files are: most are mixtures, in \
which matrices whose errors cost most get more bits. Q4_K_M is the usual choice. Formats that can be written: F32, BF16, F16, Q8_0, \
Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, IQ4_NL, IQ4_XS, Q4_1, Q4_0, MXFP4, IQ3_M, IQ3_S, IQ3_XS, IQ3_XXS, Q3_K_L, \
Q3_K_M, Q3_K_S, Q2_K, Q2_K_S, IQ2_M, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S, TQ2_0, TQ1_0, Q2_0, Q1_0.

OUT appears when it is complete. The best source is one that was never quantized.

Examples:
  paguro quantize MODEL-BF16.gguf MODEL-Q4_K_M.gguf --format Q4_K_M
  paguro quantize some/hf-folder MODEL-Q8_0.gguf --format Q8_0
  paguro quantize IN.gguf OUT.gguf Q3_K_M --imatrix imatrix.gguf")]
pub struct QuantizeArgs {
    /// The model to read
    #[arg(value_name = "MODEL")]
    pub model: String,

    /// The GGUF file to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,

    /// The format, such as Q4_K_M, as `llama-quantize` takes it
    #[arg(value_name = "FORMAT", required_unless_present = "named_format", conflicts_with = "named_format")]
    format: Option<Mixture>,

    /// The format, such as Q4_K_M
    #[arg(short, long = "format", value_name = "NAME")]
    named_format: Option<Mixture>,

    /// Weigh errors with an importance matrix, from `paguro imatrix` or `llama-imatrix`
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,

    /// See [`WriteArgs`].
    #[command(flatten)]
    pub write: WriteArgs,
}

impl QuantizeArgs {
    /// Returns the format, from either place.
    pub fn format(&self) -> Mixture {
        self.format.or(self.named_format).expect("clap requires one")
    }
}

/// `paguro imatrix`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The text is cut into chunks of --ctx tokens, the first of which is replaced by BOS where the model puts one before every text. The \
squares of all inputs of each matrix are added up, on the CPU. Quantization then keeps weights with large inputs more exactly. The \
file is the one that llama-imatrix writes, and either program reads that of the other. A text of some hundred chunks is enough; it \
should be like those that the model will read. Best is a model that was not quantized.

Examples:
  paguro imatrix MODEL-BF16.gguf text.txt
  paguro imatrix -m MODEL-BF16.gguf -f text.txt -o imatrix.gguf --chunks 100
  paguro quantize MODEL-BF16.gguf MODEL-IQ3_S.gguf --format IQ3_S --imatrix imatrix.gguf")]
pub struct ImatrixArgs {
    /// See [`TextArgs`].
    #[command(flatten)]
    pub text: TextArgs,

    /// The file to write
    #[arg(short, long = "output", visible_alias = "out", value_name = "OUT", default_value = "imatrix.gguf")]
    pub out: PathBuf,

    /// Tokens in a chunk
    #[arg(short, long, visible_alias = "ctx-size", value_name = "TOKENS", default_value_t = 512, value_parser = choices::window)]
    pub ctx: usize,

    /// Only this many chunks
    #[arg(long, value_name = "N", value_parser = choices::positive)]
    pub chunks: Option<usize>,

    /// Leave out this many chunks at the beginning of the text
    #[arg(long, visible_alias = "chunk", value_name = "N", default_value_t = 0)]
    pub from_chunk: usize,

    /// Add these importance matrices of the same model
    #[arg(long, value_name = "FILE")]
    pub in_file: Vec<PathBuf>,

    /// Collect the inputs of the head as well
    #[arg(long)]
    pub process_output: bool,

    /// Do not compute the perplexity, which is faster
    #[arg(long)]
    pub no_ppl: bool,

    /// See [`WriteArgs`].
    #[command(flatten)]
    pub write: WriteArgs,
}

/// `paguro convert`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The weights keep their format, as far as GGUF has it: a folder in BF16 becomes a file in BF16. `paguro quantize` reads folders as \
well. A model of which a GGUF file would lose something is refused.

Examples:
  paguro convert some/hf-folder MODEL.gguf
  paguro convert MODEL-00001-of-00003.gguf MODEL.gguf    one file of several
  paguro convert BASE --lora ADAPTER MODEL.gguf          an adapter merged into its base")]
pub struct ConvertArgs {
    /// The model to read: a Hugging Face folder, a GGUF file, or a model of the library
    #[arg(value_name = "MODEL")]
    pub model: String,

    /// The GGUF file to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,

    /// Merge an adapter (LoRA) with its scale, 1 if absent; quantized matrices that it changes become F16; repeatable
    #[arg(long = "lora", value_name = "FILE[:SCALE]")]
    pub loras: Vec<String>,

    /// See [`WriteArgs`].
    #[command(flatten)]
    pub write: WriteArgs,
}

/// Options of commands that write a file.
#[derive(Args, Clone, Copy, Debug)]
pub struct WriteArgs {
    /// Replace OUT if it exists
    #[arg(long)]
    pub replace: bool,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,

    /// See [`ThreadsArg`].
    #[command(flatten)]
    pub threads: ThreadsArg,
}
