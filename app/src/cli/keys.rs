//! Arguments of `paguro ps`, `paguro unload` and `paguro keys`.

use clap::{Args, Subcommand, ValueEnum};
use paguro_server::Scope;

use super::{
    choices::{self, Attributes},
    serve::Given,
};

/// A running server.
#[derive(Args, Debug)]
pub struct ServerArgs {
    /// The server's address [default: that of --host and --port]
    #[arg(long, env = "PAGURO_URL", value_name = "URL")]
    pub url: Option<String>,

    /// See [`ServerPlace`].
    #[command(flatten)]
    pub place: Given<ServerPlace>,

    /// The key, where the server needs one
    #[arg(long, env = "PAGURO_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub key: Option<String>,
}

/// Address of a server, as `paguro serve` has it. The settings file has both as well.
#[derive(Args, Clone, Debug)]
pub struct ServerPlace {
    /// The server's host [default: that of serve.toml, or 127.0.0.1]
    #[arg(long, env = "PAGURO_HOST", value_name = "ADDRESS")]
    pub host: Option<String>,

    /// The server's port [default: that of serve.toml, or 11434]
    #[arg(long, env = "PAGURO_PORT", value_name = "PORT", value_parser = choices::port)]
    pub port: Option<u16>,
}

/// `paguro unload`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The model leaves the server's memory as soon as no request uses it; the next request loads it again. Without this, a \
model is unloaded if it is not used for a while (`paguro serve --keep-alive`).

Examples:
  paguro unload qwen3:4b
  paguro unload qwen3:4b --url http://server:11434")]
pub struct UnloadArgs {
    /// The models, as `paguro ps` lists them
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,

    /// See [`ServerArgs`].
    #[command(flatten)]
    pub server: ServerArgs,
}

/// `paguro ps`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The memory of a model is its weights, and the KV cache at most. Pages are the parts of the KV cache, of 32 tokens each. Cached pages hold \
beginnings of earlier prompts, and are reused or given to new requests. `paguro unload` unloads a model.")]
pub struct PsArgs {
    /// See [`ServerArgs`].
    #[command(flatten)]
    pub server: ServerArgs,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `paguro keys`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
As soon as there is a key, `paguro serve` answers nobody without one; so it does when it listens for other machines. \
Running servers see new and removed keys within a second. Clients send a key as `Authorization: Bearer KEY` or \
`x-api-key: KEY`. Only hashes are kept: a key is shown once, when it is made.

Examples:
  paguro keys add laptop
  paguro keys add monitoring --scope admin
  paguro keys rm laptop")]
pub struct KeysArgs {
    /// The subcommand
    #[command(subcommand)]
    pub command: KeysCommand,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum KeysCommand {
    /// Make a key and print it
    Add {
        /// Description of the key
        name: String,
        /// Scopes of the key: inference (generate answers), models (change the library), admin (metrics)
        #[arg(
            long = "scope",
            value_enum,
            value_delimiter = ',',
            default_value = "inference",
            choice = "SCOPE,..."
        )]
        scopes: Vec<KeyScope>,
    },
    /// List the keys
    List {
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// Remove a key
    Rm {
        /// Its id or its name, as `list` shows them
        #[arg(value_name = "ID | NAME")]
        id: String,
    },
}

/// Values of `--scope`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KeyScope {
    /// Generating answers.
    Inference,
    /// Changing models.
    Models,
    /// Reading metrics.
    Admin,
}

impl From<KeyScope> for Scope {
    fn from(scope: KeyScope) -> Self {
        match scope {
            KeyScope::Inference => Scope::Inference,
            KeyScope::Models => Scope::Models,
            KeyScope::Admin => Scope::Admin,
        }
    }
}
