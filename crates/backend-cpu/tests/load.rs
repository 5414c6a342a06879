//! Refusals of this backend at load with their messages, and its description of the machine.

use paguro_backend::{AttentionMode, Backend, KvDtype, Limits, LoadError, Mixer, WeightFormat};
use paguro_backend_conformance::{ModelShape, RandomModel, Rng, random_matrix};
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

/// Returns the error's message.
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
    let mut model = ModelShape::default().build(1);
    let Mixer::Attention(op) = &mut model.program.layers[1].mixer else { panic!("no attention") };
    op.heads = 2;
    for (id, rows, cols) in [(op.q.matrix, 128, 64), (op.out.matrix, 64, 128)] {
        let matrix = random_matrix("fewer heads", WeightFormat::F32, rows, cols, 0.1, &mut Rng::new(1));
        model.weights.matrices[id.0 as usize] = matrix;
    }
    assert!(refusal(model, LIMITS).contains("query heads that differ between layers"));
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
