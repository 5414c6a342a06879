//! A step in the device's format: one array of words.
//!
//! Steps of several rows have tables of given rows, of coordinates, and of the tokens that each row sees, beside those
//! of all steps. Only kernels of programs with such rows read them. A step of one row that is given runs the launches of
//! more rows, unless all rows of the program are given. Rows that see later ones are in one pass of a [paced](crate::pace) step.

use std::{cmp::Reverse, ops::Range};

use paguro_backend::{
    AXES, AttentionMode, Limits, OutputKind, OutputRows, Program, Sampled, StateUse, Step, StepSequence,
    visible,
};

use crate::{heads::KvLayout, low_rank::Table, lower::LOGIT_ROWS};

/// Tokens of a split of attention. Splits are fine up to a position, so that short contexts are distributed, and coarse
/// from there on.
pub const FINE_SPLIT: usize = 256;
/// See [`FINE_SPLIT`].
pub const COARSE_SPLIT: usize = 512;
/// First position of coarse splits.
pub const COARSE_FROM: usize = 512;
/// Splits of a run. Their partials are summed first, so that a partial may be that of a run.
pub const RUN: usize = 4;
/// Marks a token that only the device knows (`embed.wgsl`).
const CARRIED: u32 = 1 << 31;
/// Minimum number of sequences with one row whose attention a wide step computes without cooperative matrices. A matrix has
/// 16 rows, and a tile of one row fills few of them. The border is another batch-size class.
const SINGLES: usize = 16;
/// More splits than any context has: such a partial is a whole result.
const WHOLE: usize = u32::MAX as usize;

/// The split of attention that a position is in.
fn split_of(position: usize) -> usize {
    match position < COARSE_FROM {
        true => position / FINE_SPLIT,
        false => COARSE_FROM / FINE_SPLIT + (position - COARSE_FROM) / COARSE_SPLIT,
    }
}

/// Returns the number of splits of a context.
pub fn splits(context: usize) -> usize {
    split_of(context.saturating_sub(1)) + 1
}

/// Arguments of kernels, most of them offsets into a step's words (`args.wgsl`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Args {
    /// Rows of the dispatch.
    pub rows: u32,
    /// Its first output row.
    pub first: u32,
    /// `[rows]`; behind them the given rows, see `embed.wgsl`.
    pub tokens: u32,
    /// `[rows]`; behind them the coordinates, see `rotate.wgsl`.
    pub positions: u32,
    /// `[groups, rows]`
    pub token_offsets: u32,
    /// `[items, 8]`
    pub items: u32,
    /// `[rows, 4]`; behind them the tokens that rows see, see `splits.wgsl`.
    pub partials: u32,
    /// `[outputs]`
    pub outputs: u32,
    /// Offsets of `[rows]` and `[sequences, 5]`, if sequences have states: see `sequences.wgsl`.
    pub sequences: u32,
    /// True if attention leaves no partials.
    pub whole: u32,
    /// For a step of one row, the work of attention, because kernels read arguments sooner than memory. Its position.
    pub row_position: u32,
    /// Its block table.
    pub row_table: u32,
    /// Its first split.
    pub row_from: u32,
    /// End of its splits.
    pub row_to: u32,
    /// Splits of each partial; 0 in a step of more rows.
    pub row_length: u32,
    /// Polls after which a kernel stops waiting for another kernel's results; read only where tests may change it.
    pub patience: u32,
    /// First unit of the adapter that the row of a step of one row uses first.
    pub adapter_unit: u32,
    /// Its ranks, or 0; bit 30 is set if the row uses others, and bit 31 for half precision.
    pub adapter_ranks: u32,
}

/// Work of attention in layers with the same window and tiling.
struct SplitPlan {
    window: Option<u32>,
    /// True if rows see their spans.
    spans: bool,
    tiling: Tiling,
    /// For each [`Tile`]: offset and number of its items in the step's words.
    items: [(u32, u32); 4],
    /// Offset of its partials in the step's words.
    partials: u32,
    /// True if no row has partials.
    whole: bool,
}

/// Kernel of attention for a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// One row.
    Row,
    /// Up to [`Tiling::rows`].
    Rows,
    /// One row, with cooperative matrices.
    WideRow,
    /// Up to [`Wide::rows`], with cooperative matrices.
    WideRows,
}

