//! How the work of one step is cut for the team. Made once per step, before the first phase; the buffers are reused.

use std::{cmp::Reverse, ops::Range};

use paguro_backend::{KvLayout, Limits, PageId, Step};

use crate::attention::{SPLIT, TILE};

/// Items of attention that each thread should find: with fewer, splits are shared.
const ITEMS_PER_THREAD: usize = 8;

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
    /// Splits that any of the rows sees.
    pub splits: Range<usize>,
    /// Where its partial results begin if members share its splits, counted in queries:
    /// `[splits][queries of the tile]`.
    pub first_partial: Option<usize>,
}

/// One member's share of attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index into [`Cuts::tiles`].
    pub tile: usize,
    /// Which of its splits: all, unless members share them.
    pub splits: Range<usize>,
    /// Tokens that it sees: how long it takes.
    tokens: usize,
}

/// Attention in layers that see equally far back.
#[derive(Debug, Default)]
pub struct Cuts {
    /// How far.
    window: Option<u32>,
    /// What is attended.
    pub tiles: Vec<Tile>,
    /// Who takes what: longest first, so that all end together.
    pub items: Vec<Item>,
    /// Tiles whose splits are shared.
    pub shared: Vec<usize>,
}

/// The cuts.
pub struct Plan {
    /// Query heads of a K/V head.
    group: usize,
    kv_heads: usize,
    block_size: usize,
    threads: usize,
    /// Partial results of a query with one split that there is room for.
    partials: usize,
    /// Position of each row.
    pub positions: Vec<usize>,
    /// Sequence of each row.
    sequences: Vec<usize>,
    /// One for each window.
    cuts: Vec<Cuts>,
    /// Index into `cuts` of each KV group.
    cuts_of: Vec<usize>,
    /// Rows with outputs, each once: ascending those whose logits are needed, then ascending the others.
    pub output_rows: Vec<usize>,
    /// How many of them there are whose logits are needed.
    pub logit_rows: usize,
    /// Whether some output needs the logits of a row.
    needs_logits: Vec<bool>,
    /// Outputs, in the order of `output_rows`.
    outputs: Vec<usize>,
    /// Where each output row's outputs begin in `outputs`, and the end.
    output_starts: Vec<usize>,
}

