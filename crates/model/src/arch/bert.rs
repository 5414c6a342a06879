//! Encoders of BERT's kind: rows attend in both directions, and norms stand after each sum.

use paguro_backend::{Activation, NormKind};

use super::{
    Block, Config, Definition, ExpertsConfig, Part,
    config::Distances,
    gguf::Keys,
    hf::{Defaults, Fields},
};
use crate::error::ModelError;

/// BERT's.
const BLOCK: Block = Block {
    norms: NormKind::Layer,
    pre_norms: false,
    activation: Activation::Gelu,
    gated: false,
    positions: true,
    bidirectional: true,
    embed_norm: true,
    token_types: true,
    norms_after: true,
    ..Block::LLAMA
};

const DEFAULTS: Defaults = Defaults {
    layers: Some(12),
    hidden: Some(768),
    ffn: Some(3072),
    heads: Some(12),
    context_length: 512,
    norm_eps: 1e-12,
    tied: true,
    ..Defaults::COMMON
};

const HF_NAMES: &[(Part, &str)] = &[
    (Part::Embedding, "embeddings.word_embeddings"),
    (Part::Positions, "embeddings.position_embeddings"),
    (Part::Q, "attention.self.query"),
    (Part::K, "attention.self.key"),
    (Part::V, "attention.self.value"),
    (Part::AttentionOut, "attention.output.dense"),
    (Part::Up, "intermediate.dense"),
    (Part::Down, "output.dense"),
];

/// Heads of other tasks; `TextHead` reads those of classifiers.
const IGNORED: &[&str] = &[
    "cls.",
    "lm_head.",
    "classifier.",
    "pooler.",
    "bert.pooler.",
    "roberta.pooler.",
    "mpnet.pooler.",
    "new.pooler.",
    ".embeddings.position_ids",
    "embeddings.position_ids",
];

pub(super) const BERT: Definition = Definition {
    gguf: "bert",
    hf: &["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"],
    block: BLOCK,
    hf_defaults: |_| DEFAULTS,
    from_hf: |fields, config| {
        let kind = fields.text("position_embedding_type")?.unwrap_or("absolute");
        if kind != "absolute" {
            return Err(ModelError::unsupported_but(format!("positions of kind `{kind}`"), "absolute"));
        }
        tie(fields, config)
    },
    hf_names: HF_NAMES,
    hf_layers: "encoder.layer",
    hf_ignored: IGNORED,
    ..Definition::LLAMA
};

/// RoBERTa and XLM-RoBERTa: positions begin after that of the padding. In GGUF files these models are of BERT's
/// architecture.
pub(super) const ROBERTA: Definition = Definition {
    gguf: "xlm-roberta",
    hf: &[
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "CamembertModel",
        "CamembertForSequenceClassification",
    ],
    // The table of positions begins with the first that is used.
    to_gguf: |config| config.definition = &BERT,
    hf_defaults: |_| Defaults { context_length: 514, ..DEFAULTS },
    from_hf: |fields, config| {
        if fields.list("lora_adaptations")?.is_some() {
            return Err(ModelError::unsupported_but(
                "an encoder with adapters by task (`lora_adaptations`), as jina-embeddings-v3 has them,",
                "models with prompts by task instead, such as multilingual-e5, EmbeddingGemma, Qwen3-Embedding",
            ));
        }
        let kind = fields.text("position_embedding_type")?.unwrap_or("absolute");
        if kind != "absolute" {
            return Err(ModelError::unsupported_but(format!("positions of kind `{kind}`"), "absolute"));
        }
        skip_padding(fields, config)?;
        tie(fields, config)
    },
    ..BERT
};

/// MPNet: a bias for each distance, in buckets.
pub(super) const MPNET: Definition = Definition {
    gguf: "mpnet",
    hf: &["MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification"],
    block: Block { distances: Distances::Buckets, token_types: false, ..BLOCK },
    hf_defaults: |_| DEFAULTS,
    from_hf: |fields, config| {
        skip_padding(fields, config)?;
        tie(fields, config)
    },
    hf_names: &[
        (Part::Embedding, "embeddings.word_embeddings"),
        (Part::Positions, "embeddings.position_embeddings"),
        (Part::Q, "attention.attn.q"),
        (Part::K, "attention.attn.k"),
        (Part::V, "attention.attn.v"),
        (Part::AttentionOut, "attention.attn.o"),
        (Part::NormAfterMixer, "attention.LayerNorm"),
        (Part::Up, "intermediate.dense"),
        (Part::Down, "output.dense"),
    ],
    ..BERT
};

