//! Application of a step's results to its sequences: scores, embeddings, tokens, forks, ends, failures.

use std::time::Instant;

use paguro_backend::{OutputValue, Sampled, Score, StepError, StepOutput};

use super::Scheduler;
use crate::{
    RequestError,
    request::{Event, FinishReason},
    sequence::Sequence,
};

impl Scheduler {
    /// Applies the outputs of the step, which was computed at `at`. A step planned ahead becomes the planned one.
    ///
    /// # Errors
    /// The outputs do not match the step; the state is unchanged.
    pub fn apply(&mut self, output: &mut StepOutput, at: Instant) -> Result<(), StepError> {
        self.plan.check(&output.outcomes)?;
        self.stats.steps += 1;
        self.stats.rows += self.plan.tokens.len() as u64;
        self.stats.last_rows = self.plan.tokens.len();
        self.stats.last_sequences = self.plan.sequences.len();
        self.stats.step_rows.record(self.plan.tokens.len());
        self.stats.step_sequences.record(self.plan.sequences.len());
        self.last_work = Some(self.plan.work());
        let mut values = output.outcomes.drain(..).enumerate();
        let mut cursor = self.plan.cursor();
        let mut forks = Vec::new();
        let mut tokens = Vec::new();
        let mut failed = Vec::new();
        for sequence in self.running.iter_mut().filter(|sequence| sequence.rows > 0) {
            let outputs = cursor.of(sequence);
            // Values of sequences that have ended since the step was planned ahead are between them.
            let own = values.by_ref().skip_while(|(index, _)| *index < outputs.start).take(outputs.len());
            for (_, value) in own {
                match value {
                    OutputValue::Score(score) => sequence.scores.push(score),
                    OutputValue::Embedding(embedding) => sequence.pool(&embedding),
                    OutputValue::Sampled(sampled) => tokens.push(sampled),
                    OutputValue::Logits(_) | OutputValue::Residual(_) => {
                        unreachable!("values were checked")
                    }
                }
            }
            sequence.last_step = self.step;
            sequence.last_rows = (self.stats.steps, sequence.rows);
            let rows = sequence.advance(&self.layout, &mut self.pages, &mut self.states);
            let saves = &mut self.saves;
            saves.keys.extend(sequence.save_state(&self.layout, &mut self.pages, &mut saves.moves));
            self.ledger.charge(&sequence.request.tenant, rows);
            if sequence.request.report_prefill && sequence.generated() == 0 {
                let tokens = sequence.computed;
                self.events.push((sequence.request.id, Event::Prefilled { tokens, at }));
            }
            if let Some((from, scores)) = sequence.take_scores() {
                self.events.push((sequence.request.id, Event::PromptScores { from, scores }));
            }
            if let Some(values) = sequence.take_embedding() {
                self.events.push((sequence.request.id, Event::Embedding { values }));
            }
            if !tokens.is_empty() {
                let first_fork = forks.len();
                let branches = sequence.branches.clone();
                sequence.branches = branches.start..branches.start + 1;
                forks.extend(
                    branches.skip(1).map(|branch| sequence.fork(branch, &mut self.pages, &mut self.states)),
                );
                let sequences = std::iter::once(sequence).chain(&mut forks[first_fork..]);
                for (sequence, sampled) in sequences.zip(tokens.drain(..)) {
                    self.stats.tokens += 1;
                    let token = sampled.token;
                    match accept(sequence, sampled, at, &mut self.events) {
                        Ok(()) if sequence.finished => {}
                        Ok(()) => sequence.compute_mask(Some(token), &mut self.mask_workers),
                        Err(error) => failed.push((sequence.request.id, error)),
                    }
                }
            } else if sequence.remaining() == 0 {
                // Only the prompt was requested.
                sequence.finished = true;
                finish(sequence, &sequence.request.at_max_tokens, None, &mut self.events);
            }
        }
        drop(values);
        for fork in forks {
            self.run(fork);
        }
        self.fail_requests(failed);
        for mut sequence in self.running.extract_if(.., |sequence| sequence.finished) {
            sequence.release(&self.layout, &mut self.pages, &mut self.states);
        }
        self.pages.trim();
        if std::mem::take(&mut self.is_ahead) {
            std::mem::swap(&mut self.plan, &mut self.next_plan);
            for sequence in &mut self.running {
                sequence.rows = usize::from(std::mem::take(&mut sequence.ahead));
            }
        }
        Ok(())
    }

    /// Handles a failed step: all requests with rows in it or in the step planned after it fail. The data that it would
    /// have written, and copies planned before it, are lost.
    pub fn fail(&mut self, error: &StepError) {
        self.is_ahead = false;
        self.last_work = None;
        self.stats.failed_steps += 1;
        let mut requests: Vec<_> = self.running.iter().filter(|s| s.rows > 0).map(|s| s.request.id).collect();
        requests.append(&mut self.plan.restored);
        for key in self.plan.saved.drain(..) {
            self.pages.forget_checkpoint(&key);
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
            of_request.for_each(|sequence| sequence.is_suspect |= matches!(error, RequestError::NotFinite));
            self.remove(|sequence| sequence.request.id == request);
            self.events.push((request, Event::Failed(error)));
        }
    }
}

/// Appends a sampled token to its branch.
///
/// # Errors
/// There is no token.
fn accept(
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
