//! Allocation of pages for sequences: allocate, share, release. The [`Arena`] counts references, and the [`PrefixCache`]
//! keeps released blocks and checkpoints of states.
//!
//! Branches of a request share the pages of the prompt. A shared page is copied before it is written. Otherwise no K and V
//! are copied on the device.

mod inspect;
mod units;

use paguro_backend::PageId;

use crate::{
    arena::{Arena, State},
    events::Events,
    options::PageOrder,
    prefix::{BlockKey, PrefixCache},
    tiers::{Part, Tiers},
};

/// The arena and the cache in it.
#[derive(Debug)]
pub(crate) struct Pages {
    arena: Arena,
    cache: Option<PrefixCache>,
    /// Other tiers, which receive evicted blocks.
    pub tiers: Option<Tiers>,
    /// Events for routers, if there is a receiver.
    pub events: Option<Events>,
    /// Above this many pages in use or cached, [`Pages::trim`] evicts down to `low_water`.
    high_water: usize,
    low_water: usize,
    /// Number of cached pages evicted since the start.
    pub evictions: u64,
}

/// Numbers of pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageCounts {
    /// Usable pages; scratch is not one.
    pub total: usize,
    pub free: usize,
    /// Pages that only the prefix cache holds.
    pub cached: usize,
}

impl Pages {
    /// Creates an arena of `pages` pages, page 0 included, without a prefix cache.
    pub fn new(pages: usize, order: PageOrder) -> Self {
        Self {
            arena: Arena::new(pages, order),
            cache: None,
            tiers: None,
            events: None,
            high_water: pages,
            low_water: pages,
            evictions: 0,
        }
    }

    /// Adds a prefix cache; the water marks are fractions of the pages.
    pub fn with_cache(mut self, salt: &[u8], low_water: f32, high_water: f32) -> Self {
        let pages = self.arena.usable();
        let mark = |fraction: f32| (pages as f64 * f64::from(fraction)) as usize;
        self.cache = Some(PrefixCache::new(pages + 1, salt));
        self.high_water = mark(high_water);
        self.low_water = mark(low_water);
        self
    }

    /// Returns true if there is a prefix cache.
    pub fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    /// Returns the numbers of pages by state.
    pub fn counts(&self) -> PageCounts {
        PageCounts { total: self.arena.usable(), free: self.arena.free(), cached: self.evictable() }
    }

    /// Returns the number of pages that [`Pages::allocate`] can allocate, including evictions.
    pub fn available(&self) -> usize {
        self.arena.free() + self.evictable()
    }

