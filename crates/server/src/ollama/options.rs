//! `options`: sampling parameters, and Ollama's parameters of loading.

use paguro_model::SamplingOverrides;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{DraftParams, Options},
    wire::{OneOrMany, Other, left_out, no_effect, refused},
};

/// Sampling parameters and limits. Parameters of loading are settings of the server.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[schema(as = OllamaOptions)]
pub struct OptionsParam {
    /// Seed of the random numbers; random if negative.
    seed: Option<i64>,
    /// Maximum tokens of the answer; negative for no limit besides the context.
    num_predict: Option<i64>,
    /// Divides the logits; 0 selects the most probable token. If absent, the model's recommendation, or 0.8.
    temperature: Option<f32>,
    /// Samples from the `top_k` most probable tokens; 0 and -1 keep all.
    top_k: Option<i64>,
    /// Samples from the smallest set of tokens whose probabilities add up to at least this.
    top_p: Option<f32>,
    /// Samples from tokens with at least this fraction of the highest probability.
    min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of repeated tokens.
    repeat_penalty: Option<f32>,
    /// Number of last tokens that penalties consider, 64 if absent; 0 disables penalties, -1 considers all tokens.
    repeat_last_n: Option<i64>,
    /// Subtracted for each occurrence of a token.
    frequency_penalty: Option<f32>,
    /// Subtracted from the logit of each repeated token.
    presence_penalty: Option<f32>,
    /// Stop strings.
    stop: Option<OneOrMany<String>>,
    /// Maximum tokens of prompt and answer. An unused model is reloaded for more, if it was trained for them and memory
    /// allows. Otherwise the loaded context applies.
    num_ctx: Option<usize>,
    /// Most drafted tokens of a step; 0 for no drafts.
    draft_num_predict: Option<i64>,
}

const SERVER: &str = "models are loaded with the server's settings";
const DEVICE: &str = "`paguro serve --device` selects the device";
const SAMPLER: &str = "the samplers are `top_k`, `top_p` and `min_p`";

/// Known options besides those of [`OptionsParam`]. Options of loading do not change answers.
pub const OTHERS: &[Other] = &[
    refused("options.typical_p", &["1"], SAMPLER),
    refused("options.tfs_z", &["1"], SAMPLER),
    refused("options.mirostat", &["0"], SAMPLER),
    no_effect("options.mirostat_tau", "there is no Mirostat"),
    no_effect("options.mirostat_eta", "there is no Mirostat"),
    refused("options.penalize_newline", &["true"], "penalties apply to all tokens"),
    no_effect("options.num_keep", "no tokens are dropped from a full context"),
    left_out("options.num_gpu", &[], DEVICE),
    left_out("options.main_gpu", &[], DEVICE),
    left_out("options.num_thread", &[], "`paguro serve --threads` sets the number"),
    left_out("options.num_batch", &[], "the server decides how many tokens a step has"),
    left_out("options.num_gqa", &[], "the model's file defines it"),
    left_out("options.rope_frequency_base", &[], "the model's file defines it"),
    left_out("options.rope_frequency_scale", &[], "the model's file defines it"),
    left_out("options.low_vram", &["false"], SERVER),
    left_out("options.f16_kv", &["true"], SERVER),
    left_out("options.logits_all", &["false"], SERVER),
    left_out("options.vocab_only", &["false"], SERVER),
    left_out("options.use_mmap", &["true"], SERVER),
    left_out("options.use_mlock", &["false"], SERVER),
    left_out("options.embedding_only", &["false"], SERVER),
    left_out("options.numa", &["false"], SERVER),
];

impl OptionsParam {
    /// Converts the options.
    ///
    /// # Errors
    /// A field that is not supported, by name.
    pub fn into_options(self) -> Result<Options, ApiError> {
        let given = [self.repeat_penalty, self.frequency_penalty, self.presence_penalty];
        let is_given = given.iter().any(Option::is_some);
        let last = self.repeat_last_n.or(is_given.then_some(REPEAT_LAST_N));
        let mut sampling = SamplingOverrides {
            temperature: self.temperature,
            top_k: Options::top_k(self.top_k),
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repeat_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            seed: Options::seed(self.seed),
            ..SamplingOverrides::default()
        };
        Options::set_window(&mut sampling, last);
        Ok(Options {
            sampling,
            stop: Options::stop_strings(self.stop),
            max_tokens: self.num_predict.and_then(|tokens| usize::try_from(tokens).ok()).map(Into::into),
            drafts: DraftParams {
                most: self.draft_num_predict.and_then(|most| usize::try_from(most).ok()).map(Into::into),
                ..DraftParams::default()
            },
            context: self.num_ctx.filter(|&tokens| tokens > 0).map(Into::into),
            ..Options::default()
        })
    }
}

/// Default of `repeat_last_n`, as in Ollama.
const REPEAT_LAST_N: i64 = 64;
