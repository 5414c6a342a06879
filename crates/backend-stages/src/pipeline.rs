//! A thread for each stage. Tasks pass all stages in the order of their submission: while one stage computes a step, the one before
//! computes the next. Each stage has a step from its submission on, and [prepares](Runner::prepare) it before it has the rows of the stage
//! before, or the tokens of an earlier step, and while it computes the step before. These pass from thread to thread, without the engine.

use std::{
    collections::VecDeque,
    hint,
    ops::Range,
    panic::resume_unwind,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use paguro_backend::{
    GivenRows, Output, OutputKind, OutputValue, PageMove, Program, Runner, Sampled, Step, StepError,
    StepInputs, StepOutput, Ticket,
};

use crate::step::OwnedStep;

/// A stage on its device.
pub struct LoadedStage {
    runner: Mutex<Box<dyn Runner>>,
    /// Its layers in the whole program.
    pub layers: Range<usize>,
    /// True if its rows are embeddings of tokens.
    has_tokens: bool,
    /// Elements of a row that it is given.
    width: usize,
    /// Pages of a copy of its states; 0 if it has none.
    state_parts: usize,
}

impl LoadedStage {
    /// Creates a stage of these layers.
    pub fn new(runner: Box<dyn Runner>, program: &Program, layers: Range<usize>, state_parts: usize) -> Self {
        Self {
            runner: Mutex::new(runner),
            layers,
            has_tokens: program.embed().is_some(),
            width: program.hidden,
            state_parts,
        }
    }

    /// Returns the runner, after the task that it computes.
    pub fn runner(&self) -> MutexGuard<'_, Box<dyn Runner>> {
        // A panic ends the engine, which does not use the runner again.
        self.runner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the pages and states of this stage.
    fn move_pages(&self, moves: &[PageMove]) -> Result<(), StepError> {
        let is_own = |page_move: &&PageMove| match page_move {
            PageMove::Copy { .. } => true,
            PageMove::SaveState { part, .. } | PageMove::RestoreState { part, .. } => {
                *part < self.state_parts
            }
        };
        let own: Vec<_> = moves.iter().filter(is_own).copied().collect();
        self.runner().move_pages(&own)
    }

    /// Calls `use_step` with this stage's part of a step, whose inputs may come later.
    fn with_part<T>(&self, step: &OwnedStep, is_last: bool, use_step: impl FnOnce(&Step<'_>) -> T) -> T {
        let count = step.tokens.len();
        let residual = |row| Output { row, kind: OutputKind::Residual };
        let outputs = if is_last { step.outputs() } else { (0..count).map(residual).collect() };
        let (zeros, rows) = match self.has_tokens {
            true => (Vec::new(), Vec::new()),
            false => (vec![0; count], vec![0.0; count * self.width]),
        };
        let (tokens, given) = match self.has_tokens {
            true => (&step.tokens, step.given()),
            false => (&zeros, vec![GivenRows { rows: 0..count, values: &rows }]),
        };
        let mut sequences = step.sequences.clone();
        if self.state_parts == 0 {
            sequences.iter_mut().for_each(|sequence| sequence.state = None);
        }
        use_step(&Step { tokens, sequences: &sequences, ..step.step(&given, &outputs) })
    }
}

/// Work for all stages, which have it from its submission on.
enum Task {
    /// Number of a step, and the one whose tokens it carries.
    Step {
        number: u64,
        step: Box<OwnedStep>,
        source: Option<u64>,
    },
    Move(Vec<PageMove>),
}

impl Task {
    /// Returns the step whose tokens it carries.
    fn source(&self) -> Option<u64> {
        match self {
            Self::Step { source, .. } => *source,
            Self::Move(_) => None,
        }
    }
}

/// Rows between two stages, `[rows, hidden]`, or the first error of a stage; the stages after it do nothing.
type Passed = Result<Vec<f32>, StepError>;

/// Sampled tokens of a step by output, for steps that carry them.
struct StepTokens {
    number: u64,
    /// The error of a step that failed is a text.
    tokens: Result<Vec<Option<u32>>, String>,
}

/// Tokens of the last steps, for the first stage.
struct TokenQueue {
    tokens: Receiver<StepTokens>,
    /// Tokens that have come, the oldest first.
    known: VecDeque<StepTokens>,
    /// As many steps may be in flight.
    most: usize,
}

/// The part of a stage's thread that waits for others.
enum Inlet {
    /// Of the first stage.
    Tokens(TokenQueue),
    /// Of a later one.
    Rows {
        rows: Receiver<Passed>,
        /// Rows that have come and are not used.
        next: Option<Passed>,
    },
}

/// Another thread has ended.
struct Ended;

impl TokenQueue {
    /// Takes the tokens that have come; otherwise those that no step carries would remain.
    fn drain(&mut self) {
        self.known.extend(self.tokens.try_iter());
        self.known.drain(..self.known.len().saturating_sub(self.most));
    }

    /// Returns true if the tokens of step `source` have come.
    fn has(&self, source: u64) -> bool {
        self.known.back().is_some_and(|last| last.number >= source)
    }

    /// Returns the tokens of a step, of which those that are carried come from step `source`, whose tokens have come.
    fn of(&self, step: &OwnedStep, source: u64) -> Result<Vec<u32>, StepError> {
        let sampled = self.known.iter().find(|known| known.number == source).map(|known| &known.tokens);
        match sampled {
            Some(Ok(sampled)) => {
                let mut own = step.tokens.clone();
                for carried in &step.carried {
                    let token = sampled.get(carried.output).copied().flatten();
                    // As on a device that carries them itself, a token that could not be sampled is 0.
                    own[carried.row] = token.filter(|&token| token != Sampled::NO_TOKEN).unwrap_or_default();
                }
                Ok(own)
            }
            Some(Err(error)) => Err(StepError::Device(format!("the step before failed: {error}"))),
            None => Err(StepError::Invalid("the step before was collected too early".into())),
        }
    }
}

impl Inlet {
    /// Returns true if the inputs of a task have come.
    fn has_inputs(&mut self, source: Option<u64>) -> Result<bool, Ended> {
        Ok(match self {
            Self::Tokens(queue) => {
                queue.drain();
                source.is_none_or(|source| queue.has(source))
            }
            Self::Rows { rows, next } => {
                if next.is_none() {
                    *next = match rows.try_recv() {
                        Ok(rows) => Some(rows),
                        Err(TryRecvError::Empty) => None,
                        Err(TryRecvError::Disconnected) => return Err(Ended),
                    };
                }
                next.is_some()
            }
        })
    }

    /// Waits for a part of the inputs that a task needs.
    fn wait(&mut self) -> Result<(), Ended> {
        match self {
            Self::Tokens(queue) => queue.known.push_back(queue.tokens.recv().map_err(|_| Ended)?),
            Self::Rows { rows, next } => *next = Some(rows.recv().map_err(|_| Ended)?),
        }
        Ok(())
    }

    /// Returns the rows of a task from the stage before, which have come.
    fn rows(&mut self) -> Passed {
        match self {
            Self::Tokens(_) => Ok(Vec::new()),
            Self::Rows { rows: _, next } => {
                next.take().unwrap_or_else(|| Err(StepError::Invalid("a stage has no rows".into())))
            }
        }
    }

    /// Returns the inputs of a step, which have come.
    fn inputs(&mut self, step: &OwnedStep, source: Option<u64>) -> Result<StepInputs, StepError> {
        match (self, source) {
            (Self::Tokens(queue), Some(source)) => queue.of(step, source).map(StepInputs::Tokens),
            (Self::Tokens(_), None) => Ok(StepInputs::Tokens(step.tokens.clone())),
            (rows, _) => rows.rows().map(StepInputs::Rows),
        }
    }
}

/// The part of a stage's thread that others wait for.
enum Outlet {
    Rows(Sender<Passed>),
    /// Of the last stage.
    Results {
        tokens: Sender<StepTokens>,
        finished: Sender<Finished>,
    },
}

/// A task that has passed all stages.
struct Finished {
    is_step: bool,
    result: Result<StepOutput, StepError>,
}

impl Outlet {
    /// True for the last stage.
    fn is_last(&self) -> bool {
        matches!(self, Self::Results { .. })
    }

    /// Passes the result of a task on.
    fn send(&self, task: &Task, result: Result<StepOutput, StepError>) -> Result<(), Ended> {
        match self {
            Self::Rows(rows) => rows.send(result.and_then(rows_of)).map_err(|_| Ended),
            Self::Results { tokens, finished } => {
                let is_step = match task {
                    Task::Move(_) => false,
                    Task::Step { number, .. } => {
                        let sampled = match &result {
                            Ok(answers) => Ok(answers.outcomes.iter().map(token_of).collect()),
                            Err(error) => Err(error.to_string()),
                        };
                        tokens.send(StepTokens { number: *number, tokens: sampled }).map_err(|_| Ended)?;
                        true
                    }
                };
                // Without a receiver, the model is dropped.
                finished.send(Finished { is_step, result }).map_err(|_| Ended)
            }
        }
    }
}

fn token_of(answer: &OutputValue) -> Option<u32> {
    match answer {
        OutputValue::Sampled(sampled) => Some(sampled.token),
        _ => None,
    }
}

/// Returns the rows that a stage answered.
fn rows_of(answers: StepOutput) -> Passed {
    let mut rows = Vec::new();
    for answer in &answers.outcomes {
        let OutputValue::Residual(row) = answer else {
            return Err(StepError::Invalid("a stage has returned something other than rows".into()));
        };
        rows.extend_from_slice(row);
    }
    Ok(rows)
}

/// A task whose inputs may be missing.
struct Next {
    task: Arc<Task>,
    /// What [`Runner::prepare`] returned.
    prepared: Result<bool, StepError>,
}

/// A step that a stage has submitted, unless it was refused.
struct InFlight {
    task: Arc<Task>,
    ticket: Result<Ticket, StepError>,
}

/// Most steps that a stage has submitted: one that it computes, and one behind it.
const MOST_IN_FLIGHT: usize = 2;

/// The thread of a stage. It does what is possible: it prepares the next step, submits it when its inputs have come, and passes on the
/// results of the oldest one when the stage has computed it.
struct StageThread {
    stage: Arc<LoadedStage>,
    tasks: Receiver<Arc<Task>>,
    inlet: Inlet,
    outlet: Outlet,
    /// See [`Runner::spin`].
    spin: Duration,
    next: Option<Next>,
    in_flight: VecDeque<InFlight>,
}

impl StageThread {
    /// Serves the stage until another thread ends.
    fn serve(mut self) -> Result<(), Ended> {
        let mut since = Instant::now();
        loop {
            if !self.advance()? {
                let is_idle = self.next.is_none() && self.in_flight.is_empty();
                if !is_idle && since.elapsed() < self.spin {
                    hint::spin_loop();
                    continue;
                }
                self.wait()?;
            }
            since = Instant::now();
        }
    }

    /// Does what is possible without waiting. Returns false if there is nothing.
    fn advance(&mut self) -> Result<bool, Ended> {
        if self.next.is_none() && self.in_flight.len() < MOST_IN_FLIGHT {
            match self.tasks.try_recv() {
                Ok(task) => {
                    self.take(task);
                    return Ok(true);
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) if self.in_flight.is_empty() => return Err(Ended),
                Err(TryRecvError::Disconnected) => {}
            }
        }
        if let Some(Next { task, prepared }) = &self.next {
            let may_follow = matches!(prepared, Ok(true)) || self.in_flight.is_empty();
            if may_follow && self.inlet.has_inputs(task.source())? {
                self.begin()?;
                return Ok(true);
            }
        }
        let is_done = match self.in_flight.front() {
            Some(InFlight { ticket: Ok(ticket), .. }) => self.stage.runner().is_done(ticket),
            other => other.is_some(),
        };
        if is_done {
            self.finish()?;
        }
        Ok(is_done)
    }

    /// Waits for the oldest step, or else for inputs of the next one, or else for a task.
    fn wait(&mut self) -> Result<(), Ended> {
        if !self.in_flight.is_empty() {
            self.finish()
        } else if self.next.is_some() {
            self.inlet.wait()
        } else {
            let task = self.tasks.recv().map_err(|_| Ended)?;
            self.take(task);
            Ok(())
        }
    }

    /// Prepares a task.
    fn take(&mut self, task: Arc<Task>) {
        let prepared = match &*task {
            Task::Move(_) => Ok(false),
            Task::Step { step, .. } => {
                let (stage, is_last) = (&self.stage, self.outlet.is_last());
                stage.with_part(step, is_last, |part| stage.runner().prepare(part))
            }
        };
        self.next = Some(Next { task, prepared });
    }

    /// Begins the next task, whose inputs have come.
    fn begin(&mut self) -> Result<(), Ended> {
        let Some(Next { task, prepared }) = self.next.take() else { return Ok(()) };
        let (stage, is_last) = (&self.stage, self.outlet.is_last());
        match &*task {
            Task::Move(moves) => {
                let moved = self.inlet.rows().and_then(|_| stage.move_pages(moves));
                self.outlet.send(&task, moved.map(|()| StepOutput::default()))
            }
            Task::Step { number: _, step, source } => {
                let inputs = self.inlet.inputs(step, *source);
                let submit = |part: &Step<'_>, inputs: &StepInputs| {
                    inputs.complete(part, |part| stage.runner().submit_prepared(part))
                };
                let ticket = prepared
                    .and(inputs)
                    .and_then(|inputs| stage.with_part(step, is_last, |part| submit(part, &inputs)));
                self.in_flight.push_back(InFlight { task, ticket });
                Ok(())
            }
        }
    }

    /// Waits for the oldest step, and passes its result on.
    fn finish(&mut self) -> Result<(), Ended> {
        let Some(InFlight { task, ticket }) = self.in_flight.pop_front() else { return Ok(()) };
        let result = ticket.and_then(|ticket| {
            let mut answers = StepOutput::default();
            self.stage.runner().collect(ticket, &mut answers)?;
            Ok(answers)
        });
        self.outlet.send(&task, result)
    }
}

/// The stages and their threads.
pub struct Pipeline {
    stages: Vec<Arc<LoadedStage>>,
    /// Queues of the stages; none at the end.
    queues: Vec<Sender<Arc<Task>>>,
    finished: Receiver<Finished>,
    threads: Vec<JoinHandle<()>>,
    /// Tasks that have not passed all stages.
    pending: usize,
    /// Error of copies of pages, after which all steps fail: the pages are undefined, and the engine has used them since.
    failed_move: Option<String>,
    /// Results of steps that are not collected.
    results: VecDeque<Result<StepOutput, StepError>>,
}

impl Pipeline {
    /// Starts a thread for each stage.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(stages: Vec<LoadedStage>) -> std::io::Result<Self> {
        let stages: Vec<_> = stages.into_iter().map(Arc::new).collect();
        // The others could slow one down that needs the processor.
        let spin = stages.iter().map(|stage| stage.runner().spin()).min().unwrap_or_default();
        let (tokens, own_tokens) = channel();
        let (results, finished) = channel();
        // A step for each stage, and one more that carries tokens of the oldest one.
        let most = stages.len() + 1;
        let mut inlet = Inlet::Tokens(TokenQueue { tokens: own_tokens, known: VecDeque::new(), most });
        let (mut queues, mut threads) = (Vec::new(), Vec::new());
        for (index, stage) in stages.iter().enumerate() {
            let (queue, tasks) = channel();
            let (rows, next_rows) = channel();
            let outlet = match index + 1 == stages.len() {
                true => Outlet::Results { tokens: tokens.clone(), finished: results.clone() },
                false => Outlet::Rows(rows),
            };
            let inlet = std::mem::replace(&mut inlet, Inlet::Rows { rows: next_rows, next: None });
            let stage = Arc::clone(stage);
            let (next, in_flight) = (None, VecDeque::new());
            let thread = StageThread { stage, tasks, inlet, outlet, spin, next, in_flight };
            let serve = move || drop(thread.serve());
            threads.push(thread::Builder::new().name(format!("paguro-stage-{index}")).spawn(serve)?);
            queues.push(queue);
        }
        Ok(Self {
            stages,
            queues,
            finished,
            threads,
            pending: 0,
            failed_move: None,
            results: VecDeque::new(),
        })
    }

    /// Returns the stages.
    pub fn stages(&self) -> &[Arc<LoadedStage>] {
        &self.stages
    }

    /// Returns the stages after they have done all tasks.
    pub fn idle_stages(&mut self) -> &[Arc<LoadedStage>] {
        while self.pending > 0 {
            self.receive();
        }
        &self.stages
    }

    /// Submits a step of this number. Its carried tokens are those of step `oldest`.
    pub fn submit(&mut self, number: u64, step: OwnedStep, oldest: u64) {
        let source = (!step.carried.is_empty()).then_some(oldest);
        self.send(Task::Step { number, step: Box::new(step), source });
    }

    /// Submits copies of pages and states. If they fail, so do all later steps.
    pub fn move_pages(&mut self, moves: Vec<PageMove>) {
        self.send(Task::Move(moves));
    }

    /// Waits for the result of the oldest step. One must have been submitted.
    pub fn collect(&mut self) -> Result<StepOutput, StepError> {
        loop {
            if let Some(result) = self.results.pop_front() {
                return result;
            }
            self.receive();
        }
    }

    fn send(&mut self, task: Task) {
        let task = Arc::new(task);
        self.pending += 1;
        if self.queues.iter().any(|queue| queue.send(Arc::clone(&task)).is_err()) {
            self.end();
        }
    }

    /// Waits for the next finished task.
    fn receive(&mut self) {
        let Ok(Finished { is_step, result }) = self.finished.recv() else { return self.end() };
        self.pending -= 1;
        if is_step {
            self.results.push_back(match &self.failed_move {
                Some(failed) => Err(StepError::Device(failed.clone())),
                None => result,
            });
        } else if let Err(error) = result {
            let message = format!("pages were not copied: {error}; load the model again");
            self.failed_move.get_or_insert(message);
        }
    }

    /// Continues the panic of a stage.
    fn end(&mut self) {
        self.queues.clear();
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join() {
                resume_unwind(panic);
            }
        }
        unreachable!("the threads of stages end only by a panic");
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.queues.clear();
        for thread in self.threads.drain(..) {
            // A panic has been reported by the step that waited for it.
            let _ = thread.join();
        }
    }
}
