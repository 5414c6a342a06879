//! The disk tier of the prefix cache: what is worth saving, and when.
//!
//! Blocks and checkpoints are saved when their sequence ends or loses its place. They stay in the arena as long as nobody needs
//! their pages, so copying them out can wait: the engine copies a few after each step, and all that are left when it has nothing to do. One
//! that is evicted first is copied before the next step writes its page.
//!
//! `paguro_kv_store` writes and reads on its own threads, within a bound of space, and deletes the least recently used
//! items. The tier opens when the digest of the model's files is known, so that no page of another model is read. Until
//! then, items wait in pages of the device.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use paguro_kv_store::{Chunk, Id, Item, ModelInfo, Space, Store};

use crate::{
    events::{BlockSet, Events, Medium},
    prefix::BlockKey,
    tiers::{LoadRequest, Part, Unit},
};

/// A store on disk that an engine uses for its pages.
#[derive(Clone, Debug)]
pub struct DiskCache {
    /// The store.
    pub store: Arc<Store>,
    /// Digest of the model's files: models with one name and other weights must not share pages. `None` if it is not known yet;
    /// nothing is loaded or saved until [`Handle::set_weights_digest`](crate::Handle::set_weights_digest).
    pub weights: Option<Vec<u8>>,
    /// Name of the model, for people.
    pub model: String,
    /// Tokens that a sequence must have for its pages to be saved.
    pub least_tokens: usize,
    /// Seconds of loading that are worth a second of computing: 1, except in tests.
    pub worth: f64,
}

impl DiskCache {
    /// Returns a store for a model with this digest of its files, if it is known.
    pub fn new(store: Arc<Store>, model: &str, weights: Option<&[u8]>) -> Self {
        let (weights, model) = (weights.map(<[u8]>::to_vec), model.to_owned());
        Self { store, weights, model, least_tokens: LEAST_TOKENS, worth: 1.0 }
    }
}

/// Default of [`DiskCache::least_tokens`].
pub const LEAST_TOKENS: usize = 256;

/// Statistics of the disk tier. Gauges are current values; counters begin at the start of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// True if there is a disk tier.
    pub exists: bool,
    /// True if it waits for the digest of the model's files.
    pub is_opening: bool,
    /// Tokens of prompts whose K and V came from the disk.
    pub hit_tokens: u64,
    /// Loads that were begun.
    pub loads: u64,
    /// Loads that were not begun because computing was faster.
    pub declined: u64,
    /// Blocks and checkpoints that were queued for the writer.
    pub saved: u64,
    /// Blocks and checkpoints that were evicted before they were saved, because the disk was too slow.
    pub dropped: u64,
    /// Blocks and checkpoints that wait for space in the writer's queue.
    pub waiting: usize,
    /// Bytes that the writer has not written yet.
    pub pending_bytes: u64,
    /// Bytes that were loaded.
    pub loaded_bytes: u64,
    /// Bytes per second that the disk reads, as measured.
    pub load_speed: u64,
    /// Bytes per second that the disk writes, as measured.
    pub store_speed: u64,
    /// Estimated time of computing what was loaded, less the time of the loads.
    pub saved_nanoseconds: u64,
}

impl DiskStats {
    /// Returns the sums of the numbers of two engines. They share the writer's queue and its speeds.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            exists: self.exists || other.exists,
            is_opening: self.is_opening || other.is_opening,
            hit_tokens: self.hit_tokens + other.hit_tokens,
            loads: self.loads + other.loads,
            declined: self.declined + other.declined,
            saved: self.saved + other.saved,
            dropped: self.dropped + other.dropped,
            waiting: self.waiting + other.waiting,
            pending_bytes: self.pending_bytes.max(other.pending_bytes),
            loaded_bytes: self.loaded_bytes + other.loaded_bytes,
            load_speed: self.load_speed.max(other.load_speed),
            store_speed: self.store_speed.max(other.store_speed),
            saved_nanoseconds: self.saved_nanoseconds + other.saved_nanoseconds,
        }
    }

    /// Returns true if all saved units have been written.
    pub fn has_caught_up(&self) -> bool {
        !self.is_opening && self.waiting == 0 && self.pending_bytes == 0
    }
}

/// Everything that the contents of a model's pages depend on besides its weights and the tokens.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// The lowered program.
    pub program: String,
    /// The page format and its name for people.
    pub info: ModelInfo,
    /// Block size and bytes of a page.
    pub shape: String,
}

/// The disk tier, as the engine's thread sees it.
#[derive(Debug)]
pub(crate) struct Disk {
    /// `None` until the digest of the weights is known.
    space: Option<Space>,
    /// Open as long as the engine runs.
    store: Arc<Store>,
    identity: Identity,
    pub least_tokens: usize,
    queue: VecDeque<Unit>,
    queued: HashSet<Unit>,
    /// True if there are events.
    pub reports: bool,
    /// Blocks that were published in events, by the names of their items.
    told: HashMap<Id, BlockKey>,
    /// The same blocks.
    blocks: BlockSet,
    /// Units that the disk already had when they were to be saved: other processes have written them, or an earlier one.
    found: Vec<Unit>,
    pub stats: DiskStats,
}

impl Disk {
    pub fn new(cache: &DiskCache, identity: Identity) -> Self {
        let mut disk = Self {
            space: None,
            store: cache.store.clone(),
            identity,
            least_tokens: cache.least_tokens,
            queue: VecDeque::new(),
            queued: HashSet::new(),
            reports: false,
            told: HashMap::new(),
            blocks: BlockSet::default(),
            found: Vec::new(),
            stats: DiskStats { exists: true, ..DiskStats::default() },
        };
        if let Some(weights) = &cache.weights {
            disk.open(weights);
        }
        disk
    }

