//! Steps of one row whose launches hand over to each other, and steps of several whose attention does so to its merge, have the bits of those
//! with barriers between them.

use paguro_backend::{
    AttentionMode, Backend, KvDtype, Limits, Outcome, Output, PageId, Step, StepOutput, StepSequence, Want,
    WeightFormat,
};
use paguro_backend_conformance::{Biases, ModelShape, submit};
use paguro_backend_wgpu::{Gpu, GpuOptions};

fn open(hand_over: bool) -> Result<Gpu, String> {
    // With cooperative matrices, where there are some: steps of one row have them in attention only, of many heads that share K and V.
    let options = GpuOptions { cooperative: true, poison: true, ..GpuOptions::default() };
    Gpu::open(0, GpuOptions { hand_over: Some(hand_over), ..options })
}

/// Logits of steps of one row of each of some sequences, and of a prompt of each between them.
fn logits(gpu: &Gpu, shape: &ModelShape, context: usize, count: usize) -> Vec<Vec<f32>> {
    let model = shape.build(1);
    let limits = Limits {
        block_size: 32,
        pages: 1 + count * (context + 32).div_ceil(32),
        max_rows: count * context,
        max_sequences: count,
        max_outputs: 2 * count,
        max_context: context + 32,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
    };
    let mut runner = gpu.load(&model.program, model.weights.clone(), limits).unwrap();
    let (mut out, mut start) = (StepOutput::default(), 0);
    let mut step = |rows: usize| {
        let tokens: Vec<u32> =
            (0..count * rows).map(|row| ((start + row) * 7 % shape.vocab) as u32).collect();
        let blocks = (start + rows).div_ceil(32);
        let sequence = |index: usize| StepSequence {
            rows: index * rows..(index + 1) * rows,
            start,
            tables: index * blocks..(index + 1) * blocks,
        };
        let sequences: Vec<_> = (0..count).map(sequence).collect();
        // A sequence's pages do not lie one after the other.
        let page = |index: usize, block: usize| PageId((limits.pages - 1 - index - count * block) as u32);
        let pages: Vec<_> =
            (0..count).flat_map(|index| (0..blocks).map(move |block| page(index, block))).collect();
        let outputs: Vec<_> =
            (1..=count).map(|end| Output { row: end * rows - 1, want: Want::Logits }).collect();
        let step =
            Step { tokens: &tokens, carried: &[], sequences: &sequences, pages: &pages, outputs: &outputs };
        submit(&mut *runner, &step, &mut out).unwrap();
        start += rows;
        let logits = out.outcomes.iter().flat_map(|outcome| match outcome {
            Outcome::Logits(logits) => logits.clone(),
            other => panic!("{other:?}"),
        });
        Vec::from_iter(logits)
    };
    [1, 1, 5, 1, context - 12, 1, 1, 1].map(&mut step).into()
}

#[test]
fn same_bits_with_and_without_barriers() {
    let (with, without) = match (open(true), open(false)) {
        (Ok(with), Ok(without)) => (with, without),
        (Err(error), _) | (_, Err(error)) => return println!("skipped: handoff on a GPU: {error}"),
    };
    if !with.capacity().features.iter().any(|feature| feature.contains("handoff")) {
        return println!("skipped: handoff on a GPU: this one has none");
    }
    // Layers of either parity; v in a better format, as Q4_K_M has it; several splits, and so a merge; biases; many heads of one.
    let shape =
        ModelShape { hidden: 256, ffn: 512, heads: 4, kv_heads: 2, head_dim: 64, ..ModelShape::default() };
    let layers = |count: usize| vec![None; count];
    let shapes = [
        (
            (40, 1),
            ModelShape {
                format: WeightFormat::Q8_0,
                biases: Biases::Qkv,
                windows: layers(3),
                ..shape.clone()
            },
        ),
        (
            (700, 1),
            ModelShape {
                format: WeightFormat::Q4_K,
                finer: Some(WeightFormat::Q6_K),
                windows: layers(2),
                ..shape.clone()
            },
        ),
        (
            (700, 1),
            ModelShape {
                format: WeightFormat::Q5_K,
                biases: Biases::All,
                heads: 8,
                kv_heads: 1,
                windows: layers(1),
                ..shape.clone()
            },
        ),
        // Parts of two sequences; and, with norms of heads, of one whose other launches do not hand over.
        ((1100, 2), ModelShape { format: WeightFormat::Q8_0, windows: layers(2), ..shape.clone() }),
        (
            (1100, 1),
            ModelShape {
                format: WeightFormat::Q8_0,
                windows: layers(2),
                qk_norm: Some(paguro_backend::QkNormKind::Head),
                ..shape
            },
        ),
    ];
    for ((context, count), shape) in shapes {
        let of = |gpu: &Gpu| logits(gpu, &shape, context, count);
        assert_eq!(of(&with), of(&without), "{count} at {context}, {:?}", shape.format);
    }
    let waits = |gpu: &Gpu| gpu.kernels().iter().filter(|(_, source)| source.contains("fn give_up")).count();
    assert!(waits(&with) > 0 && waits(&without) == 0);
}

#[test]
fn a_device_in_doubt_does_without() {
    let gpu = match open(true) {
        Ok(gpu) if gpu.capacity().features.iter().any(|feature| feature.contains("handoff")) => gpu,
        Ok(_) => return println!("skipped: handoff on a GPU: this one has none"),
        Err(error) => return println!("skipped: handoff on a GPU: {error}"),
    };
    let shape = ModelShape { windows: vec![None; 2], ..ModelShape::of_format(WeightFormat::Q8_0) };
    let waits = |gpu: &Gpu| gpu.kernels().iter().filter(|(_, source)| source.contains("fn give_up")).count();
    gpu.doubt_handoff();
    logits(&gpu, &shape, 40, 1);
    assert_eq!(waits(&gpu), 0, "models that are loaded later have no kernels that wait");
}
