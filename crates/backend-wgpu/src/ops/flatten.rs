//! Lowering of the contract's program to the list of fused operations. Parts without kernels are refused by name.

use paguro_backend::{
    Activation, Attention, Branch, Dense, FeedForward, Layer, LoadError, Mixer, QkNorm, Residual, Scores,
};

use super::{
    Add, Attend, DeltaRuleAdd, DownAdd, Embed, ExpertsAdd, KvGroup, KvLayout, LatentAdd, NormGateUp,
    NormLogits, NormQkvRopeStore, Op, Program, ProjectAdd, ShortConvAdd, SsdAdd, is_plain,
};

/// Experts of a mixture, at most: a workgroup has the scores of all of them.
const MOST_EXPERTS: usize = 1024;
/// Elements of a key of a delta rule, at most: a workgroup of `delta_inputs.wgsl` norms a key.
const MOST_KEY_DIM: usize = 128;
/// Elements of a key of a scan, at most: threads have a column of the state in registers.
const MOST_SCAN_KEY_DIM: usize = 256;
/// Error for a layer of the contract that this backend does not support.
const NEWER: &str = "a layer of a kind that is newer than this backend";

impl Program {
    /// Lowers a program for the device with this name.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`], with the name of an operation without kernels.
    pub fn new(program: &paguro_backend::Program, device: &str) -> Result<Self, LoadError> {
        let flattening = Flattening { program, device };
        if program.layers.is_empty() {
            return Err(LoadError::BadProgram("there are no layers".into()));
        }
        flattening.require(!program.bidirectional, "attention in both directions (of encoders)")?;
        let embed = &program.embed;
        flattening.require(embed.types.is_none(), "embeddings of token types")?;
        flattening.require(embed.norm.is_none(), "a norm of embeddings")?;
        let has_norm_after =
            |layer: &Layer| layer.norm_after_mixer.is_some() || layer.norm_after_ffn.is_some();
        flattening.require(!program.layers.iter().any(has_norm_after), "norms of the residual stream")?;
        flattening
            .require(program.attentions().all(|op| op.distance_bias.is_none()), "biases of distances")?;
        let groups = flattening.groups()?;
        let mut ops = vec![Op::Embed(Embed {
            table: program.embed.table,
            scale: program.embed.scale,
            positions: program.embed.positions.map(|positions| positions.table),
        })];
        if let Some(embeds) = &program.embed.layers {
            flattening.require(is_plain(&embeds.norm), "LayerNorm of embeddings for layers")?;
            ops.push(Op::LayerEmbeds(embeds.clone()));
        }
        for layer in &program.layers {
            flattening.layer(layer, &mut ops)?;
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
}

/// The contract's program and the device's name for errors.
struct Flattening<'a> {
    program: &'a paguro_backend::Program,
    device: &'a str,
}

impl Flattening<'_> {
    /// Returns the groups of K and V, with the query heads of their layers.
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
