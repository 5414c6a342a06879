//! Settings of `paguro serve`, with the same names as flags, in a file and in the environment.

use std::{collections::BTreeMap, path::PathBuf};

use clap::{ArgMatches, Args, Command, FromArgMatches, Id, ValueEnum, parser::ValueSource};
use paguro_server::{Alias, HostPattern, KvEncoding};
use serde::{Deserialize, Deserializer};

use super::{
    choices::{self, Attributes, DeviceList, KvDtype, Numerics, Speculate, Split},
    quantities::{Bytes, ExpertSlots, KeepAlive, SizeOrOff, StepTime, Time},
};
use crate::{mcp::McpOptions, presets::Preset};

/// `paguro serve`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = "\
Serves the model inside this binary, `tales`, the named models, those of folders (--models-dir), and all models of the \
library. A model is loaded at its \
first request, and unloaded if it is not used for a while or another model needs the memory. The port is Ollama's, so \
its clients find the server. OpenAI clients need the address http://127.0.0.1:11434/v1, Anthropic clients need \
http://127.0.0.1:11434; any API key works until there are keys.

  OpenAI     /v1/chat/completions, /v1/completions, /v1/responses,
             /v1/embeddings, /v1/models
  Anthropic  /v1/messages, /v1/messages/count_tokens
  Ollama     /api/chat, /api/generate, /api/embed, /api/tags, /api/pull ...
  retrieval  /v1/rerank, /v2/rerank, /v1/score, /v1/classify, /v2/embed (Jina, Cohere, vLLM)
             /embed, /embed_sparse, /rerank, /predict, /similarity, /info (TEI)
  people     /: a page with a chat, models, and what the engine is doing
             /docs, /openapi.json: all of it, with all fields
  operators  /health, /ready, /status, /metrics

Every setting is also a key of a TOML file (--config, else `paguro/serve.toml` in the folder for configurations), such as \
`port = 8080` and `keep-alive = \"1h\"`, and an environment variable (PAGURO_...). A flag takes precedence over the \
environment, and the environment over the file. An unknown key is an error.

Without keys (`paguro keys add`), anyone who can reach the address can use the server if it listens for this machine \
only. If it listens for other machines, requests always need a key.

Sizes are bytes or have a unit: 512MiB, 8GB. Times are seconds or have a unit: 90s, 5m, 1h, forever.

Examples:
  paguro serve
  paguro serve MODEL.gguf --port 8080 --keep-alive forever
  paguro serve some/folder                       all models in it
  paguro serve -m MODEL.gguf --alias gpt-4o --host 0.0.0.0 --api-key secret
  curl http://127.0.0.1:11434/v1/chat/completions -d '{\"model\": \"tales\",
    \"messages\": [{\"role\": \"user\", \"content\": \"Tell me a story\"}]}'")]
pub struct ServeArgs {
    /// The file with settings
    #[arg(long, env = "PAGURO_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// All other settings.
    #[command(flatten)]
    pub given: Given<ServeOptions>,
}

/// Options by origin.
#[derive(Clone, Debug)]
pub struct Given<T> {
    /// Options of the command line.
    pub flags: T,
    /// Options of the environment that no flag sets.
    pub environment: T,
}

impl<T: FromArgMatches> FromArgMatches for Given<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let set_in = |environment: bool| {
            let mut some = matches.clone();
            for id in matches.ids().map(Id::as_str) {
                if (matches.value_source(id) == Some(ValueSource::EnvVariable)) != environment {
                    // It exists: `ids` has it.
                    let _ = some.try_clear_id(id);
                }
            }
            T::from_arg_matches(&some)
        };
        Ok(Self { flags: set_in(false)?, environment: set_in(true)? })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<T: Args> Args for Given<T> {
    fn augment_args(command: Command) -> Command {
        T::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        T::augment_args_for_update(command)
    }
}

