//! A loaded model: the contract's [`Runner`].

mod adapters;
mod moves;
mod page_kernels;
mod prepare;
mod repeat;
mod rows;
mod run;
mod table;
mod upload;

use std::{sync::Arc, time::Duration};

use bytemuck::cast_slice;
use half::f16;
use paguro_backend::{
    AdapterId, AdapterWork, Carried, Exit, ExpertCount, Input, KernelCount, Limits, LoadError, LowRank,
    MatrixId, OutputKind, OutputValue, PageContent, PageFormat, PageId, PageMove, Program, Runner, Step,
    StepError, StepOutput, Ticket, Weights, sampling::Scratch,
};

use crate::{
    GpuOptions,
    canary::Canaries,
    device::Device,
    emit::{Bound, LayerPool, LayerState, Model, StateBuffer, emit, host_row_words},
    flight::Flight,
    heads::KvLayout,
    kernel_statistics::KernelStatistics,
    lower::{Facts, LOGIT_ROWS},
    pace::{Pace, Pass},
    page_io::{self, PageReader},
    pages::{self, page_words},
    plan::{Plan, Tables},
    sampler,
};

use adapters::AdaptedModel;
use moves::Content;
use page_kernels::PageKernels;
pub use page_kernels::words as page_kernel_words;
pub use rows::Readback;
use table::Table;
use upload::Upload;

/// Name under which repeated steps are counted.
const REPEATED: &str = "step_repeated_without_handoff";

