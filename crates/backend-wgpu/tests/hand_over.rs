//! Steps of one row whose launches hand over to each other have the bits of those with barriers between them.

use paguro_backend::{
    AttentionMode, Backend, KvDtype, Limits, Outcome, Output, PageId, Step, StepOutput, StepSequence, Want,
    WeightFormat,
    conformance::{Biases, ModelShape, submit},
};
use paguro_backend_wgpu::{Gpu, GpuOptions};

fn open(hand_over: bool) -> Result<Gpu, String> {
    // With cooperative matrices, where there are some: steps of one row have them in attention only, of many heads that share K and V.
    let options = GpuOptions { cooperative: true, poison: true, ..GpuOptions::default() };
    Gpu::open(0, GpuOptions { hand_over: Some(hand_over), ..options })
}

/// Logits of steps of one row after a prompt, and of a prompt between them.
fn logits(gpu: &Gpu, shape: &ModelShape, context: usize) -> Vec<Vec<f32>> {
    let model = shape.build(1);
    let limits = Limits {
        block_size: 32,
        pages: 64,
        max_rows: context,
        max_sequences: 1,
        max_outputs: 2,
        max_context: context + 32,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
    };
    let mut runner = gpu.load(&model.program, model.weights.clone(), limits).unwrap();
    let pages: Vec<_> = (0..limits.max_context.div_ceil(32)).map(|page| PageId(63 - page as u32)).collect();
    let (mut out, mut start) = (StepOutput::default(), 0);
    let mut step = |rows: usize| {
        let tokens: Vec<u32> = (0..rows).map(|row| ((start + row) * 7 % shape.vocab) as u32).collect();
        let sequences = [StepSequence { rows: 0..rows, start, tables: 0..(start + rows).div_ceil(32) }];
        let pages = &pages[..sequences[0].tables.end];
        let outputs = [Output { row: rows - 1, want: Want::Logits }];
        let step = Step { tokens: &tokens, carried: &[], sequences: &sequences, pages, outputs: &outputs };
        submit(&mut *runner, &step, &mut out).unwrap();
        start += rows;
        match &out.outcomes[..] {
            [Outcome::Logits(logits)] => logits.clone(),
            other => panic!("{other:?}"),
        }
    };
    [1, 1, 5, 1, context - 12, 1, 1, 1].map(&mut step).into()
}

#[test]
fn same_bits_with_and_without_barriers() {
    let (with, without) = match (open(true), open(false)) {
        (Ok(with), Ok(without)) => (with, without),
        (Err(error), _) | (_, Err(error)) => return println!("skipped: handing over on a GPU: {error}"),
    };
    // Layers of either parity; v in a better format, as Q4_K_M has it; several splits, and so a merge; biases; many heads of one.
    let shape =
        ModelShape { hidden: 256, ffn: 512, heads: 4, kv_heads: 2, head_dim: 64, ..ModelShape::default() };
    let layers = |count: usize| vec![None; count];
    let shapes = [
        (
            40,
            ModelShape {
                format: WeightFormat::Q8_0,
                biases: Biases::Qkv,
                windows: layers(3),
                ..shape.clone()
            },
        ),
        (
            700,
            ModelShape {
                format: WeightFormat::Q4_K,
                finer: Some(WeightFormat::Q6_K),
                windows: layers(2),
                ..shape.clone()
            },
        ),
        (
            700,
            ModelShape {
                format: WeightFormat::Q5_K,
                biases: Biases::All,
                heads: 8,
                kv_heads: 1,
                windows: layers(1),
                ..shape
            },
        ),
    ];
    for (context, shape) in shapes {
        assert_eq!(logits(&with, &shape, context), logits(&without, &shape, context), "{:?}", shape.format);
    }
    let waits = |gpu: &Gpu| gpu.kernels().iter().filter(|(_, source)| source.contains("fn give_up")).count();
    assert!(waits(&with) > 0 && waits(&without) == 0);
}
