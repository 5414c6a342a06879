//! A loaded model: the contract's [`Runner`].

use std::{
    collections::BTreeSet,
    iter,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use bytemuck::{bytes_of, cast_slice};
use half::f16;
use paguro_backend::{
    Carried, KernelCount, Limits, LoadError, Outcome, Output, PageId, PageMove, Program, Runner, Sampled,
    Step, StepError, StepOutput, Ticket, Want, Weights,
    sampling::{self, Scratch},
};

use crate::{
    GpuOptions,
    canary::Canaries,
    device::{ARGS_BYTES, Device},
    lower::{Grid, Kernel, LOGIT_ROWS, Launch, Lowering, Model, product},
    ops,
    pace::{Pace, Pass},
    pages::page_words,
    plan::{Args, Plan, Tile},
    sampler::{self, Sampler},
    tally::Tally,
    threadgroup,
};

/// Launches that the device gets first. It works on them while twice as many are encoded, and so on: it always has work if
/// encoding a launch takes less than half of the time of running one.
const FIRST_LAUNCHES: usize = 24;

/// Workgroups along x, at most, where there is one for each page (`gather.wgsl`).
const PAGES_X: u32 = 32768;

/// A model on a GPU.
pub struct GpuRunner {
    device: Arc<Device>,
    program: Program,
    limits: Limits,
    model: Model,
    plan: Plan,
    /// Readback of tokens and of whether kernels gave up (`hand.wgsl`), for one step and the next.
    canaries: Canaries,
    /// Times of launches, where submissions have to be short.
    pace: Pace,
    /// Readback of rows of logits or embeddings.
    rows: wgpu::Buffer,
    /// A page of one layer on its way: buffers are not copied onto themselves.
    copied: wgpu::Buffer,
    /// Words of a page of K, or of V, of one layer.
    page_words: usize,
    tally: Tally,
    scratch: Scratch,
    sampler: sampler::Scratch,
    /// Of the step that was submitted last, and of the one before; which is which, the number of the step says.
    flights: [Flight; 2],
    /// Outputs of the last one in the order of the device's tokens.
    carried: Vec<usize>,
    submitted: u64,
    collected: u64,
    /// Steps up to this one have failed on the device, or continue one that has.
    failed: u64,
}

/// A step on the device.
#[derive(Default)]
struct Flight {
    /// Its answers; those that the device computes are missing.
    answers: Vec<Option<Outcome>>,
    /// Outputs whose tokens the device computes, with what to say if there is none.
    sampled: Vec<usize>,
    /// What the device has to come to first.
    submission: Option<wgpu::SubmissionIndex>,
    /// Time of submission, rows and launches, if the device did nothing else and it was one pass.
    timed: Option<(Instant, usize, usize)>,
}

impl GpuRunner {
    /// Uploads the weights and allocates everything that `limits` asks for.
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
            poison_pages(&device, &model);
        }
        let rows = limits.max_outputs.clamp(1, LOGIT_ROWS);
        let plan = Plan::new(&fused.kv, &limits, model.tiling);
        device.wait().map_err(|error| LoadError::Device(error.to_string()))?;
        let page_words = page_words(&fused.kv, limits.block_size, limits.kv_dtype);
        Ok(Self {
            pace: Pace::new(options.submission.or(device.rules.submission)),
            canaries: Canaries::new(
                &device,
                1 + limits.max_outputs.max(1),
                most_submissions(&model, &limits),
            )?,
            rows: device.host_buffer(rows * (program.vocab + program.hidden), "rows for the host")?,
            copied: device.buffer(page_words, "a page")?,
            page_words,
            tally: Tally::new(&device, model.counters.clone())?,
            plan,
            model,
            program: program.clone(),
            limits,
            device,
            scratch: Scratch::default(),
            sampler: sampler::Scratch::default(),
            flights: Default::default(),
            carried: Vec::new(),
            submitted: 0,
            collected: 0,
            failed: 0,
        })
    }

    /// Which of the flights is that of the step that was submitted last.
    fn turn(&self) -> usize {
        self.submitted as usize % 2
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

    /// The same for a step that is the whole one or a pass of it, with the places of its outputs in the whole one.
    fn plan_and_run(&mut self, step: &Step<'_>, place: &dyn Fn(usize) -> usize) -> Result<(), StepError> {
        self.plan.make(step);
        for carried in step.carried {
            // `submit` has looked.
            let at = self.carried.iter().position(|&output| output == carried.output);
            self.plan.carry(carried.row, at.unwrap_or_default());
        }
        self.run(step, place)
    }

    /// Runs the planned step, in slices of its output rows.
    fn run(&mut self, step: &Step<'_>, place: &dyn Fn(usize) -> usize) -> Result<(), StepError> {
        self.device.queue.write_buffer(&self.model.io.step, 0, cast_slice(&self.plan.words));
        let (outputs, logits) = (self.plan.output_rows.len(), self.plan.logit_rows);
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
        if self.device.timed {
            let launches = launches(&self.model, &self.plan, first, count);
            let kernels: BTreeSet<usize> = launches.iter().map(Planned::timed_as).collect();
            self.tally.time(&self.device, &Vec::from_iter(kernels), |pass, kernel| {
                encode_all(pass, launches.iter().filter(|planned| planned.timed_as() == kernel));
            })?;
        }
        let launches = launches(&self.model, &self.plan, first, count);
        let turn = self.turn();
        let flight = &mut self.flights[turn];
        let vocab = self.program.vocab;
        let in_slice = |output: &Output<'_>, plan: &Plan| {
            let place = plan.place(output.row);
            (first..first + count).contains(&place).then(|| place - first)
        };
        let mut encoder = self.device.encoder();
        // A step that carries tokens is encoded while the one before runs.
        let first_launches = if step.carried.is_empty() { FIRST_LAUNCHES } else { launches.len() };
        let (mut rest, mut next) = (&launches[..], first_launches);
        let step_rows = step.tokens.len();
        flight.timed = match (first, &flight.timed, self.submitted - self.collected) {
            (0, None, 1) => Some((Instant::now(), step_rows, launches.len())),
            _ => None,
        };
        let in_doubt = self.device.in_doubt.load(Ordering::Relaxed);
        loop {
            // Submissions wait for each other, whatever wgpu knows of their buffers.
            let most = if in_doubt { 1 } else { self.pace.launches(step_rows, next) };
            if rest.len() <= most {
                break;
            }
            let (now, later) = rest.split_at(most);
            encode(&mut encoder, now, &mut self.tally);
            self.canaries.submit(&self.device, self.submitted, encoder)?;
            encoder = self.device.encoder();
            (rest, next) = (later, 2 * next);
        }
        let mut sampler = Sampler::new(vocab, (self.model.io.edits.size() / 16) as usize);
        let mut for_host = Vec::new();
        for (index, output) in step.outputs.iter().enumerate() {
            let Some(row) = in_slice(output, &self.plan) else { continue };
            let alone = || step.outputs.iter().filter(|other| other.row == output.row).count() == 1;
            match &output.want {
                Want::Sample(request)
                    if sampler.take(row, request, flight.sampled.len(), alone, &mut self.sampler) =>
                {
                    flight.sampled.push(place_of(index));
                }
                _ => for_host.push((index, row)),
            }
        }
        let Sampler { samples, edits, masks, .. } = sampler;
        encode(&mut encoder, rest, &mut self.tally);
        if masks.iter().any(|mask| mask.known().is_none()) {
            // The device computes while somebody else computes masks.
            self.canaries.submit(&self.device, self.submitted, encoder)?;
            encoder = self.device.encoder();
        }
        let words = vocab.div_ceil(32);
        for (index, mask) in masks.iter().enumerate() {
            let mut bits = mask.bits().to_vec();
            bits.resize(words, 0);
            let at = (index * words * 4) as u64;
            self.device.queue.write_buffer(&self.model.io.masks, at, cast_slice(&bits));
        }
        if !samples.is_empty() {
            let Model { io, adjust, argmax: [argmax, merge], sample, .. } = &self.model;
            self.device.queue.write_buffer(&io.edits, 0, cast_slice(&edits));
            self.device.queue.write_buffer(&io.samples, 0, cast_slice(&samples));
            let (count, is_draw) = (samples.len(), |sample: &[u32; 8]| f32::from_bits(sample[4]) > 0.0);
            let draws = if samples.iter().any(is_draw) { count } else { 0 };
            let launches = [(adjust, edits.len()), (argmax, count), (merge, count), (sample, draws)];
            let launches = launches.into_iter().filter(|(_, rows)| *rows > 0).map(|(launch, rows)| {
                Planned::new(launch, &self.plan, Args { rows: rows as u32, ..Args::default() })
            });
            let launches = Vec::from_iter(launches);
            encode(&mut encoder, &launches, &mut self.tally);
        }
        let (logits, normed) = (vocab * 4, self.program.hidden * 4);
        if !for_host.is_empty() {
            let io = &self.model.io;
            if first < self.plan.logit_rows {
                encoder.copy_buffer_to_buffer(&io.logits, 0, &self.rows, 0, (count * logits) as u64);
            }
            let (at, size) = ((count * logits) as u64, (count * normed) as u64);
            encoder.copy_buffer_to_buffer(&io.normed, 0, &self.rows, at, size);
        }
        if !flight.sampled.is_empty() {
            let size = (flight.sampled.len() * 4) as u64;
            let answers = self.canaries.answers(self.submitted);
            encoder.copy_buffer_to_buffer(&self.model.io.tokens, 0, answers, 4, size);
        }
        if self.device.hands_over {
            let tokens = &self.model.io.tokens;
            let answers = self.canaries.answers(self.submitted);
            encoder.copy_buffer_to_buffer(tokens, gave_up_at(tokens), answers, 0, 4);
        }
        let submission = self.canaries.submit(&self.device, self.submitted, encoder)?;
        flight.submission = Some(submission.clone());
        if for_host.is_empty() {
            return Ok(());
        }
        let Self { scratch, device, rows, .. } = self;
        device.read(rows, count * (logits + normed), submission, |words| {
            let row = |base: usize, width: usize, row: usize| {
                let bytes = &words[base + row * width..][..width];
                bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
            };
            for &(index, place) in &for_host {
                let want = &step.outputs[index].want;
                flight.answers[place_of(index)] = match want {
                    Want::Embedding => Some(Outcome::Embedding(row(count * logits, normed, place))),
                    Want::Logits => Some(Outcome::Logits(row(0, logits, place))),
                    want => sampling::answer(&row(0, logits, place), want, scratch),
                };
            }
        })
    }
}

