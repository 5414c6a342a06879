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

use crate::{
    AppState, error::ApiError, extract::Json, made_from::made_from, metrics, models::ResidentInfo, paths,
};

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

made_from! {
    /// Current state of a loaded model.
    #[derive(Debug, Serialize, ToSchema)]
    pub struct ModelStatus from model: ResidentInfo where stats = model.handle.stats(); {
        name: String = model.entry.name,
        /// Name of its device.
        device: String = model.device,
        /// Bytes of weights, K and V, and buffers.
        bytes: u64 = model.memory.total(),
        /// Bytes of its weights on the device.
        weights: u64 = model.memory.weights,
        /// Bytes of its pages of K and V. On a CPU they become resident when they are first used.
        kv: u64 = model.memory.kv,
        /// Bytes of its buffers. On a CPU they become resident with the first large step.
        // The number of states is the maximum number of sequences; it does not depend on the context.
        buffers: u64 = model.memory.buffers.saturating_add(model.memory.states),
        /// Maximum tokens of prompt and answer.
        context: usize = model.handle.max_context(),
        /// Number of requests that hold it.
        users: usize = model.users,
        /// Seconds until it is unloaded without further requests; `null` for never.
        expires_in: Option<f64> = model.expires_in.map(|time| time.as_secs_f64()),
        /// Number of waiting sequences.
        waiting: usize = stats.waiting,
        /// Number of running sequences.
        running: usize = stats.running,
        /// Number of usable pages.
        pages: usize = stats.pages_total,
        /// Number of pages in use.
        pages_used: usize = stats.pages_used,
        /// Number of pages that only the prefix cache holds.
        pages_cached: usize = stats.pages_cached,
        /// Number of tokens sampled since it was loaded.
        tokens: u64 = stats.tokens,
        /// Engines of the model, if there are several; the numbers above are their sums, and bytes are those of each.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        engines: Vec<EngineStatus> = match model.handle.engines() {
            engines if engines.len() > 1 => engines.map(EngineStatus::from).collect(),
            _ => Vec::new(),
        },
        /// Blocks of the prefix cache, as a reader of KV events counts them.
        blocks: BlockStatus = {
            let [device, host, disk] = stats.blocks.map(BlockCount::from);
            BlockStatus { device, host, disk }
        },
        /// Its cache in memory of the host; `null` without one.
        host: Option<HostStatus> = stats.host.exists.then(|| stats.host.into()),
        /// Its cache on disk; `null` without one.
        disk: Option<DiskStatus> = stats.disk.exists.then(|| stats.disk.into()),
    }
}

made_from! {
    /// Current state of one of several engines of a model.
    #[derive(Debug, Serialize, ToSchema)]
    pub struct EngineStatus from engine: Handle where stats = engine.stats(); {
        /// Number of its device in `--device`.
        number: usize = engine.number(),
        /// Name of its device.
        device: String = engine.device().to_owned(),
        /// True if its last step failed, or if it has stopped: it gets no requests while another engine works.
        failing: bool = engine.is_failing(),
        /// Number of waiting sequences.
        waiting: usize = stats.waiting,
        /// Number of running sequences.
        running: usize = stats.running,
        /// Number of usable pages.
        pages: usize = stats.pages_total,
        /// Number of pages in use.
        pages_used: usize = stats.pages_used,
        /// Number of pages that only the prefix cache holds.
        pages_cached: usize = stats.pages_cached,
        /// Number of tokens sampled since it was loaded.
        tokens: u64 = stats.tokens,
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

made_from! {
    /// A model's cache in memory of the host: blocks that the device had no room for.
    #[derive(Debug, Serialize, ToSchema)]
    pub struct HostStatus from stats: HostStats {
        /// Bytes that all models may have there: `--kv-host`.
        limit: u64 = stats.limit,
        /// Bytes of this one.
        bytes: u64 = stats.bytes,
        /// Blocks and checkpoints.
        items: usize = stats.units,
        /// Tokens of prompts that came from there.
        hit_tokens: u64 = stats.hit_tokens,
        /// Loads from there.
        loads: u64 = stats.loads,
        /// Loads that were not begun because computing was faster.
        loads_declined: u64 = stats.declined,
        /// Blocks and checkpoints that were copied there.
        stored: u64 = stats.stored,
        /// Blocks and checkpoints that there was no room for.
        dropped: u64 = stats.dropped,
        /// Bytes per second from there to the device.
        load_speed: u64 = stats.load_speed,
        /// Bytes per second from the device.
        store_speed: u64 = stats.store_speed,
        /// Estimated seconds of computing that loads saved.
        saved_seconds: f64 = seconds(stats.saved_nanoseconds),
    }
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

made_from! {
    /// A model's cache on disk.
    #[derive(Debug, Serialize, ToSchema)]
    pub struct DiskStatus from stats: DiskStats {
        /// True if all data to be kept is on the disk, so that a killed process loses none of it.
        caught_up: bool = stats.has_caught_up(),
        /// True if it waits for the digest of the model's files, which are read for it once.
        opening: bool = stats.is_opening,
        /// Number of blocks and checkpoints that wait for the writer.
        waiting: usize = stats.waiting,
        /// Bytes queued in the writer.
        pending_bytes: u64 = stats.pending_bytes,
        /// Number of prompt tokens read from the disk.
        hit_tokens: u64 = stats.hit_tokens,
        /// Number of loads from the disk.
        loads: u64 = stats.loads,
        /// Loads that were not begun because computing was faster.
        loads_declined: u64 = stats.declined,
        /// Number of blocks and checkpoints passed to the writer.
        saved: u64 = stats.saved,
        /// Number of blocks and checkpoints not written because the disk was too slow.
        dropped: u64 = stats.dropped,
        /// Bytes that were loaded.
        loaded_bytes: u64 = stats.loaded_bytes,
        /// Bytes per second that the disk reads.
        load_speed: u64 = stats.load_speed,
        /// Bytes per second that the disk writes.
        store_speed: u64 = stats.store_speed,
        /// Estimated seconds of computing that loads saved.
        saved_seconds: f64 = seconds(stats.saved_nanoseconds),
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
#[utoipa::path(get, path = "/ready", tag = "Status", responses((status = 200, body = Status)))]
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
    responses((status = 200, content((String = "application/openmetrics-text"), (String = "text/plain; version=0.0.4")))),
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
