//! Sampling parameters and limits of an answer.

use std::hash::{BuildHasher, RandomState};

use paguro_engine::{Handle, Request};
use paguro_model::GenerationDefaults;

use super::{DraftParams, DryOptions};
use crate::{
    count::{ClientCount, check_length},
    error::ApiError,
    wire::OneOrMany,
};

/// Sampling parameters and limits of a request. `None` is the model's recommendation, or else our default.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // named as the fields of `SamplingParams` and `Request` that they set
pub struct Options {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub top_n_sigma: Option<f32>,
    pub xtc_probability: Option<f32>,
    pub xtc_threshold: Option<f32>,
    pub dry: DryOptions,
    pub repetition_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub penalty_window: Option<u32>,
    pub logit_bias: Vec<(u32, f32)>,
    /// Random if `None`.
    pub seed: Option<u64>,
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

/// Checked counts of [`Options`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Number of answers.
    pub branches: usize,
    max_tokens: Option<usize>,
    /// Maximum tokens of prompt and answer, if the request bounds them.
    pub context: Option<usize>,
    logprobs: Option<usize>,
}

/// Maximum number of stop strings. Every token of an answer is searched for all of them.
const MAX_STOPS: usize = 1024;

/// Maximum size of all stop strings together, in bytes.
const MAX_STOP_BYTES: usize = 64 << 10;

/// Maximum number of reported alternatives per token.
const MAX_LOGPROBS: usize = 20;

impl Counts {
    /// Bounds the answer to a prompt of `prompt` tokens by the requested context.
    ///
    /// # Errors
    /// The prompt leaves no room for an answer.
    pub fn bound(&mut self, prompt: usize) -> Result<(), ApiError> {
        let Some(context) = self.context else { return Ok(()) };
        if prompt >= context {
            return Err(ApiError::ContextTooLong { tokens: prompt, limit: context });
        }
        let rest = context - prompt;
        self.max_tokens = Some(self.max_tokens.map_or(rest, |most| most.min(rest)));
        Ok(())
    }
}

impl Options {
    /// Converts a client's seed; numbers below 0 are random.
    pub fn seed(seed: Option<i64>) -> Option<u64> {
        seed.and_then(|seed| u64::try_from(seed).ok())
    }

    /// Converts a client's stop strings. Empty ones, which would end every answer at once, are removed.
    pub fn stop_strings(stop: Option<OneOrMany<String>>) -> Vec<String> {
        let mut stop = stop.map(OneOrMany::into_vec).unwrap_or_default();
        stop.retain(|text| !text.is_empty());
        stop
    }

    /// Converts a penalty window as llama.cpp and Ollama write it: numbers up to 0 mean all tokens.
    pub fn window(last: Option<i64>) -> Option<u32> {
        last.filter(|last| *last > 0).map(|last| u32::try_from(last).unwrap_or(u32::MAX))
    }

    /// Fills fields that are `None` with the values of `other`.
    pub fn or(self, other: Self) -> Self {
        fn list<T>(these: Vec<T>, others: Vec<T>) -> Vec<T> {
            if these.is_empty() { others } else { these }
        }
        Self {
            temperature: self.temperature.or(other.temperature),
            top_k: self.top_k.or(other.top_k),
            top_p: self.top_p.or(other.top_p),
            min_p: self.min_p.or(other.min_p),
            top_n_sigma: self.top_n_sigma.or(other.top_n_sigma),
            xtc_probability: self.xtc_probability.or(other.xtc_probability),
            xtc_threshold: self.xtc_threshold.or(other.xtc_threshold),
            dry: self.dry.or(other.dry),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
            frequency_penalty: self.frequency_penalty.or(other.frequency_penalty),
            presence_penalty: self.presence_penalty.or(other.presence_penalty),
            penalty_window: self.penalty_window.or(other.penalty_window),
            logit_bias: list(self.logit_bias, other.logit_bias),
            seed: self.seed.or(other.seed),
            stop: list(self.stop, other.stop),
            stop_tokens: list(self.stop_tokens, other.stop_tokens),
            include_stop_string: self.include_stop_string || other.include_stop_string,
            ignore_stop_tokens: self.ignore_stop_tokens || other.ignore_stop_tokens,
            min_tokens: self.min_tokens.max(other.min_tokens),
            max_tokens: self.max_tokens.or(other.max_tokens),
            context: self.context.or(other.context),
            n: self.n.or(other.n),
            logprobs: self.logprobs.or(other.logprobs),
            score_prompt: self.score_prompt || other.score_prompt,
            cache_salt: if self.cache_salt.is_empty() { other.cache_salt } else { self.cache_salt },
            report_prefill: self.report_prefill || other.report_prefill,
            report_tokens: self.report_tokens,
            priority: self.priority,
            drafts: self.drafts.or(other.drafts),
            lora: self.lora.or(other.lora),
        }
    }

