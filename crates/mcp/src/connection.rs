//! A connection to a tool server: the messages of the protocol, independent of the transport.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{McpServer, McpTransport, http::Session, process::Process};

/// Offered version of the protocol.
const VERSION: &str = "2025-06-18";

/// Accepted versions of the protocol. Messages about tools are the same in all of them.
const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// Maximum number of tools of one server.
const MOST_TOOLS: usize = 512;

/// Maximum bytes of a tool's description and schema.
const MOST_TOOL_BYTES: usize = 64 << 10;

/// Maximum images of a result.
const MOST_IMAGES: usize = 16;

/// Maximum characters of a result. More would fill a model's context many times.
const MOST_CHARACTERS: usize = 200_000;

/// Maximum bytes of a message of a server.
pub const MOST_BYTES: usize = 16 << 20;

/// A tool of a server.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name in calls.
    pub name: String,
    /// Its title for people.
    pub title: Option<String>,
    /// Its description for models.
    pub description: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// True if the tool declares itself read-only.
    pub read_only: bool,
}

/// Result of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolResult {
    /// Images, as data URLs.
    pub images: Vec<String>,
    /// Its text, with a note for each part that is not text.
    pub text: String,
    /// True if the tool reports a failure.
    pub is_error: bool,
}

/// Error of a tool server, as the end of a sentence that begins with its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum McpError {
    /// The program cannot be started.
    #[error("cannot be started: {0}")]
    Start(String),
    /// The program has ended.
    #[error("has ended{}", said(.0))]
    Ended(String),
    /// The program does not read its standard input.
    #[error("does not read its standard input")]
    Stuck,
    /// The address does not answer.
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    /// The server answers with an error status.
    #[error("answered with status {status}{}", said(.text))]
    Status {
        /// The status.
        status: u16,
        /// Beginning of the answer.
        text: String,
    },
    /// No answer in time.
    #[error("did not answer within {} s", .0.as_secs_f64())]
    Timeout(Duration),
    /// The server does not know the session.
    #[error("has forgotten the session")]
    SessionLost,
    /// A message violates the protocol.
    #[error("does not speak the Model Context Protocol as expected: {0}")]
    Protocol(String),
    /// The server refuses a request.
    #[error("refused `{method}`: {message}")]
    Refused {
        /// Method of the request.
        method: &'static str,
        /// Message of the server.
        message: String,
    },
    /// An internal error.
    #[error("failed: {0}")]
    Failed(String),
}

