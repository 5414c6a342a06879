//! Names of a model's tensors in the two file formats.

use std::{fmt, ops::Range};

use super::{Definition, HfMatrices, INTERLEAVED, REORDERED};

/// A tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    // Of the model.
    Embedding,
    Positions,
    TokenTypes,
    EmbeddingNorm,
    /// Biases of scores by bucket of distance, `[buckets, heads]`.
    DistanceBuckets,
    OutputNorm,
    Head,
    /// Embeddings for all layers.
    LayerEmbeds,
    LayerProjection,
    LayerProjectionNorm,
    // Of a layer.
    AttentionNorm,
    Q,
    K,
    V,
    /// Q, K and V in one matrix, in this order.
    Qkv,
    QNorm,
    KNorm,
    Sinks,
    AttentionOut,
    // Of latent attention.
    QDown,
    QDownNorm,
    QUp,
    LatentDown,
    LatentNorm,
    /// K's and V's parts of the matrix that expands the latent vector, head by head, K's transposed.
    Absorb,
    Value,
    /// The unchanged matrix.
    LatentUp,
    PostAttentionNorm,
    FfnNorm,
    Gate,
    Up,
    /// Gate and up in one matrix, in this order.
    GateUp,
    Down,
    PostFfnNorm,
    /// Norms of the residual stream after each branch.
    NormAfterMixer,
    NormAfterFfn,
    Router,
    SelectionBias,
    /// One tensor of all experts; in Hugging Face's files `{}` is the number of an expert with its own tensor.
    ExpertGate,
    ExpertUp,
    ExpertDown,
    /// Gates and ups of all experts in one tensor.
    ExpertGateUp,
    /// Downs of all experts in one tensor, in files that also have [`Part::ExpertGateUp`].
    ExpertDowns,
    /// Of experts with rows of their own width.
    ExpertsIn,
    ExpertsOut,
    SharedGate,
    SharedUp,
    /// Gate and up of the shared expert in one matrix.
    SharedGateUp,
    SharedDown,
    OutputGate,
    // Of a layer with a dense network beside its experts.
    RouterScale,
    ExpertScale,
    ExpertsNorm,
    PostDenseNorm,
    PostExpertsNorm,
    // Of a layer with an embedding.
    InputGate,
    InputOut,
    PostInputNorm,
    OutputScale,
    // Of a layer with a state.
    ConvIn,
    Conv,
    ConvOut,
    DeltaQkv,
    DeltaGate,
    /// Queries, keys, values and gates in one matrix, key head by key head.
    DeltaQkvZ,
    DeltaAlpha,
    DeltaBeta,
    /// Both in one matrix, key head by key head.
    DeltaBetaAlpha,
    DeltaDecay,
    DeltaDt,
    DeltaNorm,
    DeltaOut,
    // Of a head for multi-token prediction, which is the layer after the last one.
    /// Joins an embedding with a row of the model.
    MtpJoin,
    MtpTokenNorm,
    MtpRowNorm,
    MtpEmbedding,
    MtpOutputNorm,
    MtpOutput,
    // Of an assistant.
    /// Joins an embedding of the model with a row of it.
    AssistantIn,
    /// Makes a row in place of the model's.
    AssistantOut,
    // Of a scan.
    /// z, x, B, C and d in one matrix, in this order.
    SsmIn,
    SsmSkip,
}

/// Prefixes of a model's tensors in Hugging Face's files, and of the head.
const HF_PREFIXES: [(&str, &str); 12] = [
    ("model.", ""),
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("model.text_model.", ""),
    ("transformer.", ""),
    ("gpt_neox.", ""),
    ("backbone.", ""),
    ("bert.", ""),
    ("roberta.", ""),
    ("mpnet.", ""),
    ("new.", ""),
    ("", ""),
];

/// Tensor names of a file format.
#[derive(Clone)]
pub(crate) struct Names {
    definition: &'static Definition,
    convention: Convention,
    /// Prefix of a head for multi-token prediction outside of the layers, and the number that its layer gets.
    mtp: Option<(&'static str, usize)>,
}

/// Prefixes of heads for multi-token prediction in Hugging Face's files, where they are no further layers (Qwen).
const MTP_PREFIXES: [&str; 2] = ["mtp.", "model.mtp."];

#[derive(Clone, Debug)]
enum Convention {
    Gguf,
    /// Names with the prefixes before `layers.0` and before `lm_head`.
    Hf {
        model: String,
        head: String,
    },
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Names({}, {:?})", self.definition.gguf, self.convention)
    }
}

