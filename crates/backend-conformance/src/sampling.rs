//! Cases of sampling: samples equal the contract's definition, for many random requests.

use paguro_backend::{
    Bytes, Output, OutputKind, OutputValue, PageId, SampleRequest, SamplingParams, Step, StepOutput,
    StepSequence, TokenMask,
    sampling::{Dry, Scratch, sample_at, uniform},
};

use super::{DriveOptions, Driver, ModelShape, RandomModel, Rng, Subject, Verdict, submit};

/// Tolerance of sums of probabilities, relative to the total.
const NEAR: f64 = 1e-5;
/// Maximum percentage of samples that may differ within that tolerance.
const SELDOM: usize = 1;
/// Rows of a step, of which some have one output each, and the others many.
const ROWS: usize = 40;
const LONELY: usize = 32;
const OUTPUTS: usize = 160;

/// Every sample equals [`sampling::sample`](paguro_backend::sampling::sample) of the row's logits, or its result with
/// slightly different rounding of sums and probabilities, for any order of outputs. Vocabularies have odd sizes, and
/// some tokens have equal logits.
pub(super) fn samples(subject: &Subject) -> Verdict {
    let mut rng = Rng::new(0x5a);
    let (mut all, mut off) = (0, 0);
    for (vocab, logit_cap, rounds) in [(131, None, 8), (4111, Some(3.0), 1), (5, None, 2)] {
        let shape = ModelShape { vocab, logit_cap, hidden: 32, ffn: 32, ..ModelShape::default() };
        let model = with_equal_logits(shape.build(1));
        let options = DriveOptions { max_context: OUTPUTS, ..subject.options() };
        let mut driver = Driver::new(&*(subject.backend)(2), &model, &options)?;
        for _ in 0..rounds {
            let requests: Vec<Request> = (0..OUTPUTS).map(|_| Request::random(vocab, &mut rng)).collect();
            let row = |index: usize| if index < LONELY { index } else { LONELY + index % (ROWS - LONELY) };
            let outputs: Vec<_> = requests
                .iter()
                .enumerate()
                .map(|(index, request)| Output {
                    row: row(index),
                    kind: OutputKind::Sample(request.request()),
                })
                .collect();
            let tokens = rng.tokens(ROWS, vocab);
            let sampled = run(&mut driver, &tokens, &outputs)?;
            let reversed: Vec<_> = outputs.iter().rev().copied().collect();
            let mut again = run(&mut driver, &tokens, &reversed)?;
            again.reverse();
            let rows: Vec<_> = (0..ROWS).map(|row| Output { row, kind: OutputKind::Logits }).collect();
            let logits = run(&mut driver, &tokens, &rows)?;
            for (index, request) in requests.iter().enumerate() {
                let (OutputValue::Sampled(ours), OutputValue::Logits(logits)) =
                    (&sampled[index], &logits[row(index)])
                else {
                    return Err("a sample and logits were asked for".to_owned());
                };
                let describe =
                    |what: &str| format!("token {} of {vocab} {what}, with {request:?}", ours.token);
                if sampled[index] != again[index] {
                    return Err(describe("is another one if outputs are in another order"));
                }
                all += 1;
                match request.judge(logits, ours.token) {
                    Judgement::Right => {}
                    Judgement::Near => off += 1,
                    Judgement::Wrong(right) => return Err(describe(&format!("where {right} is right"))),
                }
            }
        }
    }
    match off * 100 <= SELDOM * all {
        true => Ok(()),
        false => Err(format!("{off} of {all} samples are not quite those that they should be")),
    }
}

