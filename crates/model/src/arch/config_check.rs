//! Bounds of hyperparameters.

use paguro_backend::{DeltaShape, ExpertGroups, LatentShape};

use super::config::{Config, ExpertsConfig, Recurrent, SsdConfig};
use crate::error::ModelError;

impl Recurrent {
    /// Refuses numbers that no model has.
    fn check(self) -> Result<(), String> {
        let (taps, shape) = match self {
            Self::Conv { taps } => (taps, None),
            Self::Delta { taps, shape, .. } => (taps, Some(shape)),
            Self::Ssd(SsdConfig { taps, shape, .. }) => (taps, Some(shape)),
        };
        if !(2..=64).contains(&taps) {
            return Err(format!("a convolution over {taps} tokens"));
        }
        let Some(DeltaShape { key_heads, value_heads, key_dim, value_dim }) = shape else { return Ok(()) };
        for (what, size) in [
            ("number of key heads", key_heads),
            ("number of value heads", value_heads),
            ("size of a key head", key_dim),
            ("size of a value head", value_dim),
        ] {
            if size == 0 || size > 1 << 14 {
                return Err(format!("the {what} of linear attention is {size}"));
            }
        }
        match value_heads.is_multiple_of(key_heads) {
            true => Ok(()),
            false => Err(format!("{value_heads} value heads cannot share {key_heads} key heads evenly")),
        }
    }
}
impl Config {
    /// Refuses implausible numbers, so that lowering can compute with them. `tensors` is the number of tensors in the
    /// file, which bounds the number of layers.
    pub(crate) fn check(self, tensors: usize) -> Result<Self, ModelError> {
        let bad = |problem: String| Err(ModelError::Config(problem));
        let experts =
            self.experts.unwrap_or(ExpertsConfig { count: 1, used: 1, width: 1, ..ExpertsConfig::SOFTMAX });
        let sizes = [
            ("context length", self.context_length),
            ("hidden size", self.hidden),
            ("number of heads", self.heads),
            ("number of K/V heads", self.kv_heads),
            ("head size", self.head_dim),
            ("feed-forward size", self.ffn),
            ("number of layers", self.layers.len()),
            ("number of experts", experts.count),
            ("number of experts for each token", experts.used),
            ("size of an expert", experts.width),
        ];
        for (what, size) in sizes {
            // Products of any two of them fit into 64 bits. No model has such numbers.
            if size == 0 || size > 1 << 30 {
                return bad(format!("the {what} is {size}"));
            }
        }
        if let Some(recurrent) = self.recurrent {
            recurrent.check().map_err(ModelError::Config)?;
        }
        if experts.count > 1 << 16 {
            return bad(format!("the number of experts is {}", experts.count));
        }
        if let Some((shape, rank)) = self.latent {
            let LatentShape { plain, rotated, latent, value, .. } = shape;
            for size in [plain, rotated, latent, value, rank.unwrap_or(1)] {
                if size == 0 || size > 1 << 20 {
                    return bad(format!("a dimension of latent attention is {size}"));
                }
            }
            if shape.key_dim() != self.head_dim || self.ropes.iter().any(|rope| rope.dims > rotated) {
                return bad(format!(
                    "latent attention of {latent} and {rotated} elements does not fit its heads"
                ));
            }
        }
        if let Some(ExpertGroups { count, used, best }) = experts.groups {
            let fits = count > 0 && experts.count.is_multiple_of(count) && (1..=count).contains(&used);
            if !fits || best > experts.count / count || experts.used > experts.count / count * used {
                return bad(format!(
                    "{} of {} experts in {used} of {count} groups",
                    experts.used, experts.count
                ));
            }
        }
        if experts.used > experts.count {
            return bad(format!("{} of {} experts for each token", experts.used, experts.count));
        }
        if experts.latent > 1 << 30 {
            return bad(format!("the width of rows of experts is {}", experts.latent));
        }
        if experts.shared > 1 << 30 {
            return bad(format!("the size of the shared experts is {}", experts.shared));
        }
        if self.layers.len() > tensors {
            return bad(format!("{} layers, but only {tensors} tensors", self.layers.len()));
        }
        if self.layer_embed > 1 << 20 {
            return bad(format!("the size of embeddings for layers is {}", self.layer_embed));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let (kv_heads, head_dim) = (self.kv_heads_of(index), self.head_dim_of(index));
            for (what, size) in [
                ("number of K/V heads", kv_heads),
                ("head size", head_dim),
                ("feed-forward size", self.ffn_of(index)),
            ] {
                if size == 0 || size > 1 << 30 {
                    return bad(format!("the {what} of layer {index} is {size}"));
                }
            }
            if !self.heads.is_multiple_of(kv_heads) {
                return bad(format!("{} heads cannot share {kv_heads} K/V heads evenly", self.heads));
            }
            let rope = layer.rope.and_then(|rope| self.ropes.get(rope));
            if let Some(problem) = rope.and_then(|rope| rope.check(head_dim).err()) {
                return bad(problem);
            }
            if layer.geometry.shares_kv && self.definition.drafts_for.is_none() {
                let source =
                    self.kv_source(index).map(|source| (self.kv_heads_of(source), self.head_dim_of(source)));
                if source != Some((kv_heads, head_dim)) {
                    return bad(format!(
                        "layer {index} reads K and V of an earlier layer, but there is none like it"
                    ));
                }
            }
        }
        let floats = [
            self.embed_scale,
            self.attention_scale,
            self.branch_scale,
            self.multipliers.attention_out.abs(),
            self.multipliers.scan_out.abs(),
            self.multipliers.ffn_in.abs(),
            self.logit_scale,
            experts.factor,
            1.0 + self.norm_eps,
        ];
        let caps = [self.attention_soft_cap, self.logit_soft_cap].into_iter().flatten();
        if floats.into_iter().chain(caps).any(|number| !number.is_finite() || number <= 0.0) {
            return bad("a scale, a soft cap or the norm's epsilon is not a positive number".to_owned());
        }
        if let Some(scale) = self.position_scale
            && (!scale.beta.is_finite() || scale.original == 0)
        {
            return bad("the scale of queries by their position is not a number".to_owned());
        }
        Ok(self)
    }
}
