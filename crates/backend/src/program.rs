//! A model, lowered: an embedding, layers, a head, over numbered weights.
//!
//! The program is data. A backend sees all of it at load, so it may fuse operations, repack weights, record a graph or
//! encode one command buffer without changes outside. Dimensions are fields of the elements in which they vary. The
//! [`reference`](mod@crate::reference) defines the operations.

use std::ops::Range;

use crate::{DeltaRule, KvDtype, Latent, ShortConv, Ssd, StateLayout};

/// Index of a matrix in [`Weights::matrices`](crate::Weights::matrices).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MatrixId(pub u32);

/// Index of a vector in [`Weights::vectors`](crate::Weights::vectors).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VectorId(pub u32);

/// Index of a table in [`Weights::tables`](crate::Weights::tables).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableId(pub u32);

/// A model that a backend can load. The residual stream `x` is `[rows, hidden]`.
#[derive(Clone, Debug)]
pub struct Program {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of token ids; the length of a row of logits.
    pub vocab: usize,
    /// True if a row attends to all rows of its sequence, also to later ones (encoders). Every sequence of a step then
    /// starts at position 0, so that its K and V are needed in this step only.
    pub bidirectional: bool,
    /// Arrangement of K and V.
    pub kv: KvLayout,
    /// States of a sequence, beside K and V.
    pub state: StateLayout,
    /// Rotary embeddings, referred to by [`Attention::rope`].
    pub ropes: Vec<Rope>,
    /// Makes the residual stream.
    pub embed: Embed,
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// Turns the residual stream into logits.
    pub head: Head,
}

/// `x = norm(table[token] * scale + positions[position] + types[type])`
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[vocab, hidden]`
    pub table: MatrixId,
    /// Multiplies rows of the table.
    pub scale: f32,
    /// Learned position embeddings (GPT-2).
    pub positions: Option<Positions>,
    /// Embeddings of token types (BERT).
    pub types: Option<TokenTypes>,
    /// Norm of the sum, `[hidden]` (BERT).
    pub norm: Option<Norm>,
    /// Embeddings for each layer (Gemma 4).
    pub layers: Option<LayerEmbeds>,
}

/// Embeddings of token types, which tell the texts of a pair apart. A row's id in [`Step::tokens`](crate::Step::tokens) is
/// `type * vocab + token`.
#[derive(Clone, Copy, Debug)]
pub struct TokenTypes {
    /// `[count, hidden]`
    pub table: VectorId,
    /// Number of types, at least one.
    pub count: usize,
}

/// Embeddings of a token for each layer, which [`LayerInput`]s add.
///
/// ```text
/// e[i] = norm((x·Wᵀ)[i]) + scale * table[token][i]    x is the row of the residual stream before the first layer
/// ```
#[derive(Clone, Debug)]
pub struct LayerEmbeds {
    /// `[vocab, count * width]`; its rows are read from their source in each step.
    pub table: TableId,
    /// Multiplies rows of the table.
    pub scale: f32,
    /// Number of embeddings.
    pub count: usize,
    /// Elements of one embedding.
    pub width: usize,
    /// `[count * width, hidden]`
    pub projection: Linear,
    /// Norm of each embedding's part of the projection, `[width]`.
    pub norm: Norm,
}

/// A learned embedding for each position.
#[derive(Clone, Copy, Debug)]
pub struct Positions {
    /// `[count, hidden]`
    pub table: MatrixId,
    /// Number of positions; no sequence may be longer.
    pub count: usize,
}

