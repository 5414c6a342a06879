//! Definition of sampling. Backends that sample on the host call [`sample`]; the others are compared with it.
//!
//! One token is sampled from one row of logits in this order:
//!
//! 1. logit bias is added;
//! 2. the repetition penalty, for all tokens in the window; then frequency and presence penalties, for tokens in the
//!    window that were generated; then DRY;
//! 3. tokens outside of the mask are dropped;
//! 4. at temperature 0 the most probable token is the result; otherwise the logits are divided by the temperature;
//! 5. top-n-sigma, top-k, then top-p of the rest (with renormalized probabilities), then min-p, then XTC;
//! 6. one uniform number, a function of seed and draw only, selects from the rest.
//!
//! This is the order of Hugging Face transformers and of vLLM, so that their parameters have the same effect here.
//! llama.cpp truncates before it applies the temperature, so a high temperature does not widen top-p there; its
//! `--samplers "penalties;temperature;top_k;top_p;min_p"` is the order here. Top-k, top-p and min-p each keep a
//! *prefix* of the same ranking, so after the temperature their order matters only because top-p sums the tokens that
//! top-k kept.
//!
//! Log-probabilities are those of the model: of the logits before all of these steps.
//!
//! Logits that are NaN count as `-inf`, and `+inf` as the largest finite number. If no token is left (the mask excludes
//! all tokens, or all except those with `-inf`), the result is [`Sampled::NO_TOKEN`]; steps with a mask that excludes
//! all tokens are refused before ([`Step::validate`](crate::Step::validate)).

mod dry;
mod params;
mod penalties;
mod truncation;

use self::truncation::{Scored, best_k, deviation, exclude_top_choices, keep_top_p, xtc_draw};
pub use self::{
    dry::Dry,
    params::{InvalidParam, SamplingParams},
    penalties::{PenaltyScratch, penalties},
};
use crate::{OutputKind, OutputValue, SampleRequest, Sampled, Score};

/// Buffers of [`sample`], reused from call to call: they grow to the vocabulary's size and stay there.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// Logits after bias, penalties and mask, `[vocab]`.
    adjusted: Vec<f32>,
    penalties: PenaltyScratch,
    /// The tokens that may be drawn, in order of id.
    candidates: Vec<Scored>,
    /// Best tokens, in order.
    ranking: Vec<Scored>,
    /// Sums of weights by magnitude; see [`keep_top_p`].
    bins: Vec<f64>,
}

/// Computes an output from its row of logits, if it [needs them](OutputKind::needs_logits), for backends that sample on the host.
/// The logits are not changed, because a row may have several outputs.
pub fn answer(logits: &[f32], kind: &OutputKind<'_>, scratch: &mut Scratch) -> Option<OutputValue> {
    Some(match kind {
        OutputKind::Sample(request) => OutputValue::Sampled(sample(logits, request, scratch)),
        OutputKind::Score { token, top } => OutputValue::Score(score(logits, *token, *top, scratch)),
        OutputKind::Logits => OutputValue::Logits(logits.to_vec()),
        OutputKind::Embedding | OutputKind::Mean | OutputKind::Residual => return None,
    })
}

/// Samples one token from `logits`, `[vocab]`, in the order that the [module](self) describes.
pub fn sample(logits: &[f32], request: &SampleRequest<'_>, scratch: &mut Scratch) -> Sampled {
    sample_at(logits, request, uniform(request.params.seed, request.draw), scratch)
}

/// [`sample`] with this uniform number.
pub fn sample_at(
    logits: &[f32],
    request: &SampleRequest<'_>,
    uniform: f64,
    scratch: &mut Scratch,
) -> Sampled {
    let mut adjusted = std::mem::take(&mut scratch.adjusted);
    let candidates = adjust(logits, request, &mut adjusted, &mut scratch.penalties);
    let choice = match request.params.temperature > 0.0 {
        true => draw(candidates, request, uniform, scratch),
        false => best(candidates),
    };
    scratch.adjusted = adjusted;
    let token = choice.unwrap_or(Sampled::NO_TOKEN);
    let Some(count) = request.logprobs else { return Sampled { token, logprob: None, top: Vec::new() } };
    let Score { logprob, top } = score(logits, token, count, scratch);
    Sampled { token, logprob: Some(logprob), top }
}

/// Returns the log-probability of `token` under the softmax of `logits`, `[vocab]`, summed in f64; `-inf` if the token
/// is not in the vocabulary or its logit is `-inf` or NaN. Also returns those of the `top` most probable tokens.
pub fn score(logits: &[f32], token: u32, top: usize, scratch: &mut Scratch) -> Score {
    let softmax = Softmax::of(logits);
    best_k(logits, top, &mut scratch.ranking);
    Score {
        logprob: logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| softmax.ln(logit)),
        top: scratch.ranking.iter().map(|best| (best.token, softmax.ln(best.value))).collect(),
    }
}

