//! Arguments of `paguro pull`, `import`, `search`, `list`, `show`, `rm`, `cp`, `preset`, `prune`, `verify` and `rebuild`.

use std::path::PathBuf;

use clap::Args;
use paguro_library::ModelName;

use super::choices::KvDtype;

/// `paguro pull`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
A short name (`paguro search` lists them) is a well-known model: `qwen3:4b`, or `qwen3` for the usual size of it, or \
`qwen3:4b-q8_0` for another quantization.

Of a repository with GGUF files, one model is pulled: the one that is named after the colon, else Q4_K_M, else Q8_0, else \
the nearest to these, with all files if it is split. Of a repository without GGUF files, the folder of safetensors is \
pulled; with both, `:safetensors` selects the folder. Addresses pasted from a browser are accepted.

Adapters (LoRA) are pulled as models are. An adapter that does not fit its base is refused.

Every file is checked against the hub's checksum before the model is in the library. The same command resumes an \
interrupted pull. Pulling a model again downloads what has changed.

HF_ENDPOINT is the hub, https://huggingface.co unless set. HF_TOKEN opens private and gated models.

Examples:
  paguro pull qwen3:0.6b                        a well-known model
  paguro pull hf:Qwen/Qwen3-4B-GGUF             its usual quantization
  paguro pull hf:Qwen/Qwen3-4B-GGUF:Q8_0        this one
  paguro pull hf:Qwen/Qwen3-0.6B --name qwen    safetensors, by another name
  paguro pull hf:OWNER/ADAPTER --base qwen3:4b  an adapter of a model of the library")]
pub struct PullArgs {
    /// A short name, or hf:OWNER/REPOSITORY[@REVISION][:QUANTIZATION | :FILE]
    #[arg(value_name = "MODEL")]
    pub reference: String,

    /// Its name in the library [default: the short name, or OWNER/REPOSITORY:QUANTIZATION]
    #[arg(long, value_name = "NAME")]
    pub name: Option<ModelName>,

    /// The model that an adapter (LoRA) changes, of the library [default: the one that its files name]
    #[arg(long, value_name = "MODEL")]
    pub base: Option<String>,

    /// Succeed even if this version cannot run the model
    #[arg(long)]
    pub force: bool,
}

/// `paguro import`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Models of Ollama, LM Studio and the Hugging Face cache are imported by their names there (`paguro list --found`). The \
library has hard links to their files where the file system allows it; otherwise the files stay in place. Nothing is \
copied. Parameters, the system prompt and messages of Ollama's models become their preset and defaults.

Files and folders stay where they are and must not move; the library detects changes. With --link the library has hard \
links, and with --copy copies, which models with the same content share. All models in a folder of GGUF files are \
imported. A GGUF file is recognised by its content.

Examples:
  paguro import ollama:                      all models of Ollama
  paguro import ollama:qwen3:4b              one of them
  paguro import lmstudio:                    also hf-cache:
  paguro import MODEL.gguf --name tiny       a file, under another name
  paguro import some/hf-folder --copy        a copy; the folder can be deleted
  paguro import some/adapter --base tiny     an adapter (LoRA): a folder of PEFT or mlx-lm, or a GGUF file")]
pub struct ImportArgs {
    /// A GGUF file (any one of a split model), a folder of models, or ollama:, lmstudio: or hf-cache: with or without a
    /// name
    #[arg(value_name = "FILE | FOLDER | PROGRAM:[NAME]")]
    pub path: PathBuf,

    /// Its name in the library [default: its file's, or that in the other program]
    #[arg(long, value_name = "NAME")]
    pub name: Option<ModelName>,

    /// The model that an adapter (LoRA) changes, of the library [default: the one that its files name]
    #[arg(long, value_name = "MODEL")]
    pub base: Option<String>,

    /// Copy the files into the library
    #[arg(long, conflicts_with_all = ["link", "in_place"])]
    pub copy: bool,

    /// Make hard links in the library, so that the model stays if the files are removed [default for other programs]
    #[arg(long, conflicts_with = "in_place")]
    pub link: bool,

    /// Leave the files where they are [default for a path]
    #[arg(long)]
    pub in_place: bool,

    /// Replace a model of that name
    #[arg(long)]
    pub replace: bool,

    /// Import even if this version cannot run the model
    #[arg(long)]
    pub force: bool,
}

/// Place of an imported model's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Copies in the library.
    Copy,
    /// Hard links in the library.
    Link,
    /// The place where they are.
    InPlace,
}

impl ImportArgs {
    /// Returns the place that a flag selects.
    pub fn placement(&self) -> Option<Placement> {
        let flags =
            [(self.copy, Placement::Copy), (self.link, Placement::Link), (self.in_place, Placement::InPlace)];
        flags.into_iter().find(|(is_given, _)| *is_given).map(|(_, placement)| placement)
    }
}