/// A layer: a mixer, which moves information between tokens, and a feed-forward network, which does not.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The mixer.
    pub mixer: Mixer,
    /// The feed-forward network.
    pub ffn: FeedForward,
    /// Input of the feed-forward network.
    pub residual: Residual,
    /// Norm of the residual stream after the mixer's output was added, `[hidden]` (BERT); never with
    /// [`Residual::Parallel`].
    pub norm_after_mixer: Option<Norm>,
    /// Norm of the residual stream after the feed-forward network's output was added, `[hidden]` (BERT).
    pub norm_after_ffn: Option<Norm>,
    /// Multiplies the output of both branches before it is added to the residual stream (Granite); one elsewhere.
    pub branch_scale: f32,
    /// Adds one of [`Embed::layers`] after both branches (Gemma 4).
    pub input: Option<LayerInput>,
    /// Multiplies the residual stream at the layer's end (Gemma 4); one elsewhere.
    pub output_scale: f32,
}

/// `x += post_norm((activation(x·Wgateᵀ) ⊙ e[index])·Woutᵀ)`
#[derive(Clone, Debug)]
pub struct LayerInput {
    /// Index of the embedding, see [`LayerEmbeds`].
    pub index: usize,
    /// `[width, hidden]`
    pub gate: Linear,
    /// Applied to the gate.
    pub activation: Activation,
    /// `[hidden, width]`
    pub out: Linear,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
}

/// Addition of a layer's two branches to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// `x += mixer(x); x += ffn(x)`
    Sequential,
    /// `x += mixer(x) + ffn(x)` (Cohere, Phi-2, GPT-NeoX).
    Parallel,
}

/// A mixer. A backend that lacks a kind refuses it at load, by name.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Mixer {
    /// No mixer: the layer only has a feed-forward network (Nemotron-H).
    None,
    /// Attention over the pages of a sequence.
    Attention(Attention),
    /// A short convolution.
    Conv(ShortConv),
    /// The gated delta rule.
    DeltaRule(DeltaRule),
    /// Latent attention.
    Latent(Box<Latent>),
    /// The scan of Mamba-2.
    Ssd(Box<Ssd>),
    /// Several mixers of one input, whose outputs are added (Falcon-H1).
    Sum(Vec<Branch>),
}

/// One of the mixers of a [`Mixer::Sum`].
#[derive(Clone, Debug)]
pub struct Branch {
    /// Any mixer but a sum or none.
    pub mixer: Mixer,
    /// Multiplies its output, after its norm and beside [`Layer::branch_scale`].
    pub scale: f32,
}

/// A feed-forward network. A backend that lacks a kind refuses it at load, by name.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FeedForward {
    /// No network: the layer only has a mixer (Mamba-2, Nemotron-H).
    None,
    /// One network for all rows.
    Dense(Dense),
    /// A mixture of experts: a router chooses a few of many networks for each row.
    Experts(Experts),
}

/// ```text
/// h = norm(x)                      q, k, v = h·Wᵀ + b
/// q, k = qk_norm(rope(..))         either order, see QkNormKind
/// v = v_norm(v)                    q = q * position_scale           k and v go into the pages
/// a = softmax(q·Kᵀ * scale)·V      over the block table; see reference::attention
/// a = a ⊙ sigmoid(h·Wgateᵀ + b)    if there is a gate
/// x += branch_scale * post_norm(a·Wᵀ + b)
/// ```
#[derive(Clone, Debug)]
pub struct Attention {
    /// Norm of the residual stream, `[hidden]`; `None` where only the branch's output is normed (OLMo 2).
    pub norm: Option<Norm>,
    /// Query heads: a multiple of the group's [`KvGroup::kv_heads`]; consecutive ones share a K/V head.
    pub heads: usize,
    /// `[heads * head_dim, hidden]`
    pub q: Linear,
    /// `[kv_heads * head_dim, hidden]`; `None` reads the K and V that an earlier layer has stored at [`Attention::kv`]
    /// (Gemma 4).
    pub k: Option<Linear>,
    /// `[kv_heads * head_dim, hidden]`; `None` uses K as it is before its norm and rotation (Gemma 4).
    pub v: Option<Linear>,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Norm of each head of V, `[head_dim]` (Gemma 4).
    pub v_norm: Option<Norm>,
    /// Index into [`Program::ropes`]; `None` in layers without positions (SmolLM3).
    pub rope: Option<usize>,
    /// Multiplies queries by a function of their position.
    pub position_scale: Option<PositionScale>,
    /// Multiplies scores, positive, usually `1/sqrt(head_dim)`.
    pub scale: f32,
    /// `cap * tanh(score / cap)` after scaling (Gemma 2).
    pub soft_cap: Option<f32>,
    /// Added to scores by the distance of query and key (ALiBi, MPNet).
    pub distance_bias: Option<DistanceBias>,
    /// One additional score per head, `[heads]`, which takes part in the softmax and has no value (gpt-oss).
    pub sinks: Option<VectorId>,
    /// Slot of K and V; the group has their shape and the window.
    pub kv: KvSlot,
    /// Gate of the output, `[heads * head_dim, hidden]` (Qwen 3.5).
    pub gate: Option<Linear>,
    /// `[hidden, heads * head_dim]`
    pub out: Linear,
    /// Norm of the output before it is added (Gemma 2 and 3, OLMo 2).
    pub post_norm: Option<Norm>,
}