/// Returns the uniform number in `[0, 1)` of one draw: output `draw` of the SplitMix64 generator (Steele, Lea, Flood: Fast
/// splittable pseudorandom number generators, 2014) whose state starts at the mixed seed. No state passes from
/// draw to draw, so a token depends on nothing but its logits, its seed and its number.
pub fn uniform(seed: u64, draw: u64) -> f64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |z: u64| {
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    // The seed is mixed first, because the streams of neighbouring seeds would otherwise be equal, shifted by one.
    let state = mix(seed.wrapping_add(GOLDEN)).wrapping_add(draw.wrapping_add(1).wrapping_mul(GOLDEN));
    (mix(state) >> 11) as f64 / (1_u64 << 53) as f64
}

/// Applies steps 1 to 3: bias, penalties, mask. Returns `logits` itself if there are none.
fn adjust<'a>(
    logits: &'a [f32],
    request: &SampleRequest<'_>,
    adjusted: &'a mut Vec<f32>,
    scratch: &mut PenaltyScratch,
) -> &'a [f32] {
    let params = request.params;
    if params.logit_bias.is_empty() && !params.penalizes() && request.mask.is_none() {
        return logits;
    }
    adjusted.clear();
    adjusted.extend_from_slice(logits);
    for &(token, bias) in &params.logit_bias {
        if let Some(logit) = adjusted.get_mut(token as usize) {
            *logit += bias;
        }
    }
    penalties(request, logits.len(), scratch, |token, repetition, subtracted| {
        let logit = &mut adjusted[token];
        *logit = match *logit > 0.0 {
            true => *logit / repetition,
            false => *logit * repetition,
        } - subtracted;
    });
    if let Some(mask) = request.mask {
        let mask = mask.bits();
        for (word, logits) in adjusted.chunks_mut(32).enumerate() {
            let allowed = mask.get(word).copied().unwrap_or(0);
            for (bit, logit) in logits.iter_mut().enumerate() {
                if allowed >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
    adjusted
}

/// Applies steps 5 and 6. Returns `None` if no logit is more than `-inf`.
fn draw(logits: &[f32], request: &SampleRequest<'_>, uniform: f64, scratch: &mut Scratch) -> Option<u32> {
    let params = request.params;
    let Scratch { candidates, ranking, bins, .. } = scratch;
    let best = finite(logits[best(logits)? as usize]);
    let least = match params.top_n_sigma > 0.0 {
        true => f64::from(best) - f64::from(params.top_n_sigma) * deviation(logits),
        false => f64::NEG_INFINITY,
    };

    // Min-p is applied here: it keeps a prefix of the ranking and does not change the total for top-p, so it may come
    // first.
    let min_p = params.min_p.min(1.0);
    candidates.clear();
    let mut total = 0.0;
    let mut consider = |token: u32, logit: f32| {
        let weight = ((finite(logit) - best) / params.temperature).exp();
        if weight > 0.0 && f64::from(finite(logit)) >= least {
            total += f64::from(weight);
            if weight >= min_p {
                candidates.push(Scored { token, value: weight });
            }
        }
    };
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < logits.len() {
        best_k(logits, top_k, ranking);
        ranking.sort_unstable_by_key(|best| best.token);
        ranking.iter().for_each(|best| consider(best.token, best.value));
    } else {
        logits.iter().enumerate().for_each(|(token, &logit)| consider(token as u32, logit));
    }
    if params.top_p < 1.0 {
        keep_top_p(candidates, f64::from(params.top_p) * total, ranking, bins);
    }
    if params.xtc_probability > 0.0 && xtc_draw(params.seed, request.draw) < f64::from(params.xtc_probability)
    {
        exclude_top_choices(candidates, params.xtc_threshold);
    }

    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.value)).sum();
    let mut remaining = uniform * total;
    for candidate in candidates.iter() {
        remaining -= f64::from(candidate.value);
        if remaining < 0.0 {
            return Some(candidate.token);
        }
    }
    // Only after rounding.
    candidates.last().map(|candidate| candidate.token)
}

/// Returns the token with the largest logit, the lowest id of equal ones; `None` if none is more than `-inf`.
fn best(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut largest = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        // Never true of a NaN.
        if logit > largest {
            largest = logit;
            best = Some(token as u32);
        }
    }
    best
}

/// Normalization of a row's logits to log-probabilities. The largest logit is kept apart from the logarithm of the sum,
/// which would lose precision beside a very large one.
struct Softmax {
    largest: f64,
    ln_sum: f64,
}

impl Softmax {
    fn of(logits: &[f32]) -> Self {
        let largest = best(logits).map_or(0.0, |token| finite(logits[token as usize]));
        let sum: f64 = logits.iter().map(|&logit| f64::from((finite(logit) - largest).exp())).sum();
        Self { largest: f64::from(largest), ln_sum: sum.ln() }
    }

    /// Returns the log-probability of a token with this logit.
    fn ln(&self, logit: f32) -> f32 {
        match finite(logit) {
            f32::NEG_INFINITY => f32::NEG_INFINITY,
            logit => (f64::from(logit) - self.largest - self.ln_sum) as f32,
        }
    }
}

/// Replaces NaN by `-inf` and `+inf` by the largest finite number.
fn finite(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) }
}
