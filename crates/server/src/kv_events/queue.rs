//! Events on their way from the engines to the publisher.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use paguro_engine::{EventSink, KvEvent};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Largest number of waiting batches of one model.
const BATCHES: usize = 4096;
/// Largest number of hashes and tokens in these batches.
const NUMBERS: usize = 1 << 20;

/// Events of all models on their way to the publisher. An engine never waits: if the publisher falls behind, the events of the
/// model are dropped.
#[derive(Clone, Debug)]
pub struct KvEvents {
    queue: Arc<Queue>,
    /// Wakes the publisher, and tells it that all engines have ended.
    bell: Sender<()>,
}

/// Step's events, or `None` in the place of events that were dropped.
pub type Batch = Option<Vec<KvEvent>>;

#[derive(Debug, Default)]
struct Queue(Mutex<BTreeMap<Arc<str>, Line>>);

/// Waiting batches of a model.
#[derive(Debug, Default)]
struct Line {
    batches: Vec<Batch>,
    numbers: usize,
}

impl Line {
    /// Appends a batch. If there is no room, a mark replaces all waiting batches: their blocks may have gone since.
    fn push(&mut self, events: Vec<KvEvent>) {
        let numbers = events.iter().map(numbers).sum::<usize>();
        if self.batches.len() >= BATCHES || self.numbers.saturating_add(numbers) > NUMBERS {
            self.batches.clear();
            self.batches.push(None);
            self.numbers = 0;
            // The mark stands for this batch as well.
            return;
        }
        self.numbers += numbers;
        self.batches.push(Some(events));
    }
}

fn numbers(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { hashes, tokens, .. } => hashes.len() + tokens.len(),
        KvEvent::Removed { hashes, .. } => hashes.len(),
    }
}

impl Queue {
    fn lines(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Line>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvEvents {
    /// Returns the sink for the engine of a model.
    pub fn of(&self, model: &str) -> EventSink {
        let (events, model): (_, Arc<str>) = (self.clone(), model.into());
        EventSink(Arc::new(move |batch| {
            events.queue.lines().entry(model.clone()).or_default().push(batch);
            // A full channel has a signal already, and without a publisher the queue has its bound.
            let _ = events.bell.try_send(());
        }))
    }
}

/// The other end of [`KvEvents`].
#[derive(Debug)]
pub struct Events {
    queue: Arc<Queue>,
    bell: Receiver<()>,
}

/// Returns a queue and its other end.
pub fn queue() -> (KvEvents, Events) {
    let (sender, receiver) = channel(1);
    let queue = Arc::new(Queue::default());
    (KvEvents { queue: queue.clone(), bell: sender }, Events { queue, bell: receiver })
}

impl Events {
    /// Waits for events and returns them by model, in order. Returns `None` when all engines have ended.
    pub async fn next(&mut self) -> Option<Vec<(Arc<str>, Vec<Batch>)>> {
        loop {
            let open = self.bell.recv().await.is_some();
            let lines = std::mem::take(&mut *self.queue.lines());
            if !lines.is_empty() {
                return Some(lines.into_iter().map(|(model, line)| (model, line.batches)).collect());
            }
            if !open {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use paguro_engine::Medium;

    use super::*;

    fn removed(hashes: usize) -> Vec<KvEvent> {
        vec![KvEvent::Removed { hashes: vec![7; hashes], medium: Medium::Device }]
    }

    #[tokio::test]
    async fn an_overflow_of_one_model_is_one_mark_and_touches_no_other() {
        let (events, mut receiver) = queue();
        let (fox, owl) = (events.of("fox"), events.of("owl"));
        (owl.0)(removed(1));
        for _ in 0..2 * BATCHES + 3 {
            (fox.0)(removed(1));
        }
        let lines = receiver.next().await.unwrap();
        let [(_, fox_batches), (_, owl_batches)] = &lines[..] else { panic!("{lines:?}") };
        // Two overflows are one mark, and batches after it are kept.
        assert_eq!((fox_batches[0].is_none(), fox_batches.len()), (true, 3));
        assert!(fox_batches[1..].iter().chain(owl_batches).all(Option::is_some));
        // Few batches may be large.
        for _ in 0..4 {
            (fox.0)(removed(NUMBERS / 3));
        }
        let lines = receiver.next().await.unwrap();
        assert_eq!(lines[0].1, [None]);
        drop((events, fox, owl));
        assert!(receiver.next().await.is_none());
    }
}
