//! Steps on the device: the data for reading their results and for repeating them.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use bytemuck::cast_slice;
use paguro_backend::{OutputValue, Pace, Piece, StepError};

use crate::{
    canary::Canaries,
    device::Device,
    emit::{EMPTY, Head, Model},
    kernel_statistics::KernelStatistics,
    lower::MATRICES,
    plan::{Args, Plan},
    planned::{PATIENCE, Planned, encode},
    runner::Readback,
};

/// Time of a group of launches that is followed by a larger one, in steps that may be paused. Two groups are on the device.
const PIECE: Duration = Duration::from_millis(2);

/// A step that was submitted.
pub struct Flight {
    /// Words and arguments of the step.
    pub plan: Plan,
    /// Slices of its output rows.
    pub slices: Vec<Slice>,
    /// Its outputs; those that the device computes are missing.
    pub answers: Vec<Option<OutputValue>>,
    /// Outputs whose tokens the device computes, in the order of the device's tokens.
    pub sampled: Vec<usize>,
    /// Outputs whose rows the device keeps for the next step, in the order of their places.
    pub kept: Vec<usize>,
    /// The submission whose end makes the answers readable; none while the step is held.
    pub submission: Option<wgpu::SubmissionIndex>,
    /// Set when the device has computed the step, if somebody may ask.
    pub end: Option<Arc<AtomicBool>>,
    /// Error of reading the data that a held step waited for.
    pub failure: Option<StepError>,
    /// Rows that are read with the answers.
    pub readback: Option<Readback>,
    /// Time of submission, rows and launches, if the device did nothing else and it was one pass.
    pub timed: Option<(Instant, usize, usize)>,
    /// True if each launch was submitted by itself, so that no kernel had to wait for another one.
    pub is_apart: bool,
    /// True if a kernel gave up waiting before the host read rows of logits.
    pub gave_up: bool,
}

/// Up to [`LOGIT_ROWS`](crate::lower::LOGIT_ROWS) output rows of a step, with the data for sampling from them.
#[derive(Default)]
pub struct Slice {
    /// First output row.
    pub first: usize,
    /// Number of output rows.
    pub count: usize,
    /// See `sample.wgsl`.
    pub samples: Vec<[u32; 8]>,
    /// Bias and penalties; see `adjust.wgsl`.
    pub edits: Vec<[u32; 4]>,
    /// Words of all masks.
    pub masks: Vec<u32>,
    /// Place of its first row among the rows that are kept for the next step, if they are.
    pub kept: Option<usize>,
}

impl Plan {
    /// Uploads the words of the step, and the adapters of its rows.
    pub fn upload(&self, device: &Device, model: &Model) {
        device.queue.write_buffer(&model.io.step, 0, cast_slice(&self.words));
        self.upload_adapted(device, model, false, 0);
    }

    /// Uploads the adapters of the step's rows, or of the slice of its outputs that begins with `first`.
    pub fn upload_adapted(&self, device: &Device, model: &Model, of_outputs: bool, first: usize) {
        let table = self.adapted_table(of_outputs, first);
        if let (Some(table), Some(buffer)) = (table, &model.adapted[usize::from(of_outputs)]) {
            device.queue.write_buffer(buffer, 0, cast_slice(&table.words));
            // Steps of more rows than there is room for pass no words.
            let words = MATRICES * table.low;
            let has_room = |buffer: &&wgpu::Buffer| !of_outputs && 4 * words as u64 <= buffer.size();
            if let Some(buffer) = model.low_words.as_ref().filter(has_room) {
                device.queue.write_buffer(buffer, 0, cast_slice(&vec![EMPTY; words]));
            }
        }
    }
}

impl Flight {
    /// For steps with this plan.
    pub fn new(plan: Plan) -> Self {
        Self {
            plan,
            slices: Vec::new(),
            answers: Vec::new(),
            sampled: Vec::new(),
            kept: Vec::new(),
            submission: None,
            end: None,
            failure: None,
            readback: None,
            timed: None,
            is_apart: false,
            gave_up: false,
        }
    }

