//! Tool servers at an address: the transport *Streamable HTTP*. Each message is a POST; its answer is JSON, or a stream
//! of events that contains the answer.

use std::{
    io::{BufRead, BufReader},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use ureq::{
    Agent, Body, Proxy,
    http::{Response, Uri},
    tls::{RootCerts, TlsConfig},
};

use super::connection::{Inbox, MOST_BYTES, McpError, message, shortened};

const SESSION: &str = "mcp-session-id";
const VERSION: &str = "mcp-protocol-version";

/// Maximum time to end a session.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// A session with a server.
#[derive(Debug)]
pub struct Session {
    agent: Agent,
    url: String,
    /// Headers of every request.
    headers: Vec<(String, String)>,
    /// Id of the session, if the server has assigned one.
    id: Mutex<Option<String>>,
    version: Mutex<Option<String>>,
    is_lost: AtomicBool,
    next: AtomicU64,
    inbox: Arc<Inbox>,
}

impl Session {
    /// Creates a client without connecting.
    ///
    /// # Errors
    /// [`McpError::Unreachable`] for an invalid address.
    pub fn new(url: &str, headers: &[(String, String)], inbox: Arc<Inbox>) -> Result<Self, McpError> {
        let uri: Uri = url.parse().map_err(|_| McpError::Unreachable(format!("{url:?} is no address")))?;
        let host = uri.host().unwrap_or_default();
        let is_here = ["localhost", "127.0.0.1", "[::1]"].contains(&host) || host.ends_with(".localhost");
        let agent = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
            // A server on this machine needs no proxy.
            .proxy(if is_here { None } else { Proxy::try_from_env() })
            .http_status_as_error(false)
            // The settings name one address, and the key must not be sent to another.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("paguro/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Ok(Self {
            agent,
            url: url.to_owned(),
            headers: headers.to_vec(),
            id: Mutex::default(),
            version: Mutex::default(),
            is_lost: AtomicBool::new(false),
            next: AtomicU64::new(1),
            inbox,
        })
    }

    /// Sets the negotiated version of the protocol.
    pub fn set_version(&self, version: &str) {
        *self.version.lock().unwrap_or_else(PoisonError::into_inner) = Some(version.to_owned());
    }

    /// Returns true if the server has forgotten the session.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// [`McpError`].
    pub fn request(&self, method: &str, params: Value, limit: Duration) -> Result<Value, McpError> {
        let until = Instant::now() + limit;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let response = self.post(&message(Some(id), method, params), limit)?;
        if let Some(session) = response.headers().get(SESSION).and_then(|id| id.to_str().ok()) {
            *self.id.lock().unwrap_or_else(PoisonError::into_inner) = Some(session.to_owned());
        }
        let is_stream = response.body().mime_type() == Some("text/event-stream");
        let body = response.into_body().into_with_config().limit(MOST_BYTES as u64);
        let found = if is_stream {
            self.read_events(BufReader::new(body.reader()), id, until)
        } else {
            let bytes = body.read_to_vec().map_err(|error| self.failed(&error, limit))?;
            let value = serde_json::from_slice(&bytes);
            let value: Value =
                value.map_err(|error| McpError::Protocol(format!("its answer is not JSON: {error}")))?;
            self.find(value, id)
        };
        match found {
            Some(answer) => Ok(answer),
            None if Instant::now() >= until => Err(McpError::Timeout(limit)),
            None => Err(McpError::Protocol(format!("the answer to `{method}` is missing"))),
        }
    }

    /// Sends a notification.
    ///
    /// # Errors
    /// [`McpError`].
    pub fn notify(&self, method: &str, params: Value, limit: Duration) -> Result<(), McpError> {
        self.post(&message(None, method, params), limit).map(drop)
    }

    fn post(&self, message: &Value, limit: Duration) -> Result<Response<Body>, McpError> {
        let mut request = self.agent.post(&self.url);
        for (name, value) in self.own_headers() {
            request = request.header(name, value);
        }
        let request = request
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .config()
            .timeout_global(Some(limit))
            .build();
        let mut response = request.send(message.to_string()).map_err(|error| self.failed(&error, limit))?;
        let status = response.status().as_u16();
        if status < 300 {
            return Ok(response);
        }
        if status == 404 && self.id.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            self.is_lost.store(true, Ordering::Relaxed);
            return Err(McpError::SessionLost);
        }
        let text = match status {
            300..=399 => "it redirects to another address; name that one in the settings".to_owned(),
            401 | 403 => "it requires a key; set it in `headers` of the settings".to_owned(),
            404 | 405 => {
                "no server of tools is at this address (HTTP+SSE of 2024 is not supported)".to_owned()
            }
            _ => {
                let text = response.body_mut().with_config().limit(4096).lossy_utf8(true).read_to_string();
                shortened(text.unwrap_or_default().trim(), 300)
            }
        };
        Err(McpError::Status { status, text })
    }

    /// Returns the headers of every request: those of the settings and of the session.
    fn own_headers(&self) -> Vec<(String, String)> {
        let value = |of: &Mutex<Option<String>>| of.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let own = [(SESSION, value(&self.id)), (VERSION, value(&self.version))];
        let own = own.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        self.headers.iter().cloned().chain(own).collect()
    }

    /// Reads events until the answer to the request `id`.
    fn read_events(&self, reader: impl BufRead, id: u64, until: Instant) -> Option<Value> {
        let mut data = String::new();
        for line in reader.lines() {
            // An aborted stream is handled like its end.
            let line = line.ok()?;
            if let Some(more) = line.strip_prefix("data:") {
                if !data.is_empty() {
                    data.push('\n');
                }
                data += more.strip_prefix(' ').unwrap_or(more);
            } else if line.is_empty() && !data.is_empty() {
                let message = serde_json::from_str(&std::mem::take(&mut data)).ok();
                if let Some(answer) = message.and_then(|message| self.find(message, id)) {
                    return Some(answer);
                }
            }
            if Instant::now() >= until {
                return None;
            }
        }
        None
    }

    /// Returns a message if it answers the request `id`. Handles other messages.
    fn find(&self, message: Value, id: u64) -> Option<Value> {
        if let Value::Array(messages) = message {
            return messages.into_iter().filter_map(|message| self.find(message, id)).next();
        }
        if message.get("method").is_some() {
            if let Some(answer) = self.inbox.receive(&message) {
                // The reply is optional.
                let _ = self.post(&answer, END_PATIENCE);
            }
            return None;
        }
        (message["id"].as_u64() == Some(id)).then_some(message)
    }

    fn failed(&self, error: &ureq::Error, limit: Duration) -> McpError {
        match error {
            ureq::Error::Timeout(_) => McpError::Timeout(limit),
            other => McpError::Unreachable(shortened(&other.to_string(), 300)),
        }
    }
}

impl Drop for Session {
    /// Ends the session on another thread, because the server may not answer.
    fn drop(&mut self) {
        if self.is_lost() || self.id.get_mut().unwrap_or_else(PoisonError::into_inner).is_none() {
            return;
        }
        let mut request = self.agent.delete(&self.url);
        for (name, value) in self.own_headers() {
            request = request.header(name, value);
        }
        let request = request.config().timeout_global(Some(END_PATIENCE)).build();
        // Servers expire sessions that are not ended.
        let _ = thread::Builder::new().name("mcp-end".into()).spawn(move || drop(request.call()));
    }
}
