//! An engine: its start, its end, and the memory that it will need. `worker.rs` has the loop of its thread.

mod commands;
mod tiers;
mod worker;

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, mpsc::channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use paguro_backend::{
    Backend, GivenRows, Input, Limits, LoadError, Output, OutputKind, OutputValue, PageId, Program, Runner,
    StateId, Step, StepOutput, StepSequence, Weights,
};
use paguro_kv_store::ModelInfo;
use paguro_model::{Model, Vision, tokenizer::Tokenizer};

use self::worker::Worker;
use crate::{
    DraftModel, EngineError, EngineOptions, EnginePlan, Handle,
    disk::{Disk, Identity},
    encoder::{self, Encoder, EncoderCache},
    events::Events,
    handle::{Command, Port, Queue, Shared},
    host::Host,
    layout::BlockLayout,
    options::Resolved,
    pages::Pages,
    replicas::BlockIndex,
    request::{PictureLimits, RequestLimits},
    scheduler::Scheduler,
    speculation::DraftRunner,
    tiers::Tiers,
};

/// The parts of a model that an engine needs.
#[derive(Clone, Debug)]
pub struct ModelParts {
    /// The lowered model.
    pub program: Program,
    /// Its weights; cheap to clone, they share their bytes.
    pub weights: Weights,
    /// Makes text of tokens; without one, events have no text.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Tokens that end every answer that does not ignore them.
    pub stop_tokens: Vec<u32>,
    /// Most tokens that the program was made for in one sequence.
    pub max_context: usize,
    /// Its vision tower, if it sees.
    pub vision: Option<Arc<Vision>>,
}

impl From<&Model> for ModelParts {
    fn from(model: &Model) -> Self {
        Self {
            program: model.program.clone(),
            weights: model.weights.clone(),
            tokenizer: Some(model.tokenizer.clone()),
            stop_tokens: model.stop_tokens.clone(),
            max_context: model.max_context,
            vision: model.vision.clone(),
        }
    }
}

impl From<&Arc<Model>> for ModelParts {
    fn from(model: &Arc<Model>) -> Self {
        model.as_ref().into()
    }
}

/// A model that runs. Dropping it cancels all requests and waits for the thread.
#[derive(Debug)]
pub struct Engine {
    handle: Handle,
    /// The thread, or those of [several](crate::Replicas) engines.
    threads: Vec<JoinHandle<()>>,
}

impl Engine {
    /// Computes the memory of an engine with these options, without reading or allocating. `max_context` is the maximum
    /// context of the program.
    ///
    /// # Errors
    /// [`EngineError`]: an option is invalid, or the pages do not hold one block.
    pub fn plan(
        backend: &dyn Backend,
        program: &Program,
        weights: &Weights,
        vision: Option<&Vision>,
        max_context: usize,
        options: &EngineOptions,
    ) -> Result<EnginePlan, EngineError> {
        let vision = vision.filter(|vision| backend.runs_tower(&vision.tower.program));
        let program = &for_device(program.clone(), vision);
        let resolved = options.resolve(backend, program, weights, vision, max_context)?;
        let (model, layout) = (resolved.limits, resolved.layout.clone());
        let mut plan = resolved.plan(backend, program, weights);
        if let Some(draft) = options.draft_model(program) {
            plan.add_draft(draft, backend, &model, &layout);
        }
        if let Some(vision) = vision {
            let tower = encoder::plan(backend, vision, options.max_image_tokens, options.encoder_cache);
            plan.memory.weights = plan.memory.weights.saturating_add(tower.weights);
            plan.memory.buffers = plan.memory.buffers.saturating_add(tower.buffers);
        }
        Ok(plan)
    }

