//! Metrics for `/metrics`: latencies and counts of requests, recorded here, and statistics of the engines and the
//! process, read at each scrape.

use std::{
    fmt::{self, Write as _},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use paguro_engine::{Handle, Stats};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text::encode},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::ConstGauge,
        histogram::Histogram,
    },
    registry::Registry,
};
use tokio::sync::Semaphore;

use crate::{
    error::ApiError,
    generate::Usage,
    ids,
    models::{Models, ResidentInfo},
    ui::Recent,
};

/// OpenMetrics' text format.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Prometheus' older text format.
pub const OLD_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Converts OpenMetrics to Prometheus' older text format. There, the description of a counter has the name of its
/// samples, and the text has no end mark.
pub fn older(text: &str) -> String {
    let counters: Vec<_> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut older = String::with_capacity(text.len());
    for line in text.lines().filter(|line| *line != "# EOF" && !line.starts_with("# UNIT ")) {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(what @ ("HELP" | "TYPE")), Some(name), Some(rest))
                if counters.contains(&name) =>
            {
                let _ = writeln!(older, "# {what} {name}_total {rest}");
            }
            _ => {
                older.push_str(line);
                older.push('\n');
            }
        }
    }
    older
}

/// Buckets in seconds, from a token on a fast device to a long prompt on a slow one.
const LATENCY_BUCKETS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ModelLabel {
    model_name: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndLabels {
    model_name: String,
    end: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FinishLabels {
    model_name: String,
    finished_reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HttpLabels {
    path: String,
    status: u16,
}

type ByModel<M> = Family<ModelLabel, M>;
type Histograms = Family<ModelLabel, Histogram, fn() -> Histogram>;

/// Number of concurrent readers of all metrics; others wait.
const MAX_SCRAPES: usize = 4;

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    /// Places of readers of all metrics, each of which waits for engines on a thread.
    pub scrapes: Arc<Semaphore>,
    registry: Registry,
    http: Family<HttpLabels, Counter>,
    requests: Family<EndLabels, Counter>,
    successes: Family<FinishLabels, Counter>,
    prompt_tokens: ByModel<Counter>,
    cached_tokens: ByModel<Counter>,
    generated_tokens: ByModel<Counter>,
    /// Images whose pixels were decoded.
    pub decoded_images: Counter,
    queue_time: Histograms,
    first_token: Histograms,
    token_gap: Histograms,
    duration: Histograms,
    /// Latencies of the last seconds, for the page.
    pub recent: Recent,
}

/// Metrics of one request; records its outcome when it is dropped.
#[derive(Debug)]
pub struct RequestMetrics {
    metrics: Arc<Metrics>,
    model: ModelLabel,
    queue_time: Histogram,
    first_token: Histogram,
    token_gap: Histogram,
    received: Instant,
    end: &'static str,
}

fn latency() -> Histogram {
    Histogram::new(LATENCY_BUCKETS)
}

impl Metrics {
    /// Creates the metrics.
    pub fn new(models: Arc<Models>) -> Arc<Self> {
        let mut registry = Registry::default();
        let histograms = || Histograms::new_with_constructor(latency);
        let metrics = Self {
            scrapes: Arc::new(Semaphore::new(MAX_SCRAPES)),
            http: Family::default(),
            requests: Family::default(),
            successes: Family::default(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            generated_tokens: Family::default(),
            decoded_images: Counter::default(),
            queue_time: histograms(),
            first_token: histograms(),
            token_gap: histograms(),
            duration: histograms(),
            registry: Registry::default(),
            recent: Recent::default(),
        };
        registry.register("paguro_http_requests", "HTTP requests by path and status", metrics.http.clone());
        registry.register("paguro_requests", "Requests for an answer, by outcome", metrics.requests.clone());
        registry.register("paguro_prompt_tokens", "Prompt tokens", metrics.prompt_tokens.clone());
        registry.register(
            "paguro_cached_prompt_tokens",
            "Prompt tokens found in the prefix cache",
            metrics.cached_tokens.clone(),
        );
        registry.register("paguro_generated_tokens", "Tokens sampled", metrics.generated_tokens.clone());
        let decoded = metrics.decoded_images.clone();
        registry.register("paguro_images_decoded", "Images whose pixels were decoded", decoded);
        for (name, help, family) in [
            ("queue_time", "Seconds between queueing and start", &metrics.queue_time),
            ("time_to_first_token", "Seconds from the request to the first token", &metrics.first_token),
            ("inter_token_latency", "Seconds between tokens", &metrics.token_gap),
            ("request_duration", "Seconds from the request to its last token", &metrics.duration),
        ] {
            registry.register(format!("paguro_{name}_seconds"), help, family.clone());
        }
        metrics.register_for_routers(&mut registry);
        registry.register_collector(Box::new(EngineCollector { models }));
        Arc::new(Self { registry, ..metrics })
    }

    /// Registers the metrics again under vLLM's names, which routers and dashboards read.
    fn register_for_routers(&self, registry: &mut Registry) {
        for (name, help, family) in [
            ("request_queue_time", "The same as paguro_queue_time_seconds", &self.queue_time),
            ("time_to_first_token", "The same as paguro_time_to_first_token_seconds", &self.first_token),
            ("inter_token_latency", "The same as paguro_inter_token_latency_seconds", &self.token_gap),
            ("time_per_output_token", "The older name of vllm:inter_token_latency_seconds", &self.token_gap),
            ("e2e_request_latency", "The same as paguro_request_duration_seconds", &self.duration),
        ] {
            registry.register(format!("vllm:{name}_seconds"), help, family.clone());
        }
        registry.register(
            "vllm:prompt_tokens",
            "The same as paguro_prompt_tokens",
            self.prompt_tokens.clone(),
        );
        let help = "The same as paguro_generated_tokens";
        registry.register("vllm:generation_tokens", help, self.generated_tokens.clone());
        registry.register("vllm:request_success", "Answers, by reason of their end", self.successes.clone());
    }

    /// Counts an answered HTTP request. `path` is a route, not a URL of a client.
    pub fn http(&self, path: &str, status: u16) {
        self.http.get_or_create(&HttpLabels { path: path.to_owned(), status }).inc();
    }

    /// Starts a request for an answer.
    pub fn request(self: &Arc<Self>, model: &str, received: Instant) -> RequestMetrics {
        let model = ModelLabel { model_name: model.to_owned() };
        RequestMetrics {
            queue_time: self.queue_time.get_or_create_owned(&model),
            first_token: self.first_token.get_or_create_owned(&model),
            token_gap: self.token_gap.get_or_create_owned(&model),
            metrics: self.clone(),
            model,
            received,
            end: "cancelled",
        }
    }

    /// Returns the text for Prometheus. Waits for engines to finish their steps.
    ///
    /// # Errors
    /// A metric could not be written.
    pub fn text(&self) -> Result<String, ApiError> {
        let mut text = String::new();
        encode(&mut text, &self.registry).map_err(|error| ApiError::Internal(error.to_string()))?;
        Ok(text)
    }
}

impl RequestMetrics {
    /// Records that the request left the queue.
    pub fn started(&self, waited: Duration) {
        self.queue_time.observe(waited.as_secs_f64());
    }

    /// Records the first token.
    pub fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
        self.metrics.recent.first_token(after);
    }

    /// Records a further token.
    pub fn token_gap(&self, gap: Duration) {
        self.token_gap.observe(gap.as_secs_f64());
        self.metrics.recent.token_gap(gap);
    }

    /// Records the end of a choice. The prompt's tokens, which all choices share, are counted with the first one.
    pub fn finished(&mut self, usage: Usage, finished_reason: &'static str) {
        let labels = FinishLabels { model_name: self.model.model_name.clone(), finished_reason };
        self.metrics.successes.get_or_create(&labels).inc();
        let Metrics { prompt_tokens, cached_tokens, generated_tokens, .. } = &*self.metrics;
        if self.end != "finished" {
            prompt_tokens.get_or_create(&self.model).inc_by(usage.prompt as u64);
            cached_tokens.get_or_create(&self.model).inc_by(usage.cached as u64);
        }
        generated_tokens.get_or_create(&self.model).inc_by(usage.completion as u64);
        self.end = "finished";
    }

    /// Records a failure.
    pub fn failed(&mut self) {
        self.end = "failed";
    }
}

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        let labels = EndLabels { model_name: self.model.model_name.clone(), end: self.end };
        self.metrics.requests.get_or_create(&labels).inc();
        if self.end == "finished" {
            let duration = self.received.elapsed().as_secs_f64();
            self.metrics.duration.get_or_create(&self.model).observe(duration);
        }
    }
}

