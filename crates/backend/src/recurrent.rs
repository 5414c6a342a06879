//! Mixers with a state instead of K and V, and the slots of a runner for the states of sequences.
//!
//! Prompts and answers have one definition, in which a row is a function of its absolute position only. The rows of a
//! sequence are divided into chunks of [`STATE_CHUNK`], which begin at multiples of it, from position 0. A slot holds
//! the state at the beginning of a chunk and the rows of the chunk so far. The rows of a chunk are folded into the
//! state before the first row of the next one is computed. So no bit depends on the distribution of rows over steps,
//! and the last rows of a step can be dropped again: the next step of the sequence begins at an earlier position of the
//! same chunk. The convolution needs inputs before that position, so a slot has [`StateShape::rows`] of them.

use crate::{Linear, Norm, VectorId};

/// Rows of a chunk of a recurrent state.
pub const STATE_CHUNK: usize = 32;

/// Rows that lowered models can drop again: their states have as many inputs of convolutions more than an output needs.
pub const DROPPABLE_ROWS: usize = 15;

/// A slot for the states of one sequence, of all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct StateId(pub u32);

/// Slots that a sequence's rows use in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateUse {
    /// State after the rows before this step's. A sequence that begins at position 0 does not read it. It may be a state after
    /// more rows of the same chunk, of which the last ones, [some](crate::Program::droppable_rows) at most, are dropped.
    pub read: StateId,
    /// Slot of the state after this step's rows. It may be the slot that is read. No other sequence of the step reads or
    /// writes it.
    pub write: StateId,
}

impl StateUse {
    /// Updates a state in its place.
    pub fn in_place(state: StateId) -> Self {
        Self { read: state, write: state }
    }
}

/// States of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateLayout {
    /// Shapes by mixer with a state; [`ShortConv::state`], [`DeltaRule::state`] and [`Ssd::state`] are indices.
    pub layers: Vec<StateShape>,
}

/// State of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Number of stored earlier inputs of the convolution: those that an output depends on, and one for each row that may be
    /// dropped.
    pub rows: usize,
    /// Elements of each.
    pub channels: usize,
    /// The state of a delta rule or a scan.
    pub delta: Option<DeltaShape>,
}

/// Dimensions of a delta rule, or of the scan of [`Ssd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a head of queries or keys.
    pub key_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
}

impl StateLayout {
    /// Returns true if sequences have no states.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Updates in the slot `state`; `None` if sequences have no states.
    pub fn in_place(&self, state: StateId) -> Option<StateUse> {
        (!self.is_empty()).then_some(StateUse::in_place(state))
    }

    /// Returns the number of bytes of the states of one sequence, before any padding of the backend's.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(StateShape::numbers).sum::<usize>() * size_of::<f32>()
    }
}

impl StateShape {
    /// Numbers that it consists of.
    pub fn numbers(&self) -> usize {
        self.rows * self.channels + self.delta.map_or(0, |delta| delta.numbers())
    }
}

impl DeltaShape {
    /// Returns the number of elements of a row of all keys, or of all queries.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Returns the number of elements of a row of all values.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the number of elements of a row of all queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// The matrix of each value head; and keys, updates and decays of the rows of a chunk.
    fn numbers(&self) -> usize {
        self.value_width() * self.key_dim
            + STATE_CHUNK * (self.key_width() + self.value_width() + self.value_heads)
    }
}

/// A convolution over the rows of a sequence, each channel by itself:
/// `y[t] = Σ weight[i] ⊙ x[t - taps + 1 + i] + bias`, with zeros before position 0.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    /// Rows that an output depends on, its own included.
    pub taps: usize,
    /// `[taps, channels]`; the last tap multiplies a row's own input.
    pub weight: VectorId,
    /// `[channels]`
    pub bias: Option<VectorId>,
}

/// ```text
/// b, c, u = norm(x)·Wᵀ                               LFM2's short convolution
/// y = c ⊙ convolution(b ⊙ u)
/// x += branch_scale * post_norm(y·Wᵀ)
/// ```
#[derive(Clone, Debug)]
pub struct ShortConv {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Elements of b, c and u.
    pub width: usize,
    /// `[3 * width, hidden]`: b, then c, then u.
    pub input: Linear,
    /// Its state is the last rows of `b ⊙ u`.
    pub convolution: Convolution,
    /// `[hidden, width]`
    pub out: Linear,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
    /// Index into [`StateLayout::layers`].
    pub state: usize,
}

