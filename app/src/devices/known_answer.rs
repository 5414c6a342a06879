//! Comparison of a device with the CPU on an excerpt of a model, before the device runs the model.
//!
//! Drivers that were never tested here compile the kernels for a model's shapes and formats. An excerpt of the model
//! ([`paguro_backend::excerpt()`]) runs on the device and on the CPU, in steps of many rows, of a few and of one,
//! because these have different kernels, and the device samples one token. Each step of an encoder is a text of its own, and the
//! rows before the head are compared. Of a stage of a model without a head, the rows of the residual stream are compared.

use paguro_backend::{
    Backend, GivenRows, Limits, LoadError, Output, OutputKind, OutputValue, PageId, Program, Runner,
    SampleRequest, SamplingParams, StateId, Step, StepOutput, StepSequence, Weights,
};

/// Rows of the steps. In total they exceed one split of attention.
const STEPS: [usize; 5] = [264, 24, 4, 1, 1];

/// Maximum root mean square of the logits' errors, in units of their standard deviation. The devices round activations
/// to eight bits or to half precision, which gives a few hundredths; uncorrelated numbers give 1.4.
const TOLERANCE: f64 = 0.1;

/// Reason of a failed check.
#[derive(Debug)]
pub enum Problem {
    /// The device cannot load the model.
    Load(LoadError),
    /// The reference computes this value, so the model is damaged.
    Model(f32),
    /// The device fails or deviates from the reference.
    Device(String),
    /// The reference fails.
    Reference(String),
}

/// Compares the device's logits for an excerpt of a model from [`paguro_backend::excerpt()`].
///
/// # Errors
/// The device fails, or its logits or tokens deviate from the reference by more than the tolerance; or the reference's
/// logits are not finite.
pub fn check(
    device: &dyn Backend,
    reference: &dyn Backend,
    (program, weights): (&Program, &Weights),
    limits: Limits,
) -> Result<(), Problem> {
    let steps = steps(limits.max_rows, limits.max_context);
    let limits = Limits {
        pages: limits.pages.min(pages(program, &limits, &steps)),
        states: limits.states.min(1),
        ..limits
    };
    let no_room = || Problem::Reference("there is no room for a step".to_owned());
    let (last, others) = steps.split_last().ok_or_else(no_room)?;
    let of_rows = match program.head() {
        None => OutputKind::Residual,
        Some(_) if program.bidirectional => OutputKind::Embedding,
        Some(_) => OutputKind::Logits,
    };
    let samples = matches!(of_rows, OutputKind::Logits);
    let load = |backend: &dyn Backend, limits| backend.load(program, weights.clone(), limits);
    let rows = |runner: Box<dyn Runner>, is_reference: bool| -> Result<(Rows, OutputValue), String> {
        let mut rows = Sequence { runner, program, limits, len: 0 };
        let logits = others.iter().map(|&count| rows.step(count, of_rows)).collect::<Result<_, _>>()?;
        let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let request = SampleRequest {
            params: &params,
            draw: 0,
            history: &[],
            prompt_tokens: 0,
            mask: None,
            logprobs: None,
        };
        let kind = if samples && !is_reference { OutputKind::Sample(request) } else { of_rows };
        Ok((logits, rows.step(*last, kind)?))
    };
    let runner = load(reference, Limits { expert_slots: None, ..limits })
        .map_err(|error| Problem::Reference(error.to_string()))?;
    let (expected, last_logits) = rows(runner, true).map_err(Problem::Reference)?;
    let logits = expected.iter().chain([&last_logits]).filter_map(numbers);
    if let Some(number) = logits.flatten().find(|logit| !logit.is_finite()) {
        return Err(Problem::Model(*number));
    }
    let runner = load(device, limits).map_err(Problem::Load)?;
    let (found, sampled) = rows(runner, false).map_err(Problem::Device)?;
    let last = || match samples {
        true => compare_token(&last_logits, &sampled),
        false => compare_all(&[last_logits], &[sampled], &[*last]),
    };
    compare_all(&expected, &found, others).and_then(|()| last()).map_err(Problem::Device)
}

/// Returns the logits of a row, or the row itself.
fn numbers(outcome: &OutputValue) -> Option<&Vec<f32>> {
    match outcome {
        OutputValue::Logits(numbers) | OutputValue::Embedding(numbers) | OutputValue::Residual(numbers) => {
            Some(numbers)
        }
        _ => None,
    }
}

/// Compares the logits of all steps but the last.
fn compare_all(expected: &[OutputValue], found: &[OutputValue], others: &[usize]) -> Result<(), String> {
    for ((expected, found), rows) in expected.iter().zip(found).zip(others) {
        let (Some(expected), Some(found)) = (numbers(expected), numbers(found)) else {
            return Err("a step has no logits".to_owned());
        };
        compare(expected, found).map_err(|problem| format!("in a step of {rows} rows, {problem}"))?;
    }
    Ok(())
}