/// Reads statistics of engines and of the process at each scrape.
#[derive(Debug)]
struct EngineCollector {
    models: Arc<Models>,
}

/// Name, description and value of a metric.
type StatsMetric = (&'static str, &'static str, fn(&Stats) -> f64);

/// Lists metrics: the name, the description, and the field of the statistics.
macro_rules! metrics {
    ($($name:literal $help:literal $($field:ident).+ $(/ $divisor:literal)?;)*) => {
        &[$(($name, $help, |stats| stats.$($field).+ as f64 $(/ $divisor)?)),*]
    };
}

const GAUGES: &[StatsMetric] = metrics! {
    "paguro_requests_waiting" "Sequences that wait" waiting;
    "paguro_requests_running" "Sequences that run" running;
    "paguro_kv_pages" "Pages that sequences can use" pages_total;
    "paguro_kv_pages_used" "Pages in use by sequences" pages_used;
    "paguro_kv_pages_cached" "Pages that only the prefix cache keeps" pages_cached;
    "paguro_disk_pending_bytes" "Bytes that wait to be written" disk.pending_bytes;
    "paguro_disk_load_bytes_per_second" "Speed of loads from the disk" disk.load_speed;
    "paguro_disk_store_bytes_per_second" "Speed of the disk's writer" disk.store_speed;
    "paguro_host_bytes" "Bytes of K and V in memory of the host" host.bytes;
    "paguro_host_load_bytes_per_second" "Speed of loads from the host" host.load_speed;
    "paguro_host_store_bytes_per_second" "Speed of copies to the host" host.store_speed;
    "paguro_draft_saved_seconds" "Estimated time that drafts saved, less that of rejected ones and of models that draft" draft_nanoseconds / 1e9;
    "paguro_draft_model_seconds" "Time of heads and models that draft" draft_model_nanoseconds / 1e9;
    "paguro_batch_rows" "Rows of the last step" last_rows;
    "paguro_batch_sequences" "Sequences of the last step" last_sequences;
    // Names that the Gateway API Inference Extension and llm-d read.
    "vllm:num_requests_waiting" "The same as paguro_requests_waiting" waiting;
    "vllm:num_requests_running" "The same as paguro_requests_running" running;
};

