//! SIMD kernels and the thread team: the backend that always works.
