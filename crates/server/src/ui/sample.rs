//! State of all engines at one time, and the differences that are sent.

use std::collections::HashMap;

use paguro_engine::{PicturesSnapshot, SequenceSnapshot, Snapshot, Stats};
use serde::Serialize;
use utoipa::ToSchema;

use super::{
    diff::{Run, minus, runs},
    recent::Latency,
};
use crate::made_from::made_from;

/// State of all engines at one time.
#[derive(Debug)]
pub struct Sample {
    /// Milliseconds since the server's first sample.
    pub time: u64,
    /// Resident memory of the process in bytes, where the system reports it.
    pub memory: Option<u64>,
    /// Times to the first token.
    pub first_token: Latency,
    /// Gaps between tokens.
    pub token_gap: Latency,
    /// The models that are loaded.
    pub models: Vec<ModelSample>,
}

/// One engine.
#[derive(Debug)]
pub struct ModelSample {
    /// The model's name.
    pub name: String,
    /// The device's name.
    pub device: String,
    /// Bytes of weights and pages.
    pub bytes: u64,
    /// Maximum tokens of prompt and answer.
    pub context: usize,
    /// The engine's snapshot.
    pub snapshot: Snapshot,
}

/// One event of the stream. Page numbers begin at 1; a list of pages is a list of runs `[first, length]`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Tick<'s> {
    /// Milliseconds since the server's first sample.
    time: u64,
    /// Resident memory of the process in bytes; `null` where the system does not report it.
    memory: Option<u64>,
    /// Seconds from a request to its first token, over the last minute.
    first_token: Latency,
    /// Seconds between tokens, over the last ten seconds.
    token_gap: Latency,
    /// The models that are loaded.
    models: Vec<ModelTick<'s>>,
}

/// One loaded model.
#[derive(Debug, Serialize, ToSchema)]
struct ModelTick<'s> {
    name: &'s str,
    device: &'s str,
    /// Bytes of weights and pages.
    bytes: u64,
    /// Maximum tokens of prompt and answer.
    context: usize,
    /// Tokens in a page.
    block_size: usize,
    /// Maximum rows of a step.
    max_rows: usize,
    /// Maximum number of running sequences.
    max_sequences: usize,
    /// Counters of the engine; rates are differences between two events.
    stats: StatsTick,
    sequences: Vec<SequenceTick>,
    /// Pages that only the prefix cache has held since the last event.
    #[schema(value_type = Vec<Vec<u32>>)]
    cached_added: Vec<Run>,
    /// Pages that have left the cache or are in use again since the last event.
    #[schema(value_type = Vec<Vec<u32>>)]
    cached_removed: Vec<Run>,
    /// Images; absent if the model reads none.
    #[serde(skip_serializing_if = "Option::is_none")]
    images: Option<ImagesTick>,
    /// Kernel launches by name, about once per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    kernels: Option<Vec<KernelTick>>,
}

made_from! {
    /// Counters since the engine's start, and its current state.
    #[derive(Debug, Serialize, ToSchema)]
    struct StatsTick from stats: &Stats {
        pages: usize = stats.pages_total,
        pages_used: usize = stats.pages_used,
        pages_cached: usize = stats.pages_cached,
        waiting: usize = stats.waiting,
        running: usize = stats.running,
        steps: u64 = stats.steps,
        step_seconds: f64 = stats.step_times.total_nanoseconds as f64 / 1e9,
        rows: u64 = stats.rows,
        tokens: u64 = stats.tokens,
        prefix_query_tokens: u64 = stats.prefix_query_tokens,
        prefix_hit_tokens: u64 = stats.prefix_hit_tokens,
        /// Memory of the host; absent if the model has no cache there.
        #[serde(skip_serializing_if = "Option::is_none")]
        host: Option<TierTick> = stats.host.exists.then(|| TierTick {
            hit_tokens: stats.host.hit_tokens,
            loads: stats.host.loads,
            loads_declined: stats.host.declined,
            stored: stats.host.stored,
            bytes: stats.host.bytes,
            loaded_bytes: stats.host.loaded_bytes,
            saved_seconds: stats.host.saved_nanoseconds as f64 / 1e9,
        }),
        /// The disk; absent if the model has no cache there.
        #[serde(skip_serializing_if = "Option::is_none")]
        disk: Option<TierTick> = stats.disk.exists.then(|| TierTick {
            hit_tokens: stats.disk.hit_tokens,
            loads: stats.disk.loads,
            loads_declined: stats.disk.declined,
            stored: stats.disk.saved,
            bytes: stats.disk.pending_bytes,
            loaded_bytes: stats.disk.loaded_bytes,
            saved_seconds: stats.disk.saved_nanoseconds as f64 / 1e9,
        }),
        evictions: u64 = stats.evictions,
        preemptions: u64 = stats.preemptions,
        /// Drafted tokens that were checked.
        draft_tokens: u64 = stats.draft_tokens,
        /// Drafted tokens that were accepted.
        accepted_tokens: u64 = stats.accepted_tokens,
        /// Estimated seconds that drafts saved, less those of rejected ones.
        draft_saved_seconds: f64 = stats.draft_nanoseconds as f64 / 1e9,
        page_copies: u64 = stats.page_copies,
        /// Rows of the last step.
        last_rows: usize = stats.last_rows,
        /// Sequences of the last step.
        last_sequences: usize = stats.last_sequences,
    }
}

