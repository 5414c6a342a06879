//! SIMD kernels and the thread team: the backend that always works.

pub mod isa;
pub mod simd;
