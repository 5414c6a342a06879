//! The contract between the engine and the devices.
//!
//! A model is lowered once to a [`Program`]: the embedding, a list of fused layer operations, the head. A
//! [`Backend`] loads that program with its [`Weights`] and becomes a [`Runner`]; from then on the engine only
//! submits [`Step`]s, ragged batches of rows over pages of K and V, and collects what they sampled.
//!
//! This crate also holds the two things that keep backends honest: the naive [`mod@reference`], which defines what
//! every operation means, and the [`mod@conformance`] suite, which each backend instantiates.

mod check;
pub mod conformance;
pub mod counters;
pub mod excerpt;
pub mod format;
pub mod kv;
pub mod program;
pub mod reference;
pub mod runner;
pub mod sampling;
pub mod step;
mod validate;
pub mod weights;

pub use counters::KernelCount;
pub use excerpt::excerpt;
pub use format::WeightFormat;
pub use kv::{KV_BLOCK, KvDtype, quantize_kv};
pub use program::{
    Activation, Attend, DownAdd, Embed, KvGroup, KvLayout, KvSlot, Linear, MatrixId, Norm, NormGateUp,
    NormLogits, NormQkvRopeStore, Op, Program, ProjectAdd, Rope, RopeStyle, VectorId,
};
pub use runner::{
    AttentionMode, Backend, Capacity, Held, Limits, LoadError, MemoryPlan, PageMove, Runner, StepError,
    Ticket,
};
pub use sampling::{InvalidParam, SamplingParams};
pub use step::{
    Carried, Outcome, Output, PageId, SampleRequest, Sampled, Score, Step, StepOutput, StepSequence,
    TokenMask, Want,
};
pub use weights::{ByteSource, Bytes, Matrix, Weights};
