//! Paths about the server itself, and those that do not exist.

use axum::{
    Router,
    extract::{Request, State},
    http::header,
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use tokio::task::spawn_blocking;
use utoipa::ToSchema;

use crate::{AppState, error::ApiError, extract::Json, metrics, models::ResidentInfo};

/// The paths.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/status", get(status))
        .route("/metrics", get(prometheus))
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
            buffers: model.memory.buffers,
            context: model.handle.max_context(),
            users: model.users,
            expires_in: model.expires_in.map(|time| time.as_secs_f64()),
            waiting: stats.waiting,
            running: stats.running,
            pages: stats.pages_total,
            pages_used: stats.pages_used,
            pages_cached: stats.pages_cached,
            tokens: stats.tokens,
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

/// What Prometheus reads. Waits for engines to finish their steps.
///
/// # Errors
/// None that is known.
#[utoipa::path(get, path = "/metrics", tag = "Status", responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub async fn prometheus(State(state): State<AppState>) -> Result<Response, ApiError> {
    // Engines answer between two steps.
    let text = spawn_blocking(move || state.metrics.text()).await;
    let text = text.unwrap_or_else(|error| Err(ApiError::Internal(error.to_string())))?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
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
