//! A program as the kernels run it: one flat list of fused operations, with one shape for all layers.
//!
//! What does not fit this form is refused here, by name.

use paguro_backend::{
    Activation, Attention, DeltaRule, Dense, Experts, FeedForward, KvSlot, Layer, Linear, LoadError,
    MatrixId, Mixer, Norm, NormKind, PositionScale, QkNorm, Residual, Rope, Scores, ShortConv, StateLayout,
    VectorId,
};

/// Experts of a mixture, at most: a workgroup has the scores of all of them.
const MOST_EXPERTS: usize = 1024;
/// Elements of a key of a delta rule, at most: a workgroup has the keys of a chunk.
pub const MOST_KEY_DIM: usize = 128;
/// How a layer is refused that the contract has and this backend does not.
const NEWER: &str = "a layer of a kind that is newer than this backend";

/// A program. Shapes that all layers share stand here once.
#[derive(Clone, Debug)]
pub struct Program {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Length of a row of logits.
    pub vocab: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of the widest dense network between gate/up and down; shared experts are dense networks.
    pub ffn: usize,
    /// How K and V are stored.
    pub kv: KvLayout,
    /// States of a sequence.
    pub state: StateLayout,
    /// Rotary embeddings, referred to by [`NormQkvRopeStore::rope`].
    pub ropes: Vec<Rope>,
    /// `Embed`, then per layer either `NormQkvRopeStore`, `Attend` and `ProjectAdd` or `ShortConv` or `DeltaRule`, either
    /// `NormGateUp` and `DownAdd` or `Experts`, and perhaps `Join`; then `NormLogits`.
    pub ops: Vec<Op>,
}

/// How K and V of all layers are arranged in pages.
#[derive(Clone, Debug)]
pub struct KvLayout {
    /// Window of each group.
    pub groups: Vec<KvGroup>,
    /// Layer slots in a page.
    pub slots: usize,
    /// K/V heads of each layer.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
}

/// Layers that see equally far back.
#[derive(Clone, Copy, Debug)]
pub struct KvGroup {
    /// See [`paguro_backend::KvGroup::window`].
    pub window: Option<u32>,
}

/// One fused operation.
#[derive(Clone, Debug)]
pub enum Op {
    /// `x = table[token] * scale + positions[position]`
    Embed(Embed),
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
    /// `h = norm(x)`; `g = activation(h·Wgateᵀ) ⊙ (h·Wupᵀ)`
    NormGateUp(NormGateUp),
    /// `x += post_norm(g·Wᵀ + b)`
    DownAdd(DownAdd),
    /// A whole mixture of experts.
    Experts(Box<ExpertsAdd>),
    /// Adds the branches of a layer whose branches read the same residual stream.
    Join(Join),
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
    /// `[kv_heads * head_dim, hidden]`
    pub k: Linear,
    /// `[kv_heads * head_dim, hidden]`
    pub v: Linear,
    /// Gate of attention's output, `[heads * head_dim, hidden]`.
    pub gate: Option<Linear>,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Index into [`Program::ropes`].
    pub rope: Option<usize>,
    /// Multiplies queries by a function of their position.
    pub position_scale: Option<PositionScale>,
    /// Where k and v go.
    pub kv: KvSlot,
}

/// See [`Op::Attend`].
#[derive(Clone, Debug)]
pub struct Attend {
    /// Scale of the scores.
    pub scale: f32,
    /// Cap of the scores.
    pub soft_cap: Option<f32>,
    /// One more score for each head.
    pub sinks: Option<VectorId>,
    /// Whether [`NormQkvRopeStore::gate`] has made gates of the output.
    pub is_gated: bool,
    /// Where k and v are; the group carries the window.
    pub kv: KvSlot,
}

/// How a branch is added to the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct Add {
    /// Norm of the branch before it is added.
    pub post_norm: Option<Norm>,
    /// Multiplies what is added.
    pub scale: f32,
    /// True if a later [`Op::Join`] adds it.
    pub waits: bool,
}

impl Add {
    /// True if a product is added as it is.
    pub fn is_plain(&self) -> bool {
        self.post_norm.is_none() && self.scale == 1.0 && !self.waits
    }
}

/// See [`Op::ProjectAdd`].
#[derive(Clone, Debug)]
pub struct ProjectAdd {
    /// `[hidden, heads * head_dim]`
    pub project: Linear,
    /// How it is added.
    pub add: Add,
}

/// See [`Op::ShortConv`].
#[derive(Clone, Debug)]
pub struct ShortConvAdd {
    /// The convolution.
    pub conv: ShortConv,
    /// How its output is added.
    pub add: Add,
}

