//! Sampling: tables for each value's meaning, draws, and input that should not exist.

mod draws;

use std::sync::Arc;

use expect_test::{Expect, expect};
use paguro_backend::{
    SampleRequest, Sampled, SamplingParams, TokenMask,
    sampling::{Dry, PenaltyScratch, Scratch, penalties, sample, score},
};
use proptest::prelude::*;

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

/// A request with nothing in it but the parameters.
fn request(params: &SamplingParams) -> SampleRequest<'_> {
    SampleRequest { params, draw: 0, history: &[], prompt_tokens: 0, mask: None, logprobs: None }
}

fn greedy() -> SamplingParams {
    SamplingParams::default()
}

fn token(logits: &[f32], request: &SampleRequest<'_>) -> u32 {
    sample(logits, request, &mut Scratch::default()).token
}

#[test]
fn greedy_takes_the_best_and_the_lowest_id_of_equal_ones() {
    let table: &[(&[f32], u32)] = &[
        (&[0.0, 3.0, 1.0], 1),
        (&[2.0, 3.0, 3.0], 1),
        (&[0.0, -0.0], 0),
        (&[-0.0, 0.0], 0),
        (&[-5.0, -4.0], 1),
        (&[NAN, 1.0, 2.0], 2),
        (&[2.0, NAN, 1.0], 0),
        (&[1.0, INF, INF], 1),
        (&[-INF, -INF, -1e30], 2),
        (&[-INF, -INF], Sampled::NO_TOKEN),
        (&[NAN, NAN], Sampled::NO_TOKEN),
        (&[], Sampled::NO_TOKEN),
    ];
    for (logits, expected) in table {
        assert_eq!(token(logits, &request(&greedy())), *expected, "{logits:?}");
    }
}

/// Which tokens can come, over many draws, as `token:percent`.
fn support(logits: &[f32], params: &SamplingParams, mask: Option<&[u32]>) -> String {
    let mut scratch = Scratch::default();
    let mut counts = vec![0; logits.len()];
    let mask = mask.map(TokenMask::new);
    for draw in 0..2000 {
        let request = SampleRequest { draw, mask: mask.as_ref(), ..request(params) };
        counts[sample(logits, &request, &mut scratch).token as usize] += 1;
    }
    let seen = counts.iter().enumerate().filter(|(_, count)| **count > 0);
    seen.map(|(token, count)| format!("{token}:{}", (f64::from(*count) / 20.0).round()))
        .collect::<Vec<_>>()
        .join(" ")
}

