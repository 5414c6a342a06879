//! What this backend refuses to load, and how it says so; and what it says about the machine.

use paguro_backend::{AttentionMode, Backend, KvDtype, Limits, LoadError};
use paguro_backend_conformance::{ModelShape, RandomModel};
use paguro_backend_cpu::{Cpu, CpuOptions, Isa};

const LIMITS: Limits = Limits {
    block_size: 32,
    pages: 4,
    max_rows: 8,
    max_sequences: 2,
    max_outputs: 2,
    max_context: 64,
    states: 0,
    kv_dtype: KvDtype::F16,
    attention: AttentionMode::Paged,
};

/// The error, as a person reads it.
fn refusal(model: RandomModel, limits: Limits) -> String {
    let cpu = Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    match cpu.load(&model.program, model.weights, limits) {
        Err(error @ LoadError::Unsupported { .. }) => error.to_string(),
        Err(error) => panic!("another kind of error: {error}"),
        Ok(_) => panic!("it was loaded"),
    }
}

#[test]
fn sizes_that_are_no_whole_vectors_are_refused() {
    let model = |head_dim| ModelShape { head_dim, ..ModelShape::default() }.build(1);
    assert!(refusal(model(63), LIMITS).contains("attention heads of 63 elements (head_dim)"));
    for block_size in [0, 8, 24, 48, 1024] {
        let message = refusal(model(64), Limits { block_size, ..LIMITS });
        assert!(message.contains(&format!("pages of {block_size} tokens")), "{message}");
    }
}

#[test]
fn heads_that_differ_between_layers_are_refused() {
    let windows = vec![None, Some(9)];
    let model = ModelShape { window_heads: Some((1, 64)), windows, ..ModelShape::default() }.build(1);
    assert!(refusal(model, LIMITS).contains("K/V heads that differ between layers"));
}

#[test]
fn more_pages_than_memory_are_refused() {
    let model = ModelShape::default().build(1);
    for pages in [1 << 40, usize::MAX] {
        let limits = Limits { pages, ..LIMITS };
        match Cpu::new(CpuOptions::default()).load(&model.program, model.weights.clone(), limits) {
            Err(LoadError::OutOfMemory { what, .. }) => assert!(what.contains("K/V pages"), "{what}"),
            Err(error) => panic!("another kind of error: {error}"),
            Ok(_) => panic!("{pages} pages were allocated"),
        }
    }
}

#[test]
fn capacity_names_the_machine() {
    for isa in Isa::supported() {
        let cpu = Cpu::new(CpuOptions { threads: Some(3), isa: Some(isa), ..CpuOptions::default() });
        let capacity = cpu.capacity();
        assert!(capacity.description.ends_with(&format!(", 3 threads, {isa}")), "{}", capacity.description);
        assert!(capacity.features.contains(&isa.name().to_owned()));
        assert!(capacity.bytes_free > 0);
    }
    let one = Cpu::new(CpuOptions { threads: Some(0), ..CpuOptions::default() });
    assert_eq!(one.threads(), 1);
}
