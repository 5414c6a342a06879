//! Truncation: the candidates that top-n-sigma, top-k, top-p and XTC leave.

use std::cmp::Ordering;

use super::{finite, uniform};

/// A token with its logit, or with its weight: a probability relative to the highest one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored {
    pub token: u32,
    pub value: f32,
}

impl Scored {
    /// Best first; the lowest id of equal ones first.
    pub fn rank(&self, other: &Self) -> Ordering {
        let best_first = other.value.partial_cmp(&self.value).unwrap_or(Ordering::Equal);
        best_first.then(self.token.cmp(&other.token))
    }
}

/// Returns the standard deviation of all logits but those at `-inf`.
pub(super) fn deviation(logits: &[f32]) -> f64 {
    let values = || logits.iter().map(|&logit| f64::from(finite(logit))).filter(|logit| logit.is_finite());
    let count = values().count().max(1) as f64;
    let mean = values().sum::<f64>() / count;
    (values().map(|logit| (logit - mean) * (logit - mean)).sum::<f64>() / count).sqrt()
}

/// Returns the uniform number that decides whether XTC is applied in a draw. It is independent of the one that selects
/// the token.
pub(super) fn xtc_draw(seed: u64, draw: u64) -> f64 {
    uniform(seed ^ 0x5854_4358_5443_5854, draw)
}

/// Drops all candidates with at least `threshold` of the probability except the least probable of them; of equal ones,
/// the one with the highest id stays.
pub(super) fn exclude_top_choices(candidates: &mut Vec<Scored>, threshold: f32) {
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
pub(super) fn keep_top_p(
    candidates: &mut Vec<Scored>,
    target: f64,
    ranking: &mut Vec<Scored>,
    bins: &mut Vec<f64>,
) {
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

/// Writes the `k` tokens with the largest logits to `ranking`, best first, in one pass. Tokens better than the `k`th so far
/// are collected, and the best are selected among them when the buffer is full. Tokens at `-inf` are skipped.
pub(super) fn best_k(logits: &[f32], k: usize, ranking: &mut Vec<Scored>) {
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
