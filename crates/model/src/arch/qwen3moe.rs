//! Qwen 3 with experts: 30B-A3B, Coder, 235B.

use super::{Definition, ExpertsConfig, hf::Defaults, qwen2::QWEN, qwen2moe, qwen3};

pub(super) const DEF: Definition = Definition {
    gguf: "qwen3moe",
    hf: &["Qwen3MoeForCausalLM"],
    block: qwen3::BLOCK,
    experts: Some(ExpertsConfig { renormalize: true, ..ExpertsConfig::SOFTMAX }),
    hf_defaults: |_| Defaults { kv_heads: Some(4), ..QWEN },
    from_hf: |fields, config| {
        // Files leave it out where it is off.
        if let Some(experts) = &mut config.experts {
            experts.renormalize = fields.flag("norm_topk_prob")?.unwrap_or(false);
        }
        (qwen2moe::DEF.from_hf)(fields, config)
    },
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..Definition::LLAMA
};
