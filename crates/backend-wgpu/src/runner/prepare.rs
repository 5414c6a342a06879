//! Steps that are encoded before their inputs are known: between stages on several devices, the time from the rows of one stage to the
//! next one's first kernel is that of a copy and a submission.

use paguro_backend::{Output, OutputKind, Runner, Step, StepError, StepInputs, Ticket};

use super::{GpuRunner, sampler};
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
        let has_inputs_only = self.table.is_none() && self.page_kernels.is_none() && self.pauses.is_none();
        let is_free = self.submitted == self.collected && !self.device.target.timed;
        is_pass && has_inputs_only && is_free && step.outputs.iter().all(is_collected)
    }

    /// Encodes a step, waits for its inputs, and submits it.
    pub(super) fn submit_prepared(
        &mut self,
        step: &Step<'_>,
        inputs: &mut dyn FnMut() -> Result<StepInputs, StepError>,
    ) -> Result<Ticket, StepError> {
        self.canaries.hold();
        self.awaits_inputs = true;
        let submitted = self.submit(step);
        self.awaits_inputs = false;
        let ticket = submitted?;
        let uploaded = inputs().and_then(|inputs| {
            inputs.complete(step, |step| {
                let flight = self.flight_index();
                self.flights[flight].plan.set_tokens(step.tokens);
                self.upload_inputs(step)
            })
        });
        if let Err(error) = uploaded {
            self.canaries.discard(self.submitted);
            self.submitted -= 1;
            return Err(error);
        }
        let flight = self.flight_index();
        let Flight { submission, timed, .. } = &mut self.flights[flight];
        // The time since it was encoded includes that of the inputs.
        *timed = None;
        *submission = self.canaries.release(&self.device);
        Ok(ticket)
    }
}
