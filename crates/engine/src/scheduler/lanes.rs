//! Steps in flight at the same time. A device of several stages computes as many as it has stages
//! ([`Runner::lanes`](paguro_backend::Runner::lanes)): while the second stage computes one step, the first one computes the next.
//! So a plan has to leave sequences for the other steps.
//!
//! - A step has at most its share of the decoding sequences: all of them, divided by the number of lanes.
//! - A sequence with rows in flight has none in the next step, except for the next chunk of its prompt, and for the token of the oldest
//!   step if the device [carries](super::ahead) it.
//! - A chunk follows the one before only if the host needs no results of that: scores, embeddings, states for checkpoints, branches that
//!   separate.
//! - No sequence loses its place or its pages while steps are in flight. If others need them, no step is planned until all steps in
//!   flight are computed. Then the plan is that of a device with one lane.
//! - With a model that drafts, there is one lane. Drafts from texts, grammars, pictures and loads need no rule: they are properties of
//!   sequences without rows in flight.
//!
//! Every stage runs steps and copies of pages in the order of the plans. So a page that is released can be reused by the next
//! plan, as it can by a step that is planned [ahead](super::ahead).

use super::{Scheduler, buffers::PlannedStep};
use crate::{layout::BlockLayout, sequence::Sequence};

impl Sequence {
    /// Returns true if it may have rows after those in flight, before their results are known.
    pub(super) fn may_continue(&self, layout: &BlockLayout) -> bool {
        let reports = !self.unscored().is_empty() || !self.unembedded().is_empty();
        let separates = self.branches.len() > 1 && self.unplanned() == 1;
        let needs_results =
            reports || separates || self.drafts.rows.is_some() || self.ends_at_checkpoint(layout);
        self.planned.rows == 0 || self.planned.drafted == 0 && self.unplanned() > 0 && !needs_results
    }
}

impl Scheduler {
    /// Begins the plan of the next step. The step that was planned before, if it is not computed yet, is in flight.
    pub(super) fn begin_plan(&mut self) {
        let next = self.spare.pop().unwrap_or_default();
        let last = std::mem::replace(&mut self.plan, next);
        if !last.is_empty() {
            self.in_flight.push_back(last);
        }
        self.plan.clear();
    }

    /// Returns true if a planned step is not computed yet.
    pub(super) fn is_computing(&self) -> bool {
        !self.in_flight.is_empty() || !self.plan.is_empty()
    }

    /// Returns the number of decoding sequences that a step may have.
    pub(super) fn decoding_in_lane(&self) -> usize {
        match self.lanes {
            1 => usize::MAX,
            lanes => {
                self.running.iter().filter(|sequence| !sequence.prefills()).count().div_ceil(lanes).max(1)
            }
        }
    }

    /// Returns the number of decoding sequences in flight, whose next tokens wait for the step that is being planned.
    pub(super) fn decoding_in_other_lanes(&self) -> usize {
        let decodes = |sequence: &&Sequence| sequence.planned.rows > 0 && !sequence.prefills();
        if self.lanes > 1 { self.running.iter().filter(decodes).count() } else { 0 }
    }
}

impl PlannedStep {
    /// Returns true if no rows are planned.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}
