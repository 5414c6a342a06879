//! A model, lowered: a flat list of fused operations over numbered weights.
//!
//! The program is data. A backend sees all of it at load, so it may fuse further, repack weights, record a
//! graph or encode one command buffer, and nobody outside can tell.

use crate::KvDtype;

/// Index of a matrix in [`Weights::matrices`](crate::Weights::matrices).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MatrixId(pub u32);

/// Index of a vector in [`Weights::vectors`](crate::Weights::vectors).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VectorId(pub u32);

/// One model, ready to be loaded by a backend. Shapes that every operation shares stand here once.
#[derive(Clone, Debug)]
pub struct Program {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of token ids; the length of a row of logits.
    pub vocab: usize,
    /// Query heads of each attention layer.
    pub heads: usize,
    /// Width of the feed-forward layers between gate/up and down.
    pub ffn: usize,
    /// How K and V are stored.
    pub kv: KvLayout,
    /// Rotary embeddings, referred to by [`NormQkvRopeStore::rope`] (Gemma 3 has two: local and global layers).
    pub ropes: Vec<Rope>,
    /// The forward pass, in order: `Embed`, then per layer `NormQkvRopeStore`, `Attend`, `ProjectAdd`,
    /// `NormGateUp`, `DownAdd`, and `NormLogits` at the end.
    pub ops: Vec<Op>,
}

/// How K and V of all layers are arranged in pages.
///
/// A page holds `block_size` tokens of K and V for all layers of *one group* of one sequence. Layers that see the
/// same distance back form a group, so that pages of a sliding-window group can be released while the full
/// layers keep theirs. Groups have equally many layer slots (the last group of a kind may leave some unused), so
/// every page has the same size and all groups share one arena and one free list. A model without alternating
/// windows has one group, and then a page holds all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// The groups; a sequence has one block table for each.
    pub groups: Vec<KvGroup>,
    /// Layer slots in a page.
    pub slots: usize,
    /// K/V heads of each layer.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
}

impl KvLayout {
    /// Elements of K and V in one page.
    pub fn page_elements(&self, block_size: usize) -> usize {
        self.slots * 2 * self.kv_heads * self.head_dim * block_size
    }

    /// Bytes of K and V in one page, before any padding of the backend's.
    pub fn page_bytes(&self, block_size: usize, dtype: KvDtype) -> usize {
        self.slots * 2 * self.kv_heads * dtype.head_bytes(self.head_dim) * block_size
    }
}

/// Layers that see equally far back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// A query at position `p` sees the keys at positions `> p - window` (and `<= p`); `None` sees all.
    pub window: Option<u32>,
}

/// Where a layer's K and V live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSlot {
    /// Index into [`KvLayout::groups`].
    pub group: usize,
    /// Layer slot inside the group's pages, `< KvLayout::slots`.
    pub slot: usize,
}

/// One fused operation. The residual stream `x` is `[rows, hidden]`; what passes between operations is named.
///
/// New kinds of layers (mixture of experts, adapters) become new variants or fields here; a backend that lacks
/// one refuses it at load, by name.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Op {
    /// `x = table[token] * scale`
    Embed(Embed),
    /// `h = norm(x)`; `q, k, v = h·Wᵀ + b`; per-head norm of q and k; RoPE of q and k; k and v into the pages.
    NormQkvRopeStore(NormQkvRopeStore),
    /// `a = softmax(q·Kᵀ * scale)·V` over the block table, causal.
    Attend(Attend),
    /// `x += post_norm(a·Wᵀ + b)`
    ProjectAdd(ProjectAdd),
    /// `h = norm(x)`; `g = activation(h·Wgateᵀ) ⊙ (h·Wupᵀ)`
    NormGateUp(NormGateUp),
    /// `x += post_norm(g·Wᵀ + b)`
    DownAdd(DownAdd),
    /// `logits = norm(x)·Wᵀ`, soft-capped; only for rows that an output asks for. `norm(x)` is a row's embedding.
    NormLogits(NormLogits),
}

