//! Adapters (LoRA) of a loaded model: their matrices on the device, and the tables of a step.
//!
//! All adapters share one space, whose unit has room for a rank in single precision, or for two in half precision. An adapter has
//! one or more ranges of it. A [`Site`], which is the joined matrices of one matmul, has two buffers:
//!
//! - A: `[range, matrices, ranks of the range, inputs]`, rows as matrices of models have them;
//! - B: `[units / 4, matrices, outputs of a matrix, 4 or 8 ranks]`.
//!
//! Pairs whose values are all numbers of half precision have that, and others single precision. Elements of a range for which its
//! adapter has no pair are zero. So one table is enough for all sites of a step:
//!
//! | words | content |
//! |-|-|
//! | 0 | offset of uses |
//! | 1 | offset of tiles |
//! | 2 | offset of items with cooperative matrices |
//! | 3 | 0 |
//! | `rows` × 8 | for each row the number of its uses; of the first one the first unit, ranks, sum of the ranks of all earlier rows of uses, 1 for half precision; its index; 0, 0 |
//! | items × 12 | work of a workgroup without cooperative matrices: the words of its use, its first row, 0, 0, 0 |
//! | items × 12 | the same with cooperative matrices |
//! | uses × 8 | a use of a range by a run of rows: first row, end of rows, first unit, ranks, sum of the ranks of all earlier rows of uses, sum of the tiles of earlier uses, scale, 1 for half precision |
//! | tiles × 2 | for each 16 rows the first use and the end of uses, also if there are none |
//!
//! A read that depends on another one takes most of a microsecond on a large GPU. So rows and items repeat words of uses, at places
//! that depend on the launch alone, and arguments have those of the first use of a single row. Rows of a run follow each other and have the same adapters. A use has `ranks / 16` tiles for each 16 rows of the step that have
//! some of its rows, rounded up. The first tile is zero.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use bytemuck::cast_slice;
use half::f16;
use paguro_backend::{
    Adaptable, AdapterId, AdapterUse, Limits, LoadError, LowRank, Matrix, MatrixId, Step, WeightFormat,
    Weights,
};

use crate::{
    device::Device,
    layout::{BLOCK, RowPlanes, pack_row},
    lower::{Adapted, LOGIT_ROWS, Site, kernels::LOW_RANK_TILE},
};

/// Offset of the rows of a table.
pub const ROWS_AT: usize = 4;
/// Units of a vector of B. Ranges are multiples of it.
const QUAD: usize = 4;

/// All adapters of a model.
pub struct Adapters {
    adaptable: Adaptable,
    sites: Vec<SiteMatrices>,
    loaded: BTreeMap<AdapterId, Loaded>,
    /// Units that buffers have room for.
    capacity: usize,
}

/// Ranks of an adapter in one format.
#[derive(Clone, Debug)]
struct Ranks {
    units: Range<usize>,
    is_half: bool,
}

impl Ranks {
    fn count(&self) -> usize {
        self.units.len() << u32::from(self.is_half)
    }
}

/// A pair with decoded values. Those of B are scaled.
struct Decoded {
    matrix: MatrixId,
    rank: usize,
    a: Vec<f32>,
    b: Vec<f32>,
    is_half: bool,
}

impl Decoded {
    fn new(pair: &LowRank) -> Result<Self, LoadError> {
        let [a, mut b] = [floats(&pair.a)?, floats(&pair.b)?];
        b.iter_mut().for_each(|value| *value *= pair.scale);
        let is_half = a.iter().chain(&b).all(|&value| f16::from_f32(value).to_f32() == value);
        Ok(Self { matrix: pair.matrix, rank: pair.rank(), a, b, is_half })
    }
}

/// A site, and its buffers once an adapter changes it.
struct SiteMatrices {
    site: Site,
    inputs: usize,
    /// Outputs of each matrix, in the order in which the matmul has them.
    outputs: Vec<Vec<usize>>,
    buffers: Option<[wgpu::Buffer; 2]>,
}

/// An adapter.
#[derive(Default)]
struct Loaded {
    ranges: Vec<Ranks>,
    /// Ranks of each matrix that pairs of either format have used.
    used: HashMap<(MatrixId, bool), usize>,
}

impl Loaded {
    /// Returns the ranges in a format.
    fn of(&self, is_half: bool) -> impl Iterator<Item = &Ranks> {
        self.ranges.iter().filter(move |range| range.is_half == is_half)
    }
}

