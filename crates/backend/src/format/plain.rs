//! Unquantized formats, little endian: F32, F16 (IEEE binary16) and BF16 (the upper half of an F32).

use half::{bf16, f16};

/// Each element four bytes.
pub(super) fn f32(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *out = f32::from_le_bytes(*bytes);
    }
}

/// Each element two bytes.
pub(super) fn f16(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = f16::from_le_bytes(*bytes).to_f32();
    }
}

/// Each element two bytes.
pub(super) fn bf16(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = bf16::from_le_bytes(*bytes).to_f32();
    }
}
