//! The passage of rows and tokens between the threads of stages.

use std::{
    collections::VecDeque,
    sync::mpsc::{Receiver, Sender, TryRecvError},
};

use paguro_backend::{OutputValue, Sampled, StepError, StepInputs, StepOutput};

use crate::{pipeline::Task, step::OwnedStep};

/// Rows between two stages, `[rows, hidden]`, or the first error of a stage; the stages after it do nothing.
pub type Passed = Result<Vec<f32>, StepError>;

/// Sampled tokens of a step by output, for steps that carry them.
pub struct StepTokens {
    pub number: u64,
    /// The error of a step that failed is a text.
    pub tokens: Result<Vec<Option<u32>>, String>,
}

/// Tokens of the last steps, for the first stage.
pub struct TokenQueue {
    tokens: Receiver<StepTokens>,
    /// Tokens that have come, the oldest first.
    known: VecDeque<StepTokens>,
    /// As many steps may be in flight.
    most: usize,
}

/// The part of a stage's thread that waits for others.
pub enum Inlet {
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
pub struct Ended;

impl TokenQueue {
    /// Creates a queue that remembers the tokens of this many steps.
    pub fn new(tokens: Receiver<StepTokens>, most: usize) -> Self {
        Self { tokens, known: VecDeque::new(), most }
    }

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
    pub fn has_inputs(&mut self, source: Option<u64>) -> Result<bool, Ended> {
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
    pub fn wait(&mut self) -> Result<(), Ended> {
        match self {
            Self::Tokens(queue) => queue.known.push_back(queue.tokens.recv().map_err(|_| Ended)?),
            Self::Rows { rows, next } => *next = Some(rows.recv().map_err(|_| Ended)?),
        }
        Ok(())
    }

    /// Returns the rows of a task from the stage before, which have come.
    pub fn rows(&mut self) -> Passed {
        match self {
            Self::Tokens(_) => Ok(Vec::new()),
            Self::Rows { rows: _, next } => {
                next.take().unwrap_or_else(|| Err(StepError::Invalid("a stage has no rows".into())))
            }
        }
    }

    /// Returns the inputs of a step, which have come.
    pub fn inputs(&mut self, step: &OwnedStep, source: Option<u64>) -> Result<StepInputs, StepError> {
        match (self, source) {
            (Self::Tokens(queue), Some(source)) => queue.of(step, source).map(StepInputs::Tokens),
            (Self::Tokens(_), None) => Ok(StepInputs::Tokens(step.tokens.clone())),
            (rows, _) => rows.rows().map(StepInputs::Rows),
        }
    }
}

/// The part of a stage's thread that others wait for.
pub enum Outlet {
    Rows(Sender<Passed>),
    /// Of the last stage.
    Results {
        tokens: Sender<StepTokens>,
        finished: Sender<Finished>,
    },
}

/// A task that has passed all stages.
pub struct Finished {
    pub is_step: bool,
    pub result: Result<StepOutput, StepError>,
}

impl Outlet {
    /// True for the last stage.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Results { .. })
    }

    /// Passes the result of a task on.
    pub fn send(&self, task: &Task, result: Result<StepOutput, StepError>) -> Result<(), Ended> {
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
