//! Tensors of a file, independent of its format.

use std::{borrow::Cow, fmt};

use paguro_backend::{Bytes, WeightFormat};

use crate::gguf;

/// A named tensor and its bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Outermost dimension first: a matrix is `[rows, cols]`. (GGUF writes the reverse.)
    pub shape: Vec<usize>,
    /// The encoded elements, row by row. Empty if the type is one whose size is not known.
    pub bytes: Bytes,
    /// Offset of its bytes in the file.
    pub offset: u64,
    /// Index of its file in a split model, from 0.
    pub file: usize,
}

impl Tensor {
    /// Returns the number of elements. Readers have checked that it fits; the other dimensions of an empty tensor may
    /// have any size.
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
    /// A supported format.
    Weight(WeightFormat),
    /// Any other type, by its name in the file's format. It can be listed but not used.
    Other(Cow<'static, str>),
}

impl DType {
    /// Returns the weight format, unless it is one that is only listed.
    pub fn weight_format(&self) -> Option<WeightFormat> {
        match self {
            DType::Weight(format) => Some(*format),
            DType::Other(_) => None,
        }
    }

    /// Returns the number that GGUF files give the type, if they have it (`enum ggml_type`).
    pub fn ggml_type(&self) -> Option<u32> {
        match self {
            DType::Weight(format) => Some(format.ggml_type()).filter(|&number| number != u32::MAX),
            DType::Other(name) => gguf::number_of_type(name),
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