impl SiteMatrices {
    fn new(site: Site, weights: &Weights) -> Self {
        let counts: Vec<usize> = site.matrices.iter().map(|&id| weights.matrix(id).rows).collect();
        let rows = site.order.rows(&counts);
        let of = |matrix: usize| rows.iter().filter(|row| row.0 == matrix).map(|row| row.1).collect();
        let inputs = weights.matrix(site.matrices[0]).cols;
        Self { inputs, outputs: (0..counts.len()).map(of).collect(), buffers: None, site }
    }

    /// Bytes of a unit of A and of four of B.
    fn strides(&self) -> [usize; 2] {
        let outputs = self.outputs.iter().map(Vec::len).sum::<usize>();
        [4 * self.outputs.len() * self.inputs.next_multiple_of(BLOCK), 16 * outputs]
    }

    /// Allocates buffers of `capacity` units, with the content of those that exist.
    fn grow(&mut self, device: &Device, capacity: usize) -> Result<(), LoadError> {
        let [a, b] = self.strides();
        let new = [
            device.buffer(capacity * a / 4, "A of adapters")?,
            device.buffer(capacity / QUAD * b / 4, "B of adapters")?,
        ];
        if let Some(old) = &self.buffers {
            let mut encoder = device.encoder();
            for (old, new) in old.iter().zip(&new) {
                encoder.copy_buffer_to_buffer(old, 0, new, 0, old.size().min(new.size()));
            }
            device.queue.submit([encoder.finish()]);
        }
        self.buffers = Some(new);
        Ok(())
    }

    /// Writes ranks `part` of a pair to `range`, from its rank `first` on.
    fn write(&self, device: &Device, pair: &Decoded, part: Range<usize>, range: &Ranks, first: usize) {
        let Some([a, b]) = &self.buffers else { return };
        let [a_stride, b_stride] = self.strides();
        let (format, shift) = if range.is_half { (WeightFormat::F16, 1) } else { (WeightFormat::F32, 0) };
        let words = (a_stride / 4 / self.outputs.len()) >> shift;
        let begin = [range.units.start * a_stride, range.units.start / QUAD * b_stride];
        let encode = |values: &[f32], out: &mut Vec<u8>| {
            out.clear();
            for &value in values {
                match range.is_half {
                    true => out.extend(f16::from_f32(value).to_le_bytes()),
                    false => out.extend(value.to_le_bytes()),
                }
            }
        };
        let (mut before, mut bytes) = (0, Vec::new());
        for (matrix, outputs) in self.outputs.iter().enumerate() {
            if self.site.matrices[matrix] == pair.matrix {
                let mut packed = vec![0; part.len() * words];
                for (out, rank) in packed.chunks_mut(words).zip(part.clone()) {
                    encode(&pair.a[rank * self.inputs..][..self.inputs], &mut bytes);
                    let mut planes = RowPlanes { quants: out, high: &mut [], scales: &mut [] };
                    pack_row(format, self.inputs, &bytes, &mut planes, &mut Vec::new());
                }
                let at = begin[0] + 4 * words * (matrix * range.count() + first);
                device.queue.write_buffer(a, at as u64, cast_slice(&packed));
                let (ranks, end) = (QUAD << shift, part.end);
                for group in part.clone().step_by(ranks) {
                    let values = |&row: &usize| {
                        let value = move |rank: usize| pair.b[row * pair.rank + rank];
                        (group..group + ranks).map(move |rank| if rank < end { value(rank) } else { 0.0 })
                    };
                    let values: Vec<f32> = outputs.iter().flat_map(values).collect();
                    encode(&values, &mut bytes);
                    let at = begin[1] + (first + group - part.start) / ranks * b_stride + 16 * before;
                    device.queue.write_buffer(b, at as u64, &bytes);
                }
            }
            before += outputs.len();
        }
    }
}

impl Adapters {
    /// Returns no adapters of a model with these sites.
    pub fn new(adaptable: Adaptable, sites: Vec<Site>, weights: &Weights) -> Self {
        let sites = sites.into_iter().map(|site| SiteMatrices::new(site, weights)).collect();
        Self { adaptable, sites, loaded: BTreeMap::new(), capacity: 0 }
    }

