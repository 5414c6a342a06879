//! Everything that can be set.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use serde::Deserialize;

use crate::{mcp::McpServer, models::Residency, ui::Setting};

/// How the server is set up.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    /// Where it listens.
    pub listen: Vec<Listen>,
    /// Which models stay in memory.
    pub residency: Residency,
    /// What requests are bounded by.
    pub limits: HttpLimits,
    /// The file with API keys.
    pub keys: PathBuf,
    /// Keys besides those of the file: they may be used for everything.
    pub api_keys: Vec<String>,
    /// Names besides `localhost` that this server may be asked under while it listens at a loopback address.
    pub hosts: Vec<String>,
    /// Origins of web pages that may use this server; `*` is all.
    pub origins: Vec<String>,
    /// Refuses everything in a request that is not honoured, where others are answered without it.
    pub strict: bool,
    /// Refuses prompts and inputs that are token ids: ids of another model's tokenizer are other text here.
    pub refuse_token_ids: bool,
    /// True if a prefix that was computed for one key serves requests of others.
    pub share_prefixes: bool,
    /// Other names of models.
    pub aliases: Vec<Alias>,
    /// Gives memory back to the system that the process has and nobody uses.
    pub release_memory: fn(),
    /// How long running requests may go on after the server was asked to stop.
    pub shutdown_time: Duration,
    /// True if the page for people is served.
    pub ui: bool,
    /// Servers of tools that the page's chat may use.
    pub mcp: Vec<McpServer>,
    /// Settings as the page shows them.
    pub shown: Vec<Setting>,
    /// Devices as the page shows them.
    pub devices: Vec<String>,
}

/// A place to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// An address and a port; port 0 takes any that is free.
    Tcp(SocketAddr),
    /// A Unix socket, for those who may open the file.
    Unix(PathBuf),
}

/// Limits of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Bytes of all bodies together that are being read, parsed or prepared.
    pub body_memory: usize,
    /// How long a body may take to arrive.
    pub body_time: Duration,
    /// Least bytes of a body in a second, after the first seconds; 0 is no bound.
    pub body_rate: u64,
    /// How long a request's head may take to arrive, and an idle connection stay.
    pub head_time: Duration,
    /// How long an answer may take, loading the model included; `None` is for ever.
    pub request_time: Option<Duration>,
    /// How long a client may take to read more of its answer.
    pub write_time: Duration,
    /// Open connections. At more, the one that has been idle for longest is closed; if none is, more wait in the system's
    /// queue.
    pub connections: usize,
    /// Open connections of one client that is not on this machine.
    pub connections_per_client: usize,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            body_memory: 256 << 20,
            body_rate: 1024,
            body_time: Duration::from_secs(60),
            head_time: Duration::from_secs(60),
            request_time: None,
            write_time: Duration::from_secs(30),
            connections: 4096,
            connections_per_client: 1024,
        }
    }
}

/// Another name of a model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Alias {
    /// The names that it is found by: one name, or a pattern in which `*` is any text.
    pub pattern: String,
    /// The model; `None` is the first one that the server was started with.
    pub model: Option<String>,
}

impl std::str::FromStr for Alias {
    type Err = String;

    /// Reads `PATTERN=NAME`, or a name alone.
    fn from_str(text: &str) -> Result<Self, String> {
        let (pattern, model) = match text.split_once('=') {
            Some((pattern, model)) => (pattern.trim(), Some(model.trim())),
            None => (text.trim(), None),
        };
        if pattern.is_empty() || model == Some("") {
            return Err(format!("`{text}` must be a name, or PATTERN=NAME such as 'claude-*=qwen3:4b'"));
        }
        if pattern.contains('*') && model.is_none() {
            return Err(format!("`{text}` is a pattern; it needs a model: '{text}=NAME'"));
        }
        Ok(Self { pattern: pattern.to_owned(), model: model.map(str::to_owned) })
    }
}

impl TryFrom<String> for Alias {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl Alias {
    /// True if the pattern fits a name.
    pub fn fits(&self, name: &str) -> bool {
        let mut parts = self.pattern.split('*');
        let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
        let mut parts = parts.peekable();
        if parts.peek().is_none() {
            return rest.is_empty();
        }
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_names() {
        for (pattern, name, fits) in [
            ("claude-*=m", "claude-haiku-4-5", true),
            ("claude-*=m", "claude-", true),
            ("claude-*=m", "my-claude-1", false),
            ("*=m", "", true),
            ("gpt-*-mini=m", "gpt-4o-mini", true),
            ("gpt-*-mini=m", "gpt-mini", false),
            ("a*b*c=m", "abbc", true),
            ("a*b*c=m", "acb", false),
            ("gpt-4=m", "gpt-4", true),
            ("gpt-4=m", "gpt-4o", false),
        ] {
            assert_eq!(pattern.parse::<Alias>().unwrap().fits(name), fits, "{pattern} {name}");
        }
        for wrong in ["", "=m", "a=", "a*"] {
            assert!(wrong.parse::<Alias>().is_err(), "{wrong}");
        }
    }
}
