//! Division of a step's work among the team. Created once per step, before the first phase; the buffers are reused.

use std::{cmp::Reverse, ops::Range};

use paguro_backend::{Attention, Limits, PageId, Program, Step, visible};

use crate::attention::{SPLIT, TILE};

/// Items of attention that each thread should find: with fewer, splits are shared.
const ITEMS_PER_THREAD: usize = 8;

/// Heads of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub queries: usize,
    /// K/V heads.
    pub kv: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl Heads {
    /// Returns the heads of a layer.
    pub fn of(program: &Program, op: &Attention) -> Self {
        let group = program.kv_group(op);
        Self { queries: op.heads, kv: group.kv_heads, dim: group.head_dim }
    }

    /// Returns the heads of each K/V group's layers; `None` if they differ within a group.
    pub fn of_groups(program: &Program) -> Option<Vec<Self>> {
        let of_group = |(index, group): (usize, &paguro_backend::KvGroup)| {
            let attends = program.mixers().filter_map(paguro_backend::Mixer::attends);
            let mut heads = attends.filter(|(kv, _)| kv.group == index).map(|(_, heads)| heads);
            let queries = heads.next().unwrap_or(group.kv_heads);
            let divides = group.kv_heads > 0 && queries.is_multiple_of(group.kv_heads);
            let all = heads.all(|heads| heads == queries);
            (divides && all).then_some(Self { queries, kv: group.kv_heads, dim: group.head_dim })
        };
        program.kv.groups.iter().enumerate().map(of_group).collect()
    }

    /// Query heads that share a K/V head.
    pub fn per_kv(&self) -> usize {
        self.queries / self.kv
    }

    /// Elements of a row of queries.
    pub fn q_width(&self) -> usize {
        self.queries * self.dim
    }

    /// Elements of a row of keys, or of values.
    pub fn kv_width(&self) -> usize {
        self.kv * self.dim
    }
}

/// Some rows of one sequence with one K/V head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Index into [`Step::sequences`].
    pub sequence: usize,
    /// K/V head.
    pub kv_head: usize,
    /// Rows of the step.
    pub rows: Range<usize>,
    /// Queries: of each row, those of the query heads that share the K/V head.
    pub queries: usize,
    /// Position of the first row.
    pub position: usize,
    /// Tokens of the sequence, if rows see later ones.
    pub len: Option<usize>,
    /// Splits that any of the rows attends to.
    pub splits: Range<usize>,
    /// Index of its first partial result if members share its splits, counted in queries: `[splits][queries of the
    /// tile]`.
    pub first_partial: Option<usize>,
}

/// One member's share of attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index into [`Cuts::tiles`].
    pub tile: usize,
    /// Its splits: all, unless members share them.
    pub splits: Range<usize>,
    /// Tokens that it attends to, an estimate of its time.
    tokens: usize,
}

/// Work of attention in layers with the same window and number of heads.
#[derive(Debug)]
pub struct Cuts {
    /// Window of these layers; `None` without one.
    window: Option<u32>,
    kv_heads: usize,
    /// Query heads that share a K/V head.
    per_kv: usize,
    /// Tiles of attention.
    pub tiles: Vec<Tile>,
    /// Items in descending order of length, so that all members end together.
    pub items: Vec<Item>,
    /// Tiles whose splits are shared.
    pub shared: Vec<usize>,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Debug)]
struct Run {
    /// Index into [`Step::sequences`].
    sequence: usize,
    rows: Range<usize>,
    /// Position of the first row.
    position: usize,
    /// Tokens of the sequence, if rows see later ones.
    len: Option<usize>,
}

/// The cuts.
pub struct Plan {
    /// See [`Program::bidirectional`].
    bidirectional: bool,
    block_size: usize,
    threads: usize,
    /// Maximum number of partial results of a query with one split.
    partials: usize,
    /// Row of the step for each row; all of them in order, or those with outputs.
    pub rows: Vec<usize>,
    /// Position of each row.
    pub positions: Vec<usize>,
    /// Sequence of each row.
    sequences: Vec<usize>,
    /// Tokens of each sequence, if rows see later ones.
    lens: Vec<Option<usize>>,
    /// Rows of one sequence with consecutive positions.
    runs: Vec<Run>,
    /// Work for each window and number of heads.
    cuts: Vec<Cuts>,
    /// Index into `cuts` of each KV group.
    cuts_of: Vec<usize>,
    /// Rows with outputs, each once: ascending those whose logits are needed, then ascending the others.
    pub output_rows: Vec<usize>,
    /// Number of rows with logits.
    pub logit_rows: usize,
    /// True for each row whose logits an output needs.
    needs_logits: Vec<bool>,
    /// Outputs, in the order of `output_rows`.
    outputs: Vec<usize>,
    /// Start of each output row's outputs in `outputs`, and the end.
    output_starts: Vec<usize>,
}

