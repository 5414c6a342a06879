//! Tools of other programs, through the Model Context Protocol. Servers are started or connected on the first request for
//! their tools.
//!
//! [`McpServers`] is the table of servers; `connection.rs` has one session. The crate depends on no other crate of the
//! workspace: its caller decides who sees a server.
//!
//! The client implements `initialize`, `tools/list`, `tools/call` and `ping`, over a program's standard streams
//! ([`process`]) or HTTP ([`http`]). All calls block, run on blocking threads, and have a deadline.

mod connection;
mod http;
mod process;
mod settings;

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use serde_json::{Map, Value};
use tokio::{
    sync::{Mutex, Semaphore},
    task::spawn_blocking,
    time::timeout,
};

pub use connection::{Connection, McpError, Tool, ToolResult};
pub use settings::{McpServer, McpTransport, Trust};

/// Maximum number of concurrent calls, over all servers.
const MOST_CALLS: usize = 32;

/// Maximum number of concurrent calls of one client, which the caller of [`McpServers::call`] counts.
pub const MOST_CALLS_OF_CLIENT: usize = MOST_CALLS / 4;

/// Maximum number of servers that are added at runtime.
const MOST_ADDED: usize = 32;

/// Time that a list waits for starting servers. They continue to start, and the next list contains them.
const LIST_PATIENCE: Duration = Duration::from_secs(3);

/// Time for which a failure is remembered, so that lists do not restart a broken program again and again.
const FAILURE_KEPT: Duration = Duration::from_secs(5);

/// Tool servers by name.
#[derive(Debug)]
pub struct McpServers {
    entries: RwLock<Vec<Arc<Entry>>>,
    calls: Arc<Semaphore>,
}

#[derive(Debug)]
struct Entry {
    settings: McpServer,
    /// True if it was added at runtime.
    added: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Idle,
    Ready(Ready),
    Failed { error: McpError, at: Instant },
}

/// A connected server.
#[derive(Clone, Debug)]
pub struct Ready {
    connection: Arc<Connection>,
    /// Its tools.
    pub tools: Arc<[Tool]>,
}

/// A server and its tools.
#[derive(Debug)]
pub struct Listed {
    /// Settings of the server.
    pub settings: McpServer,
    /// True if it was added at runtime.
    pub added: bool,
    /// Its tools, or its error; `None` while it starts.
    pub tools: Option<Result<Arc<[Tool]>, McpError>>,
}

/// Reason for which a server was not added or removed, or a call was not started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum McpRefusal {
    /// No server has this name.
    #[error("there is no tool server `{0}`")]
    NoServer(String),
    /// The server has no tool of this name.
    #[error("the tool server `{server}` has no tool `{tool}`")]
    NoTool {
        /// Name of the server.
        server: String,
        /// Name of the tool.
        tool: String,
    },
    /// Another server has the name.
    #[error("there is a tool server `{0}` already; choose another name")]
    NameTaken(String),
    /// The server belongs to the settings.
    #[error("the tool server `{0}` is named in the server's settings; remove it there")]
    InSettings(String),
    /// Too many servers were added.
    #[error(
        "{MOST_ADDED} tool servers were added already, which is the most; remove one, or name it in the settings"
    )]
    TooMany,
    /// Too many calls run.
    #[error(
        "{MOST_CALLS} tool calls are running, or {MOST_CALLS_OF_CLIENT} of this client, which is the most; try again later"
    )]
    Busy,
    /// The server failed.
    #[error("the tool server `{server}` {error}")]
    Failed {
        /// Name of the server.
        server: String,
        /// Its error.
        error: McpError,
    },
}

impl McpServers {
    /// Creates the table. No server is started yet.
    pub fn new(settings: Vec<McpServer>) -> Self {
        let entries = settings.into_iter().map(|settings| Entry::new(settings, false)).collect();
        Self { entries: RwLock::new(entries), calls: Arc::new(Semaphore::new(MOST_CALLS)) }
    }

