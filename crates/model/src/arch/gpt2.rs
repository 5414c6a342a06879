//! GPT-2: learned positions, LayerNorm, GELU without a gate.

use paguro_backend::{Activation, NormKind};

use super::{Block, Definition, HfMatrices, Part, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "gpt2",
    hf: &["GPT2LMHeadModel"],
    block: Block {
        norms: NormKind::Layer,
        activation: Activation::GeluTanh,
        gated: false,
        positions: true,
        ..Block::LLAMA
    },
    hf_defaults: |_| Defaults {
        layers: Some(12),
        hidden: Some(768),
        heads: Some(12),
        context_length: 1024,
        norm_eps: 1e-5,
        tied: true,
        ..Defaults::COMMON
    },
    hf_names: &[
        (Part::Embedding, "wte"),
        (Part::OutputNorm, "ln_f"),
        (Part::AttentionNorm, "ln_1"),
        (Part::Qkv, "attn.c_attn"),
        (Part::AttentionOut, "attn.c_proj"),
        (Part::FfnNorm, "ln_2"),
        (Part::Up, "mlp.c_fc"),
        (Part::Down, "mlp.c_proj"),
    ],
    hf_layers: "h",
    hf_matrices: HfMatrices::Transposed,
    // Causal masks.
    hf_ignored: &[".attn.bias", ".attn.masked_bias"],
    ..Definition::LLAMA
};