/// A launch in this step.
struct Planned<'a> {
    launch: &'a Launch,
    /// Which of its kernels.
    variant: usize,
    workgroups: [u32; 2],
    args: Args,
    counter: usize,
}

impl<'a> Planned<'a> {
    /// Which kernel takes a product is decided by `all` rows, of which this launch may have a slice.
    fn of(launch: &'a Launch, plan: &Plan, args: Args, all: usize) -> Self {
        let (variant, workgroups) = match &launch.grid {
            &Grid::Each(count) => (0, [count, args.rows]),
            Grid::Rows => (0, [args.rows, 1]),
            Grid::Threads => (0, [args.rows.div_ceil(256), 1]),
            &Grid::Merge(count) => {
                (0, [if plan.needs_merge(launch.kv_group) { count } else { 0 }, args.rows])
            }
            &Grid::Pairs { used, each, along_x: true } => (0, [args.rows * used, each]),
            &Grid::Pairs { used, each, along_x: false } => (0, [each, args.rows * used]),
            &Grid::ExpertTiles { tiles, each, along_x: true } => (0, [tiles.most(args.rows), each]),
            &Grid::ExpertTiles { tiles, each, along_x: false } => {
                (0, [each, tiles.most(args.rows) * tiles.tile])
            }
            Grid::One => (0, [1, 1]),
            Grid::Pages => (0, [args.rows.min(PAGES_X), args.rows.div_ceil(PAGES_X)]),
            &Grid::Product(outputs, ref products) => product(products, all as u32, args.rows, outputs),
            &Grid::Attention(tile, heads) => {
                let items = plan.items(launch.kv_group, tile);
                // As `splits.wgsl` has it.
                let heads_first = tile == Tile::Row && args.row_length == 0;
                (0, if heads_first { [heads, items] } else { [items, heads] })
            }
        };
        Self { launch, variant, workgroups, args, counter: launch.counter + variant }
    }

