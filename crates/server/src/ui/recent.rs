//! Latencies of the last seconds, for the charts of the page. They are recorded only while a page is open.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde::Serialize;
use utoipa::ToSchema;

/// Period of first tokens. It is longer because they are rare.
const FIRST_TOKENS: Duration = Duration::from_secs(60);
const GAPS: Duration = Duration::from_secs(10);
/// Maximum number of values. More do not improve percentiles.
const MOST: usize = 4096;

/// Latencies of the last seconds.
#[derive(Debug, Default)]
pub struct Recent {
    watched: AtomicBool,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    first_tokens: VecDeque<(Instant, f32)>,
    gaps: VecDeque<(Instant, f32)>,
}

/// Distribution of a latency. The percentiles are absent without values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Latency {
    /// Number of values.
    count: usize,
    /// Median, in seconds.
    p50: Option<f32>,
    /// 95th percentile, in seconds.
    p95: Option<f32>,
}

impl Recent {
    /// Starts or stops recording.
    pub fn watch(&self, watched: bool) {
        if !watched {
            *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Seen::default();
        }
        self.watched.store(watched, Ordering::Relaxed);
    }

    /// Records the time from a request to its first token.
    pub fn first_token(&self, after: Duration) {
        self.record(after, |seen| &mut seen.first_tokens);
    }

    /// Records the time between two tokens.
    pub fn token_gap(&self, gap: Duration) {
        self.record(gap, |seen| &mut seen.gaps);
    }

    fn record(&self, value: Duration, list: impl FnOnce(&mut Seen) -> &mut VecDeque<(Instant, f32)>) {
        if !self.watched.load(Ordering::Relaxed) {
            return;
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let list = list(&mut seen);
        if list.len() == MOST {
            list.pop_front();
        }
        list.push_back((Instant::now(), value.as_secs_f32()));
    }

    /// Returns the current distributions of times to the first token, and of gaps between tokens.
    pub fn latencies(&self) -> (Latency, Latency) {
        let now = Instant::now();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        (Latency::of(&mut seen.first_tokens, now, FIRST_TOKENS), Latency::of(&mut seen.gaps, now, GAPS))
    }
}

impl Latency {
    fn of(list: &mut VecDeque<(Instant, f32)>, now: Instant, window: Duration) -> Self {
        while list.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > window) {
            list.pop_front();
        }
        let mut values: Vec<f32> = list.iter().map(|(_, value)| *value).collect();
        values.sort_by(f32::total_cmp);
        let rank = |percent: usize| values.get((values.len() * percent).div_ceil(100).max(1) - 1).copied();
        Self { count: values.len(), p50: rank(50), p95: rank(95) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_recorded_while_watched() {
        let recent = Recent::default();
        recent.token_gap(Duration::from_secs(9));
        assert_eq!(recent.latencies().1, Latency::default());
        recent.watch(true);
        for milliseconds in (1..=100).rev() {
            recent.token_gap(Duration::from_millis(milliseconds));
        }
        let gaps = recent.latencies().1;
        assert_eq!(gaps, Latency { count: 100, p50: Some(0.05), p95: Some(0.095) });
        recent.watch(false);
        assert_eq!(recent.latencies().1.count, 0);
    }
}