    /// Lists the servers that `is_visible` allows, and starts those that do not run.
    pub async fn list(&self, is_visible: impl Fn(&McpServer) -> bool) -> Vec<Listed> {
        let mut entries = self.entries();
        entries.retain(|entry| is_visible(&entry.settings));
        // Starts run as tasks, so that they continue when the request ends.
        let start = |entry: &Arc<Entry>| tokio::spawn(entry.clone().ready());
        let starts: Vec<_> = entries.iter().map(start).collect();
        let until = tokio::time::Instant::now() + LIST_PATIENCE;
        let mut listed = Vec::new();
        for (entry, start) in entries.iter().zip(starts) {
            let ready = tokio::time::timeout_at(until, start).await;
            let tools = ready.ok().map(|ready| {
                let ended = |error: tokio::task::JoinError| Err(McpError::Failed(error.to_string()));
                ready.unwrap_or_else(ended).map(|ready| ready.tools)
            });
            listed.push(Listed { settings: entry.settings.clone(), added: entry.added, tools });
        }
        listed
    }

    /// Calls a tool of a server that `is_visible` allows. `share` is the call in the client's count; it is dropped at the
    /// end of the call, which may be after the client has left.
    ///
    /// # Errors
    /// [`McpRefusal`]. A failure that the tool reports is a [`ToolResult`].
    pub async fn call(
        &self,
        server: &str,
        tool: &str,
        arguments: Map<String, Value>,
        share: impl Send + Sync + 'static,
        is_visible: impl Fn(&McpServer) -> bool,
    ) -> Result<ToolResult, McpRefusal> {
        let entry = self.find(server).filter(|entry| is_visible(&entry.settings));
        let entry = entry.ok_or_else(|| McpRefusal::NoServer(server.to_owned()))?;
        // A call runs to its end when the client leaves, and keeps its place until then.
        let place = self.calls.clone().try_acquire_owned().map_err(|_| McpRefusal::Busy)?;
        let places = Arc::new((share, place));
        let failed = |error| McpRefusal::Failed { server: server.to_owned(), error };
        let mut may_reconnect = true;
        loop {
            // A start runs as a task, so that it continues when the request ends.
            let started = tokio::spawn(entry.clone().ready()).await;
            let started = started.unwrap_or_else(|error| Err(McpError::Failed(error.to_string())));
            let Ready { connection, tools } = started.map_err(failed)?;
            if !tools.iter().any(|known| known.name == tool) {
                let (server, tool) = (server.to_owned(), tool.to_owned());
                return Err(McpRefusal::NoTool { server, tool });
            }
            let (name, arguments, limit) = (tool.to_owned(), arguments.clone(), entry.settings.timeout);
            let called = {
                let (connection, places) = (connection.clone(), places.clone());
                let call = move || {
                    let _places = places;
                    connection.call(&name, arguments, limit)
                };
                spawn_blocking(call).await
            };
            match called.unwrap_or_else(|error| Err(McpError::Failed(error.to_string()))) {
                Ok(result) => return Ok(result),
                // The server has forgotten the session and has not executed the call.
                Err(McpError::SessionLost) if std::mem::take(&mut may_reconnect) => {
                    entry.forget(&connection).await;
                }
                Err(error) => {
                    if connection.is_closed() {
                        entry.forget(&connection).await;
                    }
                    return Err(failed(error));
                }
            }
        }
    }

    /// Adds a server until this process ends.
    ///
    /// # Errors
    /// [`McpRefusal::NameTaken`], [`McpRefusal::TooMany`].
    pub fn add(&self, settings: McpServer) -> Result<(), McpRefusal> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.iter().any(|entry| entry.settings.name == settings.name) {
            return Err(McpRefusal::NameTaken(settings.name));
        }
        if entries.iter().filter(|entry| entry.added).count() >= MOST_ADDED {
            return Err(McpRefusal::TooMany);
        }
        entries.push(Entry::new(settings, true));
        Ok(())
    }

    /// Removes a server that was added at runtime.
    ///
    /// # Errors
    /// [`McpRefusal::NoServer`], [`McpRefusal::InSettings`].
    pub fn remove(&self, name: &str) -> Result<(), McpRefusal> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let at = entries.iter().position(|entry| entry.settings.name == name);
        let at = at.ok_or_else(|| McpRefusal::NoServer(name.to_owned()))?;
        if !entries[at].added {
            return Err(McpRefusal::InSettings(name.to_owned()));
        }
        entries.remove(at);
        Ok(())
    }

    fn entries(&self) -> Vec<Arc<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn find(&self, name: &str) -> Option<Arc<Entry>> {
        self.entries().into_iter().find(|entry| entry.settings.name == name)
    }
}

