//! Packed weights and matmuls: `out[row][o] = Σ_k x[row][k] * w[o][k]`.
//!
//! Weights are repacked once at load: 16 output rows are interleaved, so that the 16 lanes of a vector accumulate 16
//! different outputs, and the sum over inputs of every output has one order for any number of rows in the step. Results
//! are bitwise equal in any batch, on every instruction set, and for any division of the groups among threads.

mod block;
mod cache;
mod decode;
mod destination;
mod float;
mod integer;
mod layout;
mod memory;
mod pack;
mod packed_block;
mod panel;
#[cfg(test)]
mod tests;

use std::{
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use paguro_backend::{LoadError, Matrix, WeightFormat};

use self::{layout::Layout, memory::Memory};
use crate::{
    isa::{Isa, simd_kernels},
    quantize::{self, QuantBlock},
    simd::LANES,
};
pub use destination::Destination;

simd_kernels! {
    /// Kernels for each packed format, and of the activations' conversion.
    struct Table {
        fn quantize_row(x: &[f32], out: &mut [QuantBlock]) = quantize::quantize_row;
        fn range_row(x: &[f32], out: &mut [QuantBlock]) = quantize::range_row;
        fn f32(job: &float::Job<'_>, scratch: &mut Scratch) = float::multiply::<_, float::F32>;
        fn f16(job: &float::Job<'_>, scratch: &mut Scratch) = float::multiply::<_, float::F16>;
        fn bf16(job: &float::Job<'_>, scratch: &mut Scratch) = float::multiply::<_, float::BF16>;
        fn q4_0(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q4_0>;
        fn q4_1(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q4_1>;
        fn q5_0(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q5_0>;
        fn q5_1(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q5_1>;
        fn q8_0(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q8_0>;
        fn q8_0_ranged(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q8_0Ranged>;
        fn q2_k(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q2_K>;
        fn q3_k(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q3_K>;
        fn q4_k(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q4_K>;
        fn q5_k(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q5_K>;
        fn q6_k(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q6_K>;
        fn iq1_s(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::IQ1_S>;
        fn iq1_m(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::IQ1_M>;
        fn iq2_xxs(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::IQ2_XXS>;
        fn iq2_xs(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::IQ2_XS>;
        fn iq3_xxs(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::IQ3_XXS>;
        fn iq3_s(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::IQ3_S>;
        fn tq2_0(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::TQ2_0>;
        fn q2_0(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::Q2_0>;
        fn nvfp4(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::NVFP4>;
        fn iq4_nl(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::IQ4_NL>;
        fn iq4_xs(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::IQ4_XS>;
        fn mxfp4(job: &integer::Job<'_>, scratch: &mut Scratch) = integer::multiply::<_, layout::MXFP4>;
    }
}

/// Form of quantized activations, the same in all matmuls of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Signed eight bits, see [`quantize::quantize_row`].
    Signed,
    /// Unsigned seven bits, see [`quantize::range_row`]. Only for weights in Q8_0 or in floats.
    Ranged,
}

/// Matmuls and conversions of their inputs, for one instruction set.
#[derive(Clone, Copy)]
pub struct MatrixKernels {
    table: Table,
    activations: Activations,
}

impl MatrixKernels {
    /// The kernels for `isa`.
    pub fn new(isa: Isa, activations: Activations) -> Self {
        Self { table: Table::new(isa), activations }
    }

    /// Quantizes one row.
    pub fn quantize_row(&self, x: &[f32], out: &mut [QuantBlock]) {
        match self.activations {
            Activations::Signed => self.table.quantize_row(x, out),
            Activations::Ranged => self.table.range_row(x, out),
        }
    }
}

/// The rows that are multiplied.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// For quantized weights: row `r` starts at `blocks[r * stride]`.
    Quantized {
        /// Result of [`MatrixKernels::quantize_row`].
        blocks: &'a [QuantBlock],
        /// Blocks from one row to the next; [`quantize::row_blocks`] of the width.
        stride: usize,
    },
    /// For weights in floats: row `r` starts at `values[r * stride]`.
    Float {
        /// Plain activations.
        values: &'a [f32],
        /// Floats from one row to the next.
        stride: usize,
    },
}

/// Kind of [`Rows`] that a matrix multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// [`Rows::Quantized`]
    Quantized,
    /// [`Rows::Float`]
    Float,
}

/// Working memory of one thread: unpacked weights and running sums.
#[derive(Default)]
pub struct Scratch {
    panel: panel::Panel,
    float: float::Panel,
}

/// A packed matrix or stack of matrices. Each matrix of a stack begins with a new group.
pub struct PackedMatrix {
    memory: Memory,
    format: WeightFormat,
    /// Layout of quantized weights.
    layout: Option<Layout>,
    parts: usize,
    rows: usize,
    cols: usize,
    group_bytes: usize,
}

impl PackedMatrix {
    /// Packs on the calling thread. [`Packing`] does it on many.
    ///
    /// # Errors
    /// As [`Packing::new`] and [`Packing::finish`].
    pub fn pack(source: &Matrix, activations: Activations) -> Result<Self, LoadError> {
        let packing = Packing::new(source, activations)?;
        packing.work();
        packing.finish()
    }

    /// Returns the bytes of a packed matrix.
    pub fn packed_bytes(source: &Matrix, activations: Activations) -> usize {
        let groups = source.parts.saturating_mul(source.rows.div_ceil(LANES));
        let layout = layout::layout_of(source.format, activations);
        groups.saturating_mul(group_bytes(source.format, layout.as_ref(), source.cols))
    }

    /// Outputs of each matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the encoding of the weights.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Groups of 16 outputs of each matrix: the unit in which threads share a matmul.
    pub fn groups(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Groups of all matrices of the stack.
    fn all_groups(&self) -> usize {
        self.parts * self.groups()
    }

    /// Bytes that a matmul with one matrix reads.
    pub fn bytes(&self) -> usize {
        self.groups() * self.group_bytes
    }

    /// Form of the quantized rows that it multiplies.
    fn activations(&self) -> Activations {
        match self.layout {
            Some(Layout { ranged: true, .. }) => Activations::Ranged,
            _ => Activations::Signed,
        }
    }

    /// Returns the kind of rows that it multiplies.
    pub fn row_kind(&self) -> RowKind {
        if self.layout.is_some() { RowKind::Quantized } else { RowKind::Float }
    }

    /// The kernel's name in counters: `matmul_q4_k/avx512vnni`.
    pub fn kernel_name(&self, isa: Isa) -> String {
        format!("matmul_{}/{isa}", self.format.name().to_lowercase())
    }

    /// Multiplies the first `count` of `rows` by the outputs of `groups` in matrix `part` of the stack. Threads may
    /// compute different groups concurrently.
    ///
    /// # Panics
    /// If `rows` is not of this matrix' [`PackedMatrix::row_kind`] or too short, or `out` is too small.
    #[allow(clippy::too_many_arguments)] // a matrix, its rows, the share of the work, and where the result goes
    pub fn multiply(
        &self,
        kernels: &MatrixKernels,
        part: usize,
        rows: Rows<'_>,
        count: usize,
        groups: Range<usize>,
        out: &Destination<'_>,
        scratch: &mut Scratch,
    ) {
        self.run(kernels, part, rows, count, groups, out, false, scratch);
    }

    /// Adds the products to `out`, which has results of a matmul with as many outputs. Only for weights in floats.
    ///
    /// # Panics
    /// As [`PackedMatrix::multiply`], and for quantized weights.
    pub fn add_product(
        &self,
        kernels: &MatrixKernels,
        rows: Rows<'_>,
        count: usize,
        groups: Range<usize>,
        out: &Destination<'_>,
        scratch: &mut Scratch,
    ) {
        self.run(kernels, 0, rows, count, groups, out, true, scratch);
    }

    #[allow(clippy::too_many_arguments)] // as above
    fn run(
        &self,
        kernels: &MatrixKernels,
        part: usize,
        rows: Rows<'_>,
        count: usize,
        groups: Range<usize>,
        out: &Destination<'_>,
        adds: bool,
        scratch: &mut Scratch,
    ) {
        assert!(part < self.parts && groups.end <= self.groups());
        out.check(count, self.rows);
        if count == 0 || groups.is_empty() {
            return;
        }
        let bytes = &self.memory.bytes()[part * self.bytes()..][..self.bytes()];
        match rows {
            Rows::Quantized { blocks, stride } => {
                assert!(!adds, "sums of integers begin at zero");
                assert_eq!(self.activations(), kernels.activations);
                assert!(quantize::row_blocks(self.cols) <= stride && (count - 1) * stride < blocks.len());
                assert!(quantize::row_blocks(self.cols) <= blocks.len() - (count - 1) * stride);
                let job = integer::Job {
                    weights: bytes,
                    group_bytes: self.group_bytes,
                    groups,
                    outputs: self.rows,
                    blocks,
                    stride,
                    count,
                    out,
                };
                let kernel = match self.format {
                    WeightFormat::Q4_0 => Table::q4_0,
                    WeightFormat::Q4_1 => Table::q4_1,
                    WeightFormat::Q5_0 => Table::q5_0,
                    WeightFormat::Q5_1 => Table::q5_1,
                    WeightFormat::Q8_0 if self.activations() == Activations::Ranged => Table::q8_0_ranged,
                    WeightFormat::Q8_0 => Table::q8_0,
                    WeightFormat::Q2_K => Table::q2_k,
                    WeightFormat::Q3_K => Table::q3_k,
                    WeightFormat::Q4_K => Table::q4_k,
                    WeightFormat::Q5_K => Table::q5_k,
                    WeightFormat::Q6_K => Table::q6_k,
                    WeightFormat::IQ1_S => Table::iq1_s,
                    WeightFormat::IQ1_M => Table::iq1_m,
                    WeightFormat::IQ2_XXS => Table::iq2_xxs,
                    WeightFormat::IQ2_XS | WeightFormat::IQ2_S => Table::iq2_xs,
                    WeightFormat::IQ3_XXS => Table::iq3_xxs,
                    WeightFormat::IQ3_S => Table::iq3_s,
                    WeightFormat::TQ2_0 | WeightFormat::TQ1_0 => Table::tq2_0,
                    WeightFormat::Q2_0 | WeightFormat::Q1_0 => Table::q2_0,
                    WeightFormat::NVFP4 | WeightFormat::NVFP4_SCALED => Table::nvfp4,
                    WeightFormat::IQ4_NL => Table::iq4_nl,
                    WeightFormat::IQ4_XS => Table::iq4_xs,
                    WeightFormat::MXFP4 => Table::mxfp4,
                    WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
                        panic!("weights in {} multiply float rows", self.format)
                    }
                };
                kernel(&kernels.table, &job, scratch);
            }
            Rows::Float { values, stride } => {
                assert!((count - 1) * stride + self.cols <= values.len());
                let job = float::Job {
                    weights: bytes,
                    group_bytes: self.group_bytes,
                    groups,
                    outputs: self.rows,
                    inputs: self.cols,
                    values,
                    stride,
                    count,
                    out,
                    adds,
                };
                let kernel = match self.format {
                    WeightFormat::F32 => Table::f32,
                    WeightFormat::F16 => Table::f16,
                    WeightFormat::BF16 => Table::bf16,
                    _ => panic!("weights in {} multiply quantized rows", self.format),
                };
                kernel(&kernels.table, &job, scratch);
            }
        }
    }

    /// Decodes row `row` of the first matrix into `out`, `[cols]`: embedding lookup in a table that is also the head.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        let group = &self.memory.bytes()[row / LANES * self.group_bytes..][..self.group_bytes];
        match &self.layout {
            Some(layout) => pack::unpack_lane(layout, group, row % LANES, out),
            None => pack::unpack_float_lane(self.format, group, row % LANES, out),
        }
    }
}

/// Bytes of a group of 16 outputs with `cols` inputs.
fn group_bytes(format: WeightFormat, layout: Option<&Layout>, cols: usize) -> usize {
    match layout {
        Some(layout) => cols.div_ceil(layout.inputs).saturating_mul(layout.bytes()),
        None => cols.saturating_mul(LANES * pack::float_bytes(format)).next_multiple_of(64),
    }
}

/// Bytes of a file that a thread reads at a time, at least a group of rows.
const READ_BYTES: usize = 256 << 10;

/// A matrix that is being packed, by as many threads as call [`Packing::work`].
pub struct Packing<'a> {
    source: &'a Matrix,
    packed: PackedMatrix,
    start: *mut u8,
    /// Groups that are read together.
    groups_at_once: usize,
    /// The first group that is not claimed.
    next: AtomicUsize,
    /// The first error of any thread.
    failure: Mutex<Option<LoadError>>,
}

// SAFETY: `start` points into `packed`'s memory, of which `work` gives every group to one thread only.
unsafe impl Sync for Packing<'_> {}

impl<'a> Packing<'a> {
    /// Allocates.
    ///
    /// # Errors
    /// [`LoadError::BadWeights`] if the bytes do not fit the shape, [`LoadError::OutOfMemory`].
    pub fn new(source: &'a Matrix, activations: Activations) -> Result<Self, LoadError> {
        let Matrix { name, format, parts, rows, cols, bytes } = source;
        let bad = |problem| Err(LoadError::BadWeights { tensor: name.clone(), problem });
        if *parts == 0 || *rows == 0 || *cols == 0 || !cols.is_multiple_of(format.block_len()) {
            return bad(format!(
                "[{rows}, {cols}] is no shape for {format}, whose blocks have {}",
                format.block_len()
            ));
        }
        let row_bytes = format.row_bytes(*cols);
        if parts.checked_mul(*rows).and_then(|rows| rows.checked_mul(row_bytes)) != Some(bytes.len()) {
            return bad(format!("[{parts}, {rows}, {cols}] in {format} are not {} bytes", bytes.len()));
        }
        let layout = layout::layout_of(*format, activations);
        let group_bytes = group_bytes(*format, layout.as_ref(), *cols);
        let mut memory = Memory::allocate(PackedMatrix::packed_bytes(source, activations), name)?;
        let start = memory.bytes_mut().as_mut_ptr();
        let packed = PackedMatrix {
            memory,
            format: *format,
            layout,
            parts: *parts,
            rows: *rows,
            cols: *cols,
            group_bytes,
        };
        Ok(Self {
            source,
            packed,
            start,
            // Small matrices are also divided among threads.
            groups_at_once: (READ_BYTES / (LANES * row_bytes))
                .min((parts * rows).div_ceil(64 * LANES))
                .max(1),
            next: AtomicUsize::new(0),
            failure: Mutex::new(None),
        })
    }

    /// Reads and packs groups until none is left, or a thread has failed.
    pub fn work(&self) {
        if let Err(error) = self.try_work() {
            // The others find nothing left.
            self.next.store(self.packed.all_groups(), Ordering::Relaxed);
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    fn try_work(&self) -> Result<(), LoadError> {
        let row_bytes = self.source.format.row_bytes(self.source.cols);
        let mut buffer = Vec::new();
        loop {
            let first = self.next.fetch_add(self.groups_at_once, Ordering::Relaxed);
            let end = self.packed.all_groups().min(first.saturating_add(self.groups_at_once));
            if first >= end {
                return Ok(());
            }
            let (all_rows, per_part) = (self.source.rows, self.packed.groups());
            for part in first / per_part..end.div_ceil(per_part) {
                let groups = first.max(part * per_part)..end.min((part + 1) * per_part);
                let row_of = |group: usize| part * all_rows + all_rows.min((group - part * per_part) * LANES);
                let rows = row_of(groups.start)..row_of(groups.end);
                let encoded = self.source.read_rows(rows.clone(), &mut buffer)?;
                self.source.check_finite(encoded, rows.start)?;
                for (group, rows) in groups.zip(encoded.chunks(LANES * row_bytes)) {
                    let bytes = self.packed.group_bytes;
                    // SAFETY: the counter gives each group to one caller, groups do not overlap, and nobody reads the
                    // memory before `finish`, which needs this value back from all borrowers.
                    let out = unsafe { std::slice::from_raw_parts_mut(self.start.add(group * bytes), bytes) };
                    self.pack(rows, row_bytes, out);
                }
            }
        }
    }

    /// Packs the rows of one group.
    fn pack(&self, rows: &[u8], row_bytes: usize, out: &mut [u8]) {
        match layout::packer(self.source.format, self.packed.activations()) {
            Some(pack) => pack(rows, row_bytes, out),
            None => pack::pack_float_group(self.source.format, rows, row_bytes, out),
        }
    }

    /// Returns the matrix; the file is not needed any more.
    ///
    /// # Errors
    /// [`LoadError::Unreadable`], or [`LoadError::BadWeights`] for values that are not finite.
    ///
    /// # Panics
    /// If groups are left.
    pub fn finish(self) -> Result<PackedMatrix, LoadError> {
        assert!(self.next.into_inner() >= self.packed.all_groups(), "groups are left to pack");
        match self.failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(self.packed),
        }
    }
}