    /// Loads the model into the backend and starts the engine thread.
    ///
    /// # Errors
    /// [`EngineError`]: an option makes no sense, or the backend refuses the model or the number of pages.
    pub fn start(
        backend: &dyn Backend,
        model: impl Into<ModelParts>,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        let ModelParts { program, weights, tokenizer, stop_tokens, max_context, vision } = model.into();
        let tower = vision.as_ref().filter(|vision| backend.runs_tower(&vision.tower.program));
        let program = for_device(program, tower.map(Arc::as_ref));
        let resolved = options.resolve(backend, &program, &weights, tower.map(Arc::as_ref), max_context)?;
        let Resolved { limits, step_tokens, layout } = resolved;
        let pictures = match (&vision, tower) {
            (None, _) => PictureLimits::TextOnly,
            (Some(_), None) => PictureLimits::Device,
            // Every decoding sequence has a row beside a span.
            (_, Some(_)) if layout.has_spans => {
                PictureLimits::Rows(limits.max_rows - limits.max_sequences + 1)
            }
            (_, Some(_)) => PictureLimits::Rows(usize::MAX),
        };
        let start = |vision| Encoder::start(backend, vision, options.max_image_tokens);
        let encoder = tower.map(start).transpose()?;
        let mut pages = Pages::new(limits.pages, options.page_order);
        // K and V of encoders depend on what follows them.
        let has_prefixes = options.prefix_cache && !program.bidirectional;
        // Without room for a checkpoint, cached blocks are useless.
        if has_prefixes && (program.state.is_empty() || layout.checkpoints.is_some()) {
            // A page's content depends on the program and the block size besides the tokens. It also depends on the
            // weights, but an engine has one set of weights, and the cache ends with the engine.
            let salt = [&program.digest()[..], &limits.block_size.to_le_bytes()].concat();
            pages = pages.with_cache(&salt, options.cache_low_water, options.cache_high_water);
        }
        let request_limits = RequestLimits {
            pictures,
            vocab: program.vocab,
            token_ids: program.token_ids(),
            max_context: limits.max_context,
            max_sequences: limits.max_sequences,
            is_encoder: program.bidirectional,
        };
        let mut runner = backend.load(&program, weights, limits)?;
        let begin = Instant::now();
        let rows = probe(runner.as_mut(), &layout, &limits, &program)?;
        let duration = begin.elapsed();
        if pages.has_cache() {
            pages.tiers = open_tiers(&options, runner.as_ref(), &program, &limits);
        }
        if let Some(sink) = options.events.clone().filter(|_| pages.has_cache()) {
            let group = layout.event_group();
            let window = layout.windows.get(group).copied().flatten();
            pages.events = Some(Events::new(sink, limits.block_size, group, window));
            if let Some(disk) = pages.tiers.as_mut().and_then(|tiers| tiers.disk.as_mut()) {
                disk.reports = true;
            }
        }
        let blocks = pages.plain_root().map(|root| (root, limits.block_size));
        let mut scheduler = Scheduler::new(limits, options.step_time, options.max_wait_steps, layout, pages);
        scheduler.record_probe(rows, duration);
        scheduler.encoder_cache = EncoderCache::new(options.encoder_cache);
        if options.speculate {
            scheduler.speculate();
        }
        let mut draft_problem = None;
        let mut drafter = None;
        if let Some(draft) = options.draft_model(&program) {
            match start_draft(backend, runner.as_mut(), draft, &limits, scheduler.layout(), program.vocab) {
                Ok(started) => {
                    scheduler.draft_by(&started);
                    drafter = Some(started);
                }
                // A head comes with the model, and nobody has asked for it.
                Err(EngineError::Load(error @ LoadError::Unsupported { .. })) if draft.shared.is_some() => {
                    draft_problem = Some(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        if drafter.is_none() {
            scheduler.lanes = runner.lanes();
        }
        let lanes = scheduler.lanes;
        let queue = Queue::new(options.queue_capacity, options.queue_tokens);
        let space = scheduler.disk().and_then(|disk| disk.space().cloned());
        let mut shared = Shared::new(request_limits, queue, tokenizer, stop_tokens, scheduler.stats());
        shared.adapter_limits = options.adapters;
        shared.draft_problem = draft_problem;
        shared.draft_depth = options.draft_depth;
        shared.device = backend.name().to_owned();
        shared.blocks = blocks;
        (shared.step_tokens, shared.lanes) = (step_tokens, lanes);
        shared.max_image_tokens = tower.map(|vision| encoder::most_rows(vision, options.max_image_tokens));
        if let Some(space) = space {
            let _ = shared.disk.set(space);
        }
        let shared = Arc::new(shared);
        let (commands, receiver) = channel();
        let worker = Worker {
            scheduler,
            runner,
            commands: receiver,
            clients: HashMap::new(),
            shared: shared.clone(),
            outputs: Vec::new(),
            answer: StepOutput::default(),
            loaded: channel(),
            in_flight: VecDeque::new(),
            encoder,
            drafter,
            drafting: Duration::ZERO,
            loading: VecDeque::new(),
            failures: options.failures,
            stopping: false,
        };
        let thread =
            thread::Builder::new().name("paguro-engine".into()).spawn(move || worker.run_guarded())?;
        Ok(Self { handle: Handle::new(Port { number: 0, shared, commands }), threads: vec![thread] })
    }

    /// Returns a handle that submits requests.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Cancels all requests and waits for the thread to end, like dropping the engine.
    pub fn shutdown(self) {
        drop(self);
    }

    /// Accepts no more requests, finishes those that it has, and waits for the thread to end.
    pub fn finish(mut self) {
        self.stop(true);
    }

    /// Joins numbered engines of one model, whose events `index` gets. There is at least one.
    pub(crate) fn joined(engines: Vec<(usize, Self)>, index: Arc<BlockIndex>) -> Self {
        let (mut ports, mut threads) = (Vec::new(), Vec::new());
        for (number, mut engine) in engines {
            ports.extend(engine.handle.ports.iter().map(|port| Port { number, ..port.clone() }));
            threads.append(&mut engine.threads);
        }
        Self { handle: Handle { ports: ports.into(), index: Some(index) }, threads }
    }

    fn stop(&mut self, finish: bool) {
        if self.threads.is_empty() {
            return;
        }
        for port in &*self.handle.ports {
            // Without a receiver, the thread has already ended.
            let _ = port.commands.send(Command::Stop { finish });
        }
        for thread in self.threads.drain(..) {
            // A panic was caught inside of the thread and is reported to all callers.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop(false);
    }
}

/// Returns the program of a text model for a device with or without a tower: without one, it has text only, for which given rows,
/// coordinates and spans have no meaning.
fn for_device(mut program: Program, vision: Option<&Vision>) -> Program {
    if vision.is_none() && matches!(program.input, Input::Tokens(_)) {
        program.given_parts = 0;
        program.ropes.iter_mut().for_each(|rope| rope.axes.clear());
        program.kv.groups.iter_mut().for_each(|group| group.spans = false);
    }
    program
}

/// Loads a model that drafts, and measures a step of it.
///
/// # Errors
/// The backend refuses it.
fn start_draft(
    backend: &dyn Backend,
    runner: &mut dyn Runner,
    draft: &DraftModel,
    limits: &Limits,
    layout: &BlockLayout,
    vocab: usize,
) -> Result<DraftRunner, EngineError> {
    let own = draft.limits(limits, layout);
    let mut runner = draft.load(backend, runner, own)?;
    let layout = BlockLayout::new(&draft.program, own.block_size, own.max_rows);
    let begin = Instant::now();
    let rows = probe(runner.as_mut(), &layout, &own, &draft.program)?;
    Ok(DraftRunner::new(runner, &draft.program, own, vocab, (rows, begin.elapsed())))
}

/// Computes a few tokens to check that the logits are finite, and to measure a step. Returns their number. The pages
/// that it writes are free; their next owner overwrites them before reading. A program that shares pages reads those that its model has
/// written here.
///
/// # Errors
/// The step fails, or a logit is NaN.
fn probe(
    runner: &mut dyn Runner,
    layout: &BlockLayout,
    limits: &Limits,
    program: &Program,
) -> Result<usize, EngineError> {
    let rows = 8.min(limits.block_size).min(limits.max_context).min(limits.max_rows);
    let (start, rows) = match program.shares_pages {
        true => (rows.min(limits.max_context - 1), 1),
        false => (0, rows),
    };
    let tokens: Vec<u32> = (0..rows).map(|row| (row * program.vocab / rows) as u32).collect();
    let pages: Vec<PageId> = (1..=layout.groups() as u32).map(PageId).collect();
    let state = program.state.in_place(StateId(0));
    let sequences = [StepSequence { rows: 0..rows, start, tables: 0..pages.len(), state }];
    let kind = if program.bidirectional { OutputKind::Embedding } else { OutputKind::Logits };
    let outputs = [Output { row: rows - 1, kind }];
    let values = vec![0.0; rows * program.given_width()];
    let joined = [GivenRows { rows: 0..rows, values: &values }];
    let given = if program.joined().is_some() { &joined[..] } else { &[] };
    let ticket = runner.submit(&Step {
        tokens: &tokens,
        given,
        sequences: &sequences,
        pages: &pages,
        outputs: &outputs,
        ..Step::default()
    })?;
    let mut answer = StepOutput::default();
    runner.collect(ticket, &mut answer)?;
    match answer.outcomes.as_slice() {
        [OutputValue::Logits(numbers) | OutputValue::Embedding(numbers)]
            if numbers.iter().any(|number| number.is_nan()) =>
        {
            Err(EngineError::NotANumber)
        }
        _ => Ok(rows),
    }
}

/// Opens the tiers of an engine. `None` if it has none, or if the device's pages cannot leave it.
fn open_tiers(
    options: &EngineOptions,
    runner: &dyn Runner,
    program: &Program,
    limits: &Limits,
) -> Option<Tiers> {
    if options.disk.is_none() && options.host.is_none() {
        return None;
    }
    let format = runner.page_format()?;
    let (block_size, page_bytes) = (limits.block_size, format.page_bytes);
    let disk = options.disk.as_ref().map(|cache| {
        let digest: String = program.digest().iter().map(|byte| format!("{byte:02x}")).collect();
        let program = format!("{digest} {}", paguro_model::WEIGHTS);
        let info = ModelInfo { model: cache.model.clone(), format: format.name.clone(), block_size };
        Disk::new(cache, Identity { program, info, shape: format!("{block_size} {page_bytes}") })
    });
    let worth = options.disk.as_ref().map_or(1.0, |cache| cache.worth);
    Some(Tiers::new(options.host.clone().map(Host::new), disk, worth, page_bytes))
}