/// A model on a GPU.
pub struct GpuRunner {
    device: Arc<Device>,
    program: Program,
    /// Shapes and vectors.
    weights: Weights,
    kv: KvLayout,
    limits: Limits,
    model: Model,
    adapted: AdaptedModel,
    /// Readback of tokens and of the word that kernels set when they give up (`handoff.wgsl`), for one step and the next.
    canaries: Canaries,
    /// Times of launches, where submissions have to be short.
    pace: Pace,
    /// Pauses steps, of a tower.
    pauses: Option<Arc<paguro_backend::Pace>>,
    options: GpuOptions,
    /// Readback of rows of logits or embeddings, of the last step and the one before. Only [several lanes](lanes) have two buffers.
    rows: [wgpu::Buffer; 2],
    /// True if rows may be read when their step is collected.
    defers_rows: bool,
    /// Rows that a step keeps for the next one, see [`Carried::given`].
    kept: Option<wgpu::Buffer>,
    /// A page of one layer on its way: buffers are not copied onto themselves.
    copied: wgpu::Buffer,
    /// Words of a page of K, or of V, of one layer.
    page_words: usize,
    /// Content of each page; empty where all pages have the same content at all times.
    contents: Vec<Content>,
    /// Kernels that change the content of pages; `None` if all pages have the same content at all times.
    page_kernels: Option<PageKernels>,
    /// Content of each K/V group's pages.
    of_groups: Vec<Content>,
    table: Option<Table>,
    /// Given rows on their way to the device, of as many steps as may be in flight; none without given rows.
    uploads: Vec<Upload>,
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
    /// Outputs of the step that was submitted last whose rows are kept, in the order of their places.
    carried_rows: Vec<usize>,
    /// The device's tokens of the step that was read last.
    tokens: Vec<u32>,
    /// Rows that the step which was collected last has kept.
    kept_rows: Vec<f32>,
    /// See [`Runner::spin`].
    spin: Duration,
    /// True while a step is encoded, or is held, whose inputs are not known.
    awaits_inputs: bool,
    /// Result of reading a step before it was collected.
    early: Option<Result<bool, StepError>>,
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
    /// Uploads the weights that are not bound yet, and allocates all buffers for `limits`.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load(
        device: Arc<Device>,
        program: &Program,
        weights: Weights,
        limits: Limits,
        bound: Bound,
        options: &GpuOptions,
    ) -> Result<Self, LoadError> {
        program.check(&weights)?;
        device.check().map_err(|error| LoadError::Device(error.to_string()))?;
        let target = device.now();
        let kv = KvLayout::of(program, &target.name)?;
        let facts = Facts::new(target, program, &kv, Some(&weights), &limits)?;
        let model = emit(&device, &facts, &weights, bound)?;
        let page_words = page_words(&kv, limits.block_size, limits.kv_dtype);
        let page_kernels = pages::have_kinds(program, &kv, limits.kv_dtype)
            .then(|| PageKernels::new(&device, &model, program.state.bytes(), page_words, &limits));
        let page_kernels = page_kernels.transpose()?;
        device.compile_all()?;
        weights.check_unchanged()?;
        if options.poison {
            poison(&device, &model);
        }
        let flight = || Flight::new(Plan::new(&kv, &limits, &model.tilings, Tables::of(program)));
        let flights = [flight(), flight()];
        device.wait().map_err(|error| LoadError::Device(error.to_string()))?;
        let first = |of| kv.groups.iter().position(|group| pages::alike(group, of)).unwrap_or(0);
        let of_groups: Vec<_> = kv.groups.iter().map(|group| Content::Group(first(group))).collect();
        let page_bytes = 8 * page_words * model.pages.len();
        let host_rows = || device.host_buffer(host_row_words(program, &limits) + 1, "rows for the host");
        let first = host_rows()?;
        let second = if lanes(program) > 1 { host_rows()? } else { first.clone() };
        let rows = [first, second];
        let uploads = model
            .given
            .iter()
            .flat_map(|given| (0..lanes(program)).map(|_| Upload::new(&device, given.size() as usize / 4)));
        let uploads = uploads.collect::<Result<_, _>>()?;
        Ok(Self {
            pace: Pace::new(options.submission.or(device.rules.submission)),
            pauses: None,
            options: options.clone(),
            canaries: Canaries::new(
                &device,
                token_words(&limits) + row_words(program, &limits),
                most_submissions(&model, &limits),
            )?,
            rows,
            defers_rows: lanes(program) > 1 || program.head().is_none(),
            kept: match kept_words(program, &limits) {
                0 => None,
                words => Some(device.buffer(words, "rows for the next step")?),
            },
            copied: device.buffer(page_words, "a page")?,
            page_words,
            contents: vec![Content::Nothing; if page_kernels.is_some() { limits.pages } else { 0 }],
            page_kernels,
            of_groups,
            uploads,
            table: program.layer_embeds().map(|embeds| Table::new(weights.table(embeds.table).clone())),
            page_format: page_io::format(&device, &limits, &model.tilings, page_bytes),
            page_reader: None,
            kernel_statistics: KernelStatistics::new(&device, model.counters.clone())?,
            model,
            adapted: AdaptedModel::default(),
            weights: adapters::without_bytes(&weights),
            program: program.clone(),
            kv,
            limits,
            spin: match is_stage(program) {
                true => options.spin.unwrap_or_else(|| device.spin()),
                false => Duration::ZERO,
            },
            device,
            scratch: Scratch::default(),
            sampler: sampler::Scratch::default(),
            flights,
            carried: Vec::new(),
            carried_rows: Vec::new(),
            tokens: Vec::new(),
            kept_rows: Vec::new(),
            awaits_inputs: false,
            early: None,
            submitted: 0,
            collected: 0,
            failed: 0,
            moved_before: 0,
            repeated: 0,
        })
    }

    /// Returns the runner with steps that another thread can pause.
    pub fn paced(self, pace: Arc<paguro_backend::Pace>) -> Self {
        Self { pauses: Some(pace), ..self }
    }

    /// Encodes and submits a step; it is held if it has no inputs yet.
    fn start(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.program, &self.limits)?;
        step.has_adapters(|id| self.adapted.has(id))?;
        let end = self.limits.max_context.next_multiple_of(256) as u32;
        if let Some(at) = step.coordinates.iter().flatten().find(|&&at| at >= end) {
            return Err(StepError::Invalid(format!(
                "a coordinate is {at}, but the GPU has rotations below {end}"
            )));
        }
        self.device.check()?;
        let most = lanes(&self.program).max(1 + usize::from(!step.carried.is_empty()));
        if self.submitted - self.collected >= most as u64 {
            return Err(StepError::Invalid("the step before was not collected".into()));
        }
        let is_known = |carried: &&Carried| {
            self.carried.contains(&carried.output)
                && carried.given.is_none_or(|output| self.carried_rows.contains(&output))
        };
        if let Some(Carried { output, .. }) = step.carried.iter().find(|carried| !is_known(carried)) {
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
        self.carried_rows.clone_from(&self.flights[flight].kept);
        if submitted.is_err() {
            self.canaries.discard(self.submitted);
            self.submitted -= 1;
        }
        submitted.map(|()| {
            self.note_end();
            Ticket(self.submitted)
        })
    }

    /// Remembers where the step that was submitted last ends.
    fn note_end(&mut self) {
        if self.spin > Duration::ZERO && !self.awaits_inputs {
            let flight = self.flight_index();
            self.flights[flight].end = Some(self.device.end_of_submissions());
        }
    }

    /// Index of the flight of the step that was submitted last.
    fn flight_index(&self) -> usize {
        flight_index(self.submitted)
    }
}

