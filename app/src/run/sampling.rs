//! What is sampled with: the flags, else what the model recommends, else our own defaults.

use std::hash::{BuildHasher, RandomState};

use paguro_backend::SamplingParams;
use paguro_engine::Request;
use paguro_model::GenerationDefaults;

use crate::cli::SamplingArgs;

/// Every sampling value, decided: the flags, else what holds for this model.
///
/// A random seed has 32 bits, so that it survives being a number in anybody's JSON.
pub fn decide(args: &SamplingArgs, model: &GenerationDefaults) -> SamplingParams {
    let default = model.sampling();
    SamplingParams {
        temperature: args.temperature.unwrap_or(default.temperature),
        top_k: args.top_k.unwrap_or(default.top_k),
        top_p: args.top_p.unwrap_or(default.top_p),
        min_p: args.min_p.unwrap_or(default.min_p),
        repetition_penalty: args.repeat_penalty.unwrap_or(default.repetition_penalty),
        frequency_penalty: args.frequency_penalty.unwrap_or(default.frequency_penalty),
        presence_penalty: args.presence_penalty.unwrap_or(default.presence_penalty),
        penalty_window: args.penalty_window.or(default.penalty_window),
        logit_bias: args.logit_bias.clone(),
        seed: args.seed.unwrap_or_else(|| RandomState::new().hash_one(0) & u64::from(u32::MAX)),
    }
}

/// A request with these values and the flags about where to end.
pub fn request(prompt: Vec<u32>, args: &SamplingArgs, model: &GenerationDefaults) -> Request {
    Request {
        prompt,
        max_tokens: args.max_tokens,
        stop_strings: args.stop.clone(),
        ignore_stop_tokens: args.ignore_eos,
        sampling: decide(args, model),
        ..Request::default()
    }
}

/// The values as flags, for `/show`.
pub fn describe(params: &SamplingParams) -> String {
    let SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        frequency_penalty,
        presence_penalty,
        ..
    } = params;
    format!(
        "temperature {temperature}, top-k {top_k}, top-p {top_p}, min-p {min_p}, repeat-penalty {repetition_penalty}, \
         frequency-penalty {frequency_penalty}, presence-penalty {presence_penalty}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_then_the_model_then_ours() {
        let nothing = SamplingArgs::default();
        let ours = decide(&nothing, &GenerationDefaults::default());
        assert_eq!((ours.temperature, ours.top_k, ours.top_p, ours.min_p), (0.8, 40, 0.95, 0.05));

        let model = GenerationDefaults { temperature: Some(0.6), top_p: Some(0.9), ..Default::default() };
        let recommended = decide(&nothing, &model);
        assert_eq!(
            (recommended.temperature, recommended.top_k, recommended.top_p, recommended.min_p),
            (0.6, 0, 0.9, 0.0)
        );

        let flags =
            SamplingArgs { temperature: Some(0.0), top_k: Some(7), seed: Some(5), ..Default::default() };
        let decided = decide(&flags, &model);
        assert_eq!((decided.temperature, decided.top_k, decided.top_p, decided.seed), (0.0, 7, 0.9, 5));
    }

    #[test]
    fn seeds_differ_and_stay_small() {
        let seed = || decide(&SamplingArgs::default(), &GenerationDefaults::default()).seed;
        let (a, b) = (seed(), seed());
        assert_ne!(a, b);
        assert!(a <= u64::from(u32::MAX));
    }
}
