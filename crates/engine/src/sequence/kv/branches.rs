//! K and V of a new sequence and of branches that separate, and their release.

use super::{BlockTable, KvState};
use crate::{
    adapters::RequestAdapters, layout::BlockLayout, pages::Pages, pictures::Pictures, states::States,
};

impl KvState {
    /// Returns a state without pages for a prompt.
    pub fn new(
        prompt: &[u32],
        pictures: &Pictures,
        (salt, adapters): (&[u8], &RequestAdapters),
        layout: &BlockLayout,
        pages: &Pages,
    ) -> Self {
        let root = pages.root(salt, adapters.digest.as_ref());
        let mut keys = Vec::new();
        for (index, block) in prompt.chunks_exact(layout.block_size).enumerate() {
            let first = index * layout.block_size;
            let pictures = pictures.extras(first..first + block.len());
            let Some(key) = pages.key(keys.last().or(root.as_ref()), block, &pictures) else { break };
            keys.push(key);
        }
        Self {
            computed: 0,
            reached: 0,
            tables: vec![BlockTable::default(); layout.groups()],
            state: None,
            salt: salt.into(),
            adapter: adapters.name.clone(),
            root,
            keys,
            checkpoints: Vec::new(),
            newest_checkpoint: None,
            is_suspect: false,
        }
    }

    /// Returns a state without pages for the same tokens, `tokens` of which were computed before.
    pub fn without_pages(&self, tokens: usize) -> Self {
        Self {
            computed: 0,
            reached: tokens,
            tables: vec![BlockTable::default(); self.tables.len()],
            state: None,
            salt: self.salt.clone(),
            adapter: self.adapter.clone(),
            root: self.root,
            keys: self.keys.clone(),
            checkpoints: Vec::new(),
            newest_checkpoint: None,
            is_suspect: self.is_suspect,
        }
    }

    /// Returns a state for the same `tokens` tokens that shares all pages and the state slot.
    pub fn share(&self, tokens: usize, pages: &mut Pages, states: &mut States) -> Self {
        self.state.iter().for_each(|&state| states.share(state));
        self.held_pages().for_each(|page| pages.share(page));
        Self {
            computed: self.computed,
            tables: self.tables.clone(),
            state: self.state,
            ..self.without_pages(tokens)
        }
    }

    /// Releases the state and all pages. The last blocks are released first, so that the cache evicts them first: a
    /// prefix without its end is more useful than an end without its prefix.
    pub fn release(&mut self, layout: &BlockLayout, pages: &mut Pages, states: &mut States) {
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
        self.checkpoints.clear();
        self.newest_checkpoint = None;
        self.tables.iter_mut().for_each(|table| *table = BlockTable::default());
        self.computed = 0;
    }
}