/// Nomic's, version 1.5: RoPE and SwiGLU.
pub(super) const NOMIC: Definition = Definition {
    gguf: "nomic-bert",
    hf: &["NomicBertModel"],
    block: Block { positions: false, activation: Activation::Silu, gated: true, ..BLOCK },
    hf_defaults: |_| Defaults { rope_theta: 1000.0, context_length: 2048, ..DEFAULTS },
    from_hf: |fields, config| {
        for (key, wanted) in [("prenorm", false), ("rotary_emb_interleaved", false), ("use_rms_norm", false)]
        {
            if fields.flag(key)?.is_some_and(|found| found != wanted) {
                return Err(ModelError::unsupported(format!("`{key}`: {}", !wanted)));
            }
        }
        if let Some(factor) = fields.number("rotary_scaling_factor")? {
            return Err(ModelError::unsupported(format!("`rotary_scaling_factor`: {factor}")));
        }
        tie(fields, config)
    },
    hf_names: &[
        (Part::Embedding, "embeddings.word_embeddings"),
        (Part::EmbeddingNorm, "emb_ln"),
        (Part::Qkv, "attn.Wqkv"),
        (Part::AttentionOut, "attn.out_proj"),
        (Part::NormAfterMixer, "norm1"),
        (Part::Up, "mlp.fc11"),
        (Part::Gate, "mlp.fc12"),
        (Part::Down, "mlp.fc2"),
        (Part::NormAfterFfn, "norm2"),
    ],
    hf_layers: "encoder.layers",
    ..BERT
};

/// Nomic's, version 2: experts in every second layer.
pub(super) const NOMIC_MOE: Definition = Definition {
    gguf: "nomic-bert-moe",
    hf: &[],
    block: Block { positions: false, ..BLOCK },
    experts: Some(ExpertsConfig { renormalize: false, ..ExpertsConfig::SOFTMAX }),
    gguf_keys: &["expert_count"],
    from_gguf: |keys, config| {
        let period = keys.optional_size("moe_every_n_layers")?.unwrap_or(2);
        for (index, layer) in config.layers.iter_mut().enumerate() {
            layer.experts = period > 0 && index % period == 1 % period;
        }
        Ok(())
    },
    ..BERT
};

/// Jina's, version 2: ALiBi and GEGLU.
pub(super) const JINA: Definition = Definition {
    gguf: "jina-bert-v2",
    hf: &["JinaBertModel", "JinaBertForMaskedLM"],
    block: Block { positions: false, gated: true, fused_gate_up: true, distances: Distances::Alibi, ..BLOCK },
    gguf_keys: &["attention.max_alibi_bias"],
    from_gguf: |keys: &mut Keys<'_, '_>, config: &mut Config| {
        let bias = keys.number("attention.max_alibi_bias")?.unwrap_or(8.0);
        if bias != 8.0 {
            return Err(ModelError::unsupported(format!("`max_alibi_bias` = {bias}")));
        }
        config.remove_ropes();
        Ok(())
    },
    hf_defaults: |_| Defaults { context_length: 8192, ..DEFAULTS },
    from_hf: |fields, config| {
        let (positions, network) =
            (fields.text("position_embedding_type")?, fields.text("feed_forward_type")?);
        if positions != Some("alibi") || network != Some("geglu") {
            let what = format!("positions {positions:?} with a network {network:?}");
            return Err(ModelError::unsupported_but(what, "alibi with geglu"));
        }
        config.remove_ropes();
        tie(fields, config)
    },
    hf_names: &[
        (Part::Embedding, "embeddings.word_embeddings"),
        (Part::Q, "attention.self.query"),
        (Part::K, "attention.self.key"),
        (Part::V, "attention.self.value"),
        (Part::AttentionOut, "attention.output.dense"),
        (Part::GateUp, "mlp.gated_layers"),
        (Part::Down, "mlp.wo"),
        (Part::NormAfterFfn, "mlp.layernorm"),
    ],
    ..BERT
};

/// Encoders have no head of their own: what stands for it is never computed.
fn tie(_: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    config.tied = Some(true);
    Ok(())
}

/// The first rows of the table of positions are of no use: those up to that of the padding token.
fn skip_padding(fields: &Fields<'_>, config: &mut Config) -> Result<(), ModelError> {
    config.position_offset = fields.size("pad_token_id", Some(1))? + 1;
    config.context_length = config.context_length.saturating_sub(config.position_offset);
    Ok(())
}
