//! Pages that a sequence needs and claims, for admission and preemption.

use super::Sequence;
use crate::{layout::BlockLayout, pages::Pages};

impl Sequence {
    /// Returns the number of pages to allocate until all tokens are computed, if the sequence begins with `cached` cached
    /// blocks, and its [headroom](Sequence::headroom).
    pub fn pages_needed(&self, cached: usize, layout: &BlockLayout) -> usize {
        self.kv.pages_to_come(cached, self.tokens.len(), layout) + self.headroom(layout)
    }

    /// Returns the number of pages of its next block, one for each group, or 0 if it cannot become that long. Branches that
    /// separate also need a copy of the block that they share.
    pub fn headroom(&self, layout: &BlockLayout) -> usize {
        // The last token is never computed.
        let longest = self.tokens.prompt() + self.request.max_tokens.saturating_sub(1);
        let grows = layout.blocks(longest) > layout.blocks(self.tokens.len());
        if grows || self.branches.len() > 1 { layout.groups() } else { 0 }
    }

    /// Returns the number of pages that it claims: its own, a fraction of shared ones, and those that its prompt still
    /// needs.
    pub fn claim(&self, layout: &BlockLayout, pages: &Pages) -> f64 {
        let held: f64 = self.kv.held_pages().map(|page| 1.0 / pages.references(page) as f64).sum();
        held + self.kv.pages_to_come(0, self.tokens.len(), layout) as f64
    }
}
