//! Steps that pause in the midst of their computation, so that a long one runs beside short ones.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use crate::Runner;

/// A runner of a tower, and the control of its steps from another thread.
pub struct PacedRunner {
    /// The runner. A step may take seconds.
    pub runner: Box<dyn Runner>,
    /// Pauses its steps.
    pub pace: Arc<Pace>,
}

impl fmt::Debug for PacedRunner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PacedRunner({:?})", self.pace)
    }
}

/// Control of a runner's steps from other threads. The runner asks before each piece of work, of some milliseconds at most. Bits do
/// not depend on pauses.
#[derive(Debug, Default)]
pub struct Pace {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_paused: bool,
    is_abandoned: bool,
    /// Pieces of work that are computed now.
    working: usize,
}

/// A piece of work that is computed; it ends when this is dropped.
#[derive(Debug)]
pub struct Piece<'a>(&'a Pace);

impl Pace {
    /// Pauses, and returns once nothing is computed.
    pub fn pause(&self) {
        let mut state = self.lock();
        state.is_paused = true;
        while state.working > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Goes on.
    pub fn resume(&self) {
        self.lock().is_paused = false;
        self.changed.notify_all();
    }

    /// Drops the rest of the running step, which fails, and of later ones until a [reset](Pace::reset). It ends soon, also if it is
    /// paused.
    pub fn abandon(&self) {
        self.lock().is_abandoned = true;
        self.changed.notify_all();
    }

    /// Computes steps again.
    pub fn reset(&self) {
        self.lock().is_abandoned = false;
    }

    /// Returns true if results of the running step are not complete.
    pub fn is_abandoned(&self) -> bool {
        self.lock().is_abandoned
    }

    /// Begins a piece of work, after a pause. `None` if it is not to be computed.
    pub fn piece(&self) -> Option<Piece<'_>> {
        let mut state = self.lock();
        while state.is_paused && !state.is_abandoned {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_abandoned {
            return None;
        }
        state.working += 1;
        Some(Piece(self))
    }

    /// Begins a piece of work, unless that had to wait. A thread that computes another piece must not wait, because a pause waits for it.
    pub fn piece_now(&self) -> Option<Piece<'_>> {
        let mut state = self.lock();
        let may_begin = !state.is_paused && !state.is_abandoned;
        may_begin.then(|| {
            state.working += 1;
            Piece(self)
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Piece<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.working -= 1;
        if state.working == 0 {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_computed_during_a_pause() {
        let pace = Arc::new(Pace::default());
        let first = pace.piece();
        assert!(first.is_some());
        assert_eq!(pace.piece_now().iter().count(), 1, "a second one");
        let pausing = Arc::clone(&pace);
        let paused = std::thread::spawn(move || pausing.pause());
        drop(first);
        paused.join().expect("it pauses");
        assert!(pace.piece_now().is_none());
        let waiting = Arc::clone(&pace);
        let next = std::thread::spawn(move || waiting.piece().is_some());
        pace.resume();
        assert!(next.join().expect("it goes on"));
        pace.pause();
        let waiting = Arc::clone(&pace);
        let dropped = std::thread::spawn(move || waiting.piece().is_none());
        pace.abandon();
        assert!(dropped.join().expect("it is abandoned"));
        pace.reset();
        pace.resume();
        assert!(pace.piece().is_some());
    }
}
