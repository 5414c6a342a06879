//! `paguro run`.

use std::path::PathBuf;

use clap::Args;

use super::{
    AttentionArg, BatchTokensArg, GrammarArgs, KvDtypeArg, ProjectorArgs, RunOnArgs, SamplingArgs,
    SpeculateArg, ThreadsArg,
    choices::{self, Attributes},
};

/// `paguro run`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = "\
The first word is the model, if it could be a name: letters, digits and . _ - : / without spaces. It is `tales`, the \
model inside this binary; a GGUF file or a Hugging Face folder; a model of the library (`paguro list`); or a short name \
(`paguro search`), which is offered for download. Anything else begins the prompt, and the built-in model answers: put \
the prompt into quotes. -m, --model gives the model explicitly, and then all words are the prompt. PAGURO_MODEL \
replaces `tales` as the model that answers prompts without one.

Text on standard input is the prompt, or follows the prompt after a blank line. With no prompt at all, `run` is a chat: \
/help there lists its commands.

A model with a chat template gets the prompt as the user's message. A model without one, or --raw, continues the prompt \
as it stands: the tokens that the model puts before every text (BOS) are added unless the prompt already begins with \
them, and with --raw the special tokens written in the prompt are recognised.

Sampling values are those of the model's preset (`paguro preset`), else the model's own recommendation where it has one, \
else temperature 0.8, top-k 40, top-p 0.95, min-p 0.05. The seed is random unless given, and reported.

Flags of llama.cpp and Ollama with a meaning here are understood: --temp, --num-predict, --ctx-size, -ngl, -fa, -ctk ...

Exit status: 0 done, 1 failed, 2 wrong command line, 130 stopped with Ctrl-C.

Examples:
  paguro run \"Tell me a story about a shy fox who lost a key\"
  paguro run qwen3:0.6b \"What is a hermit crab?\" --temperature 0
  paguro run some/hf-folder --system \"Answer in one sentence.\"
  cat notes.txt | paguro run MODEL.gguf \"Sum this up:\"
  paguro run --session garden \"Which herbs grow in the shade?\"
  paguro run --json-schema fox.json \"Describe a fox\"
  paguro run --json --seed 7 \"Name a fox\" | jq -r .text")]
pub struct RunArgs {
    /// A model (its name, a GGUF file or a Hugging Face folder), then the prompt; both may be left out
    #[arg(value_name = "MODEL | PROMPT")]
    pub words: Vec<String>,

    /// The model; all words are then the prompt
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,

    /// Model for prompts without a named model [default: tales, inside this binary]
    #[arg(long, hide = true, env = "PAGURO_MODEL", value_name = "MODEL")]
    pub default_model: Option<String>,

    /// The prompt, as a flag
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    pub prompt: Option<String>,

    /// A file with the prompt
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// An image for the prompt, for models that see: PNG, JPEG, WebP or GIF; repeatable
    #[arg(long = "image", value_name = "FILE", conflicts_with = "raw")]
    pub images: Vec<String>,

    /// An adapter (LoRA) with its scale, 1 if absent: a folder of PEFT or mlx-lm, or a GGUF file; repeatable
    #[arg(long = "lora", value_name = "FILE[:SCALE]")]
    pub loras: Vec<String>,

    /// See [`ProjectorArgs`].
    #[command(flatten)]
    pub projector: ProjectorArgs,

    /// The system message, for models with a chat template
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// Let the model think before it answers, or not, if its chat template has such a switch [default: the template's]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", choice = "BOOL", conflicts_with = "raw")]
    pub think: Option<bool>,

    /// Continue or begin the conversation of this name; its messages and cache are kept (`paguro sessions`)
    #[arg(long, value_name = "NAME", conflicts_with_all = ["raw", "branches"])]
    pub session: Option<String>,

    /// Continue the prompt without the model's chat template
    #[arg(long, conflicts_with = "system")]
    pub raw: bool,

    /// Print one JSON object with the text, token counts, finish reason, timings and seed
    #[arg(long)]
    pub json: bool,

    /// With --json: one JSON object per line, for each piece of text as it arrives, then the result
    #[arg(long, requires = "json")]
    pub stream: bool,

    /// Answer N times, with different draws from the same prompt
    #[arg(long, visible_alias = "answers", value_name = "N", default_value_t = 1, value_parser = choices::answers)]
    pub branches: usize,

    /// With --json: report log-probabilities, and those of the K most probable tokens at each position
    #[arg(long, value_name = "K", requires = "json")]
    pub logprobs: Option<usize>,

    /// Sampling and the end of the answer.
    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// Constraints on the answer.
    #[command(flatten)]
    pub grammar: GrammarArgs,

    /// Tokens that fit, prompt and answer together; 0 for all the model was trained for [default: that, at most 65536]
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

    /// See [`SpeculateArg`].
    #[command(flatten)]
    pub speculate: SpeculateArg,

    /// See [`AttentionArg`].
    #[command(flatten)]
    pub attention: AttentionArg,

    /// See [`RunOnArgs`].
    #[command(flatten)]
    pub on: RunOnArgs,
}
