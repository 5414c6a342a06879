//! Rotary embeddings in `config.json`.

use paguro_backend::RopeStyle;
use serde_json::Map;

use super::{Defaults, Fields};
use crate::{
    arch::gguf::check_factors,
    error::ModelError,
    rope::{Factors, RopeConfig, Yarn, check_original, longrope_magnitude},
};

/// Layers that share a RoPE.
#[derive(Clone, Copy)]
pub(super) struct Scope {
    /// Their type, where there are parameters for each.
    pub kind: &'static str,
    /// The base, if these layers have separate parameters; see [`Defaults::local_base`].
    pub other_base: Option<f64>,
}

/// Reads the RoPE of the layers in `scope`.
pub(super) fn read_rope(
    fields: &Fields<'_>,
    defaults: &Defaults,
    scope: Scope,
    style: RopeStyle,
    head_dim: usize,
    context_length: usize,
    max_context: usize,
) -> Result<RopeConfig, ModelError> {
    // `rope_parameters` is the name since transformers 5. It also contains fields that were beside it before, and may
    // have one entry per type of layer.
    let parameters = match fields.object("rope_parameters")? {
        Some(parameters) if scope.other_base.is_some() => parameters.object(scope.kind)?,
        Some(parameters) => Some(parameters.object(scope.kind)?.unwrap_or(parameters)),
        None if scope.other_base.is_some() => None, // scaling is only for the layers that see far
        None => fields.object("rope_scaling")?,
    };
    let common = fields.object("rope_parameters")?;
    let common_base = match common.map(|common| common.number("rope_theta")).transpose()?.flatten() {
        Some(base) => Some(base),
        None => fields.number("rope_theta")?.or(fields.number("rotary_emb_base")?),
    };
    let empty = Map::new();
    let scaling = parameters.unwrap_or(Fields(&empty));
    let base = match (scaling.number("rope_theta")?, scope.other_base) {
        (Some(base), _) => base,
        (None, Some(other)) if other > 0.0 => fields.number("rope_local_base_freq")?.unwrap_or(other),
        _ => common_base.unwrap_or(defaults.rope_theta),
    };
    let partial = match scaling.number("partial_rotary_factor")? {
        Some(partial) => partial,
        None => match fields.number("partial_rotary_factor")?.or(fields.number("rotary_pct")?) {
            Some(partial) => partial,
            None => defaults.partial_rotary_factor,
        },
    };
    let dims = match fields.optional_size("rotary_dim")? {
        Some(dims) => dims,
        None => (head_dim as f64 * partial) as usize, // rounds toward zero, as transformers does
    };
    let mut rope = RopeConfig::plain(style, dims, base);

    let kind = match scaling.text("rope_type")? {
        Some(kind) => kind,
        None => scaling.text("type")?.unwrap_or("default"),
    };
    let original = match scaling.number("original_max_position_embeddings")? {
        Some(original) => original,
        None => fields.number("original_max_position_embeddings")?.unwrap_or(context_length as f64),
    };
    match kind {
        "default" | "mrope" => {} // of text, RoPE in sections is plain
        // Hunyuan's: a larger base.
        "dynamic" if scaling.number("alpha")?.is_some() => {
            let alpha = scaling.require("alpha")?;
            rope.base = base * alpha.powf(dims as f64 / (dims as f64 - 2.0));
        }
        "linear" => rope.factor = scaling.require("factor")?,
        "llama3" => {
            rope.factors = Factors::Llama3 {
                factor: scaling.require("factor")?,
                low_freq_factor: scaling.require("low_freq_factor")?,
                high_freq_factor: scaling.require("high_freq_factor")?,
                original,
            };
        }
        "yarn" => {
            rope.factor = scaling.require("factor")?;
            rope.yarn = Some(Yarn {
                beta_fast: scaling.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: scaling.number("beta_slow")?.unwrap_or(1.0),
                original,
                truncate: scaling.flag("truncate")?.unwrap_or(true),
            });
            rope.magnitude = yarn_magnitude(&scaling, rope.factor)?;
        }
        "longrope" | "su" => {
            check_original(original)?;
            let long = scaling.floats("long_factor")?;
            let short = scaling.floats("short_factor")?;
            let listed = if max_context as f64 > original { long } else { short };
            if listed.len() != dims / 2 {
                let problem = format!("longrope has {} factors for {} pairs", listed.len(), dims / 2);
                return Err(ModelError::Config(problem));
            }
            rope.factors = check_factors(Some(listed))?;
            let factor = context_length as f64 / original;
            let own = longrope_magnitude(factor, original);
            rope.magnitude = scaling.number("attention_factor")?.unwrap_or(own);
        }
        other => {
            return Err(ModelError::unsupported_but(
                format!("RoPE scaling `{other}`"),
                "default, linear, llama3, yarn, longrope",
            ));
        }
    }
    Ok(rope)
}

fn yarn_magnitude(scaling: &Fields<'_>, factor: f64) -> Result<f64, ModelError> {
    if let Some(given) = scaling.number("attention_factor")? {
        return Ok(given);
    }
    match (scaling.number("mscale")?, scaling.number("mscale_all_dim")?) {
        (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
            Ok(Yarn::magnitude(factor, scale) / Yarn::magnitude(factor, all))
        }
        _ => Ok(Yarn::magnitude(factor, 1.0)),
    }
}
