//! The thread team: one leader (the calling thread) and its workers, for the lifetime of a runner.
//!
//! The leader runs the program. Every parallel loop is a *phase*: a number of items that all threads claim from one
//! counter. A phase ends when its items are done, not when every thread has arrived: a descheduled thread delays the
//! others only if it has claimed work, and a late one joins the current phase. A barrier of all threads would wait for
//! the slowest one in every phase.
//!
//! Threads without work spin for some microseconds, then yield, then sleep. So a phase starts at once after the
//! previous one, a busy machine is available to others, and an idle team costs nothing.

use std::{
    any::Any,
    cell::UnsafeCell,
    io,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Time that a thread without work spins. Longer than a phase of a small model, so that the team spins throughout a
/// step.
const SPIN: Duration = Duration::from_micros(50);
/// Time that it then yields before it sleeps. Longer than an engine's time between steps.
const YIELD: Duration = Duration::from_micros(250);

/// Division of a phase's items among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Portions {
    /// Large portions first, then ever smaller ones, in multiples of this number of items: few accesses of the counter,
    /// and all threads end together. For at most this number of items, the leader works alone.
    Guided(usize),
    /// One item at a time, for items that take long or different times.
    Single,
}

/// The threads.
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

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
    /// See [`Portions`]. A thread may read the value of another phase, which only affects the size of its portion.
    smallest: AtomicUsize,
    fraction: AtomicUsize,
    /// Payload of the first panic in this phase.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Workers that sleep on `work`, or are about to.
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

