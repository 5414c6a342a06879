//! Endpoints about the server itself, and the fallbacks for unknown paths.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};
use paguro_engine::{BlockSet, DiskStats, Handle, HostStats};
use serde::Serialize;
use tokio::task::spawn_blocking;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{AppState, error::ApiError, extract::Json, metrics, models::ResidentInfo, paths};

/// Returns the routes.
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

/// Returns the version of Paguro.
#[utoipa::path(get, path = "/version", tag = "Status", responses((status = 200, body = ServerVersion)))]
pub async fn version() -> Json<ServerVersion> {
    Json(ServerVersion { version: env!("CARGO_PKG_VERSION") })
}

/// Health of the server.
#[derive(Debug, Serialize, ToSchema)]
pub struct Status {
    status: &'static str,
}

/// Current state of the server.
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
    /// Bytes of the loaded models.
    models: u64,
    /// Resident bytes of the process; `null` where the system does not report them.
    resident: Option<u64>,
}

/// Current state of a loaded model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelStatus {
    name: String,
    /// Name of its device.
    device: String,
    /// Bytes of weights, K and V, and buffers.
    bytes: u64,
    /// Bytes of its weights on the device.
    weights: u64,
    /// Bytes of its pages of K and V. On a CPU they become resident when they are first used.
    kv: u64,
    /// Bytes of its buffers. On a CPU they become resident with the first large step.
    buffers: u64,
    /// Maximum tokens of prompt and answer.
    context: usize,
    /// Number of requests that hold it.
    users: usize,
    /// Seconds until it is unloaded without further requests; `null` for never.
    expires_in: Option<f64>,
    /// Number of waiting sequences.
    waiting: usize,
    /// Number of running sequences.
    running: usize,
    /// Number of usable pages.
    pages: usize,
    /// Number of pages in use.
    pages_used: usize,
    /// Number of pages that only the prefix cache holds.
    pages_cached: usize,
    /// Number of tokens sampled since it was loaded.
    tokens: u64,
    /// Engines of the model, if there are several; the numbers above are their sums, and bytes are those of each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    engines: Vec<EngineStatus>,
    /// Blocks of the prefix cache, as a reader of KV events counts them.
    blocks: BlockStatus,
    /// Its cache in memory of the host; `null` without one.
    host: Option<HostStatus>,
    /// Its cache on disk; `null` without one.
    disk: Option<DiskStatus>,
}

/// Current state of one of several engines of a model.
#[derive(Debug, Serialize, ToSchema)]
pub struct EngineStatus {
    /// Number of its device in `--device`.
    number: usize,
    /// Name of its device.
    device: String,
    /// True if its last step failed, or if it has stopped: it gets no requests while another engine works.
    failing: bool,
    /// Number of waiting sequences.
    waiting: usize,
    /// Number of running sequences.
    running: usize,
    /// Number of usable pages.
    pages: usize,
    /// Number of pages in use.
    pages_used: usize,
    /// Number of pages that only the prefix cache holds.
    pages_cached: usize,
    /// Number of tokens sampled since it was loaded.
    tokens: u64,
}

impl From<Handle> for EngineStatus {
    fn from(engine: Handle) -> Self {
        let stats = engine.stats();
        Self {
            number: engine.number(),
            device: engine.device().to_owned(),
            failing: engine.is_failing(),
            waiting: stats.waiting,
            running: stats.running,
            pages: stats.pages_total,
            pages_used: stats.pages_used,
            pages_cached: stats.pages_cached,
            tokens: stats.tokens,
        }
    }
}

/// Blocks of the prefix cache by place. Those of a device are pages of one group of layers.
#[derive(Debug, Serialize, ToSchema)]
pub struct BlockStatus {
    /// Blocks in pages of the device: `GPU` in events.
    device: BlockCount,
    /// Blocks in memory of the host: `CPU` in events.
    host: BlockCount,
    /// Blocks on the disk of which events have reported: `DISK` in events.
    disk: BlockCount,
}

/// A set of blocks.
#[derive(Debug, Serialize, ToSchema)]
pub struct BlockCount {
    /// Their number.
    count: u64,
    /// Exclusive or of their hashes, in 16 hexadecimal digits.
    digest: String,
}

impl From<BlockSet> for BlockCount {
    fn from(set: BlockSet) -> Self {
        Self { count: set.count, digest: format!("{:016x}", set.digest) }
    }
}

/// A model's cache in memory of the host: blocks that the device had no room for.
#[derive(Debug, Serialize, ToSchema)]
pub struct HostStatus {
    /// Bytes that all models may have there: `--kv-host`.
    limit: u64,
    /// Bytes of this one.
    bytes: u64,
    /// Blocks and checkpoints.
    items: usize,
    /// Tokens of prompts that came from there.
    hit_tokens: u64,
    /// Loads from there.
    loads: u64,
    /// Loads that were not begun because computing was faster.
    loads_declined: u64,
    /// Blocks and checkpoints that were copied there.
    stored: u64,
    /// Blocks and checkpoints that there was no room for.
    dropped: u64,
    /// Bytes per second from there to the device.
    load_speed: u64,
    /// Bytes per second from the device.
    store_speed: u64,
    /// Estimated seconds of computing that loads saved.
    saved_seconds: f64,
}