/// See [`Op::DeltaRule`].
#[derive(Clone, Debug)]
pub struct DeltaRuleAdd {
    /// The rule.
    pub delta: DeltaRule,
    /// How its output is added.
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
    /// How it is added.
    pub add: Add,
}

/// See [`Op::Experts`].
#[derive(Clone, Debug)]
pub struct ExpertsAdd {
    /// The experts and their router.
    pub experts: Experts,
    /// How the sum of the experts is added.
    pub add: Add,
}

/// See [`Op::Join`].
#[derive(Clone, Debug)]
pub struct Join {
    /// Attention's branch.
    pub mixer: Add,
    /// That of the feed-forward network.
    pub ffn: Add,
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

/// True for a root-mean-square norm without a bias: activations are multiplied by its weights only, and products by
/// the factor of their row.
pub fn is_plain(norm: &Norm) -> bool {
    norm.kind == NormKind::Rms && norm.bias.is_none()
}

impl Program {
    /// Lowers a program for a device of this name.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`], with what there are no kernels for.
    pub fn new(program: &paguro_backend::Program, device: &str) -> Result<Self, LoadError> {
        let lowering = Lowering { program, device };
        if program.layers.is_empty() {
            return Err(LoadError::BadProgram("there are no layers".into()));
        }
        let is_latent = |layer: &Layer| matches!(layer.mixer, Mixer::Latent(_));
        lowering.require(!program.layers.iter().any(is_latent), "latent attention")?;
        let Some(first) = program.attentions().next() else {
            return lowering.refuse("models without attention");
        };
        let heads = lowering.heads(first)?;
        let [group, ..] = &program.kv.groups[..] else {
            return Err(LoadError::BadProgram("no groups of K and V".into()));
        };
        let geometry = |group: &paguro_backend::KvGroup| (group.slots, group.kv_heads, group.head_dim);
        let uniform = program.kv.groups.iter().all(|other| geometry(other) == geometry(group));
        lowering.require(uniform, "K/V heads that differ between layers")?;
        lowering.require(program.embed.layers.is_none(), "embeddings for layers")?;
        let mut ops = vec![Op::Embed(Embed {
            table: program.embed.table,
            scale: program.embed.scale,
            positions: program.embed.positions.map(|positions| positions.table),
        })];
        for layer in &program.layers {
            if let Mixer::Attention(attention) = &layer.mixer {
                let same = lowering.heads(attention)? == heads;
                lowering.require(same, "query heads whose number differs between layers")?;
            }
            lowering.layer(layer, &mut ops)?;
        }
        ops.push(Op::NormLogits(NormLogits {
            norm: program.head.norm,
            head: program.head.linear,
            scale: program.head.scale,
            soft_cap: program.head.soft_cap,
        }));
        let width = |op: &Op| match op {
            Op::NormGateUp(op) => op.width,
            Op::Experts(op) => op.experts.shared.as_ref().map_or(0, |shared| shared.width),
            _ => 0,
        };
        let groups = program.kv.groups.iter().map(|group| KvGroup { window: group.window }).collect();
        let (slots, kv_heads, head_dim) = geometry(group);
        Ok(Self {
            hidden: program.hidden,
            vocab: program.vocab,
            heads,
            ffn: ops.iter().map(width).max().unwrap_or(0),
            kv: KvLayout { groups, slots, kv_heads, head_dim },
            state: program.state.clone(),
            ropes: program.ropes.clone(),
            ops,
        })
    }

    /// The mixtures of experts.
    pub fn experts(&self) -> impl Iterator<Item = &Experts> {
        self.ops.iter().filter_map(|op| match op {
            Op::Experts(op) => Some(&op.experts),
            _ => None,
        })
    }

    /// True if attention of some layer is only complete when its parts are merged, because of sinks or gates.
    pub fn always_merges(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Attend(op) if op.sinks.is_some() || op.is_gated))
    }

    /// True if branches of some layer read the same residual stream.
    pub fn has_joins(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Join(_)))
    }
}

struct Lowering<'a> {
    program: &'a paguro_backend::Program,
    device: &'a str,
}

