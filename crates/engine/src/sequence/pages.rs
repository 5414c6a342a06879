//! Pages of a sequence: reserved before a step, published and released after it.

use paguro_backend::{PageId, PageMove};

use super::{BlockTable, Sequence};
use crate::{layout::BlockLayout, pages::Pages, states::States, tiers::Load};

impl Sequence {
    /// Returns the maximum number of pages to allocate until all tokens are computed, if the sequence begins with
    /// `cached` cached blocks.
    pub fn pages_to_come(&self, cached: usize, layout: &BlockLayout) -> usize {
        let start = self.computed.max(cached * layout.block_size);
        (0..layout.groups())
            .map(|group| {
                let from_cache = cached - layout.first_visible(group, start).min(cached);
                let held = self.tables[group].held().len() + from_cache;
                layout.peak(group, start, self.tokens.len()).saturating_sub(held)
            })
            .sum()
    }

    /// Returns the number of pages of its next block, one for each group, or 0 if it cannot become that long. Branches that
    /// separate also need a copy of the block that they share.
    pub fn headroom(&self, layout: &BlockLayout) -> usize {
        // The last token is never computed.
        let longest = self.request.prompt_tokens + self.request.max_tokens.saturating_sub(1);
        let grows = layout.blocks(longest) > layout.blocks(self.tokens.len());
        if grows || self.branches.len() > 1 { layout.groups() } else { 0 }
    }

    /// Returns the number of pages to allocate for the next `rows` rows: new blocks, and copies of shared pages that
    /// would be written.
    pub fn pages_for(&self, rows: usize, layout: &BlockLayout, pages: &Pages) -> usize {
        let blocks = layout.blocks(self.computed + rows);
        let tail = self.tail(layout);
        self.tables
            .iter()
            .map(|table| {
                let copies = tail.is_some_and(|block| pages.is_shared(table.pages[block]));
                blocks - table.pages.len() + usize::from(copies)
            })
            .sum()
    }

    /// Allocates the pages of the next `rows` rows, and the state that they write. Appends the copies of pages to make before
    /// the step to `moves`. Returns false without allocating if no state is free for a branch that shares one.
    pub fn reserve(
        &mut self,
        rows: usize,
        layout: &BlockLayout,
        pages: &mut Pages,
        states: &mut States,
        moves: &mut Vec<PageMove>,
    ) -> bool {
        let Some(state) = states.reserve(self.state) else { return false };
        self.state = state;
        let blocks = layout.blocks(self.computed + rows);
        let tail = self.tail(layout);
        for table in &mut self.tables {
            if let Some(block) = tail {
                let page = &mut table.pages[block];
                debug_assert!(!pages.is_published(*page), "a full block is never written again");
                if pages.is_shared(*page) {
                    let from = std::mem::replace(page, pages.allocate());
                    moves.push(PageMove::Copy { from, to: *page });
                    pages.release(from);
                }
            }
            table.pages.extend((table.pages.len()..blocks).map(|_| pages.allocate()));
        }
        self.rows = rows;
        true
    }

    /// Returns the block that is partly filled, if there is one: the next row writes it.
    fn tail(&self, layout: &BlockLayout) -> Option<usize> {
        (!self.computed.is_multiple_of(layout.block_size)).then_some(self.computed / layout.block_size)
    }

    /// Returns the number of pages to reserve before the row after the planned ones.
    pub fn pages_ahead(&self, layout: &BlockLayout) -> usize {
        let blocks = layout.blocks(self.computed + self.rows + 1);
        self.tables.iter().map(|table| blocks - table.pages.len()).sum()
    }

    /// Reserves the pages of the row after the planned ones. The page in which the planned rows end belongs to this sequence alone, because they write it.
    pub fn reserve_ahead(&mut self, layout: &BlockLayout, pages: &mut Pages) {
        let blocks = layout.blocks(self.computed + self.rows + 1);
        for table in &mut self.tables {
            table.pages.extend((table.pages.len()..blocks).map(|_| pages.allocate()));
        }
        self.ahead = true;
    }

    /// Marks the planned rows as computed: full blocks enter the cache, and pages that no later row attends to are
    /// released. Returns the number of rows that had not been computed before.
    pub fn advance(&mut self, layout: &BlockLayout, pages: &mut Pages, states: &mut States) -> usize {
        self.state.iter_mut().for_each(|state| states.settle(state));
        self.restoring_steps += u64::from(self.computed < self.reached);
        let size = layout.block_size;
        let complete = self.computed / size..(self.computed + self.rows) / size;
        self.computed += std::mem::take(&mut self.rows);
        for block in complete {
            if self.keys.len() == block {
                let parent = self.keys.last().or(self.root.as_ref());
                let pictures = self.request.pictures.extras(block * size..(block + 1) * size);
                self.keys.extend(pages.key(parent, &self.tokens[block * size..][..size], &pictures));
            }
            let Some(&key) = self.keys.get(block) else { break };
            for (group, table) in self.tables.iter().enumerate() {
                if pages.publish(group, key, table.pages[block]) {
                    self.publish_stored(block, group, size, pages);
                }
            }
        }
        for (group, table) in self.tables.iter_mut().enumerate() {
            let visible = layout.first_visible(group, self.computed).min(table.pages.len());
            for page in &mut table.pages[table.released.min(visible)..visible] {
                pages.release(std::mem::replace(page, PageId::SCRATCH));
            }
            table.released = table.released.max(visible);
        }
        self.drop_computed_pictures();
        let new = self.computed.saturating_sub(self.reached);
        self.reached += new;
        new
    }

    /// Publishes the event that the prefix cache has stored block `block` of a group.
    pub fn publish_stored(&self, block: usize, group: usize, block_size: usize, pages: &mut Pages) {
        if let Some(events) = pages.events.as_mut().filter(|events| events.group == group) {
            let parent = block.checked_sub(1).map(|parent| &self.keys[parent]);
            events.stored(parent, &self.keys[block], &self.tokens[block * block_size..][..block_size]);
        }
    }

    /// Releases its state and all pages. The last blocks are released first, so that the cache evicts them first: a
    /// prefix without its end is more useful than an end without its prefix.
    pub fn release(&mut self, layout: &BlockLayout, pages: &mut Pages, states: &mut States) {
        self.save_later(layout, pages);
        self.state.take().into_iter().for_each(|state| states.release(state));
        let blocks = self.tables.iter().map(|table| table.pages.len()).max().unwrap_or(0);
        for block in (0..blocks).rev() {
            for table in &self.tables {
                if (table.released..table.pages.len()).contains(&block) {
                    pages.release(table.pages[block]);
                }
            }
            self.touch_checkpoint(block, layout, pages);
        }
        self.load = Load::Untried;
        self.checkpoints.clear();
        self.newest_checkpoint = None;
        self.tables.iter_mut().for_each(|table| *table = BlockTable::default());
        self.computed = 0;
        self.encoded.iter_mut().for_each(|rows| *rows = None);
        self.granted = 0;
        self.rows = 0;
        self.ahead = false;
    }

    /// Returns the number of pages that it claims: its own, a fraction of shared ones, and those that its prompt still
    /// needs.
    pub fn claim(&self, layout: &BlockLayout, pages: &Pages) -> f64 {
        let held: f64 = self.held_pages().map(|page| 1.0 / pages.references(page) as f64).sum();
        held + self.pages_to_come(0, layout) as f64
    }

    /// Returns all pages of its block tables.
    pub fn held_pages(&self) -> impl Iterator<Item = PageId> {
        self.tables.iter().flat_map(|table| table.held().iter().copied())
    }
}
