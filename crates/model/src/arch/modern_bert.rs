//! ModernBERT: norms before branches, RoPE, GEGLU, and a window in two of three layers, which have a RoPE of their own.

use paguro_backend::{Activation, NormKind, RopeStyle};
use serde_json::Value;

use super::{
    Block, Definition, Part,
    hf::{Defaults, Fields},
};
use crate::{error::ModelError, rope::RopeConfig};

pub(super) const DEF: Definition = Definition {
    gguf: "modern-bert",
    hf: &["ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"],
    block: Block {
        norms: NormKind::Layer,
        activation: Activation::Gelu,
        fused_gate_up: true,
        own_ropes: true,
        bidirectional: true,
        embed_norm: true,
        ..Block::LLAMA
    },
    from_gguf: |keys, config| {
        let span = keys.optional("attention.sliding_window")?.unwrap_or(128);
        let local = match keys.list("attention.sliding_window_pattern") {
            Some(local) if local.len() >= config.layers.len() => {
                local.iter().map(|&local| local != 0).collect()
            }
            Some(local) => {
                let problem = format!("windows of {} of {} layers", local.len(), config.layers.len());
                return Err(ModelError::Config(problem));
            }
            None => {
                let period = keys.optional_size("attention.sliding_window_pattern")?.unwrap_or(3).max(1);
                (0..config.layers.len()).map(|layer| layer % period != 0).collect::<Vec<_>>()
            }
        };
        config.set_spans(span, &local);
        let base = keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
        config.set_local_rope(RopeConfig::plain(config.ropes[0].style, config.ropes[0].dims, base));
        Ok(())
    },
    hf_defaults: |_| Defaults {
        layers: Some(22),
        hidden: Some(768),
        ffn: Some(1152),
        heads: Some(12),
        context_length: 8192,
        norm_eps: 1e-5,
        tied: true,
        ..Defaults::COMMON
    },
    from_hf: |fields, config| {
        let layers = config.layers.len();
        let period = fields.size("global_attn_every_n_layers", Some(3))?.max(1);
        let local: Vec<bool> = match fields.list("layer_types")? {
            Some(types) if types.len() >= layers => {
                types.iter().map(|kind| kind.as_str() == Some("sliding_attention")).collect()
            }
            Some(types) => {
                let problem = format!("`layer_types` has {} entries for {layers} layers", types.len());
                return Err(ModelError::Config(problem));
            }
            None => (0..layers).map(|layer| layer % period != 0).collect(),
        };
        config.set_spans(fields.integer("local_attention")?.unwrap_or(128), &local);
        let far = base(fields, "full_attention", "global_rope_theta", 160_000.0)?;
        let near = base(fields, "sliding_attention", "local_rope_theta", 10_000.0)?;
        let (style, dims) = (RopeStyle::HalfSplit, config.head_dim);
        config.ropes = vec![RopeConfig::plain(style, dims, far)];
        config.layers.iter_mut().for_each(|layer| layer.rope = Some(0));
        config.set_local_rope(RopeConfig::plain(style, dims, near));
        config.tied = Some(true);
        Ok(())
    },
    hf_names: &[
        (Part::Embedding, "embeddings.tok_embeddings"),
        (Part::EmbeddingNorm, "embeddings.norm"),
        (Part::AttentionNorm, "attn_norm"),
        (Part::Qkv, "attn.Wqkv"),
        (Part::AttentionOut, "attn.Wo"),
        (Part::FfnNorm, "mlp_norm"),
        (Part::GateUp, "mlp.Wi"),
        (Part::Down, "mlp.Wo"),
        (Part::OutputNorm, "final_norm"),
    ],
    // Heads of other tasks; `TextHead` reads those of classifiers.
    hf_ignored: &["head.", "decoder.", "classifier."],
    ..Definition::LLAMA
};

/// Returns the base of a kind of layers, whose RoPE is not scaled.
fn base(fields: &Fields<'_>, kind: &str, old: &str, default: f64) -> Result<f64, ModelError> {
    let parameters = fields.object("rope_parameters")?.map(|all| all.object(kind)).transpose()?.flatten();
    let Some(parameters) = parameters else { return Ok(fields.number(old)?.unwrap_or(default)) };
    match parameters.text("rope_type")? {
        None | Some("default") => Ok(parameters.number("rope_theta")?.unwrap_or(default)),
        Some(other) => {
            Err(ModelError::unsupported_but(format!("RoPE scaling {}", Value::from(other)), "default"))
        }
    }
}
