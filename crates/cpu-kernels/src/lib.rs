//! SIMD kernels of the CPU: packed weights, matmuls, attention over pages, delta rules and operations on rows.
//!
//! Kernels are written once, over the vectors of 16 lanes of [`simd`], and instantiated for each instruction set into
//! tables of function pointers, which are chosen once by [`isa`]. Begin with these two modules, then read the head of
//! [`matrix`]. The crate depends on the contract (`paguro_backend`) alone, for the types of weights and pages. Threads,
//! buffers and the order of operations belong to `paguro-backend-cpu`.
//!
//! | module | subject | decision |
//! |-|-|-|
//! | [`matrix`] | packed weights and matmuls | 2, 7, 8 |
//! | [`quantize`] | activations in eight bits | 2 |
//! | [`attention`], [`pages`] | attention over splits at fixed positions; arrangement of a page | 3, 5 |
//! | [`delta`] | gated delta rules and scans, in chunks | |
//! | [`ops`] | norms, activations, RoPE, sums of rows | |
//! | [`probe`] | the read bandwidth of the machine | |
//! | [`isa`], [`simd`] | instruction sets, and vectors of 16 lanes for each | |
//!
//! Every sum has one order, which depends neither on other rows nor on the thread that computes it.

pub mod attention;
pub mod delta;
pub mod isa;
pub mod matrix;
pub mod ops;
pub mod pages;
pub mod probe;
pub mod quantize;
pub mod simd;