/// Attention with cooperative matrices: all of a step's rows, where there are many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wide {
    /// Rows of a step from which on it is used.
    pub from: usize,
    /// Subgroups of a workgroup.
    pub groups: usize,
    /// Rows of a tile, at most.
    pub rows: usize,
    /// Query heads of a tile, at most.
    pub heads: usize,
    /// Workgroups for each item.
    pub workgroups: usize,
    /// Workgroups that the device runs side by side.
    pub busy: usize,
}

/// Tiles and splits of a K/V group's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Rows of a tile, at most.
    pub rows: usize,
    /// Query heads of a tile, at most.
    pub heads: usize,
    /// Workgroups for each item.
    pub workgroups: usize,
    /// True if attention can write activations from whole results: heads then have whole blocks.
    pub emits: bool,
    /// True if attention with cooperative matrices can, although heads have padding.
    pub emits_padded: bool,
    /// True if all results need the merge, which adds sinks and gates.
    pub always_merges: bool,
    /// Maximum number of partials.
    pub partials: usize,
    /// Workgroups that the device runs side by side: with fewer, results are computed in partials.
    pub busy: usize,
    /// Tiling with cooperative matrices, if the device has them.
    pub wide: Option<Wide>,
}

/// Possible numbers of splits of a partial: all (whole results), a run, or one.
const LENGTHS: [usize; 3] = [WHOLE, RUN, 1];

/// Returns the partials of `length` splits that contain these splits.
fn partials(seen: &Range<usize>, length: usize) -> Range<usize> {
    seen.start / length..(seen.end - 1) / length + 1
}

/// Estimates the time of attention for tiles with these splits and partials of `length` splits, in quarters of the time
/// of a split: two more for each partial, which first waits for its item and its first K, and three for a merge.
fn time(tiles: impl Iterator<Item = Range<usize>>, length: usize, workgroups: usize, busy: usize) -> usize {
    let (mut all, mut count, mut longest) = (0, 0, 0);
    for seen in tiles {
        all += workgroups * seen.len();
        count += workgroups * partials(&seen, length).len();
        longest = longest.max(seen.len().min(length));
    }
    // In rounds if all are equal; otherwise short ones fill the gaps of long ones.
    let one = 4 * longest + 2;
    let alike = count.div_ceil(busy) * one;
    let mixed = one.max((4 * all + 2 * count) / busy + one / 2);
    alike.min(mixed) + if length == WHOLE { 0 } else { 3 }
}

/// Tables of steps that only some programs have.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// True if sequences have states.
    pub states: bool,
    /// True if rows may be given.
    pub given: bool,
    /// True if launches of one row know given rows, of which layers add no parts.
    pub given_alone: bool,
    /// True if rows see all rows of their sequence.
    pub bidirectional: bool,
    /// Axes of the pairs of all rotations by coordinates.
    pub axes: Vec<u32>,
}

impl Tables {
    /// Returns the tables of steps of a program.
    pub fn of(program: &Program) -> Self {
        Self {
            states: !program.state.is_empty(),
            given: program.given_parts > 0,
            given_alone: program.given_parts == 1 && program.needs_given_rows(),
            bidirectional: program.bidirectional,
            axes: program.ropes.iter().flat_map(|rope| &rope.axes).map(|&axis| axis.into()).collect(),
        }
    }
}

/// A step, and its division into work items.
pub struct Plan {
    block_size: usize,
    groups: usize,
    gather: bool,
    split_plans: Vec<SplitPlan>,
    /// Index into `split_plans` of each KV group.
    split_plan_of: Vec<usize>,
    /// Words for the device.
    pub words: Vec<u32>,
    /// Number of given rows with values.
    given_rows: usize,
    /// Number of given rows.
    all_given: usize,
    /// Rows that follow those with values on the device: their places among the rows that the step before has kept.
    pub kept: Vec<usize>,
    args: Args,
    /// Rows with outputs.
    pub outputs: OutputRows,
    /// True if an output is an embedding.
    pub embeds: bool,
    /// Offset and length of the block tables in the step's words.
    tables: (u32, u32),
    /// Tables beside those of all programs.
    extra: Tables,
    /// Number of sequences.
    sequences: u32,
    /// Adapters of the step, if it has some.
    pub adapted: Option<StepAdapters>,
}

