//! A loaded model: the contract's [`Runner`].

mod moves;
mod repeat;

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use bytemuck::cast_slice;
use half::f16;
use paguro_backend::{
    Carried, KernelCount, Limits, LoadError, Matrix, OutputKind, OutputValue, PageContent, PageFormat,
    PageId, PageMove, Program, Runner, Sampled, Step, StepError, StepOutput, Ticket, Weights,
    sampling::{self, Scratch},
};

use crate::{
    GpuOptions,
    canary::Canaries,
    device::Device,
    flight::{Encoding, Flight, Slice},
    kernel_statistics::KernelStatistics,
    lower::{LOGIT_ROWS, LayerState, Lowering, Model, StateBuffer},
    ops,
    pace::{Pace, Pass},
    page_io::{self, PageReader},
    pages::page_words,
    plan::Plan,
    planned::{PATIENCE, Planned, encode_all, launches},
    sampler::{self, Sampler},
};

use moves::Content;

/// Launches of the first submission. Each further submission has twice as many, so the device is never idle if encoding
/// a launch takes less than half of the time of running it.
const FIRST_LAUNCHES: usize = 24;

/// Name under which repeated steps are counted.
const REPEATED: &str = "step_repeated_without_handoff";

/// A model on a GPU.
pub struct GpuRunner {
    device: Arc<Device>,
    program: Program,
    limits: Limits,
    model: Model,
    /// Readback of tokens and of the word that kernels set when they give up (`handoff.wgsl`), for one step and the next.
    canaries: Canaries,
    /// Times of launches, where submissions have to be short.
    pace: Pace,
    /// Readback of rows of logits or embeddings.
    rows: wgpu::Buffer,
    /// A page of one layer on its way: buffers are not copied onto themselves.
    copied: wgpu::Buffer,
    /// Words of a page of K, or of V, of one layer.
    page_words: usize,
    /// Content of each page; empty where all pages have the same content at all times.
    contents: Vec<Content>,
    /// Content of each K/V group's pages.
    of_groups: Vec<Content>,
    /// The table of embeddings for layers, whose rows are read from its file, and those of a step.
    table: Option<(Matrix, Vec<f32>)>,
    encoded: Vec<u8>,
    page_format: PageFormat,
    /// Made when pages are read for the first time.
    page_reader: Option<PageReader>,
    kernel_statistics: KernelStatistics,
    scratch: Scratch,
    sampler: sampler::Scratch,
    /// The step that was submitted last and the one before, by their numbers modulo 2.
    flights: [Flight; 2],
    /// Outputs of the last one in the order of the device's tokens.
    carried: Vec<usize>,
    /// The device's tokens of the step that was collected last.
    tokens: Vec<u32>,
    submitted: u64,
    collected: u64,
    /// Steps up to this one have failed on the device, or continue one that has.
    failed: u64,
    /// The last step before which pages were moved while the one before it was on the device.
    moved_before: u64,
    /// Steps that were repeated without handoff.
    repeated: u64,
}

