//! A thread for each stage. Tasks pass all stages in the order of their submission: while one stage computes a step, the one before
//! computes the next. Each stage has a step from its submission on, and [prepares](paguro_backend::Runner::prepare) it before its inputs
//! have come, while it computes the step before. Rows and tokens pass from thread to thread, without the engine.

use std::{
    collections::VecDeque,
    panic::resume_unwind,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
};

use paguro_backend::{PageMove, StepError, StepOutput};

use crate::{
    links::{Finished, Inlet, Outlet, TokenQueue},
    stage::{LoadedStage, StageThread},
    step::OwnedStep,
};

/// Work for all stages, which have it from its submission on.
pub enum Task {
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
    pub fn source(&self) -> Option<u64> {
        match self {
            Self::Step { source, .. } => *source,
            Self::Move(_) => None,
        }
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
        let mut inlet = Inlet::Tokens(TokenQueue::new(own_tokens, most));
        let (mut queues, mut threads) = (Vec::new(), Vec::new());
        for (index, stage) in stages.iter().enumerate() {
            let (queue, tasks) = channel();
            let (rows, next_rows) = channel();
            let outlet = match index + 1 == stages.len() {
                true => Outlet::Results { tokens: tokens.clone(), finished: results.clone() },
                false => Outlet::Rows(rows),
            };
            let inlet = std::mem::replace(&mut inlet, Inlet::Rows { rows: next_rows, next: None });
            let thread = StageThread::new(Arc::clone(stage), tasks, (inlet, outlet), spin);
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