    fn new(launch: &'a Launch, plan: &Plan, args: Args) -> Self {
        Self::of(launch, plan, args, args.rows as usize)
    }

    fn timed_as(&self) -> usize {
        self.launch.timed_with.unwrap_or(self.counter)
    }

    fn kernel(&self) -> &Kernel {
        &self.launch.kernels[self.variant]
    }

    fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        let [x, y] = self.workgroups;
        let kernel = self.kernel();
        pass.set_pipeline(kernel.pipeline.inner());
        pass.set_bind_group(0, &kernel.group, &[]);
        pass.set_immediates(0, bytes_of(&self.args));
        if !kernel.arguments.is_empty() {
            pass.set_immediates(ARGS_BYTES, cast_slice(&kernel.arguments));
        }
        pass.dispatch_workgroups(x, y, 1);
    }
}

/// Encodes and counts these launches, one after the other.
fn encode(encoder: &mut wgpu::CommandEncoder, launches: &[Planned<'_>], tally: &mut Tally) {
    for pass in threadgroup::passes(launches, |planned| planned.kernel().pipeline.lengths()) {
        encode_all(&mut encoder.begin_compute_pass(&Default::default()), pass.iter());
    }
    launches.iter().for_each(|planned| tally.launched(planned.counter));
}

/// Encodes all launches of a pass.
fn encode_all<'a>(pass: &mut wgpu::ComputePass<'_>, launches: impl Iterator<Item = &'a Planned<'a>> + Clone) {
    // wgpu has a barrier for a buffer's first use before all launches, and for others in their place: these are to be others.
    let ends = launches.clone().flat_map(|planned| &planned.kernel().ends);
    let state = wgpu::BufferUses::STORAGE_READ_WRITE;
    pass.transition_resources(ends.map(|buffer| wgpu::BufferTransition { buffer, state }), iter::empty());
    launches.for_each(|planned| planned.encode(pass));
}

