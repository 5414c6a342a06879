//! Buffers of operations on rows.

use paguro_backend::{Exit, Input, LoadError, Patches, Program, RowOp};
use paguro_cpu_kernels::quantize::row_blocks;

use crate::buffers::{MatmulInput, Shared};

/// Rows of a result that are computed at once, which bounds the buffers.
pub const BLOCK_ROWS: usize = 256;

/// Buffers of operations on rows.
pub struct RowOpBuffers {
    /// Rows before and after an operation.
    pub rows: [Shared<f32>; 2],
    /// Input of a matmul.
    pub input: MatmulInput,
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
                | RowOp::Affine { scale: _, bias: _ }
                | RowOp::Activate { activation: _, gated: _ } => self.input_rows,
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
