//! Lengths of the drafts of a step.
//!
//! A draft of a sequence makes its tokens of this step more, and the step longer for all sequences. The lengths with the
//! largest product of all rates (tokens of a sequence by the time of the step) are chosen, among those with which no rate
//! falls noticeably. For one sequence, that is its rate; among several, none gains at the cost of another. If a device is
//! full, so that a row more costs as much time as any other, no draft pays, because a drafted row may fail.
//!
//! Chances and times are estimates. So a step with drafts may only take longer than one without by the [`Credit`] of its
//! sequences.

use crate::cost::Work;

/// Least gain for which a sequence has a draft: the relative increase of the rate that is expected.
const LEAST_GAIN: f64 = 0.03;

/// Least rate of a sequence, as a part of its rate without drafts.
pub(crate) const LEAST_RATE: f64 = 0.97;

/// Seconds by which drafts may delay a sequence: those that they have saved it so far, and the part of its time that it may
/// lose. So a sequence has never lost more than that, even if all drafts fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub(crate) struct Credit(pub f64);

impl Credit {
    /// Accounts for a step of `seconds` that gave `tokens` tokens, each of which would have taken `plain` seconds.
    pub fn count(&mut self, tokens: usize, plain: f64, seconds: f64) {
        self.0 += plain * tokens as f64 / LEAST_RATE - seconds;
    }
}

/// A draft that a sequence could have.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Candidate {
    /// Position of its first drafted row.
    pub start: usize,
    /// Chance of each token that it and all tokens before it are accepted, so in descending order.
    pub chances: Vec<f64>,
}