/// What a slice of the output rows takes up to the logits, with the whole pass before the first one.
fn launches<'a>(model: &'a Model, plan: &Plan, first: usize, count: usize) -> Vec<Planned<'a>> {
    let mut launches = Vec::new();
    if first == 0 {
        let rows = plan.args(0).rows as usize;
        let body = model.body.iter().filter(|launch| launch.when.holds(rows));
        launches.extend(body.map(|launch| {
            let mut args = plan.args(launch.kv_group);
            match launch.grid {
                Grid::Pages => (args.tokens, args.rows) = plan.tables(),
                Grid::Attention(tile, _) => args.items = plan.first_item(launch.kv_group, tile),
                _ => {}
            }
            Planned::new(launch, plan, args)
        }));
    }
    if count > 0 {
        let (all, is_one_row) = (plan.logit_rows, plan.args(0).rows == 1);
        let args = Args { first: first as u32, rows: count as u32, ..plan.args(0) };
        let is_normed = is_one_row && !plan.embeds && !model.one_row_head.is_empty();
        if !is_normed {
            launches.push(Planned::new(&model.head_norm, plan, args));
        }
        if first < all {
            let head = if is_normed { &model.one_row_head } else { &model.head };
            launches.extend(head.iter().map(|launch| Planned::of(launch, plan, args, all)));
        }
    }
    launches.retain(|planned| planned.workgroups.iter().all(|&count| count > 0));
    launches
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
        let turn = self.turn();
        let flight = &mut self.flights[turn];
        flight.answers.clear();
        flight.answers.resize(step.outputs.len(), None);
        flight.sampled.clear();
        flight.timed = None;
        let submitted = self.run_all(step);
        let flight = &self.flights[turn];
        self.carried.clear();
        self.carried.extend(&flight.sampled);
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
        self.collected = number;
        let turn = number as usize % 2;
        let Self { flights, device, canaries, model, .. } = self;
        let Flight { answers, sampled, submission, timed } = &mut flights[turn];
        let submission =
            submission.take().ok_or_else(|| StepError::Invalid("nothing was submitted".into()))?;
        let mut gave_up = false;
        let read = canaries.read(device, number, 4 + sampled.len() * 4, submission, |words| {
            let (flag, words) = words.split_at(4);
            gave_up = flag != [0; 4];
            for (&index, token) in sampled.iter().zip(words.as_chunks().0) {
                let token = u32::from_le_bytes(*token);
                answers[index] = Some(Outcome::Sampled(Sampled { token, logprob: None, top: Vec::new() }));
            }
        });
        if let Some((since, rows, launches)) = timed.take() {
            self.pace.learn(rows, launches, since.elapsed());
        }
        if read.is_err() {
            // A step that is on its way continues this one.
            self.failed = self.submitted;
        }
        read?;
        if gave_up {
            let tokens = &model.io.tokens;
            device.queue.write_buffer(tokens, gave_up_at(tokens), &[0; 4]);
            // What was not taken in time is not for the steps to come, but those on their way may have taken it.
            if let Some(parts) = &model.handed_parts {
                parts.empty(device);
            }
            self.failed = self.submitted;
            device.in_doubt.store(true, Ordering::Relaxed);
        }
        if number <= self.failed {
            return Err(StepError::Device(match gave_up {
                true => format!(
                    "kernels on {} waited in vain for what others were to hand over; from now on it does without handoff, so \
                     try again",
                    device.name
                ),
                false => format!("the step before failed on {}", device.name),
            }));
        }
        out.outcomes.clear();
        out.outcomes.extend(answers.drain(..).flatten());
        Ok(())
    }

    fn carries(&self, want: &Want<'_>) -> bool {
        matches!(want, Want::Sample(request) if sampler::carries(request, self.program.vocab))
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        let pages = self.limits.pages;
        let size = 4 * self.page_words as u64;
        let mut encoder = self.device.encoder();
        for &page_move in moves {
            let PageMove::Copy { from: PageId(from), to: PageId(to) } = page_move else {
                return Err(StepError::Invalid(format!("no such move here: {page_move:?}")));
            };
            if from.max(to) as usize >= pages {
                return Err(StepError::Invalid(format!("cannot copy page {from} to {to} of {pages}")));
            }
            if from == to {
                continue;
            }
            for buffer in self.model.pages.iter().flatten() {
                let at = |page: u32| u64::from(page) * size;
                encoder.copy_buffer_to_buffer(buffer, at(from), &self.copied, 0, size);
                encoder.copy_buffer_to_buffer(&self.copied, 0, buffer, at(to), size);
            }
        }
        self.canaries.submit(&self.device, self.submitted + 1, encoder)?;
        self.device.check()
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        self.tally.snapshot()
    }
}

/// Submissions of the largest step, if each launch had its own.
fn most_submissions(model: &Model, limits: &Limits) -> usize {
    // Beside its head, a slice of output rows has a norm, five launches that sample, and copies.
    let passes = limits.max_rows.div_ceil(Pace::LEAST_ROWS);
    let slices = passes + limits.max_outputs.div_ceil(LOGIT_ROWS);
    passes * model.body.len() + slices * (model.head.len() + model.one_row_head.len() + 8)
}

/// Where, in bytes, kernels say that they gave up (`hand.wgsl`): in the last word of the buffer of the device's tokens.
fn gave_up_at(tokens: &wgpu::Buffer) -> u64 {
    tokens.size() - 4
}

/// Fills all pages with large finite noise, so that a read of what was never written shows: halves, also where they stand for
/// scales, and any bytes.
fn poison_pages(device: &Device, model: &Model) {
    let mut state = 1_u64;
    for buffer in model.pages.iter().flatten() {
        let noise: Vec<f16> = (0..buffer.size() / 2)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                f16::from_f32(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 3e4)
            })
            .collect();
        device.queue.write_buffer(buffer, 0, cast_slice(&noise));
    }
}
