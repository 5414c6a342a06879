//! A step that outlives its submission, so that other threads compute it later.

use std::ops::Range;

use paguro_backend::{
    AdapterUse, Carried, Coordinates, GivenRows, Output, OutputKind, PageId, SampleRequest, SamplingParams,
    Step, StepSequence, TokenMask,
};

/// A copy of a [`Step`].
pub struct OwnedStep {
    pub tokens: Vec<u32>,
    pub carried: Vec<Carried>,
    given: Vec<(Range<usize>, Vec<f32>)>,
    coordinates: Vec<Coordinates>,
    spans: Vec<Range<usize>>,
    adapters: Vec<AdapterUse>,
    pub sequences: Vec<StepSequence>,
    pages: Vec<PageId>,
    outputs: Vec<OwnedOutput>,
}

struct OwnedOutput {
    row: usize,
    kind: OwnedKind,
}

/// An [`OutputKind`].
enum OwnedKind {
    Sample(Box<OwnedRequest>),
    Score { token: u32, top: usize },
    Logits,
    Embedding,
    Mean,
    Residual,
}

/// A [`SampleRequest`].
struct OwnedRequest {
    params: SamplingParams,
    draw: u64,
    history: Vec<u32>,
    prompt_tokens: usize,
    mask: Option<TokenMask>,
    logprobs: Option<usize>,
}

impl OwnedStep {
    /// Copies a step.
    pub fn new(step: &Step<'_>) -> Self {
        let Step { tokens, carried, given, coordinates, spans, adapters, sequences, pages, outputs } = step;
        let given = given.iter().map(|GivenRows { rows, values }| (rows.clone(), values.to_vec()));
        Self {
            tokens: tokens.to_vec(),
            carried: carried.to_vec(),
            given: given.collect(),
            coordinates: coordinates.to_vec(),
            spans: spans.to_vec(),
            adapters: adapters.to_vec(),
            sequences: sequences.to_vec(),
            pages: pages.to_vec(),
            outputs: outputs.iter().map(OwnedOutput::new).collect(),
        }
    }

    /// Returns the rows that were given.
    pub fn given(&self) -> Vec<GivenRows<'_>> {
        self.given.iter().map(|(rows, values)| GivenRows { rows: rows.clone(), values }).collect()
    }

    /// Returns the outputs.
    pub fn outputs(&self) -> Vec<Output<'_>> {
        self.outputs.iter().map(OwnedOutput::output).collect()
    }

    /// Returns the step with these given rows and outputs. Its carried tokens are [inputs](paguro_backend::StepInputs) of the first stage.
    pub fn step<'a>(&'a self, given: &'a [GivenRows<'a>], outputs: &'a [Output<'a>]) -> Step<'a> {
        let Self { tokens, carried: _, given: _, coordinates, spans, adapters, sequences, pages, outputs: _ } =
            self;
        Step { tokens, carried: &[], given, coordinates, spans, adapters, sequences, pages, outputs }
    }
}

impl OwnedOutput {
    fn new(output: &Output<'_>) -> Self {
        let kind = match output.kind {
            OutputKind::Sample(request) => OwnedKind::Sample(Box::new(OwnedRequest::new(&request))),
            OutputKind::Score { token, top } => OwnedKind::Score { token, top },
            OutputKind::Logits => OwnedKind::Logits,
            OutputKind::Embedding => OwnedKind::Embedding,
            OutputKind::Mean => OwnedKind::Mean,
            OutputKind::Residual => OwnedKind::Residual,
        };
        Self { row: output.row, kind }
    }

    fn output(&self) -> Output<'_> {
        let kind = match &self.kind {
            OwnedKind::Sample(request) => OutputKind::Sample(request.request()),
            OwnedKind::Score { token, top } => OutputKind::Score { token: *token, top: *top },
            OwnedKind::Logits => OutputKind::Logits,
            OwnedKind::Embedding => OutputKind::Embedding,
            OwnedKind::Mean => OutputKind::Mean,
            OwnedKind::Residual => OutputKind::Residual,
        };
        Output { row: self.row, kind }
    }
}

impl OwnedRequest {
    fn new(request: &SampleRequest<'_>) -> Self {
        let SampleRequest { params, draw, history, prompt_tokens, mask, logprobs } = *request;
        Self {
            params: params.clone(),
            draw,
            history: history.to_vec(),
            prompt_tokens,
            mask: mask.map(|mask| TokenMask::new(mask.bits())),
            logprobs,
        }
    }

    fn request(&self) -> SampleRequest<'_> {
        let Self { params, draw, history, prompt_tokens, mask, logprobs } = self;
        SampleRequest {
            params,
            draw: *draw,
            history,
            prompt_tokens: *prompt_tokens,
            mask: mask.as_ref(),
            logprobs: *logprobs,
        }
    }
}