impl Plan {
    /// Creates a plan for the window and heads of each K/V group, on `threads` threads, with room for `partials`
    /// partial results of a query.
    pub fn new(
        groups: &[(Option<u32>, Heads)],
        bidirectional: bool,
        limits: &Limits,
        threads: usize,
        partials: usize,
    ) -> Self {
        let mut cuts: Vec<Cuts> = Vec::new();
        let cuts_of = groups.iter().map(|&(window, heads)| {
            let (kv_heads, per_kv) = (heads.kv, heads.per_kv());
            let same = |cuts: &Cuts| (cuts.window, cuts.kv_heads, cuts.per_kv) == (window, kv_heads, per_kv);
            cuts.iter().position(same).unwrap_or_else(|| {
                let (tiles, items, shared) = Default::default();
                cuts.push(Cuts { window, kv_heads, per_kv, tiles, items, shared });
                cuts.len() - 1
            })
        });
        Self {
            bidirectional,
            block_size: limits.block_size,
            threads,
            partials,
            rows: Vec::with_capacity(limits.max_rows),
            positions: Vec::with_capacity(limits.max_rows),
            sequences: Vec::with_capacity(limits.max_rows),
            lens: Vec::with_capacity(limits.max_sequences),
            runs: Vec::with_capacity(limits.max_rows),
            cuts_of: cuts_of.collect(),
            cuts,
            output_rows: Vec::with_capacity(limits.max_outputs),
            logit_rows: 0,
            needs_logits: vec![false; limits.max_rows],
            outputs: Vec::with_capacity(limits.max_outputs),
            output_starts: Vec::with_capacity(limits.max_outputs + 1),
        }
    }

    /// Largest number of queries in a tile.
    pub const fn tile_queries(per_kv: usize) -> usize {
        if per_kv > TILE { per_kv } else { TILE }
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
        self.rows.clear();
        self.rows.extend(0..step.tokens.len());
        self.positions.clear();
        self.sequences.clear();
        self.lens.clear();
        for (index, sequence) in step.sequences.iter().enumerate() {
            self.positions.extend((0..sequence.rows.len()).map(|row| sequence.start + row));
            self.sequences.extend(sequence.rows.clone().map(|_| index));
            self.lens.push(self.bidirectional.then(|| sequence.len()));
        }
        self.cut_rows();
        self.cut_outputs(step);
    }

    /// Cuts the rows of a step that have outputs, of which `all` is the plan. Row `i` is row `rows[i]` of the step.
    pub fn make_outputs(&mut self, step: &Step<'_>, all: &Self) {
        self.rows.clear();
        self.rows.extend(&all.output_rows);
        self.rows.sort_unstable();
        self.positions.clear();
        self.positions.extend(self.rows.iter().map(|&row| all.positions[row]));
        self.sequences.clear();
        self.sequences.extend(self.rows.iter().map(|&row| all.sequences[row]));
        self.lens.clone_from(&all.lens);
        self.cut_rows();
        self.cut_outputs(step);
        for row in &mut self.output_rows {
            *row = self.rows.partition_point(|other| other < row);
        }
    }

