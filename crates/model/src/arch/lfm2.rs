//! LFM2 and LFM2.5. Most layers have a short convolution. The others have attention with norms of queries and keys. LFM2
//! MoE scores experts with a sigmoid, adds a bias for their selection, and has dense feed-forward networks in the first
//! layers.

use paguro_backend::QkNormKind;

use super::{
    Block, Config, Definition, ExpertsConfig, Part, Recurrent,
    gguf::Keys,
    hf::{Defaults, Fields},
};
use crate::error::ModelError;

const BLOCK: Block = Block { qk_norm: Some(QkNormKind::Head), ..Block::LLAMA };

pub(super) const DENSE: Definition = Definition {
    gguf: "lfm2",
    hf: &["Lfm2ForCausalLM", "LFM2ForCausalLM"],
    block: BLOCK,
    gguf_keys: &["shortconv.l_cache", "attention.sliding_window"],
    from_gguf,
    hf_defaults: |_| DEFAULTS,
    from_hf: |fields, config| {
        config.ffn = fields.size("block_ff_dim", Some(config.ffn))?;
        if fields.flag("block_auto_adjust_ff_dim")?.unwrap_or(true) {
            let factor = fields.number("block_ffn_dim_multiplier")?.unwrap_or(1.0);
            let multiple = fields.size("block_multiple_of", Some(256))?.max(1);
            let width = (factor * (2 * config.ffn / 3) as f64) as usize;
            config.ffn = width.div_ceil(multiple).saturating_mul(multiple);
        }
        from_hf(fields, config)
    },
    gguf_names: GGUF_NAMES,
    hf_names: HF_NAMES,
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..Definition::LLAMA
};

pub(super) const MOE: Definition = Definition {
    gguf: "lfm2moe",
    hf: &["Lfm2MoeForCausalLM"],
    block: BLOCK,
    experts: Some(ExpertsConfig::SIGMOID),
    gguf_keys: &["shortconv.l_cache"],
    from_gguf,
    hf_defaults: |_| DEFAULTS,
    from_hf: |fields, config| {
        if let Some(experts) = &mut config.experts {
            experts.dense_layers = fields.size("num_dense_layers", Some(2))?;
            experts.selection_bias = fields.flag("use_expert_bias")?.unwrap_or(true);
            let dense = experts.dense_layers;
            config.layers.iter_mut().enumerate().for_each(|(index, layer)| layer.experts = index >= dense);
        }
        from_hf(fields, config)
    },
    gguf_names: GGUF_NAMES,
    hf_names: HF_NAMES,
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..Definition::LLAMA
};

const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(8),
    context_length: 128_000,
    norm_eps: 1e-5,
    rope_theta: 1e6,
    tied: true,
    ..Defaults::COMMON
};

const GGUF_NAMES: &[(Part, &str)] = &[(Part::OutputNorm, "token_embd_norm"), (Part::Conv, "shortconv.conv")];

const HF_NAMES: &[(Part, &str)] = &[
    (Part::OutputNorm, "embedding_norm"),
    (Part::AttentionNorm, "operator_norm"),
    (Part::AttentionOut, "self_attn.out_proj"),
    (Part::QNorm, "self_attn.q_layernorm"),
    (Part::KNorm, "self_attn.k_layernorm"),
    (Part::Conv, "conv.conv"),
    (Part::FfnNorm, "ffn_norm"),
    (Part::Gate, "feed_forward.w1"),
    (Part::Up, "feed_forward.w3"),
    (Part::Down, "feed_forward.w2"),
    (Part::Router, "feed_forward.gate"),
    (Part::SelectionBias, "feed_forward.expert_bias"),
    (Part::ExpertGate, "feed_forward.experts.{}.w1"),
    (Part::ExpertUp, "feed_forward.experts.{}.w3"),
    (Part::ExpertDown, "feed_forward.experts.{}.w2"),
    (Part::ExpertGateUp, "feed_forward.experts.gate_up_proj"),
    (Part::ExpertDowns, "feed_forward.experts.down_proj"),
];

fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    config.recurrent = Some(Recurrent::Conv { taps: keys.size("shortconv.l_cache")? });
    // A layer without K/V heads has a convolution.
    let attends = keys.list("attention.head_count_kv").unwrap_or_default();
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.recurrent = attends.get(index).is_some_and(|&heads| heads == 0);
    }
    let window = keys.optional("attention.sliding_window")?;
    if window.is_some_and(|window| window > 0) {
        config.set_windows(window, &vec![true; config.layers.len()]);
    }
    Ok(())
}

fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    config.recurrent = Some(Recurrent::Conv { taps: fields.size("conv_L_cache", Some(3))? });
    config.tied = Some(fields.flag("tie_embedding")?.unwrap_or(config.tied.unwrap_or(true)));
    if let Some(types) = fields.layer_types(config.layers.len(), &["full_attention", "conv"])? {
        let layers = config.layers.iter_mut().zip(types);
        layers.for_each(|(layer, kind)| layer.recurrent = kind == "conv");
    } else if let Some(attends) = fields.list("full_attn_idxs")? {
        for (index, layer) in config.layers.iter_mut().enumerate() {
            layer.recurrent = !attends.iter().any(|attends| attends.as_u64() == Some(index as u64));
        }
    }
    Ok(())
}
