//! Views of all pages for events and counts, and the end of the cache.

use paguro_backend::PageId;

use super::Pages;
use crate::{
    events::{BlockSet, Events, Medium},
    prefix::PrefixCache,
    tiers::{Part, Tiers},
};

impl Pages {
    /// Returns the pages that only the prefix cache holds, in ascending order.
    pub fn cached(&self) -> impl Iterator<Item = PageId> {
        self.arena.kept()
    }

    /// Sends events of the removal of all blocks, which end with the engine.
    pub fn send_end(&mut self) {
        let (Some(events), Some(cache)) = (&mut self.events, &self.cache) else { return };
        cache.keys(events.group).for_each(|key| events.evicted(key));
        send_host_end(self.tiers.as_ref(), events);
        events.send();
    }

    /// Returns the blocks of a group in the cache.
    pub fn blocks(&self, group: usize) -> BlockSet {
        self.cache.as_ref().map_or_else(BlockSet::default, |cache| cache.blocks(group))
    }

    /// Evicts every cached block that no sequence uses, also those in memory of the host.
    pub fn clear_cache(&mut self) {
        while self.evict() {}
        if let Some(events) = &mut self.events {
            send_host_end(self.tiers.as_ref(), events);
        }
        self.tiers.iter_mut().for_each(Tiers::clear_host);
    }

    /// Recounts everything against the block-table entries of all sequences, scratch entries left out.
    pub fn check(&self, entries: impl Iterator<Item = PageId>) -> Result<(), String> {
        if let Some(cache) = &self.cache {
            cache.check()?;
        }
        if let Some(host) = self.tiers.as_ref().and_then(|tiers| tiers.host.as_ref()) {
            host.check()?;
        }
        self.arena.check(entries, self.cache.iter().flat_map(PrefixCache::unused_pages))
    }
}

/// Adds events of the removal of all blocks from memory of the host.
fn send_host_end(tiers: Option<&Tiers>, events: &mut Events) {
    let units = tiers.and_then(|tiers| tiers.host.as_ref()).into_iter().flat_map(|host| host.units());
    for unit in units.filter(|unit| unit.part == Part::Kv(events.group)).copied().collect::<Vec<_>>() {
        events.removed(&unit.key, Medium::Host);
    }
}
