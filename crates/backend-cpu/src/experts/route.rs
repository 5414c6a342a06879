//! Choice of experts.

use paguro_backend::{ExpertGroups, Router, Scores};

/// Chooses the experts of a row from its logits, see [`Router`]. In double precision, because there are few. `ranks`
/// has room for a number per expert.
pub(super) fn choose(
    logits: &[f32],
    ranks: &mut [f32],
    router: &Router,
    selection_bias: Option<&[f32]>,
    ids: &mut [u32],
    weights: &mut [f32],
) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp = |logit: f32| f64::from(logit - largest).exp();
    let total: f64 = match router.scores {
        Scores::Softmax => logits.iter().map(|&logit| exp(logit)).sum(),
        Scores::Sigmoid => 1.0,
    };
    let score = |logit: f32| match router.scores {
        Scores::Softmax => exp(logit) / total,
        Scores::Sigmoid => 1.0 / (1.0 + (-f64::from(logit)).exp()),
    };
    // Without a bias, logits have the same order as scores.
    if selection_bias.is_none() && router.groups.is_none() {
        largest_of(logits, ids);
    } else {
        let ranks = &mut ranks[..logits.len()];
        for (index, (rank, &logit)) in ranks.iter_mut().zip(logits).enumerate() {
            *rank = score(logit) as f32 + selection_bias.map_or(0.0, |bias| bias[index]);
        }
        if let Some(groups) = router.groups {
            keep_groups(ranks, groups);
        }
        largest_of(ranks, ids);
    }
    let scores = |id: u32| score(logits[id as usize]);
    let divisor = match router.renormalize {
        true => ids.iter().map(|&id| scores(id)).sum::<f64>().max(f64::from(f32::MIN_POSITIVE)),
        false => 1.0,
    };
    for (weight, &id) in weights.iter_mut().zip(&*ids) {
        *weight = (scores(id) / divisor * f64::from(router.factor)) as f32;
    }
}

/// Lowers the ranks of experts whose groups are not used below all others.
fn keep_groups(ranks: &mut [f32], ExpertGroups { count, used, best }: ExpertGroups) {
    let size = ranks.len() / count;
    // The sum of the best, counted down from all of a group: groups are small.
    let score = |group: usize| -> f64 {
        let ranks = &ranks[group * size..(group + 1) * size];
        let is_best = |&(index, rank): &(usize, &f32)| {
            let better = |(other, other_rank): (usize, &f32)| {
                other_rank > rank || (other_rank == rank && other < index)
            };
            ranks.iter().enumerate().filter(|&other| better(other)).count() < best
        };
        ranks.iter().enumerate().filter(is_best).map(|(_, &rank)| f64::from(rank)).sum()
    };
    let scores: Vec<f64> = (0..count).map(score).collect();
    for group in 0..count {
        let better = |other: &usize| {
            scores[*other] > scores[group] || (scores[*other] == scores[group] && *other < group)
        };
        if (0..count).filter(better).count() >= used {
            ranks[group * size..(group + 1) * size].fill(f32::NEG_INFINITY);
        }
    }
}

/// Fills `ids` with the indices of the largest numbers, in ascending order; among equals, the lowest indices count.
fn largest_of(ranks: &[f32], ids: &mut [u32]) {
    // An insertion sort: the first `chosen` are descending in rank, and among equals ascending in index.
    let mut chosen = 0;
    for (index, &rank) in ranks.iter().enumerate() {
        let better = |&&id: &&u32| ranks[id as usize] >= rank;
        let at = ids[..chosen].iter().take_while(better).count();
        if at < ids.len() {
            chosen = (chosen + 1).min(ids.len());
            ids.copy_within(at..chosen - 1, at + 1);
            ids[at] = index as u32;
        }
    }
    ids.sort_unstable();
}

#[cfg(test)]
mod tests {
    use paguro_backend::{Linear, MatrixId, reference::ops};
    use paguro_backend_conformance::Rng;

    use super::*;

    #[test]
    fn choices_are_those_of_the_reference() {
        let mut rng = Rng::new(1);
        for (count, used) in [(1, 1), (4, 1), (8, 2), (8, 8), (60, 4), (512, 16)] {
            let groups = |count, used, best| Some(ExpertGroups { count, used, best });
            for (scores, renormalize, biased, groups) in [
                (Scores::Softmax, true, false, None),
                (Scores::Softmax, false, true, None),
                (Scores::Sigmoid, true, true, None),
                (Scores::Sigmoid, true, true, groups(4, 2, 2)),
                (Scores::Softmax, false, false, groups(4, 3, 1)),
            ] {
                let size = groups.map_or(count, |groups| count / groups.count);
                let fits = |groups: ExpertGroups| size >= groups.best && used <= size * groups.used;
                if groups.is_some_and(|groups| !count.is_multiple_of(groups.count) || !fits(groups)) {
                    continue;
                }
                let linear = Linear { matrix: MatrixId(0), bias: None, bounds: None };
                let router = Router {
                    norm: None,
                    linear,
                    scores,
                    selection_bias: None,
                    groups,
                    used,
                    renormalize,
                    factor: 1.5,
                    expert_scale: None,
                };
                // Some are equal.
                let logits: Vec<f32> = (0..count).map(|_| (rng.normal() * 4.0).round() / 2.0).collect();
                let bias: Option<Vec<f32>> = biased.then(|| (0..count).map(|_| rng.normal()).collect());
                let expected = ops::route(&logits, &router, bias.as_deref());
                let (mut ids, mut weights) = (vec![0; used], vec![0.0; used]);
                let mut ranks = vec![0.0; count];
                choose(&logits, &mut ranks, &router, bias.as_deref(), &mut ids, &mut weights);
                for (index, (expert, weight)) in expected.into_iter().enumerate() {
                    assert_eq!(ids[index] as usize, expert, "{used} of {count}");
                    assert!((weights[index] - weight).abs() < 1e-6, "{} is not {weight}", weights[index]);
                }
            }
        }
    }
}