impl Plan {
    /// For a model with `heads` query heads and `kv_heads` K/V heads in all layers, on `threads` threads, with room for
    /// `partials` partial results of a query.
    pub fn new(
        (heads, kv_heads): (usize, usize),
        kv: &KvLayout,
        limits: &Limits,
        threads: usize,
        partials: usize,
    ) -> Self {
        let mut cuts: Vec<Cuts> = Vec::new();
        let cuts_of = kv.groups.iter().map(|group| {
            cuts.iter().position(|cuts| cuts.window == group.window).unwrap_or_else(|| {
                cuts.push(Cuts { window: group.window, ..Cuts::default() });
                cuts.len() - 1
            })
        });
        Self {
            group: heads / kv_heads,
            kv_heads,
            block_size: limits.block_size,
            threads,
            partials,
            positions: Vec::with_capacity(limits.max_rows),
            sequences: Vec::with_capacity(limits.max_rows),
            cuts_of: cuts_of.collect(),
            cuts,
            output_rows: Vec::with_capacity(limits.max_outputs),
            logit_rows: 0,
            needs_logits: vec![false; limits.max_rows],
            outputs: Vec::with_capacity(limits.max_outputs),
            output_starts: Vec::with_capacity(limits.max_outputs + 1),
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

    /// Attention of a KV group's layers.
    pub fn cuts(&self, group: usize) -> &Cuts {
        &self.cuts[self.cuts_of[group]]
    }

    /// Page and slot in it of a row's token.
    pub fn place(&self, step: &Step<'_>, row: usize, group: usize) -> (PageId, usize) {
        let table = step.sequences[self.sequences[row]].table(step.pages, group, self.cuts_of.len());
        let position = self.positions[row];
        (table[position / self.block_size], position % self.block_size)
    }

    /// Sequence of a row.
    pub fn sequence(&self, row: usize) -> usize {
        self.sequences[row]
    }

    /// Outputs of a row of [`Plan::output_rows`], as indices into [`Step::outputs`].
    pub fn outputs_of(&self, output_row: usize) -> &[usize] {
        &self.outputs[self.output_starts[output_row]..self.output_starts[output_row + 1]]
    }

    /// Cuts a step.
    pub fn make(&mut self, step: &Step<'_>) {
        self.positions.clear();
        self.sequences.clear();
        for (index, sequence) in step.sequences.iter().enumerate() {
            self.positions.extend((0..sequence.rows.len()).map(|row| sequence.start + row));
            self.sequences.extend(sequence.rows.clone().map(|_| index));
        }
        for cuts in &mut self.cuts {
            cuts.make(step, self.kv_heads, self.group, self.threads, self.partials);
        }
        self.cut_outputs(step);
    }

    fn cut_outputs(&mut self, step: &Step<'_>) {
        self.needs_logits.fill(false);
        for output in step.outputs.iter().filter(|output| output.want.needs_logits()) {
            self.needs_logits[output.row] = true;
        }
        self.outputs.clear();
        self.outputs.extend(0..step.outputs.len());
        self.outputs.sort_unstable_by_key(|&output| {
            let row = step.outputs[output].row;
            (!self.needs_logits[row], row, output)
        });
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
        self.logit_rows = self.output_rows.iter().filter(|&&row| self.needs_logits[row]).count();
    }
}

impl Cuts {
    fn make(&mut self, step: &Step<'_>, kv_heads: usize, group: usize, threads: usize, partials: usize) {
        self.tiles.clear();
        self.items.clear();
        self.shared.clear();
        let rows_per_tile = (TILE / group).max(1);
        for (index, sequence) in step.sequences.iter().enumerate() {
            for first in sequence.rows.clone().step_by(rows_per_tile) {
                let rows = first..sequence.rows.end.min(first + rows_per_tile);
                let position = sequence.start + first - sequence.rows.start;
                let seen = self.seen(position, rows.len());
                for kv_head in 0..kv_heads {
                    self.tiles.push(Tile {
                        sequence: index,
                        kv_head,
                        rows: rows.clone(),
                        position,
                        splits: seen.start / SPLIT..seen.end.div_ceil(SPLIT),
                        first_partial: None,
                    });
                }
            }
        }
        let total: usize =
            self.tiles.iter().map(|tile| self.seen(tile.position, tile.rows.len()).len()).sum();
        // A tile that is more than its part of all: members share its splits. The result is the same either way.
        let most = if threads > 1 { total / (threads * ITEMS_PER_THREAD) } else { usize::MAX };
        let (mut used, mut left) = (0, total);
        for index in 0..self.tiles.len() {
            let tile = &self.tiles[index];
            let seen = self.seen(tile.position, tile.rows.len());
            let splits = tile.splits.clone();
            let needed = splits.len() * tile.rows.len() * group;
            if splits.len() > 1 && seen.len() > most && used + needed <= partials {
                self.tiles[index].first_partial = Some(used);
                self.shared.push(index);
                used += needed;
                // In runs, because what comes next is fetched on the way: long ones first, so that all end together.
                let mut first = splits.start;
                while first < splits.end {
                    let end = first + (left / (2 * threads * SPLIT)).clamp(1, splits.end - first);
                    let tokens = seen.end.min(end * SPLIT) - seen.start.max(first * SPLIT);
                    self.items.push(Item { tile: index, splits: first..end, tokens });
                    first = end;
                    left -= tokens;
                }
            } else {
                self.items.push(Item { tile: index, splits, tokens: seen.len() });
                left -= seen.len();
            }
        }
        self.items.sort_unstable_by_key(|item| (Reverse(item.tokens), item.tile, item.splits.start));
    }

    /// Positions that any of `rows` rows from `position` on sees.
    fn seen(&self, position: usize, rows: usize) -> Range<usize> {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize))..position + rows
    }
}

#[cfg(test)]
mod tests {
    use paguro_backend::{AttentionMode, KvDtype, KvGroup, Output, StepSequence, Want};

    use super::*;

    const LIMITS: Limits = Limits {
        block_size: 32,
        pages: 8,
        max_rows: 512,
        max_sequences: 64,
        max_outputs: 64,
        max_context: 1 << 17,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
    };

    fn plan(windows: &[Option<u32>], threads: usize, partials: usize) -> Plan {
        let group = |&window: &Option<u32>| KvGroup { window, slots: 1, kv_heads: 2, head_dim: 64 };
        let kv = KvLayout { groups: windows.iter().map(group).collect() };
        Plan::new((8, 2), &kv, &LIMITS, threads, partials)
    }

