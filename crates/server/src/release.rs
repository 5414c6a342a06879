//! Memory that is given back to the system after something large has gone.

use std::sync::atomic::{AtomicBool, Ordering};

/// Remembers that there is memory to give back.
#[derive(Debug)]
pub struct MemoryRelease {
    wanted: AtomicBool,
    /// Gives memory back that the process has and nobody uses. Walks through all of the heap.
    release: fn(),
}

impl MemoryRelease {
    /// Nothing is to be given back yet.
    pub fn new(release: fn()) -> Self {
        Self { wanted: AtomicBool::new(false), release }
    }

    /// Something large has gone: memory is given back soon, once for all that goes meanwhile.
    pub fn later(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// Returns the function that gives memory back, if something large has gone since the last call.
    pub fn due(&self) -> Option<fn()> {
        self.wanted.swap(false, Ordering::Relaxed).then_some(self.release)
    }
}
