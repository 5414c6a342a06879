//! Planning one step ahead. While a device computes a step, the next one is planned and submitted, so the device does not
//! wait for the host. Its rows follow from the [kind](Next) of each sequence:
//!
//! | Sequence | Rows in the next step |
//! |-|-|
//! | samples a token that the device carries | one, whose token the device knows before the host |
//! | has its last rows in a step of another [lane](super::lanes) | the next chunk of its prompt, or none |
//! | has a prompt to compute, with or without a chunk in the running step | a chunk |
//! | has left the running step out, and its mask is known | one, whose token the host knows |
//! | samples a token on which the next mask depends: a grammar, the end of reasoning | none: it is held, and has a row in the step after |
//! | certainly ends with the running step, or waits for a late mask | none |
//!
//! Requests leave the queue as in any other step. Some work needs the results of the running step. Then no step is planned
//! ahead, and the next one is planned in full:
//!
//! - preemption for a waiting sequence or for pages;
//! - sequences whose tokens the device does not carry, rows of pictures, scores, embeddings, separating branches, and more held ones than one in
//!   [`HELD_SHARE`], each of which would lose every second step for a short wait of the device;
//! - copies of states and pages, and a search in other tiers;
//! - decoding sequences for which there is no time in every step.
//!
//! The row of a sequence that has ended meanwhile is dropped. Its pages can be reused at once, because steps run in the
//! order of their plans. No step is planned ahead if a sequence will probably have a [draft](super::drafts) then, because a
//! draft continues a text that the host knows.
//!
//! With several lanes, the running step is the oldest one in flight, whose sequences go on in the step that is planned.
//!
//! The CPU backend computes on threads of the host and carries no tokens, so nothing is planned ahead there.

use std::time::Instant;

use paguro_backend::{Carried, OutputKind, SampleRequest, StateUse};

use super::{Scheduler, queue::Choice};
use crate::{
    sequence::{Sequence, SequenceOutputs},
    tiers::Load,
};

/// Number of sequences with carried tokens for each one that is held.
const HELD_SHARE: usize = 16;

/// Part of a sequence in the step after the running one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// A row for the token that the running step samples.
    Carried,
    /// Rows for tokens that are known.
    Known,
    /// No row, although it could have one after the results of the running step.
    Held,
    /// No row in any case.
    None,
}