/// Returns the length of each candidate's draft, in a step that has `work` for `sequences` sequences without drafts. At most
/// `most` rows are added, which take at most the `credit`. `seconds` estimates the time of a step, if it is known, and `drafting`
/// the time of a model that drafts, from the length of each draft.
pub(crate) fn choose(
    candidates: &[Candidate],
    sequences: usize,
    work: Work,
    most: usize,
    credit: Credit,
    seconds: impl Fn(Work) -> Option<f64>,
    drafting: impl Fn(&[usize]) -> f64,
) -> Vec<usize> {
    let mut lengths = vec![0; candidates.len()];
    let Some(alone) = seconds(work).filter(|&alone| alone > 0.0) else { return lengths };
    let mut rows: Vec<(f64, usize, usize)> = Vec::new();
    for (index, candidate) in candidates.iter().enumerate() {
        let mut expected = 1.0;
        for (length, chance) in candidate.chances.iter().enumerate() {
            // The logarithm of the factor by which the row raises the expected tokens. It falls from row to row.
            rows.push(((chance / expected).ln_1p(), index, length));
            expected += chance;
        }
    }
    rows.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    rows.truncate(most);
    let (mut work, mut gain, mut best) = (work, 0.0, (0.0, 0));
    let (mut expected, mut chosen) = (vec![1.0; candidates.len()], vec![0; candidates.len()]);
    let mut drafts = 0;
    for (count, &(of_row, index, length)) in rows.iter().enumerate() {
        work = work.and(candidates[index].start + length, 1);
        let Some(checking) = seconds(work) else { break };
        chosen[index] = length + 1;
        let time = checking + drafting(&chosen);
        let at_risk = time - alone;
        gain += of_row;
        drafts += usize::from(length == 0);
        expected[index] += candidates[index].chances[length];
        let net = gain - sequences as f64 * (time / alone).ln() - LEAST_GAIN * drafts as f64;
        let others = if candidates.len() < sequences { 1.0 } else { f64::INFINITY };
        let slowest = expected.iter().copied().fold(others, f64::min) * alone / time;
        if net > best.0 && slowest >= LEAST_RATE && at_risk <= credit.0.max(0.0) {
            best = (net, count + 1);
        }
    }
    rows[..best.1].iter().for_each(|&(_, index, _)| lengths[index] += 1);
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    const RICH: Credit = Credit(f64::INFINITY);

    /// Drafts that take no time.
    const FREE: fn(&[usize]) -> f64 = |_| 0.0;

    fn candidate(chance: f64, most: usize) -> Candidate {
        let chances = (1..=most).map(|length| chance.powi(length as i32)).collect();
        Candidate { start: 100, chances }
    }

    /// Chooses for candidates of these chances beside as many sequences in all, on a device with a constant time and a
    /// time per row.
    fn chosen(chances: &[f64], sequences: usize, constant: f64, row: f64) -> Vec<usize> {
        let candidates: Vec<_> = chances.iter().map(|&chance| candidate(chance, 15)).collect();
        let work = (0..sequences).fold(Work::default(), |work, _| work.and(100, 1));
        choose(&candidates, sequences, work, 64, RICH, |work| Some(constant + row * work.rows), FREE)
    }

    #[test]
    fn lengths_follow_from_chances_and_times() {
        // Rows are free.
        assert_eq!(chosen(&[0.9], 1, 1.0, 0.0), [15]);
        // A row costs a quarter of a step.
        assert_eq!(chosen(&[0.2], 1, 0.75, 0.25), [0]);
        let length = chosen(&[0.7], 1, 0.75, 0.25)[0];
        assert!((1..=3).contains(&length), "{length}");
        assert!(chosen(&[0.98], 1, 0.75, 0.25)[0] > 8);
        // The device is full: every row costs the same.
        assert_eq!(chosen(&[0.99], 1, 0.0, 1.0), [0]);
        assert_eq!(chosen(&[0.95; 32], 32, 1.0, 1.0), [0; 32]);
    }

    #[test]
    fn a_sequence_does_not_gain_at_the_cost_of_many_others() {
        assert!(chosen(&[0.9], 1, 0.9, 0.1)[0] > 3);
        assert_eq!(chosen(&[0.9], 8, 0.9, 0.1), [0]);
        // All of them gain.
        assert!(chosen(&[0.9; 8], 8, 0.9, 0.1).iter().all(|&length| length >= 1));
        assert_eq!(chosen(&[0.9; 7], 8, 0.9, 0.1), [0; 7]);
        // A draft that costs the others next to nothing.
        assert!(chosen(&[0.9], 8, 1.0, 0.001)[0] > 8);
    }

    /// Compares with all lengths of one sequence, for random chances and times of any shape.
    #[test]
    fn the_best_length_of_one_sequence_is_chosen() {
        let mut seed = 1_u64;
        let mut draw = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f64 / f64::from(1 << 24)
        };
        for _ in 0..300 {
            let mut chance = 1.0;
            let chances: Vec<f64> = (0..12)
                .map(|_| {
                    chance *= 1.0 - 0.5 * draw();
                    chance
                })
                .collect();
            let mut time = 1.0;
            let times: Vec<f64> = (0..14)
                .map(|_| {
                    time += if draw() < 0.5 { 0.0 } else { 0.6 * draw() };
                    time
                })
                .collect();
            let seconds = |work: Work| Some(times[work.rows as usize]);
            let candidate = Candidate { start: 0, chances: chances.clone() };
            let work = Work::default().and(0, 1);
            let length = choose(&[candidate], 1, work, 99, RICH, seconds, FREE)[0];
            let rate = |length: usize| (1.0 + chances[..length].iter().sum::<f64>()) / times[1 + length];
            let best = (0..=12).map(rate).fold(0.0, f64::max);
            let allowed = if length == 0 { LEAST_GAIN } else { 1e-9 };
            assert!(rate(length) >= best * (1.0 - allowed), "{length}: {} < {best}", rate(length));
        }
    }

    #[test]
    fn a_model_that_drafts_costs_its_time() {
        let length = |drafting: f64| {
            let work = Work::default().and(100, 1);
            let seconds = |work: Work| Some(0.95 + 0.05 * work.rows);
            choose(&[candidate(0.8, 8)], 1, work, 64, RICH, seconds, |lengths| drafting * lengths[0] as f64)
                [0]
        };
        assert!(length(0.0) > length(0.1) && length(0.1) > 1, "{} {}", length(0.0), length(0.1));
        assert_eq!(length(0.9), 0);
    }

    #[test]
    fn drafts_risk_no_more_than_the_credit() {
        let length = |credit: f64| {
            let work = Work::default().and(100, 1);
            choose(
                &[candidate(0.99, 15)],
                1,
                work,
                64,
                Credit(credit),
                |work| Some(0.9 + 0.1 * work.rows),
                FREE,
            )[0]
        };
        assert_eq!([-1.0, 0.0, 0.11, 0.51, 9.0].map(length), [0, 0, 1, 5, 15]);
    }

    /// Whatever is drafted and accepted, a sequence keeps its rate.
    #[test]
    fn a_sequence_loses_no_more_than_its_share_even_if_all_drafts_fail() {
        let (mut credit, mut lost, mut steps) = (Credit::default(), 0.0, 0.0);
        for _ in 0..1000 {
            let candidate = candidate(0.9, 15);
            let time = |work: Work| 0.9 + 0.1 * work.rows;
            let length = choose(
                &[candidate],
                1,
                Work::default().and(100, 1),
                64,
                credit,
                |work| Some(time(work)),
                FREE,
            )[0];
            let seconds = 1.0 + 0.1 * length as f64;
            credit.count(1, 1.0, seconds);
            (lost, steps) = (lost + seconds - 1.0, steps + 1.0);
            assert!(steps / (steps + lost) >= LEAST_RATE, "{lost} after {steps}");
        }
        assert!(lost > 10.0, "{lost}");
    }

    #[test]
    fn nothing_is_drafted_while_times_are_unknown() {
        let work = Work::default().and(0, 1);
        assert_eq!(choose(&[candidate(0.99, 5)], 1, work, 64, RICH, |_| None, FREE), [0]);
        assert_eq!(choose(&[candidate(0.99, 5)], 1, work, 0, RICH, |_| Some(1.0), FREE), [0]);
    }
}
