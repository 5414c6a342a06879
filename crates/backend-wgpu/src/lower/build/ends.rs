//! Heads for multi-token prediction: embeddings joined with given rows. Towers: operations on patches before the first layer, and on
//! rows of the stream that become fewer; and matmuls with bounds. Rows that become one are consecutive, so joining them moves nothing.

use paguro_backend::{Bounds, Dense, Joined, Linear, Merged, Norm, Patches, RowOp};

use super::Builder;
use crate::lower::{
    node::{Activate, Acts, Kernel, Matmul, Node, NormRows, Places, RowMap, Span},
    slot::Slot,
};

/// Rows between two operations.
#[derive(Clone, Copy)]
struct Rows {
    span: Span,
    /// Elements of a row.
    width: usize,
    /// Rows of the step for each of them.
    merged: usize,
}

impl Builder<'_> {
    /// Makes rows of the stream of given patches.
    pub fn patches(&mut self, op: &Patches) {
        let hidden = self.facts.program.hidden;
        let stride = self.facts.program.given_width();
        self.need(Slot::Given, stride);
        let span = Span { slot: Slot::Given, stride, first: 0 };
        let to = Span { slot: Slot::Stream, stride: hidden, first: 0 };
        self.row_ops(&op.ops, Rows { span, width: op.width, merged: 1 }, to, op.width);
    }

    /// Makes rows of the stream of embeddings and given rows.
    pub fn joined(&mut self, op: &Joined) {
        let hidden = self.facts.program.hidden;
        let (normed, both) = (Slot::Rows(0), Slot::Rows(1));
        self.need(Slot::Given, hidden);
        self.need(normed, hidden);
        self.need(both, 2 * hidden);
        let rows = Span { slot: Slot::Stream, stride: hidden, first: 0 };
        for (norm, first) in [(op.token_norm, 0), (op.given_norm, hidden)] {
            if first > 0 {
                self.push(Kernel::SetGiven);
            }
            let norm = NormRows { to: Some(normed), ..NormRows::new(norm, rows, Acts::Plain) };
            self.push(Kernel::Norm(norm));
            let (from, to) = (Span { slot: normed, ..rows }, Span { slot: both, stride: 2 * hidden, first });
            self.push(Kernel::MapRows { from, to, width: hidden, map: RowMap::Copy });
        }
        self.activations(both, 2 * hidden, None);
        self.matmul(&op.linear, hidden, Acts::Plain, Slot::Stream);
    }

    /// Makes the parts of outputs of the stream after this number of layers.
    pub fn taps(&mut self, merged: &Merged, layers: usize) {
        let hidden = self.facts.program.hidden;
        let stride = merged.taps.len() * merged.width;
        self.sizes.need(Slot::Merged, self.rows.div_ceil(merged.rows) * stride);
        for (index, tap) in merged.taps.iter().enumerate().filter(|(_, tap)| tap.layers == layers) {
            let span = Span { slot: Slot::Stream, stride: hidden, first: 0 };
            let to = Span { slot: Slot::Merged, stride, first: index * merged.width };
            self.row_ops(&tap.ops, Rows { span, width: hidden, merged: 1 }, to, 0);
        }
    }

    /// Runs operations, and copies the resulting rows `to` their place. `added` is the first column of what [`RowOp::Add`] adds.
    fn row_ops(&mut self, ops: &[RowOp], mut rows: Rows, to: Span, mut added: usize) {
        // True if the rows are also the activations of the next matmul.
        let mut is_ready = false;
        for (index, op) in ops.iter().enumerate() {
            let is_before_linear = matches!(ops.get(index + 1), Some(RowOp::Linear { .. }));
            match *op {
                RowOp::Norm(norm) => {
                    let acts = NormRows::new(Some(norm), rows.span, Acts::Plain);
                    self.need_acts(self.rows.div_ceil(rows.merged), rows.width);
                    let next = self.other(rows, rows.width);
                    let to = (!is_before_linear).then_some(next.span.slot);
                    self.push_merged(rows, Kernel::Norm(NormRows { width: rows.width, to, ..acts }));
                    is_ready = is_before_linear;
                    rows = if is_before_linear { rows } else { next };
                }
                RowOp::Linear { linear, width, activation } => {
                    if !is_ready {
                        self.need_acts(self.rows.div_ceil(rows.merged), rows.width);
                        let acts = NormRows::new(None, rows.span, Acts::Plain);
                        self.push_merged(rows, Kernel::Norm(NormRows { width: rows.width, ..acts }));
                    }
                    let next = self.other(rows, width);
                    self.push_merged(rows, Kernel::Matmul(Matmul::new(vec![linear], Acts::Plain, next.span)));
                    rows = next;
                    is_ready = false;
                    match activation {
                        Some(activation) if is_before_linear => {
                            self.need_acts(self.rows.div_ceil(rows.merged), width);
                            let (gate, up, places) = (None, rows.span, Places::Rows);
                            let op = Activate { activation, gate, up, in_turn: false, width, places };
                            self.push_merged(rows, Kernel::Activate(op));
                            is_ready = true;
                        }
                        Some(activation) => rows = self.map(rows, rows.width, RowMap::Activation(activation)),
                        None => {}
                    }
                }
                RowOp::Add => {
                    rows = self.own(rows);
                    let hidden = self.facts.program.hidden;
                    let from =
                        Span { slot: Slot::Given, stride: self.facts.program.given_width(), first: added };
                    self.push(Kernel::MapRows { from, to: rows.span, width: hidden, map: RowMap::Add });
                    added += hidden;
                }
                RowOp::Join(joined) => {
                    // Rows that are a part of wider ones are not consecutive.
                    if rows.span.stride != rows.width {
                        rows = self.own(rows);
                    }
                    let width = rows.width * joined;
                    rows = Rows {
                        span: Span { stride: width, ..rows.span },
                        width,
                        merged: rows.merged * joined,
                    };
                }
                RowOp::Mean { rows: joined, scale } => {
                    let before = Rows { merged: rows.merged * joined, ..rows };
                    rows = self.map(before, rows.width, RowMap::Mean { rows: joined, scale });
                }
                RowOp::Affine { scale, bias } => {
                    rows = self.map(rows, rows.width, RowMap::Affine { scale, bias });
                }
                RowOp::Activate { activation, gated: false } => {
                    rows = self.map(rows, rows.width, RowMap::Activation(activation));
                }
                RowOp::Activate { activation, gated: true } => {
                    // A gate begins with its row.
                    let whole = self.own(rows);
                    let width = whole.width / 2;
                    let up = Rows { span: Span { first: width, ..whole.span }, ..whole };
                    rows = self.map(up, width, RowMap::Gated(activation, whole.span));
                }
            }
        }
        let kernel = Kernel::MapRows { from: rows.span, to, width: rows.width, map: RowMap::Copy };
        self.push_merged(rows, kernel);
    }

    /// Adds a norm of the stream, and bounded matmuls of its rows. Returns the places of their results.
    pub fn bounded<const N: usize>(
        &mut self,
        norm: Option<Norm>,
        linears: [(&Linear, usize); N],
    ) -> [Span; N] {
        let hidden = self.facts.program.hidden;
        let rows = Span { slot: Slot::Stream, stride: hidden, first: 0 };
        let normed = Span { slot: Slot::Rows(0), ..rows };
        self.need(normed.slot, hidden);
        self.push(Kernel::Norm(NormRows { to: Some(normed.slot), ..NormRows::new(norm, rows, Acts::Plain) }));
        let mut number = 0;
        linears.map(|(linear, outputs)| {
            let to = Span { slot: Slot::Scratch(number), stride: outputs, first: 0 };
            number += 1;
            self.need(to.slot, outputs);
            self.bounded_matmul(linear, normed, to);
            to
        })
    }

    /// Adds the bounded matmul of a mixer's output, whose activations have `width` elements.
    pub fn bounded_out(&mut self, linear: &Linear, width: usize, to: Slot) {
        let hidden = self.facts.program.hidden;
        let rows = Span { slot: Slot::Rows(0), stride: width, first: 0 };
        self.need(rows.slot, width);
        self.need(to, hidden);
        self.push(Kernel::Unpack { acts: Acts::Plain, to: rows, width });
        self.bounded_matmul(linear, rows, Span { slot: to, stride: hidden, first: 0 });
    }

    /// Adds a dense network with bounds.
    pub fn bounded_dense(&mut self, dense: &Dense, to: Slot) {
        let Dense { norm, width, gate, up, activation, down, post_norm: _ } = dense;
        let (up, map) = match gate {
            Some(gate) => {
                let [gate, up] = self.bounded(*norm, [(gate, *width), (up, *width)]);
                (up, RowMap::Gated(*activation, gate))
            }
            None => {
                let [up] = self.bounded(*norm, [(up, *width)]);
                (up, RowMap::Activation(*activation))
            }
        };
        let hidden = self.facts.program.hidden;
        let rows = Span { slot: Slot::Rows(0), stride: *width, first: 0 };
        self.need(rows.slot, *width);
        self.need(to, hidden);
        self.push(Kernel::MapRows { from: up, to: rows, width: *width, map });
        self.bounded_matmul(down, rows, Span { slot: to, stride: hidden, first: 0 });
    }

    /// Adds a matmul of rows whose inputs and outputs have bounds.
    fn bounded_matmul(&mut self, linear: &Linear, from: Span, to: Span) {
        let (width, outputs) = (from.stride, to.stride);
        let clamps = |is_input: bool| {
            let Bounds { input_min, input_max, output_min, output_max } = linear.bounds?;
            let [min, max] = if is_input { [input_min, input_max] } else { [output_min, output_max] };
            Some(RowMap::Clamp { min, max })
        };
        let scratch = |stride| Span { slot: Slot::Rows(1), stride, first: 0 };
        self.need(Slot::Rows(1), width.max(outputs));
        self.need_acts(self.rows, width);
        let map = clamps(true).unwrap_or(RowMap::Copy);
        self.push(Kernel::MapRows { from, to: scratch(width), width, map });
        self.push(Kernel::Norm(NormRows::new(None, scratch(width), Acts::Plain)));
        self.push(Kernel::Matmul(Matmul::new(vec![*linear], Acts::Plain, scratch(outputs))));
        let map = clamps(false).unwrap_or(RowMap::Copy);
        self.push(Kernel::MapRows { from: scratch(outputs), to, width: outputs, map });
    }

    /// Returns rows of `width` elements in the slot that `rows` are not in.
    fn other(&mut self, rows: Rows, width: usize) -> Rows {
        let slot = if rows.span.slot == Slot::Rows(0) { Slot::Rows(1) } else { Slot::Rows(0) };
        self.sizes.need(slot, self.rows.div_ceil(rows.merged) * width);
        Rows { span: Span { slot, stride: width, first: 0 }, width, merged: rows.merged }
    }

    /// Adds an operation on each element, and returns its results.
    fn map(&mut self, rows: Rows, width: usize, map: RowMap) -> Rows {
        let next = self.other(rows, width);
        self.push_merged(next, Kernel::MapRows { from: rows.span, to: next.span, width, map });
        next
    }

    /// Returns the rows in a slot that may be changed.
    fn own(&mut self, rows: Rows) -> Rows {
        match rows.span.slot {
            Slot::Rows(_) => rows,
            _ => self.map(rows, rows.width, RowMap::Copy),
        }
    }

    /// Adds a launch with as many rows as these.
    fn push_merged(&mut self, rows: Rows, kernel: Kernel) {
        self.nodes.push(Node { merged: rows.merged, ..Node::new(kernel) });
    }
}
