//! Llama 1 to 3, and all that are one: TinyLlama, Mistral, SmolLM, Yi; with experts Mixtral.

use super::{
    Definition, ExpertsConfig, Part, REORDERED,
    hf::{Defaults, Windows},
};

pub(super) const DEF: Definition = Definition {
    hf: &["LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"],
    rope_styles: REORDERED,
    experts: Some(ExpertsConfig::SOFTMAX),
    // A window in the file applies. llama.cpp ignores Mistral's, but transformers, with which the model was published,
    // uses it.
    from_gguf: |keys, config| keys.set_windows(config, None, 0),
    hf_defaults: |class| match class {
        "MistralForCausalLM" => Defaults {
            kv_heads: Some(8),
            context_length: 4096 * 32,
            window: Some(4096),
            windows: Windows::All,
            ..Defaults::COMMON
        },
        "MixtralForCausalLM" => Defaults {
            kv_heads: Some(8),
            context_length: 4096 * 32,
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::All,
            ..Defaults::COMMON
        },
        _ => Defaults::COMMON,
    },
    hf_ignored: &["vision_tower.", "multi_modal_projector.", "vision_model.", "connector."],
    hf_names: &[
        (Part::Router, "block_sparse_moe.gate"),
        (Part::ExpertGate, "block_sparse_moe.experts.{}.w1"),
        (Part::ExpertDown, "block_sparse_moe.experts.{}.w2"),
        (Part::ExpertUp, "block_sparse_moe.experts.{}.w3"),
    ],
    ..Definition::LLAMA
};
