//! GLM-4: norms after both branches, RoPE of neighbours in half of each head; in sections in models that see (GLM-4.1V, GLM-4.6V-Flash).

use paguro_backend::RopeStyle;

use super::{
    Block, Config, Definition, INTERLEAVED, Part,
    gguf::Keys,
    hf::{Defaults, Fields},
};
use crate::error::ModelError;

pub(super) const DEF: Definition = Definition {
    gguf: "glm4",
    hf: &["Glm4ForCausalLM", "Glm4vForConditionalGeneration", "GlmOcrForConditionalGeneration"],
    block: Block { post_norms: true, fused_gate_up: true, ..Block::LLAMA },
    rope_styles: INTERLEAVED,
    gguf_keys: &["nextn_predict_layers", "rope.dimension_sections"],
    from_gguf,
    hf_defaults: |class| match class {
        "Glm4vForConditionalGeneration" => {
            Defaults { context_length: 32_768, norm_eps: 1e-5, head_dim: None, ..DEFAULTS }
        }
        "GlmOcrForConditionalGeneration" => Defaults { kv_heads: Some(8), norm_eps: 1e-5, ..DEFAULTS },
        _ => DEFAULTS,
    },
    from_hf,
    hf_names: &[
        (Part::PostAttentionNorm, "post_self_attn_layernorm"),
        (Part::PostFfnNorm, "post_mlp_layernorm"),
    ],
    hf_ignored: &["visual."],
    ..Definition::LLAMA
};

const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(2),
    head_dim: Some(128),
    context_length: 131_072,
    norm_eps: 0.000_000_156_25,
    partial_rotary_factor: 0.5,
    ..Defaults::COMMON
};

fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    let sections = keys.list("rope.dimension_sections").unwrap_or_default();
    config.halves_in_gguf = sections.iter().any(|&section| section > 0);
    if config.halves_in_gguf {
        config.ropes.iter_mut().for_each(|rope| rope.style = RopeStyle::HalfSplit);
    }
    Ok(())
}

fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    for key in ["rope_parameters", "rope_scaling"] {
        let rope = fields.object(key)?;
        config.halves_in_gguf |= rope.is_some_and(|rope| rope.has("mrope_section"));
    }
    Ok(())
}
