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
//! Rows of equal adapters are one unit's, wherever they are in the step, so that it reads its part of A and B once.
//!
//! Rows are multiplied in floats, of which a sum has one order for any number of rows. So the bits of a row depend
//! neither on other rows nor on their adapters.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::Arc,
};

use paguro_backend::{
    Adaptable, AdapterId, AdapterUse, LoadError, LowRank, MatrixId, Program, Step, Weights,
};
use paguro_cpu_kernels::{
    matrix::{Activations, Destination, MatrixKernels, PackedMatrix, RowKind, Rows, Scratch},
    ops,
    simd::LANES,
};

use crate::buffers::{MatmulInput, Shared};

/// Matrices of one matmul phase, at most.
const MATRICES: usize = 4;
/// Rows that one unit of work multiplies with A, at most.
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

/// Rows whose sequences use the same adapters.
#[derive(Clone, Debug)]
pub struct AdaptedRows {
    chunks: Arc<[Chunk]>,
    /// A sequence that uses them.
    sequence: usize,
}

/// At most [`UNIT_ROWS`] of these rows.
#[derive(Clone, Debug, Default)]
struct Chunk {
    /// The rows, in order.
    runs: Vec<Range<usize>>,
    /// Number of rows in earlier chunks.
    first: usize,
    count: usize,
}

impl AdaptedRows {
    /// Returns these ascending rows, whose sequences use the adapters of `sequence`.
    pub fn new(rows: impl Iterator<Item = usize>, sequence: usize) -> Self {
        let mut chunks: Vec<Chunk> = Vec::new();
        for row in rows {
            let first = chunks.last().map_or(0, |last| last.first + last.count);
            if chunks.last().is_none_or(|last| last.count == UNIT_ROWS) {
                chunks.push(Chunk { first, ..Chunk::default() });
            }
            let Some(chunk) = chunks.last_mut() else { unreachable!("one was added") };
            chunk.count += 1;
            match chunk.runs.last_mut() {
                Some(run) if run.end == row => run.end += 1,
                _ => chunk.runs.push(row..row + 1),
            }
        }
        Self { chunks: chunks.into(), sequence }
    }

    /// Returns the rows of a step with the same adapters each. `sequences` has the sequence of each row.
    pub fn of_step(step: &Step<'_>, sequences: &[usize]) -> Vec<Self> {
        // A sequence of each, and its rows.
        let mut found: Vec<(usize, Vec<usize>)> = Vec::new();
        let (mut last, mut at) = (None, None);
        let uses = |sequence: usize| {
            step.adapters_of(sequence).iter().map(|used| (used.adapter, used.scale.to_bits()))
        };
        for (row, &sequence) in sequences.iter().enumerate() {
            if last.replace(sequence) != Some(sequence) {
                at = found.iter().position(|(other, _)| uses(*other).eq(uses(sequence)));
                if at.is_none() && uses(sequence).next().is_some() {
                    at = Some(found.len());
                    found.push((sequence, Vec::new()));
                }
            }
            if let Some(at) = at {
                found[at].1.push(row);
            }
        }
        found.into_iter().map(|(sequence, rows)| Self::new(rows.into_iter(), sequence)).collect()
    }

    /// Returns the same rows of a list of ascending rows, as indices of the list; `None` if it has none of them.
    pub fn within(&self, list: &[usize]) -> Option<Self> {
        let rows = self.chunks.iter().flat_map(|chunk| chunk.runs.iter().cloned().flatten());
        let found = Self::new(rows.filter_map(|row| list.binary_search(&row).ok()), self.sequence);
        (!found.chunks.is_empty()).then_some(found)
    }

    fn count(&self) -> usize {
        self.chunks.last().map_or(0, |last| last.first + last.count)
    }
}