    /// Sequences by start and rows. Block tables do not matter here.
    fn make(plan: &mut Plan, sequences: &[(usize, usize)], outputs: &[Output<'_>]) {
        let mut row = 0;
        let sequences: Vec<StepSequence> = sequences
            .iter()
            .map(|&(start, rows)| {
                row += rows;
                StepSequence { rows: row - rows..row, start, tables: 0..0, state: None }
            })
            .collect();
        plan.make(&Step { tokens: &vec![0; row], carried: &[], sequences: &sequences, pages: &[], outputs });
    }

    /// Every row and head sees every split that it must, once; partial results do not overlap.
    fn check(plan: &Plan, group: usize, window: Option<u32>, partials: usize) {
        let cuts = plan.cuts(group);
        let mut places = vec![false; partials];
        for (index, tile) in cuts.tiles.iter().enumerate() {
            let items = || cuts.items.iter().filter(|item| item.tile == index);
            let mut splits: Vec<usize> = items().flat_map(|item| item.splits.clone()).collect();
            splits.sort();
            assert_eq!(splits, tile.splits.clone().collect::<Vec<_>>());
            match tile.first_partial {
                None => assert_eq!(items().count(), 1),
                Some(first) => {
                    for place in &mut places[first..first + tile.splits.len() * plan.queries(tile)] {
                        assert!(!std::mem::replace(place, true));
                    }
                }
            }
            assert_eq!(cuts.shared.contains(&index), tile.first_partial.is_some());
            for (row, position) in tile.rows.clone().zip(tile.position..) {
                assert_eq!(plan.positions[row], position);
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
                assert!(tile.splits.contains(&(first / SPLIT)) && tile.splits.contains(&(position / SPLIT)));
            }
        }
        let mut rows: Vec<(usize, usize)> =
            cuts.tiles.iter().flat_map(|tile| tile.rows.clone().map(|row| (row, tile.kv_head))).collect();
        rows.sort();
        let all: Vec<_> = (0..plan.positions.len()).flat_map(|row| [(row, 0), (row, 1)]).collect();
        assert_eq!(rows, all);
    }

    #[test]
    fn tiles_and_splits_cover_everything_once() {
        let windows = [None, Some(700), None, Some(1)];
        for threads in [1, 2, 16] {
            for partials in [0, 100, 100_000] {
                let mut plan = plan(&windows, threads, partials);
                assert_eq!(plan.cuts.len(), 3, "groups of one window share their cuts");
                for sequences in [
                    &[(0, 1)][..],
                    &[(8191, 1)],
                    &[(8191, 1), (3, 1), (511, 1), (512, 1), (100_000, 1)],
                    &[(0, 300), (1000, 17), (2000, 1)],
                ] {
                    make(&mut plan, sequences, &[]);
                    for (group, &window) in windows.iter().enumerate() {
                        check(&plan, group, window, partials);
                    }
                }
            }
        }
    }

    #[test]
    fn only_what_would_end_last_is_shared() {
        let shared = |threads, partials, sequences: &[(usize, usize)]| {
            let mut plan = plan(&[None], threads, partials);
            make(&mut plan, sequences, &[]);
            let cuts = plan.cuts(0);
            let lengths = cuts.shared.iter().map(|&tile| cuts.tiles[tile].position + 1);
            lengths.collect::<Vec<_>>()
        };
        // One long sequence alone, or next to short ones.
        assert_eq!(shared(2, 10_000, &[(8191, 1)]), [8192, 8192]);
        assert_eq!(shared(2, 10_000, &[(99, 1), (8191, 1), (99, 1)]), [8192, 8192]);
        // Many of one length are enough items as they are, and so is one thread's work, or one split.
        assert_eq!(shared(2, 10_000, &[(2047, 1); 16]), []);
        assert_eq!(shared(1, 10_000, &[(8191, 1)]), []);
        assert_eq!(shared(2, 10_000, &[(511, 1)]), []);
        // Room for one of the two heads: 16 splits of 4 queries.
        assert_eq!(shared(2, 100, &[(8191, 1)]), [8192]);
    }

    #[test]
    fn long_items_come_first() {
        let mut plan = plan(&[None], 2, 10_000);
        make(&mut plan, &[(99, 1), (8191, 1), (299, 1)], &[]);
        let tokens: Vec<usize> = plan.cuts(0).items.iter().map(|item| item.tokens).collect();
        assert!(tokens.is_sorted_by(|a, b| a >= b));
        assert_eq!(tokens.iter().sum::<usize>(), 2 * (100 + 8192 + 300));
        // Of two heads of 16 splits for two threads: a quarter of what is left, down to one split.
        make(&mut plan, &[(8191, 1)], &[]);
        let runs: Vec<usize> = plan.cuts(0).items.iter().map(|item| item.splits.len()).collect();
        assert_eq!(runs, [8, 6, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn outputs_are_found_by_row() {
        let mut plan = plan(&[None], 2, 0);
        let outputs = [5, 2, 5, 0, 5].map(|row| Output { row, want: Want::Logits });
        make(&mut plan, &[(0, 6)], &outputs);
        assert_eq!(plan.output_rows, [0, 2, 5]);
        let found: Vec<&[usize]> = (0..3).map(|row| plan.outputs_of(row)).collect();
        assert_eq!(found, [&[3][..], &[1], &[0, 2, 4]]);
        assert_eq!(plan.logit_rows, 3);

        // Rows of which only embeddings are wanted come last.
        let outputs = [(1, Want::Embedding), (4, Want::Embedding), (4, Want::Logits), (3, Want::Logits)];
        make(&mut plan, &[(0, 6)], &outputs.map(|(row, want)| Output { row, want }));
        assert_eq!((&plan.output_rows[..], plan.logit_rows), (&[3, 4, 1][..], 2));
        let found: Vec<&[usize]> = (0..3).map(|row| plan.outputs_of(row)).collect();
        assert_eq!(found, [&[3][..], &[1, 2], &[0]]);
    }
}
