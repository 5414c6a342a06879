//! A GGUF file's metadata as a [`Config`]. Keys and their defaults are llama.cpp's (llama-arch.cpp, llama-model.cpp and
//! models/*.cpp).

use paguro_backend::{ExpertGroups, NormKind, Scores};

use super::{
    Config, Definition, ExpertsConfig, Multipliers, Tensors,
    config::{Geometry, Layer},
};
use crate::{
    error::ModelError,
    gguf::{Metadata, MetadataError},
    rope::{Factors, RopeConfig, Yarn, check_original},
};

/// Reads the hyperparameters. `tensors` has RoPE's factors and bounds the number of layers; `max_context` selects one
/// of longrope's two sets of factors.
pub(crate) fn config(
    metadata: &Metadata,
    tensors: &mut Tensors<'_>,
    max_context: Option<usize>,
) -> Result<Config, ModelError> {
    let definition = Definition::from_gguf(metadata.require_str("general.architecture")?)?;
    let count = tensors.len();
    if count == 0 {
        return Err(ModelError::Config("the file has no tensors, only a tokenizer or settings".to_owned()));
    }
    let mut keys = Keys { metadata, definition, tensors };
    keys.refuse_unsupported()?;

    let all_layers = keys.size("block_count")?;
    let extra_layers = match definition.drafts_for {
        None => keys.optional_size("nextn_predict_layers")?.unwrap_or(0).min(all_layers),
        Some(_) => 0,
    };
    let layers = all_layers - extra_layers;
    if all_layers > count {
        // Before anything is allocated for each layer.
        return Err(ModelError::Config(format!("{all_layers} layers, but only {count} tensors")));
    }
    let hidden = keys.size("embedding_length")?;
    // Files of models without attention have zeros.
    let attends = definition.block.attention;
    let heads = match keys.uniform("attention.head_count", layers)? {
        _ if !attends => 1,
        heads => heads.ok_or_else(|| keys.missing("attention.head_count"))?,
    };
    let kv_heads = if attends { keys.kv_heads(layers)?.unwrap_or(heads) } else { 1 };
    let experts = keys.experts(definition.experts, layers)?;
    let ffn = match (keys.uniform("feed_forward_length", layers)?, experts) {
        _ if !attends => 1,
        (Some(ffn), _) if ffn > 0 => ffn,
        (_, Some(experts)) => experts.width,
        _ => return Err(keys.missing("feed_forward_length")),
    };
    let context_length = keys.size("context_length")?;
    let head_dim = match keys.optional_size("attention.key_length")? {
        _ if !attends => 1,
        Some(length) => length,
        None => hidden.checked_div(heads).unwrap_or(0), // no heads are refused later
    };
    if let Some(value_length) = keys.optional_size("attention.value_length")?
        && value_length != head_dim
        && !definition.block.latent
    {
        return Err(ModelError::unsupported(format!(
            "a value head ({value_length}) unlike a key head ({head_dim})"
        )));
    }
    let eps = match definition.block.norms {
        NormKind::Rms => "attention.layer_norm_rms_epsilon",
        NormKind::Layer => "attention.layer_norm_epsilon",
    };
    let other_eps = definition.gguf_keys.iter().find(|key| **key == "attention.layer_norm_epsilon");
    let norm_eps = match (metadata.optional_f32(&keys.full(eps))?, other_eps) {
        (Some(eps), _) => eps,
        (None, Some(other)) => metadata.require_f32(&keys.full(other))?,
        (None, None) => metadata.require_f32(&keys.full(eps))?,
    };
    let rope = match definition.block.positions || !attends {
        true => None,
        false => Some(keys.rope(head_dim, max_context.unwrap_or(context_length))?),
    };
    let layer = |layer: usize| Layer {
        window: None,
        rope: rope.as_ref().map(|_| 0),
        experts: experts.is_some_and(|experts| layer >= experts.dense_layers),
        recurrent: false,
        mixer: true,
        network: true,
        geometry: Geometry::default(),
    };
    let mut config = Config {
        definition,
        context_length,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        layer_embed: 0,
        latent: None,
        block: definition.block,
        experts,
        recurrent: None,
        norm_eps,
        norm_offset: 0.0,
        position_offset: 0,
        embed_scale: 1.0,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        attention_soft_cap: None,
        position_scale: None,
        branch_scale: 1.0,
        multipliers: Multipliers::NONE,
        logit_scale: 1.0,
        logit_soft_cap: None,
        tied: None,
        layers: (0..layers).map(layer).collect(),
        ropes: rope.into_iter().collect(),
        extra_layers,
        halves_in_gguf: false,
    };
    (definition.from_gguf)(&mut keys, &mut config)?;
    if keys.flag("attention.causal") == Some(false) && !config.block.bidirectional {
        if config.layers.iter().any(|layer| layer.window.is_some()) {
            return Err(ModelError::unsupported("a sliding window in attention that is not causal"));
        }
        config.block.bidirectional = true;
    }
    config.check(count)
}

