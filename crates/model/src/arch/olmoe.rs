//! OLMoE: Llama with experts and norms of whole rows of queries and keys.

use paguro_backend::QkNormKind;

use super::{Block, Definition, ExpertsConfig, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "olmoe",
    hf: &["OlmoeForCausalLM"],
    block: Block { qk_norm: Some(QkNormKind::Row), ..Block::LLAMA },
    experts: Some(ExpertsConfig { renormalize: false, ..ExpertsConfig::SOFTMAX }),
    hf_defaults: |_| Defaults { context_length: 4096, norm_eps: 1e-5, ..Defaults::COMMON },
    from_hf: |fields, _| match fields.number("clip_qkv")? {
        None => Ok(()),
        Some(clip) => Err(crate::error::ModelError::unsupported(format!("`clip_qkv` = {clip}"))),
    },
    ..Definition::LLAMA
};
