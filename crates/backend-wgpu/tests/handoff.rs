//! Steps of one row with handoff between launches, and steps of several with handoff from attention to its merge, give
//! the same bits as with barriers.

use std::sync::atomic::{AtomicUsize, Ordering};

use paguro_backend::{
    AdapterId, AdapterUse, AttentionMode, Backend, Carried, GivenRows, KvDtype, Limits, Output, OutputKind,
    OutputValue, PageId, QkNormKind, Runner, SampleRequest, SamplingParams, Step, StepError, StepOutput,
    StepSequence, Ticket, WeightFormat,
};
use paguro_backend_conformance::{Biases, Draw, ModelShape, random_adapter, submit};
use paguro_backend_wgpu::{Gpu, GpuOptions, gpus};

fn open(handoff: bool, starvable: bool) -> Result<Gpu, String> {
    // With cooperative matrices, where there are some: steps of one row have them in attention only, of many heads that share K and V.
    let notice: fn(&str) = |_| _ = NOTICES.fetch_add(1, Ordering::Relaxed);
    let options =
        GpuOptions { cooperative: true, poison: true, notice: Some(notice), ..GpuOptions::default() };
    Gpu::open(0, GpuOptions { handoff: Some(handoff), starvable, ..options })
}

/// Notices that handoff was turned off.
static NOTICES: AtomicUsize = AtomicUsize::new(0);

/// A GPU with handoff.
fn open_with(starvable: bool) -> Result<Gpu, String> {
    let gpu = open(true, starvable)?;
    match uses_handoff(&gpu) {
        true => Ok(gpu),
        false => Err("this one has none".to_owned()),
    }
}

fn uses_handoff(gpu: &Gpu) -> bool {
    gpu.capacity().features.iter().any(|feature| feature.contains("handoff"))
}

/// Logits of steps of one row of each of some sequences, and of a prompt of each between them; perhaps with adapters.
fn logits(gpu: &Gpu, shape: &ModelShape, context: usize, count: usize, is_adapted: bool) -> Vec<Vec<f32>> {
    let model = shape.build(1);
    let limits = Limits {
        block_size: 32,
        pages: 1 + count * (context + 32).div_ceil(32),
        max_rows: count * context,
        max_sequences: count,
        max_outputs: 2 * count,
        max_context: context + 32,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let mut runner = gpu.load(&model.program, model.weights.clone(), limits).unwrap();
    let mut adapters = Vec::new();
    for id in (0..2).filter(|_| is_adapted) {
        let pairs = random_adapter(&model.program, &model.weights, id.into());
        runner.load_adapter(AdapterId(id), &pairs).unwrap();
        let of = |sequence: usize| AdapterUse { sequence, adapter: AdapterId(id), scale: 0.5 };
        adapters.extend((0..count).map(of));
    }
    adapters.sort_by_key(|used| used.sequence);
    let (mut out, mut start) = (StepOutput::default(), 0);
    let mut step = |rows: usize| {
        let tokens: Vec<u32> =
            (0..count * rows).map(|row| ((start + row) * 7 % shape.vocab) as u32).collect();
        let blocks = (start + rows).div_ceil(32);
        let sequence = |index: usize| StepSequence {
            rows: index * rows..(index + 1) * rows,
            start,
            tables: index * blocks..(index + 1) * blocks,
            state: None,
        };
        let sequences: Vec<_> = (0..count).map(sequence).collect();
        // A sequence's pages do not lie one after the other.
        let page = |index: usize, block: usize| PageId((limits.pages - 1 - index - count * block) as u32);
        let pages: Vec<_> =
            (0..count).flat_map(|index| (0..blocks).map(move |block| page(index, block))).collect();
        let outputs: Vec<_> =
            (1..=count).map(|end| Output { row: end * rows - 1, kind: OutputKind::Logits }).collect();
        let step = Step {
            tokens: &tokens,
            adapters: &adapters,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        submit(&mut *runner, &step, &mut out).unwrap();
        start += rows;
        let logits = out.outcomes.iter().flat_map(|outcome| match outcome {
            OutputValue::Logits(logits) => logits.clone(),
            other => panic!("{other:?}"),
        });
        Vec::from_iter(logits)
    };
    [1, 1, 5, 1, context - 12, 1, 1, 1].map(&mut step).into()
}

/// Variants of slow tests: a sample on a software driver.
fn draw() -> Draw {
    let is_software = gpus().first().is_some_and(|gpu| gpu.is_software);
    if is_software { Draw::from_env() } else { Draw::All }
}

#[test]
fn same_bits_with_and_without_barriers() {
    let (with, without) = match (open_with(false), open(false, false)) {
        (Ok(with), Ok(without)) => (with, without),
        (Err(error), _) | (_, Err(error)) => return println!("skipped: handoff on a GPU: {error}"),
    };
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
        // Norms of heads in the matmul.
        (
            (40, 1),
            ModelShape {
                format: WeightFormat::Q4_K,
                finer: Some(WeightFormat::Q6_K),
                qk_norm: Some(QkNormKind::Head),
                windows: layers(3),
                ..shape.clone()
            },
        ),
        // Partials of two sequences; and of one whose other launches use no handoff, because all heads have one norm.
        ((1100, 2), ModelShape { format: WeightFormat::Q8_0, windows: layers(2), ..shape.clone() }),
        (
            (1100, 1),
            ModelShape {
                format: WeightFormat::Q8_0,
                windows: layers(2),
                qk_norm: Some(QkNormKind::Row),
                ..shape
            },
        ),
    ];
    for ((context, count), shape) in draw().some("handoff", &shapes, 1) {
        for is_adapted in [false, true] {
            let of = |gpu: &Gpu| logits(gpu, &shape, context, count, is_adapted);
            assert_eq!(of(&with), of(&without), "{count} at {context}, {:?}", shape.format);
        }
    }
    let waits = |gpu: &Gpu| gpu.kernels().iter().filter(|(_, source)| source.contains("fn give_up")).count();
    assert!(waits(&with) > 0 && waits(&without) == 0);
    let beside = |gpu: &Gpu| gpu.kernels().iter().any(|(_, source)| source.contains("fn clear_next"));
    assert!(beside(&with) && !beside(&without), "matmuls of few rows run beside products with A of adapters");
}

#[test]
fn a_device_in_doubt_does_without() {
    let gpu = match open_with(false) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: handoff on a GPU: {error}"),
    };
    let shape = ModelShape { windows: vec![None; 2], ..ModelShape::of_format(WeightFormat::Q8_0) };
    let waits = |gpu: &Gpu| gpu.kernels().iter().filter(|(_, source)| source.contains("fn give_up")).count();
    gpu.doubt_handoff();
    logits(&gpu, &shape, 40, 1, false);
    assert_eq!(waits(&gpu), 0, "models that are loaded later have no kernels that wait");
}

