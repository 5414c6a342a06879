//! `options`: how to sample, and what Ollama would load a model with.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::Options,
    openai::types::{OneOrMany, refuse},
};

/// How to sample and when to end. What concerns loading a model is set where the server is started.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = OllamaOptions)]
pub struct OptionsParam {
    /// The same seed gives the same answer.
    seed: Option<i64>,
    /// Most tokens of the answer; below 0 there is no bound but the context.
    num_predict: Option<i64>,
    /// Divides the logits; 0 takes the best token. If absent, what the model recommends, or 0.8.
    temperature: Option<f32>,
    /// Keeps this many best tokens; 0 keeps all.
    top_k: Option<u32>,
    /// Keeps the smallest set of best tokens whose probability reaches this.
    top_p: Option<f32>,
    /// Keeps tokens with at least this fraction of the best one's probability.
    min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens that occur.
    repeat_penalty: Option<f32>,
    /// In how many of the last tokens they are looked for; 0 switches the penalties off, -1 looks at all.
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
    /// Has no effect: no tokens are dropped from a full context.
    #[expect(dead_code, reason = "accepted by name, without effect")]
    num_keep: Option<i64>,
    /// Must be 1 or absent.
    typical_p: Option<f32>,
    /// Must be 1 or absent.
    tfs_z: Option<f32>,
    /// Must be 0 or absent.
    mirostat: Option<i64>,
    /// Has no effect without `mirostat`.
    #[expect(dead_code, reason = "accepted by name, without effect")]
    mirostat_tau: Option<f32>,
    /// Has no effect without `mirostat`.
    #[expect(dead_code, reason = "accepted by name, without effect")]
    mirostat_eta: Option<f32>,
    /// Must be true or absent.
    penalize_newline: Option<bool>,
    /// Not supported: the server decides.
    num_batch: Option<i64>,
    /// Not supported: `paguro serve --device` says where models run.
    num_gpu: Option<i64>,
    /// Not supported: `paguro serve --device` says where models run.
    main_gpu: Option<i64>,
    /// Not supported: `paguro serve --threads` says how many.
    num_thread: Option<i64>,
    /// Must be false or absent.
    low_vram: Option<bool>,
    /// Must be true or absent.
    f16_kv: Option<bool>,
    /// Must be false or absent.
    logits_all: Option<bool>,
    /// Must be false or absent.
    vocab_only: Option<bool>,
    /// Must be true or absent.
    use_mmap: Option<bool>,
    /// Must be false or absent.
    use_mlock: Option<bool>,
    /// Must be false or absent.
    embedding_only: Option<bool>,
    /// Must be false or absent.
    numa: Option<bool>,
}

impl OptionsParam {
    /// Our own options.
    ///
    /// # Errors
    /// What cannot be honoured, by name.
    pub fn into_options(self) -> Result<Options, ApiError> {
        self.refuse_unsupported()?;
        // Without tokens to look at, there is nothing to punish.
        let punishes = self.repeat_last_n != Some(0);
        let penalty_window = match self.repeat_last_n {
            None | Some(..=0) => None,
            Some(tokens) => Some(u32::try_from(tokens).unwrap_or(u32::MAX)),
        };
        if self.repeat_last_n.is_some_and(|tokens| tokens < -1) {
            return Err(ApiError::invalid(
                "options.repeat_last_n",
                "`options.repeat_last_n` must be at least -1",
            ));
        }
        let stop = self.stop.map(OneOrMany::into_vec).unwrap_or_default();
        if stop.iter().any(String::is_empty) {
            return Err(ApiError::invalid("options.stop", "`options.stop` has an empty text"));
        }
        Ok(Options {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: if punishes { self.repeat_penalty } else { Some(1.0) },
            frequency_penalty: if punishes { self.frequency_penalty } else { Some(0.0) },
            presence_penalty: if punishes { self.presence_penalty } else { Some(0.0) },
            penalty_window,
            seed: self.seed.map(i64::cast_unsigned),
            stop,
            max_tokens: self.num_predict.and_then(|tokens| usize::try_from(tokens).ok()),
            context: self.num_ctx.filter(|&tokens| tokens > 0),
            ..Options::default()
        })
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let number = |value: Option<f32>, neutral: f32, name: &str| {
            let message = format_args!("this way of sampling does not exist here; {neutral} leaves it off");
            refuse(&value.filter(|value| *value != neutral), &format!("options.{name}"), message)
        };
        number(self.typical_p, 1.0, "typical_p")?;
        number(self.tfs_z, 1.0, "tfs_z")?;
        number(self.mirostat.map(|mode| mode as f32), 0.0, "mirostat")?;
        let flag = |value: Option<bool>, is: bool, name: &str| {
            refuse(
                &value.filter(|value| *value != is),
                &format!("options.{name}"),
                format_args!("it is always {is} here"),
            )
        };
        flag(self.penalize_newline, true, "penalize_newline")?;
        flag(self.low_vram, false, "low_vram")?;
        flag(self.f16_kv, true, "f16_kv")?;
        flag(self.logits_all, false, "logits_all")?;
        flag(self.vocab_only, false, "vocab_only")?;
        flag(self.use_mmap, true, "use_mmap")?;
        flag(self.use_mlock, false, "use_mlock")?;
        flag(self.embedding_only, false, "embedding_only")?;
        flag(self.numa, false, "numa")?;
        let device = "`paguro serve --device` says where models run";
        refuse(&self.num_gpu, "options.num_gpu", device)?;
        refuse(&self.main_gpu, "options.main_gpu", device)?;
        refuse(&self.num_thread, "options.num_thread", "`paguro serve --threads` says how many")?;
        refuse(&self.num_batch, "options.num_batch", "the server decides how many tokens a step has")
    }
}
