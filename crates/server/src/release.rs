//! Deferred release of freed memory to the system.

use std::sync::atomic::{AtomicBool, Ordering};

/// A pending release of freed memory.
#[derive(Debug)]
pub struct MemoryRelease {
    wanted: AtomicBool,
    /// Releases freed memory to the system. It scans the whole heap.
    release: fn(),
}

impl MemoryRelease {
    /// Creates the state without a pending release.
    pub fn new(release: fn()) -> Self {
        Self { wanted: AtomicBool::new(false), release }
    }

    /// Schedules a release, once for all that is freed meanwhile.
    pub fn later(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// Returns the function to call if a release is pending, and clears it.
    pub fn due(&self) -> Option<fn()> {
        self.wanted.swap(false, Ordering::Relaxed).then_some(self.release)
    }
}
