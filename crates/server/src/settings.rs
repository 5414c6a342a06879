//! Everything that can be set.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use crate::models::Residency;

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
    /// Gives memory back to the system that the process has and nobody uses.
    pub release_memory: fn(),
    /// How long running requests may go on after the server was asked to stop.
    pub shutdown_time: Duration,
}

/// A place to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// An address and a port; port 0 takes any that is free.
    Tcp(SocketAddr),
    /// A Unix socket, for those who may open the file.
    Unix(PathBuf),
}

/// What connections may take.
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
