//! RoPE: keys of the metadata, and factors of frequencies, which are tensors.

use super::{Export, Original, tensors, unsupported};
use crate::{
    arch::Config,
    error::ModelError,
    gguf::{Array, Value},
    rope::{Factors, RopeConfig, Yarn},
    tensor::Tensor,
};

impl Export<'_> {
    /// Writes the keys of RoPE.
    ///
    /// # Errors
    /// The factors of longrope are the same for all contexts.
    pub(super) fn rope(&mut self, short: &Config, original: &Original) -> Result<(), ModelError> {
        let config = self.config;
        let Some(rope) = config.ropes.first() else { return Ok(()) };
        self.size("rope.dimension_count", rope.dims);
        // Files of these models have sections only if they see.
        let may_lack_them =
            original.sections.is_none() && matches!(config.definition.gguf, "glm4" | "glm4moe");
        if config.definition.gguf_keys.contains(&"rope.dimension_sections") && !may_lack_them {
            // Any sections mean the same for text.
            let third = (rope.dims / 2 / 3) as i32;
            let even = || vec![(rope.dims / 2) as i32 - 2 * third, third, third];
            let mut sections = original.sections.clone().unwrap_or_else(even);
            sections.resize(4, 0);
            self.set("rope.dimension_sections", Value::Array(Array::I32(sections)));
        }
        self.number("rope.freq_base", rope.base);
        if let Some(local) = config.ropes.get(1) {
            self.number("rope.freq_base_swa", local.base);
            if config.block.own_ropes {
                self.size("rope.dimension_count_swa", local.dims);
            }
        }
        if let Some(Yarn { beta_fast, beta_slow, original, .. }) = rope.yarn {
            self.set("rope.scaling.type", Value::String("yarn".to_owned()));
            self.number("rope.scaling.factor", rope.factor);
            self.size("rope.scaling.original_context_length", original as usize);
            self.number("rope.scaling.yarn_beta_fast", beta_fast);
            self.number("rope.scaling.yarn_beta_slow", beta_slow);
            match self.yarn_scale(rope.factor) {
                // The magnitude is in the scale of scores, as llama.cpp's converter writes it.
                Some(all) => self.number("rope.scaling.yarn_log_multiplier", 0.1 * all),
                None => {
                    let magnitude = rope.magnitude / Yarn::magnitude(rope.factor, 1.0);
                    self.number("rope.scaling.attn_factor", magnitude);
                }
            }
        } else if config.block.own_ropes {
            // Its factors are a tensor without a key.
        } else if let (Factors::Listed(_), Some(other)) = (&rope.factors, short.ropes.first()) {
            // The factors for long contexts hold beyond the original one.
            if rope.factors == other.factors {
                return Err(unsupported(config));
            }
            self.set("rope.scaling.type", Value::String("longrope".to_owned()));
            self.size(
                "rope.scaling.original_context_length",
                original.context.unwrap_or(config.context_length),
            );
            self.number("rope.scaling.attn_factor", rope.magnitude);
        } else if rope.factor != 1.0 {
            self.set("rope.scaling.type", Value::String("linear".to_owned()));
            self.number("rope.scaling.factor", rope.factor);
        }
        Ok(())
    }

    /// Returns YaRN's `mscale_all_dim`, by which latent attention scales its scores.
    fn yarn_scale(&self, factor: f64) -> Option<f64> {
        let (shape, _) = self.config.latent?;
        let plain = 1.0 / ((shape.plain + shape.rotated) as f64).sqrt();
        let magnitude = (f64::from(self.config.attention_scale) / plain).sqrt();
        // The inverse of `Yarn::magnitude`.
        let all = (magnitude - 1.0) / (0.1 * factor.ln());
        (factor > 1.0 && (magnitude - 1.0).abs() > 1e-6).then_some(all)
    }

    /// Returns the divisors of frequencies, which GGUF files have as tensors.
    pub(super) fn rope_factors(&self, short: &Config) -> Vec<Tensor> {
        let Some(rope) = self.config.ropes.first() else { return Vec::new() };
        let listed = |rope: &RopeConfig| match &rope.factors {
            Factors::Listed(factors) => factors.clone(),
            _ => Vec::new(),
        };
        match &rope.factors {
            Factors::None => Vec::new(),
            Factors::Listed(factors) if self.config.block.own_ropes => {
                vec![tensors::vector("rope_freqs.weight", factors)]
            }
            Factors::Listed(long) => {
                let short = short.ropes.first().map(listed).unwrap_or_default();
                vec![
                    tensors::vector("rope_factors_long.weight", long),
                    tensors::vector("rope_factors_short.weight", &short),
                ]
            }
            Factors::Llama3 { .. } => {
                let plain = RopeConfig { factors: Factors::None, ..rope.clone() };
                let factors: Vec<f32> = (0..rope.dims / 2)
                    .map(|pair| (plain.frequency(pair) / rope.frequency(pair)) as f32)
                    .collect();
                vec![tensors::vector("rope_freqs.weight", &factors)]
            }
        }
    }
}
