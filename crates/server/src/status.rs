//! Paths about the server itself, and those that do not exist.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};
use paguro_engine::DiskStats;
use serde::Serialize;
use tokio::task::spawn_blocking;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{AppState, error::ApiError, extract::Json, metrics, models::ResidentInfo};

/// The paths.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(health))
        .routes(routes!(ready))
        .routes(routes!(status))
        .routes(routes!(version))
        .routes(routes!(prometheus))
}

/// Name and version of the program.
#[derive(Debug, Serialize, ToSchema)]
pub struct ServerVersion {
    version: &'static str,
}

/// Tells the version of Paguro.
#[utoipa::path(get, path = "/version", tag = "Status", responses((status = 200, body = ServerVersion)))]
pub async fn version() -> Json<ServerVersion> {
    Json(ServerVersion { version: env!("CARGO_PKG_VERSION") })
}

/// How it is.
#[derive(Debug, Serialize, ToSchema)]
pub struct Status {
    status: &'static str,
}

/// What the server is doing.
#[derive(Debug, Serialize, ToSchema)]
pub struct ServerStatus {
    /// Paguro's version.
    version: &'static str,
    /// Memory of the models and of the process.
    memory: MemoryStatus,
    /// Models that are loaded.
    models: Vec<ModelStatus>,
}

/// Memory, in bytes.
#[derive(Debug, Serialize, ToSchema)]
pub struct MemoryStatus {
    /// Limit of all models together: `--memory`.
    limit: u64,
    /// Bytes that the loaded models take.
    models: u64,
    /// Resident bytes of the process by the system's count; `null` where the system does not tell.
    resident: Option<u64>,
}

/// What a loaded model is doing.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelStatus {
    name: String,
    /// What it runs on.
    device: String,
    /// Bytes that it takes: the next three together.
    bytes: u64,
    /// Bytes of its weights, as the device holds them.
    weights: u64,
    /// Bytes of its pages of K and V. On a CPU they get resident when they are first used.
    kv: u64,
    /// Bytes of what passes between operations. On a CPU they get resident with the first large step.
    buffers: u64,
    /// Most tokens of a prompt with its answer.
    context: usize,
    /// Requests that hold it.
    users: usize,
    /// Seconds until it is unloaded if nobody asks for it; `null` is never.
    expires_in: Option<f64>,
    /// Sequences that wait.
    waiting: usize,
    /// Sequences that run.
    running: usize,
    /// Pages that sequences can use.
    pages: usize,
    /// Of these, pages in use.
    pages_used: usize,
    /// Of these, pages that only the prefix cache keeps.
    pages_cached: usize,
    /// Tokens sampled since it was loaded.
    tokens: u64,
    /// Its cache on disk; `null` without one.
    disk: Option<DiskStatus>,
}

/// A model's cache on disk.
#[derive(Debug, Serialize, ToSchema)]
pub struct DiskStatus {
    /// True if everything that is to be kept has been written: a process that is killed now loses nothing of it.
    caught_up: bool,
    /// Blocks and checkpoints that wait to be handed to the writer.
    waiting: usize,
    /// Bytes that the writer has not written yet.
    pending_bytes: u64,
    /// Tokens of prompts that came from the disk.
    hit_tokens: u64,
    /// Loads from the disk.
    loads: u64,
    /// Loads that were not begun because computing was faster.
    loads_declined: u64,
    /// Blocks and checkpoints that were handed to the writer.
    saved: u64,
    /// Blocks and checkpoints that the disk was too slow for.
    dropped: u64,
}

impl From<DiskStats> for DiskStatus {
    fn from(stats: DiskStats) -> Self {
        Self {
            caught_up: stats.has_caught_up(),
            waiting: stats.waiting,
            pending_bytes: stats.pending_bytes,
            hit_tokens: stats.hit_tokens,
            loads: stats.loads,
            loads_declined: stats.declined,
            saved: stats.saved,
            dropped: stats.dropped,
        }
    }
}

impl From<ResidentInfo> for ModelStatus {
    fn from(model: ResidentInfo) -> Self {
        let stats = model.handle.stats();
        Self {
            name: model.entry.name,
            device: model.device,
            bytes: model.memory.total(),
            weights: model.memory.weights,
            kv: model.memory.kv,
            // States are as many as sequences can run, whatever the context.
            buffers: model.memory.buffers.saturating_add(model.memory.states),
            context: model.handle.max_context(),
            users: model.users,
            expires_in: model.expires_in.map(|time| time.as_secs_f64()),
            waiting: stats.waiting,
            running: stats.running,
            pages: stats.pages_total,
            pages_used: stats.pages_used,
            pages_cached: stats.pages_cached,
            tokens: stats.tokens,
            disk: stats.disk.exists.then(|| stats.disk.into()),
        }
    }
}

/// Lists the models that are loaded, and what they are doing.
#[utoipa::path(get, path = "/status", tag = "Status", responses((status = 200, body = ServerStatus)))]
pub async fn status(State(state): State<AppState>) -> Json<ServerStatus> {
    let models: Vec<_> = state.models.resident().into_iter().map(ModelStatus::from).collect();
    let memory = MemoryStatus {
        limit: state.models.memory(),
        models: models.iter().map(|model| model.bytes).sum(),
        resident: metrics::resident_bytes(),
    };
    Json(ServerStatus { version: env!("CARGO_PKG_VERSION"), memory, models })
}

/// The process lives.
#[utoipa::path(get, path = "/health", tag = "Status", responses((status = 200, body = Status)))]
pub async fn health() -> Json<Status> {
    Json(Status { status: "ok" })
}

/// Requests are welcome: the library can be read.
///
/// # Errors
/// It cannot.
#[utoipa::path(get, path = "/ready", tag = "Status", responses((status = 200, body = Status), (status = "5XX", body = crate::openai::error::ErrorBody<'static>)))]
pub async fn ready(State(state): State<AppState>) -> Result<Json<Status>, ApiError> {
    if let Err(error) = state.models.list().await {
        return Err(ApiError::Unavailable(error.to_string()));
    }
    Ok(Json(Status { status: "ready" }))
}

/// What Prometheus reads: OpenMetrics, or its older text format for those who accept only that. Waits for engines to
/// finish their steps.
///
/// # Errors
/// None that is known.
#[utoipa::path(
    get, path = "/metrics", tag = "Status",
    responses((status = 200, content(
        (String = "application/openmetrics-text"),
        (String = "text/plain; version=0.0.4"),
    ))),
)]
pub async fn prometheus(State(state): State<AppState>, headers: HeaderMap) -> Result<Response, ApiError> {
    // Engines answer between two steps.
    let text = spawn_blocking(move || state.metrics.text()).await;
    let text = text.unwrap_or_else(|error| Err(ApiError::Internal(error.to_string())))?;
    let accepts = |kind: &str| {
        let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|one| one.trim().starts_with(kind))
    };
    let (kind, text) = if accepts("text/plain") && !accepts("application/openmetrics-text") {
        (metrics::OLD_CONTENT_TYPE, metrics::older(&text))
    } else {
        (metrics::CONTENT_TYPE, text)
    };
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static(kind))], text).into_response())
}

/// Any other path.
pub async fn no_such_path(request: Request) -> ApiError {
    ApiError::NotFound(format!(
        "there is nothing at {}; /openapi.json lists what there is",
        request.uri().path()
    ))
}

/// A path with another method.
pub async fn no_such_method(request: Request) -> ApiError {
    ApiError::MethodNotAllowed { method: request.method().to_string(), path: request.uri().path().to_owned() }
}
