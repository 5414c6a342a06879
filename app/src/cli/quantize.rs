//! `paguro quantize` and `paguro convert`.

use std::path::PathBuf;

use clap::Args;
use paguro_quantize::Mixture;

use super::ThreadsArg;

/// `paguro quantize`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The model is a GGUF file, a Hugging Face folder, or a model of the library. Formats are named as files are: most are mixtures, in \
which matrices whose errors cost most get more bits. Q4_K_M is the usual choice. Formats that can be written: F32, BF16, F16, Q8_0, \
Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, IQ4_NL, IQ4_XS, Q4_1, Q4_0, MXFP4, IQ3_M, IQ3_S, IQ3_XS, IQ3_XXS, Q3_K_L, \
Q3_K_M, Q3_K_S, Q2_K, Q2_K_S, IQ2_M, IQ2_S, IQ2_XS, IQ2_XXS, TQ2_0, TQ1_0, Q2_0, Q1_0.

OUT appears when it is complete. The best source is one that was never quantized.

Examples:
  paguro quantize MODEL-BF16.gguf MODEL-Q4_K_M.gguf --format Q4_K_M
  paguro quantize some/hf-folder MODEL-Q8_0.gguf --format Q8_0
  paguro quantize IN.gguf OUT.gguf --format Q3_K_M --imatrix imatrix.gguf")]
pub struct QuantizeArgs {
    /// The model to read
    #[arg(value_name = "MODEL")]
    pub model: String,

    /// The GGUF file to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,

    /// The format, such as Q4_K_M
    #[arg(short, long, value_name = "NAME")]
    pub format: Mixture,

    /// Weigh errors with an importance matrix, as `llama-imatrix` writes it
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,

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
  paguro convert MODEL-00001-of-00003.gguf MODEL.gguf    one file of several")]
pub struct ConvertArgs {
    /// The model to read: a Hugging Face folder, a GGUF file, or a model of the library
    #[arg(value_name = "MODEL")]
    pub model: String,

    /// The GGUF file to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,

    /// See [`WriteArgs`].
    #[command(flatten)]
    pub write: WriteArgs,
}

/// Options of commands that write a model.
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
