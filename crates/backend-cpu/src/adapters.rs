//! Adapters of a loaded model, and their phases.
//!
//! A matmul of a step with adapters has two more parts, for the rows whose sequences use an adapter that changes its
//! matrix:
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | the matmul, and A | 16 outputs; 16 ranks and some rows | `rows` | its output; `low` |
//! | B | 16 outputs | `low` | adds to the output |
//!
//! Rows are multiplied in floats, of which a sum has one order for any number of rows. So the bits of a row depend
//! neither on other rows nor on their adapters.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use paguro_backend::{
    Adaptable, AdapterId, AdapterUse, LoadError, LowRank, MatrixId, Program, Step, Weights,
};

use crate::{
    buffers::MatmulInput,
    counters::Kernel,
    forward::Pass,
    matrix::{Activations, Destination, MatrixKernels, PackedMatrix, RowKind, Rows, Scratch},
    ops,
    shared::Shared,
    simd::LANES,
    thread_pool::Chunking,
};

/// Matrices of one matmul phase, at most.
const MATRICES: usize = 4;
/// Rows that one unit of work multiplies with A.
const UNIT_ROWS: usize = 64;

/// A packed [`LowRank`].
struct Pair {
    a: PackedMatrix,
    b: PackedMatrix,
    scale: f32,
}

/// All adapters of a model.
pub struct Adapters {
    adaptable: Adaptable,
    loaded: BTreeMap<AdapterId, HashMap<MatrixId, Vec<Pair>>>,
    max_rows: usize,
    /// The largest rank of any pair since load.
    rank: usize,
    /// Products with A, `[MATRICES * max_rows * rank]`.
    low: Shared<f32>,
}

/// Consecutive rows whose sequences use the same adapters.
#[derive(Clone, Debug)]
pub struct AdaptedRows {
    pub rows: Range<usize>,
    /// A sequence that uses them.
    pub sequence: usize,
}

/// A pair and the rows that it changes.
pub struct Change<'a> {
    pair: &'a Pair,
    /// Index of the matmul's matrix.
    linear: usize,
    rows: Range<usize>,
    scale: f32,
    /// Start of its rows in [`Adapters::low`].
    first: usize,
}

impl Adapters {
    /// Returns no adapters of a program.
    ///
    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn new(program: &Program, weights: &Weights, max_rows: usize) -> Result<Self, LoadError> {
        let (adaptable, low) = (Adaptable::of(program, weights), Shared::new(0, "adapters")?);
        Ok(Self { adaptable, loaded: BTreeMap::new(), max_rows, rank: 0, low })
    }

    /// Packs pairs of an adapter.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        self.loaded.entry(id).or_default();
        for pair in pairs {
            self.adaptable.check(pair)?;
            if pair.rank() > self.rank {
                let floats = MATRICES.saturating_mul(self.max_rows).saturating_mul(pair.rank());
                (self.low, self.rank) = (Shared::new(floats, "adapters")?, pair.rank());
            }
            // Matrices in floats have one form, whatever the activations.
            let pack = |matrix| PackedMatrix::pack(matrix, Activations::Signed);
            let packed = Pair { a: pack(&pair.a)?, b: pack(&pair.b)?, scale: pair.scale };
            self.loaded.entry(id).or_default().entry(pair.matrix).or_default().push(packed);
        }
        Ok(())
    }

    /// Removes an adapter.
    pub fn unload(&mut self, id: AdapterId) {
        self.loaded.remove(&id);
    }

    /// Returns true if the adapter exists.
    pub fn has(&self, id: AdapterId) -> bool {
        self.loaded.contains_key(&id)
    }

    /// Returns the changes of a matmul, those that apply to the same rows one after the other.
    fn changes(&self, step: &Step<'_>, adapted: &[AdaptedRows], ids: &[MatrixId]) -> Vec<Vec<Change<'_>>> {
        let mut levels: Vec<Vec<Change<'_>>> = Vec::new();
        for AdaptedRows { rows, sequence } in adapted {
            for (linear, id) in ids.iter().enumerate() {
                let pairs = step.adapters_of(*sequence).iter().flat_map(|used| {
                    let AdapterUse { sequence: _, adapter, scale } = used;
                    let pairs = self.loaded.get(adapter).and_then(|adapter| adapter.get(id));
                    pairs.into_iter().flatten().map(move |pair| (pair, scale * pair.scale))
                });
                for (level, (pair, scale)) in pairs.enumerate() {
                    if levels.len() == level {
                        levels.push(Vec::new());
                    }
                    let last = levels[level].last();
                    let first = last.map_or(0, |last| last.first + last.rows.len() * last.pair.a.rows());
                    levels[level].push(Change { pair, linear, rows: rows.clone(), scale, first });
                }
            }
        }
        levels
    }
}

