//! Division of a step's work among threads. Created once per step, before the first phase; the buffers are reused.

use std::{cmp::Reverse, ops::Range};

use paguro_backend::{
    Attention, KvGroup, KvSlot, Limits, OutputRows, PageId, Program, Step, StepSequence, VectorId, visible,
};
use paguro_cpu_kernels::attention::{SPLIT, TILE};

use crate::adapters::AdaptedRows;

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
        let of_group = |(index, group): (usize, &KvGroup)| {
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

    /// Returns the number of elements of a row of queries.
    pub fn q_width(&self) -> usize {
        self.queries * self.dim
    }

    /// Returns the number of elements of a row of keys, or of values.
    pub fn kv_width(&self) -> usize {
        self.kv * self.dim
    }
}

/// Queries over the pages of a layer.
#[derive(Clone, Copy)]
pub struct Attend {
    pub heads: Heads,
    pub kv: KvSlot,
    pub scale: f32,
    pub soft_cap: Option<f32>,
    pub sinks: Option<VectorId>,
    pub bias: Option<VectorId>,
}

impl Attend {
    /// Returns the queries of a layer.
    pub fn of(program: &Program, op: &Attention) -> Self {
        let bias = op.distance_bias.map(|bias| bias.table);
        Self {
            heads: Heads::of(program, op),
            kv: op.kv,
            scale: op.scale,
            soft_cap: op.soft_cap,
            sinks: op.sinks,
            bias,
        }
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
    /// See [`Program::seen_tokens`].
    pub len: Option<usize>,
    /// Splits that any of the rows attends to.
    pub splits: Range<usize>,
    /// Index of its first partial result if workers share its splits, counted in queries: `[splits][queries of the
    /// tile]`.
    pub first_partial: Option<usize>,
}

/// One worker's share of attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index into [`AttentionWork::tiles`].
    pub tile: usize,
    /// Its splits: all, unless workers share them.
    pub splits: Range<usize>,
    /// Tokens that it attends to, an estimate of its time.
    tokens: usize,
}

/// Work of attention in layers with the same window and number of heads.
#[derive(Debug)]
pub struct AttentionWork {
    /// Window of these layers; `None` without one.
    window: Option<u32>,
    /// True if these layers see spans.
    sees_spans: bool,
    kv_heads: usize,
    /// Query heads that share a K/V head.
    per_kv: usize,
    /// Tiles of attention.
    pub tiles: Vec<Tile>,
    /// Items in descending order of length, so that all workers end together.
    pub items: Vec<Item>,
    /// Tiles whose splits are shared.
    pub shared: Vec<usize>,
}

/// Spans of a step, as positions.
#[derive(Clone, Debug, Default)]
pub struct Spans {
    positions: Vec<Range<usize>>,
    /// Range in `positions` of each sequence.
    of_sequences: Vec<Range<usize>>,
}

impl Spans {
    fn make(&mut self, step: &Step<'_>) {
        self.positions.clear();
        self.of_sequences.clear();
        for sequence in step.sequences {
            let first = self.positions.len();
            self.positions.extend(step.spans_of(sequence));
            self.of_sequences.push(first..self.positions.len());
        }
    }

    /// Returns the spans of a sequence.
    pub fn of(&self, sequence: usize) -> &[Range<usize>] {
        &self.positions[self.of_sequences[sequence].clone()]
    }
}

/// Consecutive rows of one sequence.
#[derive(Clone, Debug)]
struct Run {
    /// Index into [`Step::sequences`].
    sequence: usize,
    rows: Range<usize>,
    /// Position of the first row.
    position: usize,
    /// See [`Program::seen_tokens`].
    len: Option<usize>,
}

/// Division of a step.
pub struct StepPlan {
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
    /// [`Program::seen_tokens`] of each sequence.
    lens: Vec<Option<usize>>,
    /// Spans of each sequence.
    pub spans: Spans,
    /// Rows of one sequence with consecutive positions.
    runs: Vec<Run>,
    /// Work for each window and number of heads.
    attention: Vec<AttentionWork>,
    /// Index into `attention` of each K/V group.
    attention_of_group: Vec<usize>,
    /// Rows whose sequences use adapters.
    pub adapted: Vec<AdaptedRows>,
    /// Rows with outputs.
    pub outputs: OutputRows,
}

impl StepPlan {
    /// Creates a plan for the window and heads of each K/V group, on `threads` threads, with room for `partials`
    /// partial results of a query.
    pub fn new(groups: &[(KvGroup, Heads)], limits: &Limits, threads: usize, partials: usize) -> Self {
        let mut attention: Vec<AttentionWork> = Vec::new();
        let attention_of_group = groups.iter().map(|&(group, heads)| {
            let KvGroup { window, spans: sees_spans, layer_slots: _, kv_heads: _, head_dim: _ } = group;
            let (kv_heads, per_kv) = (heads.kv, heads.per_kv());
            let same = |work: &AttentionWork| {
                (work.window, work.sees_spans, work.kv_heads, work.per_kv)
                    == (window, sees_spans, kv_heads, per_kv)
            };
            attention.iter().position(same).unwrap_or_else(|| {
                let (tiles, items, shared) = Default::default();
                attention.push(AttentionWork { window, sees_spans, kv_heads, per_kv, tiles, items, shared });
                attention.len() - 1
            })
        });
        Self {
            block_size: limits.block_size,
            threads,
            partials,
            rows: Vec::with_capacity(limits.max_rows),
            positions: Vec::with_capacity(limits.max_rows),
            sequences: Vec::with_capacity(limits.max_rows),
            lens: Vec::with_capacity(limits.max_sequences),
            spans: Spans::default(),
            runs: Vec::with_capacity(limits.max_rows),
            attention_of_group: attention_of_group.collect(),
            attention,
            adapted: Vec::new(),
            outputs: OutputRows::new(limits),
        }
    }

