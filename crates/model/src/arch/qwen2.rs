//! Qwen 2 and 2.5: biases of Q, K and V, which every architecture may have.

use super::{
    Definition,
    hf::{Defaults, Windows},
};

pub(super) const DEF: Definition = Definition {
    gguf: "qwen2",
    hf: &["Qwen2ForCausalLM"],
    // GGUF files carry a window although it is off.
    hf_defaults: |_| QWEN,
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..Definition::LLAMA
};

/// Defaults common to Qwen's classes.
pub(super) const QWEN: Defaults = Defaults {
    kv_heads: Some(32),
    context_length: 32_768,
    window: Some(4096),
    windows: Windows::Qwen,
    ..Defaults::COMMON
};
