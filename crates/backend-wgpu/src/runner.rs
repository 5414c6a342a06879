//! A loaded model: the contract's [`Runner`].

use std::{collections::BTreeSet, sync::Arc};

use bytemuck::{bytes_of, cast_slice};
use half::f16;
use paguro_backend::{
    KernelCount, Limits, LoadError, Outcome, Output, PageId, PageMove, Program, Runner, Sampled, Step,
    StepError, StepOutput, Ticket, TokenMask, Want, Weights,
    sampling::{self, Scratch},
};

use crate::{
    GpuOptions,
    device::{ARGS_BYTES, Device},
    lower::{Grid, LOGIT_ROWS, Launch, Lowering, Model, product},
    pages::page_words,
    plan::{Args, Plan, is_greedy},
    tally::Tally,
};

/// A place in the samples that stands for no mask, and a token that stands for none.
const NONE: u32 = u32::MAX;

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
    /// Where the host reads tokens, and rows of logits or embeddings.
    tokens: wgpu::Buffer,
    rows: wgpu::Buffer,
    /// A page of one layer on its way: buffers are not copied onto themselves.
    copied: wgpu::Buffer,
    tally: Tally,
    scratch: Scratch,
    /// Answers of the step that was submitted last; those that the device still computes are missing.
    answers: Vec<Option<Outcome>>,
    /// Outputs whose tokens the device computes, with what to say if there is none.
    sampled: Vec<(usize, u32)>,
    submitted: u64,
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
        let model = Lowering::new(&device, program, &weights, &limits)?.lower()?;
        if options.poison {
            poison_pages(&device, &model);
        }
        let rows = limits.max_outputs.clamp(1, LOGIT_ROWS);
        let plan = Plan::new(&program.kv, &limits, model.tiling);
        device.wait().map_err(|error| LoadError::Device(error.to_string()))?;
        Ok(Self {
            tokens: device.host_buffer(limits.max_outputs.max(1), "sampled tokens")?,
            rows: device.host_buffer(rows * (program.vocab + program.hidden), "rows for the host")?,
            copied: device.buffer(page_words(&program.kv, limits.block_size, limits.kv_dtype), "a page")?,
            tally: Tally::new(&device, model.counters.clone(), options.timed)?,
            plan,
            model,
            program: program.clone(),
            limits,
            device,
            scratch: Scratch::default(),
            answers: Vec::new(),
            sampled: Vec::new(),
            submitted: 0,
        })
    }

    /// Runs a slice of the output rows, and the whole pass before the first one.
    fn run_slice(&mut self, step: &Step<'_>, first: usize, count: usize) -> Result<(), StepError> {
        let launches = launches(&self.model, &self.plan, first, count);
        let kernels: BTreeSet<usize> = launches.iter().map(|planned| planned.counter).collect();
        self.tally.time(&self.device, &Vec::from_iter(kernels), |pass, kernel| {
            let own = launches.iter().filter(|planned| planned.counter == kernel);
            own.for_each(|planned| planned.encode(pass));
        })?;
        let vocab = self.program.vocab;
        let in_slice = |output: &Output<'_>, plan: &Plan| {
            let place = plan.place(output.row);
            (first..first + count).contains(&place).then(|| place - first)
        };
        let mut samples: Vec<[u32; 4]> = Vec::new();
        let mut masks: Vec<&TokenMask> = Vec::new();
        let mut for_host = Vec::new();
        let words = vocab.div_ceil(32);
        for (index, output) in step.outputs.iter().enumerate() {
            let Some(row) = in_slice(output, &self.plan) else { continue };
            match output.want {
                Want::Sample(request) if is_greedy(&output.want) && masks.len() < LOGIT_ROWS => {
                    let mask = request.mask.map_or(NONE, |mask| {
                        masks.push(mask);
                        ((masks.len() - 1) * words) as u32
                    });
                    samples.push([row as u32, mask, self.sampled.len() as u32, 0]);
                    self.sampled.push((index, 0));
                }
                _ => for_host.push((index, row)),
            }
        }

        let mut encoder = self.device.encoder();
        let (mut rest, mut next) = (&launches[..], FIRST_LAUNCHES);
        while rest.len() > next {
            let (now, later) = rest.split_at(next);
            encode(&mut encoder, now, &mut self.tally);
            self.device.queue.submit([encoder.finish()]);
            encoder = self.device.encoder();
            (rest, next) = (later, 2 * next);
        }
        encode(&mut encoder, rest, &mut self.tally);
        if masks.iter().any(|mask| mask.known().is_none()) {
            // The device computes while somebody else computes masks.
            self.device.queue.submit([encoder.finish()]);
            encoder = self.device.encoder();
        }
        let mut first_allowed = masks.iter().map(|mask| first_allowed(mask, vocab));
        let from = self.sampled.len() - samples.len();
        for (sample, (_, fallback)) in samples.iter().zip(&mut self.sampled[from..]) {
            if sample[1] != NONE {
                *fallback = first_allowed.next().unwrap_or(0);
            }
        }
        for (index, mask) in masks.iter().enumerate() {
            let mut bits = mask.bits().to_vec();
            bits.resize(words, 0);
            let at = (index * words * 4) as u64;
            self.device.queue.write_buffer(&self.model.io.masks, at, cast_slice(&bits));
        }
        if !samples.is_empty() {
            self.device.queue.write_buffer(&self.model.io.samples, 0, cast_slice(&samples));
            let args = Args { rows: samples.len() as u32, ..Args::default() };
            let argmax = self.model.argmax.each_ref().map(|launch| Planned::new(launch, &self.plan, args));
            encode(&mut encoder, &argmax, &mut self.tally);
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
        if !self.sampled.is_empty() {
            let size = (self.sampled.len() * 4) as u64;
            encoder.copy_buffer_to_buffer(&self.model.io.tokens, 0, &self.tokens, 0, size);
        }
        self.device.queue.submit([encoder.finish()]);
        if for_host.is_empty() {
            return Ok(());
        }
        let Self { answers, scratch, device, rows, .. } = self;
        device.read(rows, count * (logits + normed), |words| {
            let row = |base: usize, width: usize, row: usize| {
                let bytes = &words[base + row * width..][..width];
                bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
            };
            for &(index, place) in &for_host {
                let want = &step.outputs[index].want;
                answers[index] = match want {
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
            &Grid::Merge(count) => {
                (0, [if plan.needs_merge(launch.kv_group) { count } else { 0 }, args.rows])
            }
            Grid::Pages => (0, [args.rows.min(PAGES_X), args.rows.div_ceil(PAGES_X)]),
            &Grid::Product(outputs, ref products) => product(products, all as u32, args.rows, outputs),
            &Grid::Attention(tile, heads) => (0, [plan.items(launch.kv_group, tile), heads]),
        };
        Self { launch, variant, workgroups, args, counter: launch.counter + variant }
    }

    fn new(launch: &'a Launch, plan: &Plan, args: Args) -> Self {
        Self::of(launch, plan, args, args.rows as usize)
    }

    fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        let [x, y] = self.workgroups;
        pass.set_pipeline(self.launch.kernels[self.variant].inner());
        pass.set_bind_group(0, &self.launch.group, &[]);
        pass.set_immediates(0, bytes_of(&self.args));
        let arguments = &self.launch.arguments[self.variant];
        if !arguments.is_empty() {
            pass.set_immediates(ARGS_BYTES, cast_slice(arguments));
        }
        pass.dispatch_workgroups(x, y, 1);
    }
}

/// Encodes and counts these launches, one after the other.
fn encode(encoder: &mut wgpu::CommandEncoder, launches: &[Planned<'_>], tally: &mut Tally) {
    let mut pass = encoder.begin_compute_pass(&Default::default());
    for planned in launches {
        planned.encode(&mut pass);
        tally.launched(planned.counter);
    }
}

/// What a slice of the output rows takes up to the logits, with the whole pass before the first one.
fn launches<'a>(model: &'a Model, plan: &Plan, first: usize, count: usize) -> Vec<Planned<'a>> {
    let mut launches = Vec::new();
    if first == 0 {
        launches.extend(model.body.iter().map(|launch| {
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
        let args = Args { first: first as u32, rows: count as u32, ..plan.args(0) };
        launches.push(Planned::new(&model.head_norm, plan, args));
        if first < plan.logit_rows {
            let all = plan.logit_rows;
            launches.extend(model.head.iter().map(|launch| Planned::of(launch, plan, args, all)));
        }
    }
    launches.retain(|planned| planned.workgroups[0] > 0);
    launches
}

impl Runner for GpuRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.program, &self.limits)?;
        self.device.check()?;
        self.plan.make(step);
        self.answers.clear();
        self.answers.resize(step.outputs.len(), None);
        self.sampled.clear();
        self.device.queue.write_buffer(&self.model.io.step, 0, cast_slice(&self.plan.words));
        let (outputs, logits) = (self.plan.output_rows.len(), self.plan.logit_rows);
        let mut first = 0;
        loop {
            // Rows with and without logits do not share a slice.
            let end = if first < logits { logits } else { outputs };
            let count = (end - first).min(LOGIT_ROWS);
            self.run_slice(step, first, count)?;
            first += count;
            if first >= outputs {
                break;
            }
        }
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        if ticket != Ticket(self.submitted) {
            return Err(StepError::Invalid(format!("step {} was never submitted or is long over", ticket.0)));
        }
        let Self { answers, sampled, device, tokens, .. } = self;
        if sampled.is_empty() {
            device.wait()?;
        } else {
            device.read(tokens, sampled.len() * 4, |words| {
                for (&(index, fallback), token) in sampled.iter().zip(words.as_chunks().0) {
                    let token = match u32::from_le_bytes(*token) {
                        NONE => fallback,
                        token => token,
                    };
                    answers[index] =
                        Some(Outcome::Sampled(Sampled { token, logprob: None, top: Vec::new() }));
                }
            })?;
            sampled.clear();
        }
        out.outcomes.clear();
        for answer in answers {
            let answer = answer.take();
            out.outcomes
                .push(answer.ok_or_else(|| StepError::Invalid("this step was collected before".into()))?);
        }
        Ok(())
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        let Limits { pages, block_size, kv_dtype, .. } = self.limits;
        let size = 4 * page_words(&self.program.kv, block_size, kv_dtype) as u64;
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
        self.device.queue.submit([encoder.finish()]);
        self.device.check()
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        self.tally.snapshot()
    }
}

/// The lowest token that a mask allows, or 0.
fn first_allowed(mask: &TokenMask, vocab: usize) -> u32 {
    let bits = mask.bits();
    let words = bits.iter().zip((0..).step_by(32));
    let mut first = words.filter(|(word, _)| **word != 0).map(|(word, base)| base + word.trailing_zeros());
    first.next().filter(|&token| (token as usize) < vocab).unwrap_or(0)
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