/// Tables of the adapters of a step.
pub struct StepAdapters {
    /// That of all rows.
    pub rows: Table,
    /// Those of slices of the rows with outputs, by their first row.
    pub outputs: Vec<(usize, Table)>,
}

impl Plan {
    /// Creates a plan for a model with these limits, with one tiling per K/V group.
    pub fn new(kv: &KvLayout, limits: &Limits, tilings: &[Tiling], extra: Tables) -> Self {
        let mut split_plans: Vec<SplitPlan> = Vec::new();
        let split_plan_of = kv.groups.iter().zip(tilings).map(|(group, &tiling)| {
            let (window, spans) = (group.window, group.spans);
            let known = split_plans
                .iter()
                .position(|known| (known.window, known.spans, known.tiling) == (window, spans, tiling));
            known.unwrap_or_else(|| {
                let (items, partials, whole) = ([(0, 0); 4], 0, false);
                split_plans.push(SplitPlan { window, spans, tiling, items, partials, whole });
                split_plans.len() - 1
            })
        });
        Self {
            block_size: limits.block_size,
            groups: kv.groups.len(),
            gather: limits.attention == AttentionMode::Gather,
            split_plan_of: split_plan_of.collect(),
            split_plans,
            words: Vec::with_capacity(words(kv, limits, tilings, &extra)),
            given_rows: 0,
            all_given: 0,
            kept: Vec::new(),
            args: Args::default(),
            outputs: OutputRows::new(limits),
            embeds: false,
            tables: (0, 0),
            extra,
            sequences: 0,
            adapted: None,
        }
    }

    /// Arguments of kernels that run once for each row; of attention, for a KV group.
    pub fn args(&self, group: usize) -> Args {
        let split_plan = &self.split_plans[self.split_plan_of[group]];
        let [adapter_unit, adapter_ranks] = match (&self.adapted, self.args.rows) {
            (Some(adapted), 1) => adapted.rows.first_use(),
            _ => [0; 2],
        };
        let (partials, whole) = (split_plan.partials, u32::from(split_plan.whole));
        let args = Args { partials, whole, adapter_unit, adapter_ranks, ..self.args };
        let (at, count) = split_plan.items[Tile::Row as usize];
        let items = &self.words[at as usize..(at + 8 * count) as usize];
        let (Some(first), Some(last), 1) = (items.first_chunk::<8>(), items.last_chunk::<8>(), args.rows)
        else {
            return args;
        };
        let [_, _, row_position, table, blocks, row_from, _, row_length] = *first;
        let row_table = table + group as u32 * blocks;
        Args { row_position, row_table, row_from, row_to: last[5] + last[6], row_length, ..args }
    }

    /// Returns true if attention in a KV group leaves partials that must be merged.
    pub fn needs_merge(&self, group: usize) -> bool {
        !self.split_plans[self.split_plan_of[group]].whole
    }

    /// Returns the first item of attention in a KV group for a kind of tile.
    pub fn first_item(&self, group: usize, tile: Tile) -> u32 {
        self.split_plans[self.split_plan_of[group]].items[tile as usize].0
    }

    /// Returns the number of items.
    pub fn items(&self, group: usize, tile: Tile) -> u32 {
        self.split_plans[self.split_plan_of[group]].items[tile as usize].1
    }

    /// Returns the offset and length of the block tables in the step's words.
    pub fn tables(&self) -> (u32, u32) {
        self.tables
    }

    /// Number of rows whose class has the launches of the step. Launches of one row know no given rows in most programs.
    pub fn class_rows(&self) -> usize {
        (self.args.rows as usize).max(1 + usize::from(self.has_given() && !self.extra.given_alone))
    }

    /// Returns true if rows are given.
    pub fn has_given(&self) -> bool {
        self.all_given > 0
    }

    /// Returns the number of given rows with values, behind which are those that the step before has kept.
    pub fn given_rows(&self) -> usize {
        self.given_rows
    }

