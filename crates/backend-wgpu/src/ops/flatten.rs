//! Lowering of the contract's program to the list of fused operations. Parts without kernels are refused by name.

use paguro_backend::{
    Attention, Branch, Dense, Exit, FeedForward, Input, Layer, LoadError, Mixer, QkNorm, Residual,
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
        flattening.require(!program.has_bounds(), "bounds of matrices (of towers)")?;
        flattening.require(!program.bidirectional, "attention in both directions (of encoders)")?;
        let Input::Tokens(embed) = &program.input else {
            return flattening.refuse("programs that begin with rows");
        };
        let Exit::Logits(head) = &program.exit else {
            return flattening.refuse("programs that end with rows");
        };
        let paguro_backend::Embed { table, scale, positions, types: _, norm: _, layers } = embed;
        flattening.require(embed.types.is_none(), "embeddings of token types")?;
        flattening.require(embed.norm.is_none(), "a norm of embeddings")?;
        let has_norm_after =
            |layer: &Layer| layer.norm_after_mixer.is_some() || layer.norm_after_ffn.is_some();
        flattening.require(!program.layers.iter().any(has_norm_after), "norms of the residual stream")?;
        flattening
            .require(program.attentions().all(|op| op.distance_bias.is_none()), "biases of distances")?;
        let groups = flattening.groups()?;
        let mut ops = vec![Op::Embed(Embed {
            table: *table,
            scale: *scale,
            positions: positions.map(|positions| positions.table),
        })];
        if let Some(embeds) = layers {
            flattening.require(is_plain(&embeds.norm), "LayerNorm of embeddings for layers")?;
            ops.push(Op::LayerEmbeds(embeds.clone()));
        }
        for layer in &program.layers {
            flattening.layer(layer, &mut ops)?;
        }
        ops.push(Op::NormLogits(NormLogits {
            norm: head.norm,
            head: head.linear,
            scale: head.scale,
            soft_cap: head.soft_cap,
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
            // No step of this backend has spans.
            let paguro_backend::KvGroup { window, spans: _, layer_slots, kv_heads, head_dim: unpadded_dim } =
                *group;
            Ok(KvGroup { window, layer_slots, heads, kv_heads, head_dim, unpadded_dim, is_latent })
        });
        groups.collect()
    }

    fn layer(&self, layer: &Layer, ops: &mut Vec<Op>) -> Result<(), LoadError> {
        let Layer {
            mixer,
            ffn,
            residual,
            // `new` has refused these norms.
            norm_after_mixer: _,
            norm_after_ffn: _,
            branch_scale,
            input,
            output_scale,
        } = layer;
        let has_both = !matches!(mixer, Mixer::None) && !matches!(ffn, FeedForward::None);
        let waits = *residual == Residual::Parallel && has_both;
        let add = |post_norm| Add { post_norm, scale: *branch_scale, waits: false };
        let mut waiting = None;
        match mixer {
            Mixer::None => {}
            Mixer::Sum(branches) => {
                let [first, second] = &branches[..] else {
                    return self.refuse(&format!("sums of {} mixers", branches.len()));
                };
                self.require(!waits, "sums of mixers beside a feed-forward network")?;
                let scale = |branch: &Branch| branch.scale * branch_scale;
                let first = self.mixer(&first.mixer, scale(first), true, ops)?;
                self.mixer(&second.mixer, scale(second), false, ops)?;
                ops.push(Op::Join(first));
            }
            mixer => waiting = Some(self.mixer(mixer, *branch_scale, waits, ops)?).filter(|_| waits),
        }
        match ffn {
            FeedForward::Dense(dense) => {
                let &Dense { norm, width, gate, up, activation, down, post_norm } = dense;
                ops.push(Op::NormGateUp(NormGateUp { norm, width, gate, up, activation }));
                ops.push(Op::DownAdd(DownAdd { down, add: add(post_norm) }));
            }
            FeedForward::Experts(experts) => {
                let add = add(experts.post_norm);
                let most = experts.count <= MOST_EXPERTS;
                self.require(most, &format!("a mixture of experts with {} experts", experts.count))?;
                ops.push(Op::Experts(Box::new(ExpertsAdd { experts: experts.clone(), add })));
            }
            FeedForward::None => {}
        }
        ops.extend(waiting.map(Op::Join));
        if let Some(input) = input {
            ops.push(Op::LayerInput(input.clone()));
        }
        if *output_scale != 1.0 {
            ops.push(Op::Scale(*output_scale));
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
            Mixer::None | Mixer::Sum(_) => return self.refuse("a sum of sums of mixers"),
        };
        ops.push(op);
        Ok(add)
    }

    /// Lowers attention, whose output is added by `add`.
    fn mix(&self, attention: &Attention, add: Add, ops: &mut Vec<Op>) -> Result<(), LoadError> {
        let &Attention {
            norm,
            heads: _, // those of the group
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
            distance_bias: _, // `new` has refused them
            sinks,
            kv,
            out,
            post_norm: _, // part of `add`
        } = attention;
        self.require(v_norm.as_ref().is_none_or(is_plain), "LayerNorm of V")?;
        let is_rms = |norm: &QkNorm| [norm.q, norm.k].iter().all(is_plain);
        self.require(qk_norm.as_ref().is_none_or(is_rms), "LayerNorm of queries and keys")?;
        let is_gated = gate.is_some();
        let store = NormQkvRopeStore { norm, q, k, v, gate, qk_norm, v_norm, rope, position_scale, kv };
        ops.push(Op::NormQkvRopeStore(store));
        ops.push(Op::Attend(Attend { scale, soft_cap, sinks, is_gated, kv }));
        ops.push(Op::ProjectAdd(ProjectAdd { project: out, add }));
        Ok(())
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
