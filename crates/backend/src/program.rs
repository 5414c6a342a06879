//! A model, lowered: an input, layers, an exit, over numbered weights.
//!
//! The program is data. A backend sees all of it at load, so it may fuse operations, repack weights, record a graph or
//! encode one command buffer without changes outside. Dimensions are fields of the elements in which they vary. The
//! [`reference`](mod@crate::reference) defines the operations.

mod attention;
mod digest;
mod ends;
mod ffn;
mod visit;

pub use self::{
    attention::{
        Attention, DistanceBias, KvGroup, KvLayout, KvSlot, PositionScale, QkNorm, QkNormKind, Rope,
        RopeStyle, visible,
    },
    digest::Digest,
    ends::{Merged, Patches, RowOp, Tap},
    ffn::{Activation, Beside, Dense, ExpertGroups, ExpertLatent, Experts, Router, Scores, SharedExpert},
    visit::{Role, Visitor},
};
#[cfg(doc)]
use crate::StateUse;
use crate::{DeltaRule, Latent, ShortConv, Ssd, StateLayout, StepSequence};

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
    /// Number of token ids; the length of a row of logits. Zero in a program that has neither.
    pub vocab: usize,
    /// True if a row attends to all rows of its sequence, also to later ones (encoders). Every sequence of a step then
    /// starts at position 0, so that its K and V are needed in this step only.
    pub bidirectional: bool,
    /// True if the program stores no K and V and reads those of another program with the same pages, whose runner
    /// [loads it](crate::Runner::load_head) (assistants of Gemma 4). A sequence of a step has one row, which attends to the
    /// tokens before its position.
    pub shares_pages: bool,
    /// Arrangement of K and V.
    pub kv: KvLayout,
    /// States of a sequence, beside K and V.
    pub state: StateLayout,
    /// Rotary embeddings, referred to by [`Attention::rope`].
    pub ropes: Vec<Rope>,
    /// Makes the residual stream.
    pub input: Input,
    /// Parts of a [given row](crate::GivenRows), `[hidden]` each: the first one replaces the row's embedding, and part `i` is
    /// added to the residual stream at the end of layer `i - 1` (Qwen3-VL). A program that [joins](Joined) both has one part of
    /// the width of embeddings. Zero in a program without given rows.
    pub given_parts: usize,
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// End of the residual stream.
    pub exit: Exit,
}

/// Beginning of the residual stream.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a program has one")]
pub enum Input {
    /// Embeddings of tokens, except for rows that a step [gives](crate::GivenRows).
    Tokens(Embed),
    /// Every row is given: the program is a later stage of a model.
    Rows,
    /// Every row is given in another width: the program is an encoder of other data than text.
    Patches(Patches),
}

/// End of the residual stream.
#[derive(Clone, Debug)]
pub enum Exit {
    /// Logits.
    Logits(Head),
    /// The rows themselves, which only [`OutputKind::Residual`](crate::OutputKind::Residual) returns.
    Rows,
    /// Rows that are made of several rows each, which only [`OutputKind::Residual`](crate::OutputKind::Residual) returns.
    Merged(Merged),
}

