//! Phi 3 and 4: fused matrices, longrope.

use super::{
    Block, Definition,
    hf::{Defaults, Windows},
};

pub(super) const DEF: Definition = Definition {
    gguf: "phi3",
    hf: &["Phi3ForCausalLM"],
    block: Block { fused_gate_up: true, ..Block::LLAMA },
    // llama.cpp leaves its window out; transformers, which it was published with, does not.
    from_gguf: |keys, config| keys.set_windows(config, None, 0),
    hf_defaults: |_| Defaults {
        context_length: 4096,
        norm_eps: 1e-5,
        windows: Windows::All,
        ..Defaults::COMMON
    },
    ..Definition::LLAMA
};
