//! StarCoder 2: LayerNorm, GELU without a gate, biases everywhere.

use paguro_backend::{Activation, NormKind};

use super::{
    Block, Definition, Part,
    hf::{Defaults, Windows},
};

pub(super) const DEF: Definition = Definition {
    gguf: "starcoder2",
    hf: &["Starcoder2ForCausalLM"],
    block: Block { norms: NormKind::Layer, activation: Activation::GeluTanh, gated: false, ..Block::LLAMA },
    from_gguf: |keys, config| keys.set_windows(config, None, 0),
    hf_defaults: |_| Defaults {
        kv_heads: Some(2),
        context_length: 4096,
        norm_eps: 1e-5,
        windows: Windows::All,
        tied: true,
        ..Defaults::COMMON
    },
    hf_names: &[(Part::Up, "mlp.c_fc"), (Part::Down, "mlp.c_proj")],
    ..Definition::LLAMA
};