impl Team {
    /// Creates a team of `threads` threads, including the caller's.
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
        let mut team = Self { shared, workers: Vec::new() };
        for index in 1..threads {
            let shared = Arc::clone(&team.shared);
            let worker = thread::Builder::new().name(format!("paguro-cpu-{index}"));
            // On an error the team is dropped, which ends the workers that there are.
            team.workers.push(worker.spawn(move || shared.serve(index))?);
        }
        Ok(team)
    }

    /// Threads, the leader included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs a phase: calls `work` with the number of a thread and some of the items, until all of `0..items` are done,
    /// each once.
    ///
    /// # Panics
    /// If `work` panics on any thread, after all threads have left the phase. Some items may then not be done.
    pub fn share(&mut self, items: usize, portions: Portions, work: impl Fn(usize, Range<usize>) + Sync) {
        let threads = self.threads();
        let (smallest, fraction) = match portions {
            Portions::Guided(smallest) => (smallest.max(1), 2 * threads),
            Portions::Single => (1, usize::MAX),
        };
        if items == 0 {
            return;
        }
        if threads == 1 || items <= smallest {
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
        unsafe { *shared.phase.get() = Phase { work, items } };
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

    /// Like [`Team::share`], with a separate value per thread, such as working memory.
    ///
    /// # Panics
    /// As [`Team::share`], and if there are fewer than [`Team::threads`] locals.
    pub fn share_with<T: Send>(
        &mut self,
        locals: &mut [T],
        items: usize,
        portions: Portions,
        work: impl Fn(&mut T, Range<usize>) + Sync,
    ) {
        assert!(locals.len() >= self.threads(), "{} locals for {} threads", locals.len(), self.threads());
        let locals = Locals(locals.as_mut_ptr());
        self.share(items, portions, move |thread, items| {
            // SAFETY: there is a local for each thread, checked above, and the number is given to one thread, which
            // does one portion after the other.
            let local = unsafe { &mut *locals.of(thread) };
            work(local, items);
        });
    }
}

/// The locals of [`Team::share_with`].
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

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake_workers();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its work, so this never fails.
            let _ = worker.join();
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
    /// A worker's life.
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
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_workers();
        }
    }

    fn wake_workers(&self) {
        // A thread that was about to sleep does so before this lock is acquired, and is then woken.
        drop(lock(&self.lock));
        self.work.notify_all();
    }

    /// Sleeps until there are items, or the end.
    fn sleep(&self) {
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
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
        let Phase { work, items } = unsafe { *self.phase.get() };
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
#[derive(Default)]
struct Wait {
    since: Option<Instant>,
}

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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    const PORTIONS: [Portions; 4] =
        [Portions::Guided(1), Portions::Guided(3), Portions::Guided(100), Portions::Single];

    /// Smaller where an interpreter checks every access.
    fn rounds(rounds: usize) -> usize {
        if cfg!(miri) { rounds / 50 } else { rounds }
    }

    #[test]
    fn every_item_is_done_once() {
        for threads in [1, 2, 3, 5] {
            let mut team = Team::new(threads).unwrap();
            assert_eq!(team.threads(), threads);
            for items in [0, 1, 2, 7, 64, 500] {
                for portions in PORTIONS {
                    let counts: Vec<AtomicU32> = (0..items).map(|_| AtomicU32::new(0)).collect();
                    team.share(items, portions, |thread, range| {
                        assert!(thread < threads);
                        assert!(!range.is_empty());
                        counts[range].iter().for_each(|count| {
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    /// Dependent phases in quick succession and with pauses long enough to sleep: data written in one phase, on any
    /// thread, is read in the next on any other.
    #[test]
    fn phases_see_what_earlier_ones_wrote() {
        for threads in [2, 3, 8] {
            let mut team = Team::new(threads).unwrap();
            let mut from: Vec<u64> = (0..97).collect();
            let mut to = vec![0_u64; 97];
            let rounds = rounds(2000);
            for round in 0..rounds {
                if round % (rounds / 4) == 0 {
                    thread::sleep(2 * YIELD);
                }
                let portions = PORTIONS[round % 4];
                let out = Locals(to.as_mut_ptr());
                let source = &from;
                team.share(97, portions, |_, range| {
                    for i in range {
                        // SAFETY: each item writes its own element.
                        unsafe { *out.of(i) = source[(i + 1) % 97].wrapping_mul(3).wrapping_add(1) };
                    }
                });
                std::mem::swap(&mut from, &mut to);
            }
            let mut expected: Vec<u64> = (0..97).collect();
            for _ in 0..rounds {
                expected.rotate_left(1);
                expected.iter_mut().for_each(|x| *x = x.wrapping_mul(3).wrapping_add(1));
            }
            assert_eq!(from, expected);
        }
    }

    /// Kernels that process four items at once need multiples of four.
    #[test]
    fn guided_portions_are_multiples() {
        for threads in [2, 3, 5] {
            let mut team = Team::new(threads).unwrap();
            for items in [5, 64, 101, 1000] {
                team.share(items, Portions::Guided(4), |_, range| {
                    assert!(
                        range.start.is_multiple_of(4)
                            && (range.len().is_multiple_of(4) || range.end == items)
                    );
                });
            }
        }
    }

    #[test]
    fn each_thread_has_its_own_local() {
        let mut team = Team::new(4).unwrap();
        let mut sums = vec![0_usize; 4];
        for _ in 0..rounds(200) {
            team.share_with(&mut sums, 1000, Portions::Guided(1), |sum, range| *sum += range.sum::<usize>());
        }
        assert_eq!(sums.iter().sum::<usize>(), rounds(200) * 999 * 500);
    }

    /// A panic reaches the caller from whatever thread, and the team works on.
    #[test]
    fn panics_reach_the_leader() {
        for threads in [1, 2, 3, 5] {
            let mut team = Team::new(threads).unwrap();
            for round in 0..rounds(100) {
                let bad = round * 7 % 40;
                let result = catch_unwind(AssertUnwindSafe(|| {
                    team.share(40, PORTIONS[round % 4], |_, range| {
                        if range.contains(&bad) {
                            resume_unwind(Box::new(format!("item {bad}")));
                        }
                    });
                }));
                let panic = result.expect_err("it panicked");
                assert_eq!(panic.downcast_ref::<String>(), Some(&format!("item {bad}")));
                let sum = AtomicUsize::new(0);
                team.share(40, Portions::Guided(1), |_, range| {
                    sum.fetch_add(range.sum(), Ordering::Relaxed);
                });
                assert_eq!(sum.into_inner(), 780);
            }
        }
    }

    /// A thread that takes long for one item does not delay the others.
    #[test]
    fn a_slow_thread_holds_up_one_item() {
        let mut team = Team::new(2).unwrap();
        let others = AtomicUsize::new(0);
        team.share(100, Portions::Single, |_, range| {
            if range.contains(&0) {
                while others.load(Ordering::Acquire) < 99 {
                    thread::yield_now();
                }
            } else {
                others.fetch_add(range.len(), Ordering::AcqRel);
            }
        });
        assert_eq!(others.into_inner(), 99);
    }

    #[test]
    fn teams_end_whether_awake_or_asleep() {
        for round in 0..rounds(100) {
            let mut team = Team::new(1 + round % 6).unwrap();
            if round % 2 == 0 {
                team.share(10, Portions::Single, |_, _| {});
            }
            if round % 10 == 0 {
                thread::sleep(2 * YIELD);
            }
        }
    }

    /// A sleeping team uses no processor time.
    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn an_idle_team_sleeps() {
        let _team = Team::new(3).unwrap();
        thread::sleep(4 * YIELD);
        // Threads of this name in all concurrent tests: repeated until some are asleep.
        let asleep = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let stats = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
            stats.filter(|stat| stat.contains("(paguro-cpu-") && stat.contains(") S ")).count()
        };
        for _ in 0..1000 {
            if asleep() >= 2 {
                return;
            }
            thread::sleep(YIELD);
        }
        panic!("workers without work do not sleep");
    }
}
