//! The disk tier of the prefix cache: what is worth saving, and what was evicted before it was saved.
//!
//! Blocks and checkpoints are saved when their sequence ends or loses its place. They stay in the arena as long as nobody needs
//! their pages, so copying them out can wait: the engine copies a few after each step, and all that are left when it has nothing to do. One
//! that is evicted first is copied before the next step writes its page.
//!
//! A prefix that only the disk has is loaded into pages of the prefix cache, while other sequences run. The sequence is admitted
//! afterwards in the same way as all others, and finds the blocks there.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use paguro_backend::PageId;
use paguro_kv_store::{Item, Space, Store};

use crate::prefix::BlockKey;

/// A store on disk that an engine uses for its pages.
#[derive(Clone, Debug)]
pub struct DiskCache {
    /// The store.
    pub store: Arc<Store>,
    /// Digest of the model's files. Models with one name and other weights must not share pages.
    pub weights: Vec<u8>,
    /// Name of the model, for people.
    pub model: String,
    /// Tokens that a sequence must have for its pages to be saved.
    pub least_tokens: usize,
    /// Seconds of loading that are worth a second of computing: 1, except in tests.
    pub worth: f64,
}

impl DiskCache {
    /// A store for a model with this digest of its files.
    pub fn new(store: Arc<Store>, model: &str, weights: &[u8]) -> Self {
        let (weights, model) = (weights.to_vec(), model.to_owned());
        Self { store, weights, model, least_tokens: LEAST_TOKENS, worth: 1.0 }
    }
}

/// Default of [`DiskCache::least_tokens`].
pub const LEAST_TOKENS: usize = 256;

/// Numbers of the disk tier. Gauges say how it is now; counters count since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// True if there is a disk tier.
    pub exists: bool,
    /// Tokens of prompts whose K and V came from the disk.
    pub hit_tokens: u64,
    /// Loads that were begun.
    pub loads: u64,
    /// Loads that were not begun because computing was faster.
    pub declined: u64,
    /// Blocks and checkpoints that were handed to the writer.
    pub saved: u64,
    /// Blocks and checkpoints that were evicted before they were saved, because the disk was too slow.
    pub dropped: u64,
    /// Blocks and checkpoints that wait to be handed to the writer.
    pub waiting: usize,
    /// Bytes that the writer has not written yet.
    pub pending_bytes: u64,
}

impl DiskStats {
    /// True if everything that is to be kept has been written.
    pub fn has_caught_up(&self) -> bool {
        self.waiting == 0 && self.pending_bytes == 0
    }
}

/// Part of a block that is stored by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    /// K and V of a group.
    Kv(usize),
    /// The checkpoint after the block.
    Checkpoint,
}

/// A stored part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Unit {
    pub key: BlockKey,
    pub part: Part,
}

impl Unit {
    fn item(self) -> Item {
        let part = match self.part {
            Part::Kv(group) => group as u32,
            Part::Checkpoint => u32::MAX,
        };
        Item { key: self.key.bytes(), part }
    }
}

/// Units to be loaded for a sequence.
#[derive(Debug)]
pub(crate) struct LoadRequest {
    /// Request and first branch of the sequence.
    pub owner: (u64, usize),
    pub units: Vec<Unit>,
    /// Time after which computing would have been faster.
    pub budget: Duration,
}

/// The disk tier, as the engine's thread sees it.
#[derive(Debug)]
pub(crate) struct Disk {
    pub space: Space,
    /// Open as long as the engine runs.
    _store: Arc<Store>,
    pub least_tokens: usize,
    /// See [`DiskCache::worth`].
    pub worth: f64,
    pub page_bytes: usize,
    queue: VecDeque<Unit>,
    queued: HashSet<Unit>,
    /// Units that were evicted before they were saved, with their pages, which nothing has written yet.
    evicted: Vec<(Unit, Vec<PageId>)>,
    pub loads: Vec<LoadRequest>,
    pub stats: DiskStats,
}

impl Disk {
    pub fn new(space: Space, cache: &DiskCache, page_bytes: usize) -> Self {
        Self {
            space,
            _store: cache.store.clone(),
            least_tokens: cache.least_tokens,
            worth: cache.worth,
            page_bytes,
            queue: VecDeque::new(),
            queued: HashSet::new(),
            evicted: Vec::new(),
            loads: Vec::new(),
            stats: DiskStats { exists: true, ..DiskStats::default() },
        }
    }

    /// True if the disk has a unit.
    pub fn contains(&self, unit: Unit) -> bool {
        self.space.contains(&unit.item())
    }

    /// Saves a unit some time later, unless the disk has it.
    pub fn save_later(&mut self, unit: Unit) {
        if self.space.is_off() {
            self.queue.clear();
            self.queued.clear();
        } else if !self.queued.contains(&unit) && !self.contains(unit) {
            self.queued.insert(unit);
            self.queue.push_back(unit);
        }
    }

    /// A page of a unit is evicted. Pages of one unit come one after the other, in order.
    pub fn evict(&mut self, unit: Unit, page: PageId) {
        if let Some((last, pages)) = self.evicted.last_mut()
            && *last == unit
        {
            pages.push(page);
        } else if self.queued.remove(&unit) {
            self.evicted.push((unit, vec![page]));
        }
    }

    /// Units whose pages are about to be written.
    pub fn take_evicted(&mut self) -> Vec<(Unit, Vec<PageId>)> {
        std::mem::take(&mut self.evicted)
    }

    /// The next unit that is to be saved.
    pub fn next_save(&mut self) -> Option<Unit> {
        loop {
            let unit = self.queue.pop_front()?;
            if self.queued.remove(&unit) {
                return Some(unit);
            }
        }
    }

    /// Puts a unit that cannot be saved yet back to the end of the queue.
    pub fn put_back(&mut self, unit: Unit) {
        if self.queued.insert(unit) {
            self.queue.push_back(unit);
        }
    }

    /// True if units wait to be saved.
    pub fn has_saves(&self) -> bool {
        !self.queued.is_empty() && !self.space.is_off()
    }

    /// Bytes that the writer takes now.
    pub fn room(&self) -> usize {
        self.space.room()
    }

    /// Hands the bytes of a unit to the writer.
    pub fn save(&mut self, unit: Unit, bytes: Vec<u8>) {
        self.stats.saved += 1;
        self.space.save(&unit.item(), bytes);
    }

    /// Estimated seconds to load this number of pages.
    pub fn seconds(&self, pages: usize) -> f64 {
        (pages * self.page_bytes) as f64 / self.space.read_speed().max(1.0)
    }

    /// Returns the numbers of this moment.
    pub fn numbers(&self) -> DiskStats {
        DiskStats {
            waiting: if self.has_saves() { self.queued.len() } else { 0 },
            pending_bytes: self.space.pending_bytes() as u64,
            ..self.stats
        }
    }

    /// Starts a load. `deliver` is called on another thread.
    pub fn start(&self, load: &LoadRequest, deliver: Box<dyn FnMut(paguro_kv_store::Chunk) + Send>) {
        let items: Vec<Item> = load.units.iter().map(|unit| unit.item()).collect();
        self.space.load(&items, self.page_bytes, load.budget, deliver);
    }
}
