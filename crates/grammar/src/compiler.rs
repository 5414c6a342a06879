//! Threads that compile grammars.
//!
//! The compiler recurses and cannot be stopped. So each grammar is compiled on a thread of its own with a large stack. A
//! caller that no longer waits abandons the thread, whose priority is then low. There are few abandoned threads: further
//! grammars are refused until one has ended.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    COMPILER_STACK,
    clock::{ABANDONED, Priority},
};

/// Longest time to compile the grammars of a request. Nearly all take milliseconds.
pub const COMPILE_TIME: Duration = Duration::from_secs(3);

/// Most abandoned threads beside which a large grammar is compiled.
const MAX_ABANDONED: usize = 2;

/// Most abandoned threads beside which any grammar is compiled.
const MAX_ALL_ABANDONED: usize = 6;

/// Most bytes of a grammar that is not large.
const SMALL: usize = 2 << 10;

/// Stacks of a thread, in bytes: the second one where the system does not reserve the first. Only used pages need memory.
///
/// The bounds of structure keep the compiler below the second one. The first one holds for any grammar of
/// [`MAX_TEXT`](super::bounds::MAX_TEXT), however it recurses: the compiler uses at most 1.3 KiB of stack for each byte,
/// in brackets within brackets. Tests have a third of it.
const STACKS: [usize; 2] = [(1 << 30) / if cfg!(test) { 3 } else { 1 }, COMPILER_STACK];

/// Interval at which a caller checks whether the result is still wanted.
const POLL: Duration = Duration::from_millis(20);

/// Reason for which there is no result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoResult {
    /// The time was over before.
    NoTime,
    /// The time is over; the thread continues.
    TooSlow,
    /// The caller does not want the result; the thread continues.
    NotWanted,
    /// There are too many abandoned threads.
    Busy,
    /// The thread has panicked or could not be started.
    Failed(String),
}

/// The threads of one model.
#[derive(Clone, Debug, Default)]
pub(super) struct Compilers {
    abandoned: Arc<Mutex<usize>>,
}

impl Compilers {
    /// Runs `work`, for a grammar of `bytes`, on a thread of its own, and waits for it until a time, while `is_wanted`
    /// returns true.
    pub fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        if until <= Instant::now() {
            return Err(NoResult::NoTime);
        }
        let most = if bytes > SMALL { MAX_ABANDONED } else { MAX_ALL_ABANDONED };
        if *lock(&self.abandoned) >= most {
            return Err(NoResult::Busy);
        }
        let job = Arc::new(Job { abandoned: self.abandoned.clone(), state: Mutex::default() });
        let (sender, results) = mpsc::channel();
        let thread_job = End(job.clone());
        let work = move || {
            thread_job.0.begin();
            let result = work();
            // The caller may have gone.
            let _ = sender.send(result);
            drop(thread_job);
        };
        spawn(work).map_err(NoResult::Failed)?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match results.recv_timeout(left.min(POLL)) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(NoResult::Failed("the compiler has panicked".into()));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if !is_wanted() {
                job.abandon();
                return Err(NoResult::NotWanted);
            }
            if left.is_zero() {
                job.abandon();
                return Err(NoResult::TooSlow);
            }
        }
    }

    #[cfg(test)]
    pub fn abandoned(&self) -> usize {
        *lock(&self.abandoned)
    }
}

/// Starts a thread with the largest stack that the system reserves.
fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    // A thread that is not started drops its work.
    let work = Arc::new(Mutex::new(Some(work)));
    let mut problem = String::new();
    for stack in STACKS {
        let work = work.clone();
        let thread = thread::Builder::new().name("paguro-grammar".into()).stack_size(stack);
        let run = move || {
            let work = lock(&work).take();
            if let Some(work) = work {
                work();
            }
        };
        match thread.spawn(run) {
            Ok(_) => return Ok(()),
            Err(error) => problem = error.to_string(),
        }
    }
    Err(problem)
}

/// A thread's work.
struct Job {
    /// Number of abandoned jobs that run.
    abandoned: Arc<Mutex<usize>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_abandoned: bool,
    has_ended: bool,
    /// Priority of the thread, once it runs.
    priority: Option<Priority>,
}

impl Job {
    fn begin(&self) {
        lock(&self.state).priority = Some(Priority::of_this_thread());
    }

    /// Counts the job as abandoned until it ends, and lowers its priority.
    fn abandon(&self) {
        let mut state = lock(&self.state);
        if state.has_ended {
            return;
        }
        state.is_abandoned = true;
        *lock(&self.abandoned) += 1;
        if let Some(priority) = state.priority {
            priority.lower(ABANDONED);
        }
    }
}

/// Marks a job as ended, also if it panics.
struct End(Arc<Job>);

impl Drop for End {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.has_ended = true;
        if state.is_abandoned {
            *lock(&self.0.abandoned) -= 1;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_compile_is_abandoned_and_counted_until_it_ends() {
        let compilers = Compilers::default();
        let later = || Instant::now() + Duration::from_secs(60);
        let (release, blocked) = mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let stuck = |until, is_wanted: &dyn Fn() -> bool| {
            let blocked = blocked.clone();
            compilers.run(1, until, is_wanted, move || lock(&blocked).recv().is_ok())
        };
        assert_eq!(compilers.run(1, later(), &|| true, || 7), Ok(7));
        assert_eq!(stuck(Instant::now() + Duration::from_millis(1), &|| true), Err(NoResult::TooSlow));
        assert_eq!(stuck(later(), &|| false), Err(NoResult::NotWanted));
        assert_eq!(compilers.run(1, Instant::now(), &|| true, || 7), Err(NoResult::NoTime));
        assert_eq!(compilers.abandoned(), 2);
        // Small grammars are still compiled, and more of them may be abandoned.
        assert_eq!(compilers.run(SMALL + 1, later(), &|| true, || 7), Err(NoResult::Busy));
        assert_eq!(compilers.run(SMALL, later(), &|| true, || 7), Ok(7));
        for _ in 2..MAX_ALL_ABANDONED {
            assert_eq!(stuck(later(), &|| false), Err(NoResult::NotWanted));
        }
        assert_eq!(stuck(later(), &|| true), Err(NoResult::Busy));
        for _ in 0..MAX_ALL_ABANDONED {
            release.send(()).unwrap();
        }
        let deadline = later();
        while compilers.abandoned() > 0 {
            assert!(Instant::now() < deadline, "{} are still counted", compilers.abandoned());
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(compilers.run(SMALL + 1, later(), &|| true, || 7), Ok(7));
        let panics = compilers.run(1, later(), &|| true, || panic!("on purpose"));
        assert_eq!(panics, Err::<(), _>(NoResult::Failed("the compiler has panicked".into())));
    }
}
