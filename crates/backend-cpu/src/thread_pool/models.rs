//! Models of the thread pool: loom runs each with every order of accesses that a few preemptions lead to.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p paguro-backend-cpu --lib --target-dir target/loom models
//! ```

use super::*;

/// Runs a model with at most this many preemptions.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Cells that phases write and read. Loom reports accesses that overlap or are not ordered.
struct Cells([UnsafeCell<usize>; 2]);

// SAFETY: loom checks each access.
unsafe impl Sync for Cells {}

impl Cells {
    fn new() -> Self {
        Self([UnsafeCell::new(0), UnsafeCell::new(0)])
    }

    fn get(&self, index: usize) -> usize {
        // SAFETY: loom checks it.
        self.0[index].with(|cell| unsafe { *cell })
    }

    fn set(&self, index: usize, value: usize) {
        // SAFETY: loom checks it.
        self.0[index].with_mut(|cell| unsafe { *cell = value });
    }
}

/// Every item is done once, and a phase sees what the earlier one has written on any thread.
fn phases(threads: usize) {
    let mut pool = ThreadPool::new(threads).expect("threads");
    let (first, second) = (Cells::new(), Cells::new());
    pool.run(2, Chunking::Single, |_, range| {
        range.for_each(|item| first.set(item, first.get(item) + item + 1));
    });
    pool.run(2, Chunking::Single, |_, range| {
        range.for_each(|item| second.set(item, 10 * first.get(1 - item)));
    });
    assert_eq!([first.get(0), first.get(1), second.get(0), second.get(1)], [1, 2, 20, 10]);
}

#[test]
fn phases_of_two_threads() {
    check(3, || phases(2));
}

#[test]
fn phases_of_three_threads() {
    check(1, || phases(3));
}

/// A pool without a phase ends.
#[test]
fn idle_pools_end() {
    check(3, || drop(ThreadPool::new(3).expect("threads")));
}

/// Working memory belongs to one thread.
#[test]
fn locals_are_separate() {
    check(3, || {
        let mut pool = ThreadPool::new(2).expect("threads");
        let mut sums = [0; 2];
        pool.run_with(&mut sums, 3, Chunking::Single, |sum, range| *sum += range.sum::<usize>());
        assert_eq!(sums.iter().sum::<usize>(), 3);
    });
}

/// A panic ends a phase after all threads have left it, and the next phase sees what they have written.
#[test]
fn phases_after_a_panic() {
    check(2, || {
        let mut pool = ThreadPool::new(2).expect("threads");
        let cells = Cells::new();
        let phase = || {
            pool.run(2, Chunking::Single, |_, range| {
                range.for_each(|item| cells.set(item, item + 1));
                resume_unwind(Box::new("a panic without a message"));
            });
        };
        assert!(catch_unwind(AssertUnwindSafe(phase)).is_err());
        pool.run(2, Chunking::Single, |_, range| {
            range.for_each(|item| cells.set(item, 10 * (item + 1)));
        });
        assert_eq!([cells.get(0), cells.get(1)], [10, 20]);
    });
}