/// Declares options that are absent if not set, and their completion by weaker ones.
macro_rules! layered {
    (
        $(#[$doc:meta])*
        pub struct $name:ident { $($(#[$attribute:meta])* pub $field:ident: $type:ty,)* }
    ) => {
        $(#[$doc])*
        pub struct $name { $($(#[$attribute])* pub $field: $type,)* }

        impl $name {
            fn completed(self, weaker: Self) -> Self {
                Self { $($field: self.$field.or_weaker(weaker.$field),)* }
            }
        }
    };
}

/// An option, or a list of them, that may be absent.
trait Layer {
    /// Returns this value, or the weaker one if it is absent.
    fn or_weaker(self, weaker: Self) -> Self;
}

impl<T> Layer for Option<T> {
    fn or_weaker(self, weaker: Self) -> Self {
        self.or(weaker)
    }
}

impl<T> Layer for Vec<T> {
    fn or_weaker(self, weaker: Self) -> Self {
        if self.is_empty() { weaker } else { self }
    }
}

impl<K, V> Layer for BTreeMap<K, V> {
    fn or_weaker(self, weaker: Self) -> Self {
        if self.is_empty() { weaker } else { self }
    }
}

layered! {
    /// Settings of flags, environment and file; absent if not set.
    #[derive(Args, Clone, Debug, Default, Deserialize)]
    #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
    pub struct ServeOptions {
        /// GGUF files and Hugging Face folders to serve, by their file names; a folder of such stands for all in it
        #[arg(value_name = "MODEL | FOLDER")]
        pub models: Vec<String>,

        /// A MODEL as a flag; repeatable
        #[arg(short = 'm', long = "model", value_name = "MODEL")]
        #[serde(rename = "model")]
        pub more_models: Vec<String>,

        /// Serve all models in this folder, by their file names; repeatable
        #[arg(long = "models-dir", env = "PAGURO_MODELS_DIR", value_name = "FOLDER", help_heading = "Models")]
        #[serde(rename = "models-dir", deserialize_with = "one_or_many")]
        pub model_folders: Vec<PathBuf>,

        /// Address or name to listen at: 127.0.0.1, localhost, 0.0.0.0 for all [default: 127.0.0.1]
        #[arg(long, env = "PAGURO_HOST", value_name = "ADDRESS", help_heading = "Listening")]
        pub host: Option<String>,

        /// A key that clients need, besides those of `paguro keys`; others can see it among the processes; repeatable
        #[arg(long = "api-key", value_name = "KEY", help_heading = "Listening", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        #[serde(rename = "api-key")]
        pub api_keys: Vec<String>,

        /// Port to listen at; 0 takes a free one [default: 11434]
        #[arg(long, env = "PAGURO_PORT", value_name = "PORT", help_heading = "Listening", value_parser = choices::port)]
        pub port: Option<u16>,

        /// Also listen at a Unix socket
        #[arg(long, env = "PAGURO_SOCKET", value_name = "FILE", help_heading = "Listening")]
        pub socket: Option<PathBuf>,

        /// A host name besides localhost that requests may use while the server listens for this machine only; repeatable
        #[arg(
            long = "allow-host",
            env = "PAGURO_ALLOW_HOST",
            value_name = "NAME",
            value_delimiter = ',',
            help_heading = "Listening"
        )]
        #[serde(rename = "allow-host")]
        pub allow_hosts: Vec<String>,

        /// Origin of web pages that may use the server, tools and changes of models included; * lets all pages generate; repeatable
        #[arg(
            long = "cors-origin",
            env = "PAGURO_CORS_ORIGIN",
            value_name = "ORIGIN",
            value_delimiter = ',',
            help_heading = "Listening"
        )]
        #[serde(rename = "cors-origin")]
        pub cors_origins: Vec<String>,

        /// A host from which images at URLs are fetched, *.example.org for several, * for all public ones; repeatable [default: none]
        #[arg(
            long = "image-urls",
            env = "PAGURO_IMAGE_URLS",
            value_name = "HOST",
            value_delimiter = ',',
            help_heading = "Images"
        )]
        pub image_urls: Vec<HostPattern>,

        /// The vision tower of the MODEL, a projector [default: the mmproj file beside a model]
        #[arg(long, env = "PAGURO_MMPROJ", value_name = "FILE", help_heading = "Images")]
        pub mmproj: Option<PathBuf>,

        /// Load no vision towers: all models read text only
        #[arg(long, env = "PAGURO_NO_MMPROJ", boolean = "Images")]
        pub no_mmproj: Option<bool>,

        /// Maximum tokens of an image; its level of detail cannot exceed this [default: the model's, at most 1024]
        #[arg(long, env = "PAGURO_IMAGE_MAX_TOKENS", value_name = "TOKENS", help_heading = "Images", value_parser = choices::image_tokens)]
        pub image_max_tokens: Option<u32>,

        /// Minimum tokens of an image, to which small ones are enlarged [default: the model's]
        #[arg(long, env = "PAGURO_IMAGE_MIN_TOKENS", value_name = "TOKENS", help_heading = "Images", value_parser = choices::image_tokens)]
        pub image_min_tokens: Option<u32>,

        /// Refuse every field that has no effect, instead of naming it in the answer's `X-Paguro-Ignored`
        #[arg(long, env = "PAGURO_STRICT", boolean = "Listening")]
        pub strict: Option<bool>,

        /// Refuse prompts and inputs that are lists of token ids, which clients of OpenAI's API make with another tokenizer
        #[arg(long, env = "PAGURO_REFUSE_TOKEN_IDS", boolean = "Listening")]
        pub refuse_token_ids: Option<bool>,

        /// Another name of the first model, or with PATTERN=NAME of any (several: comma-separated or repeated): 'claude-*=qwen3:4b'
        #[arg(
            long = "alias",
            env = "PAGURO_ALIAS",
            value_name = "NAME|PATTERN=NAME",
            value_delimiter = ',',
            help_heading = "Models"
        )]
        #[serde(rename = "alias")]
        pub aliases: Vec<Alias>,

        /// Presets by the models' names; only in the file
        #[arg(skip)]
        #[serde(rename = "preset")]
        pub presets: BTreeMap<String, Preset>,

        /// Servers of tools for the page's chat; only in the file
        #[arg(skip)]
        pub mcp: Vec<McpOptions>,

        /// Maximum bytes of a request's body [default: 32MiB]
        #[arg(long, env = "PAGURO_MAX_BODY", value_name = "BYTES", help_heading = "Listening")]
        pub max_body: Option<Bytes>,

        /// Memory for the bodies of all requests that are being read or prepared [default: 256MiB]
        #[arg(long, env = "PAGURO_BODY_MEMORY", value_name = "BYTES", help_heading = "Listening")]
        pub body_memory: Option<Bytes>,

        /// Minimum bytes of a body per second, after the first ten seconds; 0 for no limit [default: 1KiB]
        #[arg(long, env = "PAGURO_MIN_BODY_RATE", value_name = "BYTES", help_heading = "Listening")]
        pub min_body_rate: Option<Bytes>,

        /// Maximum open connections; beyond it, the one with the longest idle time is closed [default: 4096]
        #[arg(long, env = "PAGURO_MAX_CONNECTIONS", value_name = "N", help_heading = "Listening", value_parser = choices::positive)]
        pub max_connections: Option<usize>,

        /// Maximum open connections of one remote client [default: a quarter of --max-connections]
        #[arg(long, env = "PAGURO_MAX_CONNECTIONS_PER_CLIENT", value_name = "N", help_heading = "Listening", value_parser = choices::positive)]
        pub max_connections_per_client: Option<usize>,

        /// Maximum time for a request's head or body to arrive [default: 60s]
        #[arg(long, env = "PAGURO_READ_TIMEOUT", value_name = "TIME", help_heading = "Listening")]
        pub read_timeout: Option<Time>,

        /// Maximum time for which a client may not read its answer [default: 30s]
        #[arg(long, env = "PAGURO_WRITE_TIMEOUT", value_name = "TIME", help_heading = "Listening")]
        pub write_timeout: Option<Time>,

        /// Maximum time of an answer, including loading of the model [default: no limit]
        #[arg(long, env = "PAGURO_REQUEST_TIMEOUT", value_name = "TIME", help_heading = "Listening")]
        pub request_timeout: Option<Time>,

        /// Time that running requests may take after the server was stopped [default: 10s]
        #[arg(long, env = "PAGURO_SHUTDOWN_TIMEOUT", value_name = "TIME", help_heading = "Listening")]
        pub shutdown_timeout: Option<Time>,

        /// Time for which a stopped server answers new requests with 503 at least, so that routers notice before its port is
        /// closed [default: 0s]
        #[arg(long, env = "PAGURO_DRAIN_TIME", value_name = "TIME", help_heading = "Listening")]
        pub drain_time: Option<Time>,

        /// Do not serve the page at `/`
        #[arg(long, env = "PAGURO_NO_UI", boolean = "Listening")]
        pub no_ui: Option<bool>,

        /// Open the page in the browser
        #[arg(long, env = "PAGURO_OPEN", boolean = "Listening")]
        pub open: Option<bool>,

        /// Memory of all loaded models together: weights, K and V, buffers; with --replicas, on each device [default: 80 % of the free
        /// memory at the start]
        #[arg(long, env = "PAGURO_MEMORY", value_name = "BYTES", help_heading = "Models")]
        pub memory: Option<Bytes>,

        /// Experts of each layer that have room in a GPU's memory, where all are in the host's: auto, all, least, a number, bytes, or
        /// all-N for what all layers but N take [default: auto, which uses the host's memory only for models that do not fit]
        #[arg(long, env = "PAGURO_EXPERT_SLOTS", value_name = "N|BYTES|...", help_heading = "Models")]
        pub expert_slots: Option<ExpertSlots>,

        /// Time that an unused model stays loaded [default: 5m]
        #[arg(long, env = "PAGURO_KEEP_ALIVE", value_name = "TIME", help_heading = "Models")]
        pub keep_alive: Option<KeepAlive>,

        /// Tokens that fit, prompt and answer together; 0 for all the model was trained for [default: that, at most 65536]; memory
        /// for K and V may bound it further
        #[arg(short, long, env = "PAGURO_CTX", value_name = "TOKENS", help_heading = "Models")]
        pub ctx: Option<usize>,

        /// Memory for K and V of each model [default: for --parallel contexts, at most 65536 tokens]
        #[arg(long, env = "PAGURO_KV_MEMORY", value_name = "BYTES", help_heading = "Models")]
        pub kv_memory: Option<Bytes>,

        /// Encoding of the KV cache: f16, q8 in about half the memory, or q4 in about a quarter [default: f16]
        #[arg(long, value_enum, env = "PAGURO_KV_DTYPE", choice = "f16|q8|q4", help_heading = "Models")]
        pub kv_dtype: Option<KvDtype>,

        /// Guess tokens of answers and check several in a step: auto, from the text before them or by a head or draft model, where that is
        /// faster; model:N, always N tokens by the head or draft model; or off. Answers are the same [default: auto]
        #[arg(long, env = "PAGURO_SPECULATE", value_name = "auto|model:N|off", help_heading = "Models")]
        pub speculate: Option<Speculate>,

        /// Also let a smaller model with the same tokens, or its assistant, draft the answers of the first model on the command line
        /// [default: the assistant beside a model]
        #[arg(long, env = "PAGURO_DRAFT", value_name = "MODEL", help_heading = "Models")]
        pub draft: Option<String>,

        /// Host memory for KV blocks evicted from the GPU, shared by all models; or off. No effect on the CPU [default: a quarter of
        /// the free memory, at most 16GB]
        #[arg(long, env = "PAGURO_KV_HOST", value_name = "BYTES|off", help_heading = "Models")]
        pub kv_host: Option<SizeOrOff>,

        /// Disk space for the KV cache of earlier requests, which is read again after a restart; or off [default: a tenth of the free
        /// space, at most 16GB]
        #[arg(long, env = "PAGURO_KV_DISK", value_name = "BYTES|off", help_heading = "Models")]
        pub kv_disk: Option<SizeOrOff>,

        /// Folder of the disk cache [default: `kv` in the folder of the library]
        #[arg(long, env = "PAGURO_KV_DISK_DIR", value_name = "DIR", help_heading = "Models")]
        pub kv_disk_dir: Option<PathBuf>,

        /// Address of a ZeroMQ socket that publishes which blocks of prompts are where, as vLLM does, for routers: tcp://127.0.0.1:5557. The
        /// events contain tokens of prompts
        #[arg(long, env = "PAGURO_KV_EVENTS", value_name = "ENDPOINT", help_heading = "Models")]
        pub kv_events: Option<String>,

        /// Address of a ZeroMQ socket that repeats events on request
        #[arg(long, env = "PAGURO_KV_EVENTS_REPLAY", value_name = "ENDPOINT", help_heading = "Models")]
        pub kv_events_replay: Option<String>,

        /// First part of each of these messages; {model} in it is the model's name, {address} that of the socket; the default is
        /// `kv@{address}@{model}`
        #[arg(long, env = "PAGURO_KV_EVENTS_TOPIC", value_name = "TEXT", help_heading = "Models")]
        pub kv_events_topic: Option<String>,

        /// Form of these events: map, as in vLLM since 0.24, or array, as before [default: map]
        #[arg(long, value_enum, env = "PAGURO_KV_EVENTS_ENCODING", choice = "map|array", help_heading = "Models")]
        pub kv_events_encoding: Option<KvEventsEncoding>,

        /// Answer /metrics, /load, /server_info and /v1/models without a key, for routers and monitoring that have none
        #[arg(long, env = "PAGURO_PUBLIC_METRICS", boolean = "Listening")]
        pub public_metrics: Option<bool>,

        /// `owned_by` of the models in /v1/models, by which some routers recognize a server: vllm [default: paguro]
        #[arg(long, env = "PAGURO_OWNED_BY", value_name = "NAME", help_heading = "Listening")]
        pub owned_by: Option<String>,

        /// Requests that share computed prefixes: those of one key, or all; without keys there is no difference [default:
        /// keys]
        #[arg(long, value_enum, env = "PAGURO_SHARE_PREFIXES", choice = "keys|all", help_heading = "Models")]
        pub share_prefixes: Option<SharePrefixes>,

        /// An adapter (LoRA): a folder of PEFT or mlx-lm, or a GGUF file. Requests name it as their model; repeatable. Its model
        /// is the first one, or is named: MODEL::NAME=PATH
        #[arg(
            long = "lora",
            env = "PAGURO_LORA",
            value_delimiter = ',',
            value_name = "NAME=PATH",
            help_heading = "Models"
        )]
        #[serde(rename = "lora")]
        pub loras: Vec<String>,

        /// Maximum number of adapters of each model [default: 32]
        #[arg(long, env = "PAGURO_MAX_LORAS", value_name = "N", help_heading = "Models", value_parser = choices::positive)]
        pub max_loras: Option<usize>,

        /// Maximum rank of an adapter [default: 256]
        #[arg(long, env = "PAGURO_MAX_LORA_RANK", value_name = "N", help_heading = "Models", value_parser = choices::positive)]
        pub max_lora_rank: Option<usize>,

        /// Memory for the adapters of each model, at most; it is a part of --memory [default: 4GiB]
        #[arg(long, env = "PAGURO_MAX_LORA_MEMORY", value_name = "SIZE", help_heading = "Models")]
        pub max_lora_memory: Option<Bytes>,

        /// Maximum concurrent sequences of each model [default: 64]
        #[arg(long, env = "PAGURO_PARALLEL", value_name = "N", help_heading = "Models", value_parser = choices::positive)]
        pub parallel: Option<usize>,

        /// Tokens of a step: prompts are computed in chunks of at most N, and each sequence that answers uses one [default:
        /// 512; for encoders on a GPU up to 8192]
        #[arg(long, env = "PAGURO_BATCH_TOKENS", value_name = "N", help_heading = "Models", value_parser = choices::positive)]
        pub batch_tokens: Option<usize>,

        /// Maximum time of a step that computes a part of a prompt beside running answers [default: 100ms]
        #[arg(long, env = "PAGURO_STEP_TIME", value_name = "TIME", help_heading = "Models")]
        pub step_time: Option<StepTime>,

        /// Maximum waiting requests of each model; more are refused (429) [default: 1024]
        #[arg(long, env = "PAGURO_MAX_QUEUE", value_name = "N", help_heading = "Models", value_parser = choices::positive)]
        pub max_queue: Option<usize>,

        /// Maximum waiting prompt tokens of each model; a request beyond it is refused (429) unless no other waits
        /// [default: no limit]
        #[arg(long, env = "PAGURO_MAX_QUEUE_TOKENS", value_name = "N", help_heading = "Models", value_parser = choices::positive)]
        pub max_queue_tokens: Option<usize>,

        /// CPU threads [default: all that this process may use]
        #[arg(short, long, env = "PAGURO_THREADS", value_name = "N", help_heading = "Running", value_parser = choices::positive)]
        pub threads: Option<usize>,

        /// Device: auto, cpu, gpu or gpu:N; or a list such as gpu:0,gpu:1 or gpu,cpu, among which the layers are divided
        #[arg(long, env = "PAGURO_DEVICE", value_name = "NAME,...", help_heading = "Running")]
        pub device: Option<DeviceList>,

        /// Run each model as a whole on each device of --device; a request goes to the one that has its prefix, or has less to do
        #[arg(long, env = "PAGURO_REPLICAS", boolean = "Running")]
        pub replicas: Option<bool>,

        /// Layers on GPUs, the last ones of a model; the CPU runs those before them [default: as many as fit]
        #[arg(long, env = "PAGURO_GPU_LAYERS", value_parser = choices::layers, value_name = "N", help_heading = "Running")]
        pub gpu_layers: Option<usize>,

        /// Shares of the GPUs in these layers, such as 3,1 [default: by their free memory]
        #[arg(long, env = "PAGURO_SPLIT", value_name = "N,N,...", help_heading = "Running")]
        pub split: Option<Split>,

        /// Sums on a GPU: fast with its matrix units, or exact in one order for any batch [default: fast; the CPU is exact]
        #[arg(long, value_enum, env = "PAGURO_NUMERICS", choice = "exact|fast", help_heading = "Running")]
        pub numerics: Option<Numerics>,

        /// Log filter, such as `info` or `info,paguro_server=debug` [default: info]
        #[arg(long, env = "PAGURO_LOG", value_name = "FILTER", help_heading = "Logging")]
        pub log: Option<String>,

        /// Send a span of each request to a collector that speaks OTLP over HTTP, as http://localhost:4318
        #[arg(long, env = "PAGURO_OTLP_ENDPOINT", value_name = "URL", help_heading = "Logging")]
        pub otlp_endpoint: Option<String>,

        /// Format of the log: text or json [default: text]
        #[arg(long, value_enum, env = "PAGURO_LOG_FORMAT", choice = "FORMAT", help_heading = "Logging")]
        pub log_format: Option<LogFormat>,
    }
}