/// A pair and the rows that it changes.
struct Change<'a> {
    pair: &'a Pair,
    /// Index of the matmul's matrix.
    linear: usize,
    rows: AdaptedRows,
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

    /// Returns the changes of a matmul with these matrices, those that apply to the same rows one after the other.
    pub fn changes(&self, step: &Step<'_>, adapted: &[AdaptedRows], ids: &[MatrixId]) -> Changes<'_> {
        let mut levels: Vec<Vec<Change<'_>>> = Vec::new();
        for rows in adapted {
            for (linear, id) in ids.iter().enumerate() {
                let pairs = step.adapters_of(rows.sequence).iter().flat_map(|used| {
                    let AdapterUse { sequence: _, adapter, scale } = used;
                    let pairs = self.loaded.get(adapter).and_then(|adapter| adapter.get(id));
                    pairs.into_iter().flatten().map(move |pair| (pair, scale * pair.scale))
                });
                for (level, (pair, scale)) in pairs.enumerate() {
                    if levels.len() == level {
                        levels.push(Vec::new());
                    }
                    let last = levels[level].last();
                    let first = last.map_or(0, |last| last.first + last.rows.count() * last.pair.a.rows());
                    levels[level].push(Change { pair, linear, rows: rows.clone(), scale, first });
                }
            }
        }
        Changes { levels, low: &self.low }
    }
}

impl Change<'_> {
    /// Units of work of A: a group of ranks and a chunk of rows.
    fn units(&self) -> usize {
        self.pair.a.groups() * self.rows.chunks.len()
    }

    /// Multiplies rows with A and scales them, for some units.
    fn down(
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
            let (group, chunk) = (unit % a.groups(), &rows.chunks[unit / a.groups()]);
            let begin = first + chunk.first * rank;
            let mut at = begin;
            for run in &chunk.runs {
                // SAFETY: in this phase the unit's columns of these rows are written by this worker alone, and read by nobody.
                let out = unsafe { Destination::from_raw(low.as_ptr().add(at), low.len() - at, rank) };
                // SAFETY: inputs are only read in this phase.
                let values = unsafe { input.rows(RowKind::Float, run.clone()) };
                a.multiply(kernels, 0, values, run.len(), group..group + 1, &out, scratch);
                at += run.len() * rank;
            }
            let columns = group * LANES..rank.min((group + 1) * LANES);
            for row in (begin..at).step_by(rank) {
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
        let b = &self.pair.b;
        let (rank, mut at) = (b.cols(), self.first);
        for run in self.rows.chunks.iter().flat_map(|chunk| &chunk.runs) {
            let (start, end) = (run.start * b.rows(), at + run.len() * rank);
            // SAFETY: products with A are only read in this phase.
            let values = unsafe { low.get(at..end) };
            at = end;
            // SAFETY: in this phase the groups of these rows are written by this worker alone, and read by nobody.
            let out = unsafe { Destination::from_raw(out.as_ptr().add(start), out.len() - start, b.rows()) };
            let rows = Rows::Float { values, stride: rank };
            b.add_product(kernels, rows, run.len(), groups.clone(), &out, scratch);
        }
    }
}

/// The changes of one matmul.
pub struct Changes<'a> {
    levels: Vec<Vec<Change<'a>>>,
    low: &'a Shared<f32>,
}

impl Changes<'_> {
    /// Returns the number of pairs that change the same rows one after the other.
    pub fn levels(&self) -> usize {
        self.levels.len()
    }

    /// Returns the units of work of a level's A. Those of the first one run beside the matmul.
    pub fn units(&self, level: usize) -> usize {
        self.levels.get(level).into_iter().flatten().map(Change::units).sum()
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

    /// Returns the groups of outputs of a level's B.
    pub fn groups(&self, level: usize) -> usize {
        self.levels[level].iter().map(|change| change.pair.b.groups()).sum()
    }

    /// Adds some of these groups to the outputs of the matmul's matrices.
    pub fn up(
        &self,
        level: usize,
        range: &Range<usize>,
        kernels: &MatrixKernels,
        outs: &[&Shared<f32>],
        scratch: &mut Scratch,
    ) {
        let mut offset = 0;
        for change in &self.levels[level] {
            let groups = ops::part(range, offset, change.pair.b.groups());
            offset += change.pair.b.groups();
            change.up(kernels, groups, self.low, outs[change.linear], scratch);
        }
    }
}
