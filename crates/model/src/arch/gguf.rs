//! A GGUF file's metadata as a [`Config`]. Keys and their defaults are llama.cpp's (llama-arch.cpp, llama-model.cpp and
//! models/*.cpp).

use paguro_backend::{Activation, RopeStyle};

use super::{Architecture, Config, Layer, Tensors};
use crate::{
    error::ModelError,
    gguf::{Metadata, MetadataError},
    rope::{Factors, RopeConfig, Yarn},
};

/// Reads the hyperparameters; `tensors` gives RoPE's factors and bounds the number of layers. `max_context` chooses
/// between longrope's two sets of factors.
pub(crate) fn config(
    metadata: &Metadata,
    tensors: &mut Tensors<'_>,
    max_context: Option<usize>,
) -> Result<Config, ModelError> {
    let architecture = Architecture::from_gguf(metadata.require_str("general.architecture")?)?;
    let keys = Keys { metadata, prefix: architecture.name() };
    keys.refuse_unsupported()?;

    let layers = keys.size("block_count")?;
    if layers > tensors.len() {
        // Before anything is allocated for each layer.
        return Err(ModelError::Config(format!("{layers} layers, but only {} tensors", tensors.len())));
    }
    let hidden = keys.size("embedding_length")?;
    let heads =
        keys.uniform("attention.head_count", layers)?.ok_or_else(|| keys.missing("attention.head_count"))?;
    let kv_heads = keys.uniform("attention.head_count_kv", layers)?.unwrap_or(heads);
    let ffn =
        keys.uniform("feed_forward_length", layers)?.ok_or_else(|| keys.missing("feed_forward_length"))?;
    let context_length = keys.size("context_length")?;
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(length) => length,
        None => hidden.checked_div(heads).unwrap_or(0), // no heads are refused later
    };
    if let Some(value_length) = keys.optional_size("attention.value_length")?
        && value_length != head_dim
    {
        return Err(ModelError::unsupported(format!(
            "a value head ({value_length}) unlike a key head ({head_dim})"
        )));
    }

    // Where the file names a window, the model has one. llama.cpp leaves those of Mistral and Phi-3 out; transformers,
    // which these models were published with, does not.
    let window = keys.optional("attention.sliding_window")?.filter(|&window| window > 0);
    let is_local = match architecture {
        Architecture::Gemma2 => keys.window_pattern(layers, 2)?,
        Architecture::Gemma3 => keys.window_pattern(layers, 6)?,
        _ => vec![true; layers],
    };
    let window = match architecture {
        Architecture::Gemma2 => window.or(Some(4096)),
        // Qwen's files carry the key although the window is off.
        Architecture::Qwen2 | Architecture::Qwen3 => None,
        _ => window,
    };

    let global = keys.rope(architecture, head_dim, tensors, max_context.unwrap_or(context_length))?;
    let mut ropes = vec![global];
    if architecture == Architecture::Gemma3 && window.is_some() {
        // Scaling is only for the layers that see far.
        let base = keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
        ropes.push(RopeConfig::plain(ropes[0].style, ropes[0].dims, base));
    }
    let local_rope = ropes.len() - 1;
    let layer =
        |&local: &bool| Layer { window: window.filter(|_| local), rope: if local { local_rope } else { 0 } };

    let soft_cap = |key, default: Option<f32>| -> Result<Option<f32>, ModelError> {
        let cap = keys.number(key)?.map(|cap| cap as f32).or(default);
        Ok(cap.filter(|&cap| cap != 0.0))
    };
    let is_gemma2 = architecture == Architecture::Gemma2;
    Config {
        architecture,
        context_length,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        norm_eps: metadata.require_f32(&keys.full("attention.layer_norm_rms_epsilon"))?,
        norm_offset: 0.0,
        embed_scale: if architecture.is_gemma() { (hidden as f32).sqrt() } else { 1.0 },
        attention_scale: attention_scale(architecture, layers, hidden, heads, head_dim),
        attention_soft_cap: if is_gemma2 { soft_cap("attn_logit_softcapping", Some(50.0))? } else { None },
        logit_soft_cap: if architecture.is_gemma() {
            soft_cap("final_logit_softcapping", is_gemma2.then_some(30.0))?
        } else {
            None
        },
        activation: if architecture.is_gemma() { Activation::GeluTanh } else { Activation::Silu },
        tied: is_gemma2.then_some(true),
        ropes,
        layers: is_local.iter().map(layer).collect(),
    }
    .check(tensors.len())
}

/// `1/sqrt(head_dim)`, but the 27B models of Gemma 2 and 3, known by their number of layers, scale by the share of the
/// hidden size that a head has. (The key that Hugging Face's configuration has for it is not converted.)
fn attention_scale(
    architecture: Architecture,
    layers: usize,
    hidden: usize,
    heads: usize,
    head_dim: usize,
) -> f32 {
    let width = match (architecture, layers) {
        (Architecture::Gemma2, 46) | (Architecture::Gemma3, 62) if heads > 0 => hidden / heads,
        _ => head_dim,
    };
    1.0 / (width as f32).sqrt()
}

