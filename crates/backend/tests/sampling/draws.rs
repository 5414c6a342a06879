//! Draws: their distribution, their random numbers, and the second implementation, which is slow and obvious.

use expect_test::expect;
use paguro_backend::{
    SampleRequest, Sampled, SamplingParams, TokenMask,
    sampling::{Dry, Scratch, sample, uniform},
};
use proptest::prelude::*;

use super::{INF, greedy, request, token};

/// Pearson's statistic of observed counts against probabilities.
fn chi_square(counts: &[u32], probabilities: &[f64]) -> f64 {
    let total: f64 = counts.iter().map(|&count| f64::from(count)).sum();
    counts.iter().zip(probabilities).map(|(&n, p)| (f64::from(n) - total * p).powi(2) / (total * p)).sum()
}

/// The 99.99 % quantile of chi-square with this many degrees of freedom (Wilson and Hilferty's approximation).
fn critical(degrees: usize) -> f64 {
    let k = degrees as f64;
    k * (1.0 - 2.0 / (9.0 * k) + 3.719 * (2.0 / (9.0 * k)).sqrt()).powi(3)
}

#[test]
fn draws_follow_the_distribution() {
    let probabilities = [0.02, 0.3, 0.08, 0.25, 0.05, 0.3];
    let logits: Vec<f32> = probabilities.iter().map(|p: &f64| p.ln() as f32).collect();
    let draws = 40_000;
    let count = |params: &SamplingParams, by_seed: bool| {
        let mut scratch = Scratch::default();
        let mut counts = [0u32; 6];
        for i in 0..draws {
            let params = SamplingParams { seed: if by_seed { i } else { 99 }, ..params.clone() };
            let request = SampleRequest { draw: if by_seed { 3 } else { i }, ..request(&params) };
            counts[sample(&logits, &request, &mut scratch).token as usize] += 1;
        }
        counts
    };
    let softmax = |temperature: f64| {
        let weights = probabilities.map(|p| p.powf(1.0 / temperature));
        let total: f64 = weights.iter().sum();
        weights.map(|w| w / total)
    };
    for by_seed in [false, true] {
        for temperature in [0.7, 1.0, 1.5] {
            let params = SamplingParams { temperature: temperature as f32, ..greedy() };
            let counts = count(&params, by_seed);
            let fit = chi_square(&counts, &softmax(temperature));
            assert!(fit < critical(5), "temperature {temperature}, by seed {by_seed}: {fit}, {counts:?}");
            // And the test can fail: a temperature that is 10 % off does not pass.
            let misfit = chi_square(&counts, &softmax(temperature * 1.1));
            assert!(misfit > critical(5), "a wrong distribution passes: {misfit}");
        }
        let params = SamplingParams { temperature: 1.0, top_k: 3, ..greedy() };
        let counts = count(&params, by_seed);
        assert_eq!(counts[0] + counts[2] + counts[4], 0);
        let kept = [counts[1], counts[3], counts[5]];
        let fit = chi_square(&kept, &[0.3 / 0.85, 0.25 / 0.85, 0.3 / 0.85]);
        assert!(fit < critical(2), "top-k: {fit}, {kept:?}");
    }
}

#[test]
fn random_numbers_are_uniform_and_unrelated() {
    const SIDE: usize = 16;
    // Pairs of neighbours, along draws and along seeds, fall evenly into the cells of a square.
    type Pair = fn(u64) -> (f64, f64);
    let pairs: [(&str, Pair); 4] = [
        ("draws", |i| (uniform(1, i), uniform(1, i + 1))),
        ("seeds", |i| (uniform(i, 0), uniform(i + 1, 0))),
        ("diagonal", |i| (uniform(i, 1), uniform(i + 1, 0))),
        ("high seeds", |i| (uniform(i << 48, 0), uniform((i + 1) << 48, 0))),
    ];
    for (name, pair) in pairs {
        let mut counts = [0u32; SIDE * SIDE];
        for i in 0..60_000 {
            let (x, y) = pair(i);
            assert!((0.0..1.0).contains(&x));
            counts[(x * SIDE as f64) as usize * SIDE + (y * SIDE as f64) as usize] += 1;
        }
        let fit = chi_square(&counts, &[1.0 / (SIDE * SIDE) as f64; SIDE * SIDE]);
        assert!(fit < critical(SIDE * SIDE - 1), "{name}: {fit}");
    }
    // Written down: a seed must give the same text in every version.
    expect!["0.65245 0.70121 0.36819 0.26685"].assert_eq(
        &[(0, 0), (0, 1), (1, 0), (u64::MAX, u64::MAX)]
            .map(|(s, d)| format!("{:.5}", uniform(s, d)))
            .join(" "),
    );
}

#[test]
fn a_large_flat_vocabulary_is_no_problem() {
    // All of the slow paths at once: nothing to prune, one bin that holds everything.
    let flat = vec![0.25; 150_000];
    let mut scratch = Scratch::default();
    for (top_k, top_p) in [(0, 0.9), (100_000, 0.5), (0, 1.0)] {
        let params = SamplingParams { temperature: 1.0, top_k, top_p, seed: 5, ..greedy() };
        let kept = if top_k > 0 { 50_000.0 } else { 150_000.0 * f64::from(top_p) };
        for draw in 0..20 {
            let token = sample(&flat, &SampleRequest { draw, ..request(&params) }, &mut scratch).token;
            let expected = uniform(5, draw) * kept;
            assert!((f64::from(token) - expected).abs() <= 1.5, "{top_k} {top_p}: {token} for {expected}");
        }
    }
}

