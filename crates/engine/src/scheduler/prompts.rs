//! Rows of prompts in a step; see [`rows`](super::rows).

use super::{Scheduler, rows::Budget};
use crate::cost::Work;

/// Rows of shorter prompts that a long one always lets pass.
const SHORT_ROWS: usize = 128;
/// Inverse of the fraction of a long prompt's rows that shorter ones get.
const SHORT_SHARE: usize = 8;

impl Scheduler {
    /// Grants rows to prompts of one tenant, given in order of age.
    pub(super) fn share_among_prompts(&mut self, prompts: &[usize], budget: &mut Budget) {
        let Some((&oldest, younger)) = prompts.split_first() else { return };
        let long = &self.running[oldest];
        let mut may_pass =
            (SHORT_ROWS + long.next_position() / SHORT_SHARE).saturating_sub(long.sched.overtaken);
        let remaining = long.unplanned();
        let mut shorter: Vec<_> = younger.to_vec();
        shorter.retain(|&index| self.running[index].unplanned() < remaining);
        shorter.sort_by_key(|&index| self.running[index].unplanned());
        for index in shorter {
            let rows = self.grant(index, may_pass, budget);
            may_pass -= rows;
            self.running[oldest].sched.overtaken += rows;
        }
        for &index in prompts {
            self.grant(index, usize::MAX, budget);
        }
    }

    /// Grants a prompt up to `most` of the remaining rows, unless it already has some. Returns their number.
    fn grant(&mut self, index: usize, most: usize, budget: &mut Budget) -> usize {
        let sequence = &self.running[index];
        if sequence.planned.granted > 0 {
            return 0;
        }
        let start = sequence.next_position();
        let to_checkpoint = sequence.next_checkpoint(&self.layout).map(|tokens| tokens - start);
        let is_ahead = budget.is_ahead || sequence.planned.rows > 0;
        let plannable = match is_ahead && sequence.branches.len() > 1 {
            // The last row is left to a step after which the branches separate.
            true => sequence.plannable().min(sequence.unplanned() - 1),
            false => sequence.plannable(),
        };
        let most = most.min(to_checkpoint.unwrap_or(usize::MAX)).min(plannable).min(budget.rows);
        let in_time = self.cost.rows_within(budget.work, start, most, budget.time);
        let rows = in_time.max(most.min(budget.least));
        let rows = match (self.layout.is_whole, sequence.remaining()) {
            (false, _) => rows,
            // A step without anything else takes as long as it takes.
            (true, all) if most == all && (rows == all || budget.work == Work::default()) => all,
            (true, _) => 0,
        };
        let fits = |rows: &usize| sequence.outputs_in(*rows) <= budget.outputs;
        let rows = (0..=rows).rev().find(fits).unwrap_or(0);
        let rows = match self.layout.has_spans && rows > 0 {
            true => Some(sequence.uncut(rows, most)).filter(fits).unwrap_or(0),
            false => rows,
        };
        budget.rows -= rows;
        budget.outputs -= sequence.outputs_in(rows);
        budget.least = budget.least.saturating_sub(rows);
        budget.work = budget.work.and(start, rows);
        self.running[index].planned.granted = rows;
        rows
    }
}