impl Scheduler {
    /// Plans the step that follows the oldest one in flight, in which the device `carries` some tokens; see the [module](self). Requests
    /// that leave the queue start at `now`. Returns true if the step was planned.
    pub fn plan_ahead(&mut self, now: Instant, carries: impl Fn(&OutputKind<'_>) -> bool) -> bool {
        self.read_for_drafts();
        let has_draft = self.running.iter().any(|sequence| sequence.planned.drafted > 0);
        if has_draft || self.will_draft() {
            return false;
        }
        if !self.saves.moves.is_empty() || !self.may_run_ahead(&carries) || !self.admit_ahead(now) {
            return false;
        }
        let next = self.kinds(&carries).map(|next| next.unwrap_or(Next::Held)).collect::<Vec<_>>();
        if !self.share_rows_ahead(&next) {
            return false;
        }
        if !self.has_pages_for_granted() {
            return false;
        }
        self.write_plan_ahead(&next);
        self.step += 1;
        true
    }

    /// Returns true if the running sequences allow a step ahead: at least one is carried, and few are held.
    fn may_run_ahead(&self, carries: &impl Fn(&OutputKind<'_>) -> bool) -> bool {
        let (mut carried, mut held) = (0, 0);
        for next in self.kinds(carries) {
            match next {
                Some(Next::Carried) => carried += 1,
                Some(Next::Held) => held += 1,
                Some(Next::Known | Next::None) => {}
                None => return false,
            }
        }
        carried > 0 && held * HELD_SHARE <= carried
    }

    /// Returns the part of each running sequence in the next step, as [`Scheduler::next`] does.
    fn kinds(&self, carries: &impl Fn(&OutputKind<'_>) -> bool) -> impl Iterator<Item = Option<Next>> {
        let mut cursor = self.in_flight.front().unwrap_or(&self.plan).cursor();
        self.running.iter().map(move |sequence| {
            let rows = cursor.of(sequence).map_or(0, |(_, owner)| owner.rows);
            self.next(sequence, rows < sequence.planned.rows, carries)
        })
    }

    /// Returns the part of a sequence in the next step; `None` if that step cannot be planned ahead. `in_other_lane` says that rows of it
    /// are in flight in other steps than the oldest one.
    fn next(
        &self,
        sequence: &Sequence,
        in_other_lane: bool,
        carries: &impl Fn(&OutputKind<'_>) -> bool,
    ) -> Option<Next> {
        if in_other_lane && !sequence.may_continue(&self.layout) {
            return Some(Next::None);
        }
        let is_in_flight = sequence.planned.rows > 0;
        let reports = !sequence.unscored().is_empty() || !sequence.unembedded().is_empty();
        // The state at the end of a block is copied before the next row changes it.
        let is_copied = is_in_flight && sequence.ends_at_checkpoint(&self.layout);
        let has_pictures = sequence.has_pictures_after(sequence.next_position());
        if is_copied || has_pictures || reports && !is_in_flight {
            return None;
        }
        let position = sequence.tokens.len();
        let request = sequence.sample_request(sequence.branches.start, position);
        let (has_mask, any) = (request.mask.is_some(), SampleRequest { mask: None, ..request });
        let is_carried = carries(&OutputKind::Sample(any));
        if is_in_flight && sequence.unplanned() == 0 {
            if sequence.ends() || !sequence.samples() {
                return Some(Next::None);
            }
            if !is_carried {
                return None;
            }
            let follows = sequence.has_one_output() && !has_mask && !sequence.sampler.depends_on_next();
            return Some(if follows { Next::Carried } else { Next::Held });
        }
        if sequence.plannable() == 0 {
            // Its mask is late.
            return Some(Next::None);
        }
        let separates = sequence.branches.len() > 1 && sequence.unplanned() == 1;
        if !is_carried || separates || sequence.kv.needs_copies(&self.layout, &self.pages, &self.states) {
            return None;
        }
        Some(if reports { Next::Held } else { Next::Known })
    }

    /// Moves sequences from the queue to the running ones, as long as no other one loses anything for them. Returns false if
    /// the next one needs that.
    fn admit_ahead(&mut self, now: Instant) -> bool {
        let searches = |sequence: &Sequence| sequence.prefix.load == Load::Untried;
        if self.pages.tiers.is_some() && self.soon().any(|(_, sequence)| searches(sequence)) {
            return false;
        }
        self.raise_long_waits();
        while let Some(Choice { rank, victims }) = self.next_in_queue() {
            let restores = self.layout.checkpoints.is_some();
            if restores || !victims.is_empty() || !self.admit(rank, now) {
                return false;
            }
        }
        true
    }

    /// Writes the plan of the granted rows, and reserves their pages.
    fn write_plan_ahead(&mut self, next: &[Next]) {
        self.begin_plan();
        let Self { running, layout, pages, states, plan, in_flight, .. } = self;
        let mut cursor = in_flight.front().expect("a step is in flight").cursor();
        let mut copies = Vec::new();
        for (sequence, next) in running.iter_mut().zip(next) {
            let (position, rows) = (sequence.next_position(), sequence.planned.granted);
            let is_in_flight = sequence.planned.rows > 0;
            let output = cursor.of(sequence).map(|(outputs, _)| outputs.start);
            if rows == 0 || !sequence.reserve(rows, layout, pages, states, &mut copies) {
                continue;
            }
            assert!(copies.is_empty(), "a sequence that needs copies is not planned ahead");
            let end = position + rows;
            let row = plan.tokens.len();
            let samples = match (next, output) {
                (Next::Carried, Some(output)) => {
                    plan.carried.push(Carried { row, output, given: None });
                    position..end
                }
                _ if end == sequence.tokens.len() && sequence.may_sample() => end - 1..end,
                _ => 0..0,
            };
            let outputs = SequenceOutputs::samples(samples, sequence.branches.clone());
            // A slot that the running step leaves is not read again.
            let state = match is_in_flight {
                true => sequence.kv.state.map(|state| StateUse::in_place(state.write)),
                false => sequence.kv.state,
            };
            let tokens = sequence.tokens.get(position..end).unwrap_or(&[0]);
            plan.add(sequence, position, tokens, state, outputs, layout);
        }
    }

    /// Divides the rows of the next step. Returns false if there is no time for all that decode in its lane, or if none of these has a
    /// carried token.
    fn share_rows_ahead(&mut self, next: &[Next]) -> bool {
        self.running.iter_mut().for_each(|sequence| sequence.planned.granted = 0);
        let decodes = |&index: &usize| match next[index] {
            Next::Carried => true,
            Next::Known => !self.running[index].prefills_next(),
            Next::Held | Next::None => false,
        };
        let decoding: Vec<usize> = (0..next.len()).filter(decodes).collect();
        let prompts = |&index: &usize| next[index] == Next::Known && self.running[index].prefills_next();
        let prompts: Vec<usize> = (0..next.len()).filter(prompts).collect();
        let most = self.decoding_in_lane();
        let count = decoding.len().min(most);
        let (granted, work) = self.share_among_decoding(decoding, most);
        if granted < count {
            return false;
        }
        self.share_rest(granted, work, prompts, true);
        let has_rows =
            |(sequence, next): (&Sequence, &Next)| sequence.planned.granted > 0 && *next == Next::Carried;
        self.running.iter().zip(next).any(has_rows)
    }
}
