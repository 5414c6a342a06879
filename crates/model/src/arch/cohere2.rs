//! Command R7B and A: branches side by side behind one LayerNorm, RoPE only in the layers with a window.

use paguro_backend::{NormKind, Residual};

use super::{
    Block, Definition, INTERLEAVED,
    hf::{Defaults, Windows},
};

pub(super) const DEF: Definition = Definition {
    gguf: "cohere2",
    hf: &["Cohere2ForCausalLM"],
    block: Block { norms: NormKind::Layer, one_norm: true, residual: Residual::Parallel, ..Block::LLAMA },
    rope_styles: INTERLEAVED,
    gguf_keys: &["logit_scale"],
    from_gguf: |keys, config| {
        config.logit_scale = keys.number("logit_scale")?.ok_or_else(|| keys.missing("logit_scale"))? as f32;
        config.tied = Some(true);
        keys.set_windows(config, None, 4)?;
        config.rotate_windows_only();
        Ok(())
    },
    hf_defaults: |_| Defaults {
        context_length: 8192,
        norm_eps: 1e-5,
        window: Some(4096),
        windows: Windows::Period(4),
        tied: true,
        ..Defaults::COMMON
    },
    from_hf: |fields, config| {
        config.logit_scale = fields.number("logit_scale")?.unwrap_or(0.0625) as f32;
        config.rotate_windows_only();
        Ok(())
    },
    ..Definition::LLAMA
};
