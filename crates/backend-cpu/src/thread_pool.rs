//! The thread pool: one leader (the calling thread) and the threads that it has started, for the lifetime of a runner.
//!
//! The leader runs the program. Every parallel loop is a *phase*: a number of items that all threads claim from one
//! counter. A phase ends when its items are done, not when every thread has arrived: a descheduled thread delays the
//! others only if it has claimed work, and a late one joins the current phase. A barrier of all threads would wait for
//! the slowest one in every phase.
//!
//! Threads without work spin for some microseconds, then yield, then sleep. So a phase starts at once after the
//! previous one, a busy machine is available to others, and an idle pool costs nothing.

#[cfg(all(test, loom))]
mod models;
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
use std::time::{Duration, Instant};
use std::{
    any::Any,
    io,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc as StdArc, PoisonError},
};

use paguro_backend::Pace;

use self::sync::{
    Arc, AtomicBool, AtomicUsize, Condvar, JoinHandle, Mutex, MutexGuard, Ordering, UnsafeCell, thread,
};

/// Time that a thread without work spins. Longer than a phase of a small model, so that the thread pool spins throughout a
/// step.
#[cfg(not(loom))]
const SPIN: Duration = Duration::from_micros(50);
/// Time that it then yields before it sleeps. Longer than an engine's time between steps.
#[cfg(not(loom))]
const YIELD: Duration = Duration::from_micros(250);

/// Division of a phase's items among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunking {
    /// Large chunks first, then ever smaller ones, in multiples of this number of items: few accesses of the counter,
    /// and all threads end together. For at most this number of items, the leader works alone.
    Guided(usize),
    /// One item at a time, for items that take long or different times.
    Single,
}

/// The threads.
#[derive(Debug)]
pub struct ThreadPool {
    shared: Arc<Shared>,
    started: Vec<JoinHandle<()>>,
    /// Pauses phases: threads ask before each portion of the items.
    pub pace: Option<StdArc<Pace>>,
}

/// Portions that each thread has of a phase that may pause, at least: they bound the time until the pause.
const PACED_PORTIONS: usize = 16;

/// The type of a phase's work: thread, items.
type Work = dyn Fn(usize, Range<usize>) + Sync;

/// State that threads share. `left` and `done` have separate cache lines because all threads write them.
#[derive(Debug)]
struct Shared {
    /// Items of the phase that are not claimed.
    left: Line<AtomicUsize>,
    /// Items that are done.
    done: Line<AtomicUsize>,
    /// Written by the leader while `left` is zero and all items are done, read by threads that have claimed an item.
    phase: UnsafeCell<Phase>,
    /// See [`Chunking`]. A thread may read the value of another phase, which only affects the size of its portion.
    smallest: AtomicUsize,
    fraction: AtomicUsize,
    /// Payload of the first panic in this phase.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Number of started threads that sleep on `work`, or are about to.
    sleepers: AtomicUsize,
    /// True if the leader sleeps on `finished`, or is about to.
    leader_sleeps: AtomicBool,
    lock: Mutex<()>,
    work: Condvar,
    finished: Condvar,
}

#[derive(Debug)]
#[repr(align(128))] // the neighbouring line is fetched along
struct Line<T>(T);

#[derive(Clone, Copy)]
struct Phase {
    work: *const Work,
    items: usize,
}

impl std::fmt::Debug for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} items", self.items)
    }
}

// SAFETY: `phase` is the only field that is not `Sync`, and its comment says who touches it when: a write of the
// leader happens before the `left` that opens the phase, which happens before a thread's `take`; a thread's reads
// happen before its addition to `done`, which the leader sees complete before it writes again.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `phase` is to something `Sync`, and not followed outside of a phase.
unsafe impl Send for Shared {}

