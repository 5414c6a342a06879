//! Sampling parameters and limits of all endpoints of OpenAI's API, and known fields of other servers that are not
//! supported.

use paguro_model::SamplingOverrides;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{DraftParams, Options},
    wire::{OneOrMany, Other, left_out, no_effect, refused},
};

/// Sampling parameters and stop conditions.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
pub struct SamplingParams {
    /// Divides the logits; 0 selects the most probable token. If absent, the model's recommendation, or 0.8.
    pub temperature: Option<f32>,
    /// Samples from the smallest set of tokens whose probabilities add up to at least this.
    pub top_p: Option<f32>,
    /// Samples from the `top_k` most probable tokens; 0 and -1 keep all. (Extension.)
    top_k: Option<i64>,
    /// Samples from tokens with at least this fraction of the highest probability. (Extension.)
    min_p: Option<f32>,
    /// Samples from tokens whose logits are at most this many standard deviations below the best one; 0 and -1 keep
    /// all. (From llama.cpp.)
    top_n_sigma: Option<f32>,
    /// Probability with which XTC drops all tokens of at least `xtc_threshold` except the least probable of them. (From
    /// llama.cpp.)
    xtc_probability: Option<f32>,
    /// Minimum probability of tokens that XTC may drop, 0.1 if absent. (From llama.cpp.)
    xtc_threshold: Option<f32>,
    /// DRY's penalty of tokens that continue a repetition; 0 disables DRY. (From llama.cpp.)
    dry_multiplier: Option<f32>,
    /// Factor of that penalty for each further token of the repetition, 1.75 if absent.
    dry_base: Option<f32>,
    /// Length of the shortest repetition that is penalized, 2 if absent.
    dry_allowed_length: Option<u32>,
    /// Number of last tokens that DRY considers; 0 disables DRY, -1 considers all tokens.
    dry_penalty_last_n: Option<i64>,
    /// Texts that end a repetition; a line break, `:`, `"` and `*` if absent.
    dry_sequence_breakers: Option<OneOrMany<String>>,
    /// Subtracted for each occurrence of a token in the answer.
    pub frequency_penalty: Option<f32>,
    /// Subtracted if a token occurs in the answer.
    pub presence_penalty: Option<f32>,
    /// Divides positive and multiplies negative logits of repeated tokens. (Extension.)
    repetition_penalty: Option<f32>,
    /// The name of `repetition_penalty` in llama.cpp.
    repeat_penalty: Option<f32>,
    /// Number of last tokens that penalties consider; 0 disables penalties, -1 considers all tokens. (From llama.cpp.)
    repeat_last_n: Option<i64>,
    /// Added to the logits of tokens: an object of tokens and numbers from -100 to 100, or a list of pairs.
    logit_bias: Option<Value>,
    /// Seed of the random numbers; random if negative. Answer `i` of several has the seed `seed + i`.
    seed: Option<i64>,
    /// Stop strings.
    stop: Option<OneOrMany<String>>,
    /// Tokens that end the answer. (Extension.)
    stop_token_ids: Option<Vec<u32>>,
    /// True if the stop string is part of the answer. (From vLLM.)
    include_stop_str_in_output: Option<bool>,
    /// Continues after the model's own stop tokens. (Extension.)
    ignore_eos: Option<bool>,
    /// Minimum number of tokens before the answer can end. (From vLLM.)
    min_tokens: Option<usize>,
    /// Priority; requests with higher values run first. (Extension.)
    priority: Option<i32>,
    /// Prefixes are shared only among requests with the same salt. (From vLLM.)
    cache_salt: Option<String>,
    /// Adapters with their scales, by the ids of `/lora-adapters`. (From llama.cpp.)
    lora: Option<Vec<LoraScale>>,
    /// `off` or false for no drafts of the answer; they change its speed only. (Extension.)
    speculate: Option<Speculate>,
    /// Most drafted tokens of a step; 0 for no drafts, -1 for no limit. (From llama.cpp.)
    #[serde(rename = "speculative.n_max")]
    speculative_n_max: Option<i64>,
    /// Least drafted tokens of a step; shorter drafts are not checked. (From llama.cpp.)
    #[serde(rename = "speculative.n_min")]
    speculative_n_min: Option<i64>,
    /// Least estimated chance of a drafted token to be accepted. (From llama.cpp.)
    #[serde(rename = "speculative.p_min")]
    speculative_p_min: Option<f32>,
}

/// Scale of an adapter.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
pub struct LoraScale {
    /// Its id, as `/lora-adapters` lists it.
    pub id: usize,
    /// Multiplies its changes; 0 is none.
    pub scale: f32,
}

/// Choice of drafts.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Speculate {
    /// True for `auto`, false for `off`.
    Flag(bool),
    /// A mode by its name.
    Mode(SpeculateMode),
}

/// Mode of drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SpeculateMode {
    /// Answers are drafted where that makes them faster.
    Auto,
    /// No drafts.
    Off,
}

impl From<Speculate> for bool {
    fn from(choice: Speculate) -> Self {
        match choice {
            Speculate::Flag(flag) => flag,
            Speculate::Mode(mode) => mode == SpeculateMode::Auto,
        }
    }
}

