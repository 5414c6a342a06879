//! The work of a step: its passes and slices, and reading its answers.

use std::{collections::BTreeSet, sync::atomic::Ordering, time::Instant};

use paguro_backend::{OutputKind, OutputValue, Program, Sampled, Step, StepError, sampling};

use super::{
    GpuRunner, flight_index, row_words,
    rows::{HostRow, Readback, Source, floats},
    token_words,
    upload::upload_of,
};
use crate::{
    flight::{Encoding, Flight, Slice},
    pace::Pass,
    plan::Plan,
    planned::{PATIENCE, Planned, encode_all, launches},
    sampler::Sampler,
};

/// Launches of the first submission. Each further submission has twice as many, so the device is never idle if encoding
/// a launch takes less than half of the time of running it.
const FIRST_LAUNCHES: usize = 24;

impl GpuRunner {
    /// Plans and runs a step, in passes of as many rows as may run at once.
    pub(super) fn run_all(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        let rows = self.pace.rows(step.tokens.len());
        if rows >= step.tokens.len() {
            return self.plan_and_run(step, true, &|output| output);
        }
        let (groups, block_size) = (self.program.kv.groups.len(), self.limits.block_size);
        let is_whole = self.program.bidirectional;
        for pass in Pass::split(step, rows, groups, block_size, is_whole) {
            self.plan_and_run(&pass.step(), false, &|output| pass.places[output])?;
        }
        Ok(())
    }

    /// Runs a step or a pass of it; `place` maps its outputs to those of the whole step.
    fn plan_and_run(
        &mut self,
        step: &Step<'_>,
        is_whole: bool,
        place: &dyn Fn(usize) -> usize,
    ) -> Result<(), StepError> {
        let plan = &mut self.flights[flight_index(self.submitted)].plan;
        plan.make(step);
        for carried in step.carried {
            // `submit` has checked that the outputs are carried.
            let place =
                |of: &[usize], output| of.iter().position(|&other| other == output).unwrap_or_default();
            let kept = carried.given.map(|output| place(&self.carried_rows, output));
            plan.carry(carried.row, place(&self.carried, carried.output), kept);
        }
        self.plan_adapters(step)?;
        self.prepare_table_rows(step, is_whole)?;
        self.run(step, is_whole, place)
    }

    /// Runs the planned step, in slices of its output rows.
    fn run(
        &mut self,
        step: &Step<'_>,
        is_whole: bool,
        place: &dyn Fn(usize) -> usize,
    ) -> Result<(), StepError> {
        if !self.awaits_inputs {
            self.upload_inputs(step)?;
        }
        let slices = self.flights[self.flight_index()].plan.slices();
        let is_only = is_whole && slices.len() == 1;
        slices.into_iter().try_for_each(|slice| self.run_slice(step, place, slice, is_only))
    }

    /// Uploads the planned words of a step, and its given rows.
    fn upload_inputs(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        let plan = &self.flights[self.flight_index()].plan;
        plan.upload(&self.device, self.adapted.of(plan, &self.model));
        match (plan.given_rows(), upload_of(&mut self.uploads, self.submitted), &self.model.given) {
            (1.., Some(upload), Some(given)) => upload.write(&self.device, self.submitted, step, given),
            _ => Ok(()),
        }
    }

