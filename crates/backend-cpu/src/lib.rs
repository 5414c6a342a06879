//! SIMD kernels and the thread team: the backend that always works.

pub mod isa;
pub mod matrix;
pub mod quantize;
pub mod simd;
