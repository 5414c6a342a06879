//! Phi 1.5 and 2: branches side by side behind one LayerNorm, no gates, biases everywhere.

use paguro_backend::{Activation, NormKind, Residual};

use super::{Block, Definition, Part, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "phi2",
    hf: &["PhiForCausalLM"],
    block: Block {
        norms: NormKind::Layer,
        one_norm: true,
        activation: Activation::GeluTanh,
        gated: false,
        residual: Residual::Parallel,
        ..Block::LLAMA
    },
    hf_defaults: |_| Defaults { norm_eps: 1e-5, partial_rotary_factor: 0.5, ..Defaults::COMMON },
    hf_names: &[
        (Part::AttentionOut, "self_attn.dense"),
        (Part::Up, "mlp.fc1"),
        (Part::Down, "mlp.fc2"),
        (Part::OutputNorm, "final_layernorm"),
    ],
    ..Definition::LLAMA
};
