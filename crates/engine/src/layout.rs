//! Block arithmetic: the block of a position, the blocks that a row attends to, and the maximum number of pages of a
//! sequence. All other code that counts pages uses it.

use paguro_backend::{KvGroup, Program, STATE_CHUNK};

/// Division of a sequence into blocks, and the window of each KV group.
#[derive(Clone, Debug)]
pub(crate) struct BlockLayout {
    /// Tokens in a block; one page for each group.
    pub block_size: usize,
    /// Windows of the KV groups: a query at position `p` attends to keys at `> p - window`; `None` to all.
    pub windows: Vec<Option<usize>>,
    /// Most rows of one sequence in a step.
    pub max_chunk: usize,
    /// True if a step has all rows of a sequence or none, because its rows attend in both directions.
    pub is_whole: bool,
    /// True if rotations have coordinates, see [`Program::has_axes`].
    pub has_axes: bool,
    /// True if rows of a picture see each other, see [`Program::has_spans`].
    pub has_spans: bool,
    /// Rows that sequences with states can drop, see [`Program::droppable_rows`].
    pub droppable: Option<usize>,
    /// Checkpoints for the prefix cache, if sequences have states and there is a cache.
    pub checkpoints: Option<Checkpoints>,
}

/// Checkpoints: copies of the states of sequences, in pages of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checkpoints {
    /// Pages of one.
    pub pages: usize,
    /// Tokens from one to the next while a prompt is computed, a multiple of the block size.
    pub interval: usize,
}

impl Checkpoints {
    /// Returns the least distance in tokens between the checkpoint at the end of a prompt and the one before it.
    pub fn least_gap(&self) -> usize {
        (self.interval / 8).min(64)
    }
}

/// Bounds of [`Checkpoints::interval`].
const INTERVALS: std::ops::RangeInclusive<usize> = 1024..=4096;

impl BlockLayout {
    pub fn new(program: &Program, block_size: usize, max_chunk: usize) -> Self {
        let is_whole = program.bidirectional;
        // A window leaves nothing behind before the only step of a sequence ends.
        let window = |group: &KvGroup| group.window.filter(|_| !is_whole).map(|window| window as usize);
        let windows = program.kv.groups.iter().map(window).collect();
        let (has_axes, has_spans) = (program.has_axes(), program.has_spans());
        let droppable = program.droppable_rows();
        Self { block_size, windows, max_chunk, is_whole, has_axes, has_spans, droppable, checkpoints: None }
    }

    /// Returns the maximum number of drafted tokens of a sequence with `computed` tokens. The next row and the drafted rows must
    /// lie in one chunk of a state, and in one block if a checkpoint follows it.
    pub fn most_drafted(&self, computed: usize) -> usize {
        let Some(droppable) = self.droppable else { return usize::MAX };
        let of_chunk = STATE_CHUNK - 1 - computed % STATE_CHUNK;
        let of_block = self.checkpoints.map(|_| self.block_size - 1 - computed % self.block_size);
        droppable.min(of_chunk).min(of_block.unwrap_or(usize::MAX))
    }

    /// Returns checkpoints of `pages` pages. The interval is chosen such that a checkpoint has about as many pages as
    /// the tokens up to the next one.
    pub fn checkpoints_of(&self, pages: usize) -> Checkpoints {
        let tokens = pages.saturating_mul(self.block_size) / self.groups().max(1);
        let interval = tokens.clamp(*INTERVALS.start(), *INTERVALS.end()).next_multiple_of(self.block_size);
        Checkpoints { pages, interval }
    }

    pub fn groups(&self) -> usize {
        self.windows.len()
    }

    /// Returns the group whose pages stand for a block in events and counts: the first one without a window.
    pub fn event_group(&self) -> usize {
        self.windows.iter().position(Option::is_none).unwrap_or(0)
    }

    /// Returns the number of blocks that `tokens` tokens fill, the last one perhaps partly.
    pub fn blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Returns the first block of `group` to which a row at `position`, or any later row, attends.
    pub fn first_visible(&self, group: usize, position: usize) -> usize {
        match self.windows[group] {
            Some(window) => (position + 1).saturating_sub(window) / self.block_size,
            None => 0,
        }
    }

