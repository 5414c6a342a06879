//! Mamba-2: layers of scans only. The parts that it shares with other families are here.

use paguro_backend::DeltaShape;

use super::{
    Block, Config, Definition, Part, Recurrent, SsdConfig, SsdNorm,
    gguf::Keys,
    hf::{Defaults, Fields},
};
use crate::error::ModelError;

pub(super) const DEF: Definition = Definition {
    gguf: "mamba2",
    hf: &["Mamba2ForCausalLM"],
    block: Block { attention: false, ..Block::LLAMA },
    gguf_keys: &["ssm.state_size"],
    from_gguf: |keys, config| {
        config.recurrent = Some(scan_from_gguf(keys)?);
        only_scans(config);
        Ok(())
    },
    hf_defaults: |_| Defaults {
        hidden: Some(4096),
        layers: Some(64),
        context_length: 1 << 20, // it has no limit of its own
        norm_eps: 1e-5,
        ..Defaults::COMMON
    },
    from_hf,
    hf_names: NAMES,
    ..Definition::LLAMA
};

/// Names of tensors in Hugging Face's files of Mamba-2 and Nemotron-H.
const NAMES: &[(Part, &str)] = &[
    (Part::Embedding, "embeddings"),
    (Part::OutputNorm, "norm_f"),
    (Part::AttentionNorm, "norm"),
    (Part::SsmIn, "mixer.in_proj"),
    (Part::Conv, "mixer.conv1d"),
    (Part::DeltaDt, "mixer.dt_bias"),
    (Part::DeltaDecay, "mixer.A_log"),
    (Part::SsmSkip, "mixer.D"),
    (Part::DeltaNorm, "mixer.norm"),
    (Part::DeltaOut, "mixer.out_proj"),
];

fn from_hf(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    let heads = fields.size("num_heads", Some(128))?;
    let shape = DeltaShape {
        key_heads: fields.size("n_groups", Some(8))?,
        value_heads: heads,
        key_dim: fields.size("state_size", Some(128))?,
        value_dim: fields.size("head_dim", Some(64))?,
    };
    let taps = fields.size("conv_kernel", Some(4))?;
    let limits = fields.limits("time_step_limit")?;
    config.recurrent = Some(Recurrent::Ssd(SsdConfig { limits, ..SsdConfig::new(taps, shape) }));
    only_scans(config);
    Ok(())
}

/// All layers are scans without a feed-forward network.
fn only_scans(config: &mut Config) {
    for layer in &mut config.layers {
        (layer.recurrent, layer.network) = (true, false);
    }
}

/// Returns the scan that a GGUF file describes.
pub(super) fn scan_from_gguf(keys: &Keys<'_, '_>) -> Result<Recurrent, ModelError> {
    let (heads, all) = (keys.size("ssm.time_step_rank")?, keys.size("ssm.inner_size")?);
    if heads == 0 || !all.is_multiple_of(heads) {
        return Err(ModelError::Config(format!("{heads} heads of a scan over {all} elements")));
    }
    let shape = DeltaShape {
        key_heads: keys.size("ssm.group_count")?,
        value_heads: heads,
        key_dim: keys.size("ssm.state_size")?,
        value_dim: all / heads,
    };
    Ok(Recurrent::Ssd(SsdConfig::new(keys.size("ssm.conv_kernel")?, shape)))
}

/// Returns the scan that a `config.json` describes whose fields begin with `mamba_`, over `width` elements.
pub(super) fn scan_from_hf(fields: &Fields<'_>, width: usize) -> Result<Recurrent, ModelError> {
    let heads = fields.size("mamba_n_heads", Some(128))?;
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(ModelError::Config(format!("{heads} heads of a scan over {width} elements")));
    }
    let shape = DeltaShape {
        key_heads: fields.size("mamba_n_groups", Some(1))?,
        value_heads: heads,
        key_dim: fields.size("mamba_d_state", Some(256))?,
        value_dim: width / heads,
    };
    let limits = fields.limits("time_step_limit")?;
    let taps = fields.size("mamba_d_conv", Some(4))?;
    Ok(Recurrent::Ssd(SsdConfig { limits, ..SsdConfig::new(taps, shape) }))
}

/// Returns the elements of a scan in a `config.json` that has them as a multiple of the hidden size.
pub(super) fn expanded(fields: &Fields<'_>, config: &Config) -> Result<usize, ModelError> {
    Ok(fields.size("mamba_expand", Some(2))?.saturating_mul(config.hidden))
}

impl SsdConfig {
    /// Returns a scan with a norm after its gate, without scales and bounds.
    pub(super) fn new(taps: usize, shape: DeltaShape) -> Self {
        Self {
            taps,
            shape,
            norm: SsdNorm::AfterGate,
            limits: (0.0, f32::INFINITY),
            gate_scale: 1.0,
            dt_scale: 1.0,
            channel_scales: [1.0; 3],
        }
    }
}