    /// Adds pairs to an adapter. Returns true if buffers were allocated, so that launches must be bound again.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load(&mut self, device: &Device, id: AdapterId, pairs: &[LowRank]) -> Result<bool, LoadError> {
        self.loaded.entry(id).or_default();
        let mut has_grown = false;
        for pair in pairs {
            self.adaptable.check(pair)?;
            let pair = Decoded::new(pair)?;
            for site in &mut self.sites {
                if site.buffers.is_none() && site.site.matrices.contains(&pair.matrix) && self.capacity > 0 {
                    site.grow(device, self.capacity)?;
                    has_grown = true;
                }
            }
            let loaded = &self.loaded[&id];
            let used = loaded.used.get(&(pair.matrix, pair.is_half)).copied().unwrap_or(0);
            let end = used + pair.rank;
            let known: usize = loaded.of(pair.is_half).map(Ranks::count).sum();
            if end > known {
                has_grown |= self.reserve(device, id, &pair, end - known)?;
            }
            let loaded = self.loaded.entry(id).or_default();
            let next = end.next_multiple_of(2 * QUAD);
            loaded.used.insert((pair.matrix, pair.is_half), next);
            let mut before = 0;
            for range in loaded.of(pair.is_half) {
                // Ranks of the pair that are in this range.
                let (begin, after) = (used.max(before), before + range.count());
                if begin < end.min(after) {
                    let part = begin - used..end.min(after) - used;
                    for site in &self.sites {
                        site.write(device, &pair, part.clone(), range, begin - before);
                    }
                }
                before = after;
            }
        }
        // Sends it off, so that copies do not pile up in host memory.
        device.queue.submit([]);
        Ok(has_grown)
    }

    /// Reserves a range of at least `ranks` ranks for a pair of an adapter, and clears it. Returns true if buffers have grown.
    fn reserve(
        &mut self,
        device: &Device,
        id: AdapterId,
        pair: &Decoded,
        ranks: usize,
    ) -> Result<bool, LoadError> {
        // An adapter whose pairs come in pieces has few ranges, because each one is as large as all before.
        let known: usize = self.loaded[&id].of(pair.is_half).map(Ranks::count).sum();
        let ranks = ranks.max(known);
        // Pairs begin at multiples of eight ranks, so those of other ranges do as well.
        let units = ranks.next_multiple_of(2 * QUAD) >> u32::from(pair.is_half);
        let mut taken: Vec<_> =
            self.loaded.values().flat_map(|loaded| &loaded.ranges).map(|range| &range.units).collect();
        taken.sort_unstable_by_key(|range| range.start);
        let mut first = 0;
        for range in taken {
            if range.start >= first + units {
                break;
            }
            first = range.end;
        }
        let range = first..first + units;
        let grows = range.end > self.capacity;
        let capacity = self.capacity.max(range.end);
        for site in self.sites.iter_mut().filter(|_| grows) {
            if site.buffers.is_some() || site.site.matrices.contains(&pair.matrix) {
                site.grow(device, capacity)?;
            }
        }
        self.capacity = capacity;
        let mut encoder = device.encoder();
        for site in &self.sites {
            let [a_stride, b_stride] = site.strides();
            for (buffer, (stride, by)) in site.buffers.iter().flatten().zip([(a_stride, 1), (b_stride, QUAD)])
            {
                let [at, size] = [range.start / by * stride, units / by * stride].map(|bytes| bytes as u64);
                encoder.clear_buffer(buffer, at, Some(size));
            }
        }
        device.queue.submit([encoder.finish()]);
        let range = Ranks { units: range, is_half: pair.is_half };
        self.loaded.entry(id).or_default().ranges.push(range);
        Ok(grows)
    }

    /// Removes an adapter.
    pub fn unload(&mut self, id: AdapterId) {
        self.loaded.remove(&id);
    }

    /// Returns all adapters.
    pub fn ids(&self) -> impl Iterator<Item = AdapterId> {
        self.loaded.keys().copied()
    }

    /// Makes room for all steps of these limits of which each row uses one adapter. An item has up to `item_rows` rows.
    pub fn make_room(&self, limits: &Limits, item_rows: usize, adapted: &mut Adapted) {
        let of =
            |loaded: &Loaded| (loaded.ranges.len(), loaded.ranges.iter().map(Ranks::count).sum::<usize>());
        let (ranges, ranks) = self.loaded.values().map(of).fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
        let outputs = limits.max_outputs.min(LOGIT_ROWS);
        for (of_outputs, rows, runs) in
            [(false, limits.max_rows, limits.max_sequences.min(limits.max_rows)), (true, outputs, outputs)]
        {
            let tiles = rows / LOW_RANK_TILE + 2 * runs;
            let words = ROWS_AT
                + 8 * rows
                + ranges * (12 * (rows / item_rows + runs + tiles) + 8 * runs)
                + 2 * rows.div_ceil(LOW_RANK_TILE);
            let tiles = 1 + ranges * tiles + tiles * ranks.div_ceil(LOW_RANK_TILE);
            let table = Table { words: vec![0; words], low: rows * ranks, ranks, tiles, ..Table::default() };
            table.enlarge(of_outputs, adapted);
        }
    }

    /// Returns true without adapters.
    pub fn is_empty(&self) -> bool {
        self.loaded.is_empty()
    }

    /// Returns true if the adapter exists.
    pub fn has(&self, id: AdapterId) -> bool {
        self.loaded.contains_key(&id)
    }

    /// Returns the sites that adapters change, and their buffers.
    pub fn changed(&self) -> (Vec<Site>, Vec<[wgpu::Buffer; 2]>) {
        let changed = self.sites.iter().filter_map(|own| Some((own.site.clone(), own.buffers.clone()?)));
        changed.unzip()
    }

    /// Returns the table of some rows of a step, given their sequences. An item has up to `item_rows` rows.
    pub fn table(&self, step: &Step<'_>, sequences: impl Iterator<Item = usize>, item_rows: usize) -> Table {
        let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
        for (row, sequence) in sequences.enumerate() {
            let uses =
                |of: usize| step.adapters_of(of).iter().map(|used| (used.adapter, used.scale.to_bits()));
            match runs.last_mut() {
                Some((last, rows)) if *last == sequence || uses(*last).eq(uses(sequence)) => rows.end += 1,
                _ => runs.push((sequence, row..row + 1)),
            }
        }
        let rows = runs.last().map_or(0, |(_, rows)| rows.end);
        let mut table = Table { words: vec![0; ROWS_AT], tiles: 1, ..Table::default() };
        // Workgroups of a matmul have several tiles, and read the first use of the first one and the end of the last one. So those
        // without uses have an empty range between the uses of their neighbours.
        let mut tiles = vec![[u32::MAX, 0]; rows.div_ceil(LOW_RANK_TILE)];
        let (mut uses, mut items) = (Vec::new(), [Vec::new(), Vec::new()]);
        for (sequence, rows) in runs {
            let first_use = uses.len() as u32;
            let mut sum = 0;
            for AdapterUse { sequence: _, adapter, scale } in step.adapters_of(sequence) {
                for range in self.loaded.get(adapter).into_iter().flat_map(|loaded| &loaded.ranges) {
                    let aligned = rows.start / LOW_RANK_TILE..rows.end.div_ceil(LOW_RANK_TILE);
                    let [low, tiles] = [table.low, table.tiles];
                    let (ranks, is_half) = (range.count(), u32::from(range.is_half));
                    let [first, end, unit, count, low, tiles] =
                        [rows.start, rows.end, range.units.start, ranks, low, tiles].map(|x| x as u32);
                    let used = [first, end, unit, count, low, tiles, scale.to_bits(), is_half];
                    let item = |row: usize| {
                        let mut item = [0; 12];
                        item[..8].copy_from_slice(&used);
                        item[8] = row as u32;
                        item
                    };
                    items[0].extend(rows.clone().step_by(item_rows).map(item));
                    items[1].extend(aligned.clone().map(|tile| item(tile * LOW_RANK_TILE)));
                    uses.push(used);
                    table.low += rows.len() * ranks;
                    table.tiles += aligned.len() * ranks.div_ceil(LOW_RANK_TILE);
                    table.largest = table.largest.max(ranks);
                    sum += ranks;
                }
            }
            let count = uses.len() as u32 - first_use;
            let words_of = |row: usize| match uses.get(first_use as usize) {
                Some(&[first, _, unit, ranks, low, _, _, is_half]) => {
                    let low = low + (row as u32 - first) * ranks;
                    [count, unit, ranks, low, is_half, first_use, 0, 0]
                }
                None => [0; 8],
            };
            table.words.extend(rows.clone().flat_map(words_of));
            table.ranks = table.ranks.max(sum);
            for tile in &mut tiles[rows.start / LOW_RANK_TILE..rows.end.div_ceil(LOW_RANK_TILE)] {
                *tile = [tile[0].min(first_use), uses.len() as u32];
            }
        }
        table.words.extend_from_slice(items[0].as_flattened());
        let mut put = |header: usize, words: &[u32]| {
            table.words[header] = table.words.len() as u32;
            table.words.extend_from_slice(words);
        };
        put(2, items[1].as_flattened());
        put(0, uses.as_flattened());
        put(1, tiles.as_flattened());
        table.items = [items[0].len() as u32, items[1].len() as u32];
        table
    }
}

