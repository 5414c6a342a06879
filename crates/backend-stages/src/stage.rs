//! A stage on its device, and its thread.

use std::{
    collections::VecDeque,
    hint,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, TryRecvError},
    },
    time::{Duration, Instant},
};

use paguro_backend::{
    GivenRows, Output, OutputKind, PageMove, Program, Runner, Step, StepError, StepInputs, StepOutput, Ticket,
};

use crate::{
    links::{Ended, Inlet, Outlet},
    pipeline::Task,
    step::OwnedStep,
};

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

/// A task whose inputs may be missing.
struct Next {
    task: Arc<Task>,
    /// The answer of [`Runner::prepare`].
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
pub struct StageThread {
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
    /// Creates the thread of a stage that may ask for `spin` before it sleeps ([`Runner::spin`]).
    pub fn new(
        stage: Arc<LoadedStage>,
        tasks: Receiver<Arc<Task>>,
        (inlet, outlet): (Inlet, Outlet),
        spin: Duration,
    ) -> Self {
        Self { stage, tasks, inlet, outlet, spin, next: None, in_flight: VecDeque::new() }
    }

    /// Serves the stage until another thread ends.
    pub fn serve(mut self) -> Result<(), Ended> {
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
