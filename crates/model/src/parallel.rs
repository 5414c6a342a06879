//! Work on many texts by several threads.

use std::{
    num::NonZero,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// Bytes of texts for each thread. Starting one takes as long as tokenizing a few hundred bytes.
const BYTES: usize = 64 << 10;

/// Most threads.
const MOST: usize = 8;

/// Stack of a thread, in bytes.
const STACK: usize = 16 << 20;

/// Returns the most threads of [`map_texts`]: no more than half of the processors.
pub fn most_text_threads() -> usize {
    (thread::available_parallelism().map_or(1, NonZero::get) / 2).min(MOST)
}

/// Returns the results of `work` for all items, in their order, or for the first ones if `is_wanted` becomes false. Items have `bytes`
/// bytes in all; with many, several threads work on them.
///
/// # Errors
/// That of the first item that has one.
pub fn map_texts<T: Send, R: Send, E: Send>(
    items: Vec<T>,
    bytes: usize,
    is_wanted: impl Fn() -> bool + Sync,
    work: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    map_on(items, (bytes / BYTES).min(most_text_threads()), is_wanted, work)
}

/// [`map_texts`] on this number of threads.
fn map_on<T: Send, R: Send, E: Send>(
    items: Vec<T>,
    threads: usize,
    is_wanted: impl Fn() -> bool + Sync,
    work: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    if threads < 2 {
        return items.into_iter().take_while(|_| is_wanted()).map(work).collect();
    }
    let items = Mutex::new(items.into_iter().enumerate());
    let (results, has_failed) = (Mutex::new(Vec::new()), AtomicBool::new(false));
    let run = || {
        let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
        let mut own = Vec::new();
        // Items are begun in order, so no earlier one is missing.
        while is_wanted()
            && !has_failed.load(Ordering::Relaxed)
            && let Some((index, item)) = next()
        {
            let result = work(item);
            has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
            own.push((index, result));
        }
        results.lock().unwrap_or_else(PoisonError::into_inner).append(&mut own);
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // The other threads do the work of one that the system refuses.
            let _ = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, run);
        }
        run();
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_on_any_number_of_threads() {
        for threads in [0, 1, 3] {
            let squares = map_on((0..100_u32).collect(), threads, || true, |i| Ok::<_, ()>(i * i));
            assert_eq!(squares, Ok((0..100).map(|i| i * i).collect()));
            let odd = |i: i32| if i % 2 == 0 { Err(i) } else { Ok(i) };
            assert_eq!(map_on(vec![1, 2, 3, 4], threads, || true, odd), Err(2));
            assert_eq!(map_on(vec![2], threads, || false, odd), Ok(vec![]));
        }
    }
}