/// A score of head `h`, scaled and capped, gains `table[h][reach + key position - query position]`.
#[derive(Clone, Copy, Debug)]
pub struct DistanceBias {
    /// `[heads, 2 * reach + 1]`
    pub table: VectorId,
    /// Largest distance; no sequence may have more than `reach + 1` tokens.
    pub reach: usize,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm {
    /// Norm of queries, see [`QkNormKind`] for its width.
    pub q: Norm,
    /// Norm of keys; unused in a layer that reads another layer's keys.
    pub k: Norm,
    /// Width and position of the norm.
    pub kind: QkNormKind,
}

/// Width and position of a [`QkNorm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormKind {
    /// Each head by itself, `[head_dim]`, before RoPE (Qwen 3, Gemma 3).
    Head,
    /// Each head by itself, `[head_dim]`, after RoPE (Hunyuan).
    HeadAfterRope,
    /// The whole row of a matrix, `[heads * head_dim]`, before RoPE (OLMo 2, MiniMax M2).
    Row,
}

/// A query at position `p` is multiplied by `1 + beta * ln(1 + floor(p / original))`, after RoPE (Ministral 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PositionScale {
    /// Slope.
    pub beta: f32,
    /// Context of the first training, in tokens, at least one.
    pub original: u32,
}

/// ```text
/// h = norm(x)
/// g = activation(h·Wgateᵀ) ⊙ (h·Wupᵀ)        without a gate: g = activation(h·Wupᵀ)
/// x += branch_scale * post_norm(g·Wdownᵀ)    each product with its bias, if there is one
/// ```
#[derive(Clone, Debug)]
pub struct Dense {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Width of the rows between up and down.
    pub width: usize,
    /// `[width, hidden]`
    pub gate: Option<Linear>,
    /// `[width, hidden]`
    pub up: Linear,
    /// Applied to the gate, or without a gate to up.
    pub activation: Activation,
    /// `[hidden, width]`
    pub down: Linear,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
}

