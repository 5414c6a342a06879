//! Drafts of a step: their rows, their check, and their measured times. [`crate::speculation`] has the rules.
//!
//! - Steps with a part of a prompt have no drafts: their time belongs to the prompt.
//! - A draft takes pages that are available, and no sequence is preempted for it. Pages of rejected rows are released after
//!   the step.
//! - With a grammar, a draft ends where its masks are not known.
//! - A state cannot be rolled back by some rows. So a step with a draft reads the sequence's state and writes a second slot, if
//!   one is free. If a drafted token is rejected, the state that was read remains, and the next step computes the accepted
//!   rows again, as a part of a prompt. A draft ends at the latest at the end of a block, where a checkpoint is.

use std::time::{Duration, Instant};

use paguro_backend::Sampled;

use super::{Scheduler, outputs::accept};
use crate::{
    RequestError,
    cost::Work,
    layout::BlockLayout,
    sequence::Sequence,
    speculation::{Candidate, MOST_HELD_IN_ALL, READING, Speculation, Speculator, choose},
};

/// A step whose time is measured.
#[derive(Debug)]
pub(super) struct Check {
    work: Work,
    /// Expected time without drafts for its sequences, if it had drafts.
    plain: Option<f64>,
    /// Number of sequences.
    sequences: usize,
    /// Tokens that it gave.
    tokens: u64,
}

impl Speculation {
    /// Reads the new tokens of a sequence and guesses the next ones.
    pub fn prepare(&mut self, sequence: &mut Sequence) {
        sequence.read_for_drafts(READING.least, &mut self.all);
        sequence.prepare_draft(&self.all);
    }
}

impl Scheduler {
    /// Lets the drafters of running sequences read, for a small part of a step's time.
    pub(super) fn read_for_drafts(&mut self) {
        let Some(speculation) = &mut self.speculation else { return };
        let mut left = READING.tokens_in(self.cost.seconds(self.last_work.unwrap_or_default()));
        let held = |sequence: &Sequence| sequence.drafts.speculator.as_ref().map_or(0, Speculator::held);
        let mut free = MOST_HELD_IN_ALL.saturating_sub(self.running.iter().map(held).sum());
        for sequence in self.running.iter_mut().filter(|sequence| sequence.may_draft()) {
            let needed = sequence.tokens.len() + sequence.request.drafts.prediction.len();
            if sequence.drafts.speculator.is_none() && needed <= free {
                free -= needed;
                let speculator = Speculator::new(&sequence.request.drafts, sequence.tokens.prompt());
                sequence.drafts.speculator = Some(speculator);
            }
            let read = sequence.read_for_drafts(left, &mut speculation.all);
            left -= read.min(left);
            // With a grammar, the draft belongs to the computation of its masks.
            if read > 0 && sequence.sampler.guide.is_none() && sequence.tokens.generated() > 0 {
                sequence.prepare_draft(&speculation.all);
            }
        }
    }

    /// Adds rows for drafts to the planned ones.
    pub(super) fn plan_drafts(&mut self) {
        let planned: Vec<usize> =
            (0..self.running.len()).filter(|&index| self.running[index].planned.rows > 0).collect();
        let is_free = planned.iter().all(|&index| !self.running[index].prefills());
        if self.speculation.is_none() || !is_free {
            return;
        }
        let drafts = |&index: &usize| {
            let sequence = &self.running[index];
            sequence.samples() && sequence.drafts.length(&sequence.sampler) > 0
        };
        let drafting: Vec<usize> = planned.iter().copied().filter(drafts).collect();
        let lengths = self.lengths(&planned, &drafting, 0);
        let Self { running, layout, pages, states, .. } = self;
        for (&index, &length) in drafting.iter().zip(&lengths) {
            let sequence = &mut running[index];
            let end = sequence.kv.computed + sequence.planned.rows;
            let length = length.min(most_of_block(sequence, layout));
            let fits = |length: &usize| sequence.kv.pages_up_to(end + length, layout) <= pages.available();
            let length = (0..=length).rev().find(fits).unwrap_or(0);
            if length > 0 && length >= sequence.request.drafts.least {
                if let Some(state) = sequence.kv.state {
                    let Some(second) = states.reserve_second(state) else { continue };
                    sequence.kv.state = Some(second);
                }
                sequence.kv.extend(end + length, layout, pages);
                sequence.tokens.set_draft(&sequence.drafts.next.tokens[..length]);
                sequence.planned.rows += length;
                sequence.planned.drafted = length;
            }
        }
    }

    /// Returns true if a sequence of the planned step will probably have a draft in the next one.
    pub(super) fn will_draft(&self) -> bool {
        let drafts = |&index: &usize| {
            let sequence = &self.running[index];
            !sequence.ends() && sequence.drafts.length(&sequence.sampler) > 1
        };
        let planned: Vec<usize> =
            (0..self.running.len()).filter(|&index| self.running[index].planned.rows > 0).collect();
        let drafting: Vec<usize> = planned.iter().copied().filter(drafts).collect();
        self.lengths(&planned, &drafting, 1).into_iter().any(|length| length > 0)
    }

