//! Buffers between phases, allocated at load for the largest step.

mod experts;
mod latent;
mod recurrent;
mod row_ops;
mod sizes;

pub use experts::{ExpertBuffers, ExpertSizes};
pub use latent::{LatentBuffers, LatentSizes};
pub use recurrent::{RecurrentBuffers, RecurrentSizes};
pub use row_ops::{BLOCK_ROWS, RowOpBuffers, RowOpSizes};
pub use sizes::{BufferSizes, buffer_bytes};

use crate::shared::{MatmulInput, Shared};

/// Buffers between phases, allocated at load for the largest step.
pub struct Buffers {
    /// Residual stream, `[rows, hidden]`.
    pub x: Shared<f32>,
    /// Outputs of a layer's branches, `[rows, hidden]` each.
    pub branch_outputs: [Shared<f32>; 2],
    /// Inputs of the next matmul.
    pub input: MatmulInput,
    /// Queries, `[rows, heads * head_dim]`.
    pub q: Shared<f32>,
    /// Keys of the step's rows, `[rows, kv_heads * head_dim]`.
    pub k: Shared<f32>,
    /// Values of the step's rows, `[rows, kv_heads * head_dim]`.
    pub v: Shared<f32>,
    /// Output of attention, `[rows, heads * head_dim]`.
    pub attended: Shared<f32>,
    /// Gates of attention, `[rows, heads * head_dim]`.
    pub attention_gate: Shared<f32>,
    /// Gates, `[rows, ffn]`.
    pub gate: Shared<f32>,
    /// Ups, `[rows, ffn]`.
    pub up: Shared<f32>,
    /// Cosines and sines by rope and row, `[ropes, rows, rope_stride]`.
    pub rope_table: Shared<f32>,
    /// Partial attention of shared splits, by tile, split and query.
    pub partials: Shared<f32>,
    /// Logits of a slice of the output rows, `[slice, vocab]`.
    pub logits: Shared<f32>,
    /// Rows that the head projects, `[outputs, width]`.
    pub projected: Shared<f32>,
    /// Buffers of mixtures of experts.
    pub experts: ExpertBuffers,
    /// Buffers of mixers with a state.
    pub recurrent: RecurrentBuffers,
    /// Embeddings for layers, `[rows, count * width]`.
    pub layer_embeds: Shared<f32>,
    /// Buffers of latent attention.
    pub latent: LatentBuffers,
    /// Buffers of the ends of towers.
    pub row_ops: RowOpBuffers,
}
