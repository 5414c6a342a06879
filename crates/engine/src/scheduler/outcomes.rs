//! Results of a step go back to its sequences: tokens, scores, embeddings, forks, ends, failures.

use std::time::Instant;

use paguro_backend::{Outcome, Sampled, Score, StepError, StepOutput};

use super::Scheduler;
use crate::{
    RequestError,
    constraint::Guide,
    request::{FinishReason, Signal},
    sequence::Sequence,
};

impl Scheduler {
    /// Applies the outputs of the step, which was computed at `at`. A step planned ahead becomes the planned one.
    ///
    /// # Errors
    /// The outputs do not match the step; the state is unchanged.
    pub fn apply(&mut self, output: &mut StepOutput, at: Instant) -> Result<(), StepError> {
        self.drop_outcomes_of_the_ended(output)?;
        self.check_outcomes(output)?;
        self.stats.steps += 1;
        self.stats.rows += self.plan.tokens.len() as u64;
        self.stats.last_rows = self.plan.tokens.len();
        self.stats.last_sequences = self.plan.sequences.len();
        self.stats.step_rows.record(self.plan.tokens.len());
        self.stats.step_sequences.record(self.plan.sequences.len());
        self.last_work = Some(self.plan.work());
        let mut outcomes = output.outcomes.drain(..);
        let mut forks = Vec::new();
        let mut failed = Vec::new();
        for sequence in self.running.iter_mut().filter(|sequence| sequence.rows > 0) {
            for _ in sequence.scored_in(sequence.rows) {
                let Some(Outcome::Score(score)) = outcomes.next() else {
                    unreachable!("outcomes were checked")
                };
                sequence.scores.push(score);
            }
            for _ in sequence.embedded_in(sequence.rows) {
                let Some(Outcome::Embedding(embedding)) = outcomes.next() else {
                    unreachable!("outcomes were checked")
                };
                sequence.pool(&embedding);
            }
            let samples = sequence.samples();
            sequence.last_step = self.step;
            sequence.last_rows = (self.stats.steps, sequence.rows);
            let rows = sequence.advance(&self.layout, &mut self.pages, &mut self.states);
            let saves = &mut self.saves;
            saves.keys.extend(sequence.save_state(&self.layout, &mut self.pages, &mut saves.moves));
            self.ledger.charge(&sequence.job.tenant, rows);
            if sequence.job.report_prefill && sequence.generated() == 0 {
                let tokens = sequence.computed;
                self.signals.push((sequence.job.id, Signal::Prefilled { tokens, at }));
            }
            if let Some((from, scores)) = sequence.take_scores() {
                self.signals.push((sequence.job.id, Signal::PromptScores { from, scores }));
            }
            if let Some(values) = sequence.take_embedding() {
                self.signals.push((sequence.job.id, Signal::Embedding { values }));
            }
            if samples {
                let first_fork = forks.len();
                let branches = sequence.branches.clone();
                sequence.branches = branches.start..branches.start + 1;
                forks.extend(
                    branches.skip(1).map(|branch| sequence.fork(branch, &mut self.pages, &mut self.states)),
                );
                for sequence in std::iter::once(sequence).chain(&mut forks[first_fork..]) {
                    let Some(Outcome::Sampled(sampled)) = outcomes.next() else {
                        unreachable!("outcomes were checked")
                    };
                    self.stats.tokens += 1;
                    match accept(sequence, sampled, at, &mut self.signals) {
                        Ok(()) if sequence.finished => {}
                        // The mask is computed while events are published and the next step runs.
                        Ok(()) => sequence.compute_mask(&mut self.mask_workers),
                        Err(error) => failed.push((sequence.job.id, error)),
                    }
                }
            } else if sequence.remaining() == 0 {
                // Only the prompt was requested.
                sequence.finished = true;
                finish(sequence, &sequence.job.at_max_tokens, None, &mut self.signals);
            }
        }
        drop(outcomes);
        for fork in forks {
            self.run(fork);
        }
        failed.dedup_by_key(|(request, _)| *request);
        for (request, error) in failed {
            // Pages with values that are not finite must not be stored on disk.
            let of_request = self.running.iter_mut().filter(|sequence| sequence.job.id == request);
            of_request.for_each(|sequence| sequence.is_suspect |= matches!(error, RequestError::NotFinite));
            self.remove(|sequence| sequence.job.id == request);
            self.signals.push((request, Signal::Failed(error)));
        }
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
        let mut requests: Vec<_> = self.running.iter().filter(|s| s.rows > 0).map(|s| s.job.id).collect();
        requests.append(&mut self.plan.restored);
        for key in self.plan.saved.drain(..) {
            self.pages.forget_checkpoint(&key);
        }
        requests.sort();
        requests.dedup();
        self.remove(|sequence| requests.binary_search(&sequence.job.id).is_ok());
        let failed = || Signal::Failed(RequestError::Step(error.to_string()));
        self.signals.extend(requests.into_iter().map(|request| (request, failed())));
    }

