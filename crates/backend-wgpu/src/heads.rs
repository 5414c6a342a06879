//! Arrangement of K and V with the query heads of their layers. Programs without kernels are refused by name.

use paguro_backend::{
    Attention, FeedForward, Layer, LoadError, Mixer, Norm, NormKind, Program, QkNorm, Residual,
};

use crate::layout::BLOCK;

/// Experts of a mixture, at most: a workgroup has the scores of all of them.
const MOST_EXPERTS: usize = 1024;
/// Elements of a key of a delta rule, at most: a workgroup of `delta_inputs.wgsl` norms a key.
const MOST_KEY_DIM: usize = 128;
/// Elements of a key of a scan, at most: threads have a column of the state in registers.
const MOST_SCAN_KEY_DIM: usize = 256;

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
    /// See [`paguro_backend::KvGroup::spans`].
    pub spans: bool,
    /// Layer slots in a page.
    pub layer_slots: usize,
    /// Query heads of each layer.
    pub heads: usize,
    /// K/V heads of each layer.
    pub kv_heads: usize,
    /// Elements of a head with padding: to a multiple of eight for latent attention, and of a block for rows that attend in both
    /// directions, so that cooperative matrices can have them.
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

    /// Elements of a row of attention's results, which is not padded.
    pub fn out_width(&self) -> usize {
        self.heads * self.unpadded_dim
    }

    /// Returns true if heads have padding.
    pub fn is_padded(&self) -> bool {
        self.head_dim > self.unpadded_dim
    }

    /// Query heads that share a K/V head.
    pub fn queries_per_kv(&self) -> usize {
        self.heads / self.kv_heads
    }
}

impl KvLayout {
    /// Returns the groups of a program, for the device with this name.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`], with the name of an operation without kernels.
    pub fn of(program: &Program, device: &str) -> Result<Self, LoadError> {
        let refusal = Refusal { device };
        refusal.program(program)?;
        let mut found: Vec<Option<(usize, bool)>> = vec![None; program.kv.groups.len()];
        for mixer in program.mixers() {
            let Some((kv_slot, heads)) = mixer.attends() else { continue };
            let is_latent = matches!(mixer, Mixer::Latent(_));
            let Some(found) = found.get_mut(kv_slot.group) else {
                return Err(LoadError::BadProgram(format!("there is no group {} of K and V", kv_slot.group)));
            };
            let (known, was_latent) = *found.get_or_insert((heads, is_latent));
            refusal.require(known == heads, "query heads whose number differs between layers of a group")?;
            refusal.require(was_latent == is_latent, "latent and other attention with heads of one size")?;
        }
        // Stages of a model may have no layer of a group.
        let of_same_shape = |group: &paguro_backend::KvGroup| {
            let shape = |group: &paguro_backend::KvGroup| (group.kv_heads, group.head_dim);
            let mut others = program.kv.groups.iter().zip(&found);
            others.find_map(|(other, found)| found.filter(|_| shape(other) == shape(group)))
        };
        let groups = program.kv.groups.iter().zip(&found).map(|(group, found)| {
            let known = found.or_else(|| of_same_shape(group));
            let (heads, is_latent) = known.unwrap_or((group.kv_heads, false));
            let divides = group.kv_heads > 0 && heads.is_multiple_of(group.kv_heads);
            refusal.require(divides, "query heads that do not share K/V heads evenly")?;
            let head_dim = match () {
                () if is_latent => group.head_dim.next_multiple_of(8),
                () if program.bidirectional => group.head_dim.next_multiple_of(BLOCK),
                () => group.head_dim,
            };
            let paguro_backend::KvGroup { window, spans, layer_slots, kv_heads, head_dim: unpadded_dim } =
                *group;
            Ok(KvGroup { window, spans, layer_slots, heads, kv_heads, head_dim, unpadded_dim, is_latent })
        });
        Ok(Self { groups: groups.collect::<Result<_, _>>()? })
    }
}

/// Returns true for an RMS norm without a bias: activations are multiplied only by its weights, and the results of
/// matmuls by the factor of their row.
pub fn is_plain(norm: &Norm) -> bool {
    norm.kind == NormKind::Rms && norm.bias.is_none()
}

/// Refuses programs, with the device's name.
struct Refusal<'a> {
    device: &'a str,
}