impl Lowering<'_> {
    /// Query heads of attention.
    fn heads(&self, attention: &Attention) -> Result<usize, LoadError> {
        let group = self.program.kv.groups.get(attention.kv.group);
        let kv_heads = group.map_or(0, |group| group.kv_heads);
        let divides = kv_heads > 0 && attention.heads.is_multiple_of(kv_heads);
        self.require(divides, "query heads that do not share K/V heads evenly")?;
        Ok(attention.heads)
    }

    fn layer(&self, layer: &Layer, ops: &mut Vec<Op>) -> Result<(), LoadError> {
        self.require(layer.input.is_none(), "embeddings for layers")?;
        self.require(layer.output_scale == 1.0, "scales of layers")?;
        let waits = layer.residual == Residual::Parallel;
        let add = |post_norm| Add { post_norm, scale: layer.branch_scale, waits };
        let mixer = match &layer.mixer {
            Mixer::Attention(attention) => {
                let mixer = add(attention.post_norm);
                self.mix(attention, mixer, ops)?;
                mixer
            }
            Mixer::Conv(conv) => {
                let add = add(conv.post_norm);
                ops.push(Op::ShortConv(Box::new(ShortConvAdd { conv: conv.clone(), add })));
                add
            }
            Mixer::DeltaRule(delta) => {
                let (add, key_dim) = (add(delta.post_norm), delta.shape.key_dim);
                let fits = key_dim <= MOST_KEY_DIM;
                self.require(fits, &format!("gated delta rules with keys of {key_dim} elements"))?;
                ops.push(Op::DeltaRule(Box::new(DeltaRuleAdd { delta: delta.clone(), add })));
                add
            }
            _ => return self.refuse(NEWER),
        };
        let ffn = match &layer.ffn {
            FeedForward::Dense(dense) => {
                let &Dense { norm, width, gate, up, activation, down, post_norm } = dense;
                self.activation(activation)?;
                ops.push(Op::NormGateUp(NormGateUp { norm, width, gate, up, activation }));
                ops.push(Op::DownAdd(DownAdd { down, add: add(post_norm) }));
                add(post_norm)
            }
            FeedForward::Experts(experts) => {
                self.activation(experts.activation)?;
                let add = add(experts.post_norm);
                self.require(
                    matches!(experts.router.scores, Scores::Softmax | Scores::Sigmoid),
                    "a router of a kind that is newer than this backend",
                )?;
                let plain = experts.router.norm.is_none() && experts.router.expert_scale.is_none();
                self.require(plain && experts.beside.is_none(), "dense networks beside experts")?;
                self.require(experts.router.groups.is_none(), "groups of experts")?;
                let most = experts.count <= MOST_EXPERTS;
                self.require(most, &format!("a mixture of experts with {} experts", experts.count))?;
                ops.push(Op::Experts(Box::new(ExpertsAdd { experts: experts.clone(), add })));
                add
            }
            _ => return self.refuse(NEWER),
        };
        if waits {
            ops.push(Op::Join(Join { mixer, ffn }));
        }
        Ok(())
    }

    /// Attention, whose output is added like this.
    fn mix(&self, attention: &Attention, add: Add, ops: &mut Vec<Op>) -> Result<(), LoadError> {
        let &Attention {
            norm, q, k, v, gate, qk_norm, rope, position_scale, scale, soft_cap, sinks, kv, ..
        } = attention;
        let Some(k) = k else { return self.refuse("layers that read another layer's K and V") };
        let Some(v) = v else { return self.refuse("K that is V, too") };
        self.require(attention.v_norm.is_none(), "norms of V")?;
        let is_rms = |norm: &QkNorm| [norm.q, norm.k].iter().all(is_plain);
        self.require(qk_norm.as_ref().is_none_or(is_rms), "LayerNorm of queries and keys")?;
        let is_gated = gate.is_some();
        let store = NormQkvRopeStore { norm, q, k, v, gate, qk_norm, rope, position_scale, kv };
        ops.push(Op::NormQkvRopeStore(store));
        ops.push(Op::Attend(Attend { scale, soft_cap, sinks, is_gated, kv }));
        ops.push(Op::ProjectAdd(ProjectAdd { project: attention.out, add }));
        Ok(())
    }

    fn activation(&self, activation: Activation) -> Result<(), LoadError> {
        use Activation::{ClampedSwiglu, Gelu, GeluTanh, Relu2, Silu};
        match activation {
            Silu | GeluTanh | Gelu | Relu2 | ClampedSwiglu { .. } => Ok(()),
            other => self.refuse(&format!("the activation {other:?}")),
        }
    }

    fn require(&self, holds: bool, what: &str) -> Result<(), LoadError> {
        if holds { Ok(()) } else { self.refuse(what) }
    }

    fn refuse<T>(&self, what: &str) -> Result<T, LoadError> {
        Err(LoadError::Unsupported {
            device: self.device.to_owned(),
            what: what.to_owned(),
            supported: "it runs on the CPU (--device cpu)".to_owned(),
        })
    }
}