impl Change<'_> {
    /// Units of work of A: a group of ranks and some rows.
    pub fn units(&self) -> usize {
        self.pair.a.groups() * self.rows.len().div_ceil(UNIT_ROWS)
    }

    /// Multiplies rows with A and scales them, for some units.
    pub fn down(
        &self,
        kernels: &MatrixKernels,
        units: Range<usize>,
        input: &MatmulInput,
        low: &Shared<f32>,
        scratch: &mut Scratch,
    ) {
        let Self { pair, linear: _, rows, scale, first } = self;
        let (a, rank) = (&pair.a, pair.a.rows());
        for unit in units {
            let (group, chunk) = (unit % a.groups(), unit / a.groups());
            let begin = chunk * UNIT_ROWS;
            let count = UNIT_ROWS.min(rows.len() - begin);
            let at = first + begin * rank;
            // SAFETY: in this phase the unit's columns of these rows are written by this worker alone, and read by nobody.
            let out = unsafe { Destination::from_raw(low.as_ptr().add(at), low.len() - at, rank) };
            let chunk_rows = rows.start + begin..rows.start + begin + count;
            // SAFETY: inputs are only read in this phase.
            let values = unsafe { input.rows(RowKind::Float, chunk_rows) };
            a.multiply(kernels, 0, values, count, group..group + 1, &out, scratch);
            let columns = group * LANES..rank.min((group + 1) * LANES);
            for row in 0..count {
                let row = at + row * rank;
                // SAFETY: as above.
                let low = unsafe { low.get_mut(row + columns.start..row + columns.end) };
                low.iter_mut().for_each(|value| *value *= scale);
            }
        }
    }

    /// Multiplies the rows of [`Change::down`] with B, and adds the results to some groups of outputs of the matmul.
    fn up(
        &self,
        kernels: &MatrixKernels,
        groups: Range<usize>,
        low: &Shared<f32>,
        out: &Shared<f32>,
        scratch: &mut Scratch,
    ) {
        let (b, count) = (&self.pair.b, self.rows.len());
        let (rank, start) = (b.cols(), self.rows.start * b.rows());
        // SAFETY: products with A are only read in this phase.
        let values = unsafe { low.get(self.first..self.first + count * rank) };
        // SAFETY: in this phase the groups of these rows are written by this worker alone, and read by nobody.
        let out = unsafe { Destination::from_raw(out.as_ptr().add(start), out.len() - start, b.rows()) };
        b.add_product(kernels, Rows::Float { values, stride: rank }, count, groups, &out, scratch);
    }
}

/// The changes of one matmul.
pub struct Changes<'a> {
    levels: Vec<Vec<Change<'a>>>,
    low: &'a Shared<f32>,
}

impl<'a> Changes<'a> {
    /// Returns the units of work of the first level's A, which run beside the matmul.
    pub fn units(&self) -> usize {
        self.levels.first().map_or(0, |level| level.iter().map(Change::units).sum())
    }

    /// Runs some of these units.
    pub fn down(
        &self,
        level: usize,
        range: &Range<usize>,
        kernels: &MatrixKernels,
        input: &MatmulInput,
        scratch: &mut Scratch,
    ) {
        let mut offset = 0;
        for change in self.levels.get(level).into_iter().flatten() {
            let units = ops::part(range, offset, change.units());
            offset += change.units();
            change.down(kernels, units, input, self.low, scratch);
        }
    }
}

impl<'a> Pass<'a> {
    /// Returns the changes of a matmul with these matrices.
    pub fn changes(&self, adapted: &[AdaptedRows], ids: &[MatrixId]) -> Changes<'a> {
        let adapters = self.adapters;
        Changes { levels: adapters.changes(self.step, adapted, ids), low: &adapters.low }
    }

    /// Phases: A, except that of the first level, and B.
    pub fn apply(&mut self, changes: &Changes<'_>, input: &MatmulInput, outs: &[&Shared<f32>]) {
        let (model, low) = (self.model, changes.low);
        for (index, level) in changes.levels.iter().enumerate() {
            if index > 0 {
                let units = level.iter().map(Change::units).sum();
                self.phase(Kernel::AdapterDown, units, Chunking::Guided(1), |worker, range| {
                    changes.down(index, &range, &model.matmul, input, &mut worker.scratch.matmul);
                });
            }
            let groups = level.iter().map(|change| change.pair.b.groups()).sum();
            self.phase(Kernel::AdapterUp, groups, Chunking::Guided(4), |worker, range| {
                let mut offset = 0;
                for change in level {
                    let groups = ops::part(&range, offset, change.pair.b.groups());
                    offset += change.pair.b.groups();
                    change.up(&model.matmul, groups, low, outs[change.linear], &mut worker.scratch.matmul);
                }
            });
        }
    }
}
