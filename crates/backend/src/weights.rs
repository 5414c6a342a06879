//! Weights as they lie in the file, by number.

use std::{fmt, ops::Range, sync::Arc};

use crate::{MatrixId, VectorId, WeightFormat};

/// All weights of a program.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    /// By [`MatrixId`].
    pub matrices: Vec<Matrix>,
    /// Norm weights and biases, by [`VectorId`].
    pub vectors: Vec<Vec<f32>>,
}

impl Weights {
    /// The matrix with this id. Ids come from lowering, which made both.
    pub fn matrix(&self, id: MatrixId) -> &Matrix {
        &self.matrices[id.0 as usize]
    }

    /// The vector with this id.
    pub fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }
}

/// A matrix `[rows, cols]`, row by row, each row a whole number of the format's blocks.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// The tensor's name in its file, for errors.
    pub name: String,
    /// How a row is encoded.
    pub format: WeightFormat,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `rows * format.row_bytes(cols)` bytes.
    pub bytes: Bytes,
}

impl Matrix {
    /// The encoded bytes of row `row`.
    pub fn row(&self, row: usize) -> &[u8] {
        let stride = self.format.row_bytes(self.cols);
        &self.bytes.as_slice()[row * stride..][..stride]
    }

    /// Decodes row `row` into `out`, `[cols]`.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        self.format.dequantize(self.row(row), out);
    }
}

/// Who keeps bytes alive: a mapped file, a static slice, a vector.
pub trait ByteOwner: Send + Sync {
    /// All of its bytes; the same ones for its whole life.
    fn bytes(&self) -> &[u8];

    /// Says that `range` will not be read soon, because a backend keeps its own copy: a mapped file gives the
    /// memory back (and would read it from disk again).
    fn discard(&self, _range: Range<usize>) {}
}

impl ByteOwner for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl ByteOwner for &'static [u8] {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A shared range of somebody's bytes.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn ByteOwner>,
    range: Range<usize>,
}

impl Bytes {
    /// `range` of `owner`'s bytes.
    ///
    /// # Panics
    /// If the range is not inside; parsers check it first.
    pub fn new(owner: Arc<dyn ByteOwner>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= owner.bytes().len(), "range outside of its owner");
        Self { owner, range }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.owner.bytes()[self.range.clone()]
    }

    /// A part of these bytes; rows of a fused projection are taken this way.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.end <= self.range.len());
        Self {
            owner: self.owner.clone(),
            range: self.range.start + range.start..self.range.start + range.end,
        }
    }

    /// See [`ByteOwner::discard`].
    pub fn discard(&self) {
        self.owner.discard(self.range.clone());
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self { owner: Arc::new(bytes), range: 0..len }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({:?})", self.range)
    }
}
