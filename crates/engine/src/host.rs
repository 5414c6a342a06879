//! The host tier of the prefix cache: blocks and checkpoints that were evicted from the device, in memory of the host.
//!
//! It is of use where K and V are in memory of a device. A block is copied when it is evicted, and pages of sequences that lost their
//! place come back from here.
//!
//! A block is copied before the next step writes its page. All engines share one bound of memory, and each evicts its
//! least recently used blocks.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    events::BlockSet,
    tiers::{Part, Unit},
};

/// Assumed read speed of a device in bytes per second, before the first measurement.
const FIRST_SPEED: f64 = 2e9;
/// Weight of the newest measurement of a speed.
const RATE: f64 = 0.3;

/// Memory for evicted blocks, which several engines share.
#[derive(Debug)]
pub struct HostMemory {
    bytes: u64,
    used: AtomicU64,
}

impl HostMemory {
    /// At most `bytes` bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes, used: AtomicU64::new(0) })
    }

    fn reserve(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.bytes);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Statistics of the host tier. Gauges are current values; counters begin at the start of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStats {
    /// True if there is a host tier.
    pub exists: bool,
    /// Bytes that it may have, together with those of other engines.
    pub limit: u64,
    /// Bytes in it.
    pub bytes: u64,
    /// Blocks and checkpoints in it.
    pub units: usize,
    /// Tokens whose K and V came from it.
    pub hit_tokens: u64,
    /// Loads from it.
    pub loads: u64,
    /// Loads that were not begun because computing was faster.
    pub declined: u64,
    /// Blocks and checkpoints that were copied to it.
    pub stored: u64,
    /// Blocks and checkpoints that it had no room for, or could not be read from the device.
    pub dropped: u64,
    /// Bytes that were copied back to the device.
    pub loaded_bytes: u64,
    /// Bytes per second from the host to the device, as measured.
    pub load_speed: u64,
    /// Bytes per second from the device to the host, as measured.
    pub store_speed: u64,
    /// Estimated time of computing what was loaded, less the time of the loads.
    pub saved_nanoseconds: u64,
}

impl HostStats {
    /// Returns the sums of the numbers of two engines. They share the limit; speeds are those of the faster one.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            exists: self.exists || other.exists,
            limit: self.limit.max(other.limit),
            bytes: self.bytes + other.bytes,
            units: self.units + other.units,
            hit_tokens: self.hit_tokens + other.hit_tokens,
            loads: self.loads + other.loads,
            declined: self.declined + other.declined,
            stored: self.stored + other.stored,
            dropped: self.dropped + other.dropped,
            loaded_bytes: self.loaded_bytes + other.loaded_bytes,
            load_speed: self.load_speed.max(other.load_speed),
            store_speed: self.store_speed.max(other.store_speed),
            saved_nanoseconds: self.saved_nanoseconds + other.saved_nanoseconds,
        }
    }
}

/// The host tier of an engine.
#[derive(Debug)]
pub(crate) struct Host {
    memory: Arc<HostMemory>,
    units: HashMap<Unit, Stored>,
    /// The longest unused first.
    uses: BTreeMap<u64, Unit>,
    clock: u64,
    /// Of all units.
    bytes: u64,
    /// Blocks by group.
    blocks: Vec<BlockSet>,
    pub stats: HostStats,
}

#[derive(Debug)]
struct Stored {
    bytes: Arc<Vec<u8>>,
    used: u64,
}

impl Host {
    pub fn new(memory: Arc<HostMemory>) -> Self {
        let speed = FIRST_SPEED as u64;
        let stats = HostStats {
            exists: true,
            limit: memory.bytes,
            load_speed: speed,
            store_speed: speed,
            ..HostStats::default()
        };
        Self {
            memory,
            units: HashMap::new(),
            uses: BTreeMap::new(),
            clock: 0,
            bytes: 0,
            blocks: Vec::new(),
            stats,
        }
    }

    pub fn contains(&self, unit: &Unit) -> bool {
        self.units.contains_key(unit)
    }

    /// Returns the blocks of a group.
    pub fn blocks(&self, group: usize) -> BlockSet {
        self.blocks.get(group).copied().unwrap_or_default()
    }

