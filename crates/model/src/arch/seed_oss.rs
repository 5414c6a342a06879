//! Seed-OSS: Llama with biases of Q, K and V.

use super::{Definition, Part, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "seed_oss",
    hf: &["SeedOssForCausalLM"],
    gguf_names: &[(Part::FfnNorm, "post_attention_norm")],
    hf_defaults: |_| Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 524_288,
        ..Defaults::COMMON
    },
    ..Definition::LLAMA
};