    /// Runs a slice of the output rows, which may be the step's only one, and the whole pass before the first one. Rows of the only slice
    /// are read with the answers of the step, if they need no further work; those that a later slice or pass overwrites are read at once.
    fn run_slice(
        &mut self,
        step: &Step<'_>,
        place_of: &dyn Fn(usize) -> usize,
        (first, count): (usize, usize),
        is_only: bool,
    ) -> Result<(), StepError> {
        let flight = self.flight_index();
        let tokens_end = 4 * token_words(&self.limits) as u64;
        let room = 4 * row_words(&self.program, &self.limits);
        let Self { device, canaries, kernel_statistics, flights, sampler: edits_scratch, .. } = self;
        let Flight { plan, slices, sampled, kept, submission, timed, is_apart, .. } = &mut flights[flight];
        let model = self.adapted.of(plan, &self.model);
        plan.upload_adapted(device, model, true, first);
        let launches = launches(model, plan, first, count);
        if device.target.timed {
            let timed = launches.iter().filter(|planned| !planned.runs_once());
            let kernels: BTreeSet<usize> = timed.map(Planned::timed_as).collect();
            kernel_statistics.time(device, &Vec::from_iter(kernels), |pass, kernel| {
                encode_all(pass, launches.iter().filter(|planned| planned.timed_as() == kernel), PATIENCE);
            })?;
        }
        let mut encoding = Encoding {
            device,
            model,
            canaries,
            kernel_statistics,
            kept: self.kept.as_ref(),
            width: self.program.hidden,
            step: self.submitted,
        };
        // A step that carries tokens is encoded while the one before runs, and one without its inputs while these are computed.
        let is_early = self.awaits_inputs || !step.carried.is_empty();
        let mut next = if is_early { launches.len() } else { FIRST_LAUNCHES };
        let step_rows = step.tokens.len();
        *timed = match (first, timed.is_none() && self.pauses.is_none(), self.submitted - self.collected) {
            (0, true, 1) => Some((Instant::now(), step_rows, launches.len())),
            _ => None,
        };
        *is_apart = device.in_doubt.load(Ordering::Relaxed);
        let mut commands = match &self.pauses {
            Some(pauses) => encoding.launch_paced(&launches, pauses)?,
            None => {
                let mut commands = encoding.begin(plan, first);
                if let (true, 1.., Some(upload), Some(given)) = (
                    self.awaits_inputs,
                    plan.given_rows(),
                    upload_of(&mut self.uploads, self.submitted),
                    &model.given,
                ) {
                    upload.prepare(device, step, given, &mut commands)?;
                }
                encoding.launch(commands, &launches, || {
                    // Submissions run in order, independent of wgpu's knowledge of their buffers.
                    let size = if *is_apart { 1 } else { self.pace.launches(step_rows, next) };
                    next = next.saturating_mul(2);
                    size
                })?
            }
        };
        let vocab = self.program.vocab;
        let edits_room = model.head.as_ref().map_or(0, |head| head.io.edits.size() / 16);
        let mut sampler = Sampler::new(vocab, edits_room as usize);
        let mut for_host = Vec::new();
        let is_row = |index: usize| matches!(step.outputs[index].kind, OutputKind::Embedding);
        let keeps = self.kept.is_some() && plan.embeds;
        let slice_kept = keeps.then_some(kept.len());
        for row in 0..count {
            let outputs = plan.outputs.outputs_of(first + row);
            if keeps {
                let output = outputs.iter().copied().find(|&index| is_row(index));
                kept.push(output.map_or(usize::MAX, place_of));
            }
            for &index in outputs {
                match &step.outputs[index].kind {
                    OutputKind::Sample(request)
                        if sampler.add(row, request, sampled.len(), outputs.len() == 1, edits_scratch) =>
                    {
                        sampled.push(place_of(index));
                    }
                    OutputKind::Sample(_)
                    | OutputKind::Score { .. }
                    | OutputKind::Logits
                    | OutputKind::Embedding
                    | OutputKind::Residual => for_host.push((index, row)),
                    OutputKind::Mean => {} // see `means`
                }
            }
        }
        let Sampler { samples, edits, masks, .. } = sampler;
        let mut words = Vec::new();
        for (index, mask) in masks.iter().enumerate() {
            words.extend_from_slice(mask.bits());
            words.resize((index + 1) * vocab.div_ceil(32), 0);
        }
        let slice = Slice { first, count, samples, edits, masks: words, kept: slice_kept };
        encoding.sample(&mut commands, plan, &slice);
        encoding.keep(&mut commands, &slice);
        slices.push(slice);
        let mut readback = readback_of(&self.program, plan, step, place_of, (first, count), &for_host);
        let is_read = !readback.rows.is_empty();
        let may_wait = is_read && is_only && readback.is_plain();
        readback.is_behind_tokens = may_wait && readback.bytes <= room;
        let is_deferred = readback.is_behind_tokens || may_wait && self.defers_rows;
        let behind = (encoding.canaries.answers(self.submitted), tokens_end);
        let host = readback.host(behind, &self.rows[flight]);
        readback.encode(model, &mut commands, host);
        if is_read && !is_deferred && device.target.handoff {
            encoding.copy_gave_up(&mut commands, host.0, readback.bytes as u64);
        }
        *submission = encoding.finish(commands, sampled.len())?;
        if is_deferred {
            flights[flight].readback = Some(readback);
            return Ok(());
        }
        if !is_read {
            return Ok(());
        }
        self.flush()?;
        let Self { scratch, device, rows, flights, .. } = self;
        let Flight { answers, submission, gave_up, .. } = &mut flights[flight];
        let last = submission.clone().ok_or_else(nothing_submitted)?;
        device.read(&rows[flight], readback.bytes + 4, last, |words| {
            *gave_up |= device.target.handoff && words[readback.bytes..] != [0; 4];
            if readback.is_plain() {
                return readback.answer(words, answers);
            }
            for &HostRow { output, place, at, bytes, source: _ } in &readback.rows {
                let row: Vec<f32> = floats(&words[at..][..bytes]).collect();
                let kind = &step.outputs[output].kind;
                answers[place] = match kind {
                    OutputKind::Embedding | OutputKind::Mean => Some(OutputValue::Embedding(row)),
                    OutputKind::Residual => Some(OutputValue::Residual(row)),
                    OutputKind::Logits => Some(OutputValue::Logits(row)),
                    kind => sampling::answer(&row, kind, scratch),
                };
            }
        })
    }

