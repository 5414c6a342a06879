//! How the work of one step is cut for the team. Made once per step, before the team runs; the buffers are reused.

use std::ops::Range;

use paguro_backend::{KvLayout, PageId, Step};

use crate::attention::{SPLIT, TILE};

/// Some rows of one sequence with one K/V head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Index into [`Step::sequences`].
    pub sequence: usize,
    /// K/V head.
    pub kv_head: usize,
    /// Rows of the step.
    pub rows: Range<usize>,
    /// Position of the first row.
    pub position: usize,
    /// Where its partial results begin, in units of one split of a tile.
    pub first_partial: usize,
}

impl Tile {
    /// Splits that any row of the tile sees.
    pub fn splits(&self, window: Option<u32>) -> Range<usize> {
        let first = window.map_or(0, |window| (self.position + 1).saturating_sub(window as usize));
        first / SPLIT..(self.position + self.rows.len()).div_ceil(SPLIT)
    }
}

/// One member's share of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index into [`Plan::tiles`].
    pub tile: usize,
    /// One split of it; or all, one after the other.
    pub split: Option<usize>,
}

/// The cuts.
pub struct Plan {
    /// Query heads of a K/V head.
    group: usize,
    kv_heads: usize,
    kv_groups: usize,
    block_size: usize,
    threads: usize,
    /// Floats of one split of a tile in the buffer of partial results.
    pub partial_stride: usize,
    /// Splits of tiles that fit this buffer.
    partial_capacity: usize,
    /// Position of each row.
    pub positions: Vec<usize>,
    /// Sequence of each row.
    sequences: Vec<usize>,
    /// Attention's tiles.
    pub tiles: Vec<Tile>,
    /// Attention's items.
    pub items: Vec<Item>,
    /// Whether items are single splits.
    pub shares_splits: bool,
    /// Rows with outputs, each once, ascending.
    pub output_rows: Vec<usize>,
    /// Outputs, ordered by row.
    outputs: Vec<usize>,
    /// Where each output row's outputs begin in `outputs`, and the end.
    output_starts: Vec<usize>,
}

impl Plan {
    /// For a model, and for a buffer of `partial_capacity * partial_stride` floats.
    pub fn new(
        heads: usize,
        kv: &KvLayout,
        block_size: usize,
        threads: usize,
        partial_stride: usize,
        partial_capacity: usize,
    ) -> Self {
        Self {
            group: heads / kv.kv_heads,
            kv_heads: kv.kv_heads,
            kv_groups: kv.groups.len(),
            block_size,
            threads,
            partial_stride,
            partial_capacity,
            positions: Vec::new(),
            sequences: Vec::new(),
            tiles: Vec::new(),
            items: Vec::new(),
            shares_splits: false,
            output_rows: Vec::new(),
            outputs: Vec::new(),
            output_starts: Vec::new(),
        }
    }

    /// Largest number of queries in a tile of a model.
    pub const fn tile_queries(group: usize) -> usize {
        if group > TILE { group } else { TILE }
    }

    /// Queries of a tile.
    pub fn queries(&self, tile: &Tile) -> usize {
        tile.rows.len() * self.group
    }

    /// Page and slot in it of a row's token.
    pub fn place(&self, step: &Step<'_>, row: usize, group: usize) -> (PageId, usize) {
        let table = step.sequences[self.sequences[row]].table(step.pages, group, self.kv_groups);
        let position = self.positions[row];
        (table[position / self.block_size], position % self.block_size)
    }

    /// Outputs of a row of [`Plan::output_rows`], as indices into [`Step::outputs`].
    pub fn outputs_of(&self, output_row: usize) -> &[usize] {
        &self.outputs[self.output_starts[output_row]..self.output_starts[output_row + 1]]
    }

    /// Cuts a step.
    pub fn make(&mut self, step: &Step<'_>) {
        self.positions.clear();
        self.sequences.clear();
        self.tiles.clear();
        self.items.clear();
        let rows_per_tile = (TILE / self.group).max(1);
        let mut splits = 0;
        for (index, sequence) in step.sequences.iter().enumerate() {
            self.positions.extend((0..sequence.rows.len()).map(|row| sequence.start + row));
            self.sequences.extend(sequence.rows.clone().map(|_| index));
            for first in sequence.rows.clone().step_by(rows_per_tile) {
                let rows = first..sequence.rows.end.min(first + rows_per_tile);
                let position = sequence.start + first - sequence.rows.start;
                for kv_head in 0..self.kv_heads {
                    let tile = Tile { sequence: index, kv_head, rows: rows.clone(), position, first_partial: splits };
                    splits += tile.splits(None).end;
                    self.tiles.push(tile);
                }
            }
        }
        // Few long tiles: members share their splits. The result is the same either way.
        self.shares_splits = self.threads > 1
            && self.tiles.len() < 4 * self.threads
            && splits > self.tiles.len()
            && splits <= self.partial_capacity;
        for (index, tile) in self.tiles.iter().enumerate() {
            if self.shares_splits {
                let splits = tile.splits(None);
                self.items.extend(splits.map(|split| Item { tile: index, split: Some(split) }));
            } else {
                self.items.push(Item { tile: index, split: None });
            }
        }
        self.cut_outputs(step);
    }

    fn cut_outputs(&mut self, step: &Step<'_>) {
        self.outputs.clear();
        self.outputs.extend(0..step.outputs.len());
        self.outputs.sort_by_key(|&output| step.outputs[output].row);
        self.output_rows.clear();
        self.output_starts.clear();
        for (index, &output) in self.outputs.iter().enumerate() {
            let row = step.outputs[output].row;
            if self.output_rows.last() != Some(&row) {
                self.output_rows.push(row);
                self.output_starts.push(index);
            }
        }
        self.output_starts.push(self.outputs.len());
    }
}
