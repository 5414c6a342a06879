//! A step fails if the device has not run all of its commands, because its result would be that of an earlier step.

use paguro_backend::{
    AttentionMode, Backend, Carried, KvDtype, Limits, Output, OutputKind, OutputValue, PageId, PageMove,
    Runner, SampleRequest, SamplingParams, Step, StepError, StepOutput, StepSequence,
};
use paguro_backend_conformance::{ModelShape, RandomModel};
use paguro_backend_wgpu::{Gpu, GpuOptions};

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

/// Tokens of a prompt, of a step with a moved page, and of two steps of which the second is submitted before the first is collected.
fn tokens(runner: &mut dyn Runner) -> Result<Vec<u32>, StepError> {
    let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let request = SampleRequest {
        params: &params,
        draw: 0,
        history: &[],
        prompt_tokens: 0,
        mask: None,
        logprobs: None,
    };
    let submit = |runner: &mut dyn Runner, tokens: &[u32], start: usize, page: u32, carried: &[Carried]| {
        let outputs = [Output { row: tokens.len() - 1, kind: OutputKind::Sample(request) }];
        let sequences = [StepSequence { rows: 0..tokens.len(), start, tables: 0..1, state: None }];
        let pages = [PageId(page)];
        runner.submit(&Step {
            tokens,
            carried,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        })
    };
    let collect = |runner: &mut dyn Runner, ticket| {
        let mut out = StepOutput::default();
        runner.collect(ticket, &mut out)?;
        match &out.outcomes[..] {
            [OutputValue::Sampled(sampled)] => Ok(sampled.token),
            other => panic!("{other:?}"),
        }
    };
    let ticket = submit(runner, &[1, 2, 3, 4, 5], 0, 1, &[])?;
    let first = collect(runner, ticket)?;
    runner.move_pages(&[PageMove::Copy { from: PageId(1), to: PageId(2) }])?;
    let one = submit(runner, &[first], 5, 2, &[])?;
    let two = submit(runner, &[0], 6, 2, &[Carried { row: 0, output: 0, given: None }])?;
    let second = collect(runner, one);
    // A step that continues a failed one must not answer, either.
    let third = collect(runner, two);
    assert!(second.is_ok() || third.is_err());
    Ok(vec![first, second?, third?])
}

#[test]
fn no_answer_without_every_submission() {
    let gpu = match Gpu::open(0, GpuOptions::default()) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: lost submissions on a GPU: {error}"),
    };
    let model: RandomModel = ModelShape { windows: vec![None; 3], ..ModelShape::default() }.build(1);
    let load = || gpu.load(&model.program, model.weights.clone(), LIMITS).unwrap();
    let expected = tokens(&mut *load()).unwrap();
    let mut lost = 0;
    loop {
        let mut runner = load();
        gpu.lose_submission(lost);
        match tokens(&mut *runner) {
            Err(StepError::Device(message)) => assert!(message.contains("command buffers"), "{message}"),
            Err(error) => panic!("{error}"),
            // All that there were have been lost in turn.
            Ok(tokens) => break assert_eq!(tokens, expected),
        }
        // The next step runs as if nothing had been.
        assert_eq!(tokens(&mut *runner).unwrap(), expected, "after submission {lost}");
        lost += 1;
    }
    // The prompt's two, the moved page, and one or two of each step.
    assert!((5..20).contains(&lost), "{lost} submissions");
}