/// Index of a step's flight.
fn flight_index(step: u64) -> usize {
    step as usize % 2
}

impl Runner for GpuRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        self.drop_prepared();
        self.start(step)
    }

    fn prepare(&mut self, step: &Step<'_>) -> Result<bool, StepError> {
        self.drop_prepared();
        // Launches that are timed run at once, and cannot be held.
        let has_two = lanes(&self.program) > 1 && !self.device.target.timed;
        if has_two && self.can_hold(step) {
            self.hold(step)?;
        }
        Ok(has_two)
    }

    fn submit_prepared(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        match self.awaits_inputs {
            true => self.release_prepared(step),
            false => self.start(step),
        }
    }

    fn is_done(&self, Ticket(number): &Ticket) -> bool {
        self.flights[flight_index(*number)].end.as_ref().is_some_and(|end| self.device.is_done(end))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        let Ticket(number) = ticket;
        if number != self.collected + 1 || number > self.submitted {
            return Err(StepError::Invalid(format!("step {number} was never submitted or is long over")));
        }
        let mut read = self.early.take().unwrap_or_else(|| self.read(number));
        if !matches!(read, Ok(false)) {
            // It would follow a step that is repeated or has failed.
            self.drop_prepared();
        }
        if matches!(read, Ok(true)) && number > self.failed {
            let last = if self.canaries.holds() { number } else { self.submitted };
            read = self.repeat(number, last).and_then(|()| self.read(number));
        }
        self.collected = number;
        if matches!(read, Ok(false)) {
            self.release();
        } else {
            // A step that is on its way continues this one.
            self.failed = self.submitted;
            if self.canaries.holds() {
                self.canaries.discard(self.submitted);
            }
        }
        if read? {
            return Err(self.gave_up());
        }
        if number <= self.failed {
            return Err(StepError::Device(format!("the step before failed on {}", self.device.target.name)));
        }
        let Flight { answers, kept, .. } = &mut self.flights[flight_index(number)];
        self.kept_rows.clear();
        for &output in kept.iter() {
            match answers.get(output) {
                Some(Some(OutputValue::Embedding(row))) => self.kept_rows.extend_from_slice(row),
                _ => self.kept_rows.resize(self.kept_rows.len() + self.program.hidden, 0.0),
            }
        }
        out.outcomes.clear();
        out.outcomes.extend(answers.drain(..).flatten());
        Ok(())
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        match kind {
            // Launches that are timed run at once, and cannot be held.
            OutputKind::Sample(request) => {
                (self.table.is_none() || !self.device.target.timed)
                    && sampler::carries(request, self.program.vocab)
            }
            OutputKind::Embedding => self.kept.is_some(),
            OutputKind::Score { token: _, top: _ }
            | OutputKind::Logits
            | OutputKind::Mean
            | OutputKind::Residual => false,
        }
    }

    fn lanes(&self) -> usize {
        lanes(&self.program)
    }

    fn spin(&self) -> Duration {
        self.spin
    }

    fn load_head(
        &mut self,
        program: &Program,
        weights: Weights,
        shared: &[(MatrixId, MatrixId)],
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let bound = self.model.bound.shared(shared);
        let head = Self::load(self.device.clone(), program, weights, limits, bound, &self.options)?;
        Ok(Box::new(head))
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        self.drop_prepared();
        self.flush()?;
        if self.submitted > self.collected {
            self.moved_before = self.submitted + 1;
        }
        // The numbers of the pages of a submission have room for all pages.
        for moves in moves.chunks(self.limits.pages) {
            let encoder = self.encode_moves(moves)?;
            self.canaries.submit(&self.device, self.submitted + 1, encoder)?;
        }
        self.device.check()
    }

    fn page_format(&self) -> Option<PageFormat> {
        Some(self.page_format.clone())
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.page_format.check(pages, out.len(), &self.limits)?;
        self.drop_prepared();
        self.flush()?;
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
        self.flush()?;
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

    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        self.add_pairs(id, pairs)
    }

    fn prepare_adapters(&mut self) -> Option<AdapterWork> {
        self.adapter_work()
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.remove_adapter(id);
    }

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        self.flush()?;
        let Self { device, model, .. } = self;
        if model.pools.is_empty() {
            return Ok(Vec::new());
        }
        let words = 4 * model.pools.len();
        let made = device.host_buffer(words, "counts of experts");
        let host = made.map_err(|error| StepError::Device(error.to_string()))?;
        let mut encoder = device.encoder();
        for (index, LayerPool { places, .. }) in model.pools.iter().enumerate() {
            encoder.copy_buffer_to_buffer(places, 0, &host, 16 * index as u64, 16);
        }
        let submission = device.queue.submit([encoder.finish()]);
        let mut counts = Vec::new();
        device.read(&host, 4 * words, submission, |bytes| {
            let words: Vec<u64> =
                bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes).into()).collect();
            let pools = model.pools.iter().zip(words.as_chunks::<4>().0);
            counts.extend(pools.map(|(pool, &[_, hits, misses, streamed])| {
                let &LayerPool { layer, slots, bytes, .. } = pool;
                ExpertCount { layer, slots, hits, misses, streamed, bytes }
            }));
        })?;
        Ok(counts)
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        let mut counts = self.kernel_statistics.snapshot();
        if self.repeated > 0 {
            counts.push(KernelCount { name: REPEATED.to_owned(), launches: self.repeated, nanoseconds: 0 });
        }
        counts
    }
}

