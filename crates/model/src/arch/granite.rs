//! Granite 3 and 4, dense and with experts: Llama with four multipliers.

use super::{
    Config, Definition, ExpertsConfig, Part, REORDERED,
    gguf::Keys,
    hf::{Defaults, Fields},
};
use crate::{error::ModelError, gguf::Value};

pub(super) const DEF: Definition = Definition {
    gguf: "granite",
    hf: &["GraniteForCausalLM"],
    rope_styles: REORDERED,
    gguf_keys: KEYS,
    from_gguf,
    further_gguf_keys: divisor,
    hf_defaults: |_| Defaults::COMMON,
    from_hf,
    ..Definition::LLAMA
};

pub(super) const MOE: Definition = Definition {
    gguf: "granitemoe",
    hf: &["GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"],
    rope_styles: REORDERED,
    experts: Some(ExpertsConfig::SOFTMAX),
    gguf_keys: KEYS,
    from_gguf,
    further_gguf_keys: divisor,
    hf_defaults: |_| Defaults::COMMON,
    from_hf: |fields, config| {
        if let Some(experts) = &mut config.experts {
            experts.shared = fields.size("shared_intermediate_size", Some(0))?;
        }
        from_hf(fields, config)
    },
    hf_names: &[
        (Part::Router, "block_sparse_moe.router.layer"),
        (Part::ExpertGateUp, "block_sparse_moe.input_linear.weight"),
        (Part::ExpertDowns, "block_sparse_moe.output_linear.weight"),
        (Part::SharedGateUp, "shared_mlp.input_linear"),
        (Part::SharedDown, "shared_mlp.output_linear"),
    ],
    ..Definition::LLAMA
};

const KEYS: &[&str] = &["logit_scale", "residual_scale", "embedding_scale", "attention.scale"];

/// GGUF files have the divisor of logits.
pub(super) fn divisor(config: &Config) -> Vec<(&'static str, Value)> {
    vec![("logit_scale", Value::F32(1.0 / config.logit_scale))]
}

pub(super) fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    let number = |key| Ok::<_, ModelError>(keys.number(key)?.filter(|&number| number != 0.0));
    let scales = [
        number("embedding_scale")?,
        number("attention.scale")?,
        number("residual_scale")?,
        number("logit_scale")?,
    ];
    set(config, scales);
    Ok(())
}

pub(super) fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    let scales = [
        fields.number("embedding_multiplier")?,
        Some(fields.number("attention_multiplier")?.unwrap_or(1.0)),
        fields.number("residual_multiplier")?,
        fields.number("logits_scaling")?,
    ];
    set(config, scales);
    Ok(())
}

/// The scales of embeddings, scores and branches, and the divisor of logits.
fn set(config: &mut Config, [embeddings, scores, branches, logits]: [Option<f64>; 4]) {
    let scale = |to: &mut f32, scale: Option<f64>| {
        if let Some(scale) = scale {
            *to = scale as f32;
        }
    };
    scale(&mut config.embed_scale, embeddings);
    scale(&mut config.attention_scale, scores);
    scale(&mut config.branch_scale, branches);
    scale(&mut config.logit_scale, logits.map(|divisor| 1.0 / divisor));
}
