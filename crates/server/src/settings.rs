//! Settings of the server.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use paguro_library::plain_name;
use paguro_mcp::McpServer;
use serde::Deserialize;

use crate::{
    KvEventsPlaces, Scope,
    images::ImageSettings,
    models::{AdapterSettings, Residency},
    ui::Setting,
};

/// A tool server, and the scope that a key needs to see and call its tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct McpSetting {
    /// The server.
    pub server: McpServer,
    /// The scope.
    pub scope: Scope,
}

/// Settings of the server.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    /// Addresses to listen at.
    pub listen: Vec<Listen>,
    /// Limits of resident models.
    pub residency: Residency,
    /// Adapters of the models.
    pub adapters: AdapterSettings,
    /// Limits of requests.
    pub limits: HttpLimits,
    /// Limits of images and rules for their URLs.
    pub images: ImageSettings,
    /// Path of the file with API keys.
    pub keys: PathBuf,
    /// Keys besides those of the file, with all scopes.
    pub api_keys: Vec<String>,
    /// Allowed host names besides `localhost` while the server listens at a loopback address.
    pub hosts: Vec<String>,
    /// This machine's own names. Other machines may claim them, so only programs may change something by them.
    pub own_names: Vec<String>,
    /// Origins of web pages that may use this server; `*` allows all.
    pub origins: Vec<String>,
    /// Refuses requests with unsupported fields, instead of answering without them.
    pub strict: bool,
    /// Refuses prompts that are token ids: ids of another model's tokenizer are other text here.
    pub refuse_token_ids: bool,
    /// True if requests of all keys share cached prefixes.
    pub share_prefixes: bool,
    /// Aliases of models.
    pub aliases: Vec<Alias>,
    /// Releases freed memory to the system.
    pub release_memory: fn(),
    /// Time that running requests may take after the server was stopped.
    pub shutdown_time: Duration,
    /// Time for which a stopped server refuses requests at least before it closes its ports, so that routers notice it.
    pub drain_time: Duration,
    /// True if the web page is served.
    pub ui: bool,
    /// Tool servers that the page's chat may use.
    pub mcp: Vec<McpSetting>,
    /// Settings for display on the page.
    pub shown: Vec<Setting>,
    /// Devices for display on the page.
    pub devices: Vec<String>,
    /// Sockets of KV events, for routers that ask for them.
    pub kv_events: Option<KvEventsPlaces>,
    /// True if routers and monitoring may read metrics, load and models without a key.
    pub public_metrics: bool,
    /// `owned_by` of models in `/v1/models`.
    pub owned_by: String,
}

#[cfg(test)]
impl ServerSettings {
    /// Settings of a server that listens nowhere.
    pub fn for_tests() -> Self {
        Self {
            listen: Vec::new(),
            adapters: AdapterSettings::default(),
            residency: Residency { memory: 0, keep_alive: None, patience: Duration::ZERO },
            limits: HttpLimits::default(),
            images: ImageSettings::default(),
            keys: PathBuf::new(),
            api_keys: Vec::new(),
            hosts: Vec::new(),
            own_names: Vec::new(),
            origins: Vec::new(),
            strict: false,
            refuse_token_ids: false,
            share_prefixes: false,
            aliases: Vec::new(),
            release_memory: || {},
            shutdown_time: Duration::ZERO,
            drain_time: Duration::ZERO,
            ui: true,
            mcp: Vec::new(),
            shown: Vec::new(),
            devices: Vec::new(),
            kv_events: None,
            public_metrics: false,
            owned_by: "paguro".to_owned(),
        }
    }
}

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// An address and a port; port 0 is any free port.
    Tcp(SocketAddr),
    /// A Unix socket, for users with permission to open the file.
    Unix(PathBuf),
}

/// Limits of connections and requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Maximum bytes of a body.
    pub body_bytes: usize,
    /// Maximum bytes of all bodies that are being read, parsed or prepared.
    pub body_memory: usize,
    /// Maximum time for a body to arrive.
    pub body_time: Duration,
    /// Minimum bytes per second of a body, after the first seconds; 0 for no minimum.
    pub body_rate: u64,
    /// Maximum time for a request's head to arrive, and of an idle connection.
    pub head_time: Duration,
    /// Maximum time of an answer, including loading of the model; `None` for no limit.
    pub request_time: Option<Duration>,
    /// Maximum time for which a client may not read its answer.
    pub write_time: Duration,
    /// Maximum number of open connections. Beyond it, the connection with the longest idle time is closed; if none is
    /// idle, new ones wait in the system's queue.
    pub connections: usize,
    /// Maximum number of open connections of one remote client.
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

/// An alias of a model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Alias {
    /// A name, or a pattern in which `*` matches any text.
    pub pattern: String,
    /// Name of the model; `None` for the first model that the server was started with.
    pub model: Option<String>,
}

impl std::str::FromStr for Alias {
    type Err = String;

    /// Parses `PATTERN=NAME`, or a name alone.
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
    /// Returns true if a name matches the pattern. Case and the parts of a name that may be omitted are ignored.
    pub fn fits(&self, name: &str) -> bool {
        let (pattern, name) = (self.pattern.to_lowercase(), name.to_lowercase());
        fits(&pattern, &name) || fits(plain_name(&pattern), plain_name(&name))
    }
}

/// Returns true if a name matches a pattern, whose `*` match any text.
fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
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
            ("gpt-4=m", "GPT-4:latest", true),
            ("claude-*=m", "library/Claude-haiku:latest", true),
        ] {
            assert_eq!(pattern.parse::<Alias>().unwrap().fits(name), fits, "{pattern} {name}");
        }
        for wrong in ["", "=m", "a=", "a*"] {
            assert!(wrong.parse::<Alias>().is_err(), "{wrong}");
        }
    }
}
