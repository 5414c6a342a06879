//! MiniMax M2: experts with sigmoid scores and a bias for the choice, norms of whole rows of queries and keys.

use paguro_backend::QkNormKind;

use super::{Block, Definition, ExpertsConfig, Part, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "minimax-m2",
    hf: &["MiniMaxM2ForCausalLM"],
    block: Block { qk_norm: Some(QkNormKind::Row), ..Block::LLAMA },
    experts: Some(ExpertsConfig::SIGMOID),
    hf_defaults: |_| Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 196_608,
        rope_theta: 5e6,
        ..Defaults::COMMON
    },
    hf_names: &[
        (Part::Router, "block_sparse_moe.gate"),
        (Part::SelectionBias, "block_sparse_moe.e_score_correction_bias"),
        (Part::ExpertGate, "block_sparse_moe.experts.{}.w1"),
        (Part::ExpertDown, "block_sparse_moe.experts.{}.w2"),
        (Part::ExpertUp, "block_sparse_moe.experts.{}.w3"),
    ],
    ..Definition::LLAMA
};
