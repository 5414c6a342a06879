//! Masks of grammars. A sequence with a grammar has a sampling row only in a step that is planned after its mask is known.
//!
//! Most masks are known soon after the token before them, so the next step waits for those, for a [short time](GRACE).
//! A later mask delays no other sequence: its sequence joins the first step that is planned after the mask. Its tokens
//! do not depend on the step.
//!
//! Computing an expected mask during the step would save some dozens of microseconds, but a late mask would delay the whole
//! step. The time of masks is charged to the tenant in the [accounts](crate::fair) of fair queueing. If all
//! sequences wait for masks, the engine sleeps and polls commands.

use std::time::{Duration, Instant};

use paguro_grammar::{Guide, Verdict};

use super::{Scheduler, outputs::finish};
use crate::{cost::Work, request::FinishReason, sequence::Sequence};

/// Maximum time that a step waits for masks that are expected within this time.
const GRACE: Duration = Duration::from_millis(3);

impl Scheduler {
    /// Applies the verdicts of grammars on the tokens of the last steps: some answers end, and some requests fail. Others
    /// can sample again. Waits for those that are expected soon. Beside a running step, the wait takes a small part of the
    /// time of that step, so that the next one is submitted before it ends.
    pub fn settle_masks(&mut self) {
        let longest = match self.is_computing() {
            true => GRACE.min(Duration::from_secs_f64((self.cost.seconds(self.plan.work()) / 4.0).min(1.0))),
            false => GRACE,
        };
        let soon = |sequence: &Sequence| {
            sequence.sampler.guide.as_ref().is_some_and(|guide| guide.ends_within(GRACE))
        };
        let expected: Vec<&Guide> = self
            .running
            .iter()
            .filter(|sequence| soon(sequence))
            .filter_map(|s| s.sampler.guide.as_ref())
            .collect();
        if !expected.is_empty() {
            let are_known = || expected.iter().all(|guide| guide.is_known());
            self.mask_workers.wait(Instant::now() + longest, are_known);
        }
        if self.mask_workers.tend() {
            self.apply_verdicts();
        }
    }

    /// Waits up to `time` for the end of a computation, if a running sequence needs one. Returns false otherwise.
    pub fn wait_for_mask(&self, time: Duration) -> bool {
        let waiting: Vec<&Guide> =
            self.running.iter().filter_map(|sequence| sequence.sampler.guide.as_ref()).collect();
        if !waiting.iter().any(|guide| guide.is_computing()) {
            return false;
        }
        self.mask_workers.wait(Instant::now() + time, || {
            waiting.iter().any(|guide| guide.is_computing() && guide.is_known())
        });
        true
    }

    fn apply_verdicts(&mut self) {
        let mut failed = Vec::new();
        let mut has_ended = false;
        // The time of a step with one row, so that a tenant's masks count as the rows that it could have had instead.
        let row = self.cost.seconds(Work::default().and(0, 1));
        for sequence in self.running.iter_mut().chain(self.waiting.values_mut()) {
            let Some((verdict, took)) = sequence.sampler.guide.as_mut().and_then(Guide::settle) else {
                continue;
            };
            let end = match verdict {
                Verdict::Mask(_) => None,
                Verdict::Open => Some(sequence.request.at_max_tokens.clone()),
                Verdict::End => Some(FinishReason::Complete),
                Verdict::Failed(error) => {
                    failed.push((sequence.request.id, error.clone().into()));
                    None
                }
            };
            if row > 0.0 {
                sequence.sampler.mask_rows += took.as_secs_f64() / row;
                self.ledger.charge(&sequence.request.tenant, sequence.sampler.mask_rows as usize);
                sequence.sampler.mask_rows = sequence.sampler.mask_rows.fract();
            }
            if let Some(reason) = end {
                has_ended = true;
                sequence.finished = true;
                finish(sequence, &reason, None, &mut self.events);
            }
        }
        if has_ended {
            self.remove(|sequence| sequence.finished);
        }
        self.fail_requests(failed);
    }
}
