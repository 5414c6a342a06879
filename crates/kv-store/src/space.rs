//! The items of one model in a store.

use std::{
    fmt,
    sync::{Arc, mpsc::Sender},
    time::Duration,
};

use crate::{Id, StoreStats, store::Shared};

/// A block's page of one group, or the checkpoint after the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// Key of the block, which names all tokens up to its end.
    pub key: Id,
    /// The part of it.
    pub part: u32,
}

/// Items of one model under one page format, in a store.
#[derive(Clone, Debug)]
pub struct Space {
    shared: Arc<Shared>,
    reader: Option<Sender<Load>>,
    id: Id,
}

/// Items that were loaded.
#[derive(Debug)]
pub struct Chunk {
    /// Index of the first one in the request.
    pub first: usize,
    /// Their contents, in order.
    pub payloads: Vec<Vec<u8>>,
    /// True for the last chunk of a load. Items that it lacks are not there, or would have taken too long.
    pub is_last: bool,
}

/// A load that waits for the reader, or is on its way.
pub struct Load {
    pub(crate) ids: Vec<Id>,
    /// Bytes of one item, about.
    item_bytes: f64,
    budget: Duration,
    pub(crate) deliver: Box<dyn FnMut(Chunk) + Send>,
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load").field("items", &self.ids.len()).finish_non_exhaustive()
    }
}

impl Load {
    /// Returns true if the items from the one at `index` on would be there only after the load's time is over.
    pub(crate) fn is_too_slow(&self, index: usize, elapsed: Duration, speed: f64) -> bool {
        let left = (self.ids.len() - index) as f64 * self.item_bytes / speed.max(1.0);
        elapsed.as_secs_f64() + left > self.budget.as_secs_f64()
    }
}

/// Identifies a space by all inputs of its contents besides tokens.
pub(crate) fn space_id(identity: &[&[u8]]) -> Id {
    let mut hasher = blake3::Hasher::new_derive_key("paguro kv-store space v1");
    for part in identity {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

impl Space {
    pub(crate) fn new(shared: Arc<Shared>, reader: Option<Sender<Load>>, id: Id) -> Self {
        Self { shared, reader, id }
    }

    /// Returns the name of an item in the store.
    pub fn id(&self, item: &Item) -> Id {
        let mut hasher = blake3::Hasher::new_keyed(&self.id);
        hasher.update(&item.key);
        hasher.update(&item.part.to_le_bytes());
        *hasher.finalize().as_bytes()
    }

    /// Returns true if the store has an item.
    pub fn contains(&self, item: &Item) -> bool {
        !self.shared.is_off() && self.shared.log.index().get(&self.id(item)).is_some()
    }

    /// Returns the number of bytes that the writer's queue accepts now.
    pub fn room(&self) -> usize {
        self.shared.room()
    }

    /// Remembers which items are removed from now on.
    pub fn watch(&self) {
        self.shared.log.index().watch(self.id);
    }

    /// Items that were removed since the last call, by name.
    pub fn take_removed(&self) -> Vec<Id> {
        self.shared.log.index().take_removed(&self.id)
    }

    /// Returns true if the store was turned off by an error.
    pub fn is_off(&self) -> bool {
        self.shared.is_off()
    }

    /// Returns the number of bytes that wait to be written.
    pub fn pending_bytes(&self) -> usize {
        self.shared.pending_bytes()
    }

    /// Queues an item for the writer. An item that exists already counts as used.
    pub fn save(&self, item: &Item, payload: impl Into<Arc<Vec<u8>>>) {
        self.shared.save(self.id, self.id(item), payload.into());
    }

    /// Returns the bytes per second that the disk reads, as measured.
    pub fn read_speed(&self) -> f64 {
        self.shared.read_speed()
    }

    /// Returns the bytes per second that the disk writes, as measured.
    pub fn write_speed(&self) -> f64 {
        self.shared.write_speed()
    }

    /// Says that a load was not worth it at this speed. It will be tried again after some time.
    pub fn decline(&self) {
        self.shared.forgive();
    }

    /// Loads items of about `item_bytes` bytes each in the background, in order, and stops when that would take longer than
    /// `budget`. `deliver` is called on another thread.
    pub fn load(
        &self,
        items: &[Item],
        item_bytes: usize,
        budget: Duration,
        deliver: Box<dyn FnMut(Chunk) + Send>,
    ) {
        let ids = items.iter().map(|item| self.id(item)).collect();
        let mut load = Load { ids, item_bytes: item_bytes as f64, budget, deliver };
        let nothing = Chunk { first: 0, payloads: Vec::new(), is_last: true };
        match &self.reader {
            Some(reader) => {
                if let Err(mut refused) = reader.send(load) {
                    (refused.0.deliver)(nothing);
                }
            }
            None => (load.deliver)(nothing),
        }
    }

    /// Waits until everything is written, or for `patience` at most. Returns true if it is.
    pub fn flush(&self, patience: Duration) -> bool {
        self.shared.flush(patience)
    }

    /// Returns the numbers of its store.
    pub fn stats(&self) -> StoreStats {
        self.shared.stats()
    }
}