impl Entry {
    fn new(settings: McpServer, added: bool) -> Arc<Self> {
        Arc::new(Self { settings, added, state: Mutex::new(State::Idle) })
    }

    /// Returns the connected server. Starts it if necessary.
    async fn ready(self: Arc<Self>) -> Result<Ready, McpError> {
        let mut state = self.state.lock().await;
        match &*state {
            State::Ready(ready) if !ready.connection.is_closed() => {
                if !ready.connection.take_tools_changed() {
                    return Ok(ready.clone());
                }
                let (connection, limit) = (ready.connection.clone(), self.settings.timeout);
                let tools = blocking(limit, move || connection.tools(limit)).await;
                let ready = tools.map(|tools| Ready { connection: ready.connection.clone(), tools });
                return self.settle(&mut state, ready);
            }
            State::Failed { error, at } if at.elapsed() < FAILURE_KEPT => return Err(error.clone()),
            State::Ready(_) | State::Failed { .. } | State::Idle => {}
        }
        let settings = self.settings.clone();
        let limit = settings.timeout;
        let ready = blocking(2 * limit, move || {
            let connection = Connection::open(&settings)?;
            let tools = connection.tools(limit)?;
            Ok(Ready { connection: Arc::new(connection), tools })
        });
        let ready = ready.await;
        match &ready {
            Ok(ready) => tracing::info!(server = self.settings.name, tools = ready.tools.len(), "tools"),
            Err(error) => tracing::warn!(server = self.settings.name, %error, "no tools"),
        }
        self.settle(&mut state, ready)
    }

    fn settle(&self, state: &mut State, ready: Result<Ready, McpError>) -> Result<Ready, McpError> {
        *state = match &ready {
            Ok(ready) => State::Ready(ready.clone()),
            Err(error) => State::Failed { error: error.clone(), at: Instant::now() },
        };
        ready
    }

    /// Drops a broken connection.
    async fn forget(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock().await;
        if matches!(&*state, State::Ready(ready) if Arc::ptr_eq(&ready.connection, connection)) {
            *state = State::Idle;
        }
    }
}

/// Runs blocking work with a deadline, for calls that exceed their own deadlines.
async fn blocking<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> Result<T, McpError> + Send + 'static,
) -> Result<T, McpError> {
    match timeout(limit + Duration::from_secs(5), spawn_blocking(work)).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => Err(McpError::Failed(error.to_string())),
        Err(_) => Err(McpError::Timeout(limit)),
    }
}

/// Returns the function names for models by server and tool: the tool's name if it is unique, otherwise with the
/// server's name as a prefix. Names have at most 64 characters: letters, digits, `_` and `-`.
pub fn function_names(servers: &[Listed]) -> HashMap<(String, String), String> {
    let plain = |name: &str| {
        let letter = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
        name.chars().map(letter).take(64).collect::<String>()
    };
    let all = || {
        servers.iter().flat_map(|server| {
            let tools = server.tools.iter().flatten().flat_map(|tools| tools.iter());
            tools.map(|tool| (server.settings.name.clone(), tool.name.clone()))
        })
    };
    let mut counts = HashMap::<_, usize>::new();
    all().for_each(|(_, tool)| *counts.entry(plain(&tool)).or_default() += 1);
    let mut taken = HashMap::<_, usize>::new();
    all()
        .map(|(server, tool)| {
            let mut name = plain(&tool);
            if counts[&name] > 1 {
                name = plain(&format!("{server}__{tool}"));
            }
            // Names of one server may differ only in characters that functions cannot have.
            let count = taken.entry(name.clone()).or_default();
            *count += 1;
            if *count > 1 {
                name.truncate(60);
                name += &format!("_{count}");
            }
            ((server, tool), name)
        })
        .collect()
}
