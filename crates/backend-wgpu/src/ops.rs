//! A program as the kernels run it: one flat list of fused operations, with one shape for all layers.
//!
//! What does not fit this form is refused here, by name.

use paguro_backend::{
    Activation, Attention, Dense, FeedForward, KvSlot, Layer, Linear, LoadError, MatrixId, Mixer, NormKind,
    QkNormKind, Residual, Rope, VectorId,
};

/// A program. Shapes that all layers share stand here once.
#[derive(Clone, Debug)]
pub struct Program {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Length of a row of logits.
    pub vocab: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of the feed-forward layers between gate/up and down.
    pub ffn: usize,
    /// How K and V are stored.
    pub kv: KvLayout,
    /// Rotary embeddings, referred to by [`NormQkvRopeStore::rope`].
    pub ropes: Vec<Rope>,
    /// `Embed`, then per layer `NormQkvRopeStore`, `Attend`, `ProjectAdd`, `NormGateUp`, `DownAdd`, and `NormLogits`.
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
    /// `logits = norm(x)·Wᵀ`, soft-capped.
    NormLogits(NormLogits),
}

/// Root-mean-square norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// `[width]`
    pub weight: VectorId,
    /// Added to the mean square.
    pub eps: f32,
}

/// See [`Op::Embed`].
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[vocab, hidden]`
    pub table: MatrixId,
    /// Multiplies rows.
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
    /// Norm of each query head, `[head_dim]`.
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
    /// Scale of the scores.
    pub scale: f32,
    /// Cap of the scores.
    pub soft_cap: Option<f32>,
    /// Where k and v are; the group carries the window.
    pub kv: KvSlot,
}

/// See [`Op::ProjectAdd`].
#[derive(Clone, Debug)]
pub struct ProjectAdd {
    /// `[hidden, heads * head_dim]`
    pub project: Linear,
    /// Norm of the projection before it is added.
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
    /// Norm of the product before it is added.
    pub post_norm: Option<Norm>,
}

/// See [`Op::NormLogits`].
#[derive(Clone, Debug)]
pub struct NormLogits {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Norm,
    /// `[vocab, hidden]`
    pub head: Linear,
    /// Cap of the logits.
    pub soft_cap: Option<f32>,
}

impl Program {
    /// Lowers a program for a device of this name.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`], with what there are no kernels for.
    pub fn new(program: &paguro_backend::Program, device: &str) -> Result<Self, LoadError> {
        let lowering = Lowering { program, device };
        let Some(first) = program.layers.first() else {
            return Err(LoadError::BadProgram("there are no layers".into()));
        };
        let shape = lowering.shape(first)?;
        // Kinds of layers before their options: the refusal that tells most.
        program.layers.iter().try_for_each(|layer| lowering.shape(layer).map(|_| ()))?;
        let [group, ..] = &program.kv.groups[..] else {
            return Err(LoadError::BadProgram("no groups of K and V".into()));
        };
        let geometry = |group: &paguro_backend::KvGroup| (group.slots, group.kv_heads, group.head_dim);
        let uniform = program.kv.groups.iter().all(|other| geometry(other) == geometry(group));
        lowering.require(uniform, "K/V heads that differ between layers")?;
        lowering.require(program.embed.positions.is_none(), "learned positions")?;
        lowering.require(program.head.scale == 1.0, "a scale of logits")?;
        let mut ops = vec![Op::Embed(Embed { table: program.embed.table, scale: program.embed.scale })];
        for layer in &program.layers {
            lowering.require(
                lowering.shape(layer)? == shape,
                "query heads or feed-forward networks that differ between layers",
            )?;
            lowering.layer(layer, &mut ops)?;
        }
        ops.push(Op::NormLogits(NormLogits {
            norm: lowering.norm(Some(program.head.norm))?,
            head: program.head.linear,
            soft_cap: program.head.soft_cap,
        }));
        let groups = program.kv.groups.iter().map(|group| KvGroup { window: group.window }).collect();
        let (slots, kv_heads, head_dim) = geometry(group);
        Ok(Self {
            hidden: program.hidden,
            vocab: program.vocab,
            heads: shape.0,
            ffn: shape.1,
            kv: KvLayout { groups, slots, kv_heads, head_dim },
            ropes: program.ropes.clone(),
            ops,
        })
    }
}

