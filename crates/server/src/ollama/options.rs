//! `options`: how to sample, and what Ollama would load a model with.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::Options,
    wire::{OneOrMany, Other, left_out, no_effect, refused},
};

/// How to sample and when to end. What concerns loading a model is set where the server is started.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[schema(as = OllamaOptions)]
pub struct OptionsParam {
    /// The same seed gives the same answer. Below 0 it is random.
    seed: Option<i64>,
    /// Most tokens of the answer; below 0 there is no bound but the context.
    num_predict: Option<i64>,
    /// Divides the logits; 0 takes the best token. If absent, what the model recommends, or 0.8.
    temperature: Option<f32>,
    /// Keeps this many best tokens; 0 and -1 keep all.
    top_k: Option<i64>,
    /// Keeps the smallest set of best tokens whose probability reaches this.
    top_p: Option<f32>,
    /// Keeps tokens with at least this fraction of the best one's probability.
    min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens that occur.
    repeat_penalty: Option<f32>,
    /// In how many of the last tokens they are looked for, 64 if absent; 0 switches the penalties off, -1 looks at all.
    repeat_last_n: Option<i64>,
    /// Subtracted for each occurrence of a token.
    frequency_penalty: Option<f32>,
    /// Subtracted if a token occurs.
    presence_penalty: Option<f32>,
    /// Texts that end the answer.
    stop: Option<OneOrMany<String>>,
    /// Most tokens of prompt and answer. A model that nobody uses is loaded again for more, where it was trained for them and
    /// memory allows; otherwise what it is loaded for bounds them.
    num_ctx: Option<usize>,
}

const SERVER: &str = "the server's settings say how models are loaded";
const DEVICE: &str = "`paguro serve --device` says where models run";
const SAMPLER: &str = "this way of sampling does not exist here";

/// Known options beside those of [`OptionsParam`]: those about loading a model change no answer.
pub const OTHERS: &[Other] = &[
    refused("options.typical_p", &["1"], SAMPLER),
    refused("options.tfs_z", &["1"], SAMPLER),
    refused("options.mirostat", &["0"], SAMPLER),
    no_effect("options.mirostat_tau", "there is no Mirostat"),
    no_effect("options.mirostat_eta", "there is no Mirostat"),
    refused("options.penalize_newline", &["true"], "penalties know no exceptions"),
    no_effect("options.num_keep", "no tokens are dropped from a full context"),
    left_out("options.num_gpu", &[], DEVICE),
    left_out("options.main_gpu", &[], DEVICE),
    left_out("options.num_thread", &[], "`paguro serve --threads` says how many"),
    left_out("options.num_batch", &[], "the server decides how many tokens a step has"),
    left_out("options.num_gqa", &[], "the model's file says it"),
    left_out("options.rope_frequency_base", &[], "the model's file says it"),
    left_out("options.rope_frequency_scale", &[], "the model's file says it"),
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
    /// Our own options.
    ///
    /// # Errors
    /// What cannot be honoured, by name.
    pub fn into_options(self) -> Result<Options, ApiError> {
        // Without tokens to look at, there is nothing to punish.
        let punishes = self.repeat_last_n != Some(0);
        let penalty = |penalty: Option<f32>, none: f32| if punishes { penalty } else { Some(none) };
        let given = [self.repeat_penalty, self.frequency_penalty, self.presence_penalty];
        let is_given = given.iter().any(Option::is_some);
        let last = self.repeat_last_n.or(is_given.then_some(REPEAT_LAST_N));
        Ok(Options {
            temperature: self.temperature,
            top_k: self.top_k.map(|most| u32::try_from(most.max(0)).unwrap_or(u32::MAX)),
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: penalty(self.repeat_penalty, 1.0),
            frequency_penalty: penalty(self.frequency_penalty, 0.0),
            presence_penalty: penalty(self.presence_penalty, 0.0),
            penalty_window: Options::window(last),
            seed: Options::seed(self.seed),
            stop: Options::stop_strings(self.stop),
            max_tokens: self.num_predict.and_then(|tokens| usize::try_from(tokens).ok()).map(Into::into),
            context: self.num_ctx.filter(|&tokens| tokens > 0).map(Into::into),
            ..Options::default()
        })
    }
}

/// In how many of the last tokens Ollama's penalties look where a request does not say.
const REPEAT_LAST_N: i64 = 64;
