//! `paguro sessions`: conversations that `paguro run --session` keeps.

use clap::{Args, Subcommand};

/// `paguro sessions`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
`paguro run --session NAME` continues a conversation. Its messages and their KV cache are in the folder \
`sessions` of the library, which only their owner can read.

Examples:
  paguro run --session garden \"Which herbs grow in the shade?\"
  paguro run --session garden
  paguro sessions list
  paguro sessions rm garden")]
pub struct SessionsArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: SessionsCommand,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum SessionsCommand {
    /// List the sessions
    #[command(visible_alias = "ls")]
    List {
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// Delete sessions: messages and cache
    Rm {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}
