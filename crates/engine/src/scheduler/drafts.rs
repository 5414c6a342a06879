//! Drafts of a step: their rows, their check, and their measured times. [`crate::speculation`] has the rules.
//!
//! - Steps with a part of a prompt have no drafts: their time belongs to the prompt.
//! - A draft takes pages that are available, and no sequence is preempted for it. Pages of rejected rows are released after
//!   the step.
//! - With a grammar, a draft ends where its masks are not known.
//! - A state can drop some last rows of a chunk ([`Program::droppable_rows`](paguro_backend::Program::droppable_rows)). This
//!   number bounds drafts of models with states. Such a draft ends within its chunk, and within its block if a checkpoint
//!   follows the block.

use std::time::{Duration, Instant};

use paguro_backend::Sampled;

use super::{Scheduler, buffers::PlannedStep, outputs::accept};
use crate::{
    RequestError,
    cost::Work,
    sequence::Sequence,
    speculation::{
        Acceptance, Candidate, Draft, HiddenRows, MOST_HELD_IN_ALL, ModelKind, READING, Speculation,
        Speculator, choose,
    },
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
        if let Some(speculator) = sequence.drafts.speculator.as_mut().filter(|_| self.model.is_some()) {
            speculator.by_model.forget();
            self.all_by_model.forget();
        }
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
        // A draft stays as it is until it is checked.
        let may_draft = |sequence: &&mut Sequence| sequence.may_draft() && sequence.planned.drafted == 0;
        for sequence in self.running.iter_mut().filter(may_draft) {
            if let Some(ModelKind::Head { kept_rows }) = speculation.model {
                sequence.drafts.rows.get_or_insert_with(|| HiddenRows::new(kept_rows));
            }
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
            (0..self.running.len()).filter(|&index| self.running[index].planned.granted > 0).collect();
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
        let Self { running, layout, pages, .. } = self;
        for (&index, &length) in drafting.iter().zip(&lengths) {
            let sequence = &mut running[index];
            let end = sequence.kv.computed + sequence.planned.rows;
            let length = length.min(layout.most_drafted(sequence.kv.computed));
            let fits = |length: &usize| sequence.kv.pages_up_to(end + length, layout) <= pages.available();
            let length = (0..=length).rev().find(fits).unwrap_or(0);
            if length > 0 && length >= sequence.request.drafts.least {
                sequence.kv.extend(end + length, layout, pages);
                sequence.tokens.set_draft(&sequence.drafts.next.tokens[..length]);
                sequence.planned.granted += length;
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
        if drafting.is_empty() {
            return Vec::new();
        }
        let work = planned
            .iter()
            .fold(Work::default(), |work, &index| work.and(self.running[index].kv.computed + given, 1));
        let candidate = |&index: &usize| {
            let Sequence { kv, drafts, sampler, .. } = &self.running[index];
            // The chances of the others include those of the given ones.
            let chances = drafts.next.chances[..drafts.length(sampler)].iter().skip(given).copied();
            let most = self.layout.most_drafted(kv.computed);
            let start = kv.computed + given + 1;
            Candidate { start, chances: chances.take(most).collect() }
        };
        let candidates: Vec<Candidate> = drafting.iter().map(candidate).collect();
        // The time of a model that drafts is spent.
        self.choose_lengths(planned, drafting, &candidates, work, |_| 0.0)
    }

    /// Returns the most rows that a draft of a sequence may have.
    pub(super) fn most_rows(&self, sequence: &Sequence) -> usize {
        self.layout.most_drafted(sequence.kv.computed)
    }

    /// Chooses the lengths of these candidates' drafts, those of the sequences `drafting`, in a step of the planned sequences that
    /// has this `work` without drafts. `drafting_seconds` is the time of a model that drafts.
    pub(super) fn choose_lengths(
        &self,
        planned: &[usize],
        drafting: &[usize],
        candidates: &[Candidate],
        work: Work,
        drafting_seconds: impl Fn(&[usize]) -> f64,
    ) -> Vec<usize> {
        let Some(speculation) = &self.speculation else { return vec![0; candidates.len()] };
        let free_rows = self.limits.max_rows.saturating_sub(planned.len());
        let reserved = self.limits.max_sequences + self.hidden_outputs();
        let free_outputs = self.limits.max_outputs.saturating_sub(reserved);
        let most = free_rows.min(free_outputs);
        let is_eager = |index: &&usize| self.running[**index].request.drafts.eager;
        let eager = drafting.iter().filter(is_eager).count();
        if eager > 0 {
            let length = |(index, candidate): (&usize, &Candidate)| match is_eager(&index) {
                true => candidate.chances.len().min(most / eager),
                false => 0,
            };
            return drafting.iter().zip(candidates).map(length).collect();
        }
        let seconds = |work| speculation.times.seconds(&self.cost, work);
        let credits = planned.iter().map(|&index| self.running[index].drafts.credit);
        let credit = credits.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
        choose(candidates, planned.len(), work, most, credit, seconds, drafting_seconds)
    }

    /// Remembers what the step shows about times.
    pub(super) fn count_check(&mut self, plan: &PlannedStep) {
        let Some(speculation) = self.speculation.as_ref().filter(|_| plan.decodes) else {
            self.last_check = None;
            return;
        };
        let sequences = plan.sequences.len();
        let work = plan.work();
        let plain = (plan.drafted > 0).then(|| {
            let starts = plan.sequences.iter().map(|sequence| sequence.start);
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
        let drafting = if check.is_some() { std::mem::take(&mut self.drafting_seconds) } else { 0.0 };
        // Without drafts, the step itself shows the time of a token.
        let plain = check.as_ref().map_or(0.0, |check| check.plain.unwrap_or(duration));
        for sequence in &mut self.running {
            let new = sequence.tokens.generated() - sequence.drafts.counted;
            sequence.drafts.counted += new;
            if new > 0 && plain > 0.0 {
                sequence.drafts.credit.count(new, plain, duration + drafting);
            }
        }
        let Some(check) = check else { return };
        speculation.times.learn(check.work, duration);
        if (check.plain.is_some() || drafting > 0.0) && plain > 0.0 {
            let tokens = (self.stats.tokens - check.tokens) as f64;
            let saved = plain * tokens / check.sequences as f64 - duration - drafting;
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
        let Draft { tokens: draft, of_model, .. } = std::mem::take(&mut sequence.drafts.next);
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
        if of_model
            && let Some(speculation) = &mut self.speculation
            && let Some(speculator) = &mut sequence.drafts.speculator
        {
            // A token that was not reached shows nothing.
            let shown = if sequence.finished { accepted } else { drafted.min(accepted + 1) };
            for index in 0..shown {
                let len = Acceptance::len_of_model(index);
                speculator.by_model.observe(&mut speculation.all_by_model, len, index < accepted);
            }
        }
        let rows = sequence.planned.rows - drafted + accepted;
        sequence.kv.reject_after(rows, &self.layout, &mut self.pages);
        if let Some(known) = &mut sequence.drafts.rows {
            known.truncate(sequence.kv.computed + rows);
        }
        sequence.planned.rows = rows;
        self.advance(sequence, rows, at);
        if !sequence.finished {
            if let Some(speculation) = &mut self.speculation {
                speculation.prepare(sequence);
            }
            match self.defers_masks && sequence.sampler.guide.is_some() {
                true => self.masks_due.push((sequence.owner(), new)),
                false => sequence.compute_mask(new, &mut self.mask_workers),
            }
        }
    }
}
