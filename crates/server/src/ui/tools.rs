//! `/ui/v1/tools`: tools of the servers that the settings name, for the page's chat. The page asks before each call unless
//! the tool is trusted; this server calls what it is asked to call.

use axum::{
    Extension,
    extract::State,
    http::{HeaderMap, StatusCode},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    AppState, access,
    error::ApiError,
    extract::{Json, Path},
    keys::Scope,
    listen::Arrival,
    mcp::{Listed, McpRefusal, McpServer, McpTransport, Trust, function_names},
    wire::{self, Other, refused},
};

/// All servers of tools that the client may use.
#[derive(Debug, Serialize, ToSchema)]
pub struct ToolServers {
    servers: Vec<ToolServer>,
}

/// A server of tools.
#[derive(Debug, Serialize, ToSchema)]
pub struct ToolServer {
    name: String,
    /// The program with its arguments, or the address; for clients with the scope `admin` only.
    place: Option<String>,
    /// True if it was added while the server runs, and can be removed.
    added: bool,
    /// `starting`, `ready` or `failed`.
    state: &'static str,
    /// Why it failed.
    problem: Option<String>,
    tools: Vec<ToolCard>,
}

/// A tool.
#[derive(Debug, Serialize, ToSchema)]
pub struct ToolCard {
    /// Its name on its server.
    name: String,
    /// Its name in requests to models, which no other tool of this list has.
    function: String,
    /// Its name for people.
    title: Option<String>,
    /// Its purpose, as models read it.
    description: String,
    /// JSON schema of its arguments.
    #[schema(value_type = Object)]
    parameters: Value,
    /// True if it says of itself that it changes nothing.
    read_only: bool,
    /// True if the settings let the page call it without a question.
    trusted: bool,
}

/// A call of a tool.
#[derive(Debug, Deserialize, ToSchema)]
pub struct NewCall {
    /// The server.
    server: String,
    /// The tool's name on its server.
    tool: String,
    /// Its arguments.
    #[serde(default)]
    #[schema(value_type = Object)]
    arguments: Map<String, Value>,
}

impl wire::Body for NewCall {}

/// Result of a call.
#[derive(Debug, Serialize, ToSchema)]
pub struct CallAnswer {
    /// Its text, with a note for each part that is none.
    text: String,
    /// True if the tool says that it failed.
    is_error: bool,
}

/// A server of tools that is to be added until this server ends. Programs are started for the settings only.
#[derive(Debug, Deserialize, ToSchema)]
pub struct NewToolServer {
    /// Its name: letters, digits, `-` and `_`.
    name: String,
    /// Its address, of the transport *Streamable HTTP*.
    url: String,
    /// Value of the header `Authorization` of every request.
    authorization: Option<String>,
}

impl wire::Body for NewToolServer {
    const OTHERS: &'static [&'static [Other]] =
        &[&[refused("command", &[], "programs are named in the server's settings only")]];
}

impl From<McpRefusal> for ApiError {
    fn from(refusal: McpRefusal) -> Self {
        use crate::mcp::McpError;
        let message = refusal.to_string();
        match refusal {
            McpRefusal::NoServer(_) | McpRefusal::NoTool { .. } => Self::NotFound(message),
            McpRefusal::NameTaken(_) | McpRefusal::InSettings(_) => Self::invalid("name", message),
            McpRefusal::TooMany => Self::Invalid { param: None, message },
            McpRefusal::Busy => Self::QueueFull(message),
            McpRefusal::Failed { error: McpError::Timeout(_), .. } => Self::Timeout(message),
            McpRefusal::Failed { .. } => Self::Unavailable(message),
        }
    }
}

/// Scopes of whoever sends a request.
fn scopes(state: &AppState, arrival: Arrival, headers: &HeaderMap) -> Result<Vec<Scope>, ApiError> {
    let needs_key = access::needs_key(state, arrival)?;
    Ok(access::scopes(needs_key, access::find_key(state, headers)?))
}

