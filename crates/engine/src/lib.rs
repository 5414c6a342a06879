//! Sequences, pages, prefix cache, scheduler, stop conditions: one synchronous thread.
//!
//! [`Engine::start`] loads a model into a backend and starts the thread. A [`Handle`] submits [`Request`]s from any
//! thread, and each [`Generation`] returns the [`Event`]s of one. A token passes through `handle` (checks, queue),
//! `engine` (the loop), `scheduler` (plans a step), `sequence` (block tables), `pages` (the arena and its prefix
//! cache), the runner, `scheduler` (applies the outputs) and `generation` (text, stop strings).
//!
//! The engine thread has no tokenizer and no text. Its clock determines only deadlines and the length of a prompt's
//! chunk. The crate names no device. There is one attention path, and K and V are copied only when a shared page is
//! written, and between tiers of the prefix cache (`tiers`).

mod adapters;
mod arena;
mod batch;
mod checked_request;
mod cost;
mod disk;
mod draft_model;
mod encoder;
mod engine;
mod error;
mod events;
mod fair;
mod generation;
mod handle;
mod host;
mod layout;
mod mask_workers;
mod options;
mod pages;
mod pictures;
mod prefix;
mod replicas;
mod request;
mod scheduler;
mod sequence;
mod snapshot;
mod speculation;
mod states;
mod stats;
#[cfg(test)]
mod tests;
mod text;
mod thought;
mod tiers;

pub use adapters::{Adapter, AdapterError, AdapterLimits, AdapterWeights};
pub use batch::{Batch, BatchError, Embedded, normalize};
pub use disk::{DiskCache, DiskStats, LEAST_TOKENS};
pub use draft_model::DraftModel;
pub use engine::{Engine, ModelParts};
pub use error::{EngineError, RequestError, SubmitError};
pub use events::{BlockSet, EventSink, ExtraKey, FailureSink, KvEvent, Medium};
pub use generation::{Canceller, Generation};
pub use handle::Handle;
pub use host::{HostMemory, HostStats};
pub use options::{EngineOptions, EnginePlan, PageBudget, PageOrder};
pub use paguro_backend::{ExpertCount, KernelCount, MemoryPlan, Score, sampling::Dry};
pub use paguro_grammar::{COMPILE_TIME, Constraint, Grammar, GrammarError};
pub use pictures::{Picture, PixelSource};
pub use replicas::Replicas;
pub use request::{Event, FinishReason, Request, Usage};
pub use snapshot::{PicturesSnapshot, SequenceSnapshot, Snapshot};
pub use speculation::{DraftOptions, MOST_BY_MODEL, MOST_DRAFTED, Replay};
pub use stats::{EncoderTimes, Sizes, Stats, StepTimes};
pub use text::StopMatcher;
pub use thought::ThoughtLimit;