impl Refusal<'_> {
    fn program(&self, program: &Program) -> Result<(), LoadError> {
        if program.shares_pages {
            return Err(LoadError::no_heads(self.device, program));
        }
        let projects = program.head().is_some_and(|head| head.projection.is_some());
        self.require(!projects, "heads that project rows")?;
        let is_as_wide = program.joined().is_none_or(|joined| joined.width == program.hidden);
        self.require(is_as_wide, "joined embeddings of another width than the model's")?;
        let has_own = |op: &Attention| op.k.is_some() && op.v.is_some() && op.gate.is_none();
        let is_tower = !program.has_bounds() || program.attentions().all(has_own);
        self.require(is_tower, "bounds in layers without K and V of their own")?;
        let has_plain_norm = program.layer_embeds().is_none_or(|embeds| is_plain(&embeds.norm));
        self.require(has_plain_norm, "LayerNorm of embeddings for layers")?;
        // A tower may consist of its ends.
        if program.layers.is_empty() && program.merged().is_none() {
            return Err(LoadError::BadProgram("there are no layers".into()));
        }
        program.layers.iter().try_for_each(|layer| self.layer(layer))
    }

    fn layer(&self, layer: &Layer) -> Result<(), LoadError> {
        if let Mixer::Sum(branches) = &layer.mixer {
            let count = branches.len();
            self.require(count == 2, &format!("sums of {count} mixers"))?;
            let is_alone = layer.residual == Residual::Sequential || matches!(layer.ffn, FeedForward::None);
            self.require(is_alone, "sums of mixers beside a feed-forward network")?;
        }
        layer.mixer.parts().try_for_each(|mixer| self.mixer(mixer))?;
        if let FeedForward::Experts(experts) = &layer.ffn {
            let most = experts.count <= MOST_EXPERTS;
            self.require(most, &format!("a mixture of experts with {} experts", experts.count))?;
        }
        Ok(())
    }

    fn mixer(&self, mixer: &Mixer) -> Result<(), LoadError> {
        match mixer {
            Mixer::Attention(attention) => {
                self.require(attention.v_norm.as_ref().is_none_or(is_plain), "LayerNorm of V")?;
                let is_rms = |norm: &QkNorm| [norm.q, norm.k].iter().all(is_plain);
                self.require(attention.qk_norm.as_ref().is_none_or(is_rms), "LayerNorm of queries and keys")
            }
            Mixer::DeltaRule(delta) => {
                let key_dim = delta.shape.key_dim;
                let fits = key_dim <= MOST_KEY_DIM;
                self.require(fits, &format!("gated delta rules with keys of {key_dim} elements"))
            }
            Mixer::Latent(latent) => {
                self.require(is_plain(&latent.latent_norm), "LayerNorm of latent vectors")
            }
            Mixer::Ssd(ssd) => {
                let key_dim = ssd.shape.key_dim;
                let fits = key_dim <= MOST_SCAN_KEY_DIM;
                self.require(fits, &format!("scans with states of {key_dim} elements"))
            }
            Mixer::Conv(_) | Mixer::None => Ok(()),
            Mixer::Sum(_) => self.refuse("a sum of sums of mixers"),
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

paguro_backend::known_fields! {
    Program { hidden, vocab, bidirectional, shares_pages, kv, state, ropes, input, given_parts, layers, exit }
    Embed { table, scale, positions, types, norm, layers, joined }
    Joined { width, token_norm, given_norm, linear }
    LayerEmbeds { table, scale, count, width, projection, norm }
    Patches { width, ops }
    Merged { rows, width, taps }
    Head { norm, linear, scale, soft_cap, projection }
    Projection { width, linear }
    Layer { mixer, ffn, residual, norm_after_mixer, norm_after_ffn, branch_scale, input, output_scale }
    LayerInput { index, gate, activation, out, post_norm }
    Branch { mixer, scale }
    Attention {
        norm, heads, q, k, v, qk_norm, v_norm, rope, position_scale, scale, soft_cap, distance_bias, sinks, kv, gate, out,
        post_norm,
    }
    QkNorm { q, k, kind }
    KvGroup { window, spans, layer_slots, kv_heads, head_dim }
    Rope { style, frequencies, axes, magnitude }
    Latent {
        norm, shape, query, down, latent_norm, absorb, value, rope, position_scale, scale, kv, out, post_norm,
    }
    ShortConv { norm, width, input, convolution, out, post_norm, state }
    DeltaRule {
        norm, shape, sharing, qkv, gate, alpha, beta, convolution, decay, dt, out_norm, out, post_norm, state,
    }
    Ssd {
        norm, shape, cbv, gate, gate_scale, dt, dt_scale, dt_bias, dt_limits, convolution, decay, skip, out_norm, out,
        post_norm, state,
    }
    Dense { norm, width, gate, up, activation, down, post_norm }
    Experts { norm, router, count, width, latent, gate, up, activation, down, shared, beside, post_norm }
    Router { norm, linear, scores, selection_bias, groups, used, renormalize, factor, expert_scale }
    SharedExpert { width, gate, up, down, output_gate }
    Linear { matrix, bias, bounds }
    Norm { kind, weight, bias, eps }
    Step { tokens, carried, given, coordinates, spans, adapters, sequences, pages, outputs }
    StepSequence { rows, start, tables, state }
    SampleRequest { params, draw, history, prompt_tokens, mask, logprobs }
}
