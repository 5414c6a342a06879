//! The fields of all endpoints of OpenAI's API that say how to sample and when to end, and those known fields of them
//! that other servers have and this one has not.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{DryOptions, Options},
    wire::{OneOrMany, Other, left_out, no_effect, refused},
};

/// Sampling parameters and stop conditions.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the best token. If absent, what the model recommends, or 0.8.
    pub temperature: Option<f32>,
    /// Keeps the smallest set of best tokens whose probability reaches this.
    pub top_p: Option<f32>,
    /// Keeps this many best tokens; 0 and -1 keep all. (Not of OpenAI's API.)
    top_k: Option<i64>,
    /// Keeps tokens with at least this fraction of the best one's probability. (Not of OpenAI's API.)
    min_p: Option<f32>,
    /// Keeps tokens whose logits are at most this many standard deviations below the best one; 0 and -1 keep all.
    /// (llama.cpp's.)
    top_n_sigma: Option<f32>,
    /// How likely XTC is to drop all tokens of at least `xtc_threshold` but the least likely of them. (llama.cpp's.)
    xtc_probability: Option<f32>,
    /// The probability from which on XTC may drop a token, 0.1 if absent. (llama.cpp's.)
    xtc_threshold: Option<f32>,
    /// DRY's penalty of tokens that would go on with a repetition; 0 is off. (llama.cpp's.)
    dry_multiplier: Option<f32>,
    /// Factor of that penalty for each token more, 1.75 if absent.
    dry_base: Option<f32>,
    /// Length of the shortest repetition that is penalized, 2 if absent.
    dry_allowed_length: Option<u32>,
    /// In how many of the last tokens repetitions are looked for; 0 switches DRY off, -1 looks at all.
    dry_penalty_last_n: Option<i64>,
    /// Texts that end a repetition, a line break, `:`, `"` and `*` if absent.
    dry_sequence_breakers: Option<OneOrMany<String>>,
    /// Subtracted for each time that a token was generated. The prompt does not count.
    pub frequency_penalty: Option<f32>,
    /// Subtracted if a token was generated.
    pub presence_penalty: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens that occur. (Not of OpenAI's API.)
    repetition_penalty: Option<f32>,
    /// The name of `repetition_penalty` in llama.cpp.
    repeat_penalty: Option<f32>,
    /// In how many of the last tokens penalties look for a token; 0 switches them off, -1 looks at all. (llama.cpp's.)
    repeat_last_n: Option<i64>,
    /// Added to the logits of tokens: an object of tokens and numbers from -100 to 100, or a list of pairs.
    logit_bias: Option<Value>,
    /// The same seed gives the same answer; answer `i` of several has the seed `seed + i`. Below 0 it is random.
    seed: Option<i64>,
    /// Texts that end the answer.
    stop: Option<OneOrMany<String>>,
    /// Tokens that end the answer. (Not of OpenAI's API.)
    stop_token_ids: Option<Vec<u32>>,
    /// True if the text that ended the answer is part of it. (vLLM's.)
    include_stop_str_in_output: Option<bool>,
    /// Goes on after the model's own stop tokens. (Not of OpenAI's API.)
    ignore_eos: Option<bool>,
    /// Nothing ends the answer before it has this many tokens. (vLLM's.)
    min_tokens: Option<usize>,
    /// Higher ones go first. (Not of OpenAI's API.)
    priority: Option<i32>,
    /// Prefixes are shared only among requests with the same salt. (vLLM's.)
    cache_salt: Option<String>,
}

const NO_SAMPLER: &str = "this way of sampling does not exist here";
const NO_GRAMMAR: &str = "`response_format` says what an answer must be";

