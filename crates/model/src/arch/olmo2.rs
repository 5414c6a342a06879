//! OLMo 2 and 3: norms of the branches' output only, and of whole rows of queries and keys.

use paguro_backend::QkNormKind;

use super::{
    Block, Definition,
    hf::{Defaults, Windows},
};
use crate::rope::RopeConfig;

pub(super) const DEF: Definition = Definition {
    gguf: "olmo2",
    hf: &["Olmo2ForCausalLM", "Olmo3ForCausalLM"],
    block: Block { pre_norms: false, post_norms: true, qk_norm: Some(QkNormKind::Row), ..Block::LLAMA },
    from_gguf: |keys, config| {
        keys.set_windows(config, None, 4)?;
        if config.layers.iter().any(|layer| layer.window.is_some()) {
            // Scaling applies only to layers without a window.
            let global = &config.ropes[0];
            let base = keys.number("rope.freq_base_swa")?.unwrap_or(global.base);
            config.set_local_rope(RopeConfig::plain(global.style, global.dims, base));
        }
        Ok(())
    },
    hf_defaults: |class| match class {
        "Olmo3ForCausalLM" => Defaults {
            norm_eps: 1e-5,
            window: Some(4096),
            windows: Windows::Period(4),
            local_base: Some(0.0),
            ..Defaults::COMMON
        },
        _ => Defaults { norm_eps: 1e-5, ..Defaults::COMMON },
    },
    ..Definition::LLAMA
};