impl ServeOptions {
    /// Returns these options, completed by `weaker`. Models of the command line are served besides those of the file.
    #[must_use]
    pub fn or(mut self, weaker: Self) -> Self {
        add(&mut self.models, &weaker.models);
        add(&mut self.more_models, &weaker.more_models);
        add(&mut self.model_folders, &weaker.model_folders);
        self.completed(weaker)
    }
}

/// Adds the values of another list that are missing.
fn add<T: PartialEq + Clone>(list: &mut Vec<T>, others: &[T]) {
    for other in others {
        if !list.contains(other) {
            list.push(other.clone());
        }
    }
}

/// Reads a path, or a list of paths.
fn one_or_many<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<PathBuf>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Paths {
        One(PathBuf),
        Many(Vec<PathBuf>),
    }
    Ok(match Paths::deserialize(input)? {
        Paths::One(path) => vec![path],
        Paths::Many(paths) => paths,
    })
}

/// Values of `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Values of `--kv-events-encoding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum KvEventsEncoding {
    /// Maps with names.
    Map,
    /// Arrays in the order of the fields.
    Array,
}

impl From<KvEventsEncoding> for KvEncoding {
    fn from(encoding: KvEventsEncoding) -> Self {
        match encoding {
            KvEventsEncoding::Map => Self::Map,
            KvEventsEncoding::Array => Self::Array,
        }
    }
}