    /// Chooses the lengths of the drafts of these sequences beside one row of each of the planned ones, after the first
    /// `given` guesses.
    fn lengths(&self, planned: &[usize], drafting: &[usize], given: usize) -> Vec<usize> {
        let Some(speculation) = self.speculation.as_ref().filter(|_| !drafting.is_empty()) else {
            return Vec::new();
        };
        let work = planned
            .iter()
            .fold(Work::default(), |work, &index| work.and(self.running[index].kv.computed + given, 1));
        let candidate = |&index: &usize| {
            let Sequence { kv, drafts, sampler, .. } = &self.running[index];
            // The chances of the others include those of the given ones.
            let chances = drafts.next.chances[..drafts.length(sampler)].iter().skip(given).copied();
            let most = most_of_block(&self.running[index], &self.layout);
            let start = kv.computed + given + 1;
            Candidate { start, chances: chances.take(most).collect(), repeats: kv.state.is_some() }
        };
        let candidates: Vec<Candidate> = drafting.iter().map(candidate).collect();
        let free_rows = self.limits.max_rows.saturating_sub(planned.len());
        let free_outputs = self.limits.max_outputs.saturating_sub(self.limits.max_sequences);
        let most = free_rows.min(free_outputs);
        let is_eager = |index: &&usize| self.running[**index].request.drafts.eager;
        let eager = drafting.iter().filter(is_eager).count();
        if eager > 0 {
            let length = |(index, candidate): (&usize, &Candidate)| match is_eager(&index) {
                true => candidate.chances.len().min(most / eager),
                false => 0,
            };
            return drafting.iter().zip(&candidates).map(length).collect();
        }
        let seconds = |work| speculation.times.seconds(&self.cost, work);
        let credits = planned.iter().map(|&index| self.running[index].drafts.credit);
        let credit = credits.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
        choose(&candidates, planned.len(), work, most, credit, seconds)
    }

    /// Remembers what the step shows about times.
    pub(super) fn count_check(&mut self) {
        let Some(speculation) = self.speculation.as_ref().filter(|_| self.plan.decodes) else {
            self.last_check = None;
            return;
        };
        let planned = self.running.iter().filter(|sequence| sequence.planned.rows > 0);
        let drafted: usize = planned.map(|sequence| sequence.planned.drafted).sum();
        let sequences = self.plan.sequences.len();
        let work = self.plan.work();
        let plain = (drafted > 0).then(|| {
            let starts = self.plan.sequences.iter().map(|sequence| sequence.start);
            let plain = starts.fold(Work::default(), |work, start| work.and(start, 1));
            speculation.times.seconds(&self.cost, plain).unwrap_or_default()
        });
        self.last_check = Some(Check { work, plain, sequences, tokens: self.stats.tokens });
    }

    /// Records the time of the last step. If all sequences decoded, it shows the time of so many rows, and what the drafts
    /// have saved or cost.
    pub(super) fn record_check(&mut self, duration: Duration) {
        let Some(speculation) = &mut self.speculation else { return };
        let (check, duration) = (self.last_check.take(), duration.as_secs_f64());
        // Without drafts, the step itself shows the time of a token.
        let plain = check.as_ref().map_or(0.0, |check| check.plain.unwrap_or(duration));
        for sequence in &mut self.running {
            let new = sequence.tokens.generated() - sequence.drafts.counted;
            sequence.drafts.counted += new;
            if new > 0 && plain > 0.0 {
                // Rows that are computed again take at most as much time again.
                let again = if sequence.prefills() { duration - plain } else { 0.0 };
                sequence.drafts.credit.count(new, plain, duration + again.max(0.0));
            }
        }
        let Some(check) = check else { return };
        speculation.times.learn(check.work, duration);
        if check.plain.is_some() && plain > 0.0 {
            let tokens = (self.stats.tokens - check.tokens) as f64;
            let saved = plain * tokens / check.sequences as f64 - duration;
            self.stats.draft_nanoseconds += (saved * 1e9) as i64;
        }
    }

    /// Appends the sampled tokens after the rows of a draft, as long as the drafted tokens are the sampled ones. The rows of
    /// the others are rejected. A request without a token joins `failed`.
    pub(super) fn check_draft(
        &mut self,
        sequence: &mut Sequence,
        sampled: impl Iterator<Item = Sampled>,
        at: Instant,
        failed: &mut Vec<(u64, RequestError)>,
    ) {
        let drafted = sequence.planned.drafted;
        sequence.drafts.drafted += drafted;
        sequence.tokens.clear_draft();
        let draft = std::mem::take(&mut sequence.drafts.next.tokens);
        let mut new = Vec::new();
        let mut accepted = 0;
        for sampled in sampled {
            let token = sampled.token;
            self.stats.tokens += 1;
            if let Err(error) = accept(sequence, sampled, at, &mut self.events) {
                failed.push((sequence.request.id, error));
                break;
            }
            new.push(token);
            if sequence.finished || accepted == drafted || draft[accepted] != token {
                break;
            }
            accepted += 1;
            // Before the next token, which may end the answer and report its usage.
            sequence.drafts.accepted += 1;
        }
        self.stats.drafts += 1;
        self.stats.draft_tokens += drafted as u64;
        self.stats.accepted_tokens += accepted as u64;
        let mut rows = sequence.planned.rows - drafted + accepted;
        if accepted < drafted
            && let Some(state) = &mut sequence.kv.state
        {
            self.states.undo(state);
            rows = 0;
        }
        sequence.kv.reject_after(rows, &self.layout, &mut self.pages);
        (sequence.planned.rows, sequence.planned.drafted) = (rows, 0);
        match rows {
            0 => sequence.sched.last_step = self.step,
            _ => self.advance(sequence, at),
        }
        if !sequence.finished {
            if let Some(speculation) = &mut self.speculation {
                speculation.prepare(sequence);
            }
            sequence.compute_mask(new, &mut self.mask_workers);
        }
    }
}

/// Returns the most drafted tokens of a sequence: those with which its next step ends at the end of a block, if there is a
/// checkpoint.
fn most_of_block(sequence: &Sequence, layout: &BlockLayout) -> usize {
    match layout.checkpoints {
        Some(_) => layout.block_size - 1 - sequence.kv.computed % layout.block_size,
        None => usize::MAX,
    }
}
