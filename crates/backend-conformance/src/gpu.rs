//! Tolerances of GPUs, and the formats that together use all of their kernels.

use paguro_backend::{Backend, KvDtype, WeightFormat, reference::KvRounding};

use super::{Draw, Subject, Tolerance};

/// Returns a GPU as the subject of the suite, with pages of this type. `backend` returns it, and `exact_rows` is
/// [`Subject::exact_rows`]: more than one means matrix units, which multiply halves. `draw` selects the variants of the cases.
pub fn gpu_subject(
    backend: impl Fn() -> Box<dyn Backend> + 'static,
    exact_rows: usize,
    kv_dtype: KvDtype,
    draw: Draw,
) -> Subject {
    use WeightFormat::*;
    Subject {
        exact_rows,
        tolerance: match kv_dtype {
            KvDtype::Q8 => of_q8_pages,
            KvDtype::Q4 => of_q4_pages,
            KvDtype::F16 if exact_rows > 1 => of_halves,
            KvDtype::F16 => Tolerance::of_8_bit_activations,
        },
        backend: Box::new(move |_threads| backend()),
        has_threads: false,
        kv_dtype,
        kv: KvRounding::F16,
        unsupported: &[],
        refused: &["pages of their model", "project rows"],
        kernel_formats: match kv_dtype {
            // One format for each layout.
            KvDtype::F16 => &[F32, F16, BF16, Q2_K, IQ2_XS, Q4_K, Q5_K, Q6_K, Q8_0],
            // The encoding of pages does not change matmuls.
            KvDtype::Q8 | KvDtype::Q4 => &[F32, Q4_K],
        },
        draw,
    }
}

fn of_halves(format: WeightFormat) -> Tolerance {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => Tolerance {
            error: 1e-2,
            reason: "cooperative matrices take activations, queries and attention weights in half precision",
        },
        _ => Tolerance::of_8_bit_activations(format),
    }
}

/// The reference stores the same eight bits and multiplies them as the same numbers. But a number of K or V that is
/// rounded differently differs by one step, up to 1/127 of its block's largest. In a window of nine tokens one such
/// step changes a logit by up to 0.021 of the root mean square.
fn of_q8_pages(format: WeightFormat) -> Tolerance {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
            Tolerance { error: 0.04, reason: "K or V on the other side of a rounding to eight bits" }
        }
        _ => Tolerance { error: 1.0, reason: "the same, and activations have 8 bits in every matmul" },
    }
}

/// As with eight bits, but a step is 1/8 of a block's largest.
fn of_q4_pages(format: WeightFormat) -> Tolerance {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
            Tolerance { error: 0.3, reason: "K or V on the other side of a rounding to four bits" }
        }
        _ => Tolerance { error: 1.5, reason: "the same, and activations have 8 bits in every matmul" },
    }
}
