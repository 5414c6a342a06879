//! Qwen 3: norms of query and key heads.

use paguro_backend::QkNormKind;

use super::{Block, Definition, hf::Defaults, qwen2::QWEN};

pub(super) const DEF: Definition = Definition {
    gguf: "qwen3",
    hf: &["Qwen3ForCausalLM"],
    block: BLOCK,
    hf_defaults: |_| Defaults { head_dim: Some(128), ..QWEN },
    hf_ignored: &["vision_tower.", "multi_modal_projector."],
    ..Definition::LLAMA
};

pub(super) const BLOCK: Block = Block { qk_norm: Some(QkNormKind::Head), ..Block::LLAMA };
