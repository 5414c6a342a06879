//! Name of a page's format: of all properties besides the model and the tokens that determine the bits of a page.

use paguro_backend::{Digest, Limits, PageFormat, Visitor};
use paguro_cpu_kernels::isa::Isa;

use crate::NUMERICS;

/// Returns the format of a runner's pages. The number of threads is no part of it, since no result depends on it.
pub fn of(isa: Isa, limits: &Limits, page_bytes: usize) -> PageFormat {
    let Limits {
        block_size,
        pages: _,
        max_rows: _,
        max_sequences: _,
        max_outputs: _,
        max_context: _,
        states: _,
        kv_dtype,
        attention,
        expert_slots: _,
    } = limits;
    let (kv, attention, math) = (kv_dtype.name(), attention.name(), math());
    let name = format!("cpu {NUMERICS} {isa} {kv} {block_size} {attention} {math:016x}");
    PageFormat { name, page_bytes }
}

/// Returns a hash of functions of the system's mathematical library. Another version of it, or another processor, may round
/// them differently.
fn math() -> u64 {
    let mut digest = Digest::default();
    for step in 1..512_u32 {
        let x = step as f32 * 0.37;
        for y in [x.sin(), x.cos(), (-x).exp(), x.ln(), x.tanh(), x.powf(0.73), x.ln_1p(), (-x).exp_m1()] {
            digest.number(y.to_bits().into());
        }
        let x = f64::from(x);
        for y in [x.sin(), x.cos(), (-x).exp(), x.ln(), x.powf(0.73)] {
            digest.number(y.to_bits());
        }
    }
    digest.short()
}
