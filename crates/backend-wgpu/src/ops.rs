//! A program as the kernels run it: one flat list of fused operations. Attention has one shape in all layers of a K/V group.
//!
//! [`flatten`] makes the list.

mod flatten;

use paguro_backend::{
    Activation, DeltaRule, Experts, KvSlot, Latent, LayerEmbeds, LayerInput, Linear, MatrixId, Norm,
    NormKind, PositionScale, QkNorm, Rope, ShortConv, Ssd, StateLayout, VectorId,
};

/// A program.
#[derive(Clone, Debug)]
pub struct Program {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Length of a row of logits.
    pub vocab: usize,
    /// Width of the widest dense network between gate/up and down; shared experts are dense networks.
    pub ffn: usize,
    /// Arrangement of K and V.
    pub kv: KvLayout,
    /// States of a sequence.
    pub state: StateLayout,
    /// Rotary embeddings, referred to by [`NormQkvRopeStore::rope`].
    pub ropes: Vec<Rope>,
    /// `Embed` and perhaps `LayerEmbeds`; then per layer its mixer, its feed-forward network, and perhaps `Join`, `LayerInput`
    /// and `Scale`; then `NormLogits`. A mixer is `NormQkvRopeStore`, `Attend` and `ProjectAdd`, or `ShortConv`, `DeltaRule`,
    /// `Ssd` or `Latent`, or two of these and `Join`, or nothing. A network is `NormGateUp` and `DownAdd`, or `Experts`, or
    /// nothing.
    pub ops: Vec<Op>,
}

/// Arrangement of K and V of all layers in pages.
#[derive(Clone, Debug)]
pub struct KvLayout {
    /// Layers that share pages.
    pub groups: Vec<KvGroup>,
}

/// Layers with the same window and heads of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// See [`paguro_backend::KvGroup::window`].
    pub window: Option<u32>,
    /// Layer slots in a page.
    pub layer_slots: usize,
    /// Query heads of each layer.
    pub heads: usize,
    /// K/V heads of each layer.
    pub kv_heads: usize,
    /// Elements of a head. Those of latent attention are padded to a multiple of eight.
    pub head_dim: usize,
    /// Elements of one head without padding.
    pub unpadded_dim: usize,
    /// True for latent attention.
    pub is_latent: bool,
}

impl KvGroup {
    /// Elements of a row of queries.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Query heads that share a K/V head.
    pub fn queries_per_kv(&self) -> usize {
        self.heads / self.kv_heads
    }
}

impl KvLayout {
    /// Elements of the widest row of queries.
    pub fn q_width(&self) -> usize {
        self.groups.iter().map(KvGroup::q_width).max().unwrap_or(0)
    }

    /// True if all layers have heads of one shape.
    pub fn is_uniform(&self) -> bool {
        let shape = |group: &KvGroup| KvGroup { window: None, ..*group };
        self.groups.windows(2).all(|two| shape(&two[0]) == shape(&two[1]))
    }
}

/// A fused operation.
#[derive(Clone, Debug)]
pub enum Op {
    /// `x = table[token] * scale + positions[position]`
    Embed(Embed),
    /// Embeddings for all layers.
    LayerEmbeds(LayerEmbeds),
    /// `h = norm(x)`; `q, k, v = h·Wᵀ + b`; norms of q and k; RoPE of q and k; k and v into the pages.
    NormQkvRopeStore(NormQkvRopeStore),
    /// `a = softmax(q·Kᵀ * scale)·V` over the block table, causal.
    Attend(Attend),
    /// `x += post_norm(a·Wᵀ + b)`
    ProjectAdd(ProjectAdd),
    /// A whole short convolution.
    ShortConv(Box<ShortConvAdd>),
    /// A whole delta rule.
    DeltaRule(Box<DeltaRuleAdd>),
    /// A whole scan of Mamba-2.
    Ssd(Box<SsdAdd>),
    /// `h = norm(x)`; `g = activation(h·Wgateᵀ) ⊙ (h·Wupᵀ)`
    NormGateUp(NormGateUp),
    /// `x += post_norm(g·Wᵀ + b)`
    DownAdd(DownAdd),
    /// A whole mixture of experts.
    Experts(Box<ExpertsAdd>),
    /// A whole latent attention.
    Latent(Box<LatentAdd>),
    /// Adds a layer's own embedding.
    LayerInput(LayerInput),
    /// `x *= scale`
    Scale(f32),
    /// Adds the branch that has waited until another one has read the residual stream.
    Join(Add),
    /// `logits = norm(x)·Wᵀ * scale`, soft-capped.
    NormLogits(NormLogits),
}

