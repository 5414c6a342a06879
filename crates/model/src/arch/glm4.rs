//! GLM-4: norms after both branches, RoPE of neighbours in half of each head.

use super::{Block, Definition, INTERLEAVED, Part, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "glm4",
    hf: &["Glm4ForCausalLM"],
    block: Block { post_norms: true, fused_gate_up: true, ..Block::LLAMA },
    rope_styles: INTERLEAVED,
    gguf_keys: &["nextn_predict_layers"],
    hf_defaults: |_| Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        context_length: 131_072,
        norm_eps: 0.000_000_156_25,
        partial_rotary_factor: 0.5,
        ..Defaults::COMMON
    },
    hf_names: &[
        (Part::PostAttentionNorm, "post_self_attn_layernorm"),
        (Part::PostFfnNorm, "post_mlp_layernorm"),
    ],
    ..Definition::LLAMA
};
