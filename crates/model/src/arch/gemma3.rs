//! Gemma 3: norms of heads, a window in five of six layers, which have a RoPE of their own.

use paguro_backend::QkNormKind;

use super::{
    Block, Config, Definition, gemma2,
    hf::{Defaults, Windows},
};
use crate::rope::RopeConfig;

/// EmbeddingGemma: attention in both directions, unless the file specifies otherwise.
pub(super) const EMBEDDING: Definition = Definition {
    gguf: "gemma-embedding",
    hf: &["Gemma3TextModel"],
    block: Block { bidirectional: true, ..DEF.block },
    from_gguf: |keys, config| {
        (DEF.from_gguf)(keys, config)?;
        halve_windows(config);
        Ok(())
    },
    from_hf: |fields, config| {
        (DEF.from_hf)(fields, config)?;
        config.block.bidirectional = fields.flag("use_bidirectional_attention")?.unwrap_or(false);
        if config.block.bidirectional {
            halve_windows(config);
        }
        config.tied = Some(true);
        Ok(())
    },
    ..DEF
};

/// Windows count in both directions together.
fn halve_windows(config: &mut Config) {
    for layer in &mut config.layers {
        layer.window = layer.window.map(|window| window / 2 + 1);
    }
}

pub(super) const DEF: Definition = Definition {
    gguf: "gemma3",
    hf: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    block: Block { qk_norm: Some(QkNormKind::Head), ..gemma2::BLOCK },
    from_gguf: |keys, config| {
        gemma2::from_gguf(keys, config)?;
        if config.layers.len() == 62 {
            gemma2::scale_by_share(config);
        }
        let cap = keys.number("final_logit_softcapping")?.filter(|&cap| cap != 0.0);
        config.logit_soft_cap = cap.map(|cap| cap as f32);
        keys.set_windows(config, None, 6)?;
        // Scaling applies only to layers without a window.
        let base = keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
        if config.layers.iter().any(|layer| layer.window.is_some()) {
            config.set_local_rope(RopeConfig::plain(config.ropes[0].style, config.ropes[0].dims, base));
        }
        Ok(())
    },
    // The text part of the multimodal models is written as its difference from the defaults.
    hf_defaults: |_| Defaults {
        layers: Some(26),
        hidden: Some(2304),
        ffn: Some(9216),
        heads: Some(8),
        kv_heads: Some(4),
        head_dim: Some(256),
        context_length: 131_072,
        rope_theta: 1e6,
        window: Some(4096),
        windows: Windows::Period(6),
        local_base: Some(10_000.0),
        tied: true,
        activation_keys: Defaults::GEMMA_ACTIVATION,
        ..Defaults::COMMON
    },
    from_hf: |fields, config| {
        gemma2::from_hf(fields, config)?;
        config.logit_soft_cap = fields.number("final_logit_softcapping")?.map(|cap| cap as f32);
        Ok(())
    },
    hf_names: gemma2::HF_NAMES,
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..Definition::LLAMA
};
