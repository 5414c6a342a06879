//! Hunyuan, dense and with experts: norms of query and key heads after RoPE.

use paguro_backend::QkNormKind;

use super::{Block, Definition, ExpertsConfig, Part, hf::Defaults};

pub(super) const DENSE: Definition = Definition {
    gguf: "hunyuan-dense",
    hf: &["HunYuanDenseV1ForCausalLM"],
    block: BLOCK,
    hf_defaults: |_| Defaults { norm_eps: 1e-5, ..Defaults::COMMON },
    hf_names: &[(Part::QNorm, "self_attn.query_layernorm"), (Part::KNorm, "self_attn.key_layernorm")],
    ..Definition::LLAMA
};

pub(super) const MOE: Definition = Definition {
    gguf: "hunyuan-moe",
    hf: &["HunYuanMoEV1ForCausalLM"],
    block: BLOCK,
    experts: Some(ExpertsConfig::SOFTMAX),
    from_gguf: |_, config| {
        if let Some(experts) = &mut config.experts
            && experts.shared == 0
        {
            experts.shared = config.ffn;
        }
        Ok(())
    },
    hf_defaults: |_| Defaults { norm_eps: 1e-5, ..Defaults::COMMON },
    from_hf: |_, config| {
        if let Some(experts) = &mut config.experts {
            experts.shared = config.ffn;
        }
        Ok(())
    },
    hf_names: &[
        (Part::QNorm, "self_attn.query_layernorm"),
        (Part::KNorm, "self_attn.key_layernorm"),
        (Part::Router, "mlp.gate.wg"),
        (Part::SharedGate, "mlp.shared_mlp.gate_proj"),
        (Part::SharedUp, "mlp.shared_mlp.up_proj"),
        (Part::SharedDown, "mlp.shared_mlp.down_proj"),
    ],
    ..Definition::LLAMA
};

const BLOCK: Block = Block { qk_norm: Some(QkNormKind::HeadAfterRope), ..Block::LLAMA };
