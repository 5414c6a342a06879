//! Sampling parameters and limits of an answer.

use std::hash::{BuildHasher, RandomState};

use paguro_engine::{Dry, Handle, Request};
use paguro_model::{GenerationDefaults, Model, SamplingOverrides};

use super::DraftParams;
use crate::{
    count::{ClientCount, check_length},
    error::ApiError,
    wire::OneOrMany,
};

/// Sampling parameters and limits of a request.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // named as the fields of `Request` that they set
pub struct Options {
    /// `None` is the model's recommendation, or else our default; the seed is random.
    pub sampling: SamplingOverrides,
    pub stop: Vec<String>,
    pub stop_tokens: Vec<u32>,
    pub include_stop_string: bool,
    pub ignore_stop_tokens: bool,
    pub min_tokens: usize,
    pub max_tokens: Option<ClientCount>,
    /// Maximum tokens of prompt and answer, at most the model's own limit.
    pub context: Option<ClientCount>,
    /// Number of answers; `None` is 1.
    pub n: Option<ClientCount>,
    pub logprobs: Option<ClientCount>,
    /// Also reports log-probabilities of the prompt's tokens, with the `logprobs` most probable ones.
    pub score_prompt: bool,
    /// Reports the progress of the prompt's prefill.
    pub report_prefill: bool,
    /// Reports all tokens as with `logprobs`, also without log-probabilities.
    pub report_tokens: bool,
    pub priority: i32,
    pub cache_salt: String,
    pub drafts: DraftParams,
    /// Ids of adapters with their scales; `None` leaves the choice to the model's name.
    pub lora: Option<Vec<(usize, f32)>>,
}

/// Maximum number of stop strings. Every token of an answer is searched for all of them.
const MAX_STOPS: usize = 1024;

/// Maximum size of all stop strings together, in bytes.
const MAX_STOP_BYTES: usize = 64 << 10;

/// Largest number of breakers of DRY, and largest size of each in bytes.
const MAX_BREAKERS: usize = 64;
const MAX_BREAKER: usize = 64;

/// Maximum number of reported alternatives per token.
const MAX_LOGPROBS: usize = 20;

impl Options {
    /// Converts a client's seed; numbers below 0 are random.
    pub fn seed(seed: Option<i64>) -> Option<u64> {
        seed.and_then(|seed| u64::try_from(seed).ok())
    }

    /// Converts a client's number of best tokens; numbers up to 0 keep all.
    pub fn top_k(most: Option<i64>) -> Option<u32> {
        most.map(|most| u32::try_from(most.max(0)).unwrap_or(u32::MAX))
    }

    /// Converts a client's stop strings. Empty ones, which would end every answer at once, are removed.
    pub fn stop_strings(stop: Option<OneOrMany<String>>) -> Vec<String> {
        let mut stop = stop.map(OneOrMany::into_vec).unwrap_or_default();
        stop.retain(|text| !text.is_empty());
        stop
    }

    /// Sets a penalty window as llama.cpp and Ollama write it: negative numbers mean all tokens, and without tokens to
    /// consider, penalties are off.
    pub fn set_window(sampling: &mut SamplingOverrides, last: Option<i64>) {
        if last == Some(0) {
            sampling.repetition_penalty = Some(1.0);
            (sampling.frequency_penalty, sampling.presence_penalty) = (Some(0.0), Some(0.0));
        }
        let window = last.filter(|last| *last > 0).map(|last| u32::try_from(last).unwrap_or(u32::MAX));
        sampling.penalty_window = window.map(Some);
    }

    /// Completes the options by the defaults of a model, which have the fields of Ollama's options.
    pub fn or(self, defaults: Self) -> Self {
        Self {
            sampling: self.sampling.or(defaults.sampling),
            stop: if self.stop.is_empty() { defaults.stop } else { self.stop },
            max_tokens: self.max_tokens.or(defaults.max_tokens),
            context: self.context.or(defaults.context),
            drafts: self.drafts.or(defaults.drafts),
            ..self
        }
    }