    fn check_outcomes(&self, output: &StepOutput) -> Result<(), StepError> {
        let mut rest = output.outcomes.as_slice();
        for sequence in self.running.iter().filter(|sequence| sequence.rows > 0) {
            let scores = sequence.scored_in(sequence.rows).len();
            let embeddings = sequence.embedded_in(sequence.rows).len();
            let samples = if sequence.samples() { sequence.branches.len() } else { 0 };
            let Some((own, others)) = rest.split_at_checked(scores + embeddings + samples) else {
                return Err(StepError::Device(
                    "the runner answered fewer outputs than were asked for".into(),
                ));
            };
            let (scored, own) = own.split_at(scores);
            let (embedded, sampled) = own.split_at(embeddings);
            if !scored.iter().all(|outcome| matches!(outcome, Outcome::Score(_)))
                || !embedded.iter().all(|outcome| matches!(outcome, Outcome::Embedding(_)))
                || !sampled.iter().all(|outcome| matches!(outcome, Outcome::Sampled(_)))
            {
                return Err(StepError::Device(
                    "the runner answered other outputs than were asked for".into(),
                ));
            }
            rest = others;
        }
        if !rest.is_empty() {
            return Err(StepError::Device("the runner answered more outputs than were asked for".into()));
        }
        Ok(())
    }
}

/// Appends a sampled token to its branch.
///
/// # Errors
/// There is no token, or the grammar cannot be followed.
fn accept(
    sequence: &mut Sequence,
    sampled: Sampled,
    at: Instant,
    signals: &mut Vec<(u64, Signal)>,
) -> Result<(), RequestError> {
    let Sampled { token, logprob, top } = sampled;
    if token == Sampled::NO_TOKEN {
        // A grammar without an allowed token has the same result.
        sequence.guide.as_ref().map_or(Ok(()), Guide::check).map_err(RequestError::Constraint)?;
        return Err(RequestError::NotFinite);
    }
    let (request, branch) = (sequence.job.id, sequence.branches.start);
    let end = sequence.push(token).map_err(RequestError::Constraint)?;
    let mut stop_score = None;
    if matches!(end, Some(FinishReason::Stop(_))) {
        stop_score = logprob.map(|logprob| Score { logprob, top });
    } else {
        signals.push((request, Signal::Token { branch, token, logprob, top, at }));
    }
    if let Some(reason) = end {
        sequence.finished = true;
        finish(sequence, &reason, stop_score, signals);
    }
    Ok(())
}

/// Sends the end of all branches of a sequence.
pub(super) fn finish(
    sequence: &Sequence,
    reason: &FinishReason,
    stop_score: Option<Score>,
    signals: &mut Vec<(u64, Signal)>,
) {
    for branch in sequence.branches.clone() {
        let (reason, stop_score) = (reason.clone(), stop_score.clone());
        let finished = Signal::Finished { branch, reason, stop_score, usage: sequence.usage() };
        signals.push((sequence.job.id, finished));
    }
}
