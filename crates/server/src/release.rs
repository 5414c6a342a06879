//! Deferred release of freed memory to the system.

use std::{
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Time after the last request at which its memory is released. Threads of requests end after ten idle seconds, and
/// free the memory that each keeps.
const QUIET: Duration = Duration::from_secs(11);

/// A pending release of freed memory.
#[derive(Debug)]
pub struct MemoryRelease {
    pending: Mutex<Pending>,
    /// Releases freed memory to the system. It scans the whole heap.
    release: fn(),
}

#[derive(Debug, Default)]
struct Pending {
    /// A release is scheduled for the next check.
    soon: bool,
    /// Time of the last request since the last release.
    used: Option<Instant>,
}

impl MemoryRelease {
    /// Creates the state without a pending release.
    pub fn new(release: fn()) -> Self {
        Self { pending: Mutex::default(), release }
    }

    /// Schedules a release, once for all that is freed meanwhile.
    pub fn soon(&self) {
        self.pending().soon = true;
    }

    /// Schedules a release for the time after the last request.
    pub fn when_quiet(&self, now: Instant) {
        self.pending().used = Some(now);
    }

    /// Returns the function to call if a release is due, and clears it.
    pub fn due(&self, now: Instant) -> Option<fn()> {
        let mut pending = self.pending();
        let quiet = pending.used.take_if(|used| now.saturating_duration_since(*used) >= QUIET);
        (mem::take(&mut pending.soon) || quiet.is_some()).then_some(self.release)
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_due_once_and_after_the_last_request() {
        let release = MemoryRelease::new(|| {});
        let start = Instant::now();
        assert!(release.due(start).is_none());
        release.soon();
        release.soon();
        assert!(release.due(start).is_some() && release.due(start).is_none());
        release.when_quiet(start);
        release.when_quiet(start + QUIET / 2);
        assert!(release.due(start + QUIET).is_none());
        assert!(release.due(start + QUIET * 2).is_some() && release.due(start + QUIET * 2).is_none());
    }
}
