//! Ends of programs whose rows are no tokens: towers for images.
//!
//! Both ends are lists of operations on rows. Rows that become one are consecutive, so that no operation moves rows.

use super::{Activation, Linear, Norm, VectorId};

/// Beginning of a program whose rows are given in another width than that of the stream, such as the pixels of a patch.
#[derive(Clone, Debug)]
pub struct Patches {
    /// Elements of a given row before those that [`RowOp::Add`] adds.
    pub width: usize,
    /// Makes a row of the stream of a given row, `[width]` to `[hidden]`. Rows do not become fewer.
    pub ops: Vec<RowOp>,
}

/// End of a program whose outputs are made of several consecutive rows of the stream.
#[derive(Clone, Debug)]
pub struct Merged {
    /// Consecutive rows that become one: every sequence has a multiple of them. An output is that of the first of them.
    pub rows: usize,
    /// Elements of one tap's result.
    pub width: usize,
    /// Parts of an output, `[taps, width]`.
    pub taps: Vec<Tap>,
}

/// Rows of the stream between two layers or after the last one, as a part of an output.
#[derive(Clone, Debug)]
pub struct Tap {
    /// Number of layers before it.
    pub layers: usize,
    /// Makes a part of an output of rows of the stream, `[rows, hidden]` to `[width]`.
    pub ops: Vec<RowOp>,
}

/// An operation on rows.
#[derive(Clone, Copy, Debug)]
pub enum RowOp {
    /// Norms each row.
    Norm(Norm),
    /// Multiplies each row.
    Linear {
        /// `[width, elements of a row]`
        linear: Linear,
        /// Elements of the result.
        width: usize,
        /// Applied to the result.
        activation: Option<Activation>,
    },
    /// Adds the next `hidden` numbers of the given row, such as the embedding of its place; only at the beginning.
    Add,
    /// Makes one row of several consecutive rows: one after the other.
    Join(usize),
    /// Makes one row of several consecutive rows: their mean, multiplied by a number.
    Mean {
        /// Rows that become one.
        rows: usize,
        /// Multiplies the mean.
        scale: f32,
    },
    /// `x * scale + bias`, element by element.
    Affine {
        /// Factors.
        scale: VectorId,
        /// Summands.
        bias: VectorId,
    },
    /// Applies an activation to each element. If `gated`, it applies it to the first half of a row and multiplies the result with the
    /// second half.
    Activate {
        /// The activation.
        activation: Activation,
        /// True if rows become half as wide.
        gated: bool,
    },
}

impl Patches {
    /// Returns the number of elements of a given row.
    pub fn given_width(&self, hidden: usize) -> usize {
        self.width + hidden * self.ops.iter().filter(|op| matches!(op, RowOp::Add)).count()
    }
}

impl RowOp {
    /// Returns the number of rows and the width after the operation on `rows` rows of `width` elements, of which `rows` is a
    /// multiple of those that become one.
    pub fn shape(&self, rows: usize, width: usize) -> (usize, usize) {
        match *self {
            Self::Norm(_) | Self::Add | Self::Affine { scale: _, bias: _ } => (rows, width),
            Self::Linear { linear: _, width, activation: _ } => (rows, width),
            Self::Join(joined) => (rows / joined, width * joined),
            Self::Mean { rows: mean, scale: _ } => (rows / mean, width),
            Self::Activate { activation: _, gated } => (rows, if gated { width / 2 } else { width }),
        }
    }

    /// Returns the number of rows that become one.
    pub fn joins(&self) -> usize {
        match *self {
            Self::Join(rows) | Self::Mean { rows, scale: _ } => rows,
            Self::Norm(_)
            | Self::Linear { linear: _, width: _, activation: _ }
            | Self::Add
            | Self::Affine { scale: _, bias: _ }
            | Self::Activate { activation: _, gated: _ } => 1,
        }
    }
}