impl Op {
    /// The operation's name, as errors and counters use it.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed(_) => "embed",
            Op::NormQkvRopeStore(_) => "norm_qkv_rope_store",
            Op::Attend(_) => "attend",
            Op::ProjectAdd(_) => "project_add",
            Op::NormGateUp(_) => "norm_gate_up",
            Op::DownAdd(_) => "down_add",
            Op::NormLogits(_) => "norm_logits",
        }
    }
}

/// Root-mean-square norm: `x / sqrt(mean(x²) + eps) * weight`. Weights that are stored as an offset from one
/// (Gemma's) are lowered with the one added.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// `[width]`
    pub weight: VectorId,
    /// Added to the mean square.
    pub eps: f32,
}

/// `y = x·Wᵀ + b`; the matrix is `[out, in]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[out, in]`
    pub matrix: MatrixId,
    /// `[out]`
    pub bias: Option<VectorId>,
}

/// See [`Op::Embed`].
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[vocab, hidden]`
    pub table: MatrixId,
    /// Gemma multiplies by `sqrt(hidden)`; one elsewhere.
    pub scale: f32,
}

/// See [`Op::NormQkvRopeStore`].
#[derive(Clone, Debug)]
pub struct NormQkvRopeStore {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Norm,
    /// `[heads * head_dim, hidden]`
    pub q: Linear,
    /// `[kv_heads * head_dim, hidden]`
    pub k: Linear,
    /// `[kv_heads * head_dim, hidden]`
    pub v: Linear,
    /// Norm of each query head, `[head_dim]` (Qwen 3, Gemma 3).
    pub q_norm: Option<Norm>,
    /// Norm of each key head, `[head_dim]`.
    pub k_norm: Option<Norm>,
    /// Index into [`Program::ropes`].
    pub rope: usize,
    /// Where k and v go.
    pub kv: KvSlot,
}

/// See [`Op::Attend`].
#[derive(Clone, Debug)]
pub struct Attend {
    /// Scale of the scores, positive, usually `1/sqrt(head_dim)`.
    pub scale: f32,
    /// `cap * tanh(score / cap)` after scaling (Gemma 2).
    pub soft_cap: Option<f32>,
    /// Where k and v are; the group carries the window.
    pub kv: KvSlot,
}

/// See [`Op::ProjectAdd`].
#[derive(Clone, Debug)]
pub struct ProjectAdd {
    /// `[hidden, heads * head_dim]`
    pub project: Linear,
    /// Norm of the projection before it is added (Gemma 2 and 3).
    pub post_norm: Option<Norm>,
}

/// See [`Op::NormGateUp`].
#[derive(Clone, Debug)]
pub struct NormGateUp {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Norm,
    /// `[ffn, hidden]`
    pub gate: Linear,
    /// `[ffn, hidden]`
    pub up: Linear,
    /// Applied to the gate.
    pub activation: Activation,
}

/// See [`Op::DownAdd`].
#[derive(Clone, Debug)]
pub struct DownAdd {
    /// `[hidden, ffn]`
    pub down: Linear,
    /// Norm of the product before it is added (Gemma 2 and 3).
    pub post_norm: Option<Norm>,
}

/// See [`Op::NormLogits`].
#[derive(Clone, Debug)]
pub struct NormLogits {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Norm,
    /// `[vocab, hidden]`; the embedding's own matrix where head and embedding are tied.
    pub head: Linear,
    /// `cap * tanh(logit / cap)` (Gemma 2).
    pub soft_cap: Option<f32>,
}

/// The gate's activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`, the tanh form that Gemma uses.
    GeluTanh,
}

/// A rotary position embedding, reduced to one frequency per rotated pair: linear, llama3, YaRN and longrope
/// scaling only change these numbers, so backends know nothing about them.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Radians per position of each pair, `[rotated_dims / 2]`; elements past the rotated ones pass unchanged.
    pub frequencies: Vec<f32>,
    /// Multiplies both sine and cosine (YaRN's and longrope's attention factor; one elsewhere).
    pub magnitude: f32,
}

/// Which elements RoPE rotates together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(0, 1), (2, 3), ...`: the original order, and that of GGUF files of the Llama family.
    Interleaved,
    /// `(0, n/2), (1, n/2 + 1), ...`: the order of Hugging Face's files and of NeoX.
    HalfSplit,
}
