//! Planning one step ahead. While a device computes a step in which all sequences decode and the queue is empty, the
//! next step is planned and submitted: each sequence gets one more row, whose token the device knows before the host.
//! The row of a sequence that has ended meanwhile is dropped. Its pages can be reused at once, because steps run in the
//! order of their plans.

use paguro_backend::{Carried, Output, OutputKind, StateUse, Step};

use super::Scheduler;
use crate::{
    sequence::{Sequence, SequenceOutputs},
    thought::Thought,
};

impl Scheduler {
    /// Plans the step after the planned one, if its rows are known: the queue is empty, and every continuing sequence
    /// has one row whose token the device `carries`. Returns true if the step was planned.
    pub fn plan_ahead(&mut self, carries: impl Fn(&OutputKind<'_>) -> bool) -> bool {
        let may_go_on = |sequence: &Sequence| {
            let request = sequence.sample_request(sequence.branches.start, true);
            let closes = sequence.thought.as_ref().is_some_and(Thought::may_close);
            // The state at the end of a block is copied before the next row changes it.
            let is_copied = sequence.ends_at_checkpoint(&self.layout);
            // The mask of a grammar depends on the token before it.
            sequence.guide.is_none()
                && request.mask.is_none()
                && !closes
                && !is_copied
                && carries(&OutputKind::Sample(request))
        };
        let go_on = || self.running.iter().filter(|sequence| !sequence.ends());
        let pages = || go_on().map(|sequence| sequence.pages_ahead(&self.layout)).sum::<usize>();
        if !self.waiting.is_empty()
            || !self.saves.moves.is_empty()
            || !self.running.iter().all(Sequence::has_one_output)
            || go_on().next().is_none()
            || !go_on().all(may_go_on)
            || pages() > self.pages.available()
        {
            return false;
        }
        let Self { running, layout, pages, plan, next_plan, .. } = self;
        next_plan.clear();
        let mut cursor = plan.cursor();
        for sequence in running {
            let output = cursor.of(sequence).start;
            if !sequence.ends() {
                sequence.reserve_ahead(layout, pages);
                let row = next_plan.tokens.len();
                next_plan.carried.push(Carried { row, output });
                let state = sequence.state.map(|state| StateUse::in_place(state.write));
                let outputs = SequenceOutputs::sample(sequence.branches.start);
                next_plan.add(sequence, sequence.computed + sequence.rows, &[0], state, outputs, layout);
            }
        }
        self.step += 1;
        self.is_ahead = true;
        true
    }

    /// Writes the outputs of the step that was planned ahead.
    pub fn write_outputs_ahead<'a>(&'a self, outputs: &mut Vec<Output<'a>>) {
        let ahead = self.running.iter().filter(|sequence| sequence.ahead);
        outputs.extend(ahead.enumerate().map(|(row, sequence)| {
            let request = sequence.sample_request(sequence.branches.start, true);
            Output { row, kind: OutputKind::Sample(request) }
        }));
    }

    /// Returns the step that was planned ahead, with these outputs.
    pub fn step_ahead<'a>(&'a self, outputs: &'a [Output<'a>]) -> Step<'a> {
        self.next_plan.step(&[], outputs)
    }
}
