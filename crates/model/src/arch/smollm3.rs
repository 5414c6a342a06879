//! SmolLM3: Llama, but every fourth layer has no RoPE.

use super::{
    Definition, REORDERED,
    hf::{Defaults, Windows},
};

pub(super) const DEF: Definition = Definition {
    gguf: "smollm3",
    hf: &["SmolLM3ForCausalLM"],
    rope_styles: REORDERED,
    from_gguf: |_, config| {
        for layer in config.layers.iter_mut().skip(3).step_by(4) {
            layer.rope = None;
        }
        Ok(())
    },
    hf_defaults: |_| Defaults {
        kv_heads: Some(4),
        context_length: 32_768,
        rope_theta: 2e6,
        windows: Windows::Qwen,
        tied: true,
        ..Defaults::COMMON
    },
    from_hf: |fields, config| {
        let listed = fields.list("no_rope_layers")?;
        let every = fields.size("no_rope_layer_interval", Some(4))?.max(1);
        for (index, layer) in config.layers.iter_mut().enumerate() {
            // In the list, 1 means RoPE.
            let rotates = match listed.and_then(|listed| listed.get(index)) {
                Some(rotates) => rotates.as_u64() != Some(0),
                None => !(index + 1).is_multiple_of(every),
            };
            layer.rope = layer.rope.filter(|_| rotates);
        }
        Ok(())
    },
    ..Definition::LLAMA
};
