//! Name of a page's format: of all properties besides the model and the tokens that determine the bits of a page.

use std::hash::{DefaultHasher, Hash, Hasher};

use paguro_backend::{Limits, PageFormat};

use crate::{NUMERICS, isa::Isa};

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
    } = limits;
    let math = math();
    let name = format!("cpu {NUMERICS} {isa} {kv_dtype:?} {block_size} {attention:?} {math:016x}");
    PageFormat { name, page_bytes }
}

/// Returns a hash of functions of the system's mathematical library. Another version of it, or another processor, may round
/// them differently.
fn math() -> u64 {
    let mut hash = DefaultHasher::new();
    for step in 1..512_u32 {
        let x = step as f32 * 0.37;
        for y in [x.sin(), x.cos(), (-x).exp(), x.ln(), x.tanh(), x.powf(0.73), x.ln_1p(), (-x).exp_m1()] {
            y.to_bits().hash(&mut hash);
        }
        let x = f64::from(x);
        for y in [x.sin(), x.cos(), (-x).exp(), x.ln(), x.powf(0.73)] {
            y.to_bits().hash(&mut hash);
        }
    }
    hash.finish()
}
