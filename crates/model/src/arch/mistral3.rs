//! Ministral 3, Devstral 2 and the text part of Mistral Small 3: Llama, with queries that grow with their position.

use paguro_backend::PositionScale;

use super::{Definition, REORDERED, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "mistral3",
    hf: &["Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"],
    rope_styles: REORDERED,
    gguf_keys: &["attention.temperature_scale", "rope.scaling.yarn_log_multiplier"],
    from_gguf: |keys, config| {
        let beta = keys.number("attention.temperature_scale")?.filter(|&beta| beta != 0.0);
        if let Some(beta) = beta {
            let original = keys.optional("rope.scaling.original_context_length")?;
            let original = original.ok_or_else(|| keys.missing("rope.scaling.original_context_length"))?;
            config.position_scale = Some(PositionScale { beta: beta as f32, original });
        }
        keys.set_windows(config, None, 0)
    },
    hf_defaults: |_| Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 262_144,
        norm_eps: 1e-5,
        rope_theta: 1e6,
        windows: super::hf::Windows::All,
        ..Defaults::COMMON
    },
    from_hf: |fields, config| {
        let Some(rope) = fields.object("rope_parameters")? else { return Ok(()) };
        if let Some(beta) = rope.number("llama_4_scaling_beta")? {
            let original = rope.require("original_max_position_embeddings")? as u32;
            config.position_scale = Some(PositionScale { beta: beta as f32, original });
        }
        Ok(())
    },
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..Definition::LLAMA
};