/// Runs one sequence with these outputs.
fn run(driver: &mut Driver, tokens: &[u32], outputs: &[Output<'_>]) -> Result<Vec<OutputValue>, String> {
    let pages: Vec<PageId> = (1..=tokens.len().div_ceil(16) as u32).map(PageId).collect();
    let sequences = [StepSequence { rows: 0..tokens.len(), start: 0, tables: 0..pages.len(), state: None }];
    let mut out = StepOutput::default();
    submit(
        driver.runner(),
        &Step { tokens, sequences: &sequences, pages: &pages, outputs, ..Step::default() },
        &mut out,
    )?;
    Ok(out.outcomes)
}

/// Every fifth token's row of the head is that of the token before.
fn with_equal_logits(mut model: RandomModel) -> RandomModel {
    let head = model.weights.matrices.last_mut().expect("the head comes last");
    let stride = head.format.row_bytes(head.cols);
    let mut bytes = head.bytes.read().expect("in memory").into_owned();
    for token in (4..head.rows).step_by(5) {
        bytes.copy_within((token - 1) * stride..token * stride, token * stride);
    }
    head.bytes = Bytes::from(bytes);
    model
}

/// A request with the data that it refers to.
#[derive(Debug)]
struct Request {
    params: SamplingParams,
    draw: u64,
    history: Vec<u32>,
    prompt_tokens: usize,
    mask: Option<TokenMask>,
}

enum Judgement {
    Right,
    Near,
    Wrong(u32),
}

impl Request {
    /// Each value is off in some requests, moderate in most, and extreme in a few.
    fn random(vocab: usize, rng: &mut Rng) -> Self {
        let mut one_of = |values: &[f32]| values[rng.below(values.len())];
        let temperature = one_of(&[0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 8.0, 1e-6, 1e-40, 1e9, f32::MAX]);
        let top_k = one_of(&[0.0, 0.0, 1.0, 2.0, 7.0, 40.0, 1000.0, 4e9]) as u32;
        let top_p = one_of(&[1.0, 1.0, 1.0, 0.0, 0.1, 0.5, 0.83, 0.95, 0.999]);
        let min_p = one_of(&[0.0, 0.0, 0.0, 0.02, 0.1, 0.6, 1.0]);
        // Only one in two, because rows with adjusted logits have one output in backends that adjust in place.
        let adjusts = one_of(&[0.0, 1.0]);
        let repetition_penalty = one_of(&[1.0, 1.0, 1.3, 0.8]).powf(adjusts);
        let frequency_penalty = one_of(&[0.0, 0.0, 0.4, -0.7]) * adjusts;
        let presence_penalty = one_of(&[0.0, 0.0, 0.9, -0.2]) * adjusts;
        let biases = (one_of(&[0.0, 0.0, 0.0, 1.0, 4.0]) * adjusts) as usize;
        let bias = [1.5, -2.0, 100.0, -100.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY];
        let logit_bias = (0..biases).map(|_| (rng.below(vocab) as u32, bias[rng.below(bias.len())]));
        let params = SamplingParams {
            logit_bias: logit_bias.collect(),
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            penalty_window: [None, Some(0), Some(11)][rng.below(3)],
            top_n_sigma: [0.0, 0.0, 0.0, 1.5][rng.below(4)],
            xtc_probability: [0.0, 0.0, 0.0, 0.5][rng.below(4)],
            xtc_threshold: 0.05,
            dry: Dry {
                multiplier: [0.0, 0.0, 0.8][rng.below(3)] * adjusts,
                window: [None, Some(17)][rng.below(2)],
                allowed_length: 1,
                breakers: [3].into(),
                ..Dry::default()
            },
            seed: rng.bits(),
        };
        let words = vocab.div_ceil(32);
        // At least the last token, and often nothing else.
        let thin = rng.below(3) == 0;
        let mut word = |at: usize| {
            let bits = if thin { 0 } else { rng.bits() as u32 & rng.bits() as u32 };
            bits | u32::from(at == words - 1) << ((vocab - 1) % 32)
        };
        let mask: Vec<u32> = (0..words).map(&mut word).collect();
        Self {
            params,
            draw: rng.bits() >> 40,
            mask: (rng.below(3) == 0).then(|| TokenMask::new(mask)),
            history: {
                let length = rng.below(60);
                rng.tokens(length, vocab)
            },
            prompt_tokens: rng.below(60),
        }
    }

    fn request(&self) -> SampleRequest<'_> {
        let Self { params, draw, history, mask, .. } = self;
        let prompt_tokens = self.prompt_tokens.min(history.len());
        SampleRequest { params, draw: *draw, history, prompt_tokens, mask: mask.as_ref(), logprobs: None }
    }

    /// Checks whether this token is correct, or would be with different rounding.
    fn judge(&self, logits: &[f32], token: u32) -> Judgement {
        let mut scratch = Scratch::default();
        let exact = uniform(self.params.seed, self.draw);
        let right = sample_at(logits, &self.request(), exact, &mut scratch).token;
        if token == right {
            return Judgement::Right;
        }
        let SamplingParams { top_p, min_p, temperature, .. } = self.params;
        let around =
            |value: f32| [1.0, 1.0 - NEAR as f32, 1.0 + NEAR as f32].map(|by: f32| (value * by).min(1.0));
        for uniform in [exact, exact - NEAR, exact + NEAR].map(|uniform| uniform.clamp(0.0, 1.0 - 1e-9)) {
            for (top_p, min_p) in around(top_p).into_iter().flat_map(|p| around(min_p).map(|m| (p, m))) {
                let params = SamplingParams { top_p, min_p, ..self.params.clone() };
                let request = SampleRequest { params: &params, ..self.request() };
                if temperature > 0.0 && sample_at(logits, &request, uniform, &mut scratch).token == token {
                    return Judgement::Near;
                }
            }
        }
        Judgement::Wrong(right)
    }
}
