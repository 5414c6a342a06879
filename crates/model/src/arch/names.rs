//! Names of a model's tensors in the two file formats.

use std::{fmt, ops::Range};

use super::{Definition, HfMatrices, INTERLEAVED, REORDERED};

/// Declares the tensors of models with their names in GGUF files and in Hugging Face's.
macro_rules! parts {
    ($($(#[$doc:meta])* $part:ident, $gguf:literal, $hf:literal;)*) => {
        /// A tensor.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Part {
            $($(#[$doc])* $part,)*
        }

        fn gguf_part(part: Part) -> &'static str {
            match part {
                $(Part::$part => $gguf,)*
            }
        }

        fn hf_part(part: Part) -> &'static str {
            match part {
                $(Part::$part => $hf,)*
            }
        }
    };
}

parts! {
    // Of the model.
    Embedding, "token_embd", "embed_tokens";
    Positions, "position_embd", "wpe";
    TokenTypes, "token_types", "embeddings.token_type_embeddings";
    EmbeddingNorm, "token_embd_norm", "embeddings.LayerNorm";
    /// Biases of scores by bucket of distance, `[buckets, heads]`.
    DistanceBuckets, "attn_rel_b", "encoder.relative_attention_bias";
    OutputNorm, "output_norm", "norm";
    Head, "output", "lm_head";
    /// Embeddings for all layers.
    LayerEmbeds, "per_layer_token_embd", "embed_tokens_per_layer";
    LayerProjection, "per_layer_model_proj", "per_layer_model_projection";
    LayerProjectionNorm, "per_layer_proj_norm", "per_layer_projection_norm";
    // Of a layer.
    AttentionNorm, "attn_norm", "input_layernorm";
    Q, "attn_q", "self_attn.q_proj";
    K, "attn_k", "self_attn.k_proj";
    V, "attn_v", "self_attn.v_proj";
    /// Q, K and V in one matrix, in this order.
    Qkv, "attn_qkv", "self_attn.qkv_proj";
    QNorm, "attn_q_norm", "self_attn.q_norm";
    KNorm, "attn_k_norm", "self_attn.k_norm";
    Sinks, "attn_sinks", "self_attn.sinks";
    AttentionOut, "attn_output", "self_attn.o_proj";
    // Of latent attention.
    QDown, "attn_q_a", "self_attn.q_a_proj";
    QDownNorm, "attn_q_a_norm", "self_attn.q_a_layernorm";
    QUp, "attn_q_b", "self_attn.q_b_proj";
    LatentDown, "attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa";
    LatentNorm, "attn_kv_a_norm", "self_attn.kv_a_layernorm";
    // Only files of llama.cpp have these two.
    /// K's and V's parts of the matrix that expands the latent vector, head by head, K's transposed.
    Absorb, "attn_k_b", "self_attn.k_b_proj";
    Value, "attn_v_b", "self_attn.v_b_proj";
    /// The unchanged matrix.
    LatentUp, "attn_kv_b", "self_attn.kv_b_proj";
    // With a norm after attention, definitions give the norm before the feed-forward network another name.
    PostAttentionNorm, "post_attention_norm", "post_attention_layernorm";
    FfnNorm, "ffn_norm", "post_attention_layernorm";
    Gate, "ffn_gate", "mlp.gate_proj";
    Up, "ffn_up", "mlp.up_proj";
    /// Gate and up in one matrix, in this order.
    GateUp, "ffn_up", "mlp.gate_up_proj";
    Down, "ffn_down", "mlp.down_proj";
    PostFfnNorm, "post_ffw_norm", "post_feedforward_layernorm";
    /// Norms of the residual stream after each branch.
    NormAfterMixer, "attn_output_norm", "attention.output.LayerNorm";
    NormAfterFfn, "layer_output_norm", "output.LayerNorm";
    Router, "ffn_gate_inp", "mlp.gate";
    SelectionBias, "exp_probs_b", "mlp.gate.e_score_correction_bias";
    /// One tensor of all experts; in Hugging Face's files `{}` is the number of an expert with its own tensor.
    ExpertGate, "ffn_gate_exps", "mlp.experts.{}.gate_proj";
    ExpertUp, "ffn_up_exps", "mlp.experts.{}.up_proj";
    ExpertDown, "ffn_down_exps", "mlp.experts.{}.down_proj";
    /// Gates and ups of all experts in one tensor.
    ExpertGateUp, "ffn_gate_up_exps", "mlp.experts.gate_up_proj";
    /// Downs of all experts in one tensor, in files that also have [`Part::ExpertGateUp`].
    ExpertDowns, "ffn_down_exps", "mlp.experts.down_proj";
    /// Of experts with rows of their own width.
    ExpertsIn, "ffn_latent_down", "mlp.fc1_latent_proj";
    ExpertsOut, "ffn_latent_up", "mlp.fc2_latent_proj";
    SharedGate, "ffn_gate_shexp", "mlp.shared_experts.gate_proj";
    SharedUp, "ffn_up_shexp", "mlp.shared_experts.up_proj";
    /// Gate and up of the shared expert in one matrix.
    SharedGateUp, "ffn_up_shexp", "mlp.shared_experts.gate_up_proj";
    SharedDown, "ffn_down_shexp", "mlp.shared_experts.down_proj";
    OutputGate, "ffn_gate_inp_shexp", "mlp.shared_expert_gate";
    // Of a layer with a dense network beside its experts.
    RouterScale, "ffn_gate_inp.scale", "router.scale";
    ExpertScale, "ffn_down_exps.scale", "router.per_expert_scale";
    ExpertsNorm, "pre_ffw_norm_2", "pre_feedforward_layernorm_2";
    PostDenseNorm, "post_ffw_norm_1", "post_feedforward_layernorm_1";
    PostExpertsNorm, "post_ffw_norm_2", "post_feedforward_layernorm_2";
    // Of a layer with an embedding.
    InputGate, "inp_gate", "per_layer_input_gate";
    InputOut, "proj", "per_layer_projection";
    PostInputNorm, "post_norm", "post_per_layer_input_norm";
    OutputScale, "layer_output_scale.weight", "layer_scalar";
    // Of a layer with a state.
    ConvIn, "shortconv.in_proj", "conv.in_proj";
    Conv, "ssm_conv1d", "linear_attn.conv1d";
    ConvOut, "shortconv.out_proj", "conv.out_proj";
    DeltaQkv, "attn_qkv", "linear_attn.in_proj_qkv";
    DeltaGate, "attn_gate", "linear_attn.in_proj_z";
    /// Queries, keys, values and gates in one matrix, key head by key head.
    DeltaQkvZ, "ssm_in", "linear_attn.in_proj_qkvz";
    DeltaAlpha, "ssm_alpha", "linear_attn.in_proj_a";
    DeltaBeta, "ssm_beta", "linear_attn.in_proj_b";
    /// Both in one matrix, key head by key head.
    DeltaBetaAlpha, "ssm_ba", "linear_attn.in_proj_ba";
    DeltaDecay, "ssm_a", "linear_attn.A_log";
    DeltaDt, "ssm_dt.bias", "linear_attn.dt_bias";
    DeltaNorm, "ssm_norm", "linear_attn.norm";
    DeltaOut, "ssm_out", "linear_attn.out_proj";
    // Of a head for multi-token prediction, which is the layer after the last one.
    /// Joins an embedding with a row of the model.
    MtpJoin, "nextn.eh_proj", "eh_proj";
    MtpTokenNorm, "nextn.enorm", "enorm";
    MtpRowNorm, "nextn.hnorm", "hnorm";
    MtpEmbedding, "nextn.embed_tokens", "embed_tokens";
    MtpOutputNorm, "nextn.shared_head_norm", "shared_head.norm";
    MtpOutput, "nextn.shared_head_head", "shared_head.head";
    // Of an assistant.
    /// Joins an embedding of the model with a row of it.
    AssistantIn, "nextn.pre_projection", "pre_projection";
    /// Makes a row in place of the model's.
    AssistantOut, "nextn.post_projection", "post_projection";
    // Of a scan.
    /// z, x, B, C and d in one matrix, in this order.
    SsmIn, "ssm_in", "mamba.in_proj";
    SsmSkip, "ssm_d", "mamba.D";
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