/// Values of `--share-prefixes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SharePrefixes {
    /// Requests of one key.
    Keys,
    /// All requests.
    All,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_file_has_the_flags_names_and_no_others() {
        let options: ServeOptions =
            toml::from_str("port = 8080\nkeep-alive = \"1h\"\nmemory = 1000000\nlog-format = \"json\"")
                .unwrap();
        assert_eq!((options.port, options.memory), (Some(8080), Some(Bytes(1_000_000))));
        assert_eq!(options.keep_alive, Some(KeepAlive(Some(Duration::from_secs(3600)))));
        for text in ["models-dir = \"a\"", "models-dir = [\"a\"]"] {
            assert_eq!(toml::from_str::<ServeOptions>(text).unwrap().model_folders, [PathBuf::from("a")]);
        }
        let models = |names: &[&str]| ServeOptions {
            models: names.iter().map(|&name| name.to_owned()).collect(),
            ..ServeOptions::default()
        };
        assert_eq!(models(&["a", "b"]).or(models(&["b", "c"])).models, ["a", "b", "c"]);
        let error = |text: &str| toml::from_str::<ServeOptions>(text).unwrap_err().to_string();
        assert!(error("prot = 8080").contains("unknown field `prot`"));
        assert!(error("keep-alive = \"soon\"").contains("must be a time"));
    }
}