const RATIOS: &[StatsMetric] = &[
    ("paguro_kv_usage_ratio", "Fraction of pages in use", page_usage),
    ("vllm:kv_cache_usage_perc", "The same as paguro_kv_usage_ratio", page_usage),
    ("vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc", page_usage),
    ("vllm:gpu_prefix_cache_hit_rate", "Fraction of looked-up tokens that were cached", |stats| {
        stats.prefix_hit_tokens as f64 / stats.prefix_query_tokens.max(1) as f64
    }),
];

const COUNTERS: &[StatsMetric] = metrics! {
    "paguro_steps" "Steps" steps;
    "paguro_steps_ahead" "Steps submitted while the device computed the one before" steps_ahead;
    "paguro_failed_steps" "Steps that failed" failed_steps;
    "paguro_rows" "Rows computed" rows;
    "paguro_prefix_hit_tokens" "Tokens found in the prefix cache" prefix_hit_tokens;
    "paguro_disk_hit_tokens" "Tokens that came from the disk" disk.hit_tokens;
    "paguro_disk_loads" "Loads from the disk" disk.loads;
    "paguro_disk_loads_declined" "Loads not begun because computing was faster" disk.declined;
    "paguro_disk_saved" "Blocks and checkpoints handed to the writer" disk.saved;
    "paguro_disk_dropped" "Blocks not written because the disk was too slow" disk.dropped;
    "paguro_disk_loaded_bytes" "Bytes that were loaded from the disk" disk.loaded_bytes;
    "paguro_disk_saved_seconds" "Time of computing that loads from the disk saved" disk.saved_nanoseconds / 1e9;
    "paguro_host_hit_tokens" "Tokens that came from memory of the host" host.hit_tokens;
    "paguro_host_loads" "Loads from memory of the host" host.loads;
    "paguro_host_loaded_bytes" "Bytes that were loaded from the host" host.loaded_bytes;
    "paguro_host_stored" "Blocks and checkpoints copied to the host" host.stored;
    "paguro_host_saved_seconds" "Time of computing that loads from the host saved" host.saved_nanoseconds / 1e9;
    "paguro_drafts" "Drafts that were checked" drafts;
    // Names that vLLM uses.
    "vllm:spec_decode_num_drafts" "The same as paguro_drafts" drafts;
    "vllm:spec_decode_num_draft_tokens" "Drafted tokens that were checked" draft_tokens;
    "vllm:spec_decode_num_accepted_tokens" "Drafted tokens that were accepted" accepted_tokens;
    "paguro_images" "Images of requests that started" pictures;
    "paguro_images_encoded" "Images that the vision tower computed" encoded_pictures;
    "paguro_encoder_cache_hits" "Images whose rows were in the encoder's cache" encoder_cache_hits;
    "paguro_encoder_seconds" "Time of the vision tower" encoder_nanoseconds / 1e9;
    "paguro_evictions" "Cached pages evicted" evictions;
    "paguro_preemptions" "Preempted sequences" preemptions;
    "paguro_page_copies" "Pages copied before they were written" page_copies;
    "paguro_step_seconds" "Time in steps" step_times.total_nanoseconds / 1e9;
    "paguro_prefix_query_tokens" "Tokens looked up in the prefix cache" prefix_query_tokens;
    // Names that routers read.
    "vllm:prefix_cache_queries" "The same as paguro_prefix_query_tokens" prefix_query_tokens;
    "vllm:prefix_cache_hits" "The same as paguro_prefix_hit_tokens" prefix_hit_tokens;
    "vllm:gpu_prefix_cache_queries" "The older name of vllm:prefix_cache_queries" prefix_query_tokens;
    "vllm:gpu_prefix_cache_hits" "The older name of vllm:prefix_cache_hits" prefix_hit_tokens;
    "vllm:num_preemptions" "The same as paguro_preemptions" preemptions;
};

