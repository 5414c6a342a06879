//! Tensors as they lie in a file, whatever its format.

use std::{borrow::Cow, fmt};

use paguro_backend::{Bytes, WeightFormat};

/// A named tensor and its bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// How it is encoded.
    pub dtype: DType,
    /// Outermost dimension first: a matrix is `[rows, cols]`. (GGUF writes the reverse.)
    pub shape: Vec<usize>,
    /// The encoded elements, row by row. Empty if the type is one whose size is not known.
    pub bytes: Bytes,
    /// Where the bytes begin in the file.
    pub offset: u64,
    /// Which of a split model's files holds them, from 0.
    pub file: usize,
}

impl Tensor {
    /// Number of elements. Readers have checked that it fits; the other dimensions of an empty tensor may have any size.
    pub fn elements(&self) -> u64 {
        if self.shape.contains(&0) {
            return 0;
        }
        self.shape.iter().map(|&dim| dim as u64).product()
    }
}

/// The type of a tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// One that Paguro computes with.
    Weight(WeightFormat),
    /// Any other, by its name in the file's format. It can be listed, but no model can be built from it.
    Other(Cow<'static, str>),
}

impl DType {
    /// The weight format, unless it is one that is only listed.
    pub fn weight_format(&self) -> Option<WeightFormat> {
        match self {
            DType::Weight(format) => Some(*format),
            DType::Other(_) => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DType::Weight(format) => format.fmt(f),
            DType::Other(name) => f.pad(name),
        }
    }
}
