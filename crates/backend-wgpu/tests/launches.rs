//! Number of launches of a step: for one decoding sequence they dominate the time besides reading weights.

use paguro_backend::{
    AdapterId, AdapterUse, AttentionMode, Backend, KvDtype, Limits, MemoryPlan, Output, OutputKind, PageId,
    Program, Runner, Step, StepOutput, StepSequence, Weights, split,
};
use paguro_backend_conformance::{ExpertsShape, ModelShape, RandomModel, random_adapter, submit};
use paguro_backend_wgpu::{Gpu, GpuOptions};

const LAYERS: usize = 3;

/// Names and launches of a step of some tokens, without the shapes of products; with logits of the last one, or without.
fn launches(runner: &mut dyn Runner, start: usize, tokens: usize, logits: bool) -> Vec<(String, u64)> {
    launches_with(runner, start, tokens, logits, &[])
}

/// The same with adapters.
fn launches_with(
    runner: &mut dyn Runner,
    start: usize,
    tokens: usize,
    logits: bool,
    adapters: &[AdapterUse],
) -> Vec<(String, u64)> {
    let before = runner.kernel_counts();
    let output = Output { row: tokens - 1, kind: OutputKind::Logits };
    let outputs = if logits { &[output][..] } else { &[] };
    let sequences = [StepSequence { rows: 0..tokens, start, tables: 0..1, state: None }];
    let tokens = vec![1; tokens];
    let pages = [PageId(1)];
    let (tokens, sequences, pages) = (&tokens, &sequences, &pages);
    let step = Step { tokens, adapters, sequences, pages, outputs, ..Step::default() };
    submit(runner, &step, &mut StepOutput::default()).unwrap();
    let mut launches: Vec<(String, u64)> = Vec::new();
    let counts = runner.kernel_counts();
    for count in &counts {
        let known = before.iter().find(|before| before.name == count.name);
        let own = count.launches - known.map_or(0, |before| before.launches);
        let name = count.name.split('[').next().unwrap_or_default().to_owned();
        match launches.iter_mut().find(|(known, _)| *known == name) {
            Some((_, launches)) => *launches += own,
            None => launches.push((name, own)),
        }
    }
    let twice =
        counts.iter().filter(|count| counts.iter().filter(|other| other.name == count.name).count() > 1);
    assert_eq!(twice.count(), 0, "two counters of a name: {counts:?}");
    launches.retain(|(_, launches)| *launches > 0);
    launches.sort();
    launches
}

const LIMITS: Limits = Limits {
    block_size: 32,
    pages: 4,
    max_rows: 8,
    max_sequences: 1,
    max_outputs: 1,
    max_context: 64,
    states: 0,
    kv_dtype: KvDtype::F16,
    attention: AttentionMode::Paged,
    expert_slots: None,
};

#[test]
fn a_load_allocates_what_was_planned() {
    let gpu = match Gpu::open(0, GpuOptions::default()) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: memory of a GPU: {error}"),
    };
    let plain = ModelShape { windows: vec![None; LAYERS], ..ModelShape::default() };
    let gated = ModelShape { attention_gate: true, ..plain.clone() };
    let mixed = ModelShape {
        windows: vec![Some(9), None, Some(9)],
        window_heads: Some((2, 32)),
        layer_embeds: Some(32),
        experts: Some(ExpertsShape { beside: Some(72), ..ExpertsShape::default() }),
        ..plain.clone()
    };
    let latent = ModelShape { mixers: "lll", rank: Some(48), ..plain.clone() };
    let narrow = ExpertsShape { latent: Some(32), shared: Some(96), ..ExpertsShape::default() };
    let sums = ModelShape { mixers: "hss", experts: Some(narrow), ..plain.clone() };
    let scans = ModelShape { mixers: "sss", ..plain.clone() };
    for (shape, states, expert_slots) in [
        (ModelShape { mixers: "dca", ..gated.clone() }, 7, None),
        (gated, 0, None),
        (mixed.clone(), 0, None),
        (mixed, 0, Some(3)),
        (latent, 0, None),
        (sums, 5, None),
        (scans, 5, None),
    ] {
        let RandomModel { program, weights, .. } = shape.build(1);
        let limits = Limits { states, expert_slots, ..LIMITS };
        let plan = check(&gpu, &program, &weights, limits);
        assert_eq!(plan.host > 0, expert_slots.is_some(), "{plan:?}");
    }
    // Stages have given rows, and two steps in flight.
    let RandomModel { program, weights, .. } = plain.build(1);
    for stage in split(&program, &weights, &[1, 2]) {
        check(&gpu, &stage.program, &stage.weights, Limits { max_rows: 1024, pages: 2, ..LIMITS });
    }
}

