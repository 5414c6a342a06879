//! Tiers of the prefix cache behind the device's pages: memory of the host, and a disk.
//!
//! A prefix that only they have is loaded into pages of the prefix cache, while other sequences run. The sequence is admitted
//! afterwards in the same way as all others, and finds the blocks there.
//!
//! It is loaded only if that is faster than computing it, by the measured speeds of both. A step never waits for a tier:
//! pages are copied between two steps.

use std::time::{Duration, Instant};

use paguro_backend::PageId;
use paguro_kv_store::Item;

use crate::{disk::Disk, host::Host, prefix::BlockKey};

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
    /// Returns its name on disk.
    pub fn item(self) -> Item {
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
    pub from_host: Vec<Unit>,
    pub from_disk: Vec<Unit>,
    /// Time after which computing would have been faster.
    pub budget: Duration,
}

/// A sequence's blocks in the tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Load {
    /// The tiers were not searched since it began to wait.
    #[default]
    Untried,
    /// They are being loaded.
    Loading(Found),
    /// They were loaded into the prefix cache, in this time.
    Loaded(Found, Duration),
    /// There are none, or computing is faster.
    Declined,
}

/// Blocks that a load is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Blocks in the prefix cache before the load.
    pub before: usize,
    /// Blocks that the host has.
    pub from_host: usize,
    /// Blocks of which the disk has a part.
    pub from_disk: usize,
    /// Tokens that need not be computed after the load.
    pub tokens: usize,
    /// Estimated time of computing them.
    pub computing: Duration,
    pub begin: Instant,
}

/// Units that were evicted from the device, with pages that nothing has written yet.
#[derive(Debug)]
pub(crate) struct Evicted {
    pub unit: Unit,
    pub pages: Vec<PageId>,
    /// True if it was to be saved to the disk.
    pub for_disk: bool,
}

/// The tiers, as the engine's thread sees them.
#[derive(Debug)]
pub(crate) struct Tiers {
    pub host: Option<Host>,
    pub disk: Option<Disk>,
    /// Seconds of loading that are worth a second of computing: 1, except in tests.
    pub worth: f64,
    pub page_bytes: usize,
    pub loads: Vec<LoadRequest>,
    evicted: Vec<Evicted>,
}

impl Tiers {
    pub fn new(host: Option<Host>, disk: Option<Disk>, worth: f64, page_bytes: usize) -> Self {
        Self { host, disk, worth, page_bytes, loads: Vec::new(), evicted: Vec::new() }
    }

    /// Returns true if a tier has a unit; `all` includes the disk.
    pub fn contains(&self, unit: Unit, all: bool) -> bool {
        self.host.as_ref().is_some_and(|host| host.contains(&unit))
            || all && self.disk.as_ref().is_some_and(|disk| disk.contains(unit))
    }

    /// Estimated seconds to load these numbers of pages.
    pub fn seconds(&self, host_pages: usize, disk_pages: usize) -> f64 {
        let host = self.host.as_ref().filter(|_| host_pages > 0);
        let disk = self.disk.as_ref().filter(|_| disk_pages > 0);
        host.map_or(0.0, |host| host.seconds(host_pages * self.page_bytes))
            + disk.map_or(0.0, |disk| disk.seconds(disk_pages * self.page_bytes))
    }

    /// A page of a unit is evicted. Pages of one unit come one after the other, in order.
    pub fn evict(&mut self, unit: Unit, page: PageId) {
        if let Some(last) = self.evicted.last_mut()
            && last.unit == unit
        {
            last.pages.push(page);
            return;
        }
        let for_disk = self.disk.as_mut().is_some_and(|disk| disk.unqueue(&unit));
        if for_disk || self.host.as_mut().is_some_and(|host| !host.touch(&unit)) {
            self.evicted.push(Evicted { unit, pages: vec![page], for_disk });
        }
    }

    /// Units whose pages are about to be written.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        std::mem::take(&mut self.evicted)
    }

    /// Forgets what the host has, and what is on its way there.
    pub fn clear_host(&mut self) {
        self.host.iter_mut().for_each(Host::clear);
        self.evicted.retain(|evicted| evicted.for_disk);
    }
}
