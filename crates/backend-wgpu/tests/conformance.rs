//! The conformance suite on this machine's first GPU, which on most machines that test is a processor that plays one.

use std::sync::LazyLock;

use paguro_backend::{
    KvDtype, WeightFormat,
    conformance::{Subject, Tolerance},
    reference::KvRounding,
};
use paguro_backend_wgpu::{Gpu, GpuOptions};

/// Opened once: its kernels are compiled once for all cases.
static GPU: LazyLock<Result<Gpu, String>> =
    LazyLock::new(|| Gpu::open(0, GpuOptions { poison: true, ..GpuOptions::default() }));

fn subject(gpu: &Gpu) -> Subject {
    use WeightFormat::*;
    let gpu = gpu.clone();
    Subject {
        backend: Box::new(move |_threads| Box::new(gpu.clone())),
        has_threads: false,
        tolerance: Tolerance::of_8_bit_activations,
        kv_dtype: KvDtype::F16,
        kv: KvRounding::F16,
        unsupported: &[],
        // One for each layout.
        kernel_formats: &[F32, F16, BF16, Q2_K, Q4_K, Q5_K, Q6_K, Q8_0],
    }
}

paguro_backend::conformance!(maybe GPU.as_ref().map(subject));
