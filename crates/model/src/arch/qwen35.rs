//! Qwen 3.5 and 3.6, Qwen3-Next: the gated delta rule in three of four layers, attention with a gate on its output in
//! the others. In Hugging Face's files, weights of norms are differences from one, except for the norm of a delta
//! rule's output. A head for multi-token prediction has attention, and experts where the model has them.

use paguro_backend::{DeltaShape, QkNormKind};

use super::{
    Block, Config, Definition, DeltaFiles, ExpertsConfig, Part, Recurrent,
    gguf::Keys,
    hf::{Defaults, Fields},
};
use crate::error::ModelError;

const BLOCK: Block = Block { qk_norm: Some(QkNormKind::Head), attention_gate: true, ..Block::LLAMA };

const EXPERTS: ExpertsConfig = ExpertsConfig { output_gate: true, ..ExpertsConfig::SOFTMAX };

pub(super) const DENSE: Definition = Definition {
    gguf: "qwen35",
    hf: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
    block: BLOCK,
    gguf_keys: GGUF_KEYS,
    from_gguf: |keys, config| from_gguf(keys, config, ALTERNATING),
    hf_defaults: |_| DEFAULTS,
    from_hf: |fields, config| from_hf(fields, config, ALTERNATING),
    gguf_names: GGUF_NAMES,
    mtp: true,
    hf_ignored: HF_IGNORED,
    ..Definition::LLAMA
};

pub(super) const MOE: Definition = Definition {
    gguf: "qwen35moe",
    hf: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
    experts: Some(EXPERTS),
    hf_defaults: |_| Defaults { kv_heads: Some(2), ..DEFAULTS },
    from_hf: |fields, config| {
        config.experts.iter_mut().for_each(|experts| experts.renormalize = true);
        from_hf(fields, config, ALTERNATING)
    },
    hf_names: HF_NAMES,
    ..DENSE
};

pub(super) const NEXT: Definition = Definition {
    gguf: "qwen3next",
    hf: &["Qwen3NextForCausalLM"],
    experts: Some(EXPERTS),
    from_gguf: |keys, config| from_gguf(keys, config, CONSECUTIVE),
    hf_defaults: |_| Defaults { kv_heads: Some(2), ..DEFAULTS },
    from_hf: |fields, config| {
        (super::qwen2moe::DEF.from_hf)(fields, config)?;
        from_hf(fields, config, CONSECUTIVE)
    },
    hf_names: HF_NAMES,
    ..DENSE
};

const ALTERNATING: DeltaFiles = DeltaFiles { alternating: true };
const CONSECUTIVE: DeltaFiles = DeltaFiles { alternating: false };

const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(4),
    head_dim: Some(256),
    context_length: 32_768,
    partial_rotary_factor: 0.25,
    ..Defaults::COMMON
};

const GGUF_KEYS: &[&str] = &[
    "ssm.state_size",
    "rope.dimension_sections", // of text, RoPE in sections is plain RoPE
    "nextn_predict_layers",
];

const GGUF_NAMES: &[(Part, &str)] = &[(Part::FfnNorm, "post_attention_norm")];

const HF_NAMES: &[(Part, &str)] = &[
    (Part::SharedGate, "mlp.shared_expert.gate_proj"),
    (Part::SharedUp, "mlp.shared_expert.up_proj"),
    (Part::SharedDown, "mlp.shared_expert.down_proj"),
];

const HF_IGNORED: &[&str] = &["visual.", "mtp."];

/// Distance of layers with attention, if files do not list them.
const INTERVAL: usize = 4;

fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config, files: DeltaFiles) -> Result<(), ModelError> {
    let (heads, all) = (keys.size("ssm.time_step_rank")?, keys.size("ssm.inner_size")?);
    let shape = DeltaShape {
        key_heads: keys.size("ssm.group_count")?,
        value_heads: heads,
        key_dim: keys.size("ssm.state_size")?,
        value_dim: all.checked_div(heads).unwrap_or(0), // no heads are refused later
    };
    config.recurrent = Some(Recurrent::Delta { taps: keys.size("ssm.conv_kernel")?, shape, files });
    match keys.list("attention.recurrent_layers") {
        Some(listed) if listed.len() >= config.layers.len() => {
            let layers = config.layers.iter_mut().zip(listed);
            layers.for_each(|(layer, listed)| layer.recurrent = listed != 0);
        }
        Some(listed) => {
            let (count, layers) = (listed.len(), config.layers.len());
            let problem = format!("`attention.recurrent_layers` has {count} entries for {layers} layers");
            return Err(ModelError::Config(problem));
        }
        None => {
            config.set_recurrent_period(keys.optional_size("full_attention_interval")?.unwrap_or(INTERVAL))
        }
    }
    if let Some(experts) = &mut config.experts
        && experts.shared == 0
    {
        experts.shared = config.ffn;
    }
    Ok(())
}

fn from_hf(fields: &Fields<'_>, config: &mut Config, files: DeltaFiles) -> Result<(), ModelError> {
    config.norm_offset = 1.0;
    let shape = DeltaShape {
        key_heads: fields.size("linear_num_key_heads", Some(16))?,
        value_heads: fields.size("linear_num_value_heads", Some(32))?,
        key_dim: fields.size("linear_key_head_dim", Some(128))?,
        value_dim: fields.size("linear_value_head_dim", Some(128))?,
    };
    let taps = fields.size("linear_conv_kernel_dim", Some(4))?;
    config.recurrent = Some(Recurrent::Delta { taps, shape, files });
    match fields.layer_types(config.layers.len(), &["full_attention", "linear_attention"])? {
        Some(types) => {
            let layers = config.layers.iter_mut().zip(types);
            layers.for_each(|(layer, kind)| layer.recurrent = kind == "linear_attention");
        }
        None => config.set_recurrent_period(fields.size("full_attention_interval", Some(INTERVAL))?),
    }
    Ok(())
}