/// Labels and values of one metric.
type Samples<L, V> = Vec<(L, V)>;

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let resident = self.models.resident();
        let engines: Vec<_> = resident.iter().flat_map(EngineSample::of).collect();
        let of = |value: fn(&Stats) -> f64| -> Samples<Labels, f64> {
            engines.iter().map(|engine| (engine.labels.clone(), value(&engine.stats))).collect()
        };
        for &(name, help, value) in GAUGES.iter().chain(RATIOS) {
            family(&mut encoder, name, help, &of(value), |value| ConstGauge::new(*value))?;
        }
        for &(name, help, value) in COUNTERS {
            family(&mut encoder, name, help, &of(value), |value| ConstCounter::new(*value))?;
        }
        encode_engines(&mut encoder, &engines)?;
        self.encode_models(&mut encoder, &resident)?;
        encode_process(&mut encoder)
    }
}

impl EngineCollector {
    fn encode_models(&self, encoder: &mut DescriptorEncoder<'_>, resident: &[ResidentInfo]) -> fmt::Result {
        let adapters = |model: &ResidentInfo| {
            let [name] = label(model);
            let most = ("max_lora", model.handle.max_adapters().to_string());
            let names = |count: fn((usize, usize)) -> usize| {
                let used = model.adapters.iter().filter(|adapter| count(adapter.requests()) > 0);
                used.map(|adapter| &**adapter.name()).collect::<Vec<_>>().join(",")
            };
            let running = ("running_lora_adapters", names(|(_, running)| running));
            let waiting = ("waiting_lora_adapters", names(|(waiting, _)| waiting));
            ([name, most, running, waiting], ids::now())
        };
        let adapters: Vec<_> = resident.iter().map(adapters).collect();
        let help = "Adapters of running and waiting requests; the value is the time";
        family(encoder, "vllm:lora_requests_info", help, &adapters, |time| ConstGauge::new(*time))?;
        let memory: Vec<_> = resident.iter().map(|model| (label(model), model.memory.total())).collect();
        let help = "Bytes of weights and pages";
        family(encoder, "paguro_model_bytes", help, &memory, |bytes| ConstGauge::new(*bytes))?;
        let loads = &self.models;
        for (name, help, value) in [
            ("paguro_model_loads", "Models loaded", &loads.loads),
            ("paguro_model_load_failures", "Models that could not be loaded", &loads.failed_loads),
            ("paguro_model_unloads", "Models unloaded", &loads.unloads),
        ] {
            let counter = ConstCounter::new(value.load(Ordering::Relaxed));
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            counter.encode(metric)?;
        }
        Ok(())
    }
}

