//! The thread team: one leader (whoever calls) and its workers, for all of a runner's life.
//!
//! The leader walks the program; every loop worth sharing is a *phase*: a number of items that all threads take from
//! one counter until none are left. A phase ends when its items are done, not when every thread has arrived: a
//! thread that the system has put aside holds nothing up unless it has taken work along, and one that comes back late
//! finds whatever phase is open then. A barrier of all threads would instead wait for the slowest one in every phase.
//!
//! Threads without work spin for some microseconds, then yield, then sleep, so that a phase starts at once when the
//! last one has just ended, a busy machine is left to others, and an idle team costs nothing.

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

/// How long a thread without work keeps its core for itself. Longer than a phase of a small model, so that a team in
/// the middle of a step never leaves it.
const SPIN: Duration = Duration::from_micros(50);
/// How long it then offers its core to others before it sleeps. Longer than an engine takes from step to step.
const YIELD: Duration = Duration::from_micros(250);

/// How the items of a phase are handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Portions {
    /// Large portions first, then ever smaller ones, in multiples of this many items: little to agree on, and all
    /// threads end at the same time. With no more items than that, the leader does them without asking anybody.
    Guided(usize),
    /// One item after the other: for items that take long, or not equally long.
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

/// What threads share. `left` and `done` are on cache lines of their own because all threads write them.
#[derive(Debug)]
struct Shared {
    /// Items of the phase that nobody has taken yet.
    left: Line<AtomicUsize>,
    /// Items that are done.
    done: Line<AtomicUsize>,
    /// Written by the leader while `left` is zero and all is done, read by threads that have taken an item.
    phase: UnsafeCell<Phase>,
    /// See [`Portions`]. Threads may see those of another phase, which does no harm: they only guide.
    smallest: AtomicUsize,
    fraction: AtomicUsize,
    /// What the first thread that panicked in this phase said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Workers that sleep on `work`, or are about to.
    sleepers: AtomicUsize,
    /// Whether the leader sleeps on `finished`, or is about to.
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
    /// A team of `threads` threads, the caller's included.
    ///
    /// # Errors
    /// If the system does not start so many threads.
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

    /// One phase: `work` is called with the number of a thread and some of the items, until all of `0..items` are
    /// done; each item once.
    ///
    /// # Panics
    /// If `work` does, on whatever thread, when all threads have left the phase. Items may then be undone.
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

    /// As [`Team::share`], with something of its own for each thread, such as working memory.
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
            // A worker catches the panics of its work; there is nothing else it could say.
            let _ = worker.join();
        }
    }
}

/// Items that a thread has taken: so many, when so many were left.
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

    /// Lets threads take items.
    fn open(&self, items: usize) {
        // In one order with `sleep`'s steps: either this sees the sleeper, or the sleeper sees the items.
        self.left.0.store(items, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_workers();
        }
    }

    fn wake_workers(&self) {
        // Whoever was about to sleep does so before this passes, and is then woken.
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

    /// Takes some of the items that are left. Whoever has taken an item keeps the phase open until
    /// [`Shared::perform`] has counted it: what belongs to the phase may be read.
    fn take(&self) -> Option<Taken> {
        let mut left = self.left.0.load(Ordering::Acquire);
        while left > 0 {
            let smallest = self.smallest.load(Ordering::Relaxed);
            let portion = left / self.fraction.load(Ordering::Relaxed) / smallest * smallest;
            let count = portion.max(smallest).min(left);
            // That as many were left in an earlier phase does no harm: what is taken is of the phase that is open.
            match self.left.0.compare_exchange_weak(left, left - count, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Taken { left, count }),
                Err(now) => left = now,
            }
        }
        None
    }

    /// Does what was taken.
    fn perform(&self, thread: usize, taken: Taken) {
        // SAFETY: see `take`.
        let Phase { work, items } = unsafe { *self.phase.get() };
        let first = items - taken.left;
        // SAFETY: the work lives until the phase is over.
        let work = unsafe { &*work };
        let result = catch_unwind(AssertUnwindSafe(|| work(thread, first..first + taken.count)));
        let mut count = taken.count;
        if let Err(panic) = result {
            // Nobody needs to begin what is left.
            count += self.left.0.swap(0, Ordering::AcqRel);
            lock(&self.panic).get_or_insert(panic);
        }
        // In one order with `wait_until_done`'s steps: either this sees the sleeper, or the sleeper the last item.
        let done = self.done.0.fetch_add(count, Ordering::SeqCst) + count;
        if done == items && self.leader_sleeps.load(Ordering::SeqCst) {
            drop(lock(&self.lock));
            self.finished.notify_one();
        }
    }

    /// The leader's wait for what others have taken.
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

/// What a mutex guards here is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long a thread has been without work.
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

    /// Phases that depend on each other, in quick succession and with pauses long enough to fall asleep: what one
    /// phase wrote, on whatever thread, the next one reads on any other.
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

    /// Kernels that do four items at once want them in fours.
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

    /// A thread that takes long over one item does not keep the others from the rest.
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
        // Of all threads of this name, however many tests run at the same time: look until some are asleep.
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
