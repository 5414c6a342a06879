//! Repeats steps without handoff after a kernel gave up waiting.

use std::sync::atomic::Ordering;

use bytemuck::cast_slice;
use paguro_backend::StepError;

use super::{GpuRunner, flight_index, token_words, upload::upload_of};
use crate::{
    device::Device,
    flight::{Encoding, Flight, gave_up_at},
    planned::launches,
};

impl GpuRunner {
    /// Repeats the steps from `first` to `last`, which are on the device, without handoff, because one of their kernels
    /// gave up waiting. All later steps on this device run without handoff.
    pub(super) fn repeat(&mut self, first: u64, last: u64) -> Result<(), StepError> {
        let tokens = &self.model.io.tokens;
        self.device.queue.write_buffer(tokens, gave_up_at(tokens), &[0; 4]);
        // Later steps must not read results that were not read in time.
        if let Some(partials) = &self.model.handoff_partials {
            partials.empty(&self.device);
        }
        if !self.device.in_doubt.swap(true, Ordering::Relaxed)
            && let Some(notice) = self.device.notice
        {
            notice(&format!(
                "handoff between kernels is off from now on: kernels on {} waited in vain for each other; the step is repeated without \
                 it, and steps are slower until the model is loaded again",
                self.device.target.name
            ));
        }
        let is_apart = (first..=last).any(|step| self.flights[flight_index(step)].is_apart);
        if is_apart || (first + 1..=self.submitted + 1).contains(&self.moved_before) {
            return Err(self.gave_up());
        }
        for step in first..=last {
            self.repeat_step(step, step == first)?;
        }
        Ok(())
    }

    /// Submits a step again, with one launch per submission. If it `is_first`, its carried tokens are those that were
    /// collected.
    fn repeat_step(&mut self, step: u64, is_first: bool) -> Result<(), StepError> {
        self.canaries.forget(step);
        self.repeated += 1;
        let tokens_end = 4 * token_words(&self.limits) as u64;
        let Self { device, canaries, kernel_statistics, flights, rows, uploads, kept, program, .. } = self;
        let Flight { plan, slices, sampled, submission, timed, is_apart, readback, .. } =
            &mut flights[flight_index(step)];
        let width = program.hidden;
        let model = self.adapted.of(plan, &self.model);
        if is_first {
            plan.uncarry(&self.tokens);
            // Kept rows are those that were read.
            for (number, place) in (plan.given_rows()..).zip(plan.kept.drain(..)) {
                if let (Some(given), Some(row)) =
                    (&model.given, self.kept_rows.get(place * width..(place + 1) * width))
                {
                    device.queue.write_buffer(given, (4 * number * width) as u64, cast_slice(row));
                }
            }
        }
        (*is_apart, *timed) = (true, None);
        plan.upload(device, model);
        if let (1.., Some(upload), Some(given)) = (plan.given_rows(), upload_of(uploads, step), &model.given)
            && !upload.repeat(device, step, given)
        {
            return Err(gave_up(device));
        }
        let kept = kept.as_ref();
        let mut encoding = Encoding { device, model, canaries, kernel_statistics, kept, width, step };
        for slice in slices.iter() {
            plan.upload_adapted(device, model, true, slice.first);
            let commands = encoding.begin(plan, slice.first);
            let launches = launches(model, plan, slice.first, slice.count);
            let mut commands = encoding.launch(commands, &launches, || 1)?;
            encoding.sample(&mut commands, plan, slice);
            encoding.keep(&mut commands, slice);
            if let Some(readback) = readback {
                let behind = (encoding.canaries.answers(step), tokens_end);
                let host = readback.host(behind, &rows[flight_index(step)]);
                readback.encode(model, &mut commands, host);
            }
            *submission = encoding.finish(commands, sampled.len())?;
        }
        Ok(())
    }

    pub(super) fn gave_up(&self) -> StepError {
        gave_up(&self.device)
    }
}

fn gave_up(device: &Device) -> StepError {
    StepError::Device(format!(
        "kernels on {} waited in vain for each other, and the step cannot be repeated; later steps run without handoff, so try \
             again",
        device.target.name
    ))
}
