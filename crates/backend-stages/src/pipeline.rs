//! A thread for each stage. Jobs pass all stages in the order of their submission: while one stage computes a step, the one before
//! computes the next.

use std::{
    collections::VecDeque,
    ops::Range,
    panic::resume_unwind,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
};

use paguro_backend::{
    GivenRows, Output, OutputKind, OutputValue, PageMove, Program, Runner, Step, StepError, StepOutput,
};

use crate::step::OwnedStep;

/// A stage on its device.
pub struct LoadedStage {
    runner: Mutex<Box<dyn Runner>>,
    /// Its layers in the whole program.
    pub layers: Range<usize>,
    /// True if its rows are embeddings of tokens.
    has_tokens: bool,
    /// Pages of a copy of its states; 0 if it has none.
    state_parts: usize,
}

impl LoadedStage {
    /// Creates a stage of these layers.
    pub fn new(runner: Box<dyn Runner>, program: &Program, layers: Range<usize>, state_parts: usize) -> Self {
        Self { runner: Mutex::new(runner), layers, has_tokens: program.embed().is_some(), state_parts }
    }

    /// Returns the runner, after the job that it computes.
    pub fn runner(&self) -> MutexGuard<'_, Box<dyn Runner>> {
        // A panic ends the engine, which does not use the runner again.
        self.runner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the part of a job that belongs to this stage.
    fn run(&self, job: &mut Job, is_last: bool) -> Result<(), StepError> {
        let mut runner = self.runner();
        let Job { task, rows, answers, error: _ } = job;
        match task {
            Task::Move(moves) => {
                let is_own = |page_move: &&PageMove| match page_move {
                    PageMove::Copy { .. } => true,
                    PageMove::SaveState { part, .. } | PageMove::RestoreState { part, .. } => {
                        *part < self.state_parts
                    }
                };
                let own: Vec<_> = moves.iter().filter(is_own).copied().collect();
                runner.move_pages(&own)
            }
            Task::Step(step) => {
                let count = step.tokens.len();
                let residual = |row| Output { row, kind: OutputKind::Residual };
                let outputs = if is_last { step.outputs() } else { (0..count).map(residual).collect() };
                let given = match self.layers.start {
                    0 => step.given(),
                    _ => vec![GivenRows { rows: 0..count, values: rows }],
                };
                let zeros = vec![0; if self.has_tokens { 0 } else { count }];
                let tokens = if self.has_tokens { &step.tokens } else { &zeros };
                let mut sequences = step.sequences.clone();
                if self.state_parts == 0 {
                    sequences.iter_mut().for_each(|sequence| sequence.state = None);
                }
                let step = Step { tokens, sequences: &sequences, ..step.step(&given, &outputs) };
                let ticket = runner.submit(&step)?;
                runner.collect(ticket, answers)?;
                if is_last {
                    return Ok(());
                }
                rows.clear();
                for answer in &answers.outcomes {
                    let OutputValue::Residual(row) = answer else {
                        return Err(StepError::Invalid(
                            "a stage has returned something other than rows".into(),
                        ));
                    };
                    rows.extend_from_slice(row);
                }
                Ok(())
            }
        }
    }
}

/// Work for all stages.
enum Task {
    Step(OwnedStep),
    Move(Vec<PageMove>),
}

/// A task on its way through the stages.
struct Job {
    task: Task,
    /// Rows between two stages, `[rows, hidden]`.
    rows: Vec<f32>,
    answers: StepOutput,
    /// The first error of a stage; the stages after it do nothing.
    error: Option<StepError>,
}

/// The stages and their threads.
pub struct Pipeline {
    stages: Vec<Arc<LoadedStage>>,
    /// Queue of the first stage; `None` at the end.
    first: Option<Sender<Job>>,
    /// Jobs that have passed all stages.
    finished: Receiver<Job>,
    threads: Vec<JoinHandle<()>>,
    /// Jobs that have not passed all stages.
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
        let (first, mut jobs) = channel::<Job>();
        let mut threads = Vec::new();
        for (index, stage) in stages.iter().enumerate() {
            let (next, next_jobs) = channel::<Job>();
            let (stage, own_jobs) = (Arc::clone(stage), std::mem::replace(&mut jobs, next_jobs));
            let is_last = index + 1 == stages.len();
            let serve = move || {
                for mut job in own_jobs {
                    if job.error.is_none() {
                        job.error = stage.run(&mut job, is_last).err();
                    }
                    // Without a receiver, the model is dropped or the next stage has panicked.
                    if next.send(job).is_err() {
                        return;
                    }
                }
            };
            threads.push(thread::Builder::new().name(format!("paguro-stage-{index}")).spawn(serve)?);
        }
        Ok(Self {
            stages,
            first: Some(first),
            finished: jobs,
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

    /// Returns the stages after they have done all jobs.
    pub fn idle_stages(&mut self) -> &[Arc<LoadedStage>] {
        while self.pending > 0 {
            self.receive();
        }
        &self.stages
    }

    /// Submits a step.
    pub fn submit(&mut self, step: OwnedStep) {
        self.send(Task::Step(step));
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
        let job = Job { task, rows: Vec::new(), answers: StepOutput::default(), error: None };
        self.pending += 1;
        if self.first.as_ref().is_none_or(|first| first.send(job).is_err()) {
            self.end();
        }
    }

    /// Waits for the next finished job.
    fn receive(&mut self) {
        let Ok(Job { task, rows: _, answers, error }) = self.finished.recv() else { return self.end() };
        self.pending -= 1;
        match task {
            Task::Move(_) => {
                let message = |error| format!("pages were not copied: {error}; load the model again");
                self.failed_move = self.failed_move.take().or(error.map(message));
            }
            Task::Step(_) => {
                let error = self.failed_move.clone().map(StepError::Device).or(error);
                self.results.push_back(error.map_or(Ok(answers), Err));
            }
        }
    }

    /// Continues the panic of a stage.
    fn end(&mut self) {
        self.first = None;
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
        self.first = None;
        for thread in self.threads.drain(..) {
            // A panic has been reported by the step that waited for it.
            let _ = thread.join();
        }
    }
}
