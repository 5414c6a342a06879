//! Sampling values: of the flags, else the model's recommendations, else our defaults.

use std::hash::{BuildHasher, RandomState};

use paguro_backend::SamplingParams;
use paguro_engine::Request;
use paguro_model::{GenerationDefaults, Model};

use crate::cli::SamplingArgs;

/// Resolves all sampling values.
///
/// A random seed has 32 bits, so that JSON numbers can represent it.
pub fn decide(args: &SamplingArgs, model: &GenerationDefaults) -> SamplingParams {
    let mut params = model.sampling();
    params.seed = RandomState::new().hash_one(0) & u64::from(u32::MAX);
    args.overrides().apply(&mut params);
    params
}

/// Creates a request with these values and the flags for its end.
pub fn request(prompt: Vec<u32>, args: &SamplingArgs, model: &Model) -> Request {
    let mut sampling = decide(args, &model.defaults);
    args.overrides().find_breakers(&mut sampling, &model.tokenizer);
    Request {
        prompt,
        max_tokens: args.max_tokens(),
        stop_strings: args.stop.clone(),
        ignore_stop_tokens: args.ignore_eos,
        sampling,
        ..Request::default()
    }
}

/// Returns the effective values, named like their flags, for `/set` and `/show`.
pub fn values(args: &SamplingArgs, model: &GenerationDefaults) -> Vec<(String, String)> {
    let params = decide(args, model);
    let number = |n: Option<u64>| n.map_or_else(|| "-1".to_owned(), |n| n.to_string());
    let list = |items: Vec<String>| if items.is_empty() { "(none)".to_owned() } else { items.join(", ") };
    let bias = params.logit_bias.iter().map(|(id, value)| format!("{id}={value}")).collect();
    let stop = args.stop.iter().map(|text| format!("{text:?}")).collect();
    let breakers = args.overrides().breaker_texts().iter().map(|text| format!("{text:?}")).collect();
    let values = [
        ("temperature", params.temperature.to_string()),
        ("top-k", params.top_k.to_string()),
        ("top-p", params.top_p.to_string()),
        ("min-p", params.min_p.to_string()),
        ("top-n-sigma", params.top_n_sigma.to_string()),
        ("xtc-probability", params.xtc_probability.to_string()),
        ("xtc-threshold", params.xtc_threshold.to_string()),
        ("dry-multiplier", params.dry.multiplier.to_string()),
        ("dry-base", params.dry.base.to_string()),
        ("dry-allowed-length", params.dry.allowed_length.to_string()),
        ("dry-penalty-last-n", number(params.dry.window.map(u64::from))),
        ("dry-sequence-breaker", list(breakers)),
        ("repeat-penalty", params.repetition_penalty.to_string()),
        ("frequency-penalty", params.frequency_penalty.to_string()),
        ("presence-penalty", params.presence_penalty.to_string()),
        ("penalty-window", number(params.penalty_window.map(u64::from))),
        ("logit-bias", list(bias)),
        ("seed", args.seed().map_or_else(|| "-1 (random)".to_owned(), |seed| seed.to_string())),
        ("max-tokens", number(args.max_tokens().map(|n| n as u64))),
        ("stop", list(stop)),
        ("ignore-eos", args.ignore_eos.to_string()),
    ];
    values.map(|(name, value)| (name.to_owned(), value)).into()
}

#[cfg(test)]
mod tests {
    use paguro_model::SamplingOverrides;

    use super::*;
    use crate::cli::Limit;

    #[test]
    fn flags_win_then_the_model_then_ours() {
        let nothing = SamplingArgs::default();
        let ours = decide(&nothing, &GenerationDefaults::default());
        assert_eq!((ours.temperature, ours.top_k, ours.top_p, ours.min_p), (0.8, 40, 0.95, 0.05));

        let recommended =
            SamplingOverrides { temperature: Some(0.6), top_p: Some(0.9), ..SamplingOverrides::default() };
        let model = GenerationDefaults { recommended, max_tokens: None };
        let recommended = decide(&nothing, &model);
        assert_eq!(
            (recommended.temperature, recommended.top_k, recommended.top_p, recommended.min_p),
            (0.6, 0, 0.9, 0.0)
        );

        let flags = SamplingArgs {
            temperature: Some(0.0),
            top_k: Some(7),
            seed: Some(Limit(Some(5))),
            ..Default::default()
        };
        let decided = decide(&flags, &model);
        assert_eq!((decided.temperature, decided.top_k, decided.top_p, decided.seed), (0.0, 7, 0.9, 5));
    }

    /// `/set` accepts the names of [`values`]: each must be a flag, and all flags must be present.
    #[test]
    fn the_values_are_the_flags() {
        #[derive(clap::Parser)]
        struct Flags {
            #[command(flatten)]
            sampling: SamplingArgs,
        }
        let names: Vec<_> = values(&SamplingArgs::default(), &GenerationDefaults::default())
            .into_iter()
            .map(|v| v.0)
            .collect();
        let command = <Flags as clap::CommandFactory>::command();
        let flags =
            command.get_arguments().filter_map(|argument| argument.get_long()).filter(|l| *l != "help");
        assert_eq!(flags.collect::<Vec<_>>(), names);
    }

    #[test]
    fn seeds_differ_and_stay_small() {
        let seed = || decide(&SamplingArgs::default(), &GenerationDefaults::default()).seed;
        let (a, b) = (seed(), seed());
        assert_ne!(a, b);
        assert!(a <= u64::from(u32::MAX));
    }
}
