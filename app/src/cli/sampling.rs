//! Flags of sampling, of the end of an answer, and of its grammar.

use std::str::FromStr;

use clap::Args;
use paguro_model::SamplingOverrides;

use super::choices;

/// Sampling and stopping. The model's recommendations replace flags that are not given.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Divide the logits by T; 0 always selects the most likely token
    #[arg(long, value_name = "T", value_parser = choices::not_negative, allow_negative_numbers = true)]
    pub temperature: Option<f32>,

    /// Keep only the K best tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,

    /// Keep the best tokens that together reach probability P; 1 keeps all
    #[arg(long, value_name = "P", value_parser = choices::share_above_zero, allow_negative_numbers = true)]
    pub top_p: Option<f32>,

    /// Keep the tokens with at least P times the best one's probability; 0 keeps all
    #[arg(long, value_name = "P", value_parser = choices::share, allow_negative_numbers = true)]
    pub min_p: Option<f32>,

    /// Keep the tokens whose logits are at most N standard deviations below the best one's; 0 keeps all
    #[arg(long, value_name = "N", value_parser = choices::not_negative, allow_negative_numbers = true)]
    pub top_n_sigma: Option<f32>,

    /// With probability P, drop all tokens that reach --xtc-threshold except the least probable of them; 0 is off
    #[arg(long, value_name = "P", value_parser = choices::share, allow_negative_numbers = true)]
    pub xtc_probability: Option<f32>,

    /// Minimum probability of tokens that --xtc-probability drops [default: 0.1]
    #[arg(long, value_name = "P", value_parser = choices::share, allow_negative_numbers = true)]
    pub xtc_threshold: Option<f32>,

    /// Penalize tokens that would continue a repetition (DRY), by this much for the shortest one; 0 is off
    #[arg(long, value_name = "F", value_parser = choices::not_negative, allow_negative_numbers = true)]
    pub dry_multiplier: Option<f32>,

    /// Multiply the DRY penalty by this for each further repeated token [default: 1.75]
    #[arg(long, value_name = "F", value_parser = choices::at_least_one, allow_negative_numbers = true)]
    pub dry_base: Option<f32>,

    /// Length in tokens of the shortest repetition that DRY penalizes [default: 2]
    #[arg(long, value_name = "N")]
    pub dry_allowed_length: Option<u32>,

    /// Number of last tokens that DRY searches for repetitions; -1 is all, 0 turns it off [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub dry_penalty_last_n: Option<Limit<u32>>,

    /// Text that ends a repetition, instead of the defaults, which are a line break, `:`, `"` and `*` (repeatable); \n
    /// is a line break, `none` is no text
    #[arg(long, value_name = "TEXT", value_parser = choices::breaker)]
    pub dry_sequence_breaker: Vec<String>,

    /// Divide the logits of repeated tokens; 1 is off
    #[arg(long, value_name = "R", value_parser = choices::above_zero, allow_negative_numbers = true)]
    pub repeat_penalty: Option<f32>,

    /// Subtract this from a token's logit for each occurrence in the answer
    #[arg(long, value_name = "F", value_parser = choices::finite, allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,

    /// Subtract this from the logits of tokens that occur in the answer
    #[arg(long, value_name = "F", value_parser = choices::finite, allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,

    /// Number of last tokens to penalize; -1 is all [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub penalty_window: Option<Limit<u32>>,

    /// Add V to the logit of token ID (repeatable)
    #[arg(long, value_name = "ID=V", value_parser = choices::bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,

    /// Seed of the random numbers; -1 is a random one [default: random, and reported]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<Limit<u64>>,

    /// Maximum tokens of the answer; -1 is no limit [default: until the model ends it, or the context is full]
    #[arg(short = 'n', long, value_name = "N", value_parser = choices::tokens, allow_negative_numbers = true)]
    pub max_tokens: Option<Limit<usize>>,

    /// End the answer before this text (repeatable)
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,

    /// Continue after the model's end of the answer; set --max-tokens, or the context fills up
    #[arg(long)]
    pub ignore_eos: bool,
}

/// Value of a flag that also accepts -1; `None` for -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit<T>(pub Option<T>);

impl<T: FromStr> FromStr for Limit<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "-1" => Ok(Self(None)),
            _ => text.parse().map(|n| Self(Some(n))).map_err(|_| "must be a whole number, or -1".to_owned()),
        }
    }
}

impl SamplingArgs {
    /// Returns the maximum tokens of an answer; `None` for no limit.
    pub fn max_tokens(&self) -> Option<usize> {
        self.max_tokens.and_then(|limit| limit.0)
    }

    /// Returns the sampling values of the flags.
    pub fn overrides(&self) -> SamplingOverrides {
        let breakers = || self.dry_sequence_breaker.iter().filter(|text| *text != "none").cloned().collect();
        SamplingOverrides {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            top_n_sigma: self.top_n_sigma,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_window: self.dry_penalty_last_n.map(|limit| limit.0),
            dry_breakers: (!self.dry_sequence_breaker.is_empty()).then(breakers),
            repetition_penalty: self.repeat_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            penalty_window: self.penalty_window.map(|limit| limit.0),
            logit_bias: Some(self.logit_bias.clone()),
            seed: self.seed(),
        }
    }

    /// Returns the seed; `None` for a random one.
    pub fn seed(&self) -> Option<u64> {
        self.seed.and_then(|seed| seed.0)
    }
}

/// Format of the answer: at most one of these.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Grammar")]
#[group(multiple = false)]
pub struct GrammarArgs {
    /// The answer is JSON that this schema validates: a file, or the schema itself
    #[arg(long, value_name = "FILE | JSON")]
    pub json_schema: Option<String>,

    /// The answer is a text of this grammar, in llama.cpp's GBNF or llguidance's Lark: a file, or the grammar itself
    #[arg(long, value_name = "FILE | GRAMMAR")]
    pub grammar: Option<String>,

    /// The answer is a text that this regular expression matches as a whole
    #[arg(long, value_name = "PATTERN")]
    pub regex: Option<String>,
}