/// One sequence, with its pages in order.
struct Sequence(Box<dyn Runner>, usize);

impl Sequence {
    fn submit(
        &mut self,
        tokens: &[u32],
        values: &[f32],
        carried: &[Carried],
        wants: &[OutputKind<'_>],
    ) -> Result<Ticket, StepError> {
        let (start, end) = (self.1, self.1 + tokens.len());
        let pages: Vec<_> = (1..=end.div_ceil(32)).map(|page| PageId(page as u32)).collect();
        let sequences = [StepSequence { rows: 0..tokens.len(), start, tables: 0..pages.len(), state: None }];
        let outputs: Vec<_> = wants.iter().map(|&kind| Output { row: tokens.len() - 1, kind }).collect();
        self.1 = end;
        let given = GivenRows { rows: 0..tokens.len(), values };
        self.0.submit(&Step {
            tokens,
            given: if values.is_empty() { &[] } else { std::slice::from_ref(&given) },
            carried,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        })
    }

    /// Returns how many steps were repeated.
    fn repeated(&self) -> u64 {
        let counts = self.0.kernel_counts();
        let repeated = counts.iter().find(|count| count.name.contains("repeated"));
        repeated.map_or(0, |count| count.launches)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<OutputValue>, StepError> {
        let mut out = StepOutput::default();
        self.0.collect(ticket, &mut out)?;
        Ok(out.outcomes)
    }
}

/// Outcomes of steps of all kinds: a prompt in two steps, of which the second has few rows and so attention in parts; a step of one row with a token, one
/// with logits, and three of which each is submitted before the one before it is collected, the last with logits for the host.
///
/// Also returns how many steps were repeated.
fn outcomes(runner: Box<dyn Runner>) -> Result<(Vec<Vec<OutputValue>>, u64), StepError> {
    let params = SamplingParams { temperature: 1.0, seed: 3, ..SamplingParams::default() };
    let sample = |draw: u64| {
        OutputKind::Sample(SampleRequest {
            params: &params,
            draw,
            history: &[],
            prompt_tokens: 0,
            mask: None,
            logprobs: None,
        })
    };
    let token = |outcomes: &[OutputValue]| match outcomes {
        [OutputValue::Sampled(sampled), ..] => sampled.token,
        other => panic!("{other:?}"),
    };
    let prompt: Vec<u32> = (0..300).map(|at| at * 7 % 100).collect();
    let mut all = Vec::new();
    let mut sequence = Sequence(runner, 0);
    for (tokens, wants) in [
        (&prompt[..298], &[][..]),
        (&prompt[298..], &[sample(0)][..]),
        (&[5], &[OutputKind::Logits]),
        (&[7], &[sample(1)]),
    ] {
        let ticket = sequence.submit(tokens, &[], &[], wants)?;
        all.push(sequence.collect(ticket)?);
    }
    let carried = [Carried { row: 0, output: 0, given: None }];
    let one = sequence.submit(&[token(&all[3])], &[], &[], &[sample(2)])?;
    let two = sequence.submit(&[0], &[], &carried, &[sample(3)])?;
    all.push(sequence.collect(one)?);
    let three = sequence.submit(&[0], &[], &carried, &[sample(4), OutputKind::Logits])?;
    all.push(sequence.collect(two)?);
    all.push(sequence.collect(three)?);
    let repeated = sequence.repeated();
    Ok((all, repeated))
}

/// Outcomes of steps of a head, of which the last two begin with tokens and rows of the step before. Also returns how many steps were
/// repeated.
fn chain_outcomes(runner: Box<dyn Runner>, width: usize) -> (Vec<Vec<OutputValue>>, u64) {
    let params = SamplingParams::default();
    let request = SampleRequest {
        params: &params,
        draw: 0,
        history: &[],
        prompt_tokens: 0,
        mask: None,
        logprobs: None,
    };
    let wants = [OutputKind::Sample(request), OutputKind::Embedding];
    let values: Vec<f32> = (0..40 * width).map(|at| (at as f32 * 0.7).sin()).collect();
    let tokens: Vec<u32> = (0..40).map(|at| at * 7 % 100).collect();
    let carried = [Carried { row: 0, output: 0, given: Some(1) }];
    let mut sequence = Sequence(runner, 0);
    let mut all = Vec::new();
    let prompt = sequence.submit(&tokens, &values, &[], &wants).unwrap();
    all.push(sequence.collect(prompt).unwrap());
    let one = sequence.submit(&[5], &values[..width], &[], &wants).unwrap();
    let two = sequence.submit(&[0], &[], &carried, &wants).unwrap();
    all.push(sequence.collect(one).unwrap());
    let three = sequence.submit(&[0], &[], &carried, &wants).unwrap();
    all.push(sequence.collect(two).unwrap());
    all.push(sequence.collect(three).unwrap());
    let repeated = sequence.repeated();
    (all, repeated)
}

#[test]
fn a_step_that_gives_up_is_repeated_without_handoff() {
    let gpu = match open_with(true) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: handoff that gives up on a GPU: {error}"),
    };
    let shape = ModelShape {
        hidden: 256,
        ffn: 512,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        windows: vec![None; 2],
        ..ModelShape::of_format(WeightFormat::Q8_0)
    };
    let model = shape.build(1);
    let limits = Limits {
        block_size: 32,
        pages: 16,
        max_rows: 300,
        max_sequences: 1,
        max_outputs: 2,
        max_context: 400,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let run = || outcomes(gpu.load(&model.program, model.weights.clone(), limits).unwrap()).unwrap();
    let (expected, repeated) = run();
    assert_eq!(repeated, 0);
    let before = NOTICES.load(Ordering::Relaxed);
    let mut notices = 0;
    // Numbers of steps that are repeated where the kernels of one step give up. Those of the first step may have nothing to wait for. Of
    // the last three steps, two are on the device together.
    let steps = Vec::from_iter([0, 1, 1, 1, 2, 2, 2].into_iter().enumerate());
    for (step, count) in draw().some("steps that give up", &steps, 3) {
        gpu.starve_handoff(step as u32);
        let (found, repeated) = run();
        assert!(
            repeated == count || (step, repeated) == (0, 1),
            "{repeated} steps are repeated with step {step}"
        );
        assert_eq!(found, expected, "after step {step} was repeated");
        assert_eq!(uses_handoff(&gpu), repeated == 0, "handoff stays off after step {step}");
        notices += usize::from(repeated > 0);
    }
    assert_eq!(NOTICES.load(Ordering::Relaxed) - before, notices, "one notice each");

    // Rows of the step before are there as well.
    let head = ModelShape { joined: true, given_parts: 1, ..shape }.build(2);
    let run = || chain_outcomes(gpu.load(&head.program, head.weights.clone(), limits).unwrap(), 256);
    let (expected, repeated) = run();
    assert_eq!(repeated, 0);
    let steps = Vec::from_iter(0..4);
    for step in draw().some("steps of a head that give up", &steps, 2) {
        gpu.starve_handoff(step);
        assert_eq!(run().0, expected, "after step {step} of a head was repeated");
    }
}