/// Images of requests, and the cache of encoded ones.
#[derive(Debug, Serialize, ToSchema)]
struct ImagesTick {
    /// Images that sequences wait for.
    waiting: usize,
    /// True if another one is being encoded.
    encoding: bool,
    /// Images that were encoded.
    encoded: u64,
    /// Seconds of encoding.
    encoder_seconds: f64,
    /// Images whose rows were found in the cache.
    cache_hits: u64,
    /// Images in the cache.
    cached: usize,
    /// Their rows.
    cached_rows: usize,
    /// Bytes of their rows.
    cached_bytes: u64,
    /// Bytes that the cache may have.
    cache_limit: u64,
}

/// A tier of the cache behind the device's pages.
#[derive(Debug, Serialize, ToSchema)]
struct TierTick {
    /// Tokens that came from it.
    hit_tokens: u64,
    loads: u64,
    loads_declined: u64,
    /// Blocks and checkpoints that were passed to it.
    stored: u64,
    /// Bytes in memory of the host, or bytes that wait for the disk.
    bytes: u64,
    /// Bytes that were loaded.
    loaded_bytes: u64,
    /// Estimated seconds of computing that loads saved.
    saved_seconds: f64,
}

/// A sequence.
#[derive(Debug, Serialize, ToSchema)]
struct SequenceTick {
    /// Request and branch: `12.0`.
    id: String,
    /// Number of branches that share it.
    branches: usize,
    /// `running`, `waiting` or `preempted`.
    state: &'static str,
    priority: i32,
    prompt: usize,
    /// Prompt tokens found in the prefix cache.
    cached: usize,
    /// Tokens whose K and V are in pages.
    computed: usize,
    generated: usize,
    /// Maximum tokens of the answer.
    limit: usize,
    /// Rows in the last step.
    rows: usize,
    /// Its pages in order; absent if unchanged since the last event.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Vec<u32>>>)]
    pages: Option<Vec<Run>>,
}

/// A kernel.
#[derive(Debug, Serialize, ToSchema)]
struct KernelTick {
    name: String,
    launches: u64,
    /// Time in the kernel; 0 if the device does not measure it.
    nanoseconds: u64,
}

/// State that a reader has received.
#[derive(Debug, Default)]
pub struct Known {
    models: HashMap<String, KnownModel>,
}

#[derive(Debug, Default)]
struct KnownModel {
    cached: Vec<Run>,
    tables: HashMap<String, Vec<Run>>,
}

impl Known {
    /// Returns the event with the differences between the reader's state and this sample.
    pub fn advance<'s>(&mut self, sample: &'s Sample) -> Tick<'s> {
        self.models.retain(|name, _| sample.models.iter().any(|model| model.name == *name));
        let models = sample.models.iter();
        Tick {
            time: sample.time,
            memory: sample.memory,
            first_token: sample.first_token,
            token_gap: sample.token_gap,
            models: models
                .map(|model| self.models.entry(model.name.clone()).or_default().advance(model))
                .collect(),
        }
    }
}

impl KnownModel {
    fn advance<'s>(&mut self, model: &'s ModelSample) -> ModelTick<'s> {
        let snapshot = &model.snapshot;
        let cached = runs(&snapshot.cached);
        let (cached_added, cached_removed) = (minus(&cached, &self.cached), minus(&self.cached, &cached));
        self.cached = cached;
        let mut tables = HashMap::new();
        let sequences = snapshot.sequences.iter().map(|sequence| {
            let id = format!("{}.{}", sequence.request, sequence.branch);
            let pages = runs(&sequence.pages);
            let is_known = self.tables.get(&id) == Some(&pages);
            tables.insert(id.clone(), pages.clone());
            SequenceTick::new(id, sequence, (!is_known).then_some(pages))
        });
        let sequences = sequences.collect();
        self.tables = tables;
        let kernels = snapshot.kernels.as_ref().map(|kernels| {
            let kernel = |kernel: &paguro_engine::KernelCount| KernelTick {
                name: kernel.name.clone(),
                launches: kernel.launches,
                nanoseconds: kernel.nanoseconds,
            };
            kernels.iter().map(kernel).collect()
        });
        let images = snapshot.pictures.map(|pictures| ImagesTick::new(&pictures, &snapshot.stats));
        ModelTick {
            name: &model.name,
            device: &model.device,
            bytes: model.bytes,
            context: model.context,
            block_size: snapshot.block_size,
            max_rows: snapshot.max_rows,
            max_sequences: snapshot.max_sequences,
            stats: StatsTick::from(&snapshot.stats),
            sequences,
            cached_added,
            cached_removed,
            images,
            kernels,
        }
    }
}

