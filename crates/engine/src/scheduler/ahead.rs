//! Planning one step ahead. While a device computes a step in which all sequences decode and the queue is empty, the
//! next step is planned and submitted: each sequence gets one more row, whose token the device knows before the host.
//! The row of a sequence that has ended meanwhile is dropped. Its pages can be reused at once, because steps run in the
//! order of their plans. No step is planned ahead if a sequence will probably have a [draft](super::drafts) then, because a
//! draft continues a text that the host knows.

use paguro_backend::{Carried, Output, OutputKind, StateUse, Step};

use super::Scheduler;
use crate::{
    layout::BlockLayout,
    sequence::{Sequence, SequenceOutputs},
};

impl Scheduler {
    /// Plans the step after the planned one, if its rows are known: the queue is empty, and every continuing sequence
    /// has one row whose token the device `carries`. Returns true if the step was planned.
    pub fn plan_ahead(&mut self, carries: impl Fn(&OutputKind<'_>) -> bool) -> bool {
        let may_go_on = |sequence: &Sequence| {
            let request = sequence.sample_request(sequence.branches.start, sequence.tokens.len());
            // The state at the end of a block is copied before the next row changes it.
            let is_copied = sequence.ends_at_checkpoint(&self.layout);
            request.mask.is_none()
                && !sequence.sampler.depends_on_next()
                && !is_copied
                && carries(&OutputKind::Sample(request))
        };
        let go_on = || self.running.iter().filter(|sequence| !sequence.ends());
        let pages = || go_on().map(|sequence| pages_ahead(sequence, &self.layout)).sum::<usize>();
        if !self.waiting.is_empty()
            || !self.saves.moves.is_empty()
            || !self.running.iter().all(Sequence::has_one_output)
            || go_on().next().is_none()
            || !go_on().all(may_go_on)
            || pages() > self.pages.available()
            || self.will_draft()
        {
            return false;
        }
        let Self { running, layout, pages, plan, next_plan, .. } = self;
        next_plan.clear();
        let mut cursor = plan.cursor();
        for sequence in running {
            let (output, _) = cursor.of(sequence);
            if !sequence.ends() {
                let position = sequence.kv.computed + sequence.planned.rows;
                sequence.kv.extend(position + 1, layout, pages);
                sequence.planned.ahead = 1;
                next_plan.carried.push(Carried { row: next_plan.tokens.len(), output: output.start });
                let state = sequence.kv.state.map(|state| StateUse::in_place(state.write));
                let outputs = SequenceOutputs::samples(position..position + 1, sequence.branches.clone());
                next_plan.add(sequence, position, &[0], state, outputs);
            }
        }
        self.step += 1;
        self.is_ahead = true;
        true
    }

    /// Writes the outputs of the step that was planned ahead.
    pub fn write_outputs_ahead<'a>(&'a self, outputs: &mut Vec<Output<'a>>) {
        self.next_plan.write_outputs(&self.running, outputs);
    }

    /// Returns the step that was planned ahead, with these outputs.
    pub fn step_ahead<'a>(&'a self, outputs: &'a [Output<'a>]) -> Step<'a> {
        self.next_plan.step(outputs)
    }
}

/// Returns the number of pages to reserve before the row after the planned ones.
fn pages_ahead(sequence: &Sequence, layout: &BlockLayout) -> usize {
    sequence.kv.pages_up_to(sequence.kv.computed + sequence.planned.rows + 1, layout)
}
