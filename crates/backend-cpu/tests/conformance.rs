//! The conformance suite, on every instruction set that this machine has, with poisoned pages.

use paguro_backend::{KvDtype, WeightFormat, reference::KvRounding};
use paguro_backend_conformance::{Draw, Subject, Tolerance};
use paguro_backend_cpu::{Cpu, CpuOptions, Isa};

fn subject(isa: Isa, kv_dtype: KvDtype) -> Subject {
    Subject {
        backend: Box::new(move |threads| {
            Box::new(Cpu::new(CpuOptions {
                threads: Some(threads),
                isa: Some(isa),
                memory: None,
                poison: true,
                squares: None,
            }))
        }),
        has_threads: true,
        exact_rows: 1,
        tolerance: match kv_dtype {
            KvDtype::F16 => Tolerance::of_8_bit_activations,
            KvDtype::Q8 => q8_tolerance,
            KvDtype::Q4 => q4_tolerance,
        },
        kv_dtype,
        kv: KvRounding::F16,
        unsupported: &[],
        refused: &[],
        kernel_formats: &WeightFormat::ALL,
        // The other suites repeat the cases, on slower code or with the same matmuls.
        draw: match (isa == Isa::detect(), kv_dtype) {
            (true, KvDtype::F16) => Draw::All,
            _ => Draw::from_env(),
        },
    }
}

/// The reference stores the same eight bits, but multiplies them as numbers: what differs is the noise of the integer
/// products, about 1 % of what attention gives (0.5 % from the queries' eight bits, 1 % from the weights' seven; see
/// decision 5). Models with random weights sharpen it from layer to layer, as they do with quantized activations, and K
/// and V of quantized activations fall on other sides of their roundings, too. So with quantized weights this is a check
/// for defects that leave little right; floats measure.
fn q8_tolerance(format: WeightFormat) -> Tolerance {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
            Tolerance { error: 0.25, reason: "queries of eight bits, weights of seven" }
        }
        _ => Tolerance { error: 1.0, reason: "the same, and activations have 8 bits in every matmul" },
    }
}

/// As with eight bits. Numbers of K and V that fall on the other side of a rounding are a step away, which is 1/8 of a block's
/// largest.
fn q4_tolerance(format: WeightFormat) -> Tolerance {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => Tolerance {
            error: 1.0,
            reason: "queries of eight bits, weights of seven, roundings to four bits",
        },
        _ => Tolerance { error: 2.0, reason: "the same, and activations have 8 bits in every matmul" },
    }
}

mod best {
    paguro_backend_conformance::conformance!(super::subject(super::Isa::detect(), super::KvDtype::F16));
}

mod best_q8 {
    paguro_backend_conformance::conformance!(super::subject(super::Isa::detect(), super::KvDtype::Q8));
}

mod best_q4 {
    paguro_backend_conformance::conformance!(maybe Ok::<_, String>(super::subject(super::Isa::detect(), super::KvDtype::Q4)); only
        format_f32 format_q4_k grouped_heads head_dims unusual_head_dims large_keys attention_gates sinks windows shared_kv
        kv_geometry latent_attention everything pages lengths many_rows long_context gather
        batch_invariance exact_in_chunks exact_in_long_chunks exact_in_wide_steps exact_with_shared_prefix
        exact_after_copy_on_write exact_after_preemption exact_on_any_threads exact_in_any_place exact_latent exact_geometry
        exact_from_outside foreign_pages kernel_counts);
}

/// An instruction set below the best one. It runs where the best one runs, but only there.
fn other(name: &str, kv_dtype: KvDtype) -> Result<Subject, String> {
    match Isa::from_name(name) {
        None => Err(format!("this machine has no {name}")),
        Some(isa) if isa == Isa::detect() => Err(format!("{name} is the best here, which has run all cases")),
        Some(isa) => Ok(subject(isa, kv_dtype)),
    }
}

macro_rules! other {
    ($($(#[$processor:meta])* $module:ident $name:literal $dtype:ident;)*) => { $(
        $(#[$processor])*
        mod $module {
            paguro_backend_conformance::conformance!(maybe super::other($name, super::KvDtype::$dtype));
        }
    )* };
}

other! {
    #[cfg(target_arch = "x86_64")]
    avx2 "avx2" F16;
    #[cfg(target_arch = "x86_64")]
    avx2_q8 "avx2" Q8;
    #[cfg(target_arch = "aarch64")]
    neon_dot "neondot" F16;
    #[cfg(target_arch = "aarch64")]
    neon "neon" F16;
    scalar "scalar" F16;
    scalar_q8 "scalar" Q8;
}

/// Four bits on the other instruction sets: cases that depend on pages.
macro_rules! other_q4 {
    ($($(#[$processor:meta])* $module:ident $name:literal;)*) => { $(
        $(#[$processor])*
        mod $module {
            paguro_backend_conformance::conformance!(maybe super::other($name, super::KvDtype::Q4); only head_dims unusual_head_dims large_keys latent_attention long_context batch_invariance exact_from_outside);
        }
    )* };
}

other_q4! {
    #[cfg(target_arch = "x86_64")]
    avx2_q4 "avx2";
    #[cfg(target_arch = "aarch64")]
    neon_q4 "neon";
    scalar_q4 "scalar";
}