    /// Returns all units, in no order.
    pub fn units(&self) -> impl Iterator<Item = &Unit> {
        self.units.keys()
    }

    /// Makes a unit the last one that was used. Returns false if it is not here.
    pub fn touch(&mut self, unit: &Unit) -> bool {
        let Some(stored) = self.units.get_mut(unit) else { return false };
        self.uses.remove(&stored.used);
        self.clock += 1;
        stored.used = self.clock;
        self.uses.insert(stored.used, *unit);
        true
    }

    /// Returns the bytes of a unit, which is then the last one that was used.
    pub fn get(&mut self, unit: &Unit) -> Option<Arc<Vec<u8>>> {
        self.touch(unit);
        self.units.get(unit).map(|stored| stored.bytes.clone())
    }

    /// Stores a unit. The least recently used ones are evicted for it, and passed to `evicted`. Returns true if the unit is new.
    pub fn put(&mut self, unit: Unit, bytes: Arc<Vec<u8>>, mut evicted: impl FnMut(Unit)) -> bool {
        if self.contains(&unit) {
            return false;
        }
        let size = bytes.len() as u64;
        while size > self.memory.bytes || !self.memory.reserve(size) {
            let oldest = self.uses.first_key_value().map(|(_, unit)| *unit);
            let Some(oldest) = oldest.filter(|_| size <= self.memory.bytes) else {
                // Other engines have the memory.
                self.stats.dropped += 1;
                return false;
            };
            self.remove(&oldest);
            evicted(oldest);
        }
        self.clock += 1;
        self.uses.insert(self.clock, unit);
        self.units.insert(unit, Stored { bytes, used: self.clock });
        self.bytes += size;
        if let Part::Kv(group) = unit.part {
            if self.blocks.len() <= group {
                self.blocks.resize(group + 1, BlockSet::default());
            }
            self.blocks[group].insert(&unit.key);
        }
        self.stats.stored += 1;
        true
    }

    fn remove(&mut self, unit: &Unit) {
        if let Some(Stored { bytes, used }) = self.units.remove(unit) {
            self.uses.remove(&used);
            if let Part::Kv(group) = unit.part {
                self.blocks[group].remove(&unit.key);
            }
            self.bytes -= bytes.len() as u64;
            self.memory.release(bytes.len() as u64);
        }
    }

    /// Removes all units.
    pub fn clear(&mut self) {
        self.uses.clear();
        self.units.clear();
        self.blocks.clear();
        self.memory.release(std::mem::take(&mut self.bytes));
    }

    /// Estimated seconds to load this number of bytes.
    pub fn seconds(&self, bytes: usize) -> f64 {
        bytes as f64 / self.stats.load_speed.max(1) as f64
    }

    /// `bytes` bytes went to the device in this time.
    pub fn record_load(&mut self, bytes: usize, time: Duration) {
        self.stats.loaded_bytes += bytes as u64;
        self.stats.load_speed = mean(self.stats.load_speed, bytes, time);
    }

    /// `bytes` bytes came from the device in this time.
    pub fn record_store(&mut self, bytes: usize, time: Duration) {
        self.stats.store_speed = mean(self.stats.store_speed, bytes, time);
    }

    /// Returns the numbers of this moment.
    pub fn numbers(&self) -> HostStats {
        HostStats { bytes: self.bytes, units: self.units.len(), ..self.stats }
    }

    /// Compares the views of the units.
    pub fn check(&self) -> Result<(), String> {
        let agrees = |(used, unit): (&u64, &Unit)| self.units.get(unit).is_some_and(|it| it.used == *used);
        if self.uses.len() != self.units.len() || !self.uses.iter().all(agrees) {
            return Err("the host tier's order of uses is wrong".into());
        }
        if self.units.values().map(|stored| stored.bytes.len() as u64).sum::<u64>() != self.bytes {
            return Err(format!("the host tier counts {} bytes", self.bytes));
        }
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Returns the mean of times, so that a slow copy counts as long as it took.
fn mean(speed: u64, bytes: usize, time: Duration) -> u64 {
    let newest = time.as_secs_f64().max(1e-9) / bytes.max(1) as f64;
    (1.0 / ((1.0 - RATE) / speed.max(1) as f64 + RATE * newest)) as u64
}
