//! Ctrl-C: the first one stops what is going on, cleanly; with nothing to stop, or pressed again, it ends the program.

use std::{
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::failure::{Failure, Outcome};

/// The status that shells report for a program ended by Ctrl-C: 128 + SIGINT.
const STATUS: i32 = 130;

type Stop = Box<dyn FnOnce() + Send>;

/// Where the handler looks for what to stop.
#[derive(Clone, Default)]
pub struct Interrupt {
    stop: Arc<Mutex<Option<Stop>>>,
}

impl Interrupt {
    /// Installs the handler, once for the process.
    pub fn install() -> Outcome<Self> {
        let interrupt = Self::default();
        let handler = interrupt.clone();
        // `ctrlc` runs this on a thread of its own, so it may lock and exit, which a signal handler may not.
        ctrlc::set_handler(move || {
            let stop = handler.lock().take();
            match stop {
                Some(stop) => stop(),
                None => process::exit(STATUS),
            }
        })
        .map_err(|error| Failure::new(format!("cannot watch for Ctrl-C: {error}")))?;
        Ok(interrupt)
    }

    /// While the guard lives, Ctrl-C calls `stop` the first time.
    #[must_use]
    pub fn on_press(&self, stop: impl FnOnce() + Send + 'static) -> Armed {
        *self.lock() = Some(Box::new(stop));
        Armed(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Stop>> {
        // The value is a whole `Option` at any moment, also after a panic elsewhere.
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Interrupt::on_press`].
pub struct Armed(Interrupt);

impl Drop for Armed {
    fn drop(&mut self) {
        self.0.lock().take();
    }
}