/// ```text
/// h = norm(x)
/// y = sum of weight[e] * expert[e](h) over the chosen experts e, in ascending order
/// x += branch_scale * post_norm(shared(h) + y)
/// x += branch_scale * post_norm(dense(x) + sum_norm(y))    with a dense network beside the experts
/// ```
///
/// An expert is gated, as [`Dense`] is, or has no gate (Nemotron 3). With an [`ExpertLatent`], experts read and write rows
/// of its width: `y = (sum of weight[e] * expert[e](h·Wdownᵀ))·Wupᵀ`.
///
/// The matrices of all experts are stacked: a [`Matrix`](crate::Matrix) of [`count`](Experts::count) parts, and biases
/// one expert after the other.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Chooses and weighs experts.
    pub router: Router,
    /// Number of experts.
    pub count: usize,
    /// Width of an expert between up and down.
    pub width: usize,
    /// Narrower rows that the experts read and write (Nemotron 3 Super); never with a network beside them.
    pub latent: Option<ExpertLatent>,
    /// `[count, width, hidden]`
    pub gate: Option<Linear>,
    /// `[count, width, hidden]`
    pub up: Linear,
    /// Applied to the gate, or without a gate to up.
    pub activation: Activation,
    /// `[count, hidden, width]`
    pub down: Linear,
    /// A network for all rows, beside the chosen experts.
    pub shared: Option<SharedExpert>,
    /// A network for all rows with its own input and norms (Gemma 4); never with a shared expert.
    pub beside: Option<Box<Beside>>,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
}

/// The two matrices around experts whose rows have another width than the residual stream. That width replaces `hidden`
/// in the shapes of their matrices.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLatent {
    /// Elements of a row that an expert reads.
    pub width: usize,
    /// `[width, hidden]`
    pub down: Linear,
    /// `[hidden, width]`
    pub up: Linear,
}

/// A dense network whose output is added to that of experts.
#[derive(Clone, Debug)]
pub struct Beside {
    /// Reads the residual stream; its output is added after its own [`Dense::post_norm`].
    pub dense: Dense,
    /// Norm of the sum of the experts, `[hidden]`.
    pub sum_norm: Norm,
}

/// Chooses the experts of a row and their weights: `scores = activation(h·Wᵀ + b)`; the [`used`](Router::used) experts
/// with the largest `scores + selection_bias` are chosen, among equals the one with the lowest id; their weights are
/// their scores, perhaps divided by their sum, times [`factor`](Router::factor) and [`expert_scale`](Router::expert_scale).
#[derive(Clone, Debug)]
pub struct Router {
    /// Norm of the residual stream, `[hidden]`, of a router that reads something else than the experts (Gemma 4).
    pub norm: Option<Norm>,
    /// `[count, hidden]`; not quantized, because a rounding difference may choose another expert.
    pub linear: Linear,
    /// Kind of scores.
    pub scores: Scores,
    /// Added to scores for the choice only, `[count]` (DeepSeek V3, GLM 4.5).
    pub selection_bias: Option<VectorId>,
    /// Chooses among the experts of some groups only.
    pub groups: Option<ExpertGroups>,
    /// Number of experts for each row.
    pub used: usize,
    /// Divides the weights by their sum.
    pub renormalize: bool,
    /// Multiplies the weights.
    pub factor: f32,
    /// Multiplies the weight of each expert, `[count]` (Gemma 4).
    pub expert_scale: Option<VectorId>,
}

/// Groups of consecutive experts, of which a row uses some (DeepSeek V2 and V3): those with the largest sums of their
/// [`best`](ExpertGroups::best) largest scores, as the choice of experts compares them; among equals the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, which divides the number of experts.
    pub count: usize,
    /// Number of groups for each row.
    pub used: usize,
    /// Scores that are summed up.
    pub best: usize,
}

/// Conversion of a router's logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scores {
    /// Softmax over all experts. With [`Router::renormalize`] this is the softmax over the chosen ones.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// A dense network with the input of the experts, so it has no norms of its own.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    /// Width of the rows between up and down.
    pub width: usize,
    /// `[width, hidden]`; it has one if the experts do.
    pub gate: Option<Linear>,
    /// `[width, hidden]`
    pub up: Linear,
    /// `[hidden, width]`
    pub down: Linear,
    /// `[1, hidden]`: the output is multiplied by `sigmoid(h·Wᵀ)` (Qwen 1.5 MoE).
    pub output_gate: Option<Linear>,
}