    /// Returns the first row and the rows of each slice of the rows with outputs. Those without logits are one slice.
    pub fn slices(&self) -> Vec<(usize, usize)> {
        let (outputs, logits) = (self.outputs.rows.len(), self.outputs.logit_rows);
        let (mut slices, mut first) = (Vec::new(), 0);
        loop {
            let count = if first < logits { (logits - first).min(LOGIT_ROWS) } else { outputs - first };
            slices.push((first, count));
            first += count;
            if first >= outputs {
                return slices;
            }
        }
    }

    /// Returns the table of the adapters of a step's rows, or of the slice of its outputs that begins with `first`.
    pub fn adapted_table(&self, of_outputs: bool, first: usize) -> Option<&Table> {
        let StepAdapters { rows, outputs } = self.adapted.as_ref()?;
        match of_outputs {
            false => Some(rows),
            true => outputs.iter().find(|(slice, _)| *slice == first).map(|(_, table)| table),
        }
    }

    /// Number of sequences.
    pub fn sequences(&self) -> u32 {
        self.sequences
    }

    /// Divides a step into work items, and writes its words.
    pub fn make(&mut self, step: &Step<'_>) {
        self.adapted = None;
        self.words.clear();
        let rows = step.tokens.len();
        self.args = Args { rows: rows as u32, ..Args::default() };
        self.words.extend(step.tokens);
        self.list_given(step);
        self.args.positions = self.words.len() as u32;
        for sequence in step.sequences {
            self.words.extend((0..sequence.rows.len()).map(|row| (sequence.start + row) as u32));
        }
        self.list_coordinates(step);
        self.args.token_offsets = self.words.len() as u32;
        for group in 0..self.groups {
            for sequence in step.sequences {
                let table = sequence.table(step.pages, group, self.groups);
                self.words.extend((sequence.start..sequence.len()).map(|position| {
                    let page = table[position / self.block_size].0 as usize;
                    (page * self.block_size + position % self.block_size) as u32
                }));
            }
        }
        self.tables = (self.words.len() as u32, step.pages.len() as u32);
        self.words.extend(step.pages.iter().map(|page| page.0));
        let mut tables = self.tables.0;
        if self.gather {
            // Gathered pages are in the order of the tables.
            tables = self.words.len() as u32;
            self.words.extend(0..step.pages.len() as u32);
        }
        for index in 0..self.split_plans.len() {
            self.split(index, step, tables);
        }
        self.list_outputs(step);
        if self.extra.states {
            self.list_sequences(step);
        }
        self.sequences = step.sequences.len() as u32;
    }

    /// The number of each row among the given ones, from 1, or 0.
    fn list_given(&mut self, step: &Step<'_>) {
        self.kept.clear();
        self.given_rows = step.given.iter().map(|given| given.rows.len()).sum();
        self.all_given = self.given_rows;
        let first = self.words.len();
        self.words.resize(first + if self.extra.given { step.tokens.len() } else { 0 }, 0);
        let rows = step.given.iter().flat_map(|given| given.rows.clone());
        (1..).zip(rows).for_each(|(number, row)| self.words[first + row] = number);
    }

    /// The coordinates of each row, and the axes of rotations.
    fn list_coordinates(&mut self, step: &Step<'_>) {
        if self.extra.axes.is_empty() {
            return;
        }
        for sequence in step.sequences {
            for (row, position) in sequence.rows.clone().zip(sequence.start..) {
                self.words.extend(step.coordinates_of(row, position).map(|at| at as u32));
            }
        }
        self.words.extend(&self.extra.axes);
    }

    /// Returns the tokens that each row sees; nothing if these are those before it.
    fn seen(&self, index: usize, step: &Step<'_>) -> Vec<Range<usize>> {
        let SplitPlan { window, spans: sees_spans, .. } = self.split_plans[index];
        let mut seen = Vec::new();
        for sequence in step.sequences.iter().filter(|_| self.extra.bidirectional || sees_spans) {
            let spans: Vec<_> = step.spans_of(sequence).collect();
            let (len, spans) =
                (self.extra.bidirectional.then(|| sequence.len()), sees_spans.then_some(&spans[..]));
            seen.extend((sequence.start..sequence.len()).map(|row| visible(window, len, spans, row)));
        }
        seen
    }

