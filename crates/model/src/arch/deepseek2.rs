//! DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash, Mistral Large 3: latent attention, experts in groups.
//!
//! If a GGUF file does not name the function of its router's scores, llama.cpp uses softmax. Files with a bias for the
//! choice are of V3's kind, which is defined with sigmoids, so sigmoids are used for them.

use paguro_backend::{LatentShape, PositionScale, Scores};

use super::{
    Block, Config, Definition, ExpertsConfig, INTERLEAVED,
    gguf::Keys,
    hf::{Defaults, Fields},
};
use crate::{error::ModelError, rope::Yarn};

pub(super) const DEF: Definition = Definition {
    gguf: "deepseek2",
    hf: &[
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "KimiVLForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
    ],
    block: Block { latent: true, ..Block::LLAMA },
    experts: Some(ExpertsConfig { renormalize: false, ..ExpertsConfig::SIGMOID }),
    rope_styles: INTERLEAVED,
    gguf_keys: &[
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.temperature_scale",
        "rope.scaling.yarn_log_multiplier",
        "nextn_predict_layers",
    ],
    mtp: true,
    from_gguf,
    hf_defaults: |class| match class {
        "Glm4MoeLiteForCausalLM" => Defaults { norm_eps: 1e-5, context_length: 202_752, ..Defaults::COMMON },
        "DeepseekV3ForCausalLM" => Defaults { context_length: 4096, ..Defaults::COMMON },
        _ => Defaults::COMMON,
    },
    from_hf,
    hf_ignored: &["vision_tower.", "multi_modal_projector.", "mm_projector."],
    ..Definition::LLAMA
};

/// Sets values derived from the dimensions. `all` is YaRN's magnitude of all dimensions, which scales scores.
fn finish(config: &mut Config, shape: LatentShape, rank: Option<usize>, all: f64) {
    config.latent = Some((shape, rank));
    (config.kv_heads, config.head_dim) = (1, shape.key_dim());
    let magnitude = match config.ropes.first() {
        Some(rope) if rope.yarn.is_some() && all != 0.0 => Yarn::magnitude(rope.factor, all),
        _ => 1.0,
    };
    let scale = magnitude * magnitude / ((shape.plain + shape.rotated) as f64).sqrt();
    config.attention_scale = scale as f32;
    if let Some(experts) = &mut config.experts {
        let best = if experts.scores == Scores::Sigmoid { 2 } else { 1 };
        experts.groups.iter_mut().for_each(|groups| groups.best = best);
    }
}

fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    let latent = keys.size("attention.kv_lora_rank")?;
    let rotated = keys.size("rope.dimension_count")?;
    let (Some(key), Some(value)) =
        (keys.optional_size("attention.key_length_mla")?, keys.optional_size("attention.value_length_mla")?)
    else {
        return Err(ModelError::unsupported_but(
            "a file of DeepSeek's models from before latent attention had its own keys",
            "files with `attention.key_length_mla`",
        ));
    };
    let plain = key.saturating_sub(rotated);
    let rank = keys.optional_size("attention.q_lora_rank")?.filter(|&rank| rank > 0);
    // Files of Lite models may have a rank without its tensors.
    let rank = rank.filter(|_| keys.has_tensor("blk.0.attn_q_a.weight"));
    if let Some(experts) = &mut config.experts {
        let bias = format!("blk.{}.exp_probs_b.bias", experts.dense_layers);
        experts.selection_bias = keys.has_tensor(&bias);
        if keys.optional("expert_gating_func")?.is_none_or(|function| function == 0) {
            experts.scores = if experts.selection_bias { Scores::Sigmoid } else { Scores::Softmax };
        }
    }
    // The converter writes a tenth of it.
    let all = keys.number("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0) * 10.0;
    if all != 0.0 {
        config.ropes.iter_mut().filter(|rope| rope.yarn.is_some()).for_each(|rope| rope.magnitude = 1.0);
    }
    if let Some(beta) = keys.number("attention.temperature_scale")?.filter(|&beta| beta != 0.0) {
        const LENGTH: &str = "attention.temperature_length";
        let original = keys.optional(LENGTH)?.ok_or_else(|| keys.missing(LENGTH))?;
        config.position_scale = Some(PositionScale { beta: beta as f32, original });
    }
    let heads = config.heads;
    finish(config, LatentShape { heads, plain, rotated, latent, value }, rank, all);
    Ok(())
}

fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    let shape = LatentShape {
        heads: config.heads,
        plain: fields.size("qk_nope_head_dim", Some(128))?,
        rotated: fields.size("qk_rope_head_dim", Some(64))?,
        latent: fields.size("kv_lora_rank", Some(512))?,
        value: fields.size("v_head_dim", Some(128))?,
    };
    let rank = match fields.has("q_lora_rank") {
        true => fields.optional_size("q_lora_rank")?,
        false => Some(1536),
    };
    if fields.flag("rope_interleave")? == Some(false) {
        let style = paguro_backend::RopeStyle::HalfSplit;
        config.ropes.iter_mut().for_each(|rope| rope.style = style);
    }
    let layers = config.layers.len();
    if let Some(experts) = &mut config.experts {
        // DeepSeek V2's classes have no sigmoids, and no weights that are divided by their sum.
        let is_v2 = fields.text("topk_method")?.is_some_and(|method| method != "noaux_tc")
            || fields.text("scoring_func")? == Some("softmax");
        if is_v2 {
            (experts.scores, experts.selection_bias, experts.renormalize) = (Scores::Softmax, false, false);
            if fields.text("topk_method")? == Some("greedy") {
                experts.groups = None;
            }
        } else {
            experts.renormalize = fields.flag("norm_topk_prob")?.unwrap_or(true);
        }
        if let Some(types) = fields.list("mlp_layer_types")? {
            let is_dense = |kind: &serde_json::Value| kind.as_str() == Some("dense");
            let dense = types.iter().take_while(|kind| is_dense(kind)).count();
            if types.len() < layers || types[dense..].iter().any(is_dense) {
                return Err(ModelError::unsupported("dense layers after the first ones with experts"));
            }
            experts.dense_layers = dense;
        }
        let dense = experts.dense_layers;
        config.layers.iter_mut().enumerate().for_each(|(index, layer)| layer.experts = index >= dense);
    }
    let scaling = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling")?,
    };
    let all = scaling.map(|scaling| scaling.number("mscale_all_dim")).transpose()?.flatten();
    finish(config, shape, rank, all.unwrap_or(0.0));
    Ok(())
}
