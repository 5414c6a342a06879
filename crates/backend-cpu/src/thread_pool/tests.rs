//! Tests of the thread pool.

use std::sync::atomic::AtomicU32;

use super::*;

const CHUNKINGS: [Chunking; 4] =
    [Chunking::Guided(1), Chunking::Guided(3), Chunking::Guided(100), Chunking::Single];

/// Smaller where an interpreter checks every access.
fn rounds(rounds: usize) -> usize {
    if cfg!(miri) { rounds / 50 } else { rounds }
}

#[test]
fn every_item_is_done_once() {
    for threads in [1, 2, 3, 5] {
        let mut pool = ThreadPool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads);
        for items in [0, 1, 2, 7, 64, 500] {
            for chunking in CHUNKINGS {
                let counts: Vec<AtomicU32> = (0..items).map(|_| AtomicU32::new(0)).collect();
                pool.run(items, chunking, |thread, range| {
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
        let mut pool = ThreadPool::new(threads).unwrap();
        let mut from: Vec<u64> = (0..97).collect();
        let mut to = vec![0_u64; 97];
        let rounds = rounds(2000);
        for round in 0..rounds {
            if round % (rounds / 4) == 0 {
                thread::sleep(2 * YIELD);
            }
            let chunking = CHUNKINGS[round % 4];
            let out = Locals(to.as_mut_ptr());
            let source = &from;
            pool.run(97, chunking, |_, range| {
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
        let mut pool = ThreadPool::new(threads).unwrap();
        for items in [5, 64, 101, 1000] {
            pool.run(items, Chunking::Guided(4), |_, range| {
                assert!(
                    range.start.is_multiple_of(4) && (range.len().is_multiple_of(4) || range.end == items)
                );
            });
        }
    }
}

#[test]
fn each_thread_has_its_own_local() {
    let mut pool = ThreadPool::new(4).unwrap();
    let mut sums = vec![0_usize; 4];
    for _ in 0..rounds(200) {
        pool.run_with(&mut sums, 1000, Chunking::Guided(1), |sum, range| *sum += range.sum::<usize>());
    }
    assert_eq!(sums.iter().sum::<usize>(), rounds(200) * 999 * 500);
}

/// A panic reaches the caller from any thread, and the pool stays usable.
#[test]
fn panics_reach_the_leader() {
    for threads in [1, 2, 3, 5] {
        let mut pool = ThreadPool::new(threads).unwrap();
        for round in 0..rounds(100) {
            let bad = round * 7 % 40;
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(40, CHUNKINGS[round % 4], |_, range| {
                    if range.contains(&bad) {
                        resume_unwind(Box::new(format!("item {bad}")));
                    }
                });
            }));
            let panic = result.expect_err("it panicked");
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("item {bad}")));
            let sum = AtomicUsize::new(0);
            pool.run(40, Chunking::Guided(1), |_, range| {
                sum.fetch_add(range.sum(), Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 780);
        }
    }
}

/// A thread that takes long for one item does not delay the others.
#[test]
fn a_slow_thread_holds_up_one_item() {
    let mut pool = ThreadPool::new(2).unwrap();
    let others = AtomicUsize::new(0);
    pool.run(100, Chunking::Single, |_, range| {
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
fn pools_end_whether_awake_or_asleep() {
    for round in 0..rounds(100) {
        let mut pool = ThreadPool::new(1 + round % 6).unwrap();
        if round % 2 == 0 {
            pool.run(10, Chunking::Single, |_, _| {});
        }
        if round % 10 == 0 {
            thread::sleep(2 * YIELD);
        }
    }
}

/// A sleeping pool uses no processor time.
#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn an_idle_pool_sleeps() {
    let _pool = ThreadPool::new(3).unwrap();
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
    panic!("threads without work do not sleep");
}