    /// The sequence of each row; and of each sequence its first row, rows, position, and the states that it reads and writes.
    fn list_sequences(&mut self, step: &Step<'_>) {
        self.args.sequences = self.words.len() as u32;
        for (index, sequence) in (0..).zip(step.sequences) {
            self.words.extend(sequence.rows.clone().map(|_| index));
        }
        for sequence in step.sequences {
            let StateUse { read, write } = sequence.state.expect("validated");
            let [first, rows, start] =
                [sequence.rows.start, sequence.rows.len(), sequence.start].map(|x| x as u32);
            self.words.extend([first, rows, start, read.0, write.0]);
        }
    }

    /// Replaces a row's token by the one that the device has sampled at `place` in the previous step, and gives the row the one that
    /// this step has `kept` in a place.
    pub fn carry(&mut self, row: usize, place: usize, kept: Option<usize>) {
        self.words[row] = CARRIED | place as u32;
        if let Some(kept) = kept {
            self.kept.push(kept);
            self.all_given += 1;
            // As in `list_given`.
            self.words[self.args.rows as usize + row] = self.all_given as u32;
        }
    }

    /// Sets the tokens of all rows of a planned step.
    pub fn set_tokens(&mut self, tokens: &[u32]) {
        self.words[..tokens.len()].copy_from_slice(tokens);
    }

    /// Replaces the rows' places among the device's tokens by the tokens that were in these places.
    pub fn uncarry(&mut self, tokens: &[u32]) {
        for word in &mut self.words[..self.args.rows as usize] {
            if *word & CARRIED != 0 {
                let token = tokens.get((*word & !CARRIED) as usize).copied();
                // Kernels also use token 0 if no token could be sampled (`embed.wgsl`).
                *word = token.filter(|&token| token != Sampled::NO_TOKEN).unwrap_or_default();
            }
        }
    }

