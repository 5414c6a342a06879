//! Blocks of other sequences that a sequence begins with: the search in the prefix cache, and waiting for a sequence that
//! computes the same blocks.

use paguro_backend::PageId;

use super::Sequence;
use crate::{
    layout::BlockLayout,
    pages::Pages,
    tiers::{Part, Unit},
};

impl Sequence {
    /// Returns the number of first blocks that the cache can supply: all of them in groups without a window, the
    /// visible ones in groups with a window, and the state at their end. At least one token is left to compute, and all
    /// tokens that are to be scored.
    pub fn cached_blocks(&self, layout: &BlockLayout, pages: &Pages) -> usize {
        self.blocks_in(layout, |unit| match unit.part {
            Part::Kv(group) => pages.find(group, &unit.key).is_some(),
            Part::Checkpoint => pages.has_checkpoint(&unit.key),
        })
    }

    /// Returns the number of first blocks that a cache with these parts of blocks can supply.
    pub fn blocks_in(&self, layout: &BlockLayout, has: impl Fn(Unit) -> bool) -> usize {
        let keys = &self.kv.keys[..self.reusable_blocks(layout).min(self.kv.keys.len())];
        let has = |part, block: usize| has(Unit { key: keys[block], part });
        let (windowed, full): (Vec<_>, Vec<_>) =
            (0..layout.groups()).partition(|&g| layout.windows[g].is_some());
        let has_all = |block: &usize| full.iter().all(|&group| has(Part::Kv(group), *block));
        let mut blocks = (0..keys.len()).take_while(has_all).count();
        loop {
            if layout.checkpoints.is_some() {
                let has_state = |&blocks: &usize| has(Part::Checkpoint, blocks - 1);
                blocks = (1..=blocks).rev().find(has_state).unwrap_or(0);
            }
            // Every prefix that is longer than the last missing block, and at most as long as this one, would also need
            // that block.
            let Some(missing) = windowed.iter().find_map(|&group| {
                let visible = layout.first_visible(group, blocks * layout.block_size)..blocks;
                visible.rev().find(|&block| !has(Part::Kv(group), block))
            }) else {
                return blocks;
            };
            blocks = missing;
        }
    }

    fn reusable_blocks(&self, layout: &BlockLayout) -> usize {
        let wanted =
            [self.unscored(), self.unembedded()].into_iter().filter(|positions| !positions.is_empty());
        let tokens = wanted.map(|positions| positions.start).fold(self.tokens.len() - 1, usize::min);
        tokens / layout.block_size
    }

    /// Returns true if `other`, which is running, will compute block `block`, which this sequence could then use. For
    /// sequences with states, the block must end with a checkpoint. A block whose last row waits for a mask may come late.
    pub fn could_wait_for(&self, other: &Sequence, block: usize, layout: &BlockLayout) -> bool {
        let block = match (layout.checkpoints, other.next_checkpoint(layout)) {
            (None, _) => block,
            (Some(_), Some(tokens)) if tokens / layout.block_size > block => tokens / layout.block_size - 1,
            (Some(_), _) => return false,
        };
        block < self.reusable_blocks(layout)
            && other.prefills()
            && (other.kv.computed + 1..=other.kv.computed + other.computable())
                .contains(&((block + 1) * layout.block_size))
            && self.kv.keys.get(block).is_some_and(|key| other.kv.keys.get(block) == Some(key))
    }

    /// Returns the number of available pages that [`Sequence::take_cached`] would use.
    pub fn evictable_in_cached(&self, blocks: usize, layout: &BlockLayout, pages: &Pages) -> usize {
        self.cached_pages(blocks, layout, pages).filter(|&(_, _, page)| pages.is_evictable(page)).count()
    }

    /// Begins with the first `blocks` blocks from the cache.
    pub fn take_cached(&mut self, blocks: usize, layout: &BlockLayout, pages: &mut Pages) {
        assert!(self.kv.computed == 0 && self.kv.tables.iter().all(|table| table.pages.is_empty()));
        let found: Vec<_> = self.cached_pages(blocks, layout, pages).collect();
        for table in &mut self.kv.tables {
            table.pages.resize(blocks, PageId::SCRATCH);
            table.released = blocks;
        }
        for (group, block, page) in found {
            pages.share(page);
            self.kv.tables[group].pages[block] = page;
            self.kv.tables[group].released = self.kv.tables[group].released.min(block);
        }
        self.kv.computed = blocks * layout.block_size;
        self.kv.reached = self.kv.reached.max(self.kv.computed);
        self.prefix.cached_tokens.get_or_insert(self.kv.computed);
    }

    fn cached_pages(
        &self,
        blocks: usize,
        layout: &BlockLayout,
        pages: &Pages,
    ) -> impl Iterator<Item = (usize, usize, PageId)> {
        (0..layout.groups()).flat_map(move |group| {
            (layout.first_visible(group, blocks * layout.block_size)..blocks).map(move |block| {
                (group, block, pages.find(group, &self.kv.keys[block]).expect("the block was found"))
            })
        })
    }
}
