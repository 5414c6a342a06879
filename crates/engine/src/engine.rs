//! The engine thread: it processes commands, plans a step, runs it, and publishes the results. It sleeps when it is
//! idle.

mod tiers;

use std::{
    any::Any,
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use paguro_backend::{
    Backend, Limits, Outcome, Output, PageId, Program, Runner, StateId, Step, StepError, StepOutput,
    StepSequence, Ticket, Want, Weights,
};
use paguro_kv_store::ModelInfo;
use paguro_model::{Model, tokenizer::Tokenizer};

use self::tiers::{Loaded, Saving};
use crate::{
    EngineError, EngineOptions, EnginePlan, Handle,
    disk::{Disk, Identity},
    events::Events,
    handle::{Command, EventSender, Queue, Shared},
    host::Host,
    layout::Layout,
    options::Resolved,
    pages::Pages,
    request::{Event, RequestLimits},
    scheduler::Scheduler,
    snapshot::Snapshot,
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
}

impl From<&Model> for ModelParts {
    fn from(model: &Model) -> Self {
        Self {
            program: model.program.clone(),
            weights: model.weights.clone(),
            tokenizer: Some(model.tokenizer.clone()),
            stop_tokens: model.stop_tokens.clone(),
            max_context: model.max_context,
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
    thread: Option<JoinHandle<()>>,
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
        max_context: usize,
        options: &EngineOptions,
    ) -> Result<EnginePlan, EngineError> {
        Ok(options.resolve(backend, program, weights, max_context)?.plan(backend, program, weights))
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
        let ModelParts { program, weights, tokenizer, stop_tokens, max_context } = model.into();
        let Resolved { limits, layout } = options.resolve(backend, &program, &weights, max_context)?;
        let mut pages = Pages::new(limits.pages, options.page_order);
        // K and V of encoders depend on what follows them.
        let has_prefixes = options.prefix_cache && !program.bidirectional;
        // Without room for a checkpoint, cached blocks are useless.
        if has_prefixes && (program.state.is_empty() || layout.checkpoints.is_some()) {
            // A page's content depends on the program and the block size besides the tokens. It also depends on the
            // weights, but an engine has one set of weights, and the cache ends with the engine.
            let salt = format!("{} {program:?}", limits.block_size);
            pages = pages.with_cache(salt.as_bytes(), options.cache_low_water, options.cache_high_water);
        }
        let request_limits = RequestLimits {
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
            let full = layout.windows.iter().position(Option::is_none);
            pages.events = Some(Events::new(sink, limits.block_size, full.unwrap_or(0)));
        }
        let mut scheduler = Scheduler::new(limits, options.step_time, options.max_wait_steps, layout, pages);
        scheduler.record_probe(rows, duration);
        let queue = Queue::new(options.queue_capacity, options.queue_tokens);
        let space = scheduler.disk().and_then(|disk| disk.space().cloned());
        let shared = Shared::new(request_limits, queue, tokenizer, stop_tokens, scheduler.stats());
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
            in_flight: None,
            stopping: false,
        };
        let thread =
            thread::Builder::new().name("paguro-engine".into()).spawn(move || worker.run_guarded())?;
        Ok(Self { handle: Handle { shared, commands }, thread: Some(thread) })
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

    fn stop(&mut self, finish: bool) {
        if let Some(thread) = self.thread.take() {
            // Without a receiver, the thread has already ended.
            let _ = self.handle.commands.send(Command::Stop { finish });
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

/// Computes a few tokens to check that the logits are finite, and to measure a step. Returns their number. The pages
/// that it writes are free; their next owner overwrites them before reading.
///
/// # Errors
/// The step fails, or a logit is NaN.
fn probe(
    runner: &mut dyn Runner,
    layout: &Layout,
    limits: &Limits,
    program: &Program,
) -> Result<usize, EngineError> {
    let rows = 8.min(limits.block_size).min(limits.max_context).min(limits.max_rows);
    let tokens: Vec<u32> = (0..rows).map(|row| (row * program.vocab / rows) as u32).collect();
    let pages: Vec<PageId> = (1..=layout.groups() as u32).map(PageId).collect();
    let state = program.state.in_place(StateId(0));
    let sequences = [StepSequence { rows: 0..rows, start: 0, tables: 0..pages.len(), state }];
    let want = if program.bidirectional { Want::Embedding } else { Want::Logits };
    let outputs = [Output { row: rows - 1, want }];
    let ticket = runner.submit(&Step {
        tokens: &tokens,
        carried: &[],
        sequences: &sequences,
        pages: &pages,
        outputs: &outputs,
    })?;
    let mut answer = StepOutput::default();
    runner.collect(ticket, &mut answer)?;
    match answer.outcomes.as_slice() {
        [Outcome::Logits(numbers) | Outcome::Embedding(numbers)]
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
        let program = format!("{program:?} {}", paguro_model::SOURCES);
        let info = ModelInfo { model: cache.model.clone(), format: format.name.clone(), block_size };
        Disk::new(cache, Identity { program, info, shape: format!("{block_size} {page_bytes}") })
    });
    let worth = options.disk.as_ref().map_or(1.0, |cache| cache.worth);
    Some(Tiers::new(options.host.clone().map(Host::new), disk, worth, page_bytes))
}

/// State of the engine thread.
struct Worker {
    scheduler: Scheduler,
    runner: Box<dyn Runner>,
    commands: Receiver<Command>,
    /// Clients by the number of their request.
    clients: HashMap<u64, Client>,
    shared: Arc<Shared>,
    /// Outputs of a step; the vector is reused.
    outputs: Vec<Output<'static>>,
    answer: StepOutput,
    /// Units that were loaded from other tiers.
    loaded: (Sender<Loaded>, Receiver<Loaded>),
    /// The step that was submitted ahead, while the one before was computed.
    in_flight: Option<Ticket>,
    /// Ends when nothing is left to do.
    stopping: bool,
}

/// A request that has not ended.
struct Client {
    events: EventSender,
    prompt_tokens: usize,
    /// Branches that have not ended.
    open: usize,
    /// True if the request has left the queue, by a start or an end.
    started: bool,
}

impl Worker {
    /// Runs the loop. A panic closes the channels, which wakes all waiting callers, and is reported to later ones.
    fn run_guarded(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run()));
        self.scheduler.send_end();
        let reason = match outcome {
            Ok(()) => "it was shut down".to_owned(),
            Err(panic) => format!("a defect: {}", panic_message(panic.as_ref())),
        };
        // Only a shutdown sets another reason.
        let _ = self.shared.stopped.set(reason);
    }

    fn run(&mut self) {
        loop {
            while let Ok(command) = self.commands.try_recv() {
                self.obey(command);
            }
            if !self.scheduler.is_idle() {
                self.scheduler.expire(Instant::now());
            }
            self.take_loaded();
            if self.scheduler.has_work() || self.in_flight.is_some() {
                self.step();
            } else if !self.scheduler.is_idle() {
                self.publish();
                self.wait_for_load();
            } else if self.stopping {
                self.finish_saves();
                self.publish();
                return;
            } else {
                self.publish();
                if cfg!(debug_assertions)
                    && let Err(problem) = self.scheduler.check()
                {
                    panic!("page accounting is wrong: {problem}");
                }
                let command = match self.save_in_idle_time() {
                    Saving::Some => continue,
                    Saving::Full => match self.commands.recv_timeout(Duration::from_millis(5)) {
                        Err(RecvTimeoutError::Timeout) => continue,
                        received => received.map_err(|_| ()),
                    },
                    // Sleeps until a command arrives. Fails if there are no handles left.
                    Saving::Done => self.commands.recv().map_err(|_| ()),
                };
                match command {
                    Ok(command) => self.obey(command),
                    Err(()) => return,
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { events, .. } if self.stopping => drop(events),
            Command::Submit { checked, prompt, events } => {
                let open = checked.sampling.len();
                let client = Client { events, prompt_tokens: prompt.len(), open, started: false };
                self.clients.insert(checked.id, client);
                self.scheduler.submit(*checked, prompt);
            }
            Command::Cancel { request, branch } => self.scheduler.cancel(request, branch),
            Command::ClearCache => self.scheduler.clear_cache(),
            Command::OpenDisk(weights) => self.open_disk(weights.as_deref()),
            // The caller may have gone.
            Command::KernelCounts(reply) => drop(reply.send(self.runner.kernel_counts())),
            Command::Snapshot { kernels, reply } => {
                let kernels = kernels.then(|| self.runner.kernel_counts());
                drop(reply.send(Snapshot::new(&self.scheduler, kernels)));
            }
            Command::CheckPages(reply) => drop(reply.send(self.scheduler.check())),
            Command::Stop { finish } => {
                let _ = self.shared.stopped.set("it was shut down".into());
                self.stopping = true;
                if !finish {
                    self.scheduler.cancel_all();
                }
            }
        }
        self.publish();
    }

    fn step(&mut self) {
        let begin = Instant::now();
        match self.run_step() {
            Ok(true) => self.scheduler.record_time(begin.elapsed()),
            // All sequences wait for loads.
            Ok(false) => {}
            Err(error) => {
                self.scheduler.fail(&error);
                self.scheduler.record_time(begin.elapsed());
            }
        }
        self.save_some();
        self.publish();
    }

    /// Runs a step. Returns false if there was none.
    fn run_step(&mut self) -> Result<bool, StepError> {
        let ticket = match self.in_flight.take() {
            Some(ticket) => ticket,
            None => match self.plan_and_submit()? {
                Some(ticket) => ticket,
                None => return Ok(false),
            },
        };
        // The device gets its next step while it computes this one.
        let is_ahead = self.scheduler.plan_ahead(|want| self.runner.carries(want));
        let ahead = is_ahead.then(|| {
            self.rescue();
            self.submit_planned(true)
        });
        let collected = self.runner.collect(ticket, &mut self.answer);
        match collected.and_then(|()| self.scheduler.apply(&mut self.answer, Instant::now())) {
            Ok(()) => self.in_flight = ahead.transpose()?,
            Err(error) => {
                if let Some(Ok(ticket)) = ahead {
                    // The step continued from the failed one, so its result is dropped.
                    let _ = self.runner.collect(ticket, &mut self.answer);
                }
                return Err(error);
            }
        }
        Ok(true)
    }

    /// Plans a step and submits it. `None` if all sequences wait for loads.
    fn plan_and_submit(&mut self) -> Result<Option<Ticket>, StepError> {
        self.scheduler.plan(Instant::now());
        self.start_loads();
        self.rescue();
        if !self.scheduler.events.is_empty() {
            // Starts are published before the step, which may take long.
            self.publish();
        }
        if !self.scheduler.moves().is_empty() {
            self.runner.move_pages(self.scheduler.moves())?;
        }
        if self.scheduler.planned_rows() == 0 {
            return Ok(None);
        }
        self.submit_planned(false).map(Some)
    }

    /// Submits the planned step, or the one that was planned ahead of it.
    fn submit_planned(&mut self, ahead: bool) -> Result<Ticket, StepError> {
        let Self { scheduler, runner, .. } = self;
        let mut outputs = recycle(std::mem::take(&mut self.outputs));
        let submitted = if ahead {
            scheduler.write_outputs_ahead(&mut outputs);
            runner.submit(&scheduler.step_ahead(&outputs))
        } else {
            scheduler.write_outputs(&mut outputs);
            runner.submit(&scheduler.step(&outputs))
        };
        self.outputs = recycle(outputs);
        submitted
    }

    /// Publishes the counters before the events, so that a reader of an event sees its step counted.
    fn publish(&mut self) {
        self.scheduler.send_kv_events();
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.scheduler.stats();
        for (request, event) in self.scheduler.events.drain(..) {
            let Some(client) = self.clients.get_mut(&request) else { continue };
            let starts = matches!(event, Event::Started { .. });
            match event {
                Event::Finished { .. } => client.open -= 1,
                Event::Failed(_) => client.open = 0,
                Event::Started { .. }
                | Event::Prefilled { .. }
                | Event::Token { .. }
                | Event::PromptScores { .. }
                | Event::Embedding { .. } => {}
            }
            if !client.started && (starts || client.open == 0) {
                client.started = true;
                self.shared.queue.leave(client.prompt_tokens);
            }
            client.events.send(event);
            if client.open == 0 {
                self.clients.remove(&request);
            }
        }
    }
}

/// An empty vector with the memory of another one, whose elements may have borrowed from something else. (Collecting
/// a vector's own iterator reuses its memory if the types have the same size.)
fn recycle<'to>(mut outputs: Vec<Output<'_>>) -> Vec<Output<'to>> {
    outputs.clear();
    outputs.into_iter().map(|_| unreachable!("it was cleared")).collect()
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use paguro_backend::Want;

    use super::*;

    #[test]
    fn recycled_outputs_keep_their_memory() {
        let mut outputs = Vec::with_capacity(100);
        outputs.push(Output { row: 0, want: Want::Score { token: 1, top: 0 } });
        let place = outputs.as_ptr() as usize;
        let outputs = recycle(outputs);
        assert_eq!((outputs.len(), outputs.capacity(), outputs.as_ptr() as usize), (0, 100, place));
    }
}
