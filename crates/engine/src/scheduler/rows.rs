//! Rows of a step. Decoding sequences get one row each; prompts get the rest, limited by the step time that is
//! predicted from [measured times](crate::cost).
//!
//! - Beside decoding sequences, a step with a prompt's chunk takes `step_time`, or half of that more than the decoding
//!   alone. Without them it takes four times `step_time`, so that new requests do not wait for long; or eight times the
//!   constant time of a step, so that little of its time is spent reading the weights.
//! - If the decoding sequences would take more than twice `step_time` and four times that of one, and their tenants or
//!   requests have unequal numbers of them, only some get rows: those of the tenant with the fewest tokens so far, then
//!   of the request with the fewest branches, then those with the longest wait.
//! - On a device with several [lanes](super::lanes), decoding sequences are divided among its steps.
//! - A row that samples needs the mask of its grammar. Before the mask is known, a decoding sequence gets no row, and a
//!   prompt all rows except for the last one.
//! - Texts of encoders get all of their rows in one step. One that would make the step too long waits for the next step,
//!   unless it is the first one.
//! - Among prompts, priority decides first, then the tenant with the fewest tokens so far. Within a tenant the oldest
//!   prompt is first, but shorter ones overtake it as long as it loses at most 128 rows and an eighth of its computed
//!   rows ([`prompts`](super::prompts)).

use std::{cmp::Reverse, collections::BTreeMap};

use super::Scheduler;
use crate::{cost::Work, sequence::Sequence};

/// Rows that prompts get at least, as long as others decode.
const LEAST_ROWS: usize = 4;

/// Rest of a step's budget, for prompts.
pub(super) struct Budget {
    pub rows: usize,
    /// Scores and embeddings.
    pub outputs: usize,
    /// Work of the step so far.
    pub work: Work,
    /// Maximum seconds of the step.
    pub time: f64,
    /// Rows that are granted regardless of the time.
    pub least: usize,
    /// True for a step planned [ahead](super::ahead), whose plan separates no branches.
    pub is_ahead: bool,
}

impl Scheduler {
    /// Grants rows to the running sequences.
    pub(super) fn share_rows(&mut self) {
        self.running.iter_mut().for_each(|sequence| sequence.planned.granted = 0);
        let all = || self.running.iter().enumerate();
        let decodes = |sequence: &Sequence| !sequence.prefills_next() && sequence.plannable() > 0;
        let prefills = |sequence: &Sequence| sequence.prefills_next();
        let free = |(_, sequence): &(usize, &Sequence)| sequence.may_continue(&self.layout);
        let (decoding, others): (Vec<_>, Vec<_>) =
            all().filter(free).partition(|(_, sequence)| decodes(sequence));
        let decoding = decoding.into_iter().map(|(index, _)| index).collect();
        let prompts = others.into_iter().filter(|(_, sequence)| prefills(sequence));
        let prompts = prompts.map(|(index, _)| index).collect();
        let (decoding, work) = self.share_among_decoding(decoding, self.decoding_in_lane());
        self.share_rest(decoding, work, prompts, false);
    }

    /// Grants the rest of a step, in which `decoding` sequences have rows with this `work`, to prompts. `is_ahead` is that of the
    /// [budget](Budget).
    pub(super) fn share_rest(
        &mut self,
        decoding: usize,
        work: Work,
        mut prompts: Vec<usize>,
        is_ahead: bool,
    ) {
        let alone = self.cost.seconds(work);
        let time = match decoding + self.decoding_in_other_lanes() {
            0 => (4.0 * self.step_time).max(8.0 * self.cost.seconds(Work::default())),
            _ => self.step_time.max(alone + self.step_time / 2.0),
        };
        let mut budget = Budget {
            rows: self.limits.max_rows - decoding,
            outputs: self.limits.max_outputs - self.limits.max_sequences - self.hidden_outputs(),
            work,
            time,
            least: LEAST_ROWS,
            is_ahead,
        };
        prompts.sort_by_key(|&index| {
            let sequence = &self.running[index];
            // (By name as well, so that tenants with equally many tokens stay apart.)
            (
                Reverse(sequence.sched.priority),
                self.ledger.of(&sequence.request.tenant),
                &sequence.request.tenant,
                index,
            )
        });
        let same = |a: &usize, b: &usize| {
            let (a, b) = (&self.running[*a], &self.running[*b]);
            (a.sched.priority, &a.request.tenant) == (b.sched.priority, &b.request.tenant)
        };
        let tenants: Vec<Vec<usize>> = prompts.chunk_by(same).map(<[usize]>::to_vec).collect();
        for prompts in tenants {
            self.share_among_prompts(&prompts, &mut budget);
        }
    }

    /// Grants a row to each of these decoding sequences, or to as many as fit into the time, but to `most` at most. Returns their
    /// number and work.
    pub(super) fn share_among_decoding(&mut self, mut decoding: Vec<usize>, most: usize) -> (usize, Work) {
        let mut branches: BTreeMap<u64, usize> = BTreeMap::new();
        for &index in &decoding {
            *branches.entry(self.running[index].request.id).or_default() += 1;
        }
        decoding.sort_by_cached_key(|&index| {
            let sequence = &self.running[index];
            let tokens = self.ledger.of(&sequence.request.tenant);
            (
                Reverse(sequence.sched.priority),
                tokens,
                branches[&sequence.request.id],
                sequence.sched.last_step,
                index,
            )
        });
        let kind = |index: &usize| {
            let request = &self.running[*index].request;
            (&request.tenant, branches[&request.id])
        };
        let all_equal = decoding.iter().all(|index| kind(index) == kind(&decoding[0]));
        let (mut granted, mut work, mut time) = (0, Work::default(), f64::INFINITY);
        for index in decoding.into_iter().take(most) {
            let sequence = &mut self.running[index];
            let more = work.and(sequence.next_position(), 1);
            if self.cost.seconds(more) > time {
                break;
            }
            if granted == 0 && !all_equal {
                time = (2.0 * self.step_time).max(4.0 * self.cost.seconds(more));
            }
            sequence.planned.granted = 1;
            (granted, work) = (granted + 1, more);
        }
        (granted, work)
    }
}