/// `logits = norm(x)·Wᵀ * scale`, soft-capped; only for rows with outputs. `norm(x)` is a row's embedding.
#[derive(Clone, Debug)]
pub struct Head {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Norm,
    /// `[vocab, hidden]`; the embedding's own matrix where head and embedding are tied.
    pub linear: Linear,
    /// Multiplies logits (Cohere, Granite); one elsewhere.
    pub scale: f32,
    /// `cap * tanh(logit / cap)` after scaling (Gemma 2).
    pub soft_cap: Option<f32>,
}

/// `y = x·Wᵀ + b`; the matrix is `[out, in]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[out, in]`
    pub matrix: MatrixId,
    /// `[out]`
    pub bias: Option<VectorId>,
}

/// A norm of a row. Weights that are stored as an offset from one (Gemma's) are lowered with the one added.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Its formula.
    pub kind: NormKind,
    /// `[width]`
    pub weight: VectorId,
    /// Added to the result, `[width]`.
    pub bias: Option<VectorId>,
    /// Added to the mean square, or to the variance.
    pub eps: f32,
}

/// The formula of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x²) + eps) * weight + bias`
    Rms,
    /// The same for `x - mean(x)`.
    Layer,
}

/// The activation of a feed-forward network. With a gate `g` and an input `u`, it is `f(g) * u` unless stated
/// otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`
    GeluTanh,
    /// `0.5 x (1 + erf(x / sqrt(2)))`
    Gelu,
    /// `max(x, 0)²`
    Relu2,
    /// `g' * sigmoid(alpha * g') * (u' + 1)` with `g' = min(g, limit)` and `u' = clamp(u, -limit, limit)`: only with
    /// a gate (gpt-oss).
    ClampedSwiglu {
        /// Slope of the sigmoid.
        alpha: f32,
        /// Bound of gate and input.
        limit: f32,
    },
}

/// Arrangement of K and V of all layers in pages.
///
/// A page holds `block_size` tokens of K and V for all layers of *one group* of one sequence. Layers of a group have
/// heads of one shape and the same window, so that pages of a sliding-window group can be released while other groups
/// keep theirs. All pages have the same size, and all groups share one arena and one free list, so the layers of a
/// group should fill its pages. A model without alternating windows has one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// The groups; a sequence has one block table for each.
    pub groups: Vec<KvGroup>,
}

/// Layers that share pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// A query at position `p` attends to keys at positions `> p - window`, and `<= p` or, in a
    /// [bidirectional](Program::bidirectional) program, `< p + window`; `None` to all.
    pub window: Option<u32>,
    /// Layer slots in a page.
    pub slots: usize,
    /// K/V heads of each layer.
    pub kv_heads: usize,
    /// Elements of one head, of K and of V.
    pub head_dim: usize,
}

/// Slot of a layer's K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvSlot {
    /// Index into [`KvLayout::groups`].
    pub group: usize,
    /// Layer slot inside the group's pages, `< KvGroup::slots`.
    pub slot: usize,
}

/// A rotary position embedding, reduced to one frequency per rotated pair. Linear, llama3, YaRN and longrope scaling
/// only change these numbers, so backends do not distinguish them.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Elements of a pair.
    pub style: RopeStyle,
    /// Radians per position of each pair, `[rotated_dims / 2]`; elements past the rotated ones pass unchanged.
    pub frequencies: Vec<f32>,
    /// Multiplies both sine and cosine (YaRN's and longrope's attention factor; one elsewhere).
    pub magnitude: f32,
}

/// Pairs of elements that RoPE rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(0, 1), (2, 3), ...`: the original order, and that of GGUF files of the Llama family.
    Interleaved,
    /// `(0, n/2), (1, n/2 + 1), ...`: the order of Hugging Face's files and of NeoX.
    HalfSplit,
}

impl Mixer {
    /// The mixers of a sum, or itself; nothing if it is none.
    pub fn parts(&self) -> impl Iterator<Item = &Self> {
        let (own, branches) = match self {
            Self::None => (None, [].as_slice()),
            Self::Sum(branches) => (None, branches.as_slice()),
            own => (Some(own), [].as_slice()),
        };
        own.into_iter().chain(branches.iter().map(|branch| &branch.mixer))
    }