impl Names {
    /// Returns the names of llama.cpp (gguf-py/gguf/constants.py).
    pub(crate) fn gguf(definition: &'static Definition) -> Self {
        Self { definition, convention: Convention::Gguf, mtp: None }
    }

    /// Returns the names of Hugging Face's transformers. The text part of a larger model has a prefix, which differs
    /// between versions; `has` returns true for existing tensors.
    pub(crate) fn hf(definition: &'static Definition, has: impl Fn(&str) -> bool) -> Self {
        let known = HF_PREFIXES;
        let embedding = part_of(definition.hf_names, Part::Embedding).unwrap_or(hf_part(Part::Embedding));
        let found = known.into_iter().find(|(model, _)| has(&format!("{model}{embedding}.weight")));
        let (model, head) = found.unwrap_or(known[0]);
        let convention = Convention::Hf { model: model.to_owned(), head: head.to_owned() };
        Self { definition, convention, mtp: None }
    }

    /// Returns the names with those of a head for multi-token prediction as layer `layer`. `has` returns true for existing
    /// tensors.
    pub(crate) fn with_mtp(&self, layer: usize, has: impl Fn(&str) -> bool) -> Self {
        let is_there = |prefix: &&&str| self.is_hf() && has(&format!("{prefix}fc.weight"));
        let prefix = MTP_PREFIXES.iter().find(is_there);
        Self { mtp: prefix.map(|&prefix| (prefix, layer)), ..self.clone() }
    }

    /// True for Hugging Face's names.
    pub(crate) fn is_hf(&self) -> bool {
        matches!(self.convention, Convention::Hf { .. })
    }

    /// Returns a tensor of the model, without `.weight` or `.bias`.
    pub(crate) fn model(&self, part: Part) -> String {
        match &self.convention {
            Convention::Gguf => self.part(part).to_owned(),
            Convention::Hf { head, .. }
                if matches!(part, Part::Head | Part::AssistantIn | Part::AssistantOut) =>
            {
                format!("{head}{}", self.part(part))
            }
            Convention::Hf { model, .. } => format!("{model}{}", self.part(part)),
        }
    }

    /// Returns a tensor of layer `layer`, without `.weight` or `.bias`.
    pub(crate) fn layer(&self, layer: usize, part: Part) -> String {
        match &self.convention {
            Convention::Gguf => format!("blk.{layer}.{}", self.part(part)),
            Convention::Hf { .. } if self.mtp.is_some_and(|(_, first)| layer >= first) => {
                let (prefix, first) = self.mtp.unwrap_or_default();
                match mtp_part(part) {
                    Some(name) => format!("{prefix}{name}"),
                    None => format!("{prefix}layers.{}.{}", layer - first, self.part(part)),
                }
            }
            Convention::Hf { model, .. } => {
                format!("{model}{}.{layer}.{}", self.definition.hf_layers, self.part(part))
            }
        }
    }

    /// Returns the tensor of expert `expert` in layer `layer`, where experts have tensors of their own.
    pub(crate) fn expert(&self, layer: usize, part: Part, expert: usize) -> String {
        match &self.convention {
            // Files of the first Mixtral models.
            Convention::Gguf => {
                format!("blk.{layer}.{}.{expert}", self.part(part).trim_end_matches("_exps"))
            }
            Convention::Hf { .. } => self.layer(layer, part).replace("{}", &expert.to_string()),
        }
    }

