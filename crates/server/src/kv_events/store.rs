//! The last batches, shared by all subscribers and replays: none has a queue of its own.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

/// Number of batches that are kept.
pub const KEPT: usize = 10_000;
/// Maximum bytes of these.
const KEPT_BYTES: usize = 64 << 20;
/// Batches that [`Store::from`] returns at once.
const AT_ONCE: usize = 64;

/// A published batch.
#[derive(Debug)]
pub struct Published {
    pub number: u64,
    pub topic: Vec<u8>,
    pub batch: Vec<u8>,
}

#[derive(Debug)]
pub struct Store {
    kept: Mutex<Kept>,
    /// Number of the next batch.
    next: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Their numbers are consecutive.
    batches: VecDeque<Arc<Published>>,
    bytes: usize,
}

impl Store {
    pub fn new() -> Self {
        Self { kept: Mutex::default(), next: watch::Sender::new(0) }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers a batch and wakes its readers. Only one task publishes.
    pub fn push(&self, topic: Vec<u8>, batch: Vec<u8>) {
        let number = *self.next.borrow();
        let published = Arc::new(Published { number, topic, batch });
        let mut kept = self.kept();
        kept.bytes += bytes(&published);
        kept.batches.push_back(published);
        while kept.batches.len() > KEPT || kept.bytes > KEPT_BYTES && kept.batches.len() > 1 {
            let Some(oldest) = kept.batches.pop_front() else { break };
            kept.bytes -= bytes(&oldest);
        }
        drop(kept);
        self.next.send_replace(number + 1);
    }

    /// Returns the number of the next batch and its changes.
    pub fn next(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    /// Returns the number of the newest batch with a wanted topic among the last ones.
    pub fn newest(&self, is_wanted: impl Fn(&[u8]) -> bool) -> Option<u64> {
        let kept = self.kept();
        let mut last = kept.batches.iter().rev().take(AT_ONCE);
        last.find(|published| is_wanted(&published.topic)).map(|published| published.number)
    }

    /// Returns the first kept batches from this number on, some at a time. The numbers of batches that are no longer kept are skipped.
    pub fn from(&self, number: u64) -> Vec<Arc<Published>> {
        let kept = self.kept();
        let Some(oldest) = kept.batches.front() else { return Vec::new() };
        let begin = usize::try_from(number.saturating_sub(oldest.number)).unwrap_or(usize::MAX);
        kept.batches.iter().skip(begin).take(AT_ONCE).cloned().collect()
    }
}

fn bytes(published: &Published) -> usize {
    published.topic.len() + published.batch.len() + size_of::<Published>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_batches_are_kept() {
        let store = Store::new();
        for _ in 0..KEPT + 10 {
            store.push(b"topic".to_vec(), b"batch".to_vec());
        }
        let numbers =
            |from: u64| store.from(from).iter().map(|published| published.number).collect::<Vec<_>>();
        assert_eq!(numbers(0)[..3], [10, 11, 12], "older ones are gone");
        assert_eq!(numbers(KEPT as u64 + 9), [KEPT as u64 + 9]);
        assert!(numbers(KEPT as u64 + 10).is_empty() && numbers(u64::MAX).is_empty());
        assert_eq!(*store.next().borrow(), KEPT as u64 + 10);
        // A batch that is larger than all of the memory reaches those who wait for it.
        store.push(Vec::new(), vec![0; KEPT_BYTES + 1]);
        assert_eq!((numbers(0).len(), store.kept().batches.len()), (1, 1));
        store.push(Vec::new(), Vec::new());
        assert_eq!(store.kept().bytes, size_of::<Published>());
    }
}
