//! Stopping a pull or an import from another thread.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::error::LibraryError;

/// A cancellation flag; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    stopped: Arc<AtomicBool>,
    /// A flag of the surrounding operation, which stops it as well.
    parent: Option<Arc<AtomicBool>>,
}

impl Cancel {
    /// Stops it, soon.
    pub fn cancel(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Returns true after a cancellation.
    pub fn is_cancelled(&self) -> bool {
        let stopped = |flag: &Arc<AtomicBool>| flag.load(Ordering::Relaxed);
        stopped(&self.stopped) || self.parent.as_ref().is_some_and(stopped)
    }

    /// Stops with this one, and can be stopped by itself.
    pub(crate) fn child(&self) -> Self {
        Self { stopped: Arc::default(), parent: Some(self.stopped.clone()) }
    }

    pub(crate) fn check(&self) -> Result<(), LibraryError> {
        if self.is_cancelled() { Err(LibraryError::Cancelled) } else { Ok(()) }
    }

    /// Sleeps, but not past a cancellation.
    pub(crate) fn sleep(&self, time: Duration) -> Result<(), LibraryError> {
        const PAUSE: Duration = Duration::from_millis(50);
        let end = Instant::now() + time;
        loop {
            self.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(PAUSE));
        }
    }
}