    /// Returns the number of a layer and the rest of the name of one of its tensors, with any known prefix.
    pub(crate) fn split_layer<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let of_layer = |prefix: &str, layers: &str| {
            let rest = name.strip_prefix(prefix)?.strip_prefix(layers)?.strip_prefix('.')?;
            let (number, rest) = rest.split_once('.')?;
            Some((number.parse().ok()?, rest))
        };
        match &self.convention {
            Convention::Gguf => of_layer("", "blk"),
            Convention::Hf { .. } => {
                let mut prefixes = HF_PREFIXES.iter();
                prefixes.find_map(|(model, _)| of_layer(model, self.definition.hf_layers))
            }
        }
    }

    /// Returns the name of a part of a layer.
    pub(crate) fn part_name(&self, part: Part) -> &'static str {
        self.part(part)
    }

    /// Returns true if this is the name of a part of the model, with any known prefix.
    pub(crate) fn is_model_part(&self, name: &str, part: Part) -> bool {
        let own = self.part(part);
        match &self.convention {
            Convention::Gguf => name == own,
            Convention::Hf { .. } => HF_PREFIXES.iter().any(|(model, head)| {
                let prefix = if part == Part::Head { head } else { model };
                name.strip_prefix(prefix) == Some(own)
            }),
        }
    }

    /// Returns true if RoPE pairs neighbours in folders and in most GGUF files.
    pub(crate) fn pairs_neighbours(&self) -> bool {
        self.definition.rope_styles == INTERLEAVED
    }

    /// Returns true if the converter to GGUF reorders rows of Q and K.
    pub(crate) fn is_reordered(&self) -> bool {
        self.definition.rope_styles == REORDERED
    }

    /// Returns the arrangement of matrices in Hugging Face's files.
    pub(super) fn hf_matrices(&self) -> HfMatrices {
        self.definition.hf_matrices
    }

    fn part(&self, part: Part) -> &'static str {
        match self.convention {
            Convention::Gguf => part_of(self.definition.gguf_names, part).unwrap_or(gguf_part(part)),
            Convention::Hf { .. } => part_of(self.definition.hf_names, part).unwrap_or(hf_part(part)),
        }
    }

    /// Returns true if an unused tensor can be ignored without changing answers. The layers `extra` are for multi-token
    /// prediction.
    pub(crate) fn is_harmless(&self, name: &str, tied: bool, extra: &Range<usize>) -> bool {
        let layer_after = |prefix: &str| {
            let number = name.strip_prefix(prefix)?.split('.').next()?;
            number.parse::<usize>().ok()
        };
        match &self.convention {
            Convention::Gguf if name.starts_with("cls.") || name.starts_with("dense_") => true, // see `TextHead`
            Convention::Gguf => layer_after("blk.").is_some_and(|layer| extra.contains(&layer)),
            Convention::Hf { model, .. } => {
                // The text part reads no images, so tensors for images have no effect.
                let name_in_model = name.strip_prefix("model.").unwrap_or(name);
                let ignored = |part: &&str| match part.starts_with('.') {
                    true => name.ends_with(*part),
                    false => name_in_model.starts_with(*part),
                };
                name.ends_with(".rotary_emb.inv_freq") // what the formula gives
                    || tied && name == format!("{}.weight", self.model(Part::Head))
                    || self.definition.hf_ignored.iter().any(ignored)
                    || layer_after(&format!("{model}{}.", self.definition.hf_layers)).is_some_and(|layer| extra.contains(&layer))
            }
        }
    }
}

