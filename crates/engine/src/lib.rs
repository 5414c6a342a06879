//! Sequences, pages, prefix cache, scheduler, stop conditions: one synchronous thread.
//!
//! [`Engine::start`] loads a model into a backend and starts the thread; a [`Handle`] submits [`Request`]s from
//! anywhere, and each [`Generation`] gives out the [`Event`]s of one. The way of a token: `handle` (checks, queues) →
//! `engine` (the loop) → `scheduler` (plans a step) → `sequence` (block tables) → `pages` (the arena and the prefix
//! cache in it) → the runner → `scheduler` (takes in the answer) → `handle` (text, stop strings).
//!
//! What is absent: the engine thread has no tokenizer and no text, and its clock decides nothing but whether a deadline
//! has passed and how long a prompt's chunk is; nothing here knows a device; there is no second attention path, and no copy of K and V but that
//! of a shared page before it is written.

mod arena;
mod checkpoint;
mod closed;
mod constraint;
mod cost;
mod disk;
mod engine;
mod error;
mod fair;
mod formats;
mod handle;
mod layout;
mod options;
mod pages;
mod prefix;
mod request;
mod scheduler;
mod sequence;
mod snapshot;
mod states;
mod stats;
#[cfg(test)]
mod tests;
mod text;
mod thought;

pub use constraint::{Constraint, Grammar, GrammarError, MAX_INDENT, narrow_schema};
pub use disk::{DiskCache, DiskStats, LEAST_TOKENS};
pub use engine::{Engine, ModelParts};
pub use error::{EngineError, RequestError, SubmitError};
pub use handle::{Canceller, Generation, Handle};
pub use options::{EngineOptions, EnginePlan, PageBudget, PageOrder};
pub use paguro_backend::{KernelCount, MemoryPlan, Score, sampling::Dry};
pub use request::{Event, FinishReason, Request, Usage};
pub use snapshot::{SequenceSnapshot, Snapshot};
pub use stats::{Sizes, Stats, StepTimes};
pub use text::StopMatcher;
pub use thought::ThoughtLimit;
