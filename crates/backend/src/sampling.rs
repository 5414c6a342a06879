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
//! all tokens, or all except those with `-inf`), the result is [`Sampled::NO_TOKEN`]; steps with a known mask that
//! excludes all tokens are refused before ([`Step::validate`](crate::Step::validate)).

mod dry;

use std::cmp::Ordering;

pub use dry::Dry;

use crate::{Outcome, SampleRequest, Sampled, Score, Want};

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
    /// Number of last tokens of [`SampleRequest::history`] that the penalties consider; `None` for all, `Some(0)`
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

    fn penalizes_tokens(&self) -> bool {
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

/// Buffers of [`sample`], reused from call to call: they grow to the vocabulary's size and stay there.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// Logits after bias, penalties and mask, `[vocab]`.
    adjusted: Vec<f32>,
    penalties: PenaltyScratch,
    /// The tokens that may be drawn, in order of id.
    candidates: Vec<Scored>,
    /// The best tokens of something.
    ranking: Vec<Scored>,
    /// Sums of weights by magnitude; see [`keep_top_p`].
    bins: Vec<f64>,
}

/// Buffers of [`penalties`], reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct PenaltyScratch {
    /// Occurrences in the window, `[vocab]`; all zero between calls.
    counts: Vec<u32>,
    dry: dry::Scratch,
}

/// A token with its logit, or with its weight: a probability relative to the highest one.
#[derive(Clone, Copy, Debug)]
struct Scored {
    token: u32,
    value: f32,
}

impl Scored {
    /// Best first; the lowest id of equal ones first.
    fn rank(&self, other: &Self) -> Ordering {
        let best_first = other.value.partial_cmp(&self.value).unwrap_or(Ordering::Equal);
        best_first.then(self.token.cmp(&other.token))
    }
}

/// Computes an output from its row of logits, if it [needs them](Want::needs_logits). For backends that sample on the
/// host. The logits are not changed, because a row may have several outputs.
pub fn answer(logits: &[f32], want: &Want<'_>, scratch: &mut Scratch) -> Option<Outcome> {
    Some(match want {
        Want::Sample(request) => Outcome::Sampled(sample(logits, request, scratch)),
        Want::Score { token, top } => Outcome::Score(score(logits, *token, *top, scratch)),
        Want::Logits => Outcome::Logits(logits.to_vec()),
        Want::Embedding => return None,
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

/// The uniform number in `[0, 1)` of one draw: output `draw` of the SplitMix64 generator (Steele, Lea, Flood: Fast
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

/// Calls `each` once for each penalized token, with its repetition penalty and the amount that is subtracted from its
/// logit afterwards. `scratch` holds no data between calls.
pub fn penalties(
    request: &SampleRequest<'_>,
    vocab: usize,
    scratch: &mut PenaltyScratch,
    mut each: impl FnMut(usize, f32, f32),
) {
    let PenaltyScratch { counts, dry } = scratch;
    let repetitions = dry.penalties(&request.params.dry, request.history);
    occurrences(request, vocab, counts, |token, subtracted| {
        let more = repetitions.get_mut(&(token as u32)).map_or(0.0, std::mem::take);
        each(token, request.params.repetition_penalty, subtracted + more);
    });
    let rest = repetitions.iter().filter(|(token, penalty)| (**token as usize) < vocab && **penalty > 0.0);
    rest.for_each(|(&token, &penalty)| each(token as usize, 1.0, penalty));
}

/// Calls `each` once for each generated token in the window, with the amount that is subtracted.
fn occurrences(
    request: &SampleRequest<'_>,
    vocab: usize,
    counts: &mut Vec<u32>,
    mut each: impl FnMut(usize, f32),
) {
    let SampleRequest { params, history, prompt_tokens, .. } = *request;
    if !params.penalizes_tokens() {
        return;
    }
    let length = params.penalty_window.map_or(history.len(), |window| history.len().min(window as usize));
    let start = history.len() - length;
    let window = &history[start..];
    counts.resize(counts.len().max(vocab), 0);
    // A token that occurs has at least 1, and 1 more for each time that it was generated.
    for (position, &token) in (start..).zip(window) {
        if let Some(count) = counts[..vocab].get_mut(token as usize) {
            *count = (*count).max(1) + u32::from(position >= prompt_tokens);
        }
    }
    for token in window.iter().map(|&token| token as usize).filter(|&token| token < vocab) {
        // Each token once; this also leaves the counts as they were found.
        match std::mem::take(&mut counts[token]) {
            0 => {}
            1 => each(token, 0.0),
            count => {
                let generated = (count - 1) as f32;
                each(token, generated * params.frequency_penalty + params.presence_penalty);
            }
        }
    }
}

/// Steps 5 and 6. `None` if no logit is more than `-inf`.
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
    // refers to, so it may come first.
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
    // Rounding used everything up: the last one.
    candidates.last().map(|candidate| candidate.token)
}

/// The standard deviation of all logits but those at `-inf`.
fn deviation(logits: &[f32]) -> f64 {
    let values = || logits.iter().map(|&logit| f64::from(finite(logit))).filter(|logit| logit.is_finite());
    let count = values().count().max(1) as f64;
    let mean = values().sum::<f64>() / count;
    (values().map(|logit| (logit - mean) * (logit - mean)).sum::<f64>() / count).sqrt()
}

/// Returns the uniform number that decides whether XTC is applied in a draw. It is independent of the one that selects
/// the token.
fn xtc_draw(seed: u64, draw: u64) -> f64 {
    uniform(seed ^ 0x5854_4358_5443_5854, draw)
}

/// Drops all candidates with at least `threshold` of the probability except the least probable of them; of equal ones,
/// the one with the highest id stays.
fn exclude_top_choices(candidates: &mut Vec<Scored>, threshold: f32) {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.value)).sum();
    let is_top = |candidate: &Scored| f64::from(candidate.value) >= f64::from(threshold) * total;
    let last = candidates.iter().filter(|candidate| is_top(candidate)).copied().max_by(Scored::rank);
    if let Some(last) = last {
        candidates.retain(|candidate| !is_top(candidate) || candidate.token == last.token);
    }
}