fn ln(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

#[test]
fn truncations_keep_what_they_say() {
    let logits = ln(&[0.1, 0.4, 0.2, 0.3]);
    let base = SamplingParams { temperature: 1.0, seed: 7, ..greedy() };
    let check = |what: &str, params: SamplingParams, expected: Expect| {
        expected.assert_eq(&format!("{what}: {}", support(&logits, &params, None)));
    };
    check("all", base.clone(), expect!["all: 0:9 1:41 2:21 3:29"]);
    check("top-k 1", SamplingParams { top_k: 1, ..base.clone() }, expect!["top-k 1: 1:100"]);
    check("top-k 2", SamplingParams { top_k: 2, ..base.clone() }, expect!["top-k 2: 1:58 3:42"]);
    check("top-k 9", SamplingParams { top_k: 9, ..base.clone() }, expect!["top-k 9: 0:9 1:41 2:21 3:29"]);
    check("top-p 0", SamplingParams { top_p: 0.0, ..base.clone() }, expect!["top-p 0: 1:100"]);
    check("top-p .39", SamplingParams { top_p: 0.39, ..base.clone() }, expect!["top-p .39: 1:100"]);
    check("top-p .41", SamplingParams { top_p: 0.41, ..base.clone() }, expect!["top-p .41: 1:58 3:42"]);
    check(
        "top-p .95",
        SamplingParams { top_p: 0.95, ..base.clone() },
        expect!["top-p .95: 0:9 1:41 2:21 3:29"],
    );
    check("min-p .45", SamplingParams { min_p: 0.45, ..base.clone() }, expect!["min-p .45: 1:45 2:23 3:32"]);
    check("min-p 1", SamplingParams { min_p: 1.0, ..base.clone() }, expect!["min-p 1: 1:100"]);
    // Of the three that top-k leaves, 0.4 / 0.9 and 0.3 / 0.9 already make 0.77: top-p looks at what top-k left.
    let both = SamplingParams { top_k: 3, top_p: 0.75, ..base.clone() };
    check("top-k, top-p", both, expect!["top-k, top-p: 1:58 3:42"]);
    check(
        "top-p alone",
        SamplingParams { top_p: 0.75, ..base.clone() },
        expect!["top-p alone: 1:45 2:23 3:32"],
    );
    // The temperature comes before top-p: flattened, the best two are not enough; sharpened, one is.
    let hot = SamplingParams { temperature: 4.0, top_p: 0.6, ..base.clone() };
    check("hot", hot, expect!["hot: 1:36 2:31 3:33"]);
    let cold = SamplingParams { temperature: 0.2, top_p: 0.6, ..base };
    check("cold", cold, expect!["cold: 1:100"]);
}

#[test]
fn equal_logits_are_cut_at_the_lowest_ids() {
    let base = SamplingParams { temperature: 1.0, ..greedy() };
    let flat = [1.0; 5];
    expect!["0:52 1:49"].assert_eq(&support(&flat, &SamplingParams { top_k: 2, ..base.clone() }, None));
    expect!["0:33 1:35 2:32"].assert_eq(&support(
        &flat,
        &SamplingParams { top_p: 0.5, ..base.clone() },
        None,
    ));
    expect!["0:19 1:22 2:21 3:19 4:19"].assert_eq(&support(
        &flat,
        &SamplingParams { min_p: 1.0, ..base },
        None,
    ));
}

/// DRY by its definition: all earlier places are compared with the end, token by token.
fn naive_dry(dry: &Dry, history: &[u32]) -> Vec<(usize, f32)> {
    let window =
        &history[history.len() - dry.window.map_or(history.len(), |w| history.len().min(w as usize))..];
    let breaks = |token: u32| dry.breakers.contains(&token);
    let mut found = std::collections::BTreeMap::new();
    for (next, &token) in window.iter().enumerate().skip(1).filter(|(_, token)| !breaks(**token)) {
        let end = window.iter().rev().take_while(|token| !breaks(**token));
        let length = window[..next].iter().rev().zip(end).take_while(|(a, b)| a == b).count() as u32;
        let penalty = dry.multiplier * dry.base.powf(length as f32 - dry.allowed_length as f32);
        if length >= dry.allowed_length {
            let longest = found.entry(token as usize).or_insert(0.0_f32);
            *longest = longest.max(penalty);
        }
    }
    found.into_iter().collect()
}

#[test]
fn dry_penalizes_what_goes_on_with_a_repetition() {
    let penalized = |dry: &Dry, history: &[u32]| {
        let params = SamplingParams { dry: dry.clone(), ..greedy() };
        let mut all = Vec::new();
        let request = SampleRequest { history, ..request(&params) };
        penalties(&request, 10, &mut PenaltyScratch::default(), |token, repetition, subtracted| {
            assert_eq!(repetition, 1.0);
            all.push((token, subtracted));
        });
        all
    };
    let dry = Dry { multiplier: 0.5, base: 2.0, breakers: [9].into(), ..Dry::default() };
    for (history, expected) in [
        (&[1, 2, 3, 1, 2][..], &[(3, 0.5)][..]),
        (&[0, 1, 2, 3, 0, 1, 2], &[(3, 1.0)]),
        (&[2, 3, 2], &[]),
        (&[1, 2, 3, 1, 2, 4, 1, 2], &[(3, 0.5), (4, 0.5)]),
        (&[1, 2, 9, 3, 1, 2, 9], &[]),
        (&[0, 9, 1, 2, 3, 0, 9, 1, 2], &[(3, 0.5)]),
        (&[1, 2, 9, 1, 2], &[]),
        (&[5, 5, 5, 5], &[(5, 1.0)]),
        (&[], &[]),
    ] {
        assert_eq!(penalized(&dry, history), expected, "{history:?}");
    }
    let recent = Dry { window: Some(4), ..dry.clone() };
    assert_eq!(penalized(&recent, &[1, 2, 3, 1, 2]), []);
    assert_eq!(penalized(&Dry { window: Some(0), ..dry.clone() }, &[1, 2, 3, 1, 2]), []);
    // A long text of one word takes no longer than others, and its penalty is a number.
    let same = vec![1; 100_000];
    assert!(penalized(&dry, &same)[0].1.is_finite());

    let mut runner = proptest::test_runner::TestRunner::default();
    let cases = (prop::collection::vec(0u32..4, 0..40), 1u32..4, prop::option::of(0u32..30), 0u32..5);
    let outcome = runner.run(&cases, |(history, allowed_length, window, breaker)| {
        let breakers = [breaker].into();
        let dry = Dry { multiplier: 0.8, base: 1.5, allowed_length, window, breakers };
        prop_assert_eq!(penalized(&dry, &history), naive_dry(&dry, &history));
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn xtc_and_top_n_sigma_drop_what_they_should() {
    let base = SamplingParams { temperature: 1.0, ..greedy() };
    // Probabilities 0.6, 0.3, 0.08, 0.02.
    let logits = [0.6_f32, 0.3, 0.08, 0.02].map(f32::ln);
    let xtc = |probability, threshold| SamplingParams {
        xtc_probability: probability,
        xtc_threshold: threshold,
        ..base.clone()
    };
    expect!["1:77 2:19 3:4"].assert_eq(&support(&logits, &xtc(1.0, 0.1), None));
    expect!["2:81 3:19"].assert_eq(&support(&logits, &xtc(1.0, 0.05), None));
    expect!["0:62 1:29 2:7 3:2"].assert_eq(&support(&logits, &xtc(1.0, 0.5), None));
    expect!["0:62 1:29 2:7 3:2"].assert_eq(&support(&logits, &xtc(0.0, 0.1), None));
    expect!["0:33 1:51 2:12 3:3"].assert_eq(&support(&logits, &xtc(0.5, 0.1), None));
    let sigma = |sigma| SamplingParams { top_n_sigma: sigma, ..base.clone() };
    expect!["0:62 1:29 2:7 3:2"].assert_eq(&support(&logits, &sigma(5.0), None));
    expect!["0:68 1:32"].assert_eq(&support(&logits, &sigma(1.0), None));
    expect!["0:100"].assert_eq(&support(&logits, &sigma(0.1), None));
}

#[test]
fn penalties_look_at_the_window() {
    // Logits and history, and what greedy decoding makes of them.
    let check = |params: SamplingParams, logits: &[f32], history: &[u32], expected: u32| {
        let request = SampleRequest { history, ..request(&params) };
        assert_eq!(token(logits, &request), expected, "{params:?} {logits:?} {history:?}");
    };
    let repetition = |penalty| SamplingParams { repetition_penalty: penalty, ..greedy() };
    check(repetition(1.0), &[2.0, 1.5], &[0], 0);
    check(repetition(1.3), &[2.0, 1.5], &[0], 0); // 1.54
    check(repetition(1.4), &[2.0, 1.5], &[0], 1); // 1.43
    check(repetition(1.4), &[2.0, 1.5], &[0, 0, 0], 1); // once, however often it occurs
    check(repetition(1.2), &[2.0, 1.5], &[0, 0, 0], 0); // 1.67
    check(repetition(1.4), &[-1.0, -1.5], &[0], 0); // -1.4
    check(repetition(1.6), &[-1.0, -1.5], &[0], 1); // -1.6: negative ones are multiplied
    check(repetition(0.5), &[2.0, 1.5], &[1], 1); // below one it is a reward

    let frequency = |penalty| SamplingParams { frequency_penalty: penalty, ..greedy() };
    check(frequency(0.2), &[2.0, 1.5], &[0, 0], 0); // 1.6
    check(frequency(0.2), &[2.0, 1.5], &[0, 1, 0, 0], 0); // 1.4 and 1.3
    check(frequency(0.2), &[2.0, 1.5], &[0, 0, 0], 1); // 1.4

    let presence = |penalty| SamplingParams { presence_penalty: penalty, ..greedy() };
    check(presence(0.4), &[2.0, 1.5], &[0, 0, 0], 0); // 1.6
    check(presence(0.6), &[2.0, 1.5], &[0], 1); // 1.4
    check(presence(-0.6), &[2.0, 1.5], &[1], 1);

    // The prompt counts for the repetition penalty only.
    let in_prompt = |params: SamplingParams, history: &[u32], prompt_tokens, expected: u32| {
        let request = SampleRequest { history, prompt_tokens, ..request(&params) };
        assert_eq!(token(&[2.0, 1.5], &request), expected, "{params:?} {history:?} {prompt_tokens}");
    };
    for (history, prompt_tokens, frequent, present, repeated) in [
        (&[0, 0, 0][..], 3, 0, 0, 1),
        (&[0, 0, 0], 2, 0, 1, 1),
        (&[0, 0, 0], 0, 1, 1, 1),
        (&[0, 0, 1, 0, 0, 0], 3, 1, 1, 0),
        (&[0, 1], 1, 0, 0, 0),
    ] {
        in_prompt(frequency(0.2), history, prompt_tokens, frequent);
        in_prompt(presence(0.6), history, prompt_tokens, present);
        in_prompt(repetition(1.4), history, prompt_tokens, repeated);
    }
    let windowed = SamplingParams { penalty_window: Some(2), ..presence(0.6) };
    in_prompt(windowed.clone(), &[0, 0, 1, 1], 1, 0);
    in_prompt(windowed, &[0, 0, 1, 0], 1, 0); // 1.4 and 0.9

    // Repetition first, then the subtractions: 2 / 1.25 - 0.2 = 1.4, where (2 - 0.2) / 1.25 would be 1.44.
    let both = SamplingParams { repetition_penalty: 1.25, presence_penalty: 0.2, ..greedy() };
    check(both, &[2.0, 1.42], &[0], 1);
    // The bias first: (2 + 1) / 1.5 = 2, where 2 / 1.5 + 1 would be 2.33.
    let biased = SamplingParams { repetition_penalty: 1.5, logit_bias: vec![(0, 1.0)], ..greedy() };
    check(biased, &[2.0, 2.2], &[0], 1);

    let window = |window| SamplingParams { presence_penalty: 1.0, penalty_window: window, ..greedy() };
    check(window(None), &[2.0, 1.5, 0.0], &[0, 2, 2], 1);
    check(window(Some(3)), &[2.0, 1.5, 0.0], &[0, 2, 2], 1);
    check(window(Some(2)), &[2.0, 1.5, 0.0], &[0, 2, 2], 0);
    check(window(Some(0)), &[2.0, 1.5, 0.0], &[2, 2, 0], 0);
    check(window(Some(u32::MAX)), &[2.0, 1.5, 0.0], &[0, 2, 2], 1);
    // Tokens that the vocabulary does not have are not counted.
    check(window(None), &[2.0, 1.5], &[7, u32::MAX, 0], 1);
}

#[test]
fn bias_and_mask() {
    let logits = [3.0, 2.0, 1.0];
    let bias = |bias: &[(u32, f32)]| SamplingParams { logit_bias: bias.to_vec(), ..greedy() };
    assert_eq!(token(&logits, &request(&bias(&[(2, 2.5)]))), 2);
    assert_eq!(token(&logits, &request(&bias(&[(0, -INF)]))), 1);
    assert_eq!(token(&logits, &request(&bias(&[(2, INF), (2, -INF)]))), 0); // NaN is never taken
    assert_eq!(token(&logits, &request(&bias(&[(9, 100.0)]))), 0);

    let masked = |mask: &[u32], logits: &[f32]| {
        let params = greedy();
        token(logits, &SampleRequest { mask: Some(&TokenMask::new(mask)), ..request(&params) })
    };
    assert_eq!(masked(&[0b110], &logits), 1);
    assert_eq!(masked(&[0b100], &logits), 2);
    // Nothing that is allowed is more than -inf, or nothing is allowed at all.
    assert_eq!(masked(&[0b110], &[0.0, -INF, NAN]), Sampled::NO_TOKEN);
    assert_eq!(masked(&[0], &logits), Sampled::NO_TOKEN);
    assert_eq!(masked(&[], &logits), Sampled::NO_TOKEN);
    // Past the first word.
    let many: Vec<f32> = (0..70).map(|i| i as f32).collect();
    assert_eq!(masked(&[!0, 1 << 5 | 1 << 3, 0], &many), 37);
    let hot = SamplingParams { temperature: 100.0, ..greedy() };
    expect!["1:42 37:58"].assert_eq(&support(&many[..40], &hot, Some(&[0b10, 1 << 5])));
}

#[test]
fn log_probabilities_are_the_models_own() {
    let logits = ln(&[0.1, 0.4, 0.2, 0.3]);
    // Bias, mask and temperature move the choice, not what is reported.
    let params = SamplingParams { temperature: 0.1, logit_bias: vec![(0, 50.0)], ..greedy() };
    let mask = TokenMask::new([0b1001]);
    let request = SampleRequest { logprobs: Some(2), mask: Some(&mask), ..request(&params) };
    let Sampled { token, logprob, top } = sample(&logits, &request, &mut Scratch::default());
    let shown: Vec<String> =
        top.iter().map(|(token, logprob)| format!("{token}:{:.4}", logprob.exp())).collect();
    assert_eq!(token, 0);
    assert!((logprob.expect("asked for") - 0.1f32.ln()).abs() < 1e-6);
    expect!["1:0.4000 3:0.3000"].assert_eq(&shown.join(" "));

    let count = |logprobs| {
        let request = SampleRequest { logprobs, ..request };
        let sampled = sample(&logits, &request, &mut Scratch::default());
        (sampled.logprob.is_some(), sampled.top.len())
    };
    assert_eq!(count(None), (false, 0));
    assert_eq!(count(Some(0)), (true, 0));
    assert_eq!(count(Some(usize::MAX)), (true, 4));
}

#[test]
fn scores_are_summed_exactly() {
    let log_softmax_at = |logits: &[f32], token| score(logits, token, 0, &mut Scratch::default()).logprob;
    let logits = ln(&[0.1, 0.4, 0.2, 0.3]);
    for (token, p) in [(0, 0.1f32), (1, 0.4), (2, 0.2), (3, 0.3)] {
        assert!((log_softmax_at(&logits, token) - p.ln()).abs() < 1e-6);
    }
    // Large logits do not overflow, and a million equal ones still sum to one (in f32 they would stall).
    assert!((log_softmax_at(&[1e30, 1e30], 1) - 0.5f32.ln()).abs() < 1e-6);
    let flat = vec![3.0; 1 << 20];
    assert!((log_softmax_at(&flat, 5) + 20.0 * 2f32.ln()).abs() < 1e-5);
    for (logits, token) in
        [(&[1.0, NAN][..], 1), (&[1.0, -INF], 1), (&[1.0, 2.0], 2), (&[], 0), (&[NAN, -INF], 0)]
    {
        assert_eq!(log_softmax_at(logits, token), -INF, "{logits:?}");
    }
    assert_eq!(log_softmax_at(&[INF, 0.0, NAN], 0), 0.0);
    // The best ones do not depend on which token is scored.
    for token in 0..4 {
        let top = score(&logits, token, 2, &mut Scratch::default()).top;
        assert_eq!(top, [(1, log_softmax_at(&logits, 1)), (3, log_softmax_at(&logits, 3))]);
    }
}

#[test]
fn values_without_a_meaning_are_named() {
    let check = |params: SamplingParams, expected: Expect| {
        expected.assert_eq(&params.check(100).map_or_else(|error| error.to_string(), |()| "fine".to_owned()));
    };
    check(greedy(), expect!["fine"]);
    let all = SamplingParams {
        temperature: 2.0,
        top_k: 7,
        top_p: 0.0,
        min_p: 1.0,
        repetition_penalty: 0.9,
        frequency_penalty: -2.0,
        presence_penalty: 2.0,
        penalty_window: Some(0),
        logit_bias: vec![(99, -INF)],
        seed: 1,
        top_n_sigma: 0.5,
        xtc_probability: 1.0,
        xtc_threshold: 0.0,
        dry: Dry { multiplier: 0.8, base: 1.0, allowed_length: 0, window: Some(0), breakers: Arc::from([3]) },
    };
    check(all, expect!["fine"]);
    check(
        SamplingParams { temperature: -0.1, ..greedy() },
        expect!["temperature must be finite, 0 or more, not -0.1"],
    );
    check(
        SamplingParams { temperature: NAN, ..greedy() },
        expect!["temperature must be finite, 0 or more, not NaN"],
    );
    check(SamplingParams { top_p: 1.1, ..greedy() }, expect!["top_p must be between 0 and 1, not 1.1"]);
    check(SamplingParams { min_p: -1.0, ..greedy() }, expect!["min_p must be between 0 and 1, not -1"]);
    check(
        SamplingParams { repetition_penalty: 0.0, ..greedy() },
        expect!["repetition_penalty must be finite and more than 0, not 0"],
    );
    check(
        SamplingParams { frequency_penalty: INF, ..greedy() },
        expect!["frequency_penalty must be finite, not inf"],
    );
    check(
        SamplingParams { presence_penalty: NAN, ..greedy() },
        expect!["presence_penalty must be finite, not NaN"],
    );
    check(
        SamplingParams { logit_bias: vec![(0, NAN)], ..greedy() },
        expect!["logit_bias must be a number, not NaN"],
    );
    check(
        SamplingParams { logit_bias: vec![(100, 0.0)], ..greedy() },
        expect!["logit_bias must be of tokens in the vocabulary, not token 100"],
    );
}