    /// Checks the values of stored defaults, which are not yet those of a request.
    ///
    /// # Errors
    /// The first value out of bounds, by name.
    pub fn check_stored(&self) -> Result<(), ApiError> {
        self.check_lists(usize::MAX)?;
        let counts = Counts { branches: 1, max_tokens: None, context: None, logprobs: None };
        let request = self.clone().request(Vec::new(), &counts, &GenerationDefaults::default());
        let checked = request.sampling.check(usize::MAX);
        checked.map_err(|error| ApiError::invalid(error.field, error.to_string()))
    }

    /// Checks all counts and lists before anything is allocated for them.
    ///
    /// # Errors
    /// The first value out of bounds, by name.
    pub(super) fn check(&self, handle: &Handle) -> Result<Counts, ApiError> {
        let max_context = handle.max_context();
        self.check_lists(handle.vocab())?;
        let logprobs = self.logprobs.map(|count| count.within(0..=MAX_LOGPROBS, "logprobs"));
        Ok(Counts {
            branches: self.n.map_or(Ok(1), |n| n.within(1..=handle.max_branches(), "n"))?,
            max_tokens: self.max_tokens.map(|tokens| tokens.at_most(max_context)),
            context: self.context.map(|context| context.at_most(max_context)),
            logprobs: logprobs.transpose()?,
        })
    }

    fn check_lists(&self, vocab: usize) -> Result<(), ApiError> {
        check_length(self.stop.len(), MAX_STOPS, "stop")?;
        let bytes = self.stop.iter().map(String::len).sum::<usize>();
        if bytes > MAX_STOP_BYTES {
            let message = format!("`stop` has {bytes} bytes; one request can have {MAX_STOP_BYTES}");
            return Err(ApiError::invalid("stop", message));
        }
        self.dry.check()?;
        self.drafts.check()?;
        check_length(self.stop_tokens.len(), vocab, "stop_token_ids")?;
        check_length(self.logit_bias.len(), vocab, "logit_bias")
    }

    /// Returns the engine's request for these tokens.
    pub(super) fn request(self, prompt: Vec<u32>, counts: &Counts, defaults: &GenerationDefaults) -> Request {
        let mut sampling = defaults.sampling();
        sampling.temperature = self.temperature.unwrap_or(sampling.temperature);
        sampling.top_k = self.top_k.unwrap_or(sampling.top_k);
        sampling.top_p = self.top_p.unwrap_or(sampling.top_p);
        sampling.min_p = self.min_p.unwrap_or(sampling.min_p);
        sampling.top_n_sigma = self.top_n_sigma.unwrap_or(sampling.top_n_sigma);
        sampling.xtc_probability = self.xtc_probability.unwrap_or(sampling.xtc_probability);
        sampling.xtc_threshold = self.xtc_threshold.unwrap_or(sampling.xtc_threshold);
        if self.dry.multiplier.is_some() {
            sampling.dry = self.dry.sampling();
        }
        sampling.repetition_penalty = self.repetition_penalty.unwrap_or(sampling.repetition_penalty);
        sampling.frequency_penalty = self.frequency_penalty.unwrap_or(sampling.frequency_penalty);
        sampling.presence_penalty = self.presence_penalty.unwrap_or(sampling.presence_penalty);
        sampling.penalty_window = self.penalty_window.or(sampling.penalty_window);
        sampling.logit_bias = self.logit_bias;
        sampling.seed = self.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        Request {
            prompt,
            branches: counts.branches,
            max_tokens: counts.max_tokens.or(defaults.max_tokens),
            stop_tokens: self.stop_tokens,
            ignore_stop_tokens: self.ignore_stop_tokens,
            include_stop_string: self.include_stop_string,
            min_tokens: self.min_tokens,
            stop_strings: self.stop,
            sampling,
            logprobs: counts.logprobs,
            score_prompt_from: self.score_prompt.then_some(0),
            report_prefill: self.report_prefill,
            priority: self.priority,
            drafts: self.drafts.options(),
            ..Request::default()
        }
    }
}
