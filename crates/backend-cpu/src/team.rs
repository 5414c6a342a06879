//! A team of threads that runs one function together.
//!
//! All members call the same function (SPMD) and walk through the same phases: in a phase they take shares of the
//! work from one counter until it is used up, then they meet at a barrier. A member that the system has slowed down
//! takes fewer shares and holds nobody up for longer than one of them. Who takes which share never changes a result.
//!
//! Waiting members spin briefly, then let others run, then sleep: an idle team takes no processor time, and on a
//! busy machine nobody burns the time slice that the slowest member needs.

use std::{
    cell::Cell,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

/// Checks of the condition before the waiting thread offers its processor to others: about 20 microseconds, more
/// than a phase of a small model takes, less than anybody notices.
const SPINS: u32 = 4000;
/// Times that it offers it before it sleeps.
const YIELDS: u32 = 20;

/// A number that only grows, and threads that wait for it to change.
#[derive(Default)]
struct Signal {
    value: AtomicU32,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Signal {
    fn get(&self) -> u32 {
        self.value.load(Ordering::SeqCst)
    }

    /// Adds one and wakes whoever sleeps.
    fn raise(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        // A sleeper counts itself before it looks at the value for the last time: either it sees the new value or
        // we see it here.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Waits until the value is not `old`.
    fn wait(&self, old: u32) {
        for _ in 0..SPINS {
            if self.get() != old {
                return;
            }
            std::hint::spin_loop();
        }
        for _ in 0..YIELDS {
            if self.get() != old {
                return;
            }
            thread::yield_now();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.get() == old {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The function of a run, its lifetime forgotten; see [`Team::run`] for why that is sound.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(&Member<'_>) + Sync));

// SAFETY: it is a reference to something `Sync`, and only used while `Team::run` keeps that alive.
unsafe impl Send for Job {}

struct Shared {
    threads: usize,
    job: Mutex<Option<Job>>,
    /// Raised for each run and at the end.
    start: Signal,
    /// Raised when a member is the last one to arrive at a barrier.
    phase: Signal,
    arrived: AtomicUsize,
    /// Next unit of work of this phase.
    next: AtomicUsize,
    /// A member has panicked: nobody waits for it any more.
    broken: AtomicBool,
    stop: AtomicBool,
}

/// The threads. Dropping it ends them.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Team {
    /// A team of `threads` members: the caller of [`Team::run`] and `threads - 1` threads of its own.
    ///
    /// # Errors
    /// If the system starts no more threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            threads,
            job: Mutex::new(None),
            start: Signal::default(),
            phase: Signal::default(),
            arrived: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut team = Self { shared, workers: Vec::new() };
        for index in 1..threads {
            let shared = team.shared.clone();
            let worker = thread::Builder::new().name(format!("paguro-cpu-{index}"));
            // On an error, dropping the half-made team ends the threads that have started.
            team.workers.push(worker.spawn(move || work(&shared, index))?);
        }
        Ok(team)
    }

    /// Number of members.
    pub fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Runs `job` on every member and returns when all have finished it.
    ///
    /// # Panics
    /// If it panics on any member; the team is of no use after that, and panics again.
    pub fn run(&mut self, job: &(dyn Fn(&Member<'_>) + Sync)) {
        let shared = &*self.shared;
        assert!(!shared.broken.load(Ordering::SeqCst), "a thread of this team has panicked before");
        // SAFETY: only the lifetime changes. Every member ends its call of `job` before it arrives at the barrier
        // below, or breaks the team; and `run` passes that barrier, or waits for the workers' end, before it returns.
        let job: &'static (dyn Fn(&Member<'_>) + Sync) = unsafe { std::mem::transmute(job) };
        *shared.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(Job(job));
        shared.start.raise();
        let result = run_member(shared, 0, job);
        if shared.broken.load(Ordering::SeqCst) {
            // Others may still use `job`'s borrows: wait for all of them before unwinding.
            self.end();
            match result {
                Err(panic) => resume_unwind(panic),
                Ok(()) => panic!("a thread of the team has panicked"),
            }
        }
    }

    /// Ends and joins the workers.
    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.start.raise();
        for worker in self.workers.drain(..) {
            // A worker's panic has been caught and noted; there is nothing to learn from its result.
            let _ = worker.join();
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.end();
    }
}

/// A worker's life.
fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        shared.start.wait(seen);
        seen += 1;
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let job = *shared.job.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Job(job)) = job else { return };
        // SAFETY: `Team::run` keeps the function alive until all members are through the barrier in `run_member`.
        if run_member(shared, index, unsafe { &*job }).is_err() {
            return;
        }
    }
}

/// One member's part of a run. An error is the member's own panic, or that of another one that it met at a barrier.
fn run_member(shared: &Shared, index: usize, job: &(dyn Fn(&Member<'_>) + Sync)) -> thread::Result<()> {
    let result = catch_unwind(AssertUnwindSafe(|| {
        let member = Member { shared, index, phase: Cell::new(shared.phase.get()) };
        job(&member);
        member.barrier();
    }));
    if result.is_err() {
        shared.broken.store(true, Ordering::SeqCst);
        shared.phase.raise();
    }
    result
}

/// One thread's view of a run.
pub struct Member<'a> {
    shared: &'a Shared,
    index: usize,
    phase: Cell<u32>,
}

impl Member<'_> {
    /// Which member this is, `0..threads`; the leader is 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether this is the caller's thread.
    pub fn leads(&self) -> bool {
        self.index == 0
    }

    /// Number of members.
    pub fn threads(&self) -> usize {
        self.shared.threads
    }

    /// One phase: all members together do the units `0..count`, in shares of `share` or fewer, and go on when all
    /// are done. Everything written before is visible to everybody after.
    pub fn phase(&self, count: usize, share: usize, mut work: impl FnMut(Range<usize>)) {
        let share = share.max(1);
        loop {
            let start = self.shared.next.fetch_add(share, Ordering::Relaxed);
            if start >= count {
                break;
            }
            work(start..count.min(start + share));
        }
        self.barrier();
    }

    /// Waits for all members. The last one to arrive sets the work counter back for the next phase.
    fn barrier(&self) {
        let shared = self.shared;
        let phase = self.phase.get();
        if shared.arrived.fetch_add(1, Ordering::SeqCst) + 1 == shared.threads {
            shared.arrived.store(0, Ordering::SeqCst);
            shared.next.store(0, Ordering::SeqCst);
            shared.phase.raise();
        } else {
            shared.phase.wait(phase);
        }
        assert!(!shared.broken.load(Ordering::SeqCst), "another thread of the team has panicked");
        self.phase.set(phase.wrapping_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_done_once_in_every_phase() {
        for threads in [1, 2, 3, 5] {
            let mut team = Team::new(threads).unwrap();
            for run in 0..200 {
                let counts: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
                team.run(&|member| {
                    for phase in 0..5 {
                        member.phase(counts.len(), 1 + run % 7, |units| {
                            for unit in units {
                                // Everybody's work of the phase before is visible.
                                let before = counts[(unit + 31) % 97].load(Ordering::Relaxed);
                                assert!(before == phase || before == phase + 1);
                                counts[unit].fetch_add(1, Ordering::Relaxed);
                            }
                        });
                    }
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 5));
            }
        }
    }

    #[test]
    fn a_panic_on_any_member_comes_out_of_run() {
        for guilty in 0..3 {
            let mut team = Team::new(3).unwrap();
            let attempt = |team: &mut Team| {
                catch_unwind(AssertUnwindSafe(|| {
                    team.run(&|member| {
                        member.phase(9, 1, |_| {});
                        assert!(member.index() != guilty, "as planned");
                        member.phase(9, 1, |_| {});
                    });
                }))
            };
            assert!(attempt(&mut team).is_err());
            assert!(attempt(&mut team).is_err(), "a broken team refuses to run");
        }
    }

    #[test]
    fn threads_end_with_the_team() {
        let team = Team::new(4).unwrap();
        let shared = Arc::downgrade(&team.shared);
        drop(team);
        assert!(shared.upgrade().is_none());
    }
}
