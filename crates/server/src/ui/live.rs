//! `/ui/v1/live`: what the engines are doing, as a stream. One task samples for all readers, and only while there are
//! readers. It asks the engines between two steps, never more often than [`PERIOD`].

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{extract::State, response::Response};
use futures_util::future::join_all;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval, timeout},
};

use super::sample::{Known, ModelSample, Sample};
use crate::{AppState, metrics, stream};

/// Time between two samples.
const PERIOD: Duration = Duration::from_millis(200);
/// An engine in a long step is left out of a sample after this.
const PATIENCE: Duration = Duration::from_secs(2);
/// Kernel statistics come with every one of this many samples.
const KERNELS_EVERY: u64 = 5;

/// The samples, for whoever reads them.
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
    /// The server is stopping.
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
    /// Ends all streams, so that they do not hold up a server that stops.
    pub fn end(&self) {
        self.samples.send_modify(|latest| latest.ended = true);
    }

    /// Samples from now on. Starts the task if there is none.
    fn subscribe(&self, state: &AppState) -> watch::Receiver<Latest> {
        let mut sampling = self.sampling.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = self.samples.subscribe();
        if !*sampling {
            *sampling = true;
            state.metrics.recent.watch(true);
            tokio::spawn(sample(state.clone()));
        }
        receiver
    }

    /// Ends the task if nobody reads.
    fn may_stop(&self, state: &AppState) -> bool {
        let mut sampling = self.sampling.lock().unwrap_or_else(PoisonError::into_inner);
        if self.samples.receiver_count() > 0 && !self.samples.borrow().ended {
            return false;
        }
        *sampling = false;
        state.metrics.recent.watch(false);
        // The next reader must not begin with an old picture.
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

/// Asks all engines.
async fn take(state: &AppState) -> Sample {
    let with_kernels = state.live.count.fetch_add(1, Ordering::Relaxed).is_multiple_of(KERNELS_EVERY);
    // Of the models only the ways to ask them are kept: one may be unloaded meanwhile, and its memory is to be free then.
    let models: Vec<_> = state
        .models
        .resident()
        .into_iter()
        .map(|resident| (resident.entry.name, resident.device, resident.memory.total(), resident.handle))
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

/// Streams what the engines are doing: an event `tick` about five times a second. The first one has everything, the
/// others what has changed since.
#[utoipa::path(
    get, path = "/ui/v1/live", tag = "Page",
    responses((status = 200, content((super::sample::Tick<'static> = "text/event-stream")))),
)]
pub async fn live(State(state): State<AppState>) -> Response {
    let mut samples = state.live.subscribe(&state);
    stream::events(stream::comments(), move |writer| async move {
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
    })
}