/// `x = norm(table[token] * scale + positions[position] + types[type])`
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[vocab, hidden]`, or `[vocab, width]` in a program that [joins](Joined) embeddings with given rows.
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
    /// A given row that is joined with the embedding (heads for multi-token prediction).
    pub joined: Option<Joined>,
}

/// Begins the residual stream with an embedding and a row of another program, which the step gives for every row:
/// `x = [token_norm(embedding), given_norm(given)]·Wᵀ` (DeepSeek V3, equation 21). Such a program has one [given
/// part](Program::given_parts), which replaces no embedding.
#[derive(Clone, Copy, Debug)]
pub struct Joined {
    /// Elements of the embedding, and of the given row.
    pub width: usize,
    /// Norm of the embedding, `[width]`; none in assistants of Gemma 4.
    pub token_norm: Option<Norm>,
    /// Norm of the given row, `[width]`; none in assistants of Gemma 4.
    pub given_norm: Option<Norm>,
    /// `[hidden, 2 * width]`
    pub linear: Linear,
}

/// Embeddings of token types, which distinguish the texts of a pair. A row's id in [`Step::tokens`](crate::Step::tokens) is
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
#[expect(clippy::large_enum_variant, reason = "a program has one for each layer")]
pub enum FeedForward {
    /// No network: the layer only has a mixer (Mamba-2, Nemotron-H).
    None,
    /// One network for all rows.
    Dense(Dense),
    /// A mixture of experts: a router chooses a few of many networks for each row.
    Experts(Experts),
}

/// `logits = norm(x)·Wᵀ * scale`, soft-capped; only for rows with outputs. `norm(x)` is a row's embedding, unless the head projects it.
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
    /// Makes a row's embedding of `norm(x)` (assistants of Gemma 4).
    pub projection: Option<Projection>,
}

/// A linear whose output has another width than the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct Projection {
    /// Elements of the output.
    pub width: usize,
    /// `[width, hidden]`
    pub linear: Linear,
}

/// `y = x·Wᵀ + b`; the matrix is `[out, in]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[out, in]`
    pub matrix: MatrixId,
    /// `[out]`
    pub bias: Option<VectorId>,
    /// Bounds of `x` and `y` in layers of towers (Gemma 4 E2B, E4B), where there is no bias then.
    pub bounds: Option<Bounds>,
}

/// `y = clamp(clamp(x, input)·Wᵀ, output)`, element by element. Bounds may be infinite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Least element of the input.
    pub input_min: f32,
    /// Greatest element of the input.
    pub input_max: f32,
    /// Least element of the output.
    pub output_min: f32,
    /// Greatest element of the output.
    pub output_max: f32,
}

impl Bounds {
    /// Bounds the elements of an input.
    pub fn clamp_input(&self, x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = x.max(self.input_min).min(self.input_max));
    }

    /// Bounds the elements of an output.
    pub fn clamp_output(&self, y: &mut [f32]) {
        y.iter_mut().for_each(|y| *y = y.max(self.output_min).min(self.output_max));
    }
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

impl Mixer {
    /// Returns the mixers of a sum, or itself; nothing if it is none.
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

    /// Returns the index of its state in [`StateLayout::layers`], if it has one; a sum has those of its
    /// [`parts`](Mixer::parts).
    pub fn state(&self) -> Option<usize> {
        match self {
            Self::None | Self::Attention(_) | Self::Latent(_) | Self::Sum(_) => None,
            Self::Conv(conv) => Some(conv.state),
            Self::DeltaRule(delta) => Some(delta.state),
            Self::Ssd(ssd) => Some(ssd.state),
        }
    }

    /// Returns the index of its state for modification.
    pub fn state_mut(&mut self) -> Option<&mut usize> {
        match self {
            Self::None | Self::Attention(_) | Self::Latent(_) | Self::Sum(_) => None,
            Self::Conv(conv) => Some(&mut conv.state),
            Self::DeltaRule(delta) => Some(&mut delta.state),
            Self::Ssd(ssd) => Some(&mut ssd.state),
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
    /// Returns the embedding, if the program begins with tokens.
    pub fn embed(&self) -> Option<&Embed> {
        match &self.input {
            Input::Tokens(embed) => Some(embed),
            Input::Rows | Input::Patches(_) => None,
        }
    }

    /// Returns the embedding for modification.
    pub fn embed_mut(&mut self) -> Option<&mut Embed> {
        match &mut self.input {
            Input::Tokens(embed) => Some(embed),
            Input::Rows | Input::Patches(_) => None,
        }
    }

    /// Returns the join of embeddings with given rows, if there is one.
    pub fn joined(&self) -> Option<&Joined> {
        self.embed()?.joined.as_ref()
    }

    /// Returns the embeddings for layers, if there are some.
    pub fn layer_embeds(&self) -> Option<&LayerEmbeds> {
        self.embed()?.layers.as_ref()
    }

    /// Returns the head, if the program ends in logits.
    pub fn head(&self) -> Option<&Head> {
        match &self.exit {
            Exit::Logits(head) => Some(head),
            Exit::Rows | Exit::Merged(_) => None,
        }
    }

    /// Returns the head for modification.
    pub fn head_mut(&mut self) -> Option<&mut Head> {
        match &mut self.exit {
            Exit::Logits(head) => Some(head),
            Exit::Rows | Exit::Merged(_) => None,
        }
    }

    /// Returns the number of ids that a row of a step may have: tokens of each type. It is one, for the id 0, if no row has
    /// a token.
    pub fn token_ids(&self) -> usize {
        match &self.input {
            Input::Tokens(embed) => self.vocab.saturating_mul(embed.types.map_or(1, |types| types.count)),
            Input::Rows | Input::Patches(_) => 1,
        }
    }

    /// Returns the number of elements of a [given row](crate::GivenRows).
    pub fn given_width(&self) -> usize {
        match &self.input {
            Input::Tokens(_) | Input::Rows => self.given_parts * self.part_width(),
            Input::Patches(patches) => patches.given_width(self.hidden),
        }
    }

    /// Returns true if every row of a step is [given](crate::GivenRows): in its place, or beside its token.
    pub fn needs_given_rows(&self) -> bool {
        !matches!(self.input, Input::Tokens(_)) || self.joined().is_some()
    }

    /// Returns the number of elements of an embedding, and of a part of a [given row](crate::GivenRows) of a program without patches.
    pub fn part_width(&self) -> usize {
        self.joined().map_or(self.hidden, |joined| joined.width)
    }

    /// Returns the number of tokens of a sequence that its rows see in any order, see [`visible`]. `None` in a program whose rows see
    /// earlier ones only.
    pub fn seen_tokens(&self, sequence: &StepSequence) -> Option<usize> {
        match (self.bidirectional, self.shares_pages) {
            (true, _) => Some(sequence.len()),
            (false, true) => Some(sequence.start),
            (false, false) => None,
        }
    }

    /// Returns the number of tokens of a sequence whose pages a step reads or writes.
    pub fn paged_tokens(&self, sequence: &StepSequence) -> usize {
        if self.shares_pages { sequence.start } else { sequence.len() }
    }

    /// Returns the end of a tower.
    pub fn merged(&self) -> Option<&Merged> {
        match &self.exit {
            Exit::Merged(merged) => Some(merged),
            Exit::Logits(_) | Exit::Rows => None,
        }
    }

    /// Returns the number of elements of a row as [`OutputKind::Residual`](crate::OutputKind::Residual) returns it.
    pub fn residual_width(&self) -> usize {
        self.merged().map_or(self.hidden, |merged| merged.taps.len() * merged.width)
    }

    /// Returns true if attention of some layers sees [spans](crate::Step::spans).
    pub fn has_spans(&self) -> bool {
        self.kv.groups.iter().any(|group| group.spans)
    }

    /// Returns true if matrices of some layers have [`Bounds`].
    pub fn has_bounds(&self) -> bool {
        let of_attention = |op: &Attention| {
            [Some(op.q), op.k, op.v, Some(op.out)].into_iter().flatten().any(|linear| linear.bounds.is_some())
        };
        let of_layer = |layer: &Layer| {
            let mixes = matches!(&layer.mixer, Mixer::Attention(op) if of_attention(op));
            let FeedForward::Dense(Dense { gate, up, down, .. }) = &layer.ffn else { return mixes };
            mixes
                || [*gate, Some(*up), Some(*down)].into_iter().flatten().any(|linear| linear.bounds.is_some())
        };
        self.layers.iter().any(of_layer)
    }

    /// Returns true if some rotations have coordinates of their own, see [`Rope::axes`].
    pub fn has_axes(&self) -> bool {
        self.ropes.iter().any(|rope| !rope.axes.is_empty())
    }

    /// Returns the number of last rows of a chunk that a sequence can [drop](StateUse) again; `None` without states, where
    /// any row can be computed again.
    pub fn droppable_rows(&self) -> Option<usize> {
        let of_mixer = |mixer: &Mixer| {
            let taps = match mixer {
                Mixer::Conv(conv) => conv.convolution.taps,
                Mixer::DeltaRule(delta) => delta.convolution.taps,
                Mixer::Ssd(ssd) => ssd.convolution.taps,
                Mixer::None | Mixer::Attention(_) | Mixer::Latent(_) | Mixer::Sum(_) => return None,
            };
            Some((self.state.layers[mixer.state()?].rows + 1).saturating_sub(taps))
        };
        self.mixers().filter_map(of_mixer).min()
    }

    /// Returns the K/V group of an attention layer.
    pub fn kv_group(&self, attention: &Attention) -> &KvGroup {
        &self.kv.groups[attention.kv.group]
    }

    /// Returns the mixers of all layers, in order; those of a sum one by one.
    pub fn mixers(&self) -> impl Iterator<Item = &Mixer> {
        self.layers.iter().flat_map(|layer| layer.mixer.parts())
    }

    /// Returns the attentions of all layers, in order.
    pub fn attentions(&self) -> impl Iterator<Item = &Attention> {
        self.mixers().filter_map(|mixer| match mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::None
            | Mixer::Conv(_)
            | Mixer::DeltaRule(_)
            | Mixer::Latent(_)
            | Mixer::Ssd(_)
            | Mixer::Sum(_) => None,
        })
    }
}