    /// Returns the parts for modification.
    pub fn parts_mut(&mut self) -> impl Iterator<Item = &mut Self> {
        let (own, branches) = match self {
            Self::None => (None, [].as_mut_slice()),
            Self::Sum(branches) => (None, branches.as_mut_slice()),
            own => (Some(own), [].as_mut_slice()),
        };
        own.into_iter().chain(branches.iter_mut().map(|branch| &mut branch.mixer))
    }

    /// Index of its state in [`StateLayout::layers`], if it has one; a sum has those of its [`parts`](Mixer::parts).
    pub fn state(&self) -> Option<usize> {
        match self {
            Self::None | Self::Attention(_) | Self::Latent(_) | Self::Sum(_) => None,
            Self::Conv(conv) => Some(conv.state),
            Self::DeltaRule(delta) => Some(delta.state),
            Self::Ssd(ssd) => Some(ssd.state),
        }
    }

    /// Place of its K and V and number of query heads, if it attends; a sum has those of its [`parts`](Mixer::parts).
    pub fn attends(&self) -> Option<(KvSlot, usize)> {
        match self {
            Self::Attention(op) => Some((op.kv, op.heads)),
            Self::Latent(op) => Some((op.kv, op.shape.heads)),
            Self::None | Self::Conv(_) | Self::DeltaRule(_) | Self::Ssd(_) | Self::Sum(_) => None,
        }
    }
}

impl Program {
    /// Number of ids that a row of a step may have: tokens of each type.
    pub fn token_ids(&self) -> usize {
        self.vocab.saturating_mul(self.embed.types.map_or(1, |types| types.count))
    }

    /// The K/V group of an attention layer.
    pub fn kv_group(&self, attention: &Attention) -> &KvGroup {
        &self.kv.groups[attention.kv.group]
    }

    /// The mixers of all layers, in order; those of a sum one by one.
    pub fn mixers(&self) -> impl Iterator<Item = &Mixer> {
        self.layers.iter().flat_map(|layer| layer.mixer.parts())
    }

    /// The attentions of all layers, in order.
    pub fn attentions(&self) -> impl Iterator<Item = &Attention> {
        self.mixers().filter_map(|mixer| match mixer {
            Mixer::Attention(attention) => Some(attention),
            _ => None,
        })
    }
}

impl KvLayout {
    /// Elements of K and V in one page: those of the largest group.
    pub fn page_elements(&self, block_size: usize) -> usize {
        self.groups.iter().map(|group| group.slots * 2 * group.width() * block_size).max().unwrap_or(0)
    }

    /// Bytes of K and V in one page, before any padding of the backend's.
    pub fn page_bytes(&self, block_size: usize, dtype: KvDtype) -> usize {
        self.groups.iter().map(|group| group.slots * group.token_bytes(dtype) * block_size).max().unwrap_or(0)
    }
}

/// Returns the positions of the keys that a query at `position` sees, see [`KvGroup::window`]. `len` is the number of tokens
/// of the sequence, in a [bidirectional](Program::bidirectional) program only.
pub fn visible(window: Option<u32>, len: Option<usize>, position: usize) -> Range<usize> {
    let window = window.map(|window| window as usize);
    let start = window.map_or(0, |window| (position + 1).saturating_sub(window));
    let end = match len {
        None => position + 1,
        Some(len) => window.map_or(len, |window| len.min(position.saturating_add(window))),
    };
    start..end
}

impl KvGroup {
    /// Elements of a token's K, or V, in one layer.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of a token's K and V in one layer.
    pub fn token_bytes(&self, dtype: KvDtype) -> usize {
        2 * self.kv_heads * dtype.head_bytes(self.head_dim)
    }
}