/// Lists servers of tools with their tools. Those that do not run are started; one that is still starting after a few
/// seconds is listed as such.
///
/// # Errors
/// The file with the keys cannot be read.
#[utoipa::path(
    get, path = "/ui/v1/tools", tag = "Page",
    responses(
        (status = 200, body = ToolServers),
        (status = "4XX", body = crate::openai::error::ErrorBody<'static>),
    ),
)]
pub async fn list(
    State(state): State<AppState>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
) -> Result<Json<ToolServers>, ApiError> {
    let scopes = scopes(&state, arrival, &headers)?;
    let servers = state.mcp.list(|server| scopes.contains(&server.scope)).await;
    let mut functions = function_names(&servers);
    let is_admin = scopes.contains(&Scope::Admin);
    let card = |Listed { settings, added, tools }| {
        let McpServer { name, trust, .. } = &settings;
        let (status, problem, tools) = match tools {
            None => ("starting", None, None),
            Some(Ok(tools)) => ("ready", None, Some(tools)),
            Some(Err(error)) => ("failed", Some(format!("`{name}` {error}")), None),
        };
        let tool = |tool: &crate::mcp::Tool| ToolCard {
            function: functions.remove(&(name.clone(), tool.name.clone())).unwrap_or_default(),
            trusted: trust.covers(&tool.name),
            name: tool.name.clone(),
            title: tool.title.clone(),
            description: tool.description.clone(),
            parameters: tool.parameters.clone(),
            read_only: tool.read_only,
        };
        ToolServer {
            place: is_admin.then(|| settings.place()),
            added,
            state: status,
            problem,
            tools: tools.iter().flat_map(|tools| tools.iter()).map(tool).collect(),
            name: name.clone(),
        }
    };
    Ok(Json(ToolServers { servers: servers.into_iter().map(card).collect() }))
}

/// Calls a tool and waits for its result.
///
/// # Errors
/// There is no such server or tool; the server does not answer.
#[utoipa::path(
    post, path = "/ui/v1/tools/call", tag = "Page",
    request_body = NewCall,
    responses(
        (status = 200, body = CallAnswer),
        (status = "4XX", body = crate::openai::error::ErrorBody<'static>),
        (status = "5XX", body = crate::openai::error::ErrorBody<'static>),
    ),
)]
pub async fn call(
    State(state): State<AppState>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
    Json(NewCall { server, tool, arguments }): Json<NewCall>,
) -> Result<Json<CallAnswer>, ApiError> {
    let scopes = scopes(&state, arrival, &headers)?;
    let result = state.mcp.call(&server, &tool, arguments, |server| scopes.contains(&server.scope)).await?;
    tracing::info!(server, tool, is_error = result.is_error, "tool called");
    Ok(Json(CallAnswer { text: result.text, is_error: result.is_error }))
}

/// Adds a server of tools at an address, until this server ends. Its tools are for clients with the scope `admin`.
///
/// # Errors
/// A name that is taken; what is no address.
#[utoipa::path(
    post, path = "/ui/v1/tools/servers", tag = "Page",
    request_body = NewToolServer,
    responses(
        (status = 204),
        (status = "4XX", body = crate::openai::error::ErrorBody<'static>),
    ),
)]
pub async fn add(
    State(state): State<AppState>,
    Json(NewToolServer { name, url, authorization }): Json<NewToolServer>,
) -> Result<StatusCode, ApiError> {
    let headers = authorization.map(|value| ("Authorization".to_owned(), value)).into_iter().collect();
    let server = McpServer {
        name,
        transport: McpTransport::Http { url, headers },
        scope: Scope::Admin,
        trust: Trust::Tools(Vec::new()),
        timeout: McpServer::TIMEOUT,
    };
    server.check().map_err(|message| ApiError::Invalid { param: None, message })?;
    state.mcp.add(server)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Removes a server of tools that was added while this server runs.
///
/// # Errors
/// There is none of this name; it is named in the settings.
#[utoipa::path(
    delete, path = "/ui/v1/tools/servers/{name}", tag = "Page",
    params(("name" = String, Path, description = "The server's name")),
    responses(
        (status = 204),
        (status = "4XX", body = crate::openai::error::ErrorBody<'static>),
    ),
)]
pub async fn remove(State(state): State<AppState>, Path(name): Path<String>) -> Result<StatusCode, ApiError> {
    state.mcp.remove(&name)?;
    Ok(StatusCode::NO_CONTENT)
}
