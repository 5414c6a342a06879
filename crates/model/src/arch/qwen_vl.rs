//! The text parts of Qwen 2, 2.5 and 3 VL: of text, RoPE in sections is plain RoPE.

use super::{Definition, ExpertsConfig, hf::Defaults, qwen2::QWEN, qwen3, qwen3moe};

pub(super) const QWEN2_VL: Definition = Definition {
    gguf: "qwen2vl",
    hf: &["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"],
    gguf_keys: &["rope.dimension_sections"],
    hf_defaults: |_| QWEN,
    hf_ignored: &["visual."],
    ..Definition::LLAMA
};

pub(super) const QWEN3_VL: Definition = Definition {
    gguf: "qwen3vl",
    hf: &["Qwen3VLForConditionalGeneration"],
    block: qwen3::BLOCK,
    gguf_keys: &["rope.dimension_sections", "n_deepstack_layers"],
    hf_defaults: |_| VL3,
    hf_ignored: &["visual."],
    ..Definition::LLAMA
};

pub(super) const QWEN3_VL_MOE: Definition = Definition {
    gguf: "qwen3vlmoe",
    hf: &["Qwen3VLMoeForConditionalGeneration"],
    block: qwen3::BLOCK,
    experts: Some(ExpertsConfig { transposed: true, ..ExpertsConfig::SOFTMAX }),
    gguf_keys: &["rope.dimension_sections", "n_deepstack_layers"],
    hf_defaults: |_| Defaults { kv_heads: Some(16), head_dim: None, ..VL3 },
    // The weights of its router are always renormalized.
    from_hf: |fields, config| {
        (qwen3moe::DEF.from_hf)(fields, config)?;
        config.experts.iter_mut().for_each(|experts| experts.renormalize = true);
        Ok(())
    },
    hf_ignored: &["visual."],
    ..Definition::LLAMA
};

const VL3: Defaults = Defaults {
    head_dim: Some(128),
    context_length: 128_000,
    rope_theta: 5e6,
    windows: super::hf::Windows::Never,
    ..QWEN
};