    /// Uses the items of the model with this digest of its files.
    pub fn open(&mut self, weights: &[u8]) {
        let Identity { program, info, shape } = &self.identity;
        let identity = [weights, program.as_bytes(), info.format.as_bytes(), shape.as_bytes()];
        self.space = Some(self.store.space(&identity, info));
    }

    /// Returns the items of this model, as soon as the digest of its weights is known.
    pub fn space(&self) -> Option<&Space> {
        self.space.as_ref()
    }

    /// Returns true if the disk has a unit.
    pub fn contains(&self, unit: Unit) -> bool {
        self.space.as_ref().is_some_and(|space| space.contains(&unit.item()))
    }

    pub fn is_off(&self) -> bool {
        self.space.as_ref().is_some_and(Space::is_off)
    }

    /// Saves a unit some time later, unless the disk has it.
    pub fn save_later(&mut self, unit: Unit) {
        if self.is_off() {
            self.queue.clear();
            self.queued.clear();
        } else if self.contains(unit) {
            if self.reports && matches!(unit.part, Part::Kv(_)) {
                self.found.push(unit);
            }
        } else if self.queued.insert(unit) {
            self.queue.push_back(unit);
        }
    }

    /// Takes a unit out of the queue. Returns false if it is not there.
    pub fn unqueue(&mut self, unit: &Unit) -> bool {
        self.queued.remove(unit)
    }

    /// Returns the next unit that is to be saved.
    pub fn next_save(&mut self) -> Option<Unit> {
        loop {
            let unit = self.queue.pop_front()?;
            if self.queued.remove(&unit) && !self.contains(unit) {
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

    /// Returns true if units can be saved now.
    pub fn has_saves(&self) -> bool {
        !self.queued.is_empty() && self.space.is_some() && !self.is_off()
    }

    /// Returns the number of bytes that the writer's queue accepts now.
    pub fn room(&self) -> usize {
        self.space.as_ref().map_or(0, Space::room)
    }

    /// Returns the number of bytes that wait to be written.
    pub fn pending_bytes(&self) -> usize {
        self.space.as_ref().map_or(0, Space::pending_bytes)
    }

    /// Queues the bytes of a unit for the writer.
    pub fn save(&mut self, unit: Unit, bytes: Arc<Vec<u8>>, mut events: Option<&mut Events>) {
        if let Some(events) = &mut events {
            // The block may have been removed before: that is reported before its return.
            self.report(events);
        }
        let Some(space) = &self.space else { return };
        self.stats.saved += 1;
        space.save(&unit.item(), bytes);
        if let Some(events) = events
            && unit.part == Part::Kv(events.group)
        {
            space.watch();
            if self.told.insert(space.id(&unit.item()), unit.key).is_none() {
                self.blocks.insert(&unit.key);
                events.copied(&unit.key, Medium::Disk);
            }
        }
    }

    /// Adds the events of blocks that the disk had before, and of those that it has no more.
    pub fn report(&mut self, events: &mut Events) {
        for unit in std::mem::take(&mut self.found) {
            let Some(space) = &self.space else { return };
            let id = space.id(&unit.item());
            // Removals are noted before the item is looked up, so that none is missed.
            space.watch();
            let is_new = unit.part == Part::Kv(events.group) && !self.told.contains_key(&id);
            if is_new && space.contains(&unit.item()) {
                self.told.insert(id, unit.key);
                self.blocks.insert(&unit.key);
                events.copied(&unit.key, Medium::Disk);
            }
        }
        for key in self.take_removed() {
            self.blocks.remove(&key);
            events.removed(&key, Medium::Disk);
        }
    }

    /// Returns the blocks that were published in events.
    pub fn blocks(&self) -> BlockSet {
        self.blocks
    }

    /// Returns published blocks that the disk has no more.
    fn take_removed(&mut self) -> Vec<BlockKey> {
        let Some(space) = self.space.as_ref().filter(|_| !self.told.is_empty()) else { return Vec::new() };
        if space.is_off() {
            return self.told.drain().map(|(_, key)| key).collect();
        }
        space.take_removed().iter().filter_map(|id| self.told.remove(id)).collect()
    }

    /// Estimated seconds to load this number of bytes.
    pub fn seconds(&self, bytes: usize) -> f64 {
        let Some(space) = &self.space else { return f64::INFINITY };
        bytes as f64 / space.read_speed().max(1.0)
    }

    /// Computing was faster than loading. It will be tried again after some time.
    pub fn decline(&mut self) {
        self.stats.declined += 1;
        self.space.iter().for_each(Space::decline);
    }

    /// Returns the numbers of this moment.
    pub fn numbers(&self) -> DiskStats {
        let speeds = self.space.as_ref().map_or((0.0, 0.0), |it| (it.read_speed(), it.write_speed()));
        DiskStats {
            load_speed: speeds.0 as u64,
            store_speed: speeds.1 as u64,
            is_opening: self.space.is_none(),
            waiting: if self.is_off() { 0 } else { self.queued.len() },
            pending_bytes: self.pending_bytes() as u64,
            ..self.stats
        }
    }

    /// Starts a load of units of about `item_bytes` bytes. `deliver` is called on another thread.
    pub fn start(&self, load: &LoadRequest, item_bytes: usize, deliver: Box<dyn FnMut(Chunk) + Send>) {
        let items: Vec<Item> = load.from_disk.iter().map(|unit| unit.item()).collect();
        if let Some(space) = &self.space {
            space.load(&items, item_bytes, load.budget, deliver);
        }
    }
}
