//! Application of a step's results to its sequences: scores, embeddings, tokens, forks, ends, failures.

use std::time::Instant;

use paguro_backend::{OutputValue, Sampled, Score, StepError, StepOutput};

use super::{
    Scheduler,
    buffers::{Owner, PlannedStep},
};
use crate::{
    RequestError,
    request::{Event, FinishReason},
    sequence::{Sequence, SequenceOutput},
};

impl Scheduler {
    /// Applies the outputs of the oldest planned step, which was computed at `at`.
    ///
    /// # Errors
    /// The outputs do not match the step; the state is unchanged.
    pub fn apply(&mut self, output: &mut StepOutput, at: Instant) -> Result<(), StepError> {
        self.in_flight.front().unwrap_or(&self.plan).check(&output.outcomes)?;
        let plan = self.in_flight.pop_front().unwrap_or_else(|| std::mem::take(&mut self.plan));
        self.count_step(&plan);
        self.count_check(&plan);
        let mut running = std::mem::take(&mut self.running);
        let mut values = output.outcomes.drain(..).enumerate();
        let mut cursor = plan.cursor();
        let mut sampled = Vec::new();
        let (mut forks, mut failed) = (Vec::new(), Vec::new());
        for sequence in &mut running {
            let Some((indices, Owner { rank: _, rows, outputs })) = cursor.of(sequence) else { continue };
            // Values of sequences that have ended since the step was planned are between them.
            let own = values.by_ref().skip_while(|(index, _)| *index < indices.start);
            for (output, (_, value)) in outputs.iter().zip(own) {
                match value {
                    OutputValue::Score(score) => sequence.prompt_outputs.add_score(score),
                    OutputValue::Embedding(row) if matches!(output, SequenceOutput::Hidden { .. }) => {
                        let rows = sequence.drafts.rows.as_mut();
                        rows.into_iter().for_each(|rows| rows.push(output.position(), &row));
                    }
                    OutputValue::Embedding(mean) if matches!(output, SequenceOutput::Mean { .. }) => {
                        sequence.prompt_outputs.set_mean(mean, sequence.planned.rows);
                    }
                    OutputValue::Embedding(embedding) => {
                        sequence.prompt_outputs.add_embedding(&embedding, sequence.request.keeps_rows);
                    }
                    OutputValue::Sampled(token) => sampled.push((output, token)),
                    OutputValue::Logits(_) | OutputValue::Residual(_) => {
                        unreachable!("values were checked")
                    }
                }
            }
            if sequence.planned.drafted > 0 {
                self.check_draft(sequence, sampled.drain(..).map(|(_, token)| token), at, &mut failed);
                continue;
            }
            self.advance(sequence, *rows, at);
            if !sampled.is_empty() {
                self.append(sequence, sampled.drain(..), at, &mut forks, &mut failed);
            } else if sequence.remaining() == 0 {
                // Only the prompt was requested.
                sequence.finished = true;
                finish(sequence, &sequence.request.at_max_tokens, None, &mut self.events);
            }
        }
        drop(values);
        self.running = running;
        for fork in forks {
            self.run(fork);
        }
        self.fail_requests(failed);
        for mut sequence in self.running.extract_if(.., |sequence| sequence.finished) {
            sequence.release(&self.layout, &mut self.pages, &mut self.states);
        }
        self.pages.trim();
        self.stats.steps_ahead += u64::from(self.is_computing());
        self.spare.push(plan);
        Ok(())
    }

    /// Counts a step that was computed.
    fn count_step(&mut self, plan: &PlannedStep) {
        let (rows, sequences) = (plan.tokens.len(), plan.sequences.len());
        self.stats.steps += 1;
        self.stats.rows += rows as u64;
        self.stats.last_rows = rows;
        self.stats.last_sequences = sequences;
        self.stats.step_rows.record(rows);
        self.stats.step_sequences.record(sequences);
        self.last_work = Some(plan.work());
    }

    /// Marks the first `rows` planned rows of a sequence as computed, charges its tenant, and reports what the prompt has now.
    pub(super) fn advance(&mut self, sequence: &mut Sequence, rows: usize, at: Instant) {
        let steps = self.steps_of(sequence);
        let Self { layout, pages, states, saves, events, .. } = self;
        sequence.sched.last_step = self.step;
        sequence.sched.last_rows = (self.stats.steps, rows);
        if sequence.kv.restores() {
            sequence.sched.restoring_steps = steps;
        }
        let rows = sequence.advance(rows, layout, pages, states);
        saves.keys.extend(sequence.save_state(layout, pages, &mut saves.moves));
        self.ledger.charge(&sequence.request.tenant, rows);
        let request = sequence.request.id;
        if sequence.request.report_prefill && sequence.tokens.generated() == 0 {
            events.push((request, Event::Prefilled { tokens: sequence.kv.computed, at }));
        }
        if let Some((from, scores)) = sequence.take_scores() {
            events.push((request, Event::PromptScores { from, scores }));
        }
        if let Some(values) = sequence.take_embedding() {
            events.push((request, Event::Embedding { values }));
        }
    }

