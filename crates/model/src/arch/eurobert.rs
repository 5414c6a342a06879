//! EuroBERT: Llama with attention in both directions.

use super::{Block, Definition, hf::Defaults};

pub(super) const DEF: Definition = Definition {
    gguf: "eurobert",
    hf: &["EuroBertModel", "EuroBertForMaskedLM"],
    block: Block { bidirectional: true, ..Block::LLAMA },
    hf_defaults: |_| Defaults {
        layers: Some(12),
        hidden: Some(768),
        ffn: Some(3072),
        heads: Some(12),
        context_length: 8192,
        norm_eps: 1e-5,
        rope_theta: 250_000.0,
        tied: true,
        ..Defaults::COMMON
    },
    from_hf: |_, config| {
        config.tied = Some(true);
        Ok(())
    },
    hf_ignored: &["lm_head."],
    ..Definition::LLAMA
};