    /// Checks the values of stored defaults, which are not yet those of a request.
    ///
    /// # Errors
    /// The first value out of bounds, by name.
    pub fn check_stored(&self) -> Result<(), ApiError> {
        self.check_lists(usize::MAX)?;
        let mut sampling = GenerationDefaults::default().sampling();
        self.sampling.apply(&mut sampling);
        sampling.check(usize::MAX).map_err(|error| ApiError::invalid(error.field, error.to_string()))
    }

    /// Checks all counts and lists before anything is allocated for them.
    ///
    /// # Errors
    /// The first value out of bounds, by name.
    pub(super) fn check(&self, handle: &Handle) -> Result<(), ApiError> {
        self.check_lists(handle.vocab())?;
        self.n.map_or(Ok(1), |n| n.within(1..=handle.max_branches(), "n"))?;
        self.logprobs.map_or(Ok(0), |count| count.within(0..=MAX_LOGPROBS, "logprobs"))?;
        Ok(())
    }

    /// Returns the maximum tokens of prompt and answer.
    pub(super) fn limit(&self, handle: &Handle) -> usize {
        self.context.map_or(handle.max_context(), |context| context.at_most(handle.max_context()))
    }

    fn check_lists(&self, vocab: usize) -> Result<(), ApiError> {
        check_length(self.stop.len(), MAX_STOPS, "stop")?;
        let bytes = self.stop.iter().map(String::len).sum::<usize>();
        if bytes > MAX_STOP_BYTES {
            let message = format!("`stop` has {bytes} bytes; one request can have {MAX_STOP_BYTES}");
            return Err(ApiError::invalid("stop", message));
        }
        let breakers = self.sampling.dry_breakers.as_deref().unwrap_or_default();
        check_length(breakers.len(), MAX_BREAKERS, "dry_sequence_breakers")?;
        if let Some(long) = breakers.iter().find(|breaker| breaker.len() > MAX_BREAKER) {
            let bytes = long.len();
            let message =
                format!("a text of `dry_sequence_breakers` has {bytes} bytes, at most {MAX_BREAKER}");
            return Err(ApiError::invalid("dry_sequence_breakers", message));
        }
        self.drafts.check()?;
        check_length(self.stop_tokens.len(), vocab, "stop_token_ids")?;
        let biases = self.sampling.logit_bias.as_ref().map_or(0, Vec::len);
        check_length(biases, vocab, "logit_bias")
    }

    /// Returns the engine's request for these tokens. The options were [checked](Self::check).
    ///
    /// # Errors
    /// The prompt leaves no room for an answer in the requested context.
    pub(super) fn request(
        self,
        model: &Model,
        handle: &Handle,
        prompt: Vec<u32>,
    ) -> Result<Request, ApiError> {
        let limit = self.limit(handle);
        let mut max_tokens = self.max_tokens.map(|tokens| tokens.at_most(handle.max_context()));
        if self.context.is_some() {
            let rest = limit.checked_sub(prompt.len()).filter(|&rest| rest > 0);
            let rest = rest.ok_or(ApiError::ContextTooLong { tokens: prompt.len(), limit })?;
            max_tokens = Some(max_tokens.map_or(rest, |most| most.min(rest)));
        }
        let mut sampling = model.defaults.sampling();
        self.sampling.apply(&mut sampling);
        if sampling.dry.multiplier == 0.0 || sampling.dry.window == Some(0) {
            sampling.dry = Dry::default();
        }
        self.sampling.find_breakers(&mut sampling, &model.tokenizer);
        sampling.seed = self.sampling.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        Ok(Request {
            prompt,
            branches: self.n.map_or(1, |n| n.at_most(handle.max_branches())),
            max_tokens: max_tokens.or(model.defaults.max_tokens),
            stop_tokens: self.stop_tokens,
            ignore_stop_tokens: self.ignore_stop_tokens,
            include_stop_string: self.include_stop_string,
            min_tokens: self.min_tokens,
            stop_strings: self.stop,
            sampling,
            logprobs: self.logprobs.map(|count| count.at_most(MAX_LOGPROBS)),
            score_prompt_from: self.score_prompt.then_some(0),
            report_prefill: self.report_prefill,
            priority: self.priority,
            drafts: self.drafts.options(model, handle.max_context()),
            ..Request::default()
        })
    }
}