    /// Reads the answers of a step, once the device has run it. Returns true if a kernel gave up waiting.
    pub(super) fn read(&mut self, step: u64) -> Result<bool, StepError> {
        let Self { flights, device, canaries, tokens, pace, rows, .. } = self;
        let rows_at = 4 * token_words(&self.limits);
        let Flight { answers, sampled, submission, failure, timed, readback, .. } =
            &mut flights[flight_index(step)];
        if let Some(failure) = failure.take() {
            return Err(failure);
        }
        let submission = submission.take().ok_or_else(nothing_submitted)?;
        let mut gave_up = false;
        let last = submission.clone();
        let (behind, apart) = match readback {
            Some(readback) if readback.is_behind_tokens => (Some(readback), None),
            other => (None, other.as_ref()),
        };
        let tokens_end = 4 + sampled.len() * 4;
        let end = behind.as_ref().map_or(tokens_end, |readback| rows_at + readback.bytes);
        let mut read = canaries.read(device, step, end, last, |words| {
            let (flag, sampled_words) = words[..tokens_end].split_at(4);
            gave_up = flag != [0; 4];
            if gave_up {
                return;
            }
            if let Some(readback) = behind {
                readback.answer(&words[rows_at..], answers);
            }
            tokens.clear();
            tokens.extend(sampled_words.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)));
            for (&index, &token) in sampled.iter().zip(&*tokens) {
                answers[index] =
                    Some(OutputValue::Sampled(Sampled { token, logprob: None, top: Vec::new() }));
            }
        });
        if let Some((since, rows, launches)) = timed.take() {
            pace.learn(rows, launches, since.elapsed());
        }
        if let Some(readback) = apart.filter(|_| read.is_ok() && !gave_up) {
            let host = &rows[flight_index(step)];
            read = device.read(host, readback.bytes, submission, |words| readback.answer(words, answers));
        }
        read.map(|()| gave_up)
    }
}

fn nothing_submitted() -> StepError {
    StepError::Invalid("nothing was submitted".into())
}

/// Returns the rows for the host of a slice of `count` output rows from `first` on. `for_host` has outputs and their rows of the slice.
fn readback_of(
    program: &Program,
    plan: &Plan,
    step: &Step<'_>,
    place_of: &dyn Fn(usize) -> usize,
    (first, count): (usize, usize),
    for_host: &[(usize, usize)],
) -> Readback {
    let (logits, hidden) = (program.vocab * 4, program.hidden * 4);
    let (residual, merged) = (program.residual_width() * 4, program.merged().map_or(1, |merged| merged.rows));
    let is_residual = |index: usize| matches!(step.outputs[index].kind, OutputKind::Residual);
    let rows = for_host.iter().filter(|&&(index, _)| is_residual(index)).map(|&(_, row)| row);
    let mut residuals: Vec<usize> = rows.collect();
    residuals.dedup();
    let has_logits = first < plan.outputs.logit_rows;
    let is_row =
        |index: usize| matches!(step.outputs[index].kind, OutputKind::Embedding | OutputKind::Residual);
    let reads_logits = has_logits && for_host.iter().any(|&(index, _)| !is_row(index));
    let logits_end = if reads_logits { count * logits } else { 0 };
    let normed_end = logits_end + if plan.embeds { count * hidden } else { 0 };
    let residual_end = normed_end + if residuals.is_empty() { 0 } else { count * residual };
    let means = plan.outputs.means.iter().filter(|_| !has_logits).map(|&(index, _)| index);
    let means: Vec<usize> = means.collect();
    let mut readback = Readback::of(residual_end + means.len() * hidden);
    if for_host.is_empty() && means.is_empty() {
        return readback;
    }
    readback.copy(Source::Logits, 0, 0, logits_end);
    readback.copy(Source::Normed, 0, logits_end, normed_end - logits_end);
    let source = |row: usize| plan.outputs.rows[first + row] / merged;
    for run in residuals.chunk_by(|&row, &next| next == row + 1 && source(next) == source(row) + 1) {
        let (from, to) = (source(run[0]) * residual, normed_end + run[0] * residual);
        readback.copy(Source::Residual, from, to, run.len() * residual);
    }
    readback.copy(Source::Means, 0, residual_end, means.len() * hidden);
    for &(output, row) in for_host {
        let (at, bytes, source) = match step.outputs[output].kind {
            OutputKind::Embedding => (logits_end + row * hidden, hidden, Source::Normed),
            OutputKind::Residual => (normed_end + row * residual, residual, Source::Residual),
            _ => (row * logits, logits, Source::Logits),
        };
        readback.rows.push(HostRow { output, place: place_of(output), at, bytes, source });
    }
    for (index, &output) in means.iter().enumerate() {
        let (at, source) = (residual_end + index * hidden, Source::Means);
        readback.rows.push(HostRow { output, place: place_of(output), at, bytes: hidden, source });
    }
    readback
}
