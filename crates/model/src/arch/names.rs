//! What the two file formats call a model's tensors.

use super::Architecture;

/// A tensor of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    AttentionNorm,
    Q,
    K,
    V,
    /// Q, K and V in one matrix, in this order.
    Qkv,
    QNorm,
    KNorm,
    AttentionOut,
    PostAttentionNorm,
    FfnNorm,
    Gate,
    Up,
    /// Gate and up in one matrix, in this order.
    GateUp,
    Down,
    PostFfnNorm,
}

/// How tensors are called in a file.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    architecture: Architecture,
    convention: Convention,
}

#[derive(Clone, Debug)]
enum Convention {
    Gguf,
    /// With what stands before `layers.0`, and what before `lm_head`.
    Hf {
        model: String,
        head: String,
    },
}

impl Names {
    /// As llama.cpp writes them (gguf-py/gguf/constants.py).
    pub(crate) fn gguf(architecture: Architecture) -> Self {
        Self { architecture, convention: Convention::Gguf }
    }

    /// As Hugging Face's transformers writes them. The text part of a larger model stands behind a prefix, which has
    /// changed between versions; `has` says whether a tensor exists.
    pub(crate) fn hf(architecture: Architecture, has: impl Fn(&str) -> bool) -> Self {
        let known =
            [("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", "")];
        let found = known.into_iter().find(|(model, _)| has(&format!("{model}embed_tokens.weight")));
        let (model, head) = found.unwrap_or(known[0]);
        let convention = Convention::Hf { model: model.to_owned(), head: head.to_owned() };
        Self { architecture, convention }
    }

    /// The embedding table.
    pub(crate) fn embedding(&self) -> String {
        match &self.convention {
            Convention::Gguf => "token_embd.weight".to_owned(),
            Convention::Hf { model, .. } => format!("{model}embed_tokens.weight"),
        }
    }

    /// The last norm.
    pub(crate) fn output_norm(&self) -> String {
        match &self.convention {
            Convention::Gguf => "output_norm.weight".to_owned(),
            Convention::Hf { model, .. } => format!("{model}norm.weight"),
        }
    }

    /// The head, without `.weight` or `.bias`.
    pub(crate) fn head(&self) -> String {
        match &self.convention {
            Convention::Gguf => "output".to_owned(),
            Convention::Hf { head, .. } => format!("{head}lm_head"),
        }
    }

    /// A tensor of layer `layer`, without `.weight` or `.bias`.
    pub(crate) fn layer(&self, layer: usize, part: Part) -> String {
        match &self.convention {
            Convention::Gguf => format!("blk.{layer}.{}", gguf_part(part)),
            Convention::Hf { model, .. } => {
                format!("{model}layers.{layer}.{}", hf_part(part, self.architecture))
            }
        }
    }

    /// Whether gate and up are stored as one matrix.
    pub(crate) fn gate_up_is_fused(&self) -> bool {
        self.architecture == Architecture::Phi3
    }

    /// Whether a tensor that was not used can be ignored without changing any answer.
    pub(crate) fn is_harmless(&self, name: &str, tied: bool) -> bool {
        match &self.convention {
            Convention::Gguf => false,
            Convention::Hf { head, .. } => {
                // Images cannot be given to the text part, so what reads them has no effect.
                let name_in_model = name.strip_prefix("model.").unwrap_or(name);
                let reads_images = ["vision_tower.", "multi_modal_projector."]
                    .iter()
                    .any(|tower| name_in_model.starts_with(tower));
                name.ends_with(".rotary_emb.inv_freq") // what the formula gives
                    || tied && name == format!("{head}lm_head.weight")
                    || reads_images && self.architecture == Architecture::Gemma3
            }
        }
    }
}

fn gguf_part(part: Part) -> &'static str {
    match part {
        Part::AttentionNorm => "attn_norm",
        Part::Q => "attn_q",
        Part::K => "attn_k",
        Part::V => "attn_v",
        Part::Qkv => "attn_qkv",
        Part::QNorm => "attn_q_norm",
        Part::KNorm => "attn_k_norm",
        Part::AttentionOut => "attn_output",
        Part::PostAttentionNorm => "post_attention_norm",
        Part::FfnNorm => "ffn_norm",
        Part::Gate => "ffn_gate",
        Part::Up | Part::GateUp => "ffn_up",
        Part::Down => "ffn_down",
        Part::PostFfnNorm => "post_ffw_norm",
    }
}

fn hf_part(part: Part, architecture: Architecture) -> &'static str {
    match part {
        Part::AttentionNorm => "input_layernorm",
        Part::Q => "self_attn.q_proj",
        Part::K => "self_attn.k_proj",
        Part::V => "self_attn.v_proj",
        Part::Qkv => "self_attn.qkv_proj",
        Part::QNorm => "self_attn.q_norm",
        Part::KNorm => "self_attn.k_norm",
        Part::AttentionOut => "self_attn.o_proj",
        Part::PostAttentionNorm => "post_attention_layernorm",
        // Without a norm after attention, the name means the one before the feed-forward part.
        Part::FfnNorm if architecture.is_gemma() => "pre_feedforward_layernorm",
        Part::FfnNorm => "post_attention_layernorm",
        Part::Gate => "mlp.gate_proj",
        Part::Up => "mlp.up_proj",
        Part::GateUp => "mlp.gate_up_proj",
        Part::Down => "mlp.down_proj",
        Part::PostFfnNorm => "post_feedforward_layernorm",
    }
}