impl ImagesTick {
    fn new(pictures: &PicturesSnapshot, stats: &Stats) -> Self {
        let PicturesSnapshot { waiting, is_encoding, kept, kept_rows, kept_bytes, most_bytes } = *pictures;
        Self {
            waiting,
            encoding: is_encoding,
            encoded: stats.encoded_pictures,
            encoder_seconds: stats.encoder_nanoseconds as f64 / 1e9,
            cache_hits: stats.encoder_cache_hits,
            cached: kept,
            cached_rows: kept_rows,
            cached_bytes: kept_bytes,
            cache_limit: most_bytes,
        }
    }
}

impl SequenceTick {
    fn new(id: String, sequence: &SequenceSnapshot, pages: Option<Vec<Run>>) -> Self {
        let state = match (sequence.running, sequence.preempted) {
            (true, _) => "running",
            (false, true) => "preempted",
            (false, false) => "waiting",
        };
        Self {
            id,
            branches: sequence.branches,
            state,
            priority: sequence.priority,
            prompt: sequence.prompt_tokens,
            cached: sequence.cached_tokens,
            computed: sequence.computed,
            generated: sequence.generated,
            limit: sequence.max_tokens,
            rows: sequence.rows,
            pages,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(sequences: Vec<(u64, Vec<u32>)>, cached: Vec<u32>) -> Sample {
        let sequence = |(request, pages)| SequenceSnapshot {
            request,
            branch: 0,
            branches: 1,
            running: true,
            preempted: false,
            priority: 0,
            prompt_tokens: 64,
            cached_tokens: 0,
            computed: 10,
            generated: 1,
            max_tokens: 9,
            rows: 1,
            pages,
        };
        let snapshot = Snapshot {
            stats: Default::default(),
            max_rows: 512,
            max_sequences: 64,
            block_size: 32,
            sequences: sequences.into_iter().map(sequence).collect(),
            cached,
            pictures: None,
            kernels: None,
        };
        let model = ModelSample { name: "m".into(), device: "cpu".into(), bytes: 1, context: 100, snapshot };
        Sample {
            time: 0,
            memory: None,
            first_token: Latency::default(),
            token_gap: Latency::default(),
            models: vec![model],
        }
    }

    #[test]
    fn only_models_that_see_have_images() {
        let mut sample = sample(vec![], vec![]);
        let images = |sample: &Sample| {
            serde_json::to_value(Known::default().advance(sample)).unwrap()["models"][0]
                .get("images")
                .cloned()
        };
        assert_eq!(images(&sample), None);
        let snapshot = &mut sample.models[0].snapshot;
        snapshot.pictures = Some(PicturesSnapshot {
            waiting: 2,
            is_encoding: true,
            kept: 3,
            kept_rows: 768,
            kept_bytes: 3 << 20,
            most_bytes: 1 << 28,
        });
        (snapshot.stats.encoded_pictures, snapshot.stats.encoder_nanoseconds) = (5, 1_500_000_000);
        let expected = serde_json::json!({
            "waiting": 2, "encoding": true, "encoded": 5, "encoder_seconds": 1.5, "cache_hits": 0, "cached": 3,
            "cached_rows": 768, "cached_bytes": 3 << 20, "cache_limit": 1 << 28,
        });
        assert_eq!(images(&sample), Some(expected));
    }

    #[test]
    fn only_changes_are_sent() {
        let mut known = Known::default();
        let mut pages = |sample: &Sample| {
            let tick = serde_json::to_value(known.advance(sample)).unwrap();
            let model = &tick["models"][0];
            let sequences = model["sequences"].as_array().unwrap();
            let tables: Vec<_> = sequences.iter().map(|s| s.get("pages").map(ToString::to_string)).collect();
            (tables, model["cached_added"].to_string(), model["cached_removed"].to_string())
        };
        let some = |text: &str| Some(text.to_owned());
        let first = sample(vec![(1, vec![1, 2, 3]), (2, vec![1, 2, 9])], vec![20, 21]);
        let expected = (vec![some("[[1,3]]"), some("[[1,2],[9,1]]")], "[[20,2]]".into(), "[]".into());
        assert_eq!(pages(&first), expected);
        assert_eq!(pages(&first), (vec![None, None], "[]".into(), "[]".into()));
        let next = sample(vec![(2, vec![1, 2, 9, 20])], vec![3, 21]);
        let expected = (vec![some("[[1,2],[9,1],[20,1]]")], "[[3,1]]".into(), "[[20,1]]".into());
        assert_eq!(pages(&next), expected);
    }
}