impl GpuRunner {
    /// Uploads the weights and allocates all buffers for `limits`.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load(
        device: Arc<Device>,
        program: &Program,
        weights: Weights,
        limits: Limits,
        options: GpuOptions,
    ) -> Result<Self, LoadError> {
        program.check(&weights)?;
        device.check().map_err(|error| LoadError::Device(error.to_string()))?;
        let fused = ops::Program::new(program, &device.name)?;
        let model = Lowering::new(&device, &fused, &weights, &limits)?.lower()?;
        device.compile_all()?;
        weights.check_unchanged()?;
        if options.poison {
            poison(&device, &model);
        }
        let rows = limits.max_outputs.clamp(1, LOGIT_ROWS);
        let flight = || Flight::new(Plan::new(&fused.kv, &limits, &model.tilings, !fused.state.is_empty()));
        let flights = [flight(), flight()];
        device.wait().map_err(|error| LoadError::Device(error.to_string()))?;
        let page_words = page_words(&fused.kv, limits.block_size, limits.kv_dtype);
        // In quantized pages some bytes are scales; numbers of another arrangement may be NaN there.
        let shape = |group: &ops::KvGroup| (group.kv_heads, group.head_dim);
        let first = |of| fused.kv.groups.iter().position(|group| shape(group) == shape(of)).unwrap_or(0);
        let of_groups: Vec<_> = fused.kv.groups.iter().map(|group| Content::Group(first(group))).collect();
        let has_kinds = of_groups.iter().any(|own| *own != of_groups[0]);
        let changes = !fused.state.is_empty() || has_kinds && limits.kv_dtype.is_quantized();
        let page_bytes = 8 * page_words * model.pages.len();
        let Limits { block_size, kv_dtype, attention, .. } = limits;
        let page_layout = format!("{kv_dtype:?} {block_size} {attention:?} {:?}", model.tilings);
        Ok(Self {
            pace: Pace::new(options.submission.or(device.rules.submission)),
            canaries: Canaries::new(
                &device,
                1 + limits.max_outputs.max(1),
                most_submissions(&model, &limits),
            )?,
            rows: device.host_buffer(rows * (program.vocab + program.hidden) + 1, "rows for the host")?,
            copied: device.buffer(page_words, "a page")?,
            page_words,
            contents: if changes { vec![Content::Nothing; limits.pages] } else { Vec::new() },
            of_groups,
            table: program
                .embed
                .layers
                .as_ref()
                .map(|embeds| (weights.table(embeds.table).clone(), Vec::new())),
            encoded: Vec::new(),
            page_format: page_io::format(&device, &page_layout, page_bytes),
            page_reader: None,
            kernel_statistics: KernelStatistics::new(&device, model.counters.clone())?,
            model,
            program: program.clone(),
            limits,
            device,
            scratch: Scratch::default(),
            sampler: sampler::Scratch::default(),
            flights,
            carried: Vec::new(),
            tokens: Vec::new(),
            submitted: 0,
            collected: 0,
            failed: 0,
            moved_before: 0,
            repeated: 0,
        })
    }

    /// Index of the flight of the step that was submitted last.
    fn flight_index(&self) -> usize {
        flight_index(self.submitted)
    }

    /// Plans and runs a step, in passes of as many rows as may run at once.
    fn run_all(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        let rows = self.pace.rows(step.tokens.len());
        if rows >= step.tokens.len() {
            return self.plan_and_run(step, &|output| output);
        }
        let (groups, block_size) = (self.program.kv.groups.len(), self.limits.block_size);
        for pass in Pass::split(step, rows, groups, block_size) {
            self.plan_and_run(&pass.step(), &|output| pass.places[output])?;
        }
        Ok(())
    }

    /// Runs a step or a pass of it; `place` maps its outputs to those of the whole step.
    fn plan_and_run(&mut self, step: &Step<'_>, place: &dyn Fn(usize) -> usize) -> Result<(), StepError> {
        let plan = &mut self.flights[flight_index(self.submitted)].plan;
        plan.make(step);
        for carried in step.carried {
            // `submit` has looked.
            let at = self.carried.iter().position(|&output| output == carried.output);
            plan.carry(carried.row, at.unwrap_or_default());
        }
        self.upload_table_rows(step)?;
        self.run(step, place)
    }

    /// Uploads the rows of the step's tokens of the table of embeddings for layers.
    fn upload_table_rows(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        let (Some((table, rows)), Some(buffer)) = (&mut self.table, &self.model.table_rows) else {
            return Ok(());
        };
        rows.resize(step.tokens.len() * table.cols, 0.0);
        for (row, &token) in rows.chunks_exact_mut(table.cols).zip(step.tokens) {
            table.decode_row(token as usize, &mut self.encoded, row)?;
        }
        table.check_source()?;
        self.device.queue.write_buffer(buffer, 0, cast_slice(rows));
        Ok(())
    }

    /// Runs the planned step, in slices of its output rows.
    fn run(&mut self, step: &Step<'_>, place: &dyn Fn(usize) -> usize) -> Result<(), StepError> {
        let plan = &self.flights[self.flight_index()].plan;
        self.device.queue.write_buffer(&self.model.io.step, 0, cast_slice(&plan.words));
        let (outputs, logits) = (plan.outputs.rows.len(), plan.outputs.logit_rows);
        let mut first = 0;
        loop {
            // Rows with and without logits do not share a slice.
            let end = if first < logits { logits } else { outputs };
            let count = (end - first).min(LOGIT_ROWS);
            self.run_slice(step, place, first, count)?;
            first += count;
            if first >= outputs {
                return Ok(());
            }
        }
    }

    /// Runs a slice of the output rows, and the whole pass before the first one.
    fn run_slice(
        &mut self,
        step: &Step<'_>,
        place_of: &dyn Fn(usize) -> usize,
        first: usize,
        count: usize,
    ) -> Result<(), StepError> {
        let flight = self.flight_index();
        let Self { device, model, canaries, kernel_statistics, flights, sampler: edits_scratch, .. } = self;
        let Flight { plan, slices, answers, sampled, submission, timed, is_apart, gave_up } =
            &mut flights[flight];
        let launches = launches(model, plan, first, count);
        if device.timed {
            let kernels: BTreeSet<usize> = launches.iter().map(Planned::timed_as).collect();
            kernel_statistics.time(device, &Vec::from_iter(kernels), |pass, kernel| {
                encode_all(pass, launches.iter().filter(|planned| planned.timed_as() == kernel), PATIENCE);
            })?;
        }
        let mut encoding = Encoding { device, model, canaries, kernel_statistics, step: self.submitted };
        // A step that carries tokens is encoded while the one before runs.
        let mut next = if step.carried.is_empty() { FIRST_LAUNCHES } else { launches.len() };
        let step_rows = step.tokens.len();
        *timed = match (first, timed.is_none(), self.submitted - self.collected) {
            (0, true, 1) => Some((Instant::now(), step_rows, launches.len())),
            _ => None,
        };
        *is_apart = device.in_doubt.load(Ordering::Relaxed);
        let mut commands = encoding.launch(&launches, || {
            // Submissions run in order, independent of wgpu's knowledge of their buffers.
            let size = if *is_apart { 1 } else { self.pace.launches(step_rows, next) };
            next *= 2;
            size
        })?;
        let vocab = self.program.vocab;
        let mut sampler = Sampler::new(vocab, (model.io.edits.size() / 16) as usize);
        let mut for_host = Vec::new();
        for row in 0..count {
            let outputs = plan.outputs.outputs_of(first + row);
            for &index in outputs {
                match &step.outputs[index].kind {
                    OutputKind::Sample(request)
                        if sampler.add(row, request, sampled.len(), outputs.len() == 1, edits_scratch) =>
                    {
                        sampled.push(place_of(index));
                    }
                    _ => for_host.push((index, row)),
                }
            }
        }
        let Sampler { samples, edits, masks, .. } = sampler;
        if masks.iter().any(|mask| mask.known().is_none()) {
            // The device computes while other threads compute masks.
            encoding.submit(commands)?;
            commands = device.encoder();
        }
        let mut words = Vec::new();
        for (index, mask) in masks.iter().enumerate() {
            words.extend_from_slice(mask.bits());
            words.resize((index + 1) * vocab.div_ceil(32), 0);
        }
        slices.push(Slice { first, count, samples, edits, masks: words });
        encoding.sample(&mut commands, plan, &slices[slices.len() - 1]);
        let (logits, normed) = (vocab * 4, self.program.hidden * 4);
        let bytes = count * (logits + normed);
        if !for_host.is_empty() {
            let io = &model.io;
            if first < plan.outputs.logit_rows {
                commands.copy_buffer_to_buffer(&io.logits, 0, &self.rows, 0, (count * logits) as u64);
            }
            let (at, size) = ((count * logits) as u64, (count * normed) as u64);
            commands.copy_buffer_to_buffer(&io.normed, 0, &self.rows, at, size);
            if device.handoff {
                encoding.copy_gave_up(&mut commands, &self.rows, bytes as u64);
            }
        }
        let last = encoding.finish(commands, sampled.len())?;
        *submission = Some(last.clone());
        if for_host.is_empty() {
            return Ok(());
        }
        let Self { scratch, device, rows, .. } = self;
        device.read(rows, bytes + 4, last, |words| {
            *gave_up |= device.handoff && words[bytes..] != [0; 4];
            let row = |base: usize, width: usize, row: usize| {
                let bytes = &words[base + row * width..][..width];
                bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
            };
            for &(index, place) in &for_host {
                let kind = &step.outputs[index].kind;
                answers[place_of(index)] = match kind {
                    OutputKind::Embedding => Some(OutputValue::Embedding(row(count * logits, normed, place))),
                    OutputKind::Logits => Some(OutputValue::Logits(row(0, logits, place))),
                    kind => sampling::answer(&row(0, logits, place), kind, scratch),
                };
            }
        })
    }

    /// Reads the answers of a step, once the device has run it. Returns true if a kernel gave up waiting.
    fn read(&mut self, step: u64) -> Result<bool, StepError> {
        let Self { flights, device, canaries, tokens, pace, .. } = self;
        let Flight { answers, sampled, submission, timed, .. } = &mut flights[flight_index(step)];
        let submission =
            submission.take().ok_or_else(|| StepError::Invalid("nothing was submitted".into()))?;
        let mut gave_up = false;
        let read = canaries.read(device, step, 4 + sampled.len() * 4, submission, |words| {
            let (flag, words) = words.split_at(4);
            gave_up = flag != [0; 4];
            if gave_up {
                return;
            }
            tokens.clear();
            tokens.extend(words.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)));
            for (&index, &token) in sampled.iter().zip(&*tokens) {
                answers[index] =
                    Some(OutputValue::Sampled(Sampled { token, logprob: None, top: Vec::new() }));
            }
        });
        if let Some((since, rows, launches)) = timed.take() {
            pace.learn(rows, launches, since.elapsed());
        }
        read.map(|()| gave_up)
    }
}

