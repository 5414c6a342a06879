//! `/server_info` of vLLM and `/get_server_info` of SGLang: settings that routers need.

use axum::extract::{RawQuery, State};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    AppState, error::ApiError, extract::Json, kv_events::BATCHES_KEPT, models::ResidentInfo,
    openai::props::find,
};

/// Settings of the server and of a model, under the names of both programs.
#[derive(Debug, Serialize, ToSchema)]
pub struct ServerInfo {
    vllm_config: VllmConfig,
    /// Name of the model.
    model_path: String,
    /// Name of the model.
    served_model_name: String,
    /// Maximum tokens of prompt and answer.
    max_model_len: Option<usize>,
    /// Tokens in a page of K and V.
    page_size: usize,
    /// Tokens of all pages of K and V; `null` while the model is not loaded.
    max_total_num_tokens: Option<usize>,
    /// Maximum number of concurrent sequences.
    max_running_requests: usize,
    /// Always 1: a server is one replica.
    dp_size: usize,
    /// Always 1.
    tp_size: usize,
    /// Paguro's version.
    version: &'static str,
}

/// Settings under vLLM's names.
#[derive(Debug, Serialize, ToSchema)]
pub struct VllmConfig {
    model_config: ModelConfig,
    cache_config: CacheConfig,
    parallel_config: ParallelConfig,
    scheduler_config: SchedulerConfig,
    kv_events_config: KvEventsConfig,
}

/// The model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelConfig {
    model: String,
    served_model_name: String,
    max_model_len: Option<usize>,
}

/// Pages of K and V.
#[derive(Debug, Serialize, ToSchema)]
pub struct CacheConfig {
    /// Tokens in a page.
    block_size: usize,
    /// Number of pages, on any device; `null` while the model is not loaded.
    num_gpu_blocks: Option<usize>,
    /// Always true.
    enable_prefix_caching: bool,
}

/// Parallelism: none.
#[derive(Debug, Serialize, ToSchema)]
pub struct ParallelConfig {
    data_parallel_size: usize,
    tensor_parallel_size: usize,
    pipeline_parallel_size: usize,
}

/// Concurrency.
#[derive(Debug, Serialize, ToSchema)]
pub struct SchedulerConfig {
    max_num_seqs: usize,
}

/// Events of the prefix cache.
#[derive(Debug, Serialize, ToSchema)]
pub struct KvEventsConfig {
    /// True if they are published.
    enable_kv_cache_events: bool,
    /// `zmq`, or `null` without events.
    publisher: &'static str,
    /// Address of the PUB socket.
    endpoint: Option<String>,
    /// Address of the ROUTER socket for replay.
    replay_endpoint: Option<String>,
    /// Batches that can be replayed, at most.
    buffer_steps: usize,
    /// Batches that a slow reader can be behind, at most.
    hwm: usize,
    /// Topic of the messages of this model.
    topic: String,
}

async fn info(state: &AppState, query: Option<String>) -> Result<ServerInfo, ApiError> {
    let query = query.unwrap_or_default();
    let name = query.split('&').find_map(|pair| pair.strip_prefix("model="));
    let name = name.map(|name| percent_decode_str(name).decode_utf8_lossy().into_owned());
    let entry = find(state, name).await?;
    let resident = state.models.resident().into_iter().find(|model| model.entry.name == entry.name);
    let pages = resident.as_ref().map(|model: &ResidentInfo| model.handle.stats().pages_total);
    let block_size =
        resident.map_or_else(|| paguro_engine::EngineOptions::default().block_size, |model| model.block_size);
    let max_model_len = state.models.context(&entry);
    let places = state.settings.kv_events.as_ref();
    let kv_events_config = KvEventsConfig {
        enable_kv_cache_events: places.is_some(),
        publisher: if places.is_some() { "zmq" } else { "null" },
        endpoint: places.map(|places| places.endpoint.clone()),
        replay_endpoint: places.and_then(|places| places.replay.clone()),
        buffer_steps: BATCHES_KEPT,
        hwm: BATCHES_KEPT,
        topic: places.map(|places| places.topic.replace("{model}", &entry.name)).unwrap_or_default(),
    };
    Ok(ServerInfo {
        vllm_config: VllmConfig {
            model_config: ModelConfig {
                model: entry.name.clone(),
                served_model_name: entry.name.clone(),
                max_model_len,
            },
            cache_config: CacheConfig { block_size, num_gpu_blocks: pages, enable_prefix_caching: true },
            parallel_config: ParallelConfig {
                data_parallel_size: 1,
                tensor_parallel_size: 1,
                pipeline_parallel_size: 1,
            },
            scheduler_config: SchedulerConfig { max_num_seqs: entry.details.sequences },
            kv_events_config,
        },
        model_path: entry.name.clone(),
        served_model_name: entry.name,
        max_model_len,
        page_size: block_size,
        max_total_num_tokens: pages.map(|pages| pages * block_size),
        max_running_requests: entry.details.sequences,
        dp_size: 1,
        tp_size: 1,
        version: env!("CARGO_PKG_VERSION"),
    })
}

/// Returns settings of a model without loading it, in JSON for every `config_format`.
///
/// # Errors
/// No model has this name.
#[utoipa::path(
    get, path = "/server_info", tag = "Routers",
    params(("model" = Option<String>, Query, description = "The model's name; if absent, a model that is loaded, or the first there is")),
    responses((status = 200, body = ServerInfo)),
)]
pub async fn server_info(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<ServerInfo>, ApiError> {
    info(&state, query).await.map(Json)
}

/// Alias of `/server_info`.
///
/// # Errors
/// No model has this name.
#[utoipa::path(
    get, path = "/get_server_info", tag = "Routers",
    params(("model" = Option<String>, Query, description = "The model's name; if absent, a model that is loaded, or the first there is")),
    responses((status = 200, body = ServerInfo)),
)]
pub async fn get_server_info(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<ServerInfo>, ApiError> {
    info(&state, query).await.map(Json)
}
