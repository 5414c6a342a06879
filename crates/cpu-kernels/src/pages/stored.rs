//! K or V of one head of a token, in the form in which pages store it.

use half::f16;
use paguro_backend::{KV_BLOCK, KvDtype};

use crate::ops::RowKernels;

/// One head of a token in stored form.
#[derive(Clone, Debug)]
pub enum StoredHead {
    /// `[head_dim]`
    F16(Vec<f16>),
    /// Rotated and quantized: see [`paguro_backend::quantize_kv`].
    Quants {
        /// Eight or four bits.
        dtype: KvDtype,
        /// `[blocks]`
        scales: Vec<f16>,
        /// `[blocks * KV_BLOCK]`; those past the head are zeros.
        quants: Vec<i8>,
    },
}

impl StoredHead {
    /// Creates a buffer for heads of up to `head_dim` elements.
    pub fn new(dtype: KvDtype, head_dim: usize) -> Self {
        match dtype {
            KvDtype::F16 => Self::F16(Vec::with_capacity(head_dim)),
            KvDtype::Q8 | KvDtype::Q4 => Self::Quants {
                dtype,
                scales: Vec::with_capacity(head_dim.div_ceil(KV_BLOCK)),
                quants: Vec::with_capacity(head_dim.next_multiple_of(KV_BLOCK)),
            },
        }
    }

    /// Converts `x`, `[head_dim]`. If pages are quantized, `x` is rotated in place.
    pub fn set(&mut self, kernels: &RowKernels, x: &mut [f32]) {
        match self {
            Self::F16(halves) => {
                halves.resize(x.len(), f16::ZERO);
                kernels.round_f16(x, halves);
            }
            Self::Quants { dtype, scales, quants } => {
                scales.resize(x.len().div_ceil(KV_BLOCK), f16::ZERO);
                quants.clear();
                quants.resize(x.len().next_multiple_of(KV_BLOCK), 0);
                kernels.hadamard(x);
                kernels.quantize_kv(*dtype, x, scales, &mut quants[..x.len()]);
            }
        }
    }
}

/// Offset of K's stored quants, which makes them unsigned bytes: see
/// [`Simd::dot4_offset`](crate::simd::Simd::dot4_offset).
pub(super) const K_OFFSET: i8 = -128;

/// Four-bit quants are stored with this added.
pub const Q4_OFFSET: i8 = 8;

/// Two quants in a byte.
pub(super) fn nibbles(low: i8, high: i8) -> u8 {
    (low + Q4_OFFSET) as u8 | ((high + Q4_OFFSET) as u8) << 4
}