/// Known fields beside those of [`SamplingParams`].
pub const OTHERS: &[Other] = &[
    refused("top_a", &["0"], NO_SAMPLER),
    refused("tfs", &["1"], NO_SAMPLER),
    refused("tfs_z", &["1"], NO_SAMPLER),
    refused("typical_p", &["1"], NO_SAMPLER),
    refused("typical", &["1"], NO_SAMPLER),
    refused("mirostat", &["0"], NO_SAMPLER),
    refused("mirostat_mode", &["0"], NO_SAMPLER),
    no_effect("mirostat_tau", "there is no Mirostat"),
    no_effect("mirostat_eta", "there is no Mirostat"),
    refused("dynatemp_range", &["0"], NO_SAMPLER),
    no_effect("dynatemp_exponent", "there are no dynamic temperatures"),
    refused("smoothing_factor", &["0"], NO_SAMPLER),
    refused("epsilon_cutoff", &["0"], NO_SAMPLER),
    refused("eta_cutoff", &["0"], NO_SAMPLER),
    refused("guidance_scale", &["1"], NO_SAMPLER),
    refused("samplers", &[], "the order of samplers is fixed"),
    refused("use_beam_search", &["false"], "answers are sampled token by token"),
    refused("length_penalty", &["1"], "it belongs to beam search, and answers are sampled token by token"),
    refused("bad_words", &[], "`logit_bias` can keep tokens out of an answer"),
    refused("allowed_token_ids", &[], NO_GRAMMAR),
    refused("structured_outputs.structural_tag", &[], NO_GRAMMAR),
    refused("grammar_lazy", &["false"], "a grammar holds from the first token on"),
    refused("grammar_triggers", &[], "a grammar holds from the first token on"),
    no_effect("preserved_tokens", "grammars name tokens as `<...>`"),
    refused("skip_special_tokens", &["true"], "control tokens are never part of an answer"),
    refused("truncate_prompt_tokens", &["-1"], "a prompt that does not fit is refused and not cut"),
    refused("prompt_logprobs", &["0", "false"], "`echo` with `logprobs` of /v1/completions reports them"),
    refused("return_tokens_as_token_ids", &["false"], "tokens are reported as text"),
    left_out("return_tokens", &["false"], "/tokenize makes tokens of text"),
    left_out("return_token_ids", &["false"], "/tokenize makes tokens of text"),
    left_out("n_probs", &["0"], "`logprobs` reports them"),
    left_out("n_keep", &["0"], "no tokens are dropped from a full context"),
    no_effect("spaces_between_special_tokens", "control tokens are never part of an answer"),
    no_effect("cache_prompt", "prefixes are always kept as long as there is room"),
    no_effect("user", "nobody is told about users"),
    no_effect("safety_identifier", "nobody is told about users"),
    no_effect("prompt_cache_key", "prefixes are found by their content"),
    no_effect("prompt_cache_retention", "prefixes stay as long as there is room"),
    no_effect("prompt_cache_options", "prefixes are found by their content"),
    left_out("service_tier", &["\"auto\"", "\"default\""], "there is one tier, `default`"),
];

impl SamplingParams {
    /// Our own options.
    ///
    /// # Errors
    /// The name of a field that cannot be honoured.
    pub fn into_options(self) -> Result<Options, ApiError> {
        // Without tokens to look at, there is nothing to punish.
        let punishes = self.repeat_last_n != Some(0);
        let penalty = |penalty: Option<f32>, none: f32| if punishes { penalty } else { Some(none) };
        Ok(Options {
            temperature: self.temperature,
            top_k: self.top_k.map(|most| u32::try_from(most.max(0)).unwrap_or(u32::MAX)),
            top_p: self.top_p,
            min_p: self.min_p,
            top_n_sigma: self.top_n_sigma.map(|sigma| sigma.max(0.0)),
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dry: DryOptions {
                multiplier: self.dry_multiplier,
                base: self.dry_base,
                allowed_length: self.dry_allowed_length,
                window: self.dry_penalty_last_n,
                breakers: self.dry_sequence_breakers.map(OneOrMany::into_vec),
                breaking: Arc::default(),
            },
            repetition_penalty: penalty(self.repetition_penalty.or(self.repeat_penalty), 1.0),
            frequency_penalty: penalty(self.frequency_penalty, 0.0),
            presence_penalty: penalty(self.presence_penalty, 0.0),
            penalty_window: Options::window(self.repeat_last_n),
            logit_bias: logit_bias(self.logit_bias)?,
            seed: Options::seed(self.seed),
            stop: Options::stop_strings(self.stop),
            stop_tokens: self.stop_token_ids.unwrap_or_default(),
            include_stop_string: self.include_stop_str_in_output == Some(true),
            ignore_stop_tokens: self.ignore_eos == Some(true),
            min_tokens: self.min_tokens.unwrap_or(0),
            priority: self.priority.unwrap_or(0),
            cache_salt: self.cache_salt.unwrap_or_default(),
            ..Options::default()
        })
    }
}

/// The tokens and what is added to their logits: an object whose keys are tokens, or llama.cpp's pairs, where `false`
/// keeps a token out.
fn logit_bias(bias: Option<Value>) -> Result<Vec<(u32, f32)>, ApiError> {
    let entry = |key: &str, value: &Value| {
        let param = format!("logit_bias.{key}");
        let Ok(token) = key.parse() else {
            return Err(ApiError::invalid(param, format!("`{key}` in `logit_bias` is not a token's number")));
        };
        let bias = match value {
            Value::Bool(false) => Some(-100.0),
            value => value.as_f64(),
        };
        match bias {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((token, bias as f32)),
            _ => {
                let message = format!("the bias of a token is between -100 and 100, not {value}");
                Err(ApiError::invalid(param, message))
            }
        }
    };
    let wrong = || {
        let message = "`logit_bias` is an object, or a list of pairs: [[token, bias], ...]";
        ApiError::invalid("logit_bias", message)
    };
    match bias {
        None => Ok(Vec::new()),
        Some(Value::Object(entries)) => entries.iter().map(|(key, value)| entry(key, value)).collect(),
        Some(Value::Array(pairs)) => pairs
            .iter()
            .map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([token, value]) => entry(&token.to_string(), value),
                _ => Err(wrong()),
            })
            .collect(),
        Some(_) => Err(wrong()),
    }
}