/// Loads a program and compares the plan with the memory that this takes.
fn check(gpu: &Gpu, program: &Program, weights: &Weights, limits: Limits) -> MemoryPlan {
    let backend: &dyn Backend = gpu;
    let (plan, before) = (backend.plan(program, weights, &limits), gpu.allocated());
    let runner = gpu.load(program, weights.clone(), limits).unwrap();
    // All but some counters, rounding and biases.
    let (planned, allocated) = (plan.total(), gpu.allocated() - before);
    drop(runner);
    assert!(planned.abs_diff(allocated) <= planned / 40 + 4096, "{plan:?}, but {allocated} allocated");
    plan
}

#[test]
fn a_layer_of_a_step_of_one_row_takes_five_launches() {
    let gpu = match Gpu::open(0, GpuOptions::default()) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: launches on a GPU: {error}"),
    };
    let model = ModelShape { windows: vec![None; LAYERS], ..ModelShape::default() }.build(1);
    let mut runner = gpu.load(&model.program, model.weights.clone(), LIMITS).unwrap();
    let all = |launches: &[(String, u64)]| launches.iter().map(|(_, launches)| launches).sum::<u64>();

    let prompt = launches(&mut *runner, 0, 4, false);
    // The embedding, and norm, product, rotation, attention, product, norm, product, activation, product.
    assert_eq!(all(&prompt), 1 + 9 * LAYERS as u64, "{prompt:?}");

    let token = launches(&mut *runner, 4, 1, false);
    let of = |what: &str| all(&Vec::from_iter(token.iter().filter(|(name, _)| name.contains(what)).cloned()));
    let layers = LAYERS as u64;
    assert_eq!(["_rope", "attend", "_gate"].map(of), [layers; 3], "{token:?}");
    // The last product makes what the head takes.
    assert_eq!([of("_add"), of("norm")], [2 * layers, 1], "{token:?}");
    // The embedding, and the first layer's norm.
    assert_eq!(all(&token), 2 + 5 * layers, "{token:?}");

    // Logits take a norm and a product after a prompt, and only the product after one row.
    let with_logits = launches(&mut *runner, 5, 4, true);
    assert_eq!(all(&with_logits), all(&prompt) + 2, "{with_logits:?}");
    let with_logits = launches(&mut *runner, 9, 1, true);
    assert_eq!(all(&with_logits), all(&token) + 1, "{with_logits:?}");

    // Adapters add a launch for each matmul that they change, to their own steps only.
    for seed in 0..9 {
        let pairs = random_adapter(&model.program, &model.weights, seed);
        runner.load_adapter(AdapterId(1), &pairs).unwrap();
    }
    let adapters = [AdapterUse { sequence: 0, adapter: AdapterId(1), scale: 1.0 }];
    let adapted = launches_with(&mut *runner, 10, 1, false, &adapters);
    assert_eq!(all(&adapted), all(&token) + 4 * layers, "{adapted:?}");
    let adapted = launches_with(&mut *runner, 11, 4, false, &adapters);
    assert_eq!(all(&adapted), all(&prompt) + 4 * layers, "{adapted:?}");
    assert_eq!(launches(&mut *runner, 15, 1, false), token);
}

#[test]
fn chosen_experts_have_slots_or_are_copied() {
    let gpu = match Gpu::open(0, GpuOptions::default()) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: experts on a GPU: {error}"),
    };
    let experts = Some(ExpertsShape::default());
    let model = ModelShape { windows: vec![None; LAYERS], experts, ..ModelShape::default() }.build(1);
    let limits = Limits { expert_slots: Some(3), ..LIMITS };
    let mut runner = gpu.load(&model.program, model.weights.clone(), limits).unwrap();
    let mut sums = |start: usize, rows: usize| {
        launches(&mut *runner, start, rows, false);
        let counts = runner.expert_counts().unwrap();
        assert_eq!(
            counts.iter().map(|count| count.layer).collect::<Vec<_>>(),
            [1, 2],
            "the first layer is dense"
        );
        assert!(counts.iter().all(|count| (count.slots, count.bytes > 0) == (3, true)), "{counts:?}");
        counts.iter().fold([0; 3], |[hits, misses, streamed], count| {
            [hits + count.hits, misses + count.misses, streamed + count.streamed]
        })
    };
    // Rows of a step may choose more experts than there are slots, so these remain.
    let [hits, misses, streamed] = sums(0, 4);
    assert!((hits, misses) == (0, 0) && streamed >= 2, "{streamed} copied");
    let one = sums(4, 1);
    assert_eq!((one[0] + one[1], one[2]), (2 * 2, streamed), "each row chooses two experts");
    let two = sums(5, 1);
    assert_eq!((two[0] + two[1], two[2]), (2 * 4, streamed));
    assert!(two[1] > 0 && two[0] > 0, "{two:?}");
}