    /// Writes items of eight words: first row, rows, position, block table, blocks of a table, first split, splits,
    /// splits of a partial; and for each row the index of its first partial, their number, the number of the first one
    /// in order of position, and their splits; and then the tokens that it sees, if these are not those before it.
    fn split(&mut self, index: usize, step: &Step<'_>, tables: u32) {
        let groups = self.groups;
        let ranges = self.seen(index, step);
        let split_plan = &mut self.split_plans[index];
        let Tiling { partials: most, .. } = split_plan.tiling;
        let wide = split_plan.tiling.wide.filter(|wide| step.tokens.len() >= wide.from);
        let (tile_rows, workgroups, busy) = match wide {
            Some(wide) => (wide.rows, wide.workgroups, wide.busy),
            None => (split_plan.tiling.rows, split_plan.tiling.workgroups, split_plan.tiling.busy),
        };
        let window = split_plan.window.map_or(usize::MAX, |window| window as usize);
        // Returns the splits that rows see, of which the first one is at `position`.
        let seen = |first: usize, position: usize, rows: usize| {
            let (from, to) = match ranges.get(first..first + rows) {
                Some([first, .., last]) => (first.start, last.end),
                Some([one]) => (one.start, one.end),
                _ => ((position + 1).saturating_sub(window), position + rows),
            };
            split_of(from)..split_of(to - 1) + 1
        };
        // First row, rows, position and block table of every tile.
        let tiles = || {
            step.sequences.iter().flat_map(|sequence| {
                sequence.rows.clone().step_by(tile_rows).map(move |first| {
                    let rows = tile_rows.min(sequence.rows.end - first);
                    (first, rows, sequence.start + first - sequence.rows.start, sequence)
                })
            })
        };
        let seen_by_all = || tiles().map(|(first, rows, position, _)| seen(first, position, rows));
        let lengths = LENGTHS.into_iter().filter(|&length| wide.is_none() || length > 1);
        let common = lengths.min_by_key(|&length| time(seen_by_all(), length, workgroups, busy));
        let common = common.unwrap_or(WHOLE);
        let singles = step.sequences.iter().filter(|sequence| sequence.rows.len() == 1).count();

        split_plan.partials = self.words.len() as u32;
        self.words.resize(self.words.len() + 4 * step.tokens.len(), 0);
        self.words.extend(ranges.iter().flat_map(|seen| [seen.start as u32, seen.end as u32]));
        let (mut next, mut left) = (0, step.tokens.len());
        let Tiling { emits, emits_padded, always_merges, .. } = split_plan.tiling;
        split_plan.whole = (emits || emits_padded) && !always_merges;
        for tile in [Tile::Row, Tile::Rows, Tile::WideRow, Tile::WideRows] {
            let begin = self.words.len();
            let of = |rows: usize, sequence: &StepSequence| match (rows, wide) {
                (1, Some(_)) if singles >= SINGLES && sequence.rows.len() == 1 => Tile::Row,
                (1, None) => Tile::Row,
                (_, None) => Tile::Rows,
                (1, Some(_)) => Tile::WideRow,
                (_, Some(_)) => Tile::WideRows,
            };
            // The last rows of a prompt have the most splits, so they are first.
            let own = tiles().rev().filter(|(_, rows, _, sequence)| of(*rows, sequence) == tile);
            for (first, rows, position, sequence) in own {
                let needed: usize =
                    (0..rows).map(|row| partials(&seen(first + row, position + row, 1), common).len()).sum();
                let length = if next + needed + left - rows > most { WHOLE } else { common };
                left -= rows;
                for row in 0..rows {
                    let own = partials(&seen(first + row, position + row, 1), length);
                    let at = split_plan.partials as usize + 4 * (first + row);
                    let words = [next, own.len(), own.start, length].map(|x| x as u32);
                    self.words[at..at + 4].copy_from_slice(&words);
                    next += own.len();
                }
                let table = tables as usize + sequence.tables.start;
                let blocks = sequence.tables.len() / groups;
                let seen = seen(first, position, rows);
                let partials = partials(&seen, length);
                let is_wide = matches!(tile, Tile::WideRow | Tile::WideRows);
                split_plan.whole &= partials.len() == 1 && (emits || is_wide);
                self.words.extend(partials.flat_map(|partial| {
                    let from = seen.start.max(partial * length);
                    let to = seen.end.min(partial.saturating_add(1).saturating_mul(length));
                    [first, rows, position, table, blocks, from, to - from, length].map(|x| x as u32)
                }));
            }
            // Short items fill the gaps of long ones. Those of one row stay in order of position (see `args`).
            if step.tokens.len() > 1 {
                self.words[begin..]
                    .as_chunks_mut::<8>()
                    .0
                    .sort_unstable_by_key(|item| (Reverse(item[6]), Reverse(item[0]), item[5]));
            }
            split_plan.items[tile as usize] = (begin as u32, ((self.words.len() - begin) / 8) as u32);
        }
    }

    fn list_outputs(&mut self, step: &Step<'_>) {
        self.outputs.plan(step);
        self.embeds = step.outputs.iter().any(|output| matches!(output.kind, OutputKind::Embedding));
        self.args.outputs = self.words.len() as u32;
        self.words.extend(self.outputs.rows.iter().map(|&row| row as u32));
        // They are in the slice of rows without logits, which is the last one.
        let first = |rows: &Range<usize>| (rows.start - self.outputs.logit_rows) as u32;
        self.words.extend(self.outputs.means.iter().flat_map(|(_, rows)| [first(rows), rows.len() as u32]));
    }
}

/// Words of the largest step.
pub fn words(kv: &KvLayout, limits: &Limits, tilings: &[Tiling], extra: &Tables) -> usize {
    let groups = kv.groups.len();
    let tables = tables(kv, limits);
    let split_plan = |tiling: &Tiling| 6 * limits.max_rows + 8 * (tiling.partials + limits.max_rows);
    let sequences = if limits.states > 0 { limits.max_rows + 5 * limits.max_sequences } else { 0 };
    limits.max_rows * (3 + groups + AXES)
        + extra.axes.len()
        + 2 * tables
        + tilings.iter().map(split_plan).sum::<usize>()
        + limits.max_outputs
        + if extra.bidirectional { 2 * limits.max_sequences } else { 0 }
        + sequences
}

/// Entries of all block tables of the largest step.
pub fn tables(kv: &KvLayout, limits: &Limits) -> usize {
    kv.groups.len() * limits.max_sequences * limits.max_context.div_ceil(limits.block_size)
}

#[cfg(test)]
mod tests;
