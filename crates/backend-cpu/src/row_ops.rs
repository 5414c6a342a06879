//! Ends of towers: operations on rows, [`BLOCK_ROWS`] of their results at a time, as phases of the thread pool. Each phase is shared
//! by row, except for matmuls.

use std::{ops::Range, sync::PoisonError};

use paguro_backend::{Exit, Input, LoadError, Norm, OutputValue, Patches, Program, RowOp};

use crate::{
    buffers::MatmulInput,
    counters::Kernel,
    forward::{AllPending, Answers, Pass},
    model::Kinds,
    quantize::row_blocks,
    shared::Shared,
    thread_pool::Chunking,
    worker::Worker,
};

/// Rows of a result that are computed at once, which bounds the buffers.
const BLOCK_ROWS: usize = 256;

/// Buffers of operations on rows.
pub struct RowOpBuffers {
    /// Rows before and after an operation.
    rows: [Shared<f32>; 2],
    /// Input of a matmul.
    input: MatmulInput,
}

/// Elements of [`RowOpBuffers`]; zeros in programs without such operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowOpSizes {
    /// Elements of all rows of a block.
    block: usize,
    /// Input rows of a matmul.
    input_rows: usize,
    /// Elements of the widest row.
    pub widest: usize,
}

impl RowOpSizes {
    /// Returns the sizes for steps of at most `max_rows` rows.
    pub fn of(program: &Program, max_rows: usize) -> Self {
        let mut sizes = Self::default();
        let block = |rows: usize| BLOCK_ROWS.min(max_rows.div_ceil(rows.max(1)));
        if let Input::Patches(Patches { width, ops }) = &program.input {
            sizes.add(ops, block(1), *width);
        }
        if let Exit::Merged(merged) = &program.exit {
            for tap in &merged.taps {
                sizes.add(&tap.ops, block(merged.rows) * merged.rows, program.hidden);
            }
        }
        sizes
    }

    fn add(&mut self, ops: &[RowOp], mut rows: usize, mut width: usize) {
        self.widest = self.widest.max(width);
        self.block = self.block.max(rows * width);
        for op in ops {
            self.input_rows = match op {
                RowOp::Linear { linear: _, width: _, activation: _ } => self.input_rows.max(rows),
                RowOp::Norm(_)
                | RowOp::Add
                | RowOp::Join(_)
                | RowOp::Mean { rows: _, scale: _ }
                | RowOp::Affine { scale: _, bias: _ } => self.input_rows,
            };
            (rows, width) = op.shape(rows, width);
            self.widest = self.widest.max(width);
            self.block = self.block.max(rows * width);
        }
    }

    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn allocate(&self) -> Result<RowOpBuffers, LoadError> {
        let rows = || Shared::new(self.block, "ends of a tower");
        let (count, width) = (self.input_rows, self.widest);
        Ok(RowOpBuffers {
            rows: [rows()?, rows()?],
            input: MatmulInput {
                quantized: Shared::new(count * row_blocks(width), "quantized rows of a tower")?,
                float: Shared::new(count * width, "rows of a tower")?,
                quantized_stride: row_blocks(width),
                float_stride: width,
            },
        })
    }

    /// Returns the floats of all buffers.
    pub fn floats(&self) -> usize {
        2 * self.block + self.input_rows * self.widest
    }

    /// Returns the quantized blocks of all buffers.
    pub fn blocks(&self) -> usize {
        self.input_rows * row_blocks(self.widest)
    }
}

/// Rows in one of the buffers.
#[derive(Clone, Copy)]
struct Rows {
    /// Index into [`RowOpBuffers::rows`].
    at: usize,
    count: usize,
    width: usize,
}