/// Decodes a side of a pair.
fn floats(side: &Matrix) -> Result<Vec<f32>, LoadError> {
    let bytes = side.read()?;
    side.check_finite(&bytes, 0)?;
    let mut floats = vec![0.0; side.rows * side.cols];
    for (row, out) in
        bytes.chunks_exact(side.format.row_bytes(side.cols)).zip(floats.chunks_exact_mut(side.cols))
    {
        side.format.dequantize(row, out);
    }
    Ok(floats)
}

/// The table of the adapters of some rows, and its sizes.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// See the [module](self).
    pub words: Vec<u32>,
    /// Items without and with cooperative matrices.
    pub items: [u32; 2],
    /// Ranks of the largest range.
    pub largest: usize,
    /// Largest sum of the ranks of a row.
    pub ranks: usize,
    /// Sum of the ranks of all rows.
    pub low: usize,
    /// Tiles.
    pub tiles: usize,
}

impl Table {
    /// Returns the first use of the first row, as [`Args`](crate::plan::Args) have it: its first unit, and its ranks with flags.
    pub fn first_use(&self) -> [u32; 2] {
        let [count, unit, ranks, _, is_half, ..] = self.words[ROWS_AT..] else { return [0; 2] };
        [unit, ranks | u32::from(count > 1) << 30 | is_half << 31]
    }