    /// Begins a step with `outputs` outputs.
    pub fn begin(&mut self, outputs: usize) {
        self.slices.clear();
        self.answers.clear();
        self.answers.resize(outputs, None);
        self.sampled.clear();
        self.kept.clear();
        self.submission = None;
        self.end = None;
        self.failure = None;
        self.readback = None;
        self.timed = None;
        self.is_apart = false;
        self.gave_up = false;
    }
}

/// Encodes and submits the commands of one step.
pub struct Encoding<'a> {
    pub device: &'a Device,
    pub model: &'a Model,
    pub canaries: &'a mut Canaries,
    pub kernel_statistics: &'a mut KernelStatistics,
    /// Rows that a step keeps for the next one, `[outputs, hidden]`, of a program that joins tokens with given rows.
    pub kept: Option<&'a wgpu::Buffer>,
    /// Elements of a row.
    pub width: usize,
    /// Number of the step.
    pub step: u64,
}

impl Encoding<'_> {
    /// Submits launches in groups, so that the device works while the host encodes. `size` returns the largest size of the next group.
    /// The last group is in the returned commands.
    ///
    /// # Errors
    /// As [`Encoding::submit`].
    pub fn launch(
        &mut self,
        mut commands: wgpu::CommandEncoder,
        launches: &[Planned<'_>],
        mut size: impl FnMut() -> usize,
    ) -> Result<wgpu::CommandEncoder, StepError> {
        let mut rest = launches;
        loop {
            let (group, later) = rest.split_at(size().min(rest.len()));
            let patience = if self.device.starves_next() { 0 } else { PATIENCE };
            encode(&mut commands, group, self.kernel_statistics, patience);
            if later.is_empty() {
                return Ok(commands);
            }
            self.submit(commands)?;
            commands = self.device.encoder();
            rest = later;
        }
    }

    /// Returns the first commands for a slice of the output rows. Before the first one, rows that the step before has kept are copied to
    /// the given rows.
    pub fn begin(&self, plan: &Plan, first: usize) -> wgpu::CommandEncoder {
        let mut commands = self.device.encoder();
        if let (Some(kept), Some(given), 0) = (self.kept, &self.model.given, first) {
            let size = self.row_bytes(1);
            for (number, &place) in (plan.given_rows()..).zip(&plan.kept) {
                let (from, to) = (self.row_bytes(place), self.row_bytes(number));
                commands.copy_buffer_to_buffer(kept, from, given, to, size);
            }
        }
        commands
    }

    /// Adds commands that copy the rows of a slice for the next step.
    pub fn keep(&self, commands: &mut wgpu::CommandEncoder, slice: &Slice) {
        let Some(head) = &self.model.head else { return };
        let (normed, size) = (&head.io.normed, self.row_bytes(slice.count));
        if let (Some(buffer), Some(place)) = (self.kept, slice.kept) {
            commands.copy_buffer_to_buffer(normed, 0, buffer, self.row_bytes(place), size);
        }
    }

    /// Returns the bytes of as many rows after the last norm.
    fn row_bytes(&self, rows: usize) -> u64 {
        (4 * rows * self.width) as u64
    }

    /// Submits launches in groups of a few milliseconds, before each of which another thread may pause. While the device runs one, the next
    /// one is encoded and submitted. The returned commands are empty.
    ///
    /// # Errors
    /// As [`Encoding::submit`]; the other thread has abandoned the step.
    pub fn launch_paced(
        &mut self,
        launches: &[Planned<'_>],
        pace: &Pace,
    ) -> Result<wgpu::CommandEncoder, StepError> {
        let (mut rest, mut size) = (launches, 1);
        let mut running: Option<(Piece<'_>, Option<wgpu::SubmissionIndex>)> = None;
        let mut began = Instant::now();
        while !rest.is_empty() {
            let (group, later) = rest.split_at(size.min(rest.len()));
            // A pause waits for the group that runs, so this thread must not wait for the end of the pause meanwhile.
            let piece = pace.piece_now();
            if piece.is_none() {
                self.end(running.take())?;
            }
            let abandoned = || StepError::Device("the step was abandoned".to_owned());
            let piece = piece.or_else(|| pace.piece()).ok_or_else(abandoned)?;
            if running.is_none() {
                began = Instant::now();
            }
            let mut commands = self.device.encoder();
            encode(&mut commands, group, self.kernel_statistics, PATIENCE);
            let submission = self.submit(commands)?;
            if let Some(before) = running.replace((piece, submission)) {
                self.end(Some(before))?;
                let now = Instant::now();
                let time = now - std::mem::replace(&mut began, now);
                size = if time < PIECE { 2 * size } else { (size / 2).max(1) };
            }
            rest = later;
        }
        self.end(running)?;
        Ok(self.device.encoder())
    }

    /// Waits for a group of launches.
    fn end(&self, group: Option<(Piece<'_>, Option<wgpu::SubmissionIndex>)>) -> Result<(), StepError> {
        match group {
            Some((_piece, Some(submission))) => self.device.wait_for(submission),
            _ => Ok(()),
        }
    }

    /// Adds commands that sample.
    pub fn sample(&mut self, commands: &mut wgpu::CommandEncoder, plan: &Plan, slice: &Slice) {
        let Slice { samples, edits, masks, .. } = slice;
        let Some(head) = self.model.head.as_ref().filter(|_| !samples.is_empty()) else { return };
        let Head { io, adjust, argmax: [argmax, merge], sample, .. } = head;
        for (buffer, bytes) in [
            (&io.masks, cast_slice::<u32, u8>(masks)),
            (&io.edits, cast_slice(edits)),
            (&io.samples, cast_slice(samples)),
        ] {
            self.device.queue.write_buffer(buffer, 0, bytes);
        }
        let (count, is_draw) = (samples.len(), |sample: &[u32; 8]| f32::from_bits(sample[4]) > 0.0);
        let draws = if samples.iter().any(is_draw) { count } else { 0 };
        let launches = [(adjust, edits.len()), (argmax, count), (merge, count), (sample, draws)];
        let launches = launches
            .into_iter()
            .filter(|(_, rows)| *rows > 0)
            .map(|(launch, rows)| Planned::new(launch, plan, Args { rows: rows as u32, ..Args::default() }));
        encode(commands, &Vec::from_iter(launches), self.kernel_statistics, PATIENCE);
    }

    /// Adds commands that copy `count` sampled tokens for the host, and whether a kernel gave up, and submits all.
    ///
    /// # Errors
    /// As [`Encoding::submit`].
    pub fn finish(
        &mut self,
        mut commands: wgpu::CommandEncoder,
        count: usize,
    ) -> Result<Option<wgpu::SubmissionIndex>, StepError> {
        let (tokens, answers) = (&self.model.io.tokens, self.canaries.answers(self.step));
        if count > 0 {
            commands.copy_buffer_to_buffer(tokens, 0, answers, 4, 4 * count as u64);
        }
        if self.device.target.handoff {
            self.copy_gave_up(&mut commands, answers, 0);
        }
        self.submit(commands)
    }

    /// Copies the word that kernels set when they give up, after all kernels that may write it without wgpu's
    /// knowledge.
    pub fn copy_gave_up(&self, commands: &mut wgpu::CommandEncoder, to: &wgpu::Buffer, at: u64) {
        let buffer = &self.model.io.tokens;
        let written = wgpu::BufferTransition { buffer, state: wgpu::BufferUses::STORAGE_READ_WRITE };
        commands.transition_resources([written].into_iter(), std::iter::empty());
        commands.copy_buffer_to_buffer(buffer, gave_up_at(buffer), to, at, 4);
    }

    /// Submits commands of the step. Returns nothing if they are held.
    ///
    /// # Errors
    /// The step has too many submissions.
    fn submit(&mut self, commands: wgpu::CommandEncoder) -> Result<Option<wgpu::SubmissionIndex>, StepError> {
        self.canaries.submit(self.device, self.step, commands)
    }
}

/// Offset of the word that kernels set when they give up (`handoff.wgsl`): the last word of the buffer of sampled tokens.
pub fn gave_up_at(tokens: &wgpu::Buffer) -> u64 {
    tokens.size() - 4
}