/// Formats a server's message for the end of a sentence.
fn said(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

/// Handler of messages that the server sends on its own.
#[derive(Debug, Default)]
pub struct Inbox {
    /// True if the list of tools has changed.
    tools_changed: AtomicBool,
}

impl Inbox {
    /// Handles a message that is not an answer. Returns the reply if the message is a request.
    pub fn receive(&self, message: &Value) -> Option<Value> {
        let method = message["method"].as_str()?;
        if method == "notifications/tools/list_changed" {
            self.tools_changed.store(true, Ordering::Relaxed);
        }
        let id = message.get("id").filter(|id| !id.is_null())?;
        Some(match method {
            "ping" => json!({"jsonrpc": "2.0", "id": id, "result": {}}),
            _ => {
                let error =
                    json!({"code": -32601, "message": "this client calls tools and does nothing else"});
                json!({"jsonrpc": "2.0", "id": id, "error": error})
            }
        })
    }
}

/// An initialized connection.
#[derive(Debug)]
pub struct Connection {
    carrier: Carrier,
    inbox: Arc<Inbox>,
}

#[derive(Debug)]
enum Carrier {
    Process(Process),
    Http(Session),
}

impl Connection {
    /// Starts or connects to a server, and initializes the session.
    ///
    /// # Errors
    /// [`McpError`].
    pub fn open(settings: &McpServer) -> Result<Self, McpError> {
        let inbox = Arc::new(Inbox::default());
        let carrier = match &settings.transport {
            McpTransport::Program { program, arguments, environment } => {
                Carrier::Process(Process::start(program, arguments, environment, inbox.clone())?)
            }
            McpTransport::Http { url, headers } => Carrier::Http(Session::new(url, headers, inbox.clone())?),
        };
        let connection = Self { carrier, inbox };
        let about = json!({"name": "paguro", "title": "Paguro", "version": env!("CARGO_PKG_VERSION")});
        let params = json!({"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about});
        let answer = connection.request("initialize", params, settings.timeout)?;
        let version = answer["protocolVersion"].as_str().unwrap_or_default();
        if !VERSIONS.contains(&version) {
            return Err(McpError::Protocol(format!(
                "its version is {version:?}, and known are {VERSIONS:?}"
            )));
        }
        if let Carrier::Http(session) = &connection.carrier {
            session.set_version(version);
        }
        connection.notify("notifications/initialized", Value::Null, settings.timeout)?;
        Ok(connection)
    }

    /// Returns true if the connection is closed.
    pub fn is_closed(&self) -> bool {
        match &self.carrier {
            Carrier::Process(process) => process.is_closed(),
            Carrier::Http(session) => session.is_lost(),
        }
    }

    /// Returns true if the list of tools has changed since the last call.
    pub fn take_tools_changed(&self) -> bool {
        self.inbox.tools_changed.swap(false, Ordering::Relaxed)
    }

    /// Lists the server's tools.
    ///
    /// # Errors
    /// [`McpError`].
    pub fn tools(&self, limit: Duration) -> Result<Arc<[Tool]>, McpError> {
        let until = Instant::now() + limit;
        let mut tools: Vec<Tool> = Vec::new();
        let mut cursor = Value::Null;
        loop {
            let params = if cursor.is_null() { json!({}) } else { json!({"cursor": cursor}) };
            let left = until.saturating_duration_since(Instant::now());
            let page = self.request("tools/list", params, left)?;
            let list = page["tools"].as_array();
            let list = list.ok_or_else(|| McpError::Protocol("`tools/list` has no list of tools".into()))?;
            for tool in list {
                tools.push(read_tool(tool)?);
            }
            if tools.len() > MOST_TOOLS {
                return Err(McpError::Protocol(format!("it has more than {MOST_TOOLS} tools")));
            }
            match page.get("nextCursor").filter(|next| next.is_string()) {
                Some(next) if *next != cursor => cursor = next.clone(),
                _ => return Ok(tools.into()),
            }
        }
    }

    /// Calls a tool.
    ///
    /// # Errors
    /// [`McpError`]. A failure that the tool reports is a result.
    pub fn call(
        &self,
        tool: &str,
        arguments: Map<String, Value>,
        limit: Duration,
    ) -> Result<ToolResult, McpError> {
        let params = json!({"name": tool, "arguments": arguments});
        match self.request("tools/call", params, limit) {
            Ok(result) => read_result(&result),
            // The model may correct its call: servers refuse wrong arguments in this way.
            Err(McpError::Refused { message, .. }) => {
                Ok(ToolResult { images: Vec::new(), text: message, is_error: true })
            }
            Err(error) => Err(error),
        }
    }

    fn request(&self, method: &'static str, params: Value, limit: Duration) -> Result<Value, McpError> {
        let answer = match &self.carrier {
            Carrier::Process(process) => process.request(method, params, limit)?,
            Carrier::Http(session) => session.request(method, params, limit)?,
        };
        match answer {
            Value::Object(mut answer) if answer.contains_key("result") => Ok(answer["result"].take()),
            Value::Object(answer) if answer.contains_key("error") => {
                let message = answer["error"]["message"].as_str().unwrap_or("no reason is given");
                Err(McpError::Refused { method, message: shortened(message, 2000) })
            }
            _ => Err(McpError::Protocol(format!("the answer to `{method}` has neither result nor error"))),
        }
    }

    fn notify(&self, method: &str, params: Value, limit: Duration) -> Result<(), McpError> {
        match &self.carrier {
            Carrier::Process(process) => process.notify(method, params),
            Carrier::Http(session) => session.notify(method, params, limit),
        }
    }
}

/// Returns the message of a request, or of a notification without `id`.
pub fn message(id: Option<u64>, method: &str, params: Value) -> Value {
    let mut message = json!({"jsonrpc": "2.0", "method": method});
    if let Some(id) = id {
        message["id"] = id.into();
    }
    if !params.is_null() {
        message["params"] = params;
    }
    message
}

/// Truncates a text and marks the truncation.
pub fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

fn read_tool(value: &Value) -> Result<Tool, McpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Wire {
        name: String,
        title: Option<String>,
        description: Option<String>,
        input_schema: Map<String, Value>,
        annotations: Option<Annotations>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Annotations {
        title: Option<String>,
        read_only_hint: Option<bool>,
    }
    let wire: Wire = serde_json::from_value(value.clone())
        .map_err(|error| McpError::Protocol(format!("a tool cannot be read: {error}")))?;
    if wire.name.is_empty() || wire.name.len() > 256 {
        return Err(McpError::Protocol("a tool's name must have 1 to 256 bytes".into()));
    }
    if value.to_string().len() > MOST_TOOL_BYTES {
        return Err(McpError::Protocol(format!(
            "the description of `{}` is larger than {MOST_TOOL_BYTES} bytes",
            wire.name
        )));
    }
    let (title, read_only) = wire.annotations.map_or((None, None), |more| (more.title, more.read_only_hint));
    Ok(Tool {
        name: wire.name,
        title: wire.title.or(title),
        description: wire.description.unwrap_or_default(),
        parameters: Value::Object(wire.input_schema),
        read_only: read_only.unwrap_or(false),
    })
}

fn read_result(value: &Value) -> Result<ToolResult, McpError> {
    let parts = match value.get("content") {
        Some(Value::Array(parts)) => parts.as_slice(),
        None if value.get("structuredContent").is_some() => &[],
        _ => return Err(McpError::Protocol("the result of `tools/call` has no content".into())),
    };
    let mut images = Vec::new();
    let mut texts = Vec::new();
    for value in parts {
        match image(value).filter(|_| images.len() < MOST_IMAGES) {
            Some(image) => images.push(image),
            None => texts.push(part(value)),
        }
    }
    if texts.is_empty()
        && images.is_empty()
        && let Some(value) = value.get("structuredContent")
    {
        texts.push(value.to_string());
    }
    let text = texts.join("\n");
    let is_error = value["isError"].as_bool().unwrap_or(false);
    let text = match text.char_indices().nth(MOST_CHARACTERS) {
        None => text,
        Some((end, _)) => {
            format!("{}\n[cut here: the result has {} characters]", &text[..end], text.chars().count())
        }
    };
    Ok(ToolResult { images, text, is_error })
}

/// Returns the data URL of a part that is an image, or a resource that is one.
fn image(value: &Value) -> Option<String> {
    let (data, media) = match value["type"].as_str()? {
        "image" => (&value["data"], &value["mimeType"]),
        "resource" => (&value["resource"]["blob"], &value["resource"]["mimeType"]),
        _ => return None,
    };
    // Data that are no image are refused by the request that contains them.
    let media = media.as_str().filter(|media| media.starts_with("image/"))?;
    let is_plain = media.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/+-.".contains(&byte));
    (is_plain && media.len() < 80).then(|| Some(format!("data:{media};base64,{}", data.as_str()?))).flatten()
}

/// Converts a part of a result to text.
fn part(value: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    match value["type"].as_str() {
        Some("text") => text(&value["text"]),
        Some("resource") if value["resource"]["text"].is_string() => text(&value["resource"]["text"]),
        Some("resource_link") => format!("[{}]({})", text(&value["name"]), text(&value["uri"])),
        Some(kind) => {
            let kind = shortened(kind, 40);
            let media = value["mimeType"].as_str().or_else(|| value["resource"]["mimeType"].as_str());
            let media = media.map_or_else(String::new, |media| format!(" of type {}", shortened(media, 80)));
            format!("[{kind}{media}: left out, because only text and images are supported]")
        }
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_become_text() {
        for (result, text, is_error) in [
            (
                json!({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
                "a\nb",
                false,
            ),
            (json!({"content": [{"type": "text", "text": "no"}], "isError": true}), "no", true),
            (json!({"content": [], "structuredContent": {"a": 1}}), "{\"a\":1}", false),
            (json!({"structuredContent": {"a": 1}}), "{\"a\":1}", false),
            (
                json!({"content": [{"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}]}),
                "[audio of type audio/wav: left out, because only text and images are supported]",
                false,
            ),
            (
                json!({"content": [{"type": "resource_link", "name": "a", "uri": "file:///a"}]}),
                "[a](file:///a)",
                false,
            ),
            (json!({"content": [{"type": "resource", "resource": {"uri": "x:", "text": "t"}}]}), "t", false),
        ] {
            let expected = ToolResult { images: Vec::new(), text: text.to_owned(), is_error };
            assert_eq!(read_result(&result), Ok(expected), "{result}");
        }
        let image = |data: &str| json!({"type": "image", "data": data, "mimeType": "image/png"});
        let text = json!({"type": "text", "text": "two"});
        let blob = json!({"type": "resource", "resource": {"blob": "BBBB", "mimeType": "image/webp"}});
        let result = read_result(&json!({"content": [image("AAAA"), text, blob]})).unwrap();
        assert_eq!((result.text.as_str(), result.is_error), ("two", false));
        assert_eq!(result.images, ["data:image/png;base64,AAAA", "data:image/webp;base64,BBBB"]);
        let many = read_result(&json!({"content": vec![image("AAAA"); MOST_IMAGES + 1]})).unwrap();
        assert_eq!(many.images.len(), MOST_IMAGES);
        assert!(many.text.contains("left out"));
        let long = read_result(&json!({"content": [{"type": "text", "text": "é".repeat(300_000)}]})).unwrap();
        assert!(long.text.ends_with("[cut here: the result has 300000 characters]"));
        for wrong in [json!({}), json!(null), json!({"content": "text"})] {
            assert!(matches!(read_result(&wrong), Err(McpError::Protocol(_))), "{wrong}");
        }
    }

    #[test]
    fn tools_are_read_and_odd_ones_refused() {
        let tool = read_tool(&json!({
            "name": "add", "description": "Adds", "inputSchema": {"type": "object"},
            "annotations": {"title": "Add", "readOnlyHint": true}, "outputSchema": {},
        }));
        let tool = tool.unwrap();
        assert_eq!((tool.name.as_str(), tool.title.as_deref(), tool.read_only), ("add", Some("Add"), true));
        for wrong in [
            json!({"name": "add"}),
            json!({"name": "", "inputSchema": {}}),
            json!({"name": "add", "inputSchema": []}),
            json!({"name": "add", "inputSchema": {}, "description": "x".repeat(MOST_TOOL_BYTES)}),
        ] {
            assert!(read_tool(&wrong).is_err());
        }
    }

    #[test]
    fn servers_get_answers_to_what_they_ask() {
        let inbox = Inbox::default();
        let pong = inbox.receive(&json!({"jsonrpc": "2.0", "id": "p", "method": "ping"}));
        assert_eq!(pong, Some(json!({"jsonrpc": "2.0", "id": "p", "result": {}})));
        let refused = inbox.receive(&json!({"id": 3, "method": "sampling/createMessage"})).unwrap();
        assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(3), &json!(-32601)));
        assert_eq!(inbox.receive(&json!({"method": "notifications/progress"})), None);
        assert!(!inbox.tools_changed.load(Ordering::Relaxed));
        assert_eq!(inbox.receive(&json!({"method": "notifications/tools/list_changed"})), None);
        assert!(inbox.tools_changed.load(Ordering::Relaxed));
    }
}