    /// Returns the number of pages that the cache could evict now.
    fn evictable(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::evictable)
    }

    /// Returns the parent of first blocks of texts with this salt and these adapters; `None` without a prefix cache, or for
    /// the empty salt without adapters.
    pub fn root(&self, salt: &[u8], adapters: Option<&[u8; 32]>) -> Option<BlockKey> {
        self.plain_root()?.salted(salt, adapters)
    }

    /// Returns the parent of first blocks of texts without salt and adapters; `None` without a prefix cache.
    pub fn plain_root(&self) -> Option<BlockKey> {
        self.cache.as_ref().map(PrefixCache::root)
    }

    /// Returns the key of the block with these tokens and pictures after the block `parent`, or of a first block; `None` without a
    /// prefix cache.
    pub fn key(
        &self,
        parent: Option<&BlockKey>,
        tokens: &[u32],
        pictures: &[([u8; 32], i64)],
    ) -> Option<BlockKey> {
        Some(self.cache.as_ref()?.key(parent, tokens, pictures))
    }

    /// Allocates a page for one block table.
    ///
    /// # Panics
    /// If none is [`available`](Pages::available).
    pub fn allocate(&mut self) -> PageId {
        if self.arena.free() == 0 {
            self.evict();
        }
        self.arena.allocate().expect("the scheduler allocates only pages that are available")
    }

    /// Adds a reference of a block table to this page, which another table or the cache holds.
    pub fn share(&mut self, page: PageId) {
        self.arena.share(page);
        if let Some(cache) = &mut self.cache {
            cache.used(page);
        }
    }

    /// Removes a reference of a block table to this page.
    pub fn release(&mut self, page: PageId) {
        if self.arena.release(page) {
            let kept = self.cache.as_mut().is_some_and(|cache| cache.unused(page));
            if kept { self.arena.keep(page) } else { self.arena.free_page(page) }
        }
    }

    /// Returns true if another block table also refers to the page, so that it must be copied before it is written.
    pub fn is_shared(&self, page: PageId) -> bool {
        self.references(page) > 1
    }

    /// Returns the number of block tables that refer to the page.
    pub fn references(&self, page: PageId) -> usize {
        match self.arena.state(page) {
            State::Held(references) => references as usize,
            other => panic!("page {page:?} is in a block table but {other:?}"),
        }
    }

    /// Returns true if the cache could evict the page now.
    pub fn is_evictable(&self, page: PageId) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.is_unused(page))
    }

    /// Returns true if the cache contains the page: it is full and must not be written again.
    pub fn is_published(&self, page: PageId) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.contains(page))
    }

    /// Adds a full block to the cache. Returns true if the cache did not have it.
    pub fn publish(&mut self, group: usize, key: BlockKey, page: PageId) -> bool {
        self.cache.as_mut().is_some_and(|cache| cache.publish(group, key, page))
    }

    /// Returns the page of a block in the cache.
    pub fn find(&self, group: usize, key: &BlockKey) -> Option<PageId> {
        self.cache.as_ref()?.find(group, key)
    }

    /// Keeps some pages free: above the high water mark, evicts down to the low one, as far as it can.
    pub fn trim(&mut self) {
        let counts = self.counts();
        if counts.total - counts.free > self.high_water {
            while self.arena.usable() - self.arena.free() > self.low_water && self.evict() {}
        }
    }

    /// Evicts the least recently used block or checkpoint. Returns false if there is none.
    fn evict(&mut self) -> bool {
        let Self { arena, cache, tiers, events, evictions, .. } = self;
        cache.as_mut().is_some_and(|cache| {
            cache.evict(|unit, page| {
                if let Some(tiers) = tiers {
                    tiers.evict(unit, page);
                }
                if let Some(events) = events.as_mut().filter(|events| unit.part == Part::Kv(events.group)) {
                    events.evicted(&unit.key);
                }
                arena.free_page(page);
                *evictions += 1;
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published(pages: &mut Pages, name: u32) -> PageId {
        let page = pages.allocate();
        pages.publish(0, BlockKey::root(b"").child(&[name], &[]), page);
        page
    }

    #[test]
    fn cached_pages_are_available_and_go_when_needed() {
        let mut pages = Pages::new(4, PageOrder::InOrder).with_cache(b"", 1.0, 1.0);
        let all: Vec<_> = (0..3).map(|name| published(&mut pages, name)).collect();
        assert_eq!(pages.available(), 0);
        pages.release(all[1]);
        assert_eq!(pages.counts(), PageCounts { total: 3, free: 0, cached: 1 });
        assert_eq!(pages.allocate(), all[1]);
        assert_eq!(pages.evictions, 1);
        assert_eq!(pages.find(0, &BlockKey::root(b"").child(&[1], &[])), None);
        assert_eq!(pages.check(all.into_iter()), Ok(()));
    }

    #[test]
    fn a_cleared_cache_gives_pages_in_order_again() {
        let mut pages = Pages::new(4, PageOrder::InOrder).with_cache(b"", 1.0, 1.0);
        let all: Vec<_> = (0..3).map(|name| published(&mut pages, name)).collect();
        pages.release(all[2]);
        pages.release(all[0]);
        pages.clear_cache();
        assert_eq!(pages.counts(), PageCounts { total: 3, free: 2, cached: 0 });
        // The one in use stays findable.
        assert_eq!(pages.find(0, &BlockKey::root(b"").child(&[1], &[])), Some(all[1]));
        assert_eq!([pages.allocate(), pages.allocate()], [all[0], all[2]]);
    }

    #[test]
    fn water_marks_bound_what_the_cache_keeps() {
        let mut pages = Pages::new(11, PageOrder::InOrder).with_cache(b"", 0.5, 0.8);
        let held: Vec<_> = (0..9).map(|name| published(&mut pages, name)).collect();
        pages.trim();
        assert_eq!(pages.evictions, 0, "nothing to evict yet");
        for &page in &held[..6] {
            pages.release(page);
        }
        pages.trim();
        assert_eq!(pages.counts(), PageCounts { total: 10, free: 5, cached: 2 });
        assert_eq!(pages.evictions, 4);
        pages.release(held[6]);
        pages.trim();
        assert_eq!(pages.evictions, 4, "below the high mark nothing is evicted");
    }

    #[test]
    fn without_a_cache_released_pages_are_free() {
        let mut pages = Pages::new(3, PageOrder::InOrder);
        let page = published(&mut pages, 1);
        pages.release(page);
        assert_eq!(pages.counts(), PageCounts { total: 2, free: 2, cached: 0 });
        assert_eq!(pages.find(0, &BlockKey::root(b"").child(&[1], &[])), None);
    }
}