const NO_SAMPLER: &str = "the samplers are `top_k`, `top_p`, `min_p`, `top_n_sigma`, XTC and DRY";
const NO_DRAFTER: &str = "answers are drafted from the request's own texts, in lengths that pay";
const NO_GRAMMAR: &str = "use `response_format`";

/// Known fields besides those of [`SamplingParams`].
pub const OTHERS: &[Other] = &[
    left_out("speculative.type", &[], NO_DRAFTER),
    left_out("speculative.types", &[], NO_DRAFTER),
    left_out("speculative.p_split", &[], NO_DRAFTER),
    left_out("speculative.ngram_size_n", &[], NO_DRAFTER),
    left_out("speculative.ngram_size_m", &[], NO_DRAFTER),
    left_out("speculative.ngram_m_hits", &[], NO_DRAFTER),
    left_out("speculative.ngram_min_hits", &[], NO_DRAFTER),
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
    left_out("return_tokens", &["false"], "use /tokenize"),
    left_out("return_token_ids", &["false"], "use /tokenize"),
    left_out("n_probs", &["0"], "`logprobs` reports them"),
    left_out("n_keep", &["0"], "no tokens are dropped from a full context"),
    no_effect("spaces_between_special_tokens", "control tokens are never part of an answer"),
    no_effect("cache_prompt", "prefixes are always cached while memory allows"),
    no_effect("user", "users are not reported"),
    no_effect("safety_identifier", "users are not reported"),
    no_effect("prompt_cache_key", "prefixes are found by their content"),
    no_effect("prompt_cache_retention", "prefixes are cached while memory allows"),
    no_effect("prompt_cache_options", "prefixes are found by their content"),
    no_effect("no_stop_trim", "`include_stop_str_in_output` decides"),
    left_out("separate_reasoning", &["true"], "reasoning is always separate"),
    no_effect("stream_reasoning", "reasoning is streamed whenever the answer is"),
    refused("return_hidden_states", &["false"], "states of the model are not reported"),
    no_effect("rid", "the header `X-Request-Id` names requests"),
    no_effect("request_id", "the header `X-Request-Id` names requests"),
    no_effect("session_params", "a session is found by its prefix"),
    no_effect("session_id", "a session is found by its prefix"),
    left_out("kv_transfer_params", &[], "servers do not exchange pages"),
    left_out("ec_transfer_params", &[], "servers do not exchange pages"),
    no_effect("bootstrap_host", "servers do not exchange pages"),
    no_effect("bootstrap_port", "servers do not exchange pages"),
    no_effect("bootstrap_room", "servers do not exchange pages"),
    no_effect("data_parallel_rank", "a server is one replica"),
    refused("lora_path", &[], "`model` and `lora` name adapters"),
    left_out("service_tier", &["\"auto\"", "\"default\""], "there is one tier, `default`"),
];

impl SamplingParams {
    /// Converts the options.
    ///
    /// # Errors
    /// A field that is not supported, by name.
    pub fn into_options(self) -> Result<Options, ApiError> {
        let count = |count: Option<i64>| count.and_then(|count| usize::try_from(count).ok()).map(Into::into);
        let mut sampling = SamplingOverrides {
            temperature: self.temperature,
            top_k: Options::top_k(self.top_k),
            top_p: self.top_p,
            min_p: self.min_p,
            top_n_sigma: self.top_n_sigma.map(|sigma| sigma.max(0.0)),
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_window: self.dry_penalty_last_n.map(|last| u32::try_from(last).ok()),
            dry_breakers: self.dry_sequence_breakers.map(OneOrMany::into_vec),
            repetition_penalty: self.repetition_penalty.or(self.repeat_penalty),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            penalty_window: None,
            logit_bias: self.logit_bias.map(logit_bias).transpose()?,
            seed: Options::seed(self.seed),
        };
        Options::set_window(&mut sampling, self.repeat_last_n);
        Ok(Options {
            sampling,
            stop: Options::stop_strings(self.stop),
            stop_tokens: self.stop_token_ids.unwrap_or_default(),
            include_stop_string: self.include_stop_str_in_output == Some(true),
            ignore_stop_tokens: self.ignore_eos == Some(true),
            min_tokens: self.min_tokens.unwrap_or(0),
            priority: self.priority.unwrap_or(0),
            cache_salt: self.cache_salt.unwrap_or_default(),
            lora: self.lora.map(|list| list.iter().map(|it| (it.id, it.scale)).collect()),
            drafts: DraftParams {
                enabled: self.speculate.map(bool::from),
                most: count(self.speculative_n_max),
                least: count(self.speculative_n_min),
                least_chance: self.speculative_p_min,
                ..DraftParams::default()
            },
            ..Options::default()
        })
    }
}

/// Parses the logit biases: an object whose keys are tokens, or llama.cpp's pairs, where `false` excludes a token.
fn logit_bias(bias: Value) -> Result<Vec<(u32, f32)>, ApiError> {
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
        Value::Object(entries) => entries.iter().map(|(key, value)| entry(key, value)).collect(),
        Value::Array(pairs) => pairs
            .iter()
            .map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([token, value]) => entry(&token.to_string(), value),
                _ => Err(wrong()),
            })
            .collect(),
        _ => Err(wrong()),
    }
}