impl From<HostStats> for HostStatus {
    fn from(stats: HostStats) -> Self {
        Self {
            limit: stats.limit,
            bytes: stats.bytes,
            items: stats.units,
            hit_tokens: stats.hit_tokens,
            loads: stats.loads,
            loads_declined: stats.declined,
            stored: stats.stored,
            dropped: stats.dropped,
            load_speed: stats.load_speed,
            store_speed: stats.store_speed,
            saved_seconds: seconds(stats.saved_nanoseconds),
        }
    }
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// A model's cache on disk.
#[derive(Debug, Serialize, ToSchema)]
pub struct DiskStatus {
    /// True if all data to be kept is on the disk, so that a killed process loses none of it.
    caught_up: bool,
    /// True if it waits for the digest of the model's files, which are read for it once.
    opening: bool,
    /// Number of blocks and checkpoints that wait for the writer.
    waiting: usize,
    /// Bytes queued in the writer.
    pending_bytes: u64,
    /// Number of prompt tokens read from the disk.
    hit_tokens: u64,
    /// Number of loads from the disk.
    loads: u64,
    /// Loads that were not begun because computing was faster.
    loads_declined: u64,
    /// Number of blocks and checkpoints passed to the writer.
    saved: u64,
    /// Number of blocks and checkpoints not written because the disk was too slow.
    dropped: u64,
    /// Bytes that were loaded.
    loaded_bytes: u64,
    /// Bytes per second that the disk reads.
    load_speed: u64,
    /// Bytes per second that the disk writes.
    store_speed: u64,
    /// Estimated seconds of computing that loads saved.
    saved_seconds: f64,
}

impl From<DiskStats> for DiskStatus {
    fn from(stats: DiskStats) -> Self {
        Self {
            caught_up: stats.has_caught_up(),
            opening: stats.is_opening,
            waiting: stats.waiting,
            pending_bytes: stats.pending_bytes,
            hit_tokens: stats.hit_tokens,
            loads: stats.loads,
            loads_declined: stats.declined,
            saved: stats.saved,
            dropped: stats.dropped,
            loaded_bytes: stats.loaded_bytes,
            load_speed: stats.load_speed,
            store_speed: stats.store_speed,
            saved_seconds: seconds(stats.saved_nanoseconds),
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
            // The number of states is the maximum number of sequences; it does not depend on the context.
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
            engines: match model.handle.engines() {
                engines if engines.len() > 1 => engines.map(EngineStatus::from).collect(),
                _ => Vec::new(),
            },
            blocks: {
                let [device, host, disk] = stats.blocks.map(BlockCount::from);
                BlockStatus { device, host, disk }
            },
            host: stats.host.exists.then(|| stats.host.into()),
            disk: stats.disk.exists.then(|| stats.disk.into()),
        }
    }
}

/// Returns the loaded models and their state.
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

/// Reports that the process runs.
#[utoipa::path(get, path = "/health", tag = "Status", responses((status = 200, body = Status)))]
pub async fn health() -> Json<Status> {
    Json(Status { status: "ok" })
}

/// Reports that the library can be read.
///
/// # Errors
/// The library cannot be read.
#[utoipa::path(get, path = "/ready", tag = "Status", responses((status = 200, body = Status), (status = "5XX", body = crate::openai::error::ErrorBody<'static>)))]
pub async fn ready(State(state): State<AppState>) -> Result<Json<Status>, ApiError> {
    if let Err(error) = state.models.list().await {
        return Err(ApiError::Unavailable(error.to_string()));
    }
    Ok(Json(Status { status: "ready" }))
}

/// Returns metrics in OpenMetrics' format, or in Prometheus' older one for clients that accept only that. Waits for
/// engines to finish their steps.
///
/// # Errors
/// A metric could not be written.
#[utoipa::path(
    get, path = "/metrics", tag = "Status",
    responses((status = 200, content(
        (String = "application/openmetrics-text"),
        (String = "text/plain; version=0.0.4"),
    ))),
)]
pub async fn prometheus(State(state): State<AppState>, headers: HeaderMap) -> Result<Response, ApiError> {
    // Engines answer between two steps. The place is kept when the client leaves.
    let place = state.metrics.scrapes.clone().acquire_owned().await;
    let text = spawn_blocking(move || {
        let _place = place;
        state.metrics.text()
    });
    let text = text.await;
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

/// Answers requests for unknown paths.
pub async fn no_such_path(request: Request) -> ApiError {
    let path = request.uri().path();
    let hint = match paths::meant(path) {
        Some(meant) => format!("did you mean {meant}?"),
        None => "/openapi.json lists what there is".to_owned(),
    };
    ApiError::NotFound(format!("there is nothing at {path}; {hint}"))
}

/// Answers requests with an unsupported method.
pub async fn no_such_method(request: Request) -> ApiError {
    ApiError::MethodNotAllowed { method: request.method().to_string(), path: request.uri().path().to_owned() }
}
