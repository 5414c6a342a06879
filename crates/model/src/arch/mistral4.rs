//! Mistral Small 4: DeepSeek's latent attention, with queries that grow with their position, and experts that a softmax chooses.
//!
//! Groups of experts are compared by their two largest scores. GGUF files that llama.cpp's converter creates from Hugging Face folders
//! have no scale of positions, so their texts beyond the original context differ from the model's definition.

use paguro_backend::PositionScale;

use super::{Config, Definition, ExpertsConfig, deepseek2, hf::Defaults};
use crate::error::ModelError;

pub(super) const DEF: Definition = Definition {
    gguf: "mistral4",
    hf: &["Mistral4ForCausalLM"],
    experts: Some(ExpertsConfig { renormalize: false, ..ExpertsConfig::SOFTMAX }),
    from_gguf: |keys, config| {
        (deepseek2::DEF.from_gguf)(keys, config)?;
        compare_pairs(config);
        Ok(())
    },
    hf_defaults: |_| Defaults { context_length: 1_048_576, ..Defaults::COMMON },
    from_hf: |fields, config| {
        (deepseek2::DEF.from_hf)(fields, config)?;
        compare_pairs(config);
        let Some(rope) = fields.object("rope_parameters")? else {
            return Err(ModelError::Config("config.json has no `rope_parameters`".to_owned()));
        };
        if let Some(beta) = rope.number("llama_4_scaling_beta")? {
            let original = rope.require("original_max_position_embeddings")? as u32;
            config.position_scale = Some(PositionScale { beta: beta as f32, original });
        }
        // `partial_rotary_factor` is a part of a whole head.
        if let Some((shape, _)) = config.latent {
            config.ropes.iter_mut().for_each(|rope| rope.dims = shape.rotated);
        }
        Ok(())
    },
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..deepseek2::DEF
};

/// Has groups of experts compared by their two largest scores.
fn compare_pairs(config: &mut Config) {
    let groups = config.experts.iter_mut().filter_map(|experts| experts.groups.as_mut());
    groups.for_each(|groups| groups.best = 2);
}
