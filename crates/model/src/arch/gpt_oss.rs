//! gpt-oss: sinks, a window in every second layer, experts with biases and a clamped SwiGLU.

use paguro_backend::Activation;

use super::{
    Block, Definition, ExpertsConfig, Part,
    hf::{Defaults, Windows},
};

pub(super) const DEF: Definition = Definition {
    gguf: "gpt-oss",
    hf: &["GptOssForCausalLM"],
    block: Block {
        sinks: true,
        activation: Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        ..Block::LLAMA
    },
    // The softmax over the chosen experts' logits is the one over all of them, renormalized.
    experts: Some(ExpertsConfig { transposed: true, alternating: true, ..ExpertsConfig::SOFTMAX }),
    from_gguf: |keys, config| {
        // YaRN's ramp does not end at whole pairs in these models; GGUF has no key for that, and llama.cpp rounds.
        for rope in &mut config.ropes {
            rope.yarn.iter_mut().for_each(|yarn| yarn.truncate = false);
        }
        keys.set_windows(config, None, 2)
    },
    gguf_names: &[(Part::FfnNorm, "post_attention_norm")],
    hf_defaults: |_| Defaults {
        kv_heads: Some(8),
        head_dim: Some(64),
        context_length: 131_072,
        norm_eps: 1e-5,
        rope_theta: 150_000.0,
        window: Some(128),
        windows: Windows::Period(2),
        ..Defaults::COMMON
    },
    hf_names: &[(Part::Router, "mlp.router")],
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..Definition::LLAMA
};