/// Keys whose numbers differ between layers of some architectures.
const VARYING: [&str; 2] = ["attention.head_count_kv", "feed_forward_length"];

/// Typed access to `{architecture}.{key}`.
pub(super) struct Keys<'a, 't> {
    metadata: &'a Metadata,
    definition: &'static Definition,
    tensors: &'a mut Tensors<'t>,
}

impl Keys<'_, '_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.definition.gguf)
    }

    /// Returns true if the file has a tensor of this name.
    pub(super) fn has_tensor(&self, name: &str) -> bool {
        self.tensors.has(name)
    }

    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        self.metadata.bool(&self.full(key))
    }

    pub(super) fn missing(&self, key: &str) -> ModelError {
        MetadataError::Missing { key: self.full(key) }.into()
    }

    pub(super) fn optional(&self, key: &str) -> Result<Option<u32>, ModelError> {
        Ok(self.metadata.optional_u32(&self.full(key))?)
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.optional(key)?.map(|size| size as usize))
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        Ok(self.metadata.optional_f32(&self.full(key))?.map(f64::from))
    }

    /// Returns numbers, or flags as 0 and 1, for each layer; `None` without an array.
    pub(super) fn list(&self, key: &str) -> Option<Vec<u32>> {
        self.metadata.u32s(&self.full(key))
    }

    /// K/V heads of the layers that attend. Others of a short convolution have none.
    fn kv_heads(&self, layers: usize) -> Result<Option<usize>, ModelError> {
        const KEY: &str = "attention.head_count_kv";
        let listed = self.list(KEY).filter(|_| self.definition.gguf_keys.contains(&"shortconv.l_cache"));
        let Some(listed) = listed.filter(|listed| listed.len() >= layers) else {
            return self.uniform(KEY, layers);
        };
        let mut attend = listed.into_iter().filter(|&heads| heads > 0);
        let first = attend.next();
        match attend.all(|heads| Some(heads) == first) {
            true => Ok(first.map(|heads| heads as usize)),
            false => {
                Err(ModelError::unsupported(format!("`{}` that differs between layers", self.full(KEY))))
            }
        }
    }

    /// Returns a number, or an array of equal numbers, one for each layer; the first one of those in which layers may
    /// differ.
    fn uniform(&self, key: &str, layers: usize) -> Result<Option<usize>, ModelError> {
        let full = self.full(key);
        let Some(mut values) = self.metadata.u32s(&full) else { return self.optional_size(key) };
        let enough = values.len() >= layers;
        if self.definition.block.zeros && VARYING.contains(&key) {
            values.retain(|&value| value > 0);
            if values.is_empty() {
                return Ok(None);
            }
        }
        let varies = self.definition.block.varies && VARYING.contains(&key);
        match values.split_first() {
            Some((first, rest)) if (varies || rest.iter().all(|value| value == first)) && enough => {
                Ok(Some(*first as usize))
            }
            _ => Err(ModelError::unsupported(format!("`{full}` that differs between layers"))),
        }
    }

    /// Gives layers the file's window, or `default`: as the file lists them, or all but every `period`-th.
    pub(super) fn set_windows(
        &self,
        config: &mut Config,
        default: Option<u32>,
        period: usize,
    ) -> Result<(), ModelError> {
        const KEY: &str = "attention.sliding_window_pattern";
        let window = self.optional("attention.sliding_window")?.or(default);
        let layers = config.layers.len();
        if let Some(listed) = self.metadata.u32s(&self.full(KEY)) {
            if listed.len() < layers {
                let problem =
                    format!("`{}` has {} entries for {layers} layers", self.full(KEY), listed.len());
                return Err(ModelError::Config(problem));
            }
            let local: Vec<bool> = listed[..layers].iter().map(|&local| local != 0).collect();
            config.set_windows(window, &local);
            return Ok(());
        }
        config.set_window_period(window, self.optional_size(KEY)?.unwrap_or(period));
        Ok(())
    }

    /// Returns the mixture of experts of an architecture that may have one like `defaults`.
    fn experts(
        &self,
        defaults: Option<ExpertsConfig>,
        layers: usize,
    ) -> Result<Option<ExpertsConfig>, ModelError> {
        let Some(defaults) = defaults else { return Ok(None) };
        let Some(count) = self.optional_size("expert_count")?.filter(|&count| count > 0) else {
            return Ok(None);
        };
        let groups = self.optional_size("expert_group_count")?.filter(|&groups| groups > 1);
        if let Some(groups) = groups.filter(|_| !self.definition.block.latent) {
            return Err(ModelError::unsupported(format!("a router with {groups} groups of experts")));
        }
        let used_groups = self.optional_size("expert_group_used_count")?.unwrap_or(1);
        let groups = groups.map(|count| ExpertGroups { count, used: used_groups, best: 1 });
        let used = self.uniform("expert_used_count", layers)?;
        let used = used.ok_or_else(|| self.missing("expert_used_count"))?;
        let width = match self.uniform("expert_feed_forward_length", layers)?.filter(|&width| width > 0) {
            Some(width) => width,
            None => self.uniform("feed_forward_length", layers)?.unwrap_or(0),
        };
        let shared = match self.optional_size("expert_shared_feed_forward_length")? {
            Some(shared) => shared,
            None => self.optional_size("expert_shared_count")?.unwrap_or(0).saturating_mul(width),
        };
        let scores = match self.optional("expert_gating_func")? {
            None | Some(0) => defaults.scores,
            Some(1 | 3) => Scores::Softmax, // 3: softmax over the chosen, which renormalization gives
            Some(2) => Scores::Sigmoid,
            Some(other) => {
                let what = format!("`{}` = {other}", self.full("expert_gating_func"));
                return Err(ModelError::unsupported_but(what, "1 (softmax), 2 (sigmoid)"));
            }
        };
        let factor = self.number("expert_weights_scale")?.filter(|&factor| factor != 0.0).unwrap_or(1.0);
        let renormalize = self.metadata.bool(&self.full("expert_weights_norm"));
        Ok(Some(ExpertsConfig {
            count,
            groups,
            used,
            width,
            scores,
            renormalize: renormalize.unwrap_or(defaults.renormalize),
            factor: factor as f32,
            shared,
            dense_layers: self.optional_size("leading_dense_block_count")?.unwrap_or(0),
            latent: self.optional_size("moe_latent_size")?.unwrap_or(0),
            ..defaults
        }))
    }

    /// Refuses keys that change the model's results and are not supported.
    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        let honoured = |key: &str| {
            self.definition.gguf_keys.contains(&key)
                || key == "expert_count" && self.definition.experts.is_some()
        };
        let counts = [
            ("expert_count", "a mixture of experts"),
            ("ssm.state_size", "a state-space model"),
            ("attention.q_lora_rank", "latent attention"),
            ("attention.kv_lora_rank", "latent attention"),
            ("nextn_predict_layers", "multi-token prediction"),
            ("attention.shared_kv_layers", "layers that read the K and V of others"),
            ("embedding_length_per_layer_input", "embeddings for layers"),
            ("moe_latent_size", "experts with rows of their own width"),
            ("n_deepstack_layers", "rows that images add to the first layers"),
        ];
        for (key, what) in counts {
            let full = self.full(key);
            if let Some(value) = self.metadata.u32(&full).filter(|&value| value > 0 && !honoured(key)) {
                return Err(ModelError::unsupported(format!("{what} (`{full}` = {value})")));
            }
        }
        let scales = [
            "logit_scale",
            "residual_scale",
            "embedding_scale",
            "attention.scale",
            "attention.temperature_scale",
            "attention.output_scale",
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
            "rope.scaling.yarn_log_multiplier",
        ];
        for key in scales {
            let full = self.full(key);
            if let Some(value) = self.metadata.f32(&full).filter(|&value| value != 0.0 && !honoured(key)) {
                return Err(ModelError::unsupported(format!("`{full}` = {value}")));
            }
        }
        let sections = self.metadata.u32s(&self.full("rope.dimension_sections"));
        if sections.is_some_and(|sections| sections.iter().any(|&section| section > 0))
            && !honoured("rope.dimension_sections")
        {
            return Err(ModelError::unsupported("RoPE in sections (of a model that sees images)"));
        }
        Ok(())
    }

    fn rope(&mut self, head_dim: usize, max_context: usize) -> Result<RopeConfig, ModelError> {
        let style = self.definition.rope_styles[0];
        let dims = self.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        let base = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        let mut rope = RopeConfig::plain(style, dims, base);

        let kind_key = self.full("rope.scaling.type");
        let kind = self.metadata.optional_str(&kind_key)?.unwrap_or("linear");
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?, // the old key
        };
        let factor = factor.filter(|&factor| factor != 0.0).unwrap_or(1.0);
        let original = match self.optional_size("rope.scaling.original_context_length")? {
            Some(length) => length,
            None => self.size("context_length")?,
        };
        match kind {
            "none" => {}
            "linear" => rope.factor = factor,
            "longrope" => {
                check_original(original as f64)?;
                rope.factor = factor;
            }
            "yarn" => {
                rope.factor = factor;
                rope.yarn = Some(Yarn {
                    beta_fast: self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    original: original as f64,
                    truncate: true,
                });
                rope.magnitude = Yarn::magnitude(factor, 1.0);
                if let Some(all) = self.number("rope.scaling.yarn_log_multiplier")?.filter(|&all| all != 0.0)
                {
                    rope.magnitude /= Yarn::magnitude(factor, all);
                }
            }
            _ => {
                let what = format!("`{kind_key}` = `{kind}`");
                return Err(ModelError::unsupported_but(what, "none, linear, yarn, longrope"));
            }
        }
        rope.magnitude *= self.number("rope.scaling.attn_factor")?.unwrap_or(1.0);
        rope.factors = self.factors(kind, dims, max_context > original)?;
        Ok(rope)
    }

    /// Returns the factors that the file has as tensors: Llama 3's, or longrope's for the context that will be used.
    fn factors(&mut self, kind: &str, dims: usize, beyond_original: bool) -> Result<Factors, ModelError> {
        let pairs = dims / 2;
        let long = self.tensors.vector("rope_factors_long.weight", pairs)?;
        let short = self.tensors.vector("rope_factors_short.weight", pairs)?;
        let listed = match kind {
            "longrope" if beyond_original => long,
            "longrope" => short,
            // Phi-3's files have the factors without naming their kind.
            _ if long.is_some() || short.is_some() => {
                if beyond_original {
                    long
                } else {
                    short
                }
            }
            _ => self.tensors.vector("rope_freqs.weight", pairs)?,
        };
        check_factors(listed)
    }
}

/// Factors divide.
pub(super) fn check_factors(listed: Option<Vec<f32>>) -> Result<Factors, ModelError> {
    match listed {
        None => Ok(Factors::None),
        Some(factors) if factors.iter().all(|factor| factor.is_finite() && *factor > 0.0) => {
            Ok(Factors::Listed(factors))
        }
        Some(_) => Err(ModelError::Config("RoPE's factors are not all positive numbers".to_owned())),
    }
}