    fn cut_rows(&mut self) {
        self.runs.clear();
        for (row, (&position, &sequence)) in self.positions.iter().zip(&self.sequences).enumerate() {
            match self.runs.last_mut() {
                Some(run) if run.sequence == sequence && run.position + run.rows.len() == position => {
                    run.rows.end += 1;
                }
                _ => {
                    let len = self.lens[sequence];
                    self.runs.push(Run { sequence, rows: row..row + 1, position, len });
                }
            }
        }
        for cuts in &mut self.cuts {
            cuts.make(&self.runs, self.threads, self.partials);
        }
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
    fn make(&mut self, runs: &[Run], threads: usize, partials: usize) {
        self.tiles.clear();
        self.items.clear();
        self.shared.clear();
        let rows_per_tile = (TILE / self.per_kv).max(1);
        for run in runs {
            for first in run.rows.clone().step_by(rows_per_tile) {
                let rows = first..run.rows.end.min(first + rows_per_tile);
                let position = run.position + first - run.rows.start;
                let seen = self.seen(position, rows.len(), run.len);
                for kv_head in 0..self.kv_heads {
                    self.tiles.push(Tile {
                        sequence: run.sequence,
                        kv_head,
                        rows: rows.clone(),
                        queries: rows.len() * self.per_kv,
                        position,
                        len: run.len,
                        splits: seen.start / SPLIT..seen.end.div_ceil(SPLIT),
                        first_partial: None,
                    });
                }
            }
        }
        let of_tile = |tile: &Tile| self.seen(tile.position, tile.rows.len(), tile.len);
        let total: usize = self.tiles.iter().map(|tile| of_tile(tile).len()).sum();
        // A tile that is more than its part of all: members share its splits. The result is the same either way.
        let most = if threads > 1 { total / (threads * ITEMS_PER_THREAD) } else { usize::MAX };
        let (mut used, mut left) = (0, total);
        for index in 0..self.tiles.len() {
            let tile = &self.tiles[index];
            let seen = self.seen(tile.position, tile.rows.len(), tile.len);
            let splits = tile.splits.clone();
            let needed = splits.len() * tile.queries;
            if splits.len() > 1 && seen.len() > most && used + needed <= partials {
                self.tiles[index].first_partial = Some(used);
                self.shared.push(index);
                used += needed;
                // In runs, because the next splits are prefetched: long ones first, so that all members end together.
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

    /// Returns the positions that any of `rows` rows from `position` on attends to, of a sequence of `len` tokens if they
    /// attend to later ones.
    fn seen(&self, position: usize, rows: usize, len: Option<usize>) -> Range<usize> {
        let visible = |row: usize| visible(self.window, len, position + row);
        visible(0).start..visible(rows - 1).end
    }
}

#[cfg(test)]
mod tests {
    use paguro_backend::{AttentionMode, KvDtype, Output, StepSequence, Want};

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
        let heads = Heads { queries: 8, kv: 2, dim: 64 };
        let groups: Vec<_> = windows.iter().map(|&window| (window, heads)).collect();
        Plan::new(&groups, false, &LIMITS, threads, partials)
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

    /// Checks that every row and head has each of its splits once, and that partial results do not overlap.
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
                    for place in &mut places[first..first + tile.splits.len() * tile.queries] {
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
    fn rows_with_outputs_are_cut_alone() {
        let mut all = plan(&[None, Some(700)], 2, 1000);
        let mut some = plan(&[None, Some(700)], 2, 1000);
        let outputs = [310, 7, 9, 8, 7, 299].map(|row| Output { row, want: Want::Logits });
        let sequences: Vec<StepSequence> = [(0, 300, 100), (300, 311, 2000)]
            .map(|(first, end, start)| StepSequence { rows: first..end, start, tables: 0..0, state: None })
            .to_vec();
        let step =
            Step { tokens: &[0; 311], carried: &[], sequences: &sequences, pages: &[], outputs: &outputs };
        all.make(&step);
        some.make_outputs(&step, &all);
        assert_eq!(some.rows, [7, 8, 9, 299, 310]);
        assert_eq!(some.positions, [107, 108, 109, 399, 2010]);
        assert_eq!((0..5).map(|row| some.sequence(row)).collect::<Vec<_>>(), [0, 0, 0, 0, 1]);
        assert_eq!(some.output_rows, [0, 1, 2, 3, 4]);
        let found: Vec<&[usize]> = (0..5).map(|row| some.outputs_of(row)).collect();
        assert_eq!(found, [&[1, 4][..], &[3], &[2], &[5], &[0]]);
        check(&some, 0, None, 1000);
        check(&some, 1, Some(700), 1000);
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
        // One long sequence alone, or beside short ones.
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
        // Two heads of 16 splits for two threads: a quarter of the rest, down to one split.
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

        // Rows with embeddings only are last.
        let outputs = [(1, Want::Embedding), (4, Want::Embedding), (4, Want::Logits), (3, Want::Logits)];
        make(&mut plan, &[(0, 6)], &outputs.map(|(row, want)| Output { row, want }));
        assert_eq!((&plan.output_rows[..], plan.logit_rows), (&[3, 4, 1][..], 2));
        let found: Vec<&[usize]> = (0..3).map(|row| plan.outputs_of(row)).collect();
        assert_eq!(found, [&[3][..], &[1, 2], &[0]]);
    }
}