/// Keeps the smallest set of candidates with the highest weights whose sum reaches `target`, at least one.
///
/// Sorting a whole vocabulary would take longer than everything else here. Instead the weights are summed in bins of
/// similar magnitude, which finds the bin with the last candidate to keep, and only that bin is sorted.
fn keep_top_p(candidates: &mut Vec<Scored>, target: f64, ranking: &mut Vec<Scored>, bins: &mut Vec<f64>) {
    // Weights are in (0, 1], where the bits of a float are ordered as the float is: 32 bins for each power of two.
    const ONE: u32 = 1.0_f32.to_bits();
    const SHIFT: u32 = 18;
    let bin = |candidate: &Scored| ((ONE - candidate.value.to_bits()) >> SHIFT) as usize;
    bins.clear();
    bins.resize((ONE >> SHIFT) as usize + 1, 0.0);
    for candidate in candidates.iter() {
        bins[bin(candidate)] += f64::from(candidate.value);
    }
    let mut reached = 0.0;
    let last = bins.iter().position(|sum| {
        reached += sum;
        reached >= target
    });
    // Min-p may have left less than the target; then all of it stays.
    let Some(last) = last else { return };
    reached -= bins[last];

    ranking.clear();
    ranking.extend(candidates.iter().filter(|candidate| bin(candidate) == last));
    ranking.sort_unstable_by(Scored::rank);
    let cut = ranking.iter().position(|candidate| {
        reached += f64::from(candidate.value);
        reached >= target
    });
    let Some(&cut) = cut.map_or(ranking.last(), |cut| ranking.get(cut)) else { return };
    candidates.retain(|candidate| candidate.rank(&cut).is_le());
}

/// The token with the largest logit, the lowest id of equal ones; `None` if none is more than `-inf`.
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

/// The `k` tokens with the largest logits, best first, in one pass: newcomers that beat the worst of the best so
/// far are collected, and now and then the best are selected among them. Tokens at `-inf` are none of the best.
fn best_k(logits: &[f32], k: usize, ranking: &mut Vec<Scored>) {
    ranking.clear();
    if k == 0 {
        return;
    }
    let room = k.saturating_add(k.max(64));
    let mut worst = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        // An equal one with a higher id ranks lower.
        if logit > worst {
            ranking.push(Scored { token: token as u32, value: finite(logit) });
            if ranking.len() == room {
                let (_, last, _) = ranking.select_nth_unstable_by(k - 1, Scored::rank);
                worst = last.value;
                ranking.truncate(k);
            }
        }
    }
    ranking.sort_unstable_by(Scored::rank);
    ranking.truncate(k);
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

    /// The log-probability of a token with this logit.
    fn ln(&self, logit: f32) -> f32 {
        match finite(logit) {
            f32::NEG_INFINITY => f32::NEG_INFINITY,
            logit => (f64::from(logit) - self.largest - self.ln_sum) as f32,
        }
    }
}

/// NaN is `-inf`, `+inf` the largest finite number.
fn finite(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) }
}