/// Checks that the sampled token is the most probable one, within the tolerance.
fn compare_token(logits: &OutputValue, sampled: &OutputValue) -> Result<(), String> {
    let (OutputValue::Logits(logits), OutputValue::Sampled(sampled)) = (logits, sampled) else {
        return Err("the last step has no token".to_owned());
    };
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let own = logits.get(sampled.token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    match f64::from(best - own) <= 4.0 * TOLERANCE * deviation(logits) {
        true => Ok(()),
        false => Err(format!("token {} was sampled, whose logit is {own}, not {best}", sampled.token)),
    }
}

/// Logits of the last row of each step.
type Rows = Vec<OutputValue>;

/// Returns the rows of the steps that fit.
fn steps(max_rows: usize, max_context: usize) -> Vec<usize> {
    let small: usize = STEPS[1..].iter().sum();
    let first = STEPS[0].min(max_rows).min(max_context.saturating_sub(small));
    let mut left = max_context;
    let fits = |rows: usize| {
        let fits = rows > 0 && rows <= max_rows && rows <= left;
        left -= if fits { rows } else { 0 };
        fits.then_some(rows)
    };
    [first].into_iter().chain(STEPS[1..].iter().copied()).filter_map(fits).collect()
}

/// Returns the number of pages of one sequence with all steps, including page 0.
fn pages(program: &Program, limits: &Limits, steps: &[usize]) -> usize {
    1 + program.kv.groups.len() * steps.iter().sum::<usize>().div_ceil(limits.block_size)
}

/// A sequence that grows from step to step.
struct Sequence<'a> {
    runner: Box<dyn Runner>,
    program: &'a Program,
    limits: Limits,
    len: usize,
}

impl Sequence<'_> {
    /// Runs `rows` more rows and returns the requested output of the last one.
    fn step(&mut self, rows: usize, kind: OutputKind<'_>) -> Result<OutputValue, String> {
        let start = if self.program.bidirectional { 0 } else { self.len };
        let end = start + rows;
        let has_tokens = self.program.embed().is_some();
        let ids = if has_tokens { self.program.vocab } else { 1 };
        let tokens: Vec<u32> = (start..end).map(|at| ((at * 7919 + 13) % ids) as u32).collect();
        let width = if has_tokens { 0 } else { self.program.given_width() };
        // Numbers between -1 and 1 by their place.
        let number = |at: usize| (at * 7919 % 2048) as f32 / 1024.0 - 1.0;
        let values: Vec<f32> = (start * width..end * width).map(number).collect();
        let given = [GivenRows { rows: 0..rows, values: &values }];
        let given = if has_tokens { &[] } else { &given[..] };
        let groups = self.program.kv.groups.len();
        let blocks = end.div_ceil(self.limits.block_size);
        let pages: Vec<_> = (0..groups)
            .flat_map(|group| (0..blocks).map(move |block| PageId((1 + block * groups + group) as u32)))
            .collect();
        if pages.iter().any(|page| page.0 as usize >= self.limits.pages) {
            return Err(format!("{} pages are too few", self.limits.pages));
        }
        let state = self.program.state.in_place(StateId(0));
        let sequences = [StepSequence { rows: 0..rows, start, tables: 0..pages.len(), state }];
        let outputs = [Output { row: rows - 1, kind }];
        let step = Step {
            tokens: &tokens,
            given,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        let mut out = StepOutput::default();
        let ticket = self.runner.submit(&step).map_err(|error| error.to_string())?;
        self.runner.collect(ticket, &mut out).map_err(|error| error.to_string())?;
        self.len = end;
        out.outcomes.pop().ok_or_else(|| "nothing was computed".to_owned())
    }
}

fn compare(expected: &[f32], found: &[f32]) -> Result<(), String> {
    if let Some(number) = found.iter().find(|number| !number.is_finite()) {
        return Err(format!("a logit is {number}"));
    }
    let squares: f64 = expected.iter().zip(found).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let error = (squares / expected.len() as f64).sqrt();
    let deviation = deviation(expected);
    match error <= TOLERANCE * deviation + 1e-6 {
        true => Ok(()),
        false => Err(format!("logits are off by {error:.3}, where {deviation:.3} is their spread")),
    }
}

/// Returns the standard deviation.
fn deviation(numbers: &[f32]) -> f64 {
    let mean = |numbers: &mut dyn Iterator<Item = f64>, count: usize| numbers.sum::<f64>() / count as f64;
    let middle = mean(&mut numbers.iter().map(|&number| f64::from(number)), numbers.len());
    mean(&mut numbers.iter().map(|&number| (f64::from(number) - middle).powi(2)), numbers.len()).sqrt()
}

#[cfg(test)]
#[path = "known_answer/tests.rs"]
mod tests;