/// `paguro search`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The well-known models are a table inside this binary, so they are found without a network. Repositories \
with GGUF files on Hugging Face (HF_ENDPOINT) follow, the most downloaded first.

Examples:
  paguro search               all well-known models
  paguro search coder         models with `coder` in their name or use
  paguro search llama 1b --offline")]
pub struct SearchArgs {
    /// Words of a name, or of what the model is good for [default: all well-known models]
    #[arg(value_name = "WORD")]
    pub words: Vec<String>,

    /// Search the table only
    #[arg(long)]
    pub offline: bool,

    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// `paguro list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// List models of Ollama, LM Studio and the Hugging Face cache instead, with the command that imports each
    #[arg(long)]
    pub found: bool,

    /// Without effect: all models are listed
    #[arg(short, long, hide = true)]
    pub all: bool,

    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// `paguro show`.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// The model
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `paguro rm`.
#[derive(Args, Debug)]
pub struct RmArgs {
    /// The models
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,

    /// Do not fail if a model does not exist
    #[arg(short, long)]
    pub force: bool,
}

/// `paguro cp`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The two models share their files, and each has a preset of its own. Another name of one model is an alias: \
paguro preset NAME --alias OTHER.")]
pub struct CpArgs {
    /// The model
    #[arg(value_name = "NAME")]
    pub from: String,

    /// Its other name
    #[arg(value_name = "NEW NAME")]
    pub to: ModelName,

    /// Replace a model of that name
    #[arg(long)]
    pub replace: bool,
}

/// `paguro preset`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
A preset has the settings with which servers load a model, defaults of its requests, and its aliases. It is kept when \
the model is pulled again. A running server applies it from the next request on, and reloads the model if necessary. \
Options are those of Ollama's API; values in a request take precedence. `paguro run` uses the context, the system message and \
the options, unless a flag sets them.

The settings file of a server can also have presets, even for models outside of the library; they take precedence:

  [preset.\"qwen3:4b\"]
  ctx = 32768
  chat-template = \"qwen3.jinja\"
  options = { temperature = 0.2 }

Examples:
  paguro preset qwen3:4b                                    show it
  paguro preset qwen3:4b --ctx 32768 --kv-dtype q8
  paguro preset qwen3:4b --set temperature=0.2 --set top_k=20
  paguro preset qwen3:4b --alias coder --alias gpt-5
  paguro preset coder --remove-alias coder")]
pub struct PresetArgs {
    /// The model
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Maximum tokens of prompt and answer together; 0 for all the model was trained for
    #[arg(short = 'c', long, value_name = "TOKENS")]
    pub ctx: Option<usize>,

    /// Encoding of keys and values in the cache
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<KvDtype>,

    /// Chat template in place of the model's own, a file in jinja
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,

    /// System message of chats that have none
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// The model that this adapter (LoRA) changes, of the library
    #[arg(long, value_name = "MODEL")]
    pub base: Option<String>,

    /// An option of requests, such as temperature=0.2; repeatable
    #[arg(long = "set", value_name = "OPTION=VALUE")]
    pub options: Vec<String>,

    /// Another name of the model; repeatable
    #[arg(long = "alias", value_name = "NAME")]
    pub aliases: Vec<ModelName>,

    /// Remove an alias; repeatable
    #[arg(long = "remove-alias", value_name = "NAME")]
    pub removed_aliases: Vec<ModelName>,

    /// Remove the preset first
    #[arg(long)]
    pub clear: bool,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl PresetArgs {
    /// Returns true if an argument sets a value of the preset. [`clear`](Self::clear) sets none.
    pub fn changes(&self) -> bool {
        self.ctx.is_some()
            || self.kv_dtype.is_some()
            || self.chat_template.is_some()
            || self.system.is_some()
            || self.base.is_some()
            || !self.options.is_empty()
            || !self.aliases.is_empty()
            || !self.removed_aliases.is_empty()
    }
}

/// `paguro prune`.
#[derive(Args, Debug)]
pub struct PruneArgs {
    /// Also delete models that the catalogue has lost
    #[arg(long)]
    pub force: bool,
}

/// `paguro verify`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Reads the files of models and compares them with their checksums. A damaged model cannot run until it is repaired. \
--repair restores its files from the hub, or from the place of their import if they are unchanged there. Intact files \
are never lost.

Exit status: 0 all files are intact or repaired, 1 a file is damaged, 2 there is no such model, 130 stopped with Ctrl-C.

Examples:
  paguro verify                      all of the library
  paguro verify qwen3 --repair       one model, with repair of damaged files")]
pub struct VerifyArgs {
    /// The model [default: all models, and files that belong to none]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,

    /// Restore damaged files
    #[arg(long)]
    pub repair: bool,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `paguro rebuild`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The library has a small record of each model. If the catalogue (library.db) is lost, empty or damaged, it is rebuilt from \
these records; the old file is kept under another name. If the catalogue is intact, missing models are added. All files \
of restored models are read and checked.")]
pub struct RebuildArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
