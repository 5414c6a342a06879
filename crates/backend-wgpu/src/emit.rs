//! The end of the lowering: nodes become kernels of WGSL ([`code`]), and these become pipelines of wgpu with their buffers ([`bind`]).
//! Another target of the same kernels replaces [`bind`]; one with kernels of its own replaces both.

mod attention;
mod bind;
mod code;
mod experts;
mod handoff;
mod launch;
mod low_rank;
mod matmul;
mod recurrent;
mod rows;
mod vectors;

pub use self::{
    bind::{Bound, buffer_bytes, emit, host_row_words},
    handoff::EMPTY,
    launch::{Grid, Head, Kernel, Launch, LayerPool, LayerState, Model, StateBuffer},
};

/// Files of WGSL.
macro_rules! wgsl {
    ($($name:literal),*) => {
        &[$(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/shaders/", $name, ".wgsl"))),*]
    };
}
pub(crate) use wgsl;