/// The definition, slow and obvious: rank everything, cut three times, pick in order of id.
fn naive(logits: &[f32], params: &SamplingParams, draw: u64) -> u32 {
    let best = logits.iter().copied().fold(-INF, f32::max);
    let mut ranked: Vec<(u32, f32, f32)> = logits
        .iter()
        .enumerate()
        .map(|(token, &logit)| (token as u32, logit, ((logit - best) / params.temperature).exp()))
        .collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if params.top_n_sigma > 0.0 {
        let values: Vec<f64> = logits.iter().map(|&logit| logit.into()).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
        let least = f64::from(best) - f64::from(params.top_n_sigma) * variance.sqrt();
        ranked.retain(|r| f64::from(r.1) >= least);
    }
    if params.top_k > 0 {
        ranked.truncate(params.top_k as usize);
    }
    ranked.sort_by(|a, b| b.2.total_cmp(&a.2).then(a.0.cmp(&b.0)));
    let total: f64 = ranked.iter().map(|r| f64::from(r.2)).sum();
    let mut reached = 0.0;
    let enough = ranked.iter().position(|r| {
        reached += f64::from(r.2);
        reached >= f64::from(params.top_p) * total
    });
    if params.top_p < 1.0 {
        ranked.truncate(enough.map_or(ranked.len(), |last| last + 1));
    }
    ranked.retain(|r| r.2 >= params.min_p);
    // Always or never: the number that decides otherwise is the sampler's own.
    if params.xtc_probability == 1.0 {
        let total: f64 = ranked.iter().map(|r| f64::from(r.2)).sum();
        let tops =
            ranked.iter().filter(|r| f64::from(r.2) / total >= f64::from(params.xtc_threshold)).count();
        ranked.drain(..tops.saturating_sub(1));
    }
    ranked.sort_by_key(|r| r.0);
    let total: f64 = ranked.iter().map(|r| f64::from(r.2)).sum();
    let target = uniform(params.seed, draw) * total;
    let mut reached = 0.0;
    let hit = ranked.iter().find(|r| {
        reached += f64::from(r.2);
        reached > target
    });
    hit.or(ranked.last()).expect("something is left").0
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    let truncation = (
        prop_oneof![Just(0), 1u32..40],
        prop_oneof![Just(1.0f32), 0.0f32..1.0],
        prop_oneof![Just(0.0f32), 0.0f32..0.9],
        prop_oneof![Just(0.0f32), 0.1f32..3.0],
        (prop_oneof![Just(0.0f32), Just(1.0f32)], 0.01f32..0.6),
    );
    (0.05f32..4.0, truncation, any::<u64>()).prop_map(|(temperature, truncation, seed)| {
        let (top_k, top_p, min_p, top_n_sigma, (xtc_probability, xtc_threshold)) = truncation;
        let xtc = SamplingParams { xtc_probability, xtc_threshold, ..greedy() };
        SamplingParams { temperature, top_k, top_p, min_p, top_n_sigma, seed, ..xtc }
    })
}

proptest! {
    #[test]
    fn equals_the_naive_definition(
        params in any_params(),
        // Quarters, so that there are many ties.
        logits in prop::collection::vec((-40i32..40).prop_map(|x| x as f32 / 4.0), 1..600),
        draw in 0u64..1000,
    ) {
        let request = SampleRequest { draw, ..request(&params) };
        prop_assert_eq!(token(&logits, &request), naive(&logits, &params, draw));
    }

    #[test]
    fn scratch_carries_nothing_over(
        params in any_params(),
        first in prop::collection::vec(-10f32..10.0, 1..300),
        second in prop::collection::vec(-10f32..10.0, 1..300),
        history in prop::collection::vec(0u32..400, 0..50),
    ) {
        let params = SamplingParams { frequency_penalty: 0.3, repetition_penalty: 1.2, ..params };
        let request = SampleRequest { history: &history, logprobs: Some(3), ..request(&params) };
        let mut scratch = Scratch::default();
        sample(&first, &request, &mut scratch);
        prop_assert_eq!(sample(&second, &request, &mut scratch), sample(&second, &request, &mut Scratch::default()));
    }

    /// Any bits at all: the answer is a token that the mask allows, or none.
    #[test]
    fn hostile_numbers_do_no_harm(
        logits in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 1..100),
        bits in any::<[u32; 6]>(),
        top_k in any::<u32>(),
        bias in prop::collection::vec((0u32..120, any::<u32>().prop_map(f32::from_bits)), 0..4),
        history in prop::collection::vec(0u32..120, 0..20),
        mask in prop::option::of(any::<[u32; 4]>()),
        seed in any::<u64>(),
    ) {
        let [temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty] = bits.map(f32::from_bits);
        let [xtc_probability, xtc_threshold, top_n_sigma, multiplier, base, _] = bits.map(|bits| f32::from_bits(!bits));
        let dry = Dry { multiplier, base, allowed_length: bits[0] % 3, window: None, breakers: [7].into() };
        let params = SamplingParams {
            temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty,
            penalty_window: None, logit_bias: bias, seed, xtc_probability, xtc_threshold, top_n_sigma, dry,
        };
        let bits = mask.map(TokenMask::new);
        let request =
            SampleRequest { params: &params, draw: seed, history: &history, prompt_tokens: history.len() / 2, mask: bits.as_ref(), logprobs: Some(5) };
        let sampled = sample(&logits, &request, &mut Scratch::default());
        let allowed = |token: u32| mask.is_none_or(|mask| mask[token as usize / 32] >> (token % 32) & 1 == 1);
        if sampled.token != Sampled::NO_TOKEN {
            prop_assert!((sampled.token as usize) < logits.len() && allowed(sampled.token));
        }
        prop_assert!(sampled.top.len() <= 5);
        prop_assert!(sampled.logprob.is_some_and(|logprob| logprob <= 0.0));
    }
}
