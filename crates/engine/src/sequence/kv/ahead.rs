//! Pages of steps that are planned ahead, and of rows that check drafts.

use super::KvState;
use crate::{layout::BlockLayout, pages::Pages, states::States};

impl KvState {
    /// Returns true if the next row would write a page or a state that another sequence shares.
    pub fn needs_copies(&self, layout: &BlockLayout, pages: &Pages, states: &States) -> bool {
        let is_shared = |block: usize| self.tables.iter().any(|table| pages.is_shared(table.pages[block]));
        self.state.is_some_and(|state| states.is_shared(state)) || self.tail(layout).is_some_and(is_shared)
    }

    /// Returns the number of pages that [`KvState::extend`] allocates.
    pub fn pages_up_to(&self, tokens: usize, layout: &BlockLayout) -> usize {
        let blocks = layout.blocks(tokens);
        self.tables.iter().map(|table| blocks.saturating_sub(table.pages.len())).sum()
    }

    /// Allocates the missing pages of the first `tokens` tokens. No page is copied: the one in which the planned rows end
    /// belongs to this sequence alone, because they write it.
    pub fn extend(&mut self, tokens: usize, layout: &BlockLayout, pages: &mut Pages) {
        let blocks = layout.blocks(tokens);
        for table in &mut self.tables {
            table.pages.extend((table.pages.len()..blocks).map(|_| pages.allocate()));
        }
    }

    /// Releases the pages after the next `rows` rows, which hold drafted rows that were rejected. No such page was
    /// published, because only computed blocks are.
    pub fn reject_after(&mut self, rows: usize, layout: &BlockLayout, pages: &mut Pages) {
        let blocks = layout.blocks(self.computed + rows);
        for table in &mut self.tables {
            let rejected = blocks.min(table.pages.len())..;
            table.pages.drain(rejected).rev().for_each(|page| pages.release(page));
        }
    }
}
