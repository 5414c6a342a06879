//! Sampling parameters, and the values that they may have.

use super::Dry;

/// Sampling values of one request. The defaults are greedy decoding with nothing else on.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; `0` selects the most probable token (the lowest id of equal ones).
    pub temperature: f32,
    /// Keeps the `top_k` most probable tokens; `0` keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of most probable tokens whose total probability reaches `top_p`; `1` keeps all.
    pub top_p: f32,
    /// Keeps the tokens with at least `min_p` times the highest probability; `0` keeps all.
    pub min_p: f32,
    /// Keeps the tokens whose logits are at most this many standard deviations of all logits below the highest one
    /// (Tang et al.: Top-nσ, arXiv:2411.07641); `0` keeps all.
    pub top_n_sigma: f32,
    /// Probability with which XTC excludes top choices in a draw; `0` disables it. It drops all tokens of at least
    /// [`xtc_threshold`](Self::xtc_threshold) except the least probable of them, if there are several
    /// (<https://github.com/oobabooga/text-generation-webui/pull/6335>).
    pub xtc_probability: f32,
    /// The probability, among the tokens that are left, from which on a token is a top choice of XTC.
    pub xtc_threshold: f32,
    /// Penalty of tokens that continue a repetition.
    pub dry: Dry,
    /// Divides positive and multiplies negative logits of tokens in the window (CTRL, arXiv:1909.05858); `1` is off.
    pub repetition_penalty: f32,
    /// Subtracted once for each time that the token was generated within the window. Occurrences in the prompt do not
    /// count, as in OpenAI's API and in vLLM.
    pub frequency_penalty: f32,
    /// Subtracted if the token was generated within the window.
    pub presence_penalty: f32,
    /// Number of last tokens of [`SampleRequest::history`](crate::SampleRequest::history) that the penalties consider; `None` for all, `Some(0)`
    /// disables them.
    pub penalty_window: Option<u32>,
    /// Added to the logits of given tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers; equal seeds give equal texts.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            top_n_sigma: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            dry: Dry::default(),
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: None,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Checks that every value has a meaning, for a model of `vocab` tokens.
    ///
    /// # Errors
    /// The first that has none, by name.
    pub fn check(&self, vocab: usize) -> Result<(), InvalidParam> {
        let check = |field, value: f32, fine: bool, rule| match fine {
            true => Ok(()),
            false => Err(InvalidParam { field, value: value.to_string(), rule }),
        };
        let Self {
            temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, ..
        } = *self;
        check(
            "temperature",
            temperature,
            temperature >= 0.0 && temperature.is_finite(),
            "finite, 0 or more",
        )?;
        check("top_p", top_p, (0.0..=1.0).contains(&top_p), "between 0 and 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "between 0 and 1")?;
        let fine = repetition_penalty > 0.0 && repetition_penalty.is_finite();
        check("repetition_penalty", repetition_penalty, fine, "finite and more than 0")?;
        check("frequency_penalty", frequency_penalty, frequency_penalty.is_finite(), "finite")?;
        check("presence_penalty", presence_penalty, presence_penalty.is_finite(), "finite")?;
        let Self { top_n_sigma, xtc_probability, xtc_threshold, ref dry, .. } = *self;
        let fine = top_n_sigma >= 0.0 && top_n_sigma.is_finite();
        check("top_n_sigma", top_n_sigma, fine, "finite, 0 or more")?;
        check("xtc_probability", xtc_probability, (0.0..=1.0).contains(&xtc_probability), "between 0 and 1")?;
        check("xtc_threshold", xtc_threshold, (0.0..=1.0).contains(&xtc_threshold), "between 0 and 1")?;
        let fine = dry.multiplier >= 0.0 && dry.multiplier.is_finite();
        check("dry_multiplier", dry.multiplier, fine, "finite, 0 or more")?;
        check("dry_base", dry.base, dry.base >= 1.0 && dry.base.is_finite(), "finite, 1 or more")?;
        for &(token, bias) in &self.logit_bias {
            check("logit_bias", bias, !bias.is_nan(), "a number")?;
            if token as usize >= vocab {
                let rule = "of tokens in the vocabulary";
                return Err(InvalidParam { field: "logit_bias", value: format!("token {token}"), rule });
            }
        }
        Ok(())
    }

    /// Returns true if a penalty is active.
    pub fn penalizes(&self) -> bool {
        self.penalizes_tokens() || self.dry.is_on()
    }

    pub(super) fn penalizes_tokens(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Returns true if the parameters use rules that devices do not implement, so that the host samples.
    pub fn needs_host(&self) -> bool {
        self.temperature > 0.0 && (self.top_n_sigma > 0.0 || self.xtc_probability > 0.0)
    }
}

/// A sampling value without a meaning.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {rule}, not {value}")]
pub struct InvalidParam {
    /// Name of the field in [`SamplingParams`].
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// The condition that it violates.
    pub rule: &'static str,
}