/// See [`Op::Embed`].
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[vocab, hidden]`
    pub table: MatrixId,
    /// Multiplies rows.
    pub scale: f32,
    /// Learned positions.
    pub positions: Option<MatrixId>,
}

/// See [`Op::NormQkvRopeStore`].
#[derive(Clone, Debug)]
pub struct NormQkvRopeStore {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// `[heads * head_dim, hidden]`
    pub q: Linear,
    /// `[kv_heads * head_dim, hidden]`; `None` to read the K and V of another layer.
    pub k: Option<Linear>,
    /// `[kv_heads * head_dim, hidden]`; `None` uses K before its norm and rotation.
    pub v: Option<Linear>,
    /// Gate of attention's output, `[heads * head_dim, hidden]`.
    pub gate: Option<Linear>,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Norm of each head of V.
    pub v_norm: Option<Norm>,
    /// Index into [`Program::ropes`].
    pub rope: Option<usize>,
    /// Multiplies queries by a function of their position.
    pub position_scale: Option<PositionScale>,
    /// Slot of k and v.
    pub kv: KvSlot,
}

impl NormQkvRopeStore {
    /// Its matrices of queries, keys and values.
    pub fn qkv(&self) -> impl Iterator<Item = &Linear> {
        [&self.q].into_iter().chain(&self.k).chain(&self.v)
    }
}

/// See [`Op::Attend`].
#[derive(Clone, Debug)]
pub struct Attend {
    /// Scale of the scores.
    pub scale: f32,
    /// Cap of the scores.
    pub soft_cap: Option<f32>,
    /// One additional score per head.
    pub sinks: Option<VectorId>,
    /// True if [`NormQkvRopeStore::gate`] has computed gates of the output.
    pub is_gated: bool,
    /// Slot of k and v; the group has the window.
    pub kv: KvSlot,
}

/// Addition of a branch to the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct Add {
    /// Norm of the branch before it is added.
    pub post_norm: Option<Norm>,
    /// Factor of the added values.
    pub scale: f32,
    /// True if a later [`Op::Join`] adds it. Of the branches that read the same residual stream, all but the last one wait.
    pub waits: bool,
}

impl Add {
    /// True if the result of a matmul is added unchanged.
    pub fn is_plain(&self) -> bool {
        self.post_norm.is_none() && self.scale == 1.0 && !self.waits
    }
}

/// See [`Op::ProjectAdd`].
#[derive(Clone, Debug)]
pub struct ProjectAdd {
    /// `[hidden, heads * head_dim]`
    pub project: Linear,
    /// Addition to the residual stream.
    pub add: Add,
}

/// See [`Op::ShortConv`].
#[derive(Clone, Debug)]
pub struct ShortConvAdd {
    /// The convolution.
    pub conv: ShortConv,
    /// Addition of its output.
    pub add: Add,
}

/// See [`Op::DeltaRule`].
#[derive(Clone, Debug)]
pub struct DeltaRuleAdd {
    /// The rule.
    pub delta: DeltaRule,
    /// Addition of its output.
    pub add: Add,
}

/// See [`Op::Ssd`].
#[derive(Clone, Debug)]
pub struct SsdAdd {
    /// The mixer.
    pub ssd: Ssd,
    /// Addition of its output.
    pub add: Add,
}

/// See [`Op::Latent`].
#[derive(Clone, Debug)]
pub struct LatentAdd {
    /// The attention.
    pub latent: Latent,
    /// Addition of its output.
    pub add: Add,
}

/// See [`Op::NormGateUp`].
#[derive(Clone, Debug)]
pub struct NormGateUp {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Width between gate/up and down.
    pub width: usize,
    /// `[width, hidden]`
    pub gate: Option<Linear>,
    /// `[width, hidden]`
    pub up: Linear,
    /// Applied to the gate, or without a gate to up.
    pub activation: Activation,
}

/// See [`Op::DownAdd`].
#[derive(Clone, Debug)]
pub struct DownAdd {
    /// `[hidden, width]`
    pub down: Linear,
    /// Addition to the residual stream.
    pub add: Add,
}

/// See [`Op::Experts`].
#[derive(Clone, Debug)]
pub struct ExpertsAdd {
    /// The experts and their router.
    pub experts: Experts,
    /// Addition of the experts' sum.
    pub add: Add,
}

/// See [`Op::NormLogits`].
#[derive(Clone, Debug)]
pub struct NormLogits {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Norm,
    /// `[vocab, hidden]`
    pub head: Linear,
    /// Multiplies logits.
    pub scale: f32,
    /// Cap of the logits.
    pub soft_cap: Option<f32>,
}

/// Returns true for an RMS norm without a bias: activations are multiplied only by its weights, and the results of
/// matmuls by the factor of their row.
pub fn is_plain(norm: &Norm) -> bool {
    norm.kind == NormKind::Rms && norm.bias.is_none()
}

impl Program {
    /// Returns the mixtures of experts.
    pub fn experts(&self) -> impl Iterator<Item = &Experts> {
        self.ops.iter().filter_map(|op| match op {
            Op::Experts(op) => Some(&op.experts),
            _ => None,
        })
    }

    /// Returns true if attention of some layer is only complete when its parts are merged, because of sinks or gates.
    pub fn always_merges(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Attend(op) if op.sinks.is_some() || op.is_gated))
    }

    /// Returns true if branches of some layer read the same residual stream.
    pub fn has_joins(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Join(_)))
    }
}
