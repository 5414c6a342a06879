//! `/ui/v1/live`: a stream with the state of the engines. One task takes samples for all readers while there are any.
//! It queries the engines between two steps, at most once per [`PERIOD`].

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{extract::State, response::Response};
use futures_util::future::join_all;
use paguro_engine::Handle;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval, timeout},
};

use super::sample::{Known, ModelSample, Sample};
use crate::{AppState, error::ApiError, metrics, models::ResidentInfo, stream};

/// Time between two samples.
const PERIOD: Duration = Duration::from_millis(200);
/// Time after which a sample omits an engine in a long step.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of readers: each one has its own differences of every sample.
const MAX_READERS: usize = 32;
/// Number of samples for each one with kernel statistics.
const KERNELS_EVERY: u64 = 5;

/// Samples of the engines, for all readers.
#[derive(Debug)]
pub struct Live {
    samples: watch::Sender<Latest>,
    /// True while the task runs.
    sampling: Mutex<bool>,
    started: Instant,
    count: AtomicU64,
}

#[derive(Clone, Debug, Default)]
struct Latest {
    sample: Option<Arc<Sample>>,
    /// True while the server stops.
    ended: bool,
}

impl Default for Live {
    fn default() -> Self {
        Self {
            samples: watch::Sender::default(),
            sampling: Mutex::new(false),
            started: Instant::now(),
            count: AtomicU64::new(0),
        }
    }
}

impl Live {
    /// Ends all streams, so that they do not delay the shutdown.
    pub fn end(&self) {
        self.samples.send_modify(|latest| latest.ended = true);
    }

    /// Subscribes to samples. Starts the task if necessary.
    ///
    /// # Errors
    /// There are too many readers.
    fn subscribe(&self, state: &AppState) -> Result<watch::Receiver<Latest>, ApiError> {
        let mut sampling = self.sampling.lock().unwrap_or_else(PoisonError::into_inner);
        if self.samples.receiver_count() >= MAX_READERS {
            let message =
                format!("{MAX_READERS} clients read this stream, which is the most; try again later");
            return Err(ApiError::QueueFull(message));
        }
        let receiver = self.samples.subscribe();
        if !*sampling {
            *sampling = true;
            state.metrics.recent.watch(true);
            tokio::spawn(sample(state.clone()));
        }
        Ok(receiver)
    }

    /// Ends the task if there are no readers.
    fn may_stop(&self, state: &AppState) -> bool {
        let mut sampling = self.sampling.lock().unwrap_or_else(PoisonError::into_inner);
        if self.samples.receiver_count() > 0 && !self.samples.borrow().ended {
            return false;
        }
        *sampling = false;
        state.metrics.recent.watch(false);
        // The next reader must not start with an old sample.
        self.samples.send_modify(|latest| latest.sample = None);
        true
    }
}

async fn sample(state: AppState) {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if state.live.may_stop(&state) {
            return;
        }
        let sample = Arc::new(take(&state).await);
        state.live.samples.send_modify(|latest| latest.sample = Some(sample));
    }
}

/// Takes a sample of all engines.
async fn take(state: &AppState) -> Sample {
    let with_kernels = state.live.count.fetch_add(1, Ordering::Relaxed).is_multiple_of(KERNELS_EVERY);
    // Only the handles are kept, so that the memory of a model that is unloaded meanwhile is freed.
    let models: Vec<_> = state
        .models
        .resident()
        .into_iter()
        .flat_map(|ResidentInfo { entry, device, bytes, handle, .. }| {
            let engines = handle.engines();
            let is_one = engines.len() == 1;
            let of = |engine: Handle| match is_one {
                true => (entry.name.clone(), device.clone(), bytes, engine),
                false => (
                    format!("{} ({})", entry.name, engine.number()),
                    engine.device().to_owned(),
                    bytes,
                    engine,
                ),
            };
            engines.map(of).collect::<Vec<_>>()
        })
        .collect();
    let models = models.into_iter().map(async |(name, device, bytes, handle)| {
        let snapshot = timeout(PATIENCE, handle.snapshot(with_kernels)).await.ok()?.ok()?;
        Some(ModelSample { name, device, bytes, context: handle.max_context(), snapshot })
    });
    let models = join_all(models).await.into_iter().flatten().collect();
    let (first_token, token_gap) = state.metrics.recent.latencies();
    Sample {
        time: u64::try_from(state.live.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        memory: metrics::resident_bytes(),
        first_token,
        token_gap,
        models,
    }
}

/// Streams the state of the engines as events `tick`, about five per second. The first one is complete; each further
/// one has the changes.
///
/// # Errors
/// There are too many readers.
#[utoipa::path(
    get, path = "/ui/v1/live", tag = "Page",
    responses((status = 200, content((super::sample::Tick<'static> = "text/event-stream")))),
)]
pub async fn live(State(state): State<AppState>) -> Result<Response, ApiError> {
    let mut samples = state.live.subscribe(&state)?;
    Ok(stream::events(stream::comments(), move |writer| async move {
        let mut known = Known::default();
        loop {
            let latest = samples.borrow_and_update().clone();
            if latest.ended {
                return;
            }
            if let Some(sample) = latest.sample {
                writer.event("tick", &known.advance(&sample)).await;
            }
            if samples.changed().await.is_err() {
                return;
            }
        }
    }))
}
