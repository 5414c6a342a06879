//! K, V and state of the computed tokens: block tables, keys of blocks, and the state slot. Pages are reserved before a
//! step, published and released after it.

mod ahead;
mod branches;

use std::sync::Arc;

use paguro_backend::{PageId, PageMove, StateUse};

use crate::{
    events::ExtraKey, layout::BlockLayout, pages::Pages, pictures::Pictures, prefix::BlockKey, states::States,
};

/// Pages of one group, by block.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockTable {
    /// The first `released` entries are [`PageId::SCRATCH`]: the window has left them behind.
    pub pages: Vec<PageId>,
    pub released: usize,
}

impl BlockTable {
    pub fn held(&self) -> &[PageId] {
        &self.pages[self.released..]
    }
}

/// Pages and the state of a sequence, and their keys in the prefix cache.
#[derive(Debug)]
pub(crate) struct KvState {
    /// Number of tokens whose K and V are in the pages.
    pub computed: usize,
    /// The largest value that `computed` has had.
    pub reached: usize,
    /// Block tables of the KV groups; between steps each has `blocks(computed)` entries.
    pub tables: Vec<BlockTable>,
    /// State after the computed tokens, or in a planned step after the planned rows; it may be shared with other
    /// branches of the request. `None` before the first step, and for models without states.
    pub state: Option<StateUse>,
    /// Salt of the keys, which events of the first block carry.
    salt: Arc<[u8]>,
    /// Name of the adapters, which events of all blocks carry.
    adapter: Option<Arc<str>>,
    /// Parent of the first block's key; `None` without a prefix cache, or for the empty salt without adapters.
    pub root: Option<BlockKey>,
    /// Keys of the first full blocks: at least those of the prompt and of computed blocks. Empty without a prefix
    /// cache.
    pub keys: Vec<BlockKey>,
    /// Checkpoints that the sequence has made or begun with, by their numbers of tokens, in order.
    pub checkpoints: Vec<usize>,
    /// The last of these, if the next one replaces it.
    pub newest_checkpoint: Option<usize>,
    /// True if the pages are not saved, because they led to values that are not finite.
    pub is_suspect: bool,
}

impl KvState {
    /// Returns all pages of the block tables.
    pub fn held_pages(&self) -> impl Iterator<Item = PageId> {
        self.tables.iter().flat_map(|table| table.held().iter().copied())
    }

    /// Returns the maximum number of pages to allocate until `tokens` tokens are computed, if the sequence begins with
    /// `cached` cached blocks.
    pub fn pages_to_come(&self, cached: usize, tokens: usize, layout: &BlockLayout) -> usize {
        let start = self.computed.max(cached * layout.block_size);
        (0..layout.groups())
            .map(|group| {
                let from_cache = cached - layout.first_visible(group, start).min(cached);
                let held = self.tables[group].held().len() + from_cache;
                layout.peak(group, start, tokens).saturating_sub(held)
            })
            .sum()
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

    /// Allocates the pages of the next `rows` rows, and the state that they write. Appends the copies of pages to make
    /// before the step to `moves`. Returns false without allocating if no state is free for a branch that shares one.
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
        true
    }

    /// Returns the block that is partly filled, if there is one: the next row writes it.
    fn tail(&self, layout: &BlockLayout) -> Option<usize> {
        (!self.computed.is_multiple_of(layout.block_size)).then_some(self.computed / layout.block_size)
    }

    /// Returns true if tokens that a preemption has lost are not computed again yet.
    pub fn restores(&self) -> bool {
        self.computed < self.reached
    }

    /// Marks the next `rows` tokens of `tokens` as computed: full blocks enter the cache, and pages that no later row
    /// attends to are released. Returns the number of rows that had not been computed before.
    pub fn advance(
        &mut self,
        rows: usize,
        tokens: &[u32],
        pictures: &Pictures,
        layout: &BlockLayout,
        pages: &mut Pages,
        states: &mut States,
    ) -> usize {
        self.state.iter_mut().for_each(|state| states.settle(state));
        let size = layout.block_size;
        let complete = self.computed / size..(self.computed + rows) / size;
        self.computed += rows;
        for block in complete {
            if self.keys.len() == block {
                let parent = self.keys.last().or(self.root.as_ref());
                let pictures = pictures.extras(block * size..(block + 1) * size);
                self.keys.extend(pages.key(parent, &tokens[block * size..][..size], &pictures));
            }
            let Some(&key) = self.keys.get(block) else { break };
            for (group, table) in self.tables.iter().enumerate() {
                if pages.publish(group, key, table.pages[block]) {
                    self.publish_stored(block, group, (tokens, pictures), size, pages);
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
        let new = self.computed.saturating_sub(self.reached);
        self.reached += new;
        new
    }

    /// Publishes the event that the prefix cache has stored block `block` of a group. `tokens` and `pictures` are those of the whole
    /// sequence.
    pub fn publish_stored(
        &self,
        block: usize,
        group: usize,
        (tokens, pictures): (&[u32], &Pictures),
        block_size: usize,
        pages: &mut Pages,
    ) {
        if let Some(events) = pages.events.as_mut().filter(|events| events.group == group) {
            let parent = block.checked_sub(1).map(|parent| &self.keys[parent]);
            let positions = block * block_size..(block + 1) * block_size;
            let mut extra = pictures.extra_keys(positions.clone());
            let salt = Some(&self.salt).filter(|salt| block == 0 && !salt.is_empty());
            extra.extend(salt.map(|salt| ExtraKey::Salt(salt.clone())));
            extra.extend(self.adapter.clone().map(ExtraKey::Adapter));
            events.stored(parent, &self.keys[block], &tokens[positions], extra);
        }
    }

    /// Returns the key of the block that ends after `tokens` tokens.
    pub(super) fn key_of(&self, tokens: usize, layout: &BlockLayout) -> BlockKey {
        self.keys[tokens / layout.block_size - 1]
    }
}