    /// Returns the largest number of queries in a tile.
    pub const fn tile_queries(per_kv: usize) -> usize {
        if per_kv > TILE { per_kv } else { TILE }
    }

    /// Attention of a KV group's layers.
    pub fn attention(&self, group: usize) -> &AttentionWork {
        &self.attention[self.attention_of_group[group]]
    }

    /// Page and slot in it of a row's token.
    pub fn place(&self, step: &Step<'_>, row: usize, group: usize) -> (PageId, usize) {
        let table =
            step.sequences[self.sequences[row]].table(step.pages, group, self.attention_of_group.len());
        let position = self.positions[row];
        (table[position / self.block_size], position % self.block_size)
    }

    /// Sequence of a row.
    pub fn sequence(&self, row: usize) -> usize {
        self.sequences[row]
    }

    /// Plans a step. `seen_tokens` is [`Program::seen_tokens`].
    pub fn make(&mut self, step: &Step<'_>, seen_tokens: impl Fn(&StepSequence) -> Option<usize>) {
        self.rows.clear();
        self.rows.extend(0..step.tokens.len());
        self.positions.clear();
        self.sequences.clear();
        self.lens.clear();
        for (index, sequence) in step.sequences.iter().enumerate() {
            self.positions.extend((0..sequence.rows.len()).map(|row| sequence.start + row));
            self.sequences.extend(sequence.rows.clone().map(|_| index));
            self.lens.push(seen_tokens(sequence));
        }
        self.spans.make(step);
        self.plan_rows(step);
        self.outputs.plan(step);
    }

    /// Plans the rows of a step that have outputs; `all` is the plan of all rows. Row `i` is row `rows[i]` of the step.
    pub fn make_outputs(&mut self, step: &Step<'_>, all: &Self) {
        self.rows.clear();
        self.rows.extend(&all.outputs.rows);
        self.rows.sort_unstable();
        self.positions.clear();
        self.positions.extend(self.rows.iter().map(|&row| all.positions[row]));
        self.sequences.clear();
        self.sequences.extend(self.rows.iter().map(|&row| all.sequences[row]));
        self.lens.clone_from(&all.lens);
        self.spans.clone_from(&all.spans);
        self.plan_rows(step);
        self.outputs.plan(step);
        for row in &mut self.outputs.rows {
            *row = self.rows.partition_point(|other| other < row);
        }
    }

    /// Returns the adapters of a list of these rows in ascending order; rows of the result count through the list.
    pub fn adapted_of(&self, rows: &[usize]) -> Vec<AdaptedRows> {
        self.adapted.iter().filter_map(|adapted| adapted.within(rows)).collect()
    }

    fn plan_rows(&mut self, step: &Step<'_>) {
        self.adapted.clear();
        if !step.adapters.is_empty() {
            self.adapted.extend(AdaptedRows::of_step(step, &self.sequences));
        }
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
        for work in &mut self.attention {
            work.make(&self.runs, &self.spans, self.threads, self.partials);
        }
    }
}

impl AttentionWork {
    fn make(&mut self, runs: &[Run], spans: &Spans, threads: usize, partials: usize) {
        self.tiles.clear();
        self.items.clear();
        self.shared.clear();
        let rows_per_tile = (TILE / self.per_kv).max(1);
        for run in runs {
            for first in run.rows.clone().step_by(rows_per_tile) {
                let rows = first..run.rows.end.min(first + rows_per_tile);
                let position = run.position + first - run.rows.start;
                let seen = self.seen(position, rows.len(), run.len, spans.of(run.sequence));
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
        let of_tile =
            |tile: &Tile| self.seen(tile.position, tile.rows.len(), tile.len, spans.of(tile.sequence));
        let total: usize = self.tiles.iter().map(|tile| of_tile(tile).len()).sum();
        // A tile that is more than its part of all: workers share its splits. The result is the same either way.
        let most = if threads > 1 { total / (threads * ITEMS_PER_THREAD) } else { usize::MAX };
        let (mut used, mut left) = (0, total);
        for index in 0..self.tiles.len() {
            let tile = &self.tiles[index];
            let seen = self.seen(tile.position, tile.rows.len(), tile.len, spans.of(tile.sequence));
            let splits = tile.splits.clone();
            let needed = splits.len() * tile.queries;
            if splits.len() > 1 && seen.len() > most && used + needed <= partials {
                self.tiles[index].first_partial = Some(used);
                self.shared.push(index);
                used += needed;
                // In runs, because the next splits are prefetched: long ones first, so that all workers end together.
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

    /// Returns the positions that any of `rows` rows from `position` on attends to, of a sequence with these spans. `len` is
    /// [`Program::seen_tokens`].
    fn seen(&self, position: usize, rows: usize, len: Option<usize>, spans: &[Range<usize>]) -> Range<usize> {
        let spans = self.sees_spans.then_some(spans);
        let visible = |row: usize| visible(self.window, len, spans, position + row);
        visible(0).start..visible(rows - 1).end
    }
}
