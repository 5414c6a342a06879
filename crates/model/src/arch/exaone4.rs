//! EXAONE 4: norms of the branches' output only; where some layers have a window, only those have RoPE.

use paguro_backend::QkNormKind;

use super::{
    Block, Definition,
    hf::{Defaults, Windows},
};

pub(super) const DEF: Definition = Definition {
    gguf: "exaone4",
    hf: &["Exaone4ForCausalLM"],
    block: Block { pre_norms: false, post_norms: true, qk_norm: Some(QkNormKind::Head), ..Block::LLAMA },
    gguf_keys: &["nextn_predict_layers"],
    from_gguf: |keys, config| {
        keys.set_windows(config, None, 4)?;
        if config.layers.iter().any(|layer| layer.window.is_some()) {
            config.rotate_windows_only();
        }
        Ok(())
    },
    hf_defaults: |_| Defaults {
        norm_eps: 1e-5,
        window: Some(4096),
        windows: Windows::Period(4),
        ..Defaults::COMMON
    },
    from_hf: |_, config| {
        if config.layers.iter().any(|layer| layer.window.is_some()) {
            config.rotate_windows_only();
        }
        Ok(())
    },
    ..Definition::LLAMA
};
