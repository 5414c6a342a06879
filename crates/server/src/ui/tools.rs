//! `/ui/v1/tools`: tools of servers in the settings, for the page's chat. The page asks for confirmation before each
//! call of a tool that is not trusted; the server executes every call.

use axum::{
    Extension,
    extract::State,
    http::{HeaderMap, StatusCode},
};
use paguro_mcp::{Listed, McpError, McpRefusal, McpServer, McpTransport, Tool, Trust, function_names};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    AppState, access,
    error::ApiError,
    extract::{Json, Path},
    generate::Caller,
    keys::Scope,
    listen::Arrival,
    wire::{self, Other, refused},
};

/// All tool servers that the client may use.
#[derive(Debug, Serialize, ToSchema)]
pub struct ToolServers {
    servers: Vec<ToolServer>,
}

/// A tool server.
#[derive(Debug, Serialize, ToSchema)]
pub struct ToolServer {
    name: String,
    /// The program with its arguments, or the address; for clients with the scope `admin` only.
    place: Option<String>,
    /// True if it was added at runtime and can be removed.
    added: bool,
    /// `starting`, `ready` or `failed`.
    state: &'static str,
    /// Its error.
    problem: Option<String>,
    tools: Vec<ToolCard>,
}

/// A tool.
#[derive(Debug, Serialize, ToSchema)]
pub struct ToolCard {
    /// Its name on its server.
    name: String,
    /// Unique function name for models.
    function: String,
    /// Title for display.
    title: Option<String>,
    /// Description for models.
    description: String,
    /// JSON schema of its arguments.
    #[schema(value_type = Object)]
    parameters: Value,
    /// True if the tool declares itself read-only.
    read_only: bool,
    /// True if the page calls it without confirmation.
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
    /// Images of the result, as data URLs.
    images: Vec<String>,
    /// Its text, with a note for each part that is not text.
    text: String,
    /// True if the tool reports a failure.
    is_error: bool,
}

/// A tool server to add until this process ends. Programs can be named in the settings only.
#[derive(Debug, Deserialize, ToSchema)]
pub struct NewToolServer {
    /// Its name: letters, digits, `-` and `_`.
    name: String,
    /// Its address for the transport *Streamable HTTP*.
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

/// Returns true if a client with these scopes sees a tool server. One that was added at runtime requires `admin`.
fn may_see(state: &AppState, scopes: &[Scope], server: &McpServer) -> bool {
    let setting = state.settings.mcp.iter().find(|setting| setting.server.name == server.name);
    scopes.contains(&setting.map_or(Scope::Admin, |setting| setting.scope))
}

/// Returns the scopes of a request.
fn scopes(state: &AppState, arrival: Arrival, headers: &HeaderMap) -> Result<Vec<Scope>, ApiError> {
    let needs_key = access::needs_key(state, arrival)?;
    Ok(access::scopes(needs_key, access::find_key(state, headers)?))
}

/// Lists tool servers with their tools. Servers that do not run are started; one that is not ready after a few seconds
/// is listed as starting.
///
/// # Errors
/// The file with the keys cannot be read.
#[utoipa::path(get, path = "/ui/v1/tools", tag = "Page", responses((status = 200, body = ToolServers)))]
pub async fn list(
    State(state): State<AppState>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
) -> Result<Json<ToolServers>, ApiError> {
    let scopes = scopes(&state, arrival, &headers)?;
    let servers = state.mcp.list(|server| may_see(&state, &scopes, server)).await;
    let mut functions = function_names(&servers);
    let is_admin = scopes.contains(&Scope::Admin);
    let card = |Listed { settings, added, tools }| {
        let McpServer { name, trust, .. } = &settings;
        let (status, problem, tools) = match tools {
            None => ("starting", None, None),
            Some(Ok(tools)) => ("ready", None, Some(tools)),
            Some(Err(error)) => ("failed", Some(format!("`{name}` {error}")), None),
        };
        let tool = |tool: &Tool| ToolCard {
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
/// The server or the tool does not exist, or the server does not answer.
#[utoipa::path(
    post, path = "/ui/v1/tools/call", tag = "Page", request_body = NewCall,
    responses((status = 200, body = CallAnswer)),
)]
pub async fn call(
    State(state): State<AppState>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
    caller: Caller,
    Json(NewCall { server, tool, arguments }): Json<NewCall>,
) -> Result<Json<CallAnswer>, ApiError> {
    let scopes = scopes(&state, arrival, &headers)?;
    let share = state.tool_calls.of(&caller.client).try_acquire_owned().map_err(|_| McpRefusal::Busy)?;
    let may_see = |server: &McpServer| may_see(&state, &scopes, server);
    let result = state.mcp.call(&server, &tool, arguments, share, may_see).await?;
    tracing::info!(server, tool, is_error = result.is_error, "tool called");
    Ok(Json(CallAnswer { text: result.text, images: result.images, is_error: result.is_error }))
}

/// Adds a tool server at an address until this process ends. Its tools require the scope `admin`.
///
/// # Errors
/// The name is taken, or the address is invalid.
#[utoipa::path(
    post, path = "/ui/v1/tools/servers", tag = "Page", request_body = NewToolServer,
    responses((status = 204)),
)]
pub async fn add(
    State(state): State<AppState>,
    Json(NewToolServer { name, url, authorization }): Json<NewToolServer>,
) -> Result<StatusCode, ApiError> {
    let headers = authorization.map(|value| ("Authorization".to_owned(), value)).into_iter().collect();
    let server = McpServer {
        name,
        transport: McpTransport::Http { url, headers },
        trust: Trust::Tools(Vec::new()),
        timeout: McpServer::TIMEOUT,
    };
    server.check().map_err(|message| ApiError::Invalid { param: None, message })?;
    state.mcp.add(server)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Removes a tool server that was added at runtime.
///
/// # Errors
/// No server has this name, or the settings contain it.
#[utoipa::path(
    delete, path = "/ui/v1/tools/servers/{name}", tag = "Page",
    params(("name" = String, Path, description = "The server's name")), responses((status = 204)),
)]
pub async fn remove(State(state): State<AppState>, Path(name): Path<String>) -> Result<StatusCode, ApiError> {
    state.mcp.remove(&name)?;
    Ok(StatusCode::NO_CONTENT)
}