    /// Returns the maximum number of pages of `group` while the rows `start..end` are computed in chunks of at most
    /// `max_chunk` rows. Pages are released as soon as no later row attends to them.
    pub fn peak(&self, group: usize, start: usize, end: usize) -> usize {
        let visible = self.blocks(end) - self.first_visible(group, start).min(self.blocks(end));
        match self.windows[group] {
            Some(window) => visible.min(self.touched(window - 1 + self.max_chunk)),
            None => visible,
        }
    }

    /// Returns the maximum number of pages of all groups that a sequence of `tokens` tokens needs at one moment, alone
    /// and from nothing.
    pub fn peak_of_all(&self, tokens: usize) -> usize {
        (0..self.groups()).map(|group| self.peak(group, 0, tokens)).sum()
    }

    /// Returns the number of tokens of the longest sequence that `pages` pages can hold, at most `max_context`.
    pub fn longest(&self, pages: usize, max_context: usize) -> usize {
        let (mut fits, mut too_long) = (0, max_context + 1);
        while fits + 1 < too_long {
            let middle = fits + (too_long - fits) / 2;
            if self.peak_of_all(middle) <= pages { fits = middle } else { too_long = middle }
        }
        fits
    }

    /// Returns the maximum number of blocks that a span of `tokens` consecutive tokens touches, wherever it begins.
    fn touched(&self, tokens: usize) -> usize {
        if tokens == 0 { 0 } else { (tokens + self.block_size - 2) / self.block_size + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(block_size: usize, windows: &[Option<usize>], max_chunk: usize) -> BlockLayout {
        BlockLayout {
            block_size,
            windows: windows.to_vec(),
            max_chunk,
            is_whole: false,
            has_axes: false,
            has_spans: false,
            droppable: None,
            checkpoints: None,
        }
    }

    #[test]
    fn first_visible_block_agrees_with_the_definition_of_the_window() {
        for (block_size, window) in [(4, 1), (4, 4), (4, 5), (4, 9), (1, 3), (16, 7)] {
            let layout = layout(block_size, &[Some(window), None], 1);
            for position in 0..80_usize {
                let first_key =
                    (0..=position).find(|&key| key as i64 > position as i64 - window as i64).unwrap();
                assert_eq!(
                    layout.first_visible(0, position),
                    first_key / block_size,
                    "{block_size} {window} {position}"
                );
                assert_eq!(layout.first_visible(1, position), 0);
            }
        }
    }

    /// Plays every sequence of equal chunks and counts the pages that are really held.
    #[test]
    fn peak_bounds_what_a_sequence_really_holds() {
        for (block_size, window, max_chunk) in [(4, 6, 5), (4, 1, 1), (2, 9, 3), (8, 8, 8), (1, 4, 2)] {
            let layout = layout(block_size, &[Some(window)], max_chunk);
            for end in 1..60 {
                let mut most = 0;
                for chunk in 1..=max_chunk {
                    let mut start = 0;
                    while start < end {
                        let stop = (start + chunk).min(end);
                        most = most.max(layout.blocks(stop) - layout.first_visible(0, start));
                        start = stop;
                    }
                }
                assert!(most <= layout.peak(0, 0, end), "{block_size} {window} {max_chunk} {end}");
                assert!(layout.peak(0, 0, end) <= layout.blocks(end));
            }
        }
    }

    #[test]
    fn checkpoints_are_as_far_apart_as_they_are_large() {
        let interval = |block_size, pages| layout(block_size, &[None], 8).checkpoints_of(pages).interval;
        assert_eq!((interval(32, 1), interval(32, 60), interval(32, 1000)), (1024, 1920, 4096));
        assert_eq!(interval(48, 1), 1056);
    }

    #[test]
    fn longest_sequence_is_where_the_pages_end() {
        assert_eq!(layout(4, &[None], 8).longest(5, 1000), 20);
        assert_eq!(layout(4, &[None], 8).longest(5, 7), 7);
        assert_eq!(layout(4, &[None, None], 8).longest(5, 1000), 8);
        assert_eq!(layout(4, &[None], 8).longest(0, 1000), 0);
        // A window alone never fills the arena: 3 + 8 tokens touch at most 4 blocks.
        assert_eq!(layout(4, &[Some(4)], 8).longest(4, 1000), 1000);
    }
}
