//! Load of the server, in the forms of vLLM and SGLang. It is read without waiting for an engine.

use axum::extract::State;
use paguro_engine::{Handle, Stats};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{AppState, extract::Json, ids};

/// Number of requests, in vLLM's form.
#[derive(Debug, Serialize, ToSchema)]
pub struct ServerLoad {
    /// Sequences that run or wait.
    server_load: usize,
}

/// Load of a server, in SGLang's older form.
#[derive(Debug, Serialize, ToSchema)]
pub struct OldLoad {
    /// Sequences that run or wait.
    load: usize,
    /// Always 0: the numbers are those of all engines.
    dp_rank: usize,
    /// Sequences that run or wait.
    num_reqs: usize,
    /// Sequences that wait.
    num_waiting_reqs: usize,
    /// Tokens of used pages.
    num_tokens: usize,
}

/// Load of all models, in SGLang's form.
#[derive(Debug, Serialize, ToSchema)]
pub struct Loads {
    /// Seconds since 1970.
    timestamp: u64,
    version: &'static str,
    /// Most engines of a model.
    dp_rank_count: usize,
    /// One element for each engine of each loaded model; one without a model if none is loaded.
    loads: Vec<ModelLoad>,
    aggregate: Aggregate,
}

/// Load of a model.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ModelLoad {
    /// Number of the engine.
    dp_rank: usize,
    model: String,
    num_running_reqs: usize,
    num_waiting_reqs: usize,
    num_total_reqs: usize,
    /// Tokens of pages in use.
    num_used_tokens: usize,
    /// Tokens of all pages.
    max_total_num_tokens: usize,
    /// Fraction of pages in use.
    token_usage: f64,
    /// Fraction of looked-up prompt tokens that the prefix cache had.
    cache_hit_rate: f64,
    /// Fraction of the maximum number of sequences that run.
    utilization: f64,
    /// Maximum number of concurrent sequences.
    max_running_requests: usize,
}

/// Sums and means of all models.
#[derive(Debug, Serialize, ToSchema)]
pub struct Aggregate {
    total_running_reqs: usize,
    total_waiting_reqs: usize,
    total_reqs: usize,
    avg_token_usage: f64,
    avg_utilization: f64,
}

fn fraction(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

impl ModelLoad {
    fn new(model: String, dp_rank: usize, block_size: usize, most: usize, stats: &Stats) -> Self {
        Self {
            dp_rank,
            model,
            num_running_reqs: stats.running,
            num_waiting_reqs: stats.waiting,
            num_total_reqs: stats.running + stats.waiting,
            num_used_tokens: stats.pages_used * block_size,
            max_total_num_tokens: stats.pages_total * block_size,
            token_usage: fraction(stats.pages_used as f64, stats.pages_total as f64),
            cache_hit_rate: fraction(stats.prefix_hit_tokens as f64, stats.prefix_query_tokens as f64),
            utilization: fraction(stats.running as f64, most as f64),
            max_running_requests: most,
        }
    }
}

fn models(state: &AppState) -> Vec<ModelLoad> {
    let resident = state.models.resident().into_iter();
    let load = resident.flat_map(|model| {
        let most = model.handle.max_branches();
        let engines = model.handle.engines();
        let load = |engine: Handle| {
            let name = model.entry.name.clone();
            ModelLoad::new(name, engine.number(), model.block_size, most, &engine.stats())
        };
        engines.map(load).collect::<Vec<_>>()
    });
    let mut loads: Vec<_> = load.collect();
    if loads.is_empty() {
        loads.push(ModelLoad::default());
    }
    loads
}

fn sum(loads: &[ModelLoad], of: fn(&ModelLoad) -> usize) -> usize {
    loads.iter().map(of).sum()
}

/// Returns the number of requests, as vLLM does.
#[utoipa::path(get, path = "/load", tag = "Routers", responses((status = 200, body = ServerLoad)))]
pub async fn load(State(state): State<AppState>) -> Json<ServerLoad> {
    Json(ServerLoad { server_load: sum(&models(&state), |load| load.num_total_reqs) })
}

/// Returns the number of requests, as SGLang did before `/v1/loads`.
#[utoipa::path(get, path = "/get_load", tag = "Routers", responses((status = 200, body = OldLoad)))]
pub async fn get_load(State(state): State<AppState>) -> Json<OldLoad> {
    let loads = models(&state);
    let requests = sum(&loads, |load| load.num_total_reqs);
    Json(OldLoad {
        load: requests,
        dp_rank: 0,
        num_reqs: requests,
        num_waiting_reqs: sum(&loads, |load| load.num_waiting_reqs),
        num_tokens: sum(&loads, |load| load.num_used_tokens),
    })
}

fn all(state: &AppState) -> Loads {
    let loads = models(state);
    let mean = |of: fn(&ModelLoad) -> f64| {
        let total: f64 = loads.iter().map(of).sum();
        total / loads.len() as f64
    };
    Loads {
        timestamp: ids::now(),
        version: env!("CARGO_PKG_VERSION"),
        dp_rank_count: loads.iter().map(|load| load.dp_rank + 1).max().unwrap_or(1),
        aggregate: Aggregate {
            total_running_reqs: sum(&loads, |load| load.num_running_reqs),
            total_waiting_reqs: sum(&loads, |load| load.num_waiting_reqs),
            total_reqs: sum(&loads, |load| load.num_total_reqs),
            avg_token_usage: mean(|load| load.token_usage),
            avg_utilization: mean(|load| load.utilization),
        },
        loads,
    }
}

/// Returns the load of each model, as SGLang does. Parameters that select parts of it have no effect.
#[utoipa::path(get, path = "/v1/loads", tag = "Routers", responses((status = 200, body = Loads)))]
pub async fn v1_loads(State(state): State<AppState>) -> Json<Loads> {
    Json(all(&state))
}

/// Alias of `/v1/loads`.
#[utoipa::path(get, path = "/loads", tag = "Routers", responses((status = 200, body = Loads)))]
pub async fn loads(State(state): State<AppState>) -> Json<Loads> {
    Json(all(&state))
}
