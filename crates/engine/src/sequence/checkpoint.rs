//! Checkpoints of sequences with states: their positions, and the first step of a sequence from one.
//!
//! K and V of a prefix are useless without the state at its end, and a state cannot be computed backwards. So states
//! are copied at some ends of blocks:
//!
//! - During a prefill, every [interval](crate::layout::Checkpoints::interval), and at the last position with which
//!   later prompts can begin, unless a checkpoint shortly precedes it. A step ends at each of these positions, because
//!   the state exists only between two steps.
//! - During decoding, at the end of every block. Each checkpoint replaces the previous one, so that one is left when
//!   the answer ends, is cancelled, or is preempted.
//!
//! A copy is made before the next planned step. The sequence may have ended by then, but its slot has not been written.
//! A step that is planned ahead would write it, so no step is planned ahead across the end of a block.

use paguro_backend::{PageMove, StateUse};

use super::{KvState, Sequence};
use crate::{layout::BlockLayout, pages::Pages, prefix::BlockKey, states::States};

impl Sequence {
    /// Returns the next checkpoint after the planned rows and before the end of the tokens: a step must end there.
    pub fn next_checkpoint(&self, layout: &BlockLayout) -> Option<usize> {
        let interval = layout.checkpoints?.interval;
        let next = (self.next_position() / interval + 1) * interval;
        let last = self.last_checkpoint(layout).filter(|&last| last > self.next_position());
        let next = last.map_or(next, |last| next.min(last));
        (next < self.tokens.len()).then_some(next)
    }

    /// Returns the last end of a block that later prompts can begin with. `None` if the newest checkpoint is so close
    /// that another one would not be worth the step that ends at it.
    fn last_checkpoint(&self, layout: &BlockLayout) -> Option<usize> {
        let lasting = if self.tokens.generated() == 0 { self.request.lasting_tokens } else { usize::MAX };
        let last = lasting.min(self.tokens.len() - 1) / layout.block_size * layout.block_size;
        let newest = self.kv.checkpoints.last().copied().unwrap_or(0);
        (last >= newest + layout.checkpoints?.least_gap()).then_some(last)
    }

    /// Returns true if the planned rows end at a checkpoint.
    pub fn ends_at_checkpoint(&self, layout: &BlockLayout) -> bool {
        layout.checkpoints.is_some() && self.next_position().is_multiple_of(layout.block_size)
    }

    /// Adds moves that copy the state after the computed tokens into pages, if this position has a checkpoint. Returns
    /// the key of the preceding block.
    pub fn save_state(
        &mut self,
        layout: &BlockLayout,
        pages: &mut Pages,
        moves: &mut Vec<PageMove>,
    ) -> Option<BlockKey> {
        let (checkpoints, StateUse { write: state, .. }) = (layout.checkpoints?, self.kv.state?);
        if !self.kv.computed.is_multiple_of(layout.block_size) {
            return None;
        }
        let lasts = self.kv.computed.is_multiple_of(checkpoints.interval)
            || Some(self.kv.computed) == self.last_checkpoint(layout);
        if !lasts && self.prefills() {
            return None;
        }
        if let Some(older) = self.kv.newest_checkpoint.take() {
            pages.forget_checkpoint(&self.kv.key_of(older, layout));
            self.kv.checkpoints.retain(|&tokens| tokens != older);
        }
        let key = self.kv.key_of(self.kv.computed, layout);
        self.kv.checkpoints.push(self.kv.computed);
        let parts = pages.keep_checkpoint(key, checkpoints.pages)?;
        self.kv.newest_checkpoint = (!lasts).then_some(self.kv.computed);
        moves.extend(parts.into_iter().enumerate().map(|(part, to)| PageMove::SaveState { state, part, to }));
        Some(key)
    }
}

impl KvState {
    /// Adds moves that copy the state after the tokens from the cache into a slot, if sequences have states.
    pub fn restore_state(
        &mut self,
        layout: &BlockLayout,
        pages: &mut Pages,
        states: &mut States,
        moves: &mut Vec<PageMove>,
    ) {
        if self.computed == 0 || layout.checkpoints.is_none() {
            return;
        }
        let slot = states.reserve(None).flatten().expect("a sequence with a place has a state");
        let key = self.key_of(self.computed, layout);
        let parts = pages.checkpoint(&key).expect("the checkpoint was found");
        let state = slot.write;
        moves.extend(parts.iter().enumerate().map(|(part, &from)| PageMove::RestoreState {
            from,
            part,
            state,
        }));
        pages.touch_checkpoint(&key);
        self.state = Some(slot);
        self.checkpoints.push(self.computed);
    }

    /// Makes a checkpoint of this sequence at the end of a block as recently used as the block, which was released.
    pub fn touch_checkpoint(&self, block: usize, layout: &BlockLayout, pages: &mut Pages) {
        if self.checkpoints.binary_search(&((block + 1) * layout.block_size)).is_ok() {
            pages.touch_checkpoint(&self.keys[block]);
        }
    }
}