impl Pass<'_> {
    /// Phases: the residual stream before the first layer, of patches.
    pub fn patches(&mut self, op: &Patches) {
        let (hidden, count) = (self.model.program.hidden, self.rows());
        for first in (0..count).step_by(BLOCK_ROWS) {
            let rows = Rows { at: 0, count: BLOCK_ROWS.min(count - first), width: op.width };
            self.each(Kernel::Embed, rows, move |worker, row, x| {
                let given = worker.step.given_row(first + row, worker.model.program.given_width());
                x.copy_from_slice(&given.unwrap_or_default()[..op.width]);
            });
            let rows = self.row_ops(&op.ops, rows, first, op.width);
            self.each(Kernel::Embed, rows, move |worker, row, x| {
                // SAFETY: the phase is shared by row.
                unsafe { worker.write(&worker.buffers.x, first + row, hidden) }.copy_from_slice(x);
            });
        }
    }

    /// Phases: the taps after this number of layers. Returns what is still to be added to the stream.
    pub fn taps(&mut self, layers: usize, pending: AllPending, answers: &Answers) -> AllPending {
        let model = self.model;
        let Some(merged) = model.program.merged() else { return pending };
        if !merged.taps.iter().any(|tap| tap.layers == layers) {
            return pending;
        }
        let (hidden, all) = (model.program.hidden, self.rows());
        self.phase(Kernel::AddNorm, all, Chunking::Guided(4), |worker, range| {
            range.for_each(|row| worker.add_pending(row, pending));
        });
        let count = all / merged.rows;
        for (index, tap) in merged.taps.iter().enumerate().filter(|(_, tap)| tap.layers == layers) {
            for first in (0..count).step_by(BLOCK_ROWS) {
                let block = first..count.min(first + BLOCK_ROWS);
                let rows = Rows { at: 0, count: block.len() * merged.rows, width: hidden };
                self.each(Kernel::AddNorm, rows, move |worker, row, x| {
                    // SAFETY: no phase of operations on rows writes the stream while it is read.
                    let from = unsafe { worker.read(&worker.buffers.x, first * merged.rows + row, hidden) };
                    x.copy_from_slice(from);
                });
                let rows = self.row_ops(&tap.ops, rows, 0, 0);
                self.answer(block, merged.rows, index, rows, answers);
            }
        }
        AllPending::NONE
    }

    /// Copies merged rows `block` into the answers that want them, as part `index`.
    fn answer(&self, block: Range<usize>, merged: usize, index: usize, rows: Rows, answers: &Answers) {
        let Rows { at, width, count: _ } = rows;
        for (output, answer) in self.step.outputs.iter().zip(answers) {
            let row = output.row / merged;
            if !block.contains(&row) {
                continue;
            }
            let row = row - block.start;
            // SAFETY: no phase is open.
            let from = unsafe { self.buffers.row_ops.rows[at].get(row * width..(row + 1) * width) };
            let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
            let all = self.model.program.residual_width();
            let answer = answer.get_or_insert_with(|| OutputValue::Residual(vec![0.0; all]));
            if let OutputValue::Residual(to) = answer {
                to[index * width..][..width].copy_from_slice(from);
            }
        }
    }

    /// Phases: operations on rows. `first` is the row of the step that the first one belongs to, and `added` the place in given rows
    /// of what is added. Returns the rows at the end.
    fn row_ops(&mut self, ops: &[RowOp], mut rows: Rows, first: usize, mut added: usize) -> Rows {
        let (model, buffers) = (self.model, &self.buffers.row_ops);
        for op in ops {
            let (count, width) = op.shape(rows.count, rows.width);
            match *op {
                RowOp::Norm(norm) => self.each(Kernel::AddNorm, rows, move |worker, _, x| {
                    normed(worker, norm, x);
                }),
                RowOp::Linear { linear, width, activation } => {
                    let kinds = Kinds::of(model, &[linear]);
                    self.each(Kernel::Quantize, rows, move |worker, row, x| {
                        worker.set_input(&buffers.input, row, 0, x, kinds, true);
                    });
                    let to = 1 - rows.at;
                    self.multiply_rows(&buffers.input, count, &[], [(linear.matrix, &buffers.rows[to])]);
                    rows = Rows { at: to, count, width };
                    if linear.bias.is_some() || activation.is_some() {
                        self.each(Kernel::Activate, rows, move |worker, _, x| {
                            if let Some(bias) = linear.bias {
                                worker.model.rows.add(x, worker.model.vector(bias));
                            }
                            if let Some(activation) = activation {
                                worker.model.rows.activate(x, activation);
                            }
                        });
                    }
                }
                RowOp::Add => {
                    let hidden = model.program.hidden;
                    self.each(Kernel::Embed, rows, move |worker, row, x| {
                        let given = worker.step.given_row(first + row, worker.model.program.given_width());
                        worker.model.rows.add(x, &given.unwrap_or_default()[added..][..hidden]);
                    });
                    added += hidden;
                }
                RowOp::Join(_) => {}
                RowOp::Mean { rows: joined, scale } => {
                    let (from, to) = (rows.at, 1 - rows.at);
                    self.each(Kernel::AddNorm, Rows { at: to, count, width }, move |worker, row, x| {
                        x.fill(0.0);
                        for one in row * joined..(row + 1) * joined {
                            // SAFETY: no worker writes this buffer in this phase.
                            let from = unsafe { worker.read(&worker.buffers.row_ops.rows[from], one, width) };
                            worker.model.rows.add(x, from);
                        }
                        worker.model.rows.scale(x, scale / joined as f32);
                    });
                    rows.at = to;
                }
                RowOp::Affine { scale, bias } => self.each(Kernel::AddNorm, rows, move |worker, _, x| {
                    let (scale, bias) = (worker.model.vector(scale), worker.model.vector(bias));
                    let factors = scale.iter().zip(bias);
                    x.iter_mut().zip(factors).for_each(|(x, (scale, bias))| *x = *x * scale + bias);
                }),
            }
            (rows.count, rows.width) = (count, width);
        }
        rows
    }

    /// Phase: `work` with the number and the elements of each row.
    fn each(
        &mut self,
        kernel: Kernel<'_>,
        rows: Rows,
        work: impl Fn(&mut Worker<'_>, usize, &mut [f32]) + Sync,
    ) {
        let Rows { at, count, width } = rows;
        self.phase(kernel, count, Chunking::Guided(4), |worker, range| {
            let buffers = worker.buffers;
            for row in range {
                // SAFETY: the phase is shared by row.
                let x = unsafe { buffers.row_ops.rows[at].get_mut(row * width..(row + 1) * width) };
                work(worker, row, x);
            }
        });
    }
}

/// Norms a row in place.
fn normed(worker: &mut Worker<'_>, norm: Norm, x: &mut [f32]) {
    let out = &mut worker.scratch.row[..x.len()];
    worker.model.norm(Some(norm), x, out);
    x.copy_from_slice(out);
}
