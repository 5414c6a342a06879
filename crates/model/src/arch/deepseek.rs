//! DeepSeek V1 with experts: Llama with softmax scores as they are and shared experts.

use super::{Definition, ExpertsConfig, REORDERED};

pub(super) const DEF: Definition = Definition {
    gguf: "deepseek",
    hf: &["DeepseekForCausalLM"],
    rope_styles: REORDERED,
    experts: Some(ExpertsConfig { renormalize: false, ..ExpertsConfig::SOFTMAX }),
    from_hf: |fields, config| {
        let every = fields.size("moe_layer_freq", Some(1))?.max(1);
        let dense = config.experts.map_or(0, |experts| experts.dense_layers);
        for (index, layer) in config.layers.iter_mut().enumerate() {
            layer.experts = config.experts.is_some() && index >= dense && index.is_multiple_of(every);
        }
        Ok(())
    },
    ..Definition::LLAMA
};