type Labels = Vec<(&'static str, String)>;

/// One engine of a model at the time of a scrape.
struct EngineSample {
    handle: Handle,
    stats: Stats,
    block_size: usize,
    /// The model, and the number of the engine if the model has several, as vLLM names them.
    labels: Labels,
}

impl EngineSample {
    /// Returns the engines of a model.
    fn of(model: &ResidentInfo) -> impl Iterator<Item = Self> {
        let engines = model.handle.engines();
        let is_one = engines.len() == 1;
        engines.map(move |handle| {
            let number = (!is_one).then(|| ("engine", handle.number().to_string()));
            let labels = label(model).into_iter().chain(number).collect();
            Self { stats: handle.stats(), handle, block_size: model.block_size, labels }
        })
    }

    /// Returns its labels and more.
    fn labels_with<const N: usize>(&self, more: [(&'static str, String); N]) -> Labels {
        self.labels.iter().cloned().chain(more).collect()
    }
}

fn encode_engines(encoder: &mut DescriptorEncoder<'_>, engines: &[EngineSample]) -> fmt::Result {
    let launches = engines.iter().flat_map(|engine| {
        // An engine that has stopped reports no counts.
        let kernels = engine.handle.kernel_counts().unwrap_or_default().into_iter();
        kernels.map(|kernel| (engine.labels_with([("kernel", kernel.name)]), kernel.launches))
    });
    let launches: Vec<_> = launches.collect();
    let help = "Launches of kernels, by name";
    family(encoder, "paguro_kernel_launches", help, &launches, |count| ConstCounter::new(*count))?;
    let config = |engine: &EngineSample| {
        // vLLM uses this name for the number of pages on any device.
        let pages = ("num_gpu_blocks", engine.stats.pages_total.to_string());
        (engine.labels_with([("block_size", engine.block_size.to_string()), pages]), 1u64)
    };
    let configs: Vec<_> = engines.iter().map(config).collect();
    let help = "Tokens in a page and number of pages";
    family(encoder, "vllm:cache_config_info", help, &configs, |one| ConstGauge::new(*one))
}

fn page_usage(stats: &Stats) -> f64 {
    stats.pages_used as f64 / stats.pages_total.max(1) as f64
}

fn label(model: &ResidentInfo) -> [(&'static str, String); 1] {
    [("model_name", model.entry.name.clone())]
}

/// Writes one metric with several label sets.
fn family<L: EncodeLabelSet, V, M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: &[(L, V)],
    metric: impl Fn(&V) -> M,
) -> fmt::Result {
    let Some(first) = samples.first() else { return Ok(()) };
    let kind = metric(&first.1).metric_type();
    let mut descriptor = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, value) in samples {
        metric(value).encode(descriptor.encode_family(labels)?)?;
    }
    Ok(())
}

/// Writes the memory of this process, where the system reports it.
fn encode_process(encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let Some(bytes) = resident_bytes() else { return Ok(()) };
    let metric = encoder.encode_descriptor(
        "process_resident_memory_bytes",
        "Resident memory",
        None,
        MetricType::Gauge,
    )?;
    ConstGauge::new(bytes).encode(metric)
}

/// Returns the resident memory on Linux (`VmRSS`). Other systems would need `unsafe` calls.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}
