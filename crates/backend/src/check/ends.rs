//! Checks of the ends of towers.

use super::{Checker, finite, nonzero, require};
use crate::{Activation, LoadError, Merged, Patches, RowOp};

impl Checker<'_> {
    pub(super) fn patches(&self, patches: &Patches) -> Result<(), LoadError> {
        let Patches { width, ops } = patches;
        nonzero("the width of patches", &[*width])?;
        let end = self.row_ops(ops, 1, *width, true)?;
        require(end == (1, self.hidden), || {
            format!("patches become {end:?} rows of a stream of {}", self.hidden)
        })
    }

    pub(super) fn merged(&self, merged: &Merged, layers: usize) -> Result<(), LoadError> {
        let Merged { rows, width, taps } = merged;
        nonzero("a dimension of merged rows", &[*rows, *width, taps.len()])?;
        for tap in taps {
            require(tap.layers <= layers, || format!("rows after layer {} of {layers}", tap.layers))?;
            let end = self.row_ops(&tap.ops, *rows, self.hidden, false)?;
            require(end == (1, *width), || format!("{rows} rows become {end:?}, not one of {width}"))?;
        }
        Ok(())
    }

    /// Checks operations on `rows` rows of `width` elements. Returns the number of rows and their width at the end.
    fn row_ops(
        &self,
        ops: &[RowOp],
        mut rows: usize,
        mut width: usize,
        is_beginning: bool,
    ) -> Result<(usize, usize), LoadError> {
        for op in ops {
            match op {
                RowOp::Norm(norm) => self.norm(norm, width)?,
                RowOp::Linear { linear, width: out, activation } => {
                    nonzero("the width of rows", &[*out])?;
                    self.linear(linear, *out, width)?;
                    unclamped(*activation)?;
                }
                RowOp::Add => require(is_beginning && width == self.hidden, || {
                    format!("something is added to rows of {width} elements")
                })?,
                RowOp::Join(joined) | RowOp::Mean { rows: joined, scale: _ } => {
                    let fits = *joined > 0 && rows.is_multiple_of(*joined);
                    require(fits && !is_beginning, || format!("{joined} of {rows} rows become one"))?;
                }
                RowOp::Affine { scale, bias } => {
                    self.vector(*scale, width)?;
                    self.vector(*bias, width)?;
                }
                RowOp::Activate { activation, gated } => {
                    unclamped(Some(*activation))?;
                    let halves = !gated || width.is_multiple_of(2);
                    require(halves, || format!("gates of rows of {width} elements"))?;
                }
            }
            if let RowOp::Mean { rows: _, scale } = op {
                finite("the scale of a mean", *scale)?;
            }
            (rows, width) = op.shape(rows, width);
        }
        Ok((rows, width))
    }
}

fn unclamped(activation: Option<Activation>) -> Result<(), LoadError> {
    let clamped = matches!(activation, Some(Activation::ClampedSwiglu { alpha: _, limit: _ }));
    require(!clamped, || "clamped SwiGLU of rows".to_owned())
}
