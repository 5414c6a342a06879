//! Ctrl-C: the first one stops the current operation; the second, or one without an operation, ends the program.

use std::{
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::failure::{Failure, Outcome};

/// The status that shells report for a program ended by Ctrl-C: 128 + SIGINT.
const STATUS: i32 = 130;

type Stop = Box<dyn FnOnce() + Send>;

/// Holder of the function that stops the current operation.
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

    /// Registers `stop` for the first Ctrl-C while the guard lives.
    #[must_use]
    pub fn on_press(&self, stop: impl FnOnce() + Send + 'static) -> Armed {
        *self.lock() = Some(Box::new(stop));
        Armed(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Stop>> {
        // Every update leaves a valid `Option`, so a poisoned lock is usable.
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
