//! Qwen 1.5 and 2 with experts: weights that are not renormalized, and a shared expert with a gate on its output.

use super::{Definition, ExpertsConfig, Part, hf::Defaults, qwen2::QWEN};

pub(super) const DEF: Definition = Definition {
    gguf: "qwen2moe",
    hf: &["Qwen2MoeForCausalLM"],
    experts: Some(ExpertsConfig { renormalize: false, output_gate: true, ..ExpertsConfig::SOFTMAX }),
    from_gguf: |_, config| {
        if let Some(experts) = &mut config.experts
            && experts.shared == 0
        {
            experts.shared = config.ffn;
        }
        Ok(())
    },
    hf_defaults: |_| Defaults { kv_heads: Some(16), ..QWEN },
    from_hf: |fields, config| {
        let every = fields.size("decoder_sparse_step", Some(1))?.max(1);
        let dense = fields.list("mlp_only_layers")?.unwrap_or_default();
        for (index, layer) in config.layers.iter_mut().enumerate() {
            let listed = dense.iter().any(|layer| layer.as_u64() == Some(index as u64));
            layer.experts = !listed && (index + 1).is_multiple_of(every);
        }
        Ok(())
    },
    hf_names: &[
        (Part::SharedGate, "mlp.shared_expert.gate_proj"),
        (Part::SharedUp, "mlp.shared_expert.up_proj"),
        (Part::SharedDown, "mlp.shared_expert.down_proj"),
    ],
    ..Definition::LLAMA
};
