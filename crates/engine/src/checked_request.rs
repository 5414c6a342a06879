//! A request in the form that the engine thread needs.

use std::{ops::Range, sync::Arc, time::Instant};

use paguro_backend::{SamplingParams, TokenMask};
use paguro_model::Pooling;

use crate::{
    Constraint, DraftOptions, SubmitError,
    adapters::RequestAdapters,
    fair::Tenant,
    pictures::Pictures,
    request::{FinishReason, Request, RequestLimits},
    thought::Thought,
};

#[derive(Debug)]
pub(crate) struct CheckedRequest {
    /// Number of the request in order of arrival.
    pub id: u64,
    pub priority: i32,
    pub tenant: Tenant,
    pub deadline: Option<Instant>,
    /// Sampling parameters of each branch, which differ in the seed.
    pub sampling: Vec<SamplingParams>,
    pub stop_tokens: Vec<u32>,
    /// Tokens before which no stop token is sampled, and a mask of all others, if there are both.
    pub min_tokens: usize,
    pub no_stop_tokens: Option<Arc<TokenMask>>,
    /// Mask without the model's stop tokens, if they are ignored and there is a grammar. They are sampled only where the
    /// grammar allows nothing else.
    pub no_model_stop_tokens: Option<Arc<TokenMask>>,
    /// Maximum number of generated tokens, and the reason of an end there.
    pub max_tokens: usize,
    pub at_max_tokens: FinishReason,
    pub logprobs: Option<usize>,
    /// Options of drafts.
    pub drafts: DraftOptions,
    /// Grammar, until it moves to the first sequence.
    pub constraint: Option<Constraint>,
    /// Limit of reasoning, until it moves to the first sequence.
    pub thought: Option<Thought>,
    /// First prompt position to score, if any.
    pub score_from: Option<usize>,
    /// Prompt positions with requested embeddings.
    pub embedded: Option<Range<usize>>,
    /// True if all of these embeddings are reported instead of their mean.
    pub keeps_rows: bool,
    /// True if the device computes their mean, because all of them are in one step.
    pub is_mean: bool,
    /// True if steps that compute a part of the prompt are reported.
    pub report_prefill: bool,
    /// Pictures of the prompt.
    pub pictures: Pictures,
    /// Number of prompt tokens with which prompts of later turns probably begin.
    pub lasting_tokens: usize,
    /// See [`Request::prefix_salt`].
    pub prefix_salt: Vec<u8>,
    pub adapters: RequestAdapters,
}

impl CheckedRequest {
    /// Converts a request that was [checked](Request::check) against `limits`.
    ///
    /// # Errors
    /// All tokens of the vocabulary are stop tokens, but the answer must have some tokens.
    pub fn new(
        id: u64,
        request: &Request,
        model_stop_tokens: &[u32],
        limits: RequestLimits,
    ) -> Result<Self, SubmitError> {
        let RequestLimits { vocab, max_context, is_encoder, .. } = limits;
        let room = max_context - request.prompt.len();
        let (max_tokens, at_max_tokens) = match request.max_tokens {
            Some(tokens) if tokens <= room => (tokens, FinishReason::Length),
            _ => (room, FinishReason::ContextFull),
        };
        let mut stop_tokens = request.stop_tokens.clone();
        if !request.ignore_stop_tokens {
            stop_tokens.extend_from_slice(model_stop_tokens);
        }
        let forbids = request.min_tokens > 0 && !stop_tokens.is_empty();
        let forbidden = [&stop_tokens, model_stop_tokens].concat();
        let forbidden = if request.constraint.is_some() { &forbidden } else { &stop_tokens };
        let no_stop_tokens = forbids.then(|| all_but(forbidden, vocab)).transpose()?.map(Arc::new);
        let ignores = request.ignore_stop_tokens && request.constraint.is_some();
        // A vocabulary of nothing but stop tokens has no such mask.
        let no_model_stop_tokens =
            if ignores { all_but(model_stop_tokens, vocab).ok().map(Arc::new) } else { None };
        let seed = request.sampling.seed;
        Ok(Self {
            id,
            priority: request.priority,
            tenant: request.tenant.clone(),
            deadline: request.deadline,
            sampling: (0..request.branches as u64)
                .map(|branch| SamplingParams { seed: seed.wrapping_add(branch), ..request.sampling.clone() })
                .collect(),
            stop_tokens,
            min_tokens: request.min_tokens,
            no_stop_tokens,
            no_model_stop_tokens,
            max_tokens,
            at_max_tokens,
            logprobs: request.logprobs,
            drafts: request.drafts.clone(),
            constraint: request.constraint.clone(),
            thought: None,
            score_from: request.score_prompt_from,
            report_prefill: request.report_prefill,
            pictures: Pictures::new(request.pictures.clone(), &request.prefix_salt),
            lasting_tokens: request.lasting_tokens.unwrap_or(usize::MAX),
            prefix_salt: request.prefix_salt.clone(),
            adapters: RequestAdapters::new(&request.adapters),
            embedded: request.embedding.map(|pooling| match pooling {
                Pooling::Last => request.prompt.len() - 1..request.prompt.len(),
                Pooling::Mean | Pooling::All => 0..request.prompt.len(),
                Pooling::First => 0..1,
            }),
            keeps_rows: request.embedding == Some(Pooling::All),
            is_mean: is_encoder && request.embedding == Some(Pooling::Mean),
        })
    }
}

fn all_but(tokens: &[u32], vocab: usize) -> Result<TokenMask, SubmitError> {
    let mut bits = vec![u32::MAX; vocab.div_ceil(32)];
    if !vocab.is_multiple_of(32) {
        bits.iter_mut().last().into_iter().for_each(|last| *last >>= 32 - vocab % 32);
    }
    for &token in tokens.iter().filter(|&&token| (token as usize) < vocab) {
        bits[token as usize / 32] &= !(1 << (token % 32));
    }
    if bits.iter().all(|&word| word == 0) {
        let problem = "cannot be kept: every token of the vocabulary is a stop token".into();
        return Err(SubmitError::Invalid { field: "min_tokens", problem });
    }
    Ok(TokenMask::new(bits))
}
