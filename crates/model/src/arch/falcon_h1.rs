//! Falcon-H1: attention and a scan in parallel in each layer, with multipliers.
//!
//! In GGUF files, the multipliers are included in the matrices. Hugging Face's files have them in `config.json`.
//! Matrices stay as stored, so multipliers are applied to adjacent parameters:
//!
//! - those of inputs to the weights of norms
//! - that of keys to the scale of scores
//! - those of B, C and x to the weights of the convolution
//! - that of the feed-forward network's gate to the weights of its norm; the result of up then includes it as well, and
//!   the scale of the branch divides by it

use super::{
    Block, Config, Definition, Multipliers, Part, Recurrent, SsdConfig, SsdNorm,
    gguf::Keys,
    hf::{Defaults, Fields},
    mamba2,
};
use crate::error::ModelError;

pub(super) const DEF: Definition = Definition {
    gguf: "falcon-h1",
    hf: &["FalconH1ForCausalLM"],
    block: Block { beside: true, ..Block::LLAMA },
    gguf_keys: &["ssm.state_size", "attention.scale"],
    from_gguf,
    hf_defaults: |_| Defaults {
        layers: Some(32),
        hidden: Some(4096),
        ffn: Some(14_336),
        heads: Some(32),
        kv_heads: Some(8),
        context_length: 8192,
        norm_eps: 1e-5,
        ..Defaults::COMMON
    },
    from_hf,
    hf_names: &[
        (Part::OutputNorm, "final_layernorm"),
        (Part::FfnNorm, "pre_ff_layernorm"),
        (Part::Gate, "feed_forward.gate_proj"),
        (Part::Up, "feed_forward.up_proj"),
        (Part::Down, "feed_forward.down_proj"),
        (Part::Conv, "mamba.conv1d"),
        (Part::DeltaDt, "mamba.dt_bias"),
        (Part::DeltaDecay, "mamba.A_log"),
        (Part::DeltaNorm, "mamba.norm"),
        (Part::DeltaOut, "mamba.out_proj"),
    ],
    ..Definition::LLAMA
};

fn set(config: &mut Config, scan: Recurrent, norm: SsdNorm) {
    config.recurrent = match scan {
        Recurrent::Ssd(scan) => Some(Recurrent::Ssd(SsdConfig { norm, ..scan })),
        other => Some(other),
    };
    config.layers.iter_mut().for_each(|layer| layer.recurrent = true);
}

fn from_gguf(keys: &mut Keys<'_, '_>, config: &mut Config) -> Result<(), ModelError> {
    let norm = match keys.has_tensor("blk.0.ssm_norm.weight") {
        true => SsdNorm::AfterGate,
        false => SsdNorm::None,
    };
    let scan = mamba2::scan_from_gguf(keys)?;
    set(config, scan, norm);
    if let Some(scale) = keys.number("attention.scale")?.filter(|&scale| scale != 0.0) {
        config.attention_scale = scale as f32;
    }
    Ok(())
}

fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    let width = match fields.has("mamba_d_ssm") && fields.optional_size("mamba_d_ssm")?.is_none() {
        true => mamba2::expanded(fields, config)?,
        false => fields.size("mamba_d_ssm", Some(1024))?,
    };
    let norm = match fields.flag("mamba_rms_norm")?.unwrap_or(false) {
        false => SsdNorm::None,
        true if fields.flag("mamba_norm_before_gate")?.unwrap_or(true) => SsdNorm::BeforeGate,
        true => SsdNorm::AfterGate,
    };
    let scan = mamba2::scan_from_hf(fields, width)?;
    set(config, scan, norm);
    let number = |key: &str| Ok::<f32, ModelError>(fields.number(key)?.unwrap_or(1.0) as f32);
    let [ffn_gate, ffn_out] = multipliers(fields, "mlp_multipliers")?;
    let [gate, x, b, c, dt] = multipliers(fields, "ssm_multipliers")?;
    if ffn_gate != 1.0 && fields.flag("mlp_bias")?.unwrap_or(false) {
        return Err(ModelError::unsupported("`mlp_multipliers` beside `mlp_bias`"));
    }
    if let Some(Recurrent::Ssd(scan)) = &mut config.recurrent {
        (scan.gate_scale, scan.dt_scale, scan.channel_scales) = (gate, dt, [c, b, x]);
    }
    config.multipliers = Multipliers {
        attention_in: number("attention_in_multiplier")?,
        attention_out: number("attention_out_multiplier")?,
        scan_in: number("ssm_in_multiplier")?,
        scan_out: number("ssm_out_multiplier")?,
        ffn_in: ffn_gate,
    };
    config.attention_scale *= number("key_multiplier")?;
    config.embed_scale = number("embedding_multiplier")?;
    config.logit_scale = number("lm_head_multiplier")?;
    config.branch_scale = ffn_out / ffn_gate;
    // The scale of the branches is that of the feed-forward network.
    config.multipliers.attention_out /= config.branch_scale;
    config.multipliers.scan_out /= config.branch_scale;
    Ok(())
}

/// Returns a list of as many numbers, ones by default.
fn multipliers<const N: usize>(fields: &Fields<'_>, key: &str) -> Result<[f32; N], ModelError> {
    let Some(listed) = fields.list(key)? else { return Ok([1.0; N]) };
    let numbers: Option<Vec<f32>> = listed.iter().map(|number| Some(number.as_f64()? as f32)).collect();
    let numbers: Option<[f32; N]> = numbers.and_then(|numbers| numbers.try_into().ok());
    numbers.ok_or_else(|| ModelError::Config(format!("config.json: `{key}` is not a list of {N} numbers")))
}
