//! Granite 4: scans in most layers, attention in the others, mostly without positions; Granite's multipliers; a dense network, or
//! experts with a shared one.

use super::{
    Block, Config, Definition, ExpertsConfig, Part, REORDERED,
    gguf::Keys,
    granite,
    hf::{Defaults, Fields},
    mamba2,
};
use crate::{error::ModelError, gguf::Value};

pub(super) const DEF: Definition = Definition {
    gguf: "granitehybrid",
    hf: &["GraniteMoeHybridForCausalLM"],
    block: Block { zeros: true, ..Block::LLAMA },
    rope_styles: REORDERED,
    experts: Some(ExpertsConfig::SOFTMAX),
    gguf_keys: &["ssm.state_size", "logit_scale", "residual_scale", "embedding_scale", "attention.scale"],
    from_gguf,
    to_gguf: |config| {
        if !config.layers.iter().any(|layer| layer.recurrent) {
            config.definition = if config.experts.is_some() { &granite::MOE } else { &granite::DEF };
        }
    },
    further_gguf_keys: |config| {
        let mut keys = granite::divisor(config);
        if config.recurrent.is_some() {
            // A switch, to llama.cpp.
            let turns = config.layers.iter().any(|layer| layer.rope.is_some());
            keys.push(("rope.scaling.finetuned", Value::Bool(turns)));
        }
        keys
    },
    hf_defaults: |_| Defaults::COMMON,
    from_hf,
    hf_names: &[
        (Part::GateUp, "shared_mlp.input_linear"),
        (Part::Down, "shared_mlp.output_linear"),
        (Part::Router, "block_sparse_moe.router.layer"),
        (Part::ExpertGateUp, "block_sparse_moe.input_linear.weight"),
        (Part::ExpertDowns, "block_sparse_moe.output_linear.weight"),
        (Part::SharedGateUp, "shared_mlp.input_linear"),
        (Part::SharedDown, "shared_mlp.output_linear"),
        (Part::Conv, "mamba.conv1d"),
        (Part::DeltaDt, "mamba.dt_bias"),
        (Part::DeltaDecay, "mamba.A_log"),
        (Part::DeltaNorm, "mamba.norm"),
        (Part::DeltaOut, "mamba.out_proj"),
    ],
    ..Definition::LLAMA
};

fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    granite::from_gguf(keys, config)?;
    config.recurrent = Some(mamba2::scan_from_gguf(keys)?);
    let kv_heads = keys.list("attention.head_count_kv").unwrap_or_default();
    // llama.cpp uses this key as a switch.
    let turns = keys.flag("rope.scaling.finetuned").unwrap_or(true);
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.recurrent = kv_heads.get(index).is_some_and(|&heads| heads == 0);
        layer.rope = layer.rope.filter(|_| turns);
    }
    Ok(())
}

fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    granite::from_hf(fields, config)?;
    let width = mamba2::expanded(fields, config)?;
    config.recurrent = Some(mamba2::scan_from_hf(fields, width)?);
    let shared = fields.size("shared_intermediate_size", Some(1024))?;
    match &mut config.experts {
        Some(experts) if experts.count > 0 => experts.shared = shared,
        _ => {
            config.experts = None;
            config.block.fused_gate_up = true;
            config.ffn = shared;
            config.layers.iter_mut().for_each(|layer| layer.experts = false);
        }
    }
    const TYPES: [&str; 4] = ["mamba", "linear_attention", "attention", "full_attention"];
    let layers = config.layers.len();
    let types = match fields.layer_types(layers, &TYPES)? {
        Some(types) => types,
        None => vec![TYPES[0]; layers],
    };
    let turns = fields.text("position_embedding_type")? == Some("rope");
    for (layer, kind) in config.layers.iter_mut().zip(types) {
        layer.recurrent = TYPES[..2].contains(&kind);
        layer.rope = layer.rope.filter(|_| turns);
    }
    Ok(())
}
