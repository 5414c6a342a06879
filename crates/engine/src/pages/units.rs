//! Checkpoints of states, and parts of blocks that other tiers have.

use paguro_backend::PageId;

use super::Pages;
use crate::{
    prefix::{BlockKey, PrefixCache},
    tiers::{Part, Unit},
};

impl Pages {
    /// Reserves `count` pages for a checkpoint after a block of a running sequence. Returns `None` if the checkpoint
    /// exists, which marks it as recently used, or if there is no room.
    pub fn keep_checkpoint(&mut self, key: BlockKey, count: usize) -> Option<Vec<PageId>> {
        self.cache.as_mut()?.touch_checkpoint(&key);
        if self.has_checkpoint(&key) || self.available() < count {
            return None;
        }
        let pages: Vec<_> = (0..count).map(|_| self.allocate()).collect();
        pages.iter().for_each(|&page| self.arena.keep(page));
        self.cache.as_mut()?.keep_checkpoint(key, pages.clone());
        Some(pages)
    }

    /// Returns true if there is a checkpoint after this block.
    pub fn has_checkpoint(&self, key: &BlockKey) -> bool {
        self.checkpoint(key).is_some()
    }

    /// Returns the pages of the checkpoint after this block, in order. Moves that read them precede all later planned
    /// moves, so they may be evicted at once.
    pub fn checkpoint(&self, key: &BlockKey) -> Option<&[PageId]> {
        self.cache.as_ref()?.checkpoint(key)
    }

    /// Returns the number of checkpoints.
    pub fn checkpoints(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::checkpoints)
    }

    /// Makes a checkpoint the last one that was used, if it exists.
    pub fn touch_checkpoint(&mut self, key: &BlockKey) {
        if let Some(cache) = &mut self.cache {
            cache.touch_checkpoint(key);
        }
    }

    /// Evicts a checkpoint, if it exists.
    pub fn forget_checkpoint(&mut self, key: &BlockKey) {
        let Self { arena, cache, .. } = self;
        if let Some(cache) = cache {
            cache.forget_checkpoint(key, |page| arena.free_page(page));
        }
    }

    /// Returns the pages of a part of a block, if the cache has it.
    pub fn pages_of(&self, unit: Unit) -> Option<Vec<PageId>> {
        match unit.part {
            Part::Kv(group) => self.find(group, &unit.key).map(|page| vec![page]),
            Part::Checkpoint => self.checkpoint(&unit.key).map(<[PageId]>::to_vec),
        }
    }

    /// Allocates pages for a part of a block that is loaded, and adds it to the cache. `None` if the cache contains it,
    /// or if there are too few pages.
    pub fn place(&mut self, unit: Unit, count: usize) -> Option<Vec<PageId>> {
        if self.pages_of(unit).is_some() || self.available() < count {
            return None;
        }
        match unit.part {
            Part::Kv(group) => {
                let page = self.allocate();
                self.publish(group, unit.key, page);
                self.release(page);
                Some(vec![page])
            }
            Part::Checkpoint => self.keep_checkpoint(unit.key, count),
        }
    }

    /// Marks unused parts of blocks as recently used.
    pub fn refresh(&mut self, units: impl Iterator<Item = Unit>) {
        let Some(cache) = &mut self.cache else { return };
        for unit in units {
            match unit.part {
                Part::Kv(group) => {
                    if let Some(page) = cache.find(group, &unit.key).filter(|page| cache.is_unused(*page)) {
                        cache.used(page);
                        cache.unused(page);
                    }
                }
                Part::Checkpoint => cache.touch_checkpoint(&unit.key),
            }
        }
    }

    /// Forgets a part of a block whose pages could not be filled.
    pub fn forget(&mut self, unit: Unit) {
        match unit.part {
            Part::Kv(group) => {
                let Self { arena, cache, events, .. } = self;
                if let Some(page) = cache.as_mut().and_then(|cache| cache.forget(group, &unit.key)) {
                    arena.free_page(page);
                    if let Some(events) = events.as_mut().filter(|events| events.group == group) {
                        events.evicted(&unit.key);
                    }
                }
            }
            Part::Checkpoint => self.forget_checkpoint(&unit.key),
        }
    }
}
