//! Phi 3.5 MoE: LayerNorm, longrope, experts.

use paguro_backend::NormKind;

use super::{Block, Definition, ExpertsConfig};

/// Hugging Face's class is missing: its router weighs each of two experts by a softmax over the logits near its own, which
/// GGUF files and llama.cpp do not have.
pub(super) const DEF: Definition = Definition {
    gguf: "phimoe",
    // Its converter and llama.cpp take LayerNorm's epsilon from the key of RMS norms.
    block: Block { norms: NormKind::Layer, ..Block::LLAMA },
    experts: Some(ExpertsConfig::SOFTMAX),
    ..Definition::LLAMA
};