fn part_of(names: &[(Part, &'static str)], part: Part) -> Option<&'static str> {
    names.iter().find(|name| name.0 == part).map(|name| name.1)
}

/// Returns the names of a head for multi-token prediction in files where it is no layer.
fn mtp_part(part: Part) -> Option<&'static str> {
    Some(match part {
        Part::MtpJoin => "fc",
        Part::MtpTokenNorm => "pre_fc_norm_embedding",
        Part::MtpRowNorm => "pre_fc_norm_hidden",
        Part::MtpOutputNorm => "norm",
        Part::MtpEmbedding => "embed_tokens",
        Part::MtpOutput => "lm_head",
        _ => return None,
    })
}

/// Returns the names of the stacks of gates, ups and downs in a layer of Hugging Face's files, with `{}` for an expert's number.
pub(crate) fn hf_stacks(definition: &Definition) -> [&'static str; 3] {
    [Part::ExpertGate, Part::ExpertUp, Part::ExpertDown]
        .map(|part| part_of(definition.hf_names, part).unwrap_or(hf_part(part)))
}

fn gguf_part(part: Part) -> &'static str {
    match part {
        Part::Embedding => "token_embd",
        Part::Positions => "position_embd",
        Part::TokenTypes => "token_types",
        Part::EmbeddingNorm => "token_embd_norm",
        Part::DistanceBuckets => "attn_rel_b",
        Part::NormAfterMixer => "attn_output_norm",
        Part::NormAfterFfn => "layer_output_norm",
        Part::OutputNorm => "output_norm",
        Part::Head => "output",
        Part::AttentionNorm => "attn_norm",
        Part::Q => "attn_q",
        Part::K => "attn_k",
        Part::V => "attn_v",
        Part::Qkv => "attn_qkv",
        Part::QNorm => "attn_q_norm",
        Part::KNorm => "attn_k_norm",
        Part::Sinks => "attn_sinks",
        Part::AttentionOut => "attn_output",
        Part::QDown => "attn_q_a",
        Part::QDownNorm => "attn_q_a_norm",
        Part::QUp => "attn_q_b",
        Part::LatentDown => "attn_kv_a_mqa",
        Part::LatentNorm => "attn_kv_a_norm",
        Part::Absorb => "attn_k_b",
        Part::Value => "attn_v_b",
        Part::LatentUp => "attn_kv_b",
        Part::PostAttentionNorm => "post_attention_norm",
        Part::FfnNorm => "ffn_norm",
        Part::Gate => "ffn_gate",
        Part::Up | Part::GateUp => "ffn_up",
        Part::Down => "ffn_down",
        Part::PostFfnNorm => "post_ffw_norm",
        Part::Router => "ffn_gate_inp",
        Part::SelectionBias => "exp_probs_b",
        Part::ExpertGate => "ffn_gate_exps",
        Part::ExpertUp => "ffn_up_exps",
        Part::ExpertDown | Part::ExpertDowns => "ffn_down_exps",
        Part::ExpertGateUp => "ffn_gate_up_exps",
        Part::SharedGate => "ffn_gate_shexp",
        Part::SharedUp | Part::SharedGateUp => "ffn_up_shexp",
        Part::SharedDown => "ffn_down_shexp",
        Part::OutputGate => "ffn_gate_inp_shexp",
        Part::LayerEmbeds => "per_layer_token_embd",
        Part::LayerProjection => "per_layer_model_proj",
        Part::LayerProjectionNorm => "per_layer_proj_norm",
        Part::RouterScale => "ffn_gate_inp.scale",
        Part::ExpertScale => "ffn_down_exps.scale",
        Part::ExpertsNorm => "pre_ffw_norm_2",
        Part::PostDenseNorm => "post_ffw_norm_1",
        Part::PostExpertsNorm => "post_ffw_norm_2",
        Part::InputGate => "inp_gate",
        Part::InputOut => "proj",
        Part::PostInputNorm => "post_norm",
        Part::OutputScale => "layer_output_scale.weight",
        Part::ConvIn => "shortconv.in_proj",
        Part::Conv => "ssm_conv1d",
        Part::ConvOut => "shortconv.out_proj",
        Part::DeltaQkv => "attn_qkv",
        Part::DeltaGate => "attn_gate",
        Part::DeltaQkvZ => "ssm_in",
        Part::DeltaAlpha => "ssm_alpha",
        Part::DeltaBeta => "ssm_beta",
        Part::DeltaBetaAlpha => "ssm_ba",
        Part::DeltaDecay => "ssm_a",
        Part::DeltaDt => "ssm_dt.bias",
        Part::DeltaNorm => "ssm_norm",
        Part::DeltaOut => "ssm_out",
        Part::MtpJoin => "nextn.eh_proj",
        Part::MtpTokenNorm => "nextn.enorm",
        Part::MtpRowNorm => "nextn.hnorm",
        Part::MtpEmbedding => "nextn.embed_tokens",
        Part::MtpOutputNorm => "nextn.shared_head_norm",
        Part::MtpOutput => "nextn.shared_head_head",
        Part::AssistantIn => "nextn.pre_projection",
        Part::AssistantOut => "nextn.post_projection",
        Part::SsmIn => "ssm_in",
        Part::SsmSkip => "ssm_d",
        Part::ExpertsIn => "ffn_latent_down",
        Part::ExpertsOut => "ffn_latent_up",
    }
}

fn hf_part(part: Part) -> &'static str {
    match part {
        Part::Embedding => "embed_tokens",
        Part::Positions => "wpe",
        Part::TokenTypes => "embeddings.token_type_embeddings",
        Part::EmbeddingNorm => "embeddings.LayerNorm",
        Part::DistanceBuckets => "encoder.relative_attention_bias",
        Part::NormAfterMixer => "attention.output.LayerNorm",
        Part::NormAfterFfn => "output.LayerNorm",
        Part::OutputNorm => "norm",
        Part::Head => "lm_head",
        Part::AttentionNorm => "input_layernorm",
        Part::Q => "self_attn.q_proj",
        Part::K => "self_attn.k_proj",
        Part::V => "self_attn.v_proj",
        Part::Qkv => "self_attn.qkv_proj",
        Part::QNorm => "self_attn.q_norm",
        Part::KNorm => "self_attn.k_norm",
        Part::Sinks => "self_attn.sinks",
        Part::AttentionOut => "self_attn.o_proj",
        Part::QDown => "self_attn.q_a_proj",
        Part::QDownNorm => "self_attn.q_a_layernorm",
        Part::QUp => "self_attn.q_b_proj",
        Part::LatentDown => "self_attn.kv_a_proj_with_mqa",
        Part::LatentNorm => "self_attn.kv_a_layernorm",
        // Only files of llama.cpp have these two.
        Part::Absorb => "self_attn.k_b_proj",
        Part::Value => "self_attn.v_b_proj",
        Part::LatentUp => "self_attn.kv_b_proj",
        // With a norm after attention, definitions give the norm before the feed-forward network another name.
        Part::PostAttentionNorm | Part::FfnNorm => "post_attention_layernorm",
        Part::Gate => "mlp.gate_proj",
        Part::Up => "mlp.up_proj",
        Part::GateUp => "mlp.gate_up_proj",
        Part::Down => "mlp.down_proj",
        Part::PostFfnNorm => "post_feedforward_layernorm",
        Part::Router => "mlp.gate",
        Part::SelectionBias => "mlp.gate.e_score_correction_bias",
        Part::ExpertGate => "mlp.experts.{}.gate_proj",
        Part::ExpertUp => "mlp.experts.{}.up_proj",
        Part::ExpertDown => "mlp.experts.{}.down_proj",
        Part::ExpertGateUp => "mlp.experts.gate_up_proj",
        Part::ExpertDowns => "mlp.experts.down_proj",
        Part::SharedGate => "mlp.shared_experts.gate_proj",
        Part::SharedUp => "mlp.shared_experts.up_proj",
        Part::SharedGateUp => "mlp.shared_experts.gate_up_proj",
        Part::SharedDown => "mlp.shared_experts.down_proj",
        Part::OutputGate => "mlp.shared_expert_gate",
        Part::LayerEmbeds => "embed_tokens_per_layer",
        Part::LayerProjection => "per_layer_model_projection",
        Part::LayerProjectionNorm => "per_layer_projection_norm",
        Part::RouterScale => "router.scale",
        Part::ExpertScale => "router.per_expert_scale",
        Part::ExpertsNorm => "pre_feedforward_layernorm_2",
        Part::PostDenseNorm => "post_feedforward_layernorm_1",
        Part::PostExpertsNorm => "post_feedforward_layernorm_2",
        Part::InputGate => "per_layer_input_gate",
        Part::InputOut => "per_layer_projection",
        Part::PostInputNorm => "post_per_layer_input_norm",
        Part::OutputScale => "layer_scalar",
        Part::ConvIn => "conv.in_proj",
        Part::Conv => "linear_attn.conv1d",
        Part::ConvOut => "conv.out_proj",
        Part::DeltaQkv => "linear_attn.in_proj_qkv",
        Part::DeltaGate => "linear_attn.in_proj_z",
        Part::DeltaQkvZ => "linear_attn.in_proj_qkvz",
        Part::DeltaAlpha => "linear_attn.in_proj_a",
        Part::DeltaBeta => "linear_attn.in_proj_b",
        Part::DeltaBetaAlpha => "linear_attn.in_proj_ba",
        Part::DeltaDecay => "linear_attn.A_log",
        Part::DeltaDt => "linear_attn.dt_bias",
        Part::DeltaNorm => "linear_attn.norm",
        Part::DeltaOut => "linear_attn.out_proj",
        Part::MtpJoin => "eh_proj",
        Part::MtpTokenNorm => "enorm",
        Part::MtpRowNorm => "hnorm",
        Part::MtpEmbedding => "embed_tokens",
        Part::MtpOutputNorm => "shared_head.norm",
        Part::MtpOutput => "shared_head.head",
        Part::AssistantIn => "pre_projection",
        Part::AssistantOut => "post_projection",
        Part::SsmIn => "mamba.in_proj",
        Part::SsmSkip => "mamba.D",
        Part::ExpertsIn => "mlp.fc1_latent_proj",
        Part::ExpertsOut => "mlp.fc2_latent_proj",
    }
}