/// The gated delta rule (Qwen3-Next, Qwen3.5).
///
/// ```text
/// h = norm(x)                                        m, z, a, b = h·Wᵀ
/// q, k, v = silu(convolution(m))                     q and k: [key_heads, key_dim], v: [value_heads, value_dim]
/// q = q / sqrt(Σq² + eps) / sqrt(key_dim)            k = k / sqrt(Σk² + eps)      each head by itself
/// g = decay * softplus(a + dt)                       β = sigmoid(b)               one of each for a value head
/// S = e^g S                                          S is [key_dim, value_dim] for each value head
/// u = β (v - Sᵀk)      S += k uᵀ      o = Sᵀq
/// y = out_norm(o) ⊙ silu(z)                          each value head by itself
/// x += branch_scale * post_norm(y·Wᵀ)
/// ```
///
/// It is computed in chunks: see [`mod@crate::reference`].
#[derive(Clone, Debug)]
pub struct DeltaRule {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Heads and their sizes.
    pub shape: DeltaShape,
    /// Value heads that share the keys and queries of a key head.
    pub sharing: KeySharing,
    /// `[2 * key_heads * key_dim + value_heads * value_dim, hidden]`: queries, then keys, then values.
    pub qkv: Linear,
    /// z, `[value_heads * value_dim, hidden]`
    pub gate: Linear,
    /// a, `[value_heads, hidden]`
    pub alpha: Linear,
    /// b, `[value_heads, hidden]`
    pub beta: Linear,
    /// Its state is the last rows of m.
    pub convolution: Convolution,
    /// Not positive, `[value_heads]`.
    pub decay: VectorId,
    /// `[value_heads]`
    pub dt: VectorId,
    /// `[value_dim]`; RMS.
    pub out_norm: Norm,
    /// `[hidden, value_heads * value_dim]`
    pub out: Linear,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
    /// Index into [`StateLayout::layers`].
    pub state: usize,
}

impl DeltaRule {
    /// Added to sums of squares of queries and keys.
    pub const EPS: f32 = 1e-6;

    /// Key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.sharing {
            KeySharing::Consecutive => value_head / (self.shape.value_heads / self.shape.key_heads),
            KeySharing::Alternating => value_head % self.shape.key_heads,
        }
    }
}

/// The scan of Mamba-2, a state-space model (Mamba-2, Nemotron-H, Granite 4, Falcon-H1). Its B, C and x are the keys, queries and
/// values of a delta rule that does not subtract what the state knows of a value.
///
/// ```text
/// h = norm(x)                                        m, z, d = h·Wᵀ
/// C, B, v = silu(convolution(m))                     C and B: [key_heads, key_dim], v: [value_heads, value_dim]
/// Δ = clamp(softplus(dt_scale * d + dt_bias))        one for a value head
/// S = e^(decay Δ) S + Δ B vᵀ                         S is [key_dim, value_dim] for each value head
/// o = SᵀC + skip v
/// y = out_norm(o, gate_scale * z)                    see GatedNorm
/// x += branch_scale * post_norm(y·Wᵀ)
/// ```
///
/// Consecutive value heads share a key head. It is computed in chunks: see [`mod@crate::reference`].
#[derive(Clone, Debug)]
pub struct Ssd {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Heads and their sizes: those of B and C are the key heads.
    pub shape: DeltaShape,
    /// m, `[2 * key_heads * key_dim + value_heads * value_dim, hidden]`: C, then B, then v.
    pub cbv: Linear,
    /// z, `[value_heads * value_dim, hidden]`
    pub gate: Linear,
    /// Multiplies z.
    pub gate_scale: f32,
    /// d, `[value_heads, hidden]`
    pub dt: Linear,
    /// Multiplies d.
    pub dt_scale: f32,
    /// `[value_heads]`
    pub dt_bias: VectorId,
    /// Least and largest Δ.
    pub dt_limits: (f32, f32),
    /// Its state is the last rows of m.
    pub convolution: Convolution,
    /// Not positive, `[value_heads]`.
    pub decay: VectorId,
    /// `[value_heads]`
    pub skip: VectorId,
    /// Norm and gate of the output.
    pub out_norm: GatedNorm,
    /// `[hidden, value_heads * value_dim]`
    pub out: Linear,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
    /// Index into [`StateLayout::layers`].
    pub state: usize,
}

impl Ssd {
    /// Key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        value_head / (self.shape.value_heads / self.shape.key_heads)
    }
}

/// The gate of a scan's output and its norm, of all value heads together.
#[derive(Clone, Copy, Debug)]
pub enum GatedNorm {
    /// `o ⊙ silu(z)`
    GateOnly,
    /// `norm(o ⊙ silu(z))`
    AfterGate(GroupNorm),
    /// `norm(o) ⊙ silu(z)`
    BeforeGate(GroupNorm),
}

impl GatedNorm {
    /// Returns the norm, if there is one.
    pub fn norm(&self) -> Option<&GroupNorm> {
        match self {
            Self::GateOnly => None,
            Self::AfterGate(norm) | Self::BeforeGate(norm) => Some(norm),
        }
    }
}

/// An RMS norm of each of several groups of consecutive elements.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    /// Number of groups, of equal size.
    pub groups: usize,
    /// `[value_heads * value_dim]`: the weights of all groups.
    pub weight: VectorId,
    /// Added to the mean square of a group.
    pub eps: f32,
}

/// Value heads that share a key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySharing {
    /// Consecutive value heads have one key head (Hugging Face's files).
    Consecutive,
    /// Value head `j` has key head `j % key_heads` (GGUF files, whose converter reorders value heads).
    Alternating,
}
