//! Buffers between phases, allocated at load for the largest step. Threads of the pool work on them together.

mod experts;
mod latent;
mod recurrent;
mod row_ops;
mod sizes;

pub use experts::{ExpertBuffers, ExpertSizes};
pub use latent::{LatentBuffers, LatentSizes};
pub use recurrent::{RecurrentBuffers, RecurrentSizes};
pub use row_ops::{BLOCK_ROWS, RowOpBuffers, RowOpSizes};
pub use sizes::{BufferSizes, buffer_bytes};

use std::{marker::PhantomData, ops::Range};

use memmap2::MmapMut;
use paguro_backend::LoadError;
use paguro_cpu_kernels::{
    matrix::{RowKind, Rows},
    quantize::QuantBlock,
};

/// Buffers between phases, allocated at load for the largest step.
pub struct Buffers {
    /// Residual stream, `[rows, hidden]`.
    pub x: Shared<f32>,
    /// Outputs of a layer's branches, `[rows, hidden]` each.
    pub branch_outputs: [Shared<f32>; 2],
    /// Inputs of the next matmul.
    pub input: MatmulInput,
    /// Queries, `[rows, heads * head_dim]`.
    pub q: Shared<f32>,
    /// Keys of the step's rows, `[rows, kv_heads * head_dim]`.
    pub k: Shared<f32>,
    /// Values of the step's rows, `[rows, kv_heads * head_dim]`.
    pub v: Shared<f32>,
    /// Output of attention, `[rows, heads * head_dim]`.
    pub attended: Shared<f32>,
    /// Gates of attention, `[rows, heads * head_dim]`.
    pub attention_gate: Shared<f32>,
    /// Gates, `[rows, ffn]`.
    pub gate: Shared<f32>,
    /// Ups, `[rows, ffn]`.
    pub up: Shared<f32>,
    /// Cosines and sines by rope and row, `[ropes, rows, rope_stride]`.
    pub rope_table: Shared<f32>,
    /// Partial attention of shared splits, by tile, split and query.
    pub partials: Shared<f32>,
    /// Logits of a slice of the output rows, `[slice, vocab]`.
    pub logits: Shared<f32>,
    /// Rows that the head projects, `[outputs, width]`.
    pub projected: Shared<f32>,
    /// Buffers of mixtures of experts.
    pub experts: ExpertBuffers,
    /// Buffers of mixers with a state.
    pub recurrent: RecurrentBuffers,
    /// Embeddings for layers, `[rows, count * width]`.
    pub layer_embeds: Shared<f32>,
    /// Buffers of latent attention.
    pub latent: LatentBuffers,
    /// Buffers of the ends of towers.
    pub row_ops: RowOpBuffers,
}

/// A fixed buffer whose parts are written by different workers of a thread pool in one phase and read by all of them in a
/// later one. `forward.rs` defines the accesses of each phase.
///
/// It begins at a memory page, and memory that no step has used is not resident: buffers are sized for the largest
/// step.
pub struct Shared<T> {
    /// Keeps `start` valid.
    _memory: MmapMut,
    start: *mut T,
    len: usize,
    owns: PhantomData<T>,
}

/// A type of which any zeroed memory is a value.
///
/// # Safety
/// It is, and needs no more alignment than a page of memory has, nor to be dropped.
pub unsafe trait Zeroed: Copy {}

// SAFETY: zeros are 0.0.
unsafe impl Zeroed for f32 {}
// SAFETY: zero is a number.
unsafe impl Zeroed for u32 {}
// SAFETY: zeros are `QuantBlock::ZERO`: it consists of numbers; it is aligned to a cache line.
unsafe impl Zeroed for QuantBlock {}

// SAFETY: it owns its memory, which moves with it.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: the only ways in are `get` and `get_mut`, whose callers promise not to race.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T: Zeroed> Shared<T> {
    /// Allocates `len` zeros for `what`.
    ///
    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn new(len: usize, what: &str) -> Result<Self, LoadError> {
        let bytes = len.checked_mul(size_of::<T>());
        // An empty map is an error.
        let memory = bytes.and_then(|bytes| MmapMut::map_anon(bytes.max(1)).ok());
        let mut memory = memory.ok_or_else(|| LoadError::OutOfMemory {
            device: "cpu".into(),
            what: what.into(),
            needed: bytes.map_or(u64::MAX, |bytes| bytes as u64),
        })?;
        let start = memory.as_mut_ptr().cast();
        Ok(Self { _memory: memory, start, len, owns: PhantomData })
    }
}

impl<T> Shared<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the start of the buffer, for callers that check bounds themselves.
    pub fn as_ptr(&self) -> *mut T {
        self.start
    }

    /// Panics unless there are such elements.
    fn check(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
    }

    /// Returns the elements to read.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub unsafe fn get(&self, range: Range<usize>) -> &[T] {
        self.check(&range);
        // SAFETY: the memory holds `len` values of `T`; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// Returns the elements to write.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_mut(&self, range: Range<usize>) -> &mut [T] {
        self.check(&range);
        // SAFETY: as above; the caller keeps all others away.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Rows that matmuls read.
pub struct MatmulInput {
    /// For quantized weights, `[rows, quantized_stride]`.
    pub quantized: Shared<QuantBlock>,
    /// For weights in floats, `[rows, float_stride]`.
    pub float: Shared<f32>,
    /// Blocks from one quantized row to the next.
    pub quantized_stride: usize,
    /// Floats from one float row to the next.
    pub float_stride: usize,
}

impl MatmulInput {
    /// Returns rows `rows` of the kind that a matrix multiplies.
    ///
    /// # Safety
    /// No thread writes them while they are used.
    pub unsafe fn rows(&self, kind: RowKind, rows: Range<usize>) -> Rows<'_> {
        // SAFETY: the caller keeps writers away.
        unsafe {
            match kind {
                RowKind::Quantized => Rows::Quantized {
                    blocks: self
                        .quantized
                        .get(rows.start * self.quantized_stride..rows.end * self.quantized_stride),
                    stride: self.quantized_stride,
                },
                RowKind::Float => Rows::Float {
                    values: self.float.get(rows.start * self.float_stride..rows.end * self.float_stride),
                    stride: self.float_stride,
                },
            }
        }
    }
}