impl ThreadPool {
    /// Creates a thread pool of `threads` threads, including the caller's.
    ///
    /// # Errors
    /// The system does not start that many threads.
    pub fn new(threads: usize) -> io::Result<Self> {
        let idle: &Work = &|_, _| {};
        let shared = Arc::new(Shared {
            left: Line(AtomicUsize::new(0)),
            done: Line(AtomicUsize::new(0)),
            phase: UnsafeCell::new(Phase { work: idle, items: 0 }),
            smallest: AtomicUsize::new(1),
            fraction: AtomicUsize::new(1),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            leader_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            work: Condvar::new(),
            finished: Condvar::new(),
        });
        let mut pool = Self { shared, started: Vec::new(), pace: None };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = thread::Builder::new().name(format!("paguro-cpu-{index}"));
            // On an error the pool is dropped, which ends the threads that there are.
            pool.started.push(thread.spawn(move || shared.serve(index))?);
        }
        Ok(pool)
    }

    /// Threads, the leader included.
    pub fn threads(&self) -> usize {
        self.started.len() + 1
    }

    /// Runs a phase: calls `work` with the number of a thread and some of the items, until all of `0..items` are done,
    /// each once.
    ///
    /// # Panics
    /// If `work` panics on any thread, after all threads have left the phase. Some items may then not be done.
    pub fn run(&mut self, items: usize, chunking: Chunking, work: impl Fn(usize, Range<usize>) + Sync) {
        let Some(pace) = self.pace.clone() else { return self.run_phase(items, chunking, work) };
        self.run_phase(items, chunking, |thread, items| {
            if let Some(_piece) = pace.piece() {
                work(thread, items);
            }
        });
    }

    fn run_phase(&mut self, items: usize, chunking: Chunking, work: impl Fn(usize, Range<usize>) + Sync) {
        let threads = self.threads();
        let is_paced = self.pace.is_some();
        let (smallest, fraction) = match chunking {
            Chunking::Guided(smallest) if is_paced => (smallest.max(1), PACED_PORTIONS * threads),
            Chunking::Guided(smallest) => (smallest.max(1), 2 * threads),
            Chunking::Single => (1, usize::MAX),
        };
        if items == 0 {
            return;
        }
        if threads == 1 && !is_paced || items <= smallest {
            return work(0, 0..items);
        }
        let shared = &*self.shared;
        let work: &(dyn Fn(usize, Range<usize>) + Sync + '_) = &work;
        // SAFETY: only the lifetime changes. The pointer is followed by threads that have taken items, and this call
        // does not end, not by a panic either, before all that was taken is done.
        let work: *const Work = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize, Range<usize>) + Sync + '_), *const Work>(work)
        };
        // SAFETY: the last phase is over, see `Shared::phase`; `&mut self` says that there is one leader.
        shared.phase.with_mut(|phase| unsafe { *phase = Phase { work, items } });
        shared.smallest.store(smallest, Ordering::Relaxed);
        shared.fraction.store(fraction, Ordering::Relaxed);
        shared.done.0.store(0, Ordering::Relaxed);
        shared.open(items);
        while let Some(taken) = shared.take() {
            shared.perform(0, taken);
        }
        shared.wait_until_done(items);
        let panic = lock(&shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Like [`ThreadPool::run`], with a separate value per thread, such as working memory.
    ///
    /// # Panics
    /// As [`ThreadPool::run`], and if there are fewer than [`ThreadPool::threads`] locals.
    pub fn run_with<T: Send>(
        &mut self,
        locals: &mut [T],
        items: usize,
        chunking: Chunking,
        work: impl Fn(&mut T, Range<usize>) + Sync,
    ) {
        assert!(locals.len() >= self.threads(), "{} locals for {} threads", locals.len(), self.threads());
        let locals = Locals(locals.as_mut_ptr());
        self.run(items, chunking, move |thread, items| {
            // SAFETY: there is a local for each thread, checked above, and the number is given to one thread, which
            // does one portion after the other.
            let local = unsafe { &mut *locals.of(thread) };
            work(local, items);
        });
    }
}

/// The locals of [`ThreadPool::run_with`].
struct Locals<T>(*mut T);

// SAFETY: each thread takes another `T`, which is `Send`.
unsafe impl<T: Send> Sync for Locals<T> {}

impl<T> Locals<T> {
    /// # Safety
    /// There are more locals than `thread`.
    unsafe fn of(&self, thread: usize) -> *mut T {
        // SAFETY: passed on to the caller.
        unsafe { self.0.add(thread) }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake_threads();
        for thread in self.started.drain(..) {
            // A thread catches the panics of its work, so this never fails.
            let _ = thread.join();
        }
    }
}

/// Items that a thread has claimed: `count` of `left` remaining ones.
#[derive(Clone, Copy)]
struct Taken {
    left: usize,
    count: usize,
}