    /// Returns true if launches for these adapters have room for the table of a step, or of its outputs.
    pub fn fits(&self, of_outputs: bool, adapted: &Adapted) -> bool {
        let Adapted { sites: _, ranks, low, tiles, words } = adapted;
        self.ranks <= *ranks
            && self.low <= *low
            && self.tiles <= *tiles
            && self.words.len() <= words[usize::from(of_outputs)]
    }

    /// Makes room for the table, and for those of other steps up to twice as large.
    pub fn enlarge(&self, of_outputs: bool, adapted: &mut Adapted) {
        let Adapted { sites: _, ranks, low, tiles, words } = adapted;
        *ranks = self.ranks.max(*ranks);
        for (room, needed) in
            [(low, self.low), (tiles, self.tiles), (&mut words[usize::from(of_outputs)], self.words.len())]
        {
            if needed > *room {
                *room = needed.next_power_of_two();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use paguro_backend::StepSequence;
    use paguro_backend_conformance::ModelShape;

    use super::*;

    /// A workgroup of several tiles reads the first use of its first tile and the end of its last one.
    #[test]
    fn tiles_between_two_have_the_uses_of_both() {
        let model = ModelShape::default().build(1);
        let ranges = vec![Ranks { units: 0..16, is_half: false }];
        let loaded = [(AdapterId(0), Loaded { ranges, used: HashMap::new() })].into();
        let adaptable = Adaptable::of(&model.program, &model.weights);
        let adapters = Adapters { adaptable, sites: vec![], loaded, capacity: 16 };
        // Sequences without an adapter at both ends, between two others, and within a tile.
        let rows = [0..20, 20..50, 50..53, 53..90, 90..130];
        let sequences = rows.map(|rows| StepSequence { rows, start: 0, tables: 0..0, state: None });
        let used = |sequence: usize| AdapterUse { sequence, adapter: AdapterId(0), scale: 1.0 };
        let step = Step { sequences: &sequences, adapters: &[used(1), used(3)], ..Step::default() };
        let of_rows =
            sequences.iter().enumerate().flat_map(|(index, own)| own.rows.clone().map(move |_| index));
        let table = adapters.table(&step, of_rows, 4);
        let tiles = table.words[table.words[1] as usize..].as_chunks::<2>().0;
        assert_eq!(tiles, [[0, 0], [0, 1], [0, 1], [0, 2], [1, 2], [1, 2], [2, 2], [2, 2], [2, 2]]);
    }
}