/// Index of a step's flight.
fn flight_index(step: u64) -> usize {
    step as usize % 2
}

impl Runner for GpuRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.program, &self.limits)?;
        self.device.check()?;
        if self.submitted - self.collected > usize::from(!step.carried.is_empty()) as u64 {
            return Err(StepError::Invalid("the step before was not collected".into()));
        }
        let unknown = step.carried.iter().find(|carried| !self.carried.contains(&carried.output));
        if let Some(Carried { output, .. }) = unknown {
            return Err(StepError::Invalid(format!("output {output} of the step before was not carried")));
        }
        self.submitted += 1;
        let (flight, outputs) = (self.flight_index(), step.outputs.len());
        self.flights[flight].begin(outputs);
        let mut submitted = self.clear_pages(step).and_then(|()| self.run_all(step));
        if submitted.is_ok() && self.flights[flight].gave_up {
            // The step before may be the one whose kernels gave up.
            submitted = self.repeat(self.collected + 1, self.submitted - 1).and_then(|()| {
                self.canaries.forget(self.submitted);
                self.flights[flight].begin(outputs);
                self.repeated += 1;
                self.run_all(step)
            });
            if submitted.is_ok() && self.flights[flight].gave_up {
                submitted = Err(self.gave_up());
            }
        }
        self.carried.clear();
        self.carried.extend(&self.flights[flight].sampled);
        if submitted.is_err() {
            self.canaries.forget(self.submitted);
            self.submitted -= 1;
        }
        submitted.map(|()| Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        let Ticket(number) = ticket;
        if number != self.collected + 1 || number > self.submitted {
            return Err(StepError::Invalid(format!("step {number} was never submitted or is long over")));
        }
        let mut read = self.read(number);
        if matches!(read, Ok(true)) && number > self.failed {
            read = self.repeat(number, self.submitted).and_then(|()| self.read(number));
        }
        self.collected = number;
        if !matches!(read, Ok(false)) {
            // A step that is on its way continues this one.
            self.failed = self.submitted;
        }
        if read? {
            return Err(self.gave_up());
        }
        if number <= self.failed {
            return Err(StepError::Device(format!("the step before failed on {}", self.device.name)));
        }
        out.outcomes.clear();
        out.outcomes.extend(self.flights[flight_index(number)].answers.drain(..).flatten());
        Ok(())
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        // The host reads embeddings for layers by token.
        self.table.is_none()
            && matches!(kind, OutputKind::Sample(request) if sampler::carries(request, self.program.vocab))
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        if self.submitted > self.collected {
            self.moved_before = self.submitted + 1;
        }
        let encoder = self.encode_moves(moves)?;
        self.canaries.submit(&self.device, self.submitted + 1, encoder)?;
        self.device.check()
    }

    fn page_format(&self) -> Option<PageFormat> {
        Some(self.page_format.clone())
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.page_format.check(pages, out.len(), &self.limits)?;
        let Self { page_reader, device, model, page_words, page_format, .. } = self;
        let reader = match page_reader {
            Some(reader) => reader,
            None => {
                let made = PageReader::new(device, page_format.page_bytes);
                page_reader.insert(made.map_err(|error| StepError::Device(error.to_string()))?)
            }
        };
        reader.read(device, model, *page_words, pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError> {
        self.page_format.check(pages, bytes.len(), &self.limits)?;
        if self.submitted > self.collected {
            self.moved_before = self.submitted + 1;
        }
        let own = match content {
            PageContent::State => Content::State,
            PageContent::Kv { group } => *self
                .of_groups
                .get(group)
                .ok_or_else(|| StepError::Invalid(format!("group {group} of {}", self.of_groups.len())))?,
        };
        let size = 4 * self.page_words;
        for (page, bytes) in pages.iter().zip(bytes.chunks_exact(self.page_format.page_bytes)) {
            if let Some(known) = self.contents.get_mut(page.0 as usize) {
                *known = own;
            }
            for (buffer, bytes) in self.model.pages.iter().flatten().zip(bytes.chunks_exact(size)) {
                self.device.queue.write_buffer(buffer, u64::from(page.0) * size as u64, bytes);
            }
        }
        self.device.check()
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        let mut counts = self.kernel_statistics.snapshot();
        if self.repeated > 0 {
            counts.push(KernelCount { name: REPEATED.to_owned(), launches: self.repeated, nanoseconds: 0 });
        }
        counts
    }
}

/// Submissions of the largest step, if each launch had its own.
fn most_submissions(model: &Model, limits: &Limits) -> usize {
    // Beside its head, a slice of output rows has a norm, five launches that sample, and copies.
    let passes = limits.max_rows.div_ceil(Pace::LEAST_ROWS);
    let slices = passes + limits.max_outputs.div_ceil(LOGIT_ROWS);
    passes * model.body.len() + slices * (model.head.len() + model.one_row_head.len() + 8)
}

/// Fills all pages and states with large finite noise, so that reads of unwritten data are detected: half-precision
/// numbers, also for scales, and any bytes.
fn poison(device: &Device, model: &Model) {
    let mut state = 1_u64;
    let mut number = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 3e4
    };
    for buffer in model.pages.iter().flatten() {
        let noise: Vec<f16> = (0..buffer.size() / 2).map(|_| f16::from_f32(number())).collect();
        device.queue.write_buffer(buffer, 0, cast_slice(&noise));
    }
    for StateBuffer { buffer, .. } in model.states.iter().flat_map(LayerState::buffers) {
        let noise: Vec<f32> = (0..buffer.size() / 4).map(|_| number()).collect();
        device.queue.write_buffer(buffer, 0, cast_slice(&noise));
    }
}
