//! Nemotron-H, Nemotron Nano 2 and 3: each layer is one of a scan, attention without positions, a feed-forward network
//! with squared ReLU, and experts of such networks, some of them with rows of their own width.

use paguro_backend::{Activation, DeltaShape};

use super::{
    Block, Config, Definition, ExpertsConfig, Part, Recurrent, SsdConfig,
    gguf::Keys,
    hf::{Defaults, Fields},
    mamba2,
};
use crate::{error::ModelError, gguf::Value};

const BLOCK: Block = Block { activation: Activation::Relu2, gated: false, zeros: true, ..Block::LLAMA };

pub(super) const DENSE: Definition = Definition {
    gguf: "nemotron_h",
    block: BLOCK,
    gguf_keys: KEYS,
    from_gguf,
    further_gguf_keys,
    gguf_names: &[(Part::FfnNorm, "attn_norm")],
    ..Definition::LLAMA
};

/// Also all of Hugging Face's: its class is one.
pub(super) const MOE: Definition = Definition {
    gguf: "nemotron_h_moe",
    hf: &["NemotronHForCausalLM"],
    block: BLOCK,
    experts: Some(ExpertsConfig::SIGMOID),
    gguf_keys: KEYS,
    from_gguf,
    to_gguf: |config| {
        if config.experts.is_none() {
            config.definition = &DENSE;
        }
        if let Some(Recurrent::Ssd(scan)) = &mut config.recurrent {
            // Files of llama.cpp do not have the least step, a thousandth.
            scan.limits = (0.0, f32::INFINITY);
        }
    },
    further_gguf_keys,
    hf_defaults: |_| Defaults {
        hidden: Some(4096),
        heads: Some(32),
        kv_heads: Some(8),
        head_dim: Some(128),
        ffn: Some(21_504),
        context_length: 4096,
        norm_eps: 1e-5,
        ..Defaults::COMMON
    },
    from_hf,
    gguf_names: &[(Part::FfnNorm, "attn_norm")],
    hf_names: &[
        (Part::Embedding, "embeddings"),
        (Part::OutputNorm, "norm_f"),
        (Part::AttentionNorm, "norm"),
        (Part::FfnNorm, "norm"),
        (Part::Q, "mixer.q_proj"),
        (Part::K, "mixer.k_proj"),
        (Part::V, "mixer.v_proj"),
        (Part::Qkv, "mixer.qkv_proj"),
        (Part::AttentionOut, "mixer.o_proj"),
        (Part::Up, "mixer.up_proj"),
        (Part::Down, "mixer.down_proj"),
        (Part::Router, "mixer.gate"),
        (Part::SelectionBias, "mixer.gate.e_score_correction_bias"),
        (Part::ExpertUp, "mixer.experts.{}.up_proj"),
        (Part::ExpertDown, "mixer.experts.{}.down_proj"),
        (Part::ExpertGateUp, "mixer.experts.gate_up_proj"),
        (Part::SharedUp, "mixer.shared_experts.up_proj"),
        (Part::SharedDown, "mixer.shared_experts.down_proj"),
        (Part::ExpertsIn, "mixer.fc1_latent_proj"),
        (Part::ExpertsOut, "mixer.fc2_latent_proj"),
        (Part::SsmIn, "mixer.in_proj"),
        (Part::Conv, "mixer.conv1d"),
        (Part::DeltaDt, "mixer.dt_bias"),
        (Part::DeltaDecay, "mixer.A_log"),
        (Part::SsmSkip, "mixer.D"),
        (Part::DeltaNorm, "mixer.norm"),
        (Part::DeltaOut, "mixer.out_proj"),
    ],
    hf_ignored: &["mtp."],
    ..Definition::LLAMA
};

const KEYS: &[&str] = &[
    "ssm.state_size",
    "attention.scale",
    "attention.layer_norm_epsilon",
    "nextn_predict_layers",
    "moe_latent_size",
];

/// The one part of a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Scan,
    Attention,
    Dense,
    Experts,
}

fn set_kinds(config: &mut Config, kinds: impl Iterator<Item = Kind>) {
    for (layer, kind) in config.layers.iter_mut().zip(kinds) {
        layer.rope = None;
        layer.recurrent = kind == Kind::Scan;
        layer.mixer = matches!(kind, Kind::Scan | Kind::Attention);
        layer.network = !layer.mixer;
        layer.experts = kind == Kind::Experts;
    }
}

