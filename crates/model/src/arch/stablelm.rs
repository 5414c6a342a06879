//! StableLM: Llama with LayerNorm and RoPE in a quarter of each head.

use paguro_backend::NormKind;

use super::{Block, Definition, hf::Defaults};
use crate::error::ModelError;

pub(super) const DEF: Definition = Definition {
    gguf: "stablelm",
    hf: &["StableLmForCausalLM"],
    block: Block { norms: NormKind::Layer, ..Block::LLAMA },
    hf_defaults: |_| Defaults {
        context_length: 4096,
        norm_eps: 1e-5,
        partial_rotary_factor: 0.25,
        ..Defaults::COMMON
    },
    from_hf: |fields, _| {
        for key in ["qk_layernorm", "use_parallel_residual"] {
            if fields.flag(key)? == Some(true) {
                return Err(ModelError::unsupported(format!("`{key}` (of StableLM 2 12B)")));
            }
        }
        Ok(())
    },
    ..Definition::LLAMA
};
