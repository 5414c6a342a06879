//! Sequences, pages, prefix cache, scheduler, stop conditions: one synchronous thread.

mod arena;
mod engine;
mod error;
mod handle;
mod layout;
mod options;
mod pages;
mod prefix;
mod request;
mod scheduler;
mod sequence;
mod stats;
#[cfg(test)]
mod tests;
mod text;

pub use engine::{Engine, ModelParts};
pub use error::{EngineError, RequestError, SubmitError};
pub use handle::{Canceller, Generation, Handle};
pub use options::{EngineOptions, PageBudget, PageOrder};
pub use request::{Event, FinishReason, Request, Usage};
pub use stats::{Stats, StepTimes};
