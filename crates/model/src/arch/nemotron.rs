//! Nemotron 4 and Minitron: LayerNorm with weights around zero, squared ReLU without a gate.

use paguro_backend::{Activation, NormKind};

use super::{Block, Definition, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "nemotron",
    hf: &["NemotronForCausalLM"],
    block: Block { norms: NormKind::Layer, activation: Activation::Relu2, gated: false, ..Block::LLAMA },
    hf_defaults: |_| Defaults {
        context_length: 4096,
        norm_eps: 1e-5,
        partial_rotary_factor: 0.5,
        ..Defaults::COMMON
    },
    from_hf: |_, config| {
        config.norm_offset = 1.0;
        Ok(())
    },
    ..Definition::LLAMA
};
