//! Gemma 2: soft caps, norms after both branches, a window in every second layer.

use paguro_backend::Activation;

use super::{
    Block, Config, Definition, Part,
    gguf::Keys,
    hf::{Defaults, Fields, Windows},
};
use crate::error::ModelError;

pub(super) const DEF: Definition = Definition {
    gguf: "gemma2",
    hf: &["Gemma2ForCausalLM"],
    block: BLOCK,
    from_gguf: |keys, config| {
        from_gguf(keys, config)?;
        if config.layers.len() == 46 {
            scale_by_share(config);
        }
        config.tied = Some(true);
        let cap = |key, default| Ok::<_, ModelError>(keys.number(key)?.unwrap_or(default));
        config.attention_soft_cap =
            Some(cap("attn_logit_softcapping", 50.0)? as f32).filter(|&cap| cap != 0.0);
        config.logit_soft_cap = Some(cap("final_logit_softcapping", 30.0)? as f32).filter(|&cap| cap != 0.0);
        keys.set_windows(config, Some(4096), 2)
    },
    hf_defaults: |_| Defaults {
        kv_heads: Some(4),
        head_dim: Some(256),
        context_length: 8192,
        window: Some(4096),
        windows: Windows::Period(2),
        tied: true,
        activation_keys: Defaults::GEMMA_ACTIVATION,
        ..Defaults::COMMON
    },
    from_hf: |fields, config| {
        from_hf(fields, config)?;
        let cap = |key, default| match fields.has(key) {
            true => fields.number(key),
            false => Ok(Some(default)),
        };
        config.attention_soft_cap = cap("attn_logit_softcapping", 50.0)?.map(|cap| cap as f32);
        config.logit_soft_cap = cap("final_logit_softcapping", 30.0)?.map(|cap| cap as f32);
        Ok(())
    },
    hf_names: HF_NAMES,
    ..Definition::LLAMA
};

/// Gemma's layers.
pub(super) const BLOCK: Block = Block { post_norms: true, activation: Activation::GeluTanh, ..Block::LLAMA };

pub(super) const HF_NAMES: &[(Part, &str)] = &[(Part::FfnNorm, "pre_feedforward_layernorm")];

/// Reads the GGUF metadata common to Gemma's architectures.
pub(super) fn from_gguf(_: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    config.embed_scale = (config.hidden as f32).sqrt();
    Ok(())
}

/// The 27B models scale scores by the share of the hidden size that a head has. They are known by their number of
/// layers, because the key that Hugging Face's configuration has for it is not converted.
pub(super) fn scale_by_share(config: &mut Config) {
    if let Some(width) = config.hidden.checked_div(config.heads) {
        config.attention_scale = 1.0 / (width as f32).sqrt();
    }
}

/// Reads the fields of `config.json` common to Gemma's architectures.
pub(super) fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    config.embed_scale = (config.hidden as f32).sqrt();
    config.norm_offset = 1.0;
    let scale = fields.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    config.attention_scale = 1.0 / scale.sqrt() as f32;
    Ok(())
}
