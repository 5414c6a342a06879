//! Steps that are encoded before their inputs are known: between stages on several devices, the time from the rows of one stage to the
//! next one's first kernel is that of a copy and a submission. The device may compute the step before meanwhile.

use paguro_backend::{Output, OutputKind, Step, StepError, Ticket};

use super::{GpuRunner, lanes, sampler, upload::upload_of};
use crate::{flight::Flight, lower::LOGIT_ROWS};

impl GpuRunner {
    /// Returns true if a step can be held until its inputs are known: it is one pass, and its results are read when it is collected.
    pub(super) fn can_hold(&self, step: &Step<'_>) -> bool {
        let is_collected = |output: &Output<'_>| match &output.kind {
            OutputKind::Sample(request) => sampler::carries(request, self.program.vocab),
            OutputKind::Residual => self.defers_rows,
            OutputKind::Score { .. } | OutputKind::Logits | OutputKind::Embedding | OutputKind::Mean => false,
        };
        let (rows, outputs) = (step.tokens.len(), step.outputs.len());
        // Steps of more rows take longer on the device than the host needs to encode them.
        let is_pass = rows.max(outputs) <= LOGIT_ROWS && self.pace.rows(rows) >= rows;
        // Pages of several kinds are converted before the step, which must not be taken back.
        let has_inputs_only = self.table.is_none() && self.page_kernels.is_none();
        let is_free = self.submitted - self.collected < lanes(&self.program) as u64;
        is_pass && has_inputs_only && is_free && step.outputs.iter().all(is_collected)
    }

    /// Encodes a step and holds it.
    pub(super) fn hold(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        self.canaries.hold();
        self.awaits_inputs = true;
        let held = self.start(step);
        self.awaits_inputs = held.is_ok();
        held.map(|_| ())
    }

    /// Submits the step that is held, with its inputs.
    pub(super) fn release_prepared(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        let (number, flight) = (self.submitted, self.flight_index());
        let plan = &mut self.flights[flight].plan;
        plan.set_tokens(step.tokens);
        plan.upload(&self.device, self.adapted.of(plan, &self.model));
        let has_given = plan.given_rows() > 0;
        let mut upload = upload_of(&mut self.uploads, number).filter(|_| has_given);
        if let Some(Err(error)) = upload.as_mut().map(|upload| upload.fill(step)) {
            self.drop_prepared();
            return Err(error);
        }
        self.awaits_inputs = false;
        let Flight { submission, timed, .. } = &mut self.flights[flight];
        // The time since it was encoded includes that of the inputs.
        *timed = None;
        *submission = self.canaries.release(&self.device);
        if let (Some(upload), Some(submission)) = (upload, submission) {
            upload.note(number, submission.clone());
        }
        self.note_end();
        Ok(Ticket(number))
    }

    /// Forgets a step that is held for its inputs.
    pub(super) fn drop_prepared(&mut self) {
        if std::mem::take(&mut self.awaits_inputs) {
            self.canaries.discard(self.submitted);
            self.submitted -= 1;
        }
    }
}
