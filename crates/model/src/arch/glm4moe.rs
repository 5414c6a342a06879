//! GLM-4.5, 4.6 and 4.7, GLM-4.5V and 4.6V: experts with sigmoid scores, a bias for the choice and a shared expert.

use paguro_backend::QkNormKind;

use super::{Block, Definition, ExpertsConfig, Part, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "glm4moe",
    hf: &["Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"],
    // Only the largest of them have norms of heads.
    block: Block { qk_norm: Some(QkNormKind::Head), optional_qk_norm: true, ..Block::LLAMA },
    experts: Some(ExpertsConfig::SIGMOID),
    gguf_keys: &["nextn_predict_layers", "rope.dimension_sections"],
    mtp: true,
    gguf_names: &[(Part::FfnNorm, "post_attention_norm")],
    hf_defaults: |_| Defaults {
        kv_heads: Some(8),
        context_length: 131_072,
        norm_eps: 1e-5,
        partial_rotary_factor: 0.5,
        ..Defaults::COMMON
    },
    hf_ignored: &["visual."],
    ..Definition::LLAMA
};
