//! `paguro cache`: the store of K and V on disk.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// `paguro cache`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
`paguro serve` stores the KV cache of long prompts on disk (--kv-disk), so that a conversation continues at once after \
a restart. The files are derived from prompts and answers, and only their owner can read them.

Examples:
  paguro cache info
  paguro cache clear qwen3:4b")]
pub struct CacheArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: CacheCommand,

    /// The folder [default: `kv` in the folder of the library]
    #[arg(long, global = true, env = "PAGURO_KV_DISK_DIR", value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Show what is stored, for which model
    Info {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Read everything and check it; damaged parts are never used
    Verify {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Delete what is stored, of all models or of one
    Clear {
        /// Its name, as `info` shows it
        model: Option<String>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}