impl Shared {
    /// Runs a started thread until the pool is dropped.
    fn serve(&self, index: usize) {
        let mut wait = Wait::default();
        loop {
            if let Some(taken) = self.take() {
                self.perform(index, taken);
                wait = Wait::default();
            } else if self.stop.load(Ordering::Acquire) {
                return;
            } else if !wait.a_moment() {
                self.sleep();
                wait = Wait::default();
            }
        }
    }

    /// Makes items available to threads.
    fn open(&self, items: usize) {
        // Ordered with the steps of `sleep`: either this thread sees the sleeper, or the sleeper sees the items.
        self.left.0.store(items, Ordering::SeqCst);
        sync::sequential();
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_threads();
        }
    }

    fn wake_threads(&self) {
        // A thread that was about to sleep does so before this lock is acquired, and is then woken.
        drop(lock(&self.lock));
        self.work.notify_all();
    }

    /// Sleeps until there are items, or the end.
    fn sleep(&self) {
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        sync::sequential();
        while self.left.0.load(Ordering::SeqCst) == 0 && !self.stop.load(Ordering::SeqCst) {
            guard = self.work.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Claims some of the remaining items. The phase stays open until [`Shared::perform`] has counted them, so its data
    /// may be read.
    fn take(&self) -> Option<Taken> {
        let mut left = self.left.0.load(Ordering::Acquire);
        while left > 0 {
            let smallest = self.smallest.load(Ordering::Relaxed);
            let portion = left / self.fraction.load(Ordering::Relaxed) / smallest * smallest;
            let count = portion.max(smallest).min(left);
            // An equal number in an earlier phase is harmless: the claimed items belong to the open phase.
            match self.left.0.compare_exchange_weak(left, left - count, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Taken { left, count }),
                Err(now) => left = now,
            }
        }
        None
    }

    /// Processes claimed items.
    fn perform(&self, thread: usize, taken: Taken) {
        // SAFETY: see `take`.
        let Phase { work, items } = self.phase.with(|phase| unsafe { *phase });
        let first = items - taken.left;
        // SAFETY: the work lives until the phase is over.
        let work = unsafe { &*work };
        let result = catch_unwind(AssertUnwindSafe(|| work(thread, first..first + taken.count)));
        let mut count = taken.count;
        if let Err(panic) = result {
            // The remaining items need not be started.
            count += self.left.0.swap(0, Ordering::AcqRel);
            lock(&self.panic).get_or_insert(panic);
        }
        // Ordered with the steps of `wait_until_done`: either this thread sees the sleeper, or the sleeper sees the
        // last item.
        let done = self.done.0.fetch_add(count, Ordering::SeqCst) + count;
        sync::sequential();
        if done == items && self.leader_sleeps.load(Ordering::SeqCst) {
            drop(lock(&self.lock));
            self.finished.notify_one();
        }
    }

    /// Waits, as the leader, for items that other threads have claimed.
    fn wait_until_done(&self, items: usize) {
        let mut wait = Wait::default();
        while self.done.0.load(Ordering::Acquire) < items {
            if !wait.a_moment() {
                let mut guard = lock(&self.lock);
                self.leader_sleeps.store(true, Ordering::SeqCst);
                sync::sequential();
                while self.done.0.load(Ordering::SeqCst) < items {
                    guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                self.leader_sleeps.store(false, Ordering::SeqCst);
            }
        }
    }
}

/// Locks a mutex whose value is consistent at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time that a thread has been without work.
#[cfg(not(loom))]
#[derive(Default)]
struct Wait {
    since: Option<Instant>,
}

/// In a model, a thread without work sleeps at once: spinning has the same effects as being scheduled later.
#[cfg(loom)]
#[derive(Default)]
struct Wait;

#[cfg(loom)]
impl Wait {
    #[allow(clippy::unused_self)]
    fn a_moment(&mut self) -> bool {
        false
    }
}

#[cfg(not(loom))]
impl Wait {
    /// Waits a moment; false once it is time to sleep.
    fn a_moment(&mut self) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        let waited = since.elapsed();
        if waited < SPIN {
            for _ in 0..16 {
                std::hint::spin_loop();
            }
        } else if waited < YIELD {
            thread::yield_now();
        }
        waited < YIELD
    }
}