/// Returns the number of steps that may be in flight without carried tokens: two of texts that are whole in one step, and two of a stage,
/// so that the device computes one while the host reads the rows of the other and encodes the next.
pub fn lanes(program: &Program) -> usize {
    1 + usize::from(program.bidirectional && program.head().is_some() || is_stage(program))
}

/// True for a stage of a model whose other layers are on other devices.
fn is_stage(program: &Program) -> bool {
    match program.input {
        Input::Rows => true,
        Input::Tokens(_) => matches!(program.exit, Exit::Rows),
        Input::Patches(_) => false,
    }
}

/// Words of the tokens of a step for the host, and of the word before them.
fn token_words(limits: &Limits) -> usize {
    1 + limits.max_outputs.max(1)
}

/// Words of the rows that the host reads together with the tokens: those of a step that is not large.
pub fn row_words(program: &Program, limits: &Limits) -> usize {
    if program.merged().is_none() { limits.max_outputs.min(LOGIT_ROWS) * program.hidden } else { 0 }
}

/// Words of the rows that are kept for the next step.
pub fn kept_words(program: &Program, limits: &Limits) -> usize {
    if program.joined().is_some() { limits.max_outputs * program.hidden } else { 0 }
}

/// Submissions of the largest step, if each launch had its own.
fn most_submissions(model: &Model, limits: &Limits) -> usize {
    // Beside its head, a slice of output rows has a norm, five launches that sample, and copies.
    let passes = Pass::most(limits.max_rows);
    let slices = passes + limits.max_outputs.div_ceil(LOGIT_ROWS);
    let launches = model.body.iter().map(|(_, launches)| launches.len()).max().unwrap_or(0);
    // With adapters, each matmul has another launch before it.
    let of_head = model.head.as_ref().map_or(0, |head| head.logits.len() + head.one_row.len());
    2 * passes * launches + 2 * slices * (of_head + 8)
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
