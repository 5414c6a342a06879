//! The contract between the engine and the devices.
//!
//! A model is lowered once to a [`Program`]: an input, layers and an exit. A layer has a mixer, a feed-forward network,
//! or both. A [`Backend`] loads the program with its [`Weights`] and returns a [`Runner`]. The engine then submits
//! [`Step`]s to the runner and collects their outputs. A step is a ragged batch of rows over pages of K and V.
//!
//! The naive [`mod@reference`] defines every operation. The crate `paguro-backend-conformance` has the conformance suite
//! for backends.

pub mod adapter;
pub mod backend;
mod check;
mod copied;
pub mod counters;
pub mod excerpt;
pub mod format;
pub mod kv;
pub mod latent;
pub mod output_rows;
pub mod pace;
pub mod page_io;
pub mod pool;
pub mod program;
pub mod recurrent;
pub mod reference;
pub mod runner;
pub mod sampling;
pub mod squares;
pub mod stages;
pub mod step;
mod validate;
pub mod weights;

pub use adapter::{Adaptable, AdapterId, AdapterUse, LowRank};
pub use backend::{AttentionMode, Backend, Capacity, DeviceLayout, Limits, LoadError, MemoryPlan};
pub use counters::{ExpertCount, KernelCount};
pub use excerpt::excerpt;
pub use format::WeightFormat;
pub use kv::{HADAMARD, KV_BLOCK, KvDtype, hadamard, hadamard_parts, quantize_kv};
pub use latent::{Latent, LatentQuery, LatentShape};
pub use output_rows::OutputRows;
pub use pace::{Pace, PacedRunner, Piece};
pub use page_io::{PageContent, PageFormat};
pub use pool::ExpertBytes;
pub use program::{
    Activation, Attention, Beside, Bounds, Branch, Dense, Digest, DistanceBias, Embed, Exit, ExpertGroups,
    ExpertLatent, Experts, FeedForward, Head, Input, Joined, KvGroup, KvLayout, KvSlot, Layer, LayerEmbeds,
    LayerInput, Linear, MatrixId, Merged, Mixer, Norm, NormKind, Patches, PositionScale, Positions, Program,
    Projection, QkNorm, QkNormKind, Residual, Role, Rope, RopeStyle, Router, RowOp, Scores, SharedExpert,
    TableId, Tap, TokenTypes, VectorId, Visitor, visible,
};
pub use recurrent::{
    Convolution, DROPPABLE_ROWS, DeltaRule, DeltaShape, GatedNorm, GroupNorm, KeySharing, STATE_CHUNK,
    ShortConv, Ssd, StateId, StateLayout, StateShape, StateUse,
};
pub use runner::{AdapterWork, PageMove, Runner, StepError, Ticket};
pub use sampling::{InvalidParam, SamplingParams};
pub use squares::{InputSquares, MatrixSquares};
pub use stages::{Stage, first_layers, legal_cuts, obstacle, split, stage_program};
pub use step::{
    AXES, Carried, Coordinates, GivenRows, Output, OutputKind, OutputValue, PageId, SampleRequest, Sampled,
    Score, Step, StepInputs, StepOutput, StepSequence, TokenMask, mean_of_rows,
};
pub use weights::{ByteSource, Bytes, Matrix, Weights};

/// Lists the fields of contract types that a backend computes, or refuses at load. If a type gets a field, the backend does not
/// compile until the field is in its list.
#[macro_export]
macro_rules! known_fields {
    ($($type:ident { $($field:ident),* $(,)? })*) => {
        $(const _: fn(&$crate::$type) = |$crate::$type { $($field: _),* }| {};)*
    };
}
