//! Gemma 4: layers with a window and others differ in the size and number of their heads. V has a norm without weights,
//! and is K in the larger models' full layers. E2B and E4B have embeddings for each layer, and their last layers read
//! the K and V of earlier ones. 26B has experts beside dense networks. Its assistants are smaller models of the same layers, all of which
//! read the K and V of their model (`lower/assistant.rs`).

use paguro_backend::{QkNormKind, RopeStyle};

use super::{
    Block, Config, Definition, ExpertsConfig, Part, gemma2,
    gguf::Keys,
    hf::{Defaults, Fields},
};
use crate::{
    error::ModelError,
    rope::{Factors, RopeConfig},
};

pub(super) const DEF: Definition = Definition {
    gguf: "gemma4",
    hf: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"],
    block: Block {
        qk_norm: Some(QkNormKind::Head),
        v_norm: true,
        output_scale: true,
        varies: true,
        own_ropes: true,
        ..gemma2::BLOCK
    },
    experts: Some(ExpertsConfig { beside: true, ..ExpertsConfig::SOFTMAX }),
    gguf_keys: &["attention.shared_kv_layers", "embedding_length_per_layer_input"],
    from_gguf,
    hf_defaults: |_| Defaults {
        layers: Some(30),
        hidden: Some(2304),
        ffn: Some(9216),
        heads: Some(8),
        kv_heads: Some(4),
        head_dim: Some(256),
        context_length: 131_072,
        tied: true,
        activation_keys: Defaults::GEMMA_ACTIVATION,
        ..Defaults::COMMON
    },
    from_hf,
    hf_names: &[
        (Part::FfnNorm, "pre_feedforward_layernorm"),
        (Part::Router, "router.proj"),
        (Part::ExpertGateUp, "experts.gate_up_proj"),
        (Part::ExpertDowns, "experts.down_proj"),
    ],
    hf_ignored: &["vision_tower.", "vision_embedder.", "audio_tower.", "embed_vision.", "embed_audio."],
    ..Definition::LLAMA
};

pub(super) const ASSISTANT: Definition = Definition {
    gguf: "gemma4-assistant",
    hf: &["Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"],
    experts: None,
    gguf_keys: &[
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
        "nextn_predict_layers", // all of its layers
    ],
    drafts_for: Some(DEF.gguf),
    hf_ignored: &["masked_embedding."],
    ..DEF
};

/// Divisor of frequencies that are effectively zero, as in files.
const STILL: f32 = 1e30;

/// Sets the options that GGUF files and Hugging Face folders share. The last `shared` layers have no K and V of their own; no layer of an
/// assistant has.
fn finish(config: &mut Config, shared: usize) -> Result<(), ModelError> {
    config.embed_scale = (config.hidden as f32).sqrt();
    config.attention_scale = 1.0;
    let layers = config.layers.len();
    let own = match config.definition.drafts_for {
        Some(_) => 0,
        None if shared >= layers => {
            return Err(ModelError::Config(format!(
                "{shared} of {layers} layers read the K and V of others"
            )));
        }
        None => layers - shared,
    };
    config.layers[own..].iter_mut().for_each(|layer| layer.geometry.shares_kv = true);
    Ok(())
}

fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    keys.set_windows(config, None, 6)?;
    finish(config, keys.optional_size("attention.shared_kv_layers")?.unwrap_or(0))?;
    config.layer_embed = keys.optional_size("embedding_length_per_layer_input")?.unwrap_or(0);
    let cap = keys.number("final_logit_softcapping")?.filter(|&cap| cap != 0.0);
    config.logit_soft_cap = cap.map(|cap| cap as f32);
    let local_dim = keys.optional_size("attention.key_length_swa")?.unwrap_or(config.head_dim);
    let value_dim = keys.optional_size("attention.value_length_swa")?.unwrap_or(local_dim);
    if value_dim != local_dim {
        let what = format!("a value head ({value_dim}) unlike a key head ({local_dim})");
        return Err(ModelError::unsupported(what));
    }
    let kv_heads = keys.list("attention.head_count_kv");
    let widths = keys.list("feed_forward_length");
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let of_layer = |list: &Option<Vec<u32>>| Some(*list.as_ref()?.get(index)? as usize);
        layer.geometry.kv_heads = of_layer(&kv_heads);
        layer.geometry.ffn = of_layer(&widths);
        layer.geometry.head_dim = layer.window.map(|_| local_dim);
        layer.geometry.keys_as_values = layer.window.is_none();
    }
    let base = keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let dims = keys.optional_size("rope.dimension_count_swa")?.unwrap_or(local_dim);
    config.set_local_rope(RopeConfig::plain(config.ropes[0].style, dims, base));
    Ok(())
}

fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    const TYPES: [&str; 2] = ["full_attention", "sliding_attention"];
    if fields.text("use_bidirectional_attention")? == Some("all") {
        return Err(ModelError::unsupported("attention that is not causal (an embedding model)"));
    }
    let layers = config.layers.len();
    let mut local: Vec<bool> = match fields.layer_types(layers, &TYPES)? {
        Some(types) => types.into_iter().map(|kind| kind == TYPES[1]).collect(),
        None => (1..=layers).map(|layer| !layer.is_multiple_of(6)).collect(),
    };
    // transformers makes it so.
    local[layers - 1] = false;
    config.set_windows(fields.integer("sliding_window")?.or(Some(512)), &local);
    finish(config, fields.size("num_kv_shared_layers", Some(0))?)?;
    config.layer_embed = fields.size("hidden_size_per_layer_input", Some(256))?;
    config.logit_soft_cap = fields.number("final_logit_softcapping")?.map(|cap| cap as f32);

    let keys_as_values = fields.flag("attention_k_eq_v")?.unwrap_or(false);
    let wide = fields.flag("use_double_wide_mlp")?.unwrap_or(false);
    let full_dim = fields.size("global_head_dim", Some(512))?;
    let full_heads = fields.optional_size("num_global_key_value_heads")?.filter(|_| keys_as_values);
    let overrides = fields.object("per_layer_config")?;
    for (index, (layer, &local)) in config.layers.iter_mut().zip(&local).enumerate() {
        let geometry = &mut layer.geometry;
        geometry.keys_as_values = keys_as_values && !local;
        geometry.ffn = (wide && geometry.shares_kv).then(|| config.ffn.saturating_mul(2));
        match overrides {
            None if local => {}
            None => (geometry.head_dim, geometry.kv_heads) = (Some(full_dim), full_heads),
            Some(overrides) => {
                if let Some(own) = overrides.object(&index.to_string())? {
                    geometry.head_dim = own.optional_size("head_dim")?;
                    geometry.kv_heads = own.optional_size("num_key_value_heads")?;
                }
            }
        }
    }
    if !fields.flag("enable_moe_block")?.unwrap_or(false) {
        config.experts = None;
        config.layers.iter_mut().for_each(|layer| layer.experts = false);
    }
    // One RoPE for the layers of each type, whose heads have one size.
    for (kind, is_local, default_base) in [(TYPES[0], false, 1e6), (TYPES[1], true, 10_000.0)] {
        let Some(first) = local.iter().position(|&local| local == is_local) else { continue };
        let head_dim = config.head_dim_of(first);
        let of_kind = (0..layers).filter(|&layer| local[layer] == is_local);
        if of_kind.clone().any(|layer| config.head_dim_of(layer) != head_dim) {
            return Err(ModelError::unsupported(format!("heads of several sizes in layers of type {kind}")));
        }
        config.ropes.push(rope(fields, kind, default_base, head_dim)?);
        let index = config.ropes.len() - 1;
        of_kind.for_each(|layer| config.layers[layer].rope = Some(index));
    }
    Ok(())
}

/// Returns the RoPE of the layers of a type. The proportional kind has the frequencies of a whole head, of which a part
/// is effectively zero.
fn rope(
    fields: &Fields<'_>,
    kind: &str,
    default_base: f64,
    head_dim: usize,
) -> Result<RopeConfig, ModelError> {
    let all = fields.object("rope_parameters")?;
    let own = match all {
        Some(all) => all.object(kind)?,
        None => None,
    };
    let Some(own) = own else {
        let share = if kind == "full_attention" { 0.25 } else { 1.0 };
        return Ok(proportional(default_base, share, head_dim));
    };
    let base = own.number("rope_theta")?.unwrap_or(default_base);
    let mut rope = match own.text("rope_type")?.unwrap_or("default") {
        "default" => RopeConfig::plain(RopeStyle::HalfSplit, head_dim, base),
        "proportional" => proportional(base, own.number("partial_rotary_factor")?.unwrap_or(1.0), head_dim),
        other => {
            let what = format!("RoPE scaling `{other}`");
            return Err(ModelError::unsupported_but(what, "default, proportional"));
        }
    };
    rope.factor = own.number("factor")?.unwrap_or(1.0);
    Ok(rope)
}

fn proportional(base: f64, share: f64, head_dim: usize) -> RopeConfig {
    let pairs = head_dim / 2;
    let turning = ((share * head_dim as f64 / 2.0).floor() as usize).min(pairs); // rounds as transformers does
    let factors = (0..pairs).map(|pair| if pair < turning { 1.0 } else { STILL }).collect();
    let factors = if turning < pairs { Factors::Listed(factors) } else { Factors::None };
    RopeConfig { factors, ..RopeConfig::plain(RopeStyle::HalfSplit, head_dim, base) }
}
