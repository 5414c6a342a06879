//! The conformance suite, on every instruction set that this machine has, with poisoned pages.

use paguro_backend::{
    WeightFormat,
    conformance::{Subject, Tolerance},
    reference::KvRounding,
};
use paguro_backend_cpu::{Cpu, CpuOptions, Isa};

fn subject(isa: Isa) -> Subject {
    Subject {
        backend: Box::new(move |threads| {
            Box::new(Cpu::new(CpuOptions { threads: Some(threads), isa: Some(isa), poison: true }))
        }),
        tolerance: |format| match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
                Tolerance { error: 5e-3, reason: "f32 sums, and K or V on the other side of an f16 rounding" }
            }
            _ => Tolerance {
                error: 0.25,
                reason: "activations have 8 bits: half a step is 0.4 % of a block's largest, in the inputs of every \
                         product of every layer, and random models sharpen it in their attention",
            },
        },
        kv: KvRounding::F16,
        unsupported: &[],
    }
}

mod best {
    paguro_backend::conformance!(super::subject(super::Isa::detect()));
}

/// The instruction sets below the best one run where the best one runs, but only there.
macro_rules! other {
    ($($module:ident $name:literal;)*) => { $(
        mod $module {
            paguro_backend::conformance!(super::subject(
                super::Isa::from_name($name).unwrap_or_else(super::Isa::detect)
            ));
        }
    )* };
}

other! {
    avx2 "avx2";
    scalar "scalar";
}