/// llama.cpp reads the norms' epsilon also where LayerNorm has it.
fn further_gguf_keys(config: &Config) -> Vec<(&'static str, Value)> {
    vec![("attention.layer_norm_epsilon", Value::F32(config.norm_eps))]
}

fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    config.recurrent = Some(mamba2::scan_from_gguf(keys)?);
    let layers = config.layers.len();
    let list = |key: &str| {
        let listed = keys.list(key).filter(|listed| listed.len() >= layers);
        listed.ok_or_else(|| {
            ModelError::Config(format!("`{}.{key}` does not list {layers} layers", config.definition.gguf))
        })
    };
    let (kv_heads, widths) = (list("attention.head_count_kv")?, list("feed_forward_length")?);
    let network = if config.experts.is_some() { Kind::Experts } else { Kind::Dense };
    let kind = |(kv_heads, width): (u32, u32)| match (kv_heads, width) {
        (0, 0) => Kind::Scan,
        (_, 0) => Kind::Attention,
        _ => network,
    };
    set_kinds(config, kv_heads.into_iter().zip(widths).map(kind));
    if let Some(scale) = keys.number("attention.scale")?.filter(|&scale| scale != 0.0) {
        config.attention_scale = scale as f32;
    }
    Ok(())
}

fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    let either = |old: &str, new: &str, default: usize| fields.size_of(&[old, new], Some(default));
    let shape = DeltaShape {
        key_heads: either("mamba_n_groups", "n_groups", 8)?,
        value_heads: fields.size("mamba_num_heads", Some(128))?,
        key_dim: fields.size("ssm_state_size", Some(128))?,
        value_dim: fields.size("mamba_head_dim", Some(64))?,
    };
    let taps = either("mamba_d_conv", "conv_kernel", 4)?;
    // Only the lower bound counts.
    let least = match fields.number("mamba_dt_min")? {
        Some(least) => least,
        None => fields.number("time_step_min")?.unwrap_or(0.001),
    };
    let limits = (least as f32, f32::INFINITY);
    config.recurrent = Some(Recurrent::Ssd(SsdConfig { limits, ..SsdConfig::new(taps, shape) }));
    let activation = fields.text("mlp_hidden_act")?.unwrap_or("relu2");
    if activation != "relu2" {
        return Err(ModelError::unsupported_but(format!("activation `{activation}`"), "relu2"));
    }
    if let Some(experts) = &mut config.experts {
        experts.latent = fields.size("moe_latent_size", Some(0))?;
        experts.shared = match fields.size("n_shared_experts", Some(1))? {
            0 => 0,
            _ => fields.size("moe_shared_expert_intermediate_size", Some(7688))?,
        };
        experts.renormalize = fields.flag("norm_topk_prob")?.unwrap_or(true);
    }
    let kinds = kinds(fields)?;
    if kinds.len() != config.layers.len() {
        let problem = format!("{} types of layers for {} layers", kinds.len(), config.layers.len());
        return Err(ModelError::Config(problem));
    }
    if kinds.contains(&Kind::Experts) && config.experts.is_none() {
        return Err(ModelError::Config("config.json has no `n_routed_experts`".to_owned()));
    }
    set_kinds(config, kinds.into_iter());
    Ok(())
}

/// Returns the kind of each layer: listed, or one character each.
fn kinds(fields: &Fields<'_>) -> Result<Vec<Kind>, ModelError> {
    let unknown = |kind: &str| {
        ModelError::unsupported_but(format!("layer type `{kind}`"), "mamba, attention, mlp, moe")
    };
    for key in ["layers_block_type", "layer_types"] {
        let Some(listed) = fields.list(key)? else { continue };
        let kind = |kind: &serde_json::Value| match kind.as_str().unwrap_or_default() {
            "mamba" | "linear_attention" => Ok(Kind::Scan),
            "attention" | "full_attention" => Ok(Kind::Attention),
            "mlp" => Ok(Kind::Dense),
            "moe" => Ok(Kind::Experts),
            other => Err(unknown(other)),
        };
        return listed.iter().map(kind).collect();
    }
    let pattern = fields.text("hybrid_override_pattern")?;
    let pattern =
        pattern.ok_or_else(|| ModelError::Config("config.json has no `layers_block_type`".to_owned()))?;
    let kind = |kind: char| match kind {
        'M' => Ok(Kind::Scan),
        '*' => Ok(Kind::Attention),
        '-' => Ok(Kind::Dense),
        'E' => Ok(Kind::Experts),
        other => Err(unknown(&other.to_string())),
    };
    pattern.chars().map(kind).collect()
}