/// Typed access to `{architecture}.{key}`.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'static str,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn missing(&self, key: &str) -> ModelError {
        MetadataError::Missing { key: self.full(key) }.into()
    }

    fn optional(&self, key: &str) -> Result<Option<u32>, ModelError> {
        Ok(self.metadata.optional_u32(&self.full(key))?)
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.optional(key)?.map(|size| size as usize))
    }

    fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        Ok(self.metadata.optional_f32(&self.full(key))?.map(f64::from))
    }

    /// A number, or an array of equal numbers, one for each layer.
    fn uniform(&self, key: &str, layers: usize) -> Result<Option<usize>, ModelError> {
        let full = self.full(key);
        let Some(values) = self.metadata.u32s(&full) else { return self.optional_size(key) };
        match values.split_first() {
            Some((first, rest)) if rest.iter().all(|value| value == first) && values.len() >= layers => {
                Ok(Some(*first as usize))
            }
            _ => Err(ModelError::unsupported(format!("`{full}` that differs between layers"))),
        }
    }

    /// Which layers have the window: as listed, or all but every `period`-th.
    fn window_pattern(&self, layers: usize, period: u32) -> Result<Vec<bool>, ModelError> {
        const KEY: &str = "attention.sliding_window_pattern";
        if let Some(listed) = self.metadata.u32s(&self.full(KEY)) {
            if listed.len() < layers {
                let problem =
                    format!("`{}` has {} entries for {layers} layers", self.full(KEY), listed.len());
                return Err(ModelError::Config(problem));
            }
            return Ok(listed[..layers].iter().map(|&local| local != 0).collect());
        }
        let period = self.optional_size(KEY)?.unwrap_or(period as usize);
        Ok((0..layers).map(|layer| period == 0 || layer % period < period - 1).collect())
    }

    /// Keys that change what a model computes, and that nothing here honours.
    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        let counts = [
            ("expert_count", "a mixture of experts"),
            ("ssm.state_size", "a state-space model"),
            ("attention.q_lora_rank", "latent attention"),
            ("nextn_predict_layers", "multi-token prediction"),
        ];
        for (key, what) in counts {
            let full = self.full(key);
            if let Some(value) = self.metadata.u32(&full).filter(|&value| value > 0) {
                return Err(ModelError::unsupported(format!("{what} (`{full}` = {value})")));
            }
        }
        let scales = [
            "logit_scale",
            "residual_scale",
            "embedding_scale",
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
        ];
        for key in scales {
            let full = self.full(key);
            if let Some(value) = self.metadata.f32(&full).filter(|&value| value != 0.0) {
                return Err(ModelError::unsupported(format!("`{full}` = {value}")));
            }
        }
        if self.metadata.bool(&self.full("attention.causal")) == Some(false) {
            return Err(ModelError::unsupported("attention that is not causal (an embedding model)"));
        }
        let sections = self.metadata.u32s(&self.full("rope.dimension_sections"));
        if sections.is_some_and(|sections| sections.iter().any(|&section| section > 0)) {
            return Err(ModelError::unsupported("RoPE in sections (of a model that sees images)"));
        }
        Ok(())
    }

    fn rope(
        &self,
        architecture: Architecture,
        head_dim: usize,
        tensors: &mut Tensors<'_>,
        max_context: usize,
    ) -> Result<RopeConfig, ModelError> {
        // The converter reorders the rows of Llama's Q and K for pairs of neighbours.
        let style =
            if architecture == Architecture::Llama { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
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
            "linear" | "longrope" => rope.factor = factor,
            "yarn" => {
                rope.factor = factor;
                rope.yarn = Some(Yarn {
                    beta_fast: self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    original: original as f64,
                    truncate: true,
                });
                rope.magnitude = Yarn::magnitude(factor, 1.0);
            }
            _ => {
                let what = format!("`{kind_key}` = `{kind}`");
                return Err(ModelError::unsupported_but(what, "none, linear, yarn, longrope"));
            }
        }
        rope.magnitude *= self.number("rope.scaling.attn_factor")?.unwrap_or(1.0);
        rope.factors = self.factors(architecture, kind, dims, max_context > original, tensors)?;
        Ok(rope)
    }

    /// The factors that the file has as tensors: Llama 3's, or longrope's for the context that will be used.
    fn factors(
        &self,
        architecture: Architecture,
        kind: &str,
        dims: usize,
        beyond_original: bool,
        tensors: &mut Tensors<'_>,
    ) -> Result<Factors, ModelError> {
        let pairs = dims / 2;
        let listed = match architecture {
            Architecture::Llama if kind != "longrope" => tensors.vector("rope_freqs.weight", pairs)?,
            Architecture::Llama | Architecture::Phi3 => {
                let long = tensors.vector("rope_factors_long.weight", pairs)?;
                let short = tensors.vector("rope_factors_short.weight", pairs)?;
                if beyond_original { long } else { short }
            }
            _ => None,
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