    /// Appends sampled tokens to the branches of a sequence, which separate if they are several: the sequence remains the
    /// first one, and the others join `forks`. Requests without a token join `failed`.
    fn append(
        &mut self,
        sequence: &mut Sequence,
        sampled: impl Iterator<Item = (SequenceOutput, Sampled)>,
        at: Instant,
        forks: &mut Vec<Sequence>,
        failed: &mut Vec<(u64, RequestError)>,
    ) {
        let Self { pages, states, stats, events, mask_workers, speculation, defers_masks, masks_due, .. } =
            self;
        let (first_fork, branches) = (forks.len(), sequence.branches.clone());
        sequence.branches.end = branches.start + 1;
        forks.extend(branches.clone().skip(1).map(|branch| sequence.fork(branch, pages, states)));
        for (output, sampled) in sampled {
            let SequenceOutput::Sample { branch, .. } = output else { continue };
            let sequence = match branch - branches.start {
                0 => &mut *sequence,
                other => &mut forks[first_fork + other - 1],
            };
            stats.tokens += 1;
            let token = sampled.token;
            match accept(sequence, sampled, at, events) {
                Ok(()) if sequence.finished => {}
                Ok(()) => {
                    if let Some(speculation) = speculation {
                        speculation.prepare(sequence);
                    }
                    match sequence.sampler.guide.is_some() && *defers_masks {
                        true => masks_due.push((sequence.owner(), vec![token])),
                        false => sequence.compute_mask(vec![token], mask_workers),
                    }
                }
                Err(error) => failed.push((sequence.request.id, error)),
            }
        }
    }

    /// Handles a failed step: all requests with rows in planned steps fail. The data that these would have written, and copies
    /// planned before them, are lost.
    pub fn fail(&mut self, error: &StepError) {
        (self.last_work, self.last_check) = (None, None);
        self.stats.failed_steps += 1;
        let has_rows = |sequence: &&Sequence| sequence.planned.rows > 0;
        let mut requests: Vec<_> =
            self.running.iter().filter(has_rows).map(|sequence| sequence.request.id).collect();
        for mut plan in self.in_flight.drain(..).chain([std::mem::take(&mut self.plan)]) {
            requests.append(&mut plan.restored);
            plan.saved.iter().for_each(|key| self.pages.forget_checkpoint(key));
        }
        requests.sort();
        requests.dedup();
        self.remove(|sequence| requests.binary_search(&sequence.request.id).is_ok());
        let failed = || Event::Failed(RequestError::Step(error.to_string()));
        self.events.extend(requests.into_iter().map(|request| (request, failed())));
    }

    /// Ends requests with errors.
    pub(super) fn fail_requests(&mut self, mut failed: Vec<(u64, RequestError)>) {
        // Branches that fail together are adjacent.
        failed.dedup_by_key(|(request, _)| *request);
        for (request, error) in failed {
            // Pages with values that are not finite must not be stored on disk.
            let of_request = self.running.iter_mut().filter(|sequence| sequence.request.id == request);
            of_request
                .for_each(|sequence| sequence.kv.is_suspect |= matches!(error, RequestError::NotFinite));
            self.remove(|sequence| sequence.request.id == request);
            self.events.push((request, Event::Failed(error)));
        }
    }
}

/// Appends a sampled token to its branch.
///
/// # Errors
/// There is no token.
pub(super) fn accept(
    sequence: &mut Sequence,
    sampled: Sampled,
    at: Instant,
    events: &mut Vec<(u64, Event)>,
) -> Result<(), RequestError> {
    let Sampled { token, logprob, top } = sampled;
    if token == Sampled::NO_TOKEN {
        return Err(RequestError::NotFinite);
    }
    let (request, branch) = (sequence.request.id, sequence.branches.start);
    let end = sequence.push(token);
    let mut stop_score = None;
    if matches!(end, Some(FinishReason::Stop(_))) {
        stop_score = logprob.map(|logprob| Score { logprob, top });
    } else {
        events.push((request, Event::Token { branch, token, text: String::new(), logprob, top, at }));
    }
    if let Some(reason) = end {
        sequence.finished = true;
        finish(sequence, &reason, stop_score, events);
    }
    Ok(())
}

/// Sends the end of all branches of a sequence.
pub(super) fn finish(
    sequence: &Sequence,
    reason: &FinishReason,
    stop_score: Option<Score>,
    events: &mut Vec<(u64, Event)>,
) {
    for branch in sequence.branches.clone() {
        let (reason, stop_score) = (reason.clone(), stop_score.clone());
        let (text, usage) = (String::new(), sequence.usage());
        let finished = Event::Finished { branch, text, reason, stop_score, usage };
        events.push((sequence.request.id, finished));
    }
}