struct Lowering<'a> {
    program: &'a paguro_backend::Program,
    device: &'a str,
}

impl Lowering<'_> {
    /// Query heads and width of the feed-forward network.
    fn shape(&self, layer: &Layer) -> Result<(usize, usize), LoadError> {
        let (attention, dense) = self.parts(layer)?;
        let group = self.program.kv.groups.get(attention.kv.group);
        let kv_heads = group.map_or(0, |group| group.kv_heads);
        let divides = kv_heads > 0 && attention.heads.is_multiple_of(kv_heads);
        self.require(divides, "query heads that do not share K/V heads evenly")?;
        Ok((attention.heads, dense.width))
    }

    fn parts<'l>(&self, layer: &'l Layer) -> Result<(&'l Attention, &'l Dense), LoadError> {
        match (&layer.mixer, &layer.ffn) {
            (Mixer::Attention(attention), FeedForward::Dense(dense)) => Ok((attention, dense)),
            (Mixer::Attention(_), FeedForward::Experts(_)) => self.refuse("a mixture of experts"),
            _ => self.refuse("a layer of a kind that is newer than this backend"),
        }
    }

    fn layer(&self, layer: &Layer, ops: &mut Vec<Op>) -> Result<(), LoadError> {
        self.require(layer.residual == Residual::Sequential, "parallel branches")?;
        let (attention, dense) = self.parts(layer)?;
        self.norm(attention.norm)?;
        self.require(layer.branch_scale == 1.0, "a scale of branches")?;
        let Attention { q, k, v, qk_norm, rope, position_scale, scale, soft_cap, sinks, kv, out, .. } =
            attention;
        self.require(position_scale.is_none(), "a scale of queries by their position")?;
        self.require(sinks.is_none(), "attention with sinks")?;
        let heads_only = qk_norm.is_none_or(|norm| norm.kind == QkNormKind::Head);
        self.require(heads_only, "norms of queries and keys other than of each head before RoPE")?;
        let Some(rope) = *rope else { return self.refuse("a layer without RoPE") };
        ops.push(Op::NormQkvRopeStore(NormQkvRopeStore {
            norm: self.norm(attention.norm)?,
            q: *q,
            k: *k,
            v: *v,
            q_norm: qk_norm.map(|norm| self.norm(Some(norm.q))).transpose()?,
            k_norm: qk_norm.map(|norm| self.norm(Some(norm.k))).transpose()?,
            rope,
            kv: *kv,
        }));
        ops.push(Op::Attend(Attend { scale: *scale, soft_cap: *soft_cap, kv: *kv }));
        ops.push(Op::ProjectAdd(ProjectAdd {
            project: *out,
            post_norm: attention.post_norm.map(|norm| self.norm(Some(norm))).transpose()?,
        }));
        let Dense { norm, gate, up, activation, down, post_norm, .. } = dense;
        let Some(gate) = *gate else {
            return self.refuse("feed-forward networks without a gate");
        };
        if !matches!(activation, Activation::Silu | Activation::GeluTanh) {
            return self.refuse(&format!("the activation {activation:?}"));
        }
        ops.push(Op::NormGateUp(NormGateUp {
            norm: self.norm(*norm)?,
            gate,
            up: *up,
            activation: *activation,
        }));
        let post_norm = post_norm.map(|norm| self.norm(Some(norm))).transpose()?;
        ops.push(Op::DownAdd(DownAdd { down: *down, post_norm }));
        Ok(())
    }

    fn norm(&self, norm: Option<paguro_backend::Norm>) -> Result<Norm, LoadError> {
        let Some(norm) = norm else { return self.refuse("a layer without a norm before its branches") };
        self.require(norm.kind == NormKind::Rms && norm.bias.is_none(), "LayerNorm")?;
        Ok(Norm { weight: norm.weight, eps: norm.eps })
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
