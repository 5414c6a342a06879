//! A program as the kernels run it: one flat list of fused operations. Attention has one shape in all layers of a K/V group.
//!
//! Programs that do not fit this form are refused here, by name.

use paguro_backend::{
    Activation, Attention, Branch, DeltaRule, Dense, Experts, FeedForward, KvSlot, Latent, Layer,
    LayerEmbeds, LayerInput, Linear, LoadError, MatrixId, Mixer, Norm, NormKind, PositionScale, QkNorm,
    Residual, Rope, Scores, ShortConv, Ssd, StateLayout, VectorId,
};

/// Experts of a mixture, at most: a workgroup has the scores of all of them.
const MOST_EXPERTS: usize = 1024;
/// Elements of a key of a delta rule, at most: a workgroup of `delta_inputs.wgsl` norms a key.
const MOST_KEY_DIM: usize = 128;
/// Elements of a key of a scan, at most: threads have a column of the state in registers.
const MOST_SCAN_KEY_DIM: usize = 256;
/// Error for a layer of the contract that this backend does not support.
const NEWER: &str = "a layer of a kind that is newer than this backend";

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
    /// Lowers a program for the device with this name.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`], with the name of an operation without kernels.
    pub fn new(program: &paguro_backend::Program, device: &str) -> Result<Self, LoadError> {
        let lowering = Lowering { program, device };
        if program.layers.is_empty() {
            return Err(LoadError::BadProgram("there are no layers".into()));
        }
        lowering.require(!program.bidirectional, "attention in both directions (of encoders)")?;
        let embed = &program.embed;
        lowering.require(embed.types.is_none(), "embeddings of token types")?;
        lowering.require(embed.norm.is_none(), "a norm of embeddings")?;
        let has_norm_after =
            |layer: &Layer| layer.norm_after_mixer.is_some() || layer.norm_after_ffn.is_some();
        lowering.require(!program.layers.iter().any(has_norm_after), "norms of the residual stream")?;
        lowering.require(program.attentions().all(|op| op.distance_bias.is_none()), "biases of distances")?;
        let groups = lowering.groups()?;
        let mut ops = vec![Op::Embed(Embed {
            table: program.embed.table,
            scale: program.embed.scale,
            positions: program.embed.positions.map(|positions| positions.table),
        })];
        if let Some(embeds) = &program.embed.layers {
            lowering.require(is_plain(&embeds.norm), "LayerNorm of embeddings for layers")?;
            ops.push(Op::LayerEmbeds(embeds.clone()));
        }
        for layer in &program.layers {
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
            Op::Experts(op) => {
                let shared = op.experts.shared.as_ref().map_or(0, |shared| shared.width);
                op.experts.beside.as_ref().map_or(shared, |beside| beside.dense.width)
            }
            _ => 0,
        };
        Ok(Self {
            hidden: program.hidden,
            vocab: program.vocab,
            ffn: ops.iter().map(width).max().unwrap_or(0),
            kv: KvLayout { groups },
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
    /// Groups of K and V, with the query heads of their layers.
    fn groups(&self) -> Result<Vec<KvGroup>, LoadError> {
        let mut found: Vec<Option<(usize, bool)>> = vec![None; self.program.kv.groups.len()];
        for mixer in self.program.mixers() {
            let Some((kv_slot, heads)) = mixer.attends() else { continue };
            let is_latent = matches!(mixer, Mixer::Latent(_));
            let Some(found) = found.get_mut(kv_slot.group) else {
                return Err(LoadError::BadProgram(format!("there is no group {} of K and V", kv_slot.group)));
            };
            let (known, was_latent) = *found.get_or_insert((heads, is_latent));
            self.require(known == heads, "query heads whose number differs between layers of a group")?;
            self.require(was_latent == is_latent, "latent and other attention with heads of one size")?;
        }
        let groups = self.program.kv.groups.iter().zip(found).map(|(group, found)| {
            let (heads, is_latent) = found.unwrap_or((group.kv_heads, false));
            let divides = group.kv_heads > 0 && heads.is_multiple_of(group.kv_heads);
            self.require(divides, "query heads that do not share K/V heads evenly")?;
            let head_dim = if is_latent { group.head_dim.next_multiple_of(8) } else { group.head_dim };
            let paguro_backend::KvGroup { window, layer_slots, kv_heads, .. } = *group;
            let unpadded_dim = group.head_dim;
            Ok(KvGroup { window, layer_slots, heads, kv_heads, head_dim, unpadded_dim, is_latent })
        });
        groups.collect()
    }

    fn layer(&self, layer: &Layer, ops: &mut Vec<Op>) -> Result<(), LoadError> {
        let has_both = !matches!(layer.mixer, Mixer::None) && !matches!(layer.ffn, FeedForward::None);
        let waits = layer.residual == Residual::Parallel && has_both;
        let add = |post_norm| Add { post_norm, scale: layer.branch_scale, waits: false };
        let mut waiting = None;
        match &layer.mixer {
            Mixer::None => {}
            Mixer::Sum(branches) => {
                let [first, second] = &branches[..] else {
                    return self.refuse(&format!("sums of {} mixers", branches.len()));
                };
                self.require(!waits, "sums of mixers beside a feed-forward network")?;
                let scale = |branch: &Branch| branch.scale * layer.branch_scale;
                let first = self.mixer(&first.mixer, scale(first), true, ops)?;
                self.mixer(&second.mixer, scale(second), false, ops)?;
                ops.push(Op::Join(first));
            }
            mixer => waiting = Some(self.mixer(mixer, layer.branch_scale, waits, ops)?).filter(|_| waits),
        }
        match &layer.ffn {
            FeedForward::Dense(dense) => {
                let &Dense { norm, width, gate, up, activation, down, post_norm } = dense;
                self.activation(activation)?;
                ops.push(Op::NormGateUp(NormGateUp { norm, width, gate, up, activation }));
                ops.push(Op::DownAdd(DownAdd { down, add: add(post_norm) }));
            }
            FeedForward::Experts(experts) => {
                self.activation(experts.activation)?;
                let add = add(experts.post_norm);
                self.require(
                    matches!(experts.router.scores, Scores::Softmax | Scores::Sigmoid),
                    "a router of a kind that is newer than this backend",
                )?;
                let most = experts.count <= MOST_EXPERTS;
                self.require(most, &format!("a mixture of experts with {} experts", experts.count))?;
                ops.push(Op::Experts(Box::new(ExpertsAdd { experts: experts.clone(), add })));
            }
            FeedForward::None => {}
            _ => return self.refuse(NEWER),
        }
        ops.extend(waiting.map(Op::Join));
        if let Some(input) = &layer.input {
            self.activation(input.activation)?;
            ops.push(Op::LayerInput(input.clone()));
        }
        if layer.output_scale != 1.0 {
            ops.push(Op::Scale(layer.output_scale));
        }
        Ok(())
    }

    /// Lowers a mixer that is no sum. Returns the addition of its output.
    fn mixer(&self, mixer: &Mixer, scale: f32, waits: bool, ops: &mut Vec<Op>) -> Result<Add, LoadError> {
        let add = |post_norm| Add { post_norm, scale, waits };
        let (op, add) = match mixer {
            Mixer::Attention(attention) => {
                let add = add(attention.post_norm);
                self.mix(attention, add, ops)?;
                return Ok(add);
            }
            Mixer::Conv(conv) => {
                let add = add(conv.post_norm);
                (Op::ShortConv(Box::new(ShortConvAdd { conv: conv.clone(), add })), add)
            }
            Mixer::DeltaRule(delta) => {
                let (add, key_dim) = (add(delta.post_norm), delta.shape.key_dim);
                let fits = key_dim <= MOST_KEY_DIM;
                self.require(fits, &format!("gated delta rules with keys of {key_dim} elements"))?;
                (Op::DeltaRule(Box::new(DeltaRuleAdd { delta: delta.clone(), add })), add)
            }
            Mixer::Latent(latent) => {
                let add = add(latent.post_norm);
                self.require(is_plain(&latent.latent_norm), "LayerNorm of latent vectors")?;
                (Op::Latent(Box::new(LatentAdd { latent: (**latent).clone(), add })), add)
            }
            Mixer::Ssd(ssd) => {
                let (add, key_dim) = (add(ssd.post_norm), ssd.shape.key_dim);
                let fits = key_dim <= MOST_SCAN_KEY_DIM;
                self.require(fits, &format!("scans with states of {key_dim} elements"))?;
                (Op::Ssd(Box::new(SsdAdd { ssd: (**ssd).clone(), add })), add)
            }
            _ => return self.refuse(NEWER),
        };
        ops.push(op);
        Ok(add)
    }

    /// Lowers attention, whose output is added by `add`.
    fn mix(&self, attention: &Attention, add: Add, ops: &mut Vec<Op>) -> Result<(), LoadError> {
        let &Attention {
            norm,
            q,
            k,
            v,
            gate,
            qk_norm,
            v_norm,
            rope,
            position_scale,
            scale,
            soft_cap,
            sinks,
            kv,
            ..
        } = attention;
        self.require(v_norm.as_ref().is_none_or(is_plain), "LayerNorm of V")?;
        let is_rms = |norm: &QkNorm| [norm.q, norm.k].iter().all(is_plain);
        self.require(qk_norm.as_ref().is_none_or(is_rms), "LayerNorm of queries and keys")?;
        let is_gated = gate.is_some();
        let store = NormQkvRopeStore { norm, q, k, v, gate, qk_norm, v_norm, rope, position_scale, kv };
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
