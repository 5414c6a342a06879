//! The rules of mixtures: the format of each tensor.

use paguro_backend::WeightFormat::{self, *};
use paguro_model::gguf::Metadata;

use super::Mixture;

/// The part of a tensor in a model, as far as the rules distinguish parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Embedding,
    Output,
    Q,
    K,
    /// V, or a matrix that contains it.
    V,
    AttentionOut,
    Gate,
    Up,
    Down,
    Other,
}

impl Role {
    /// Returns the part of a tensor by its name.
    pub(super) fn of(name: &str) -> Self {
        const KNOWN: [(&str, Role); 9] = [
            ("attn_qkv.weight", Role::V),
            ("attn_kv_b.weight", Role::V),
            ("attn_v.weight", Role::V),
            ("attn_k.weight", Role::K),
            ("attn_q.weight", Role::Q),
            ("attn_output.weight", Role::AttentionOut),
            ("ffn_up", Role::Up),
            ("ffn_gate", Role::Gate),
            ("ffn_down", Role::Down),
        ];
        match name {
            "output.weight" => Self::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" => Self::Embedding,
            _ => KNOWN.iter().find(|known| name.contains(known.0)).map_or(Self::Other, |known| known.1),
        }
    }
}

/// Returns the layer of a tensor: 3 for `blk.3.attn_q.weight`.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Returns true if a tensor is worth quantizing: a matrix that is neither small nor sensitive.
pub(crate) fn is_quantized(name: &str, shape: &[usize]) -> bool {
    /// Parts of names of tensors that stay as they are.
    const KEPT: &[&str] = &[
        "_norm.weight",
        "ffn_gate_inp.weight",
        "altup",
        "laurel",
        "per_layer_model_proj",
        "ssm_conv1d",
        "shortconv.conv.weight",
        "indexer.k_proj.weight",
        "indexer.q_proj.weight",
        "time_mix_first.weight",
        "time_mix_w0.weight",
        "time_mix_w1.weight",
        "time_mix_w2.weight",
        "time_mix_v0.weight",
        "time_mix_v1.weight",
        "time_mix_v2.weight",
        "time_mix_a0.weight",
        "time_mix_a1.weight",
        "time_mix_a2.weight",
        "time_mix_g1.weight",
        "time_mix_g2.weight",
        "time_mix_decay_w1.weight",
        "time_mix_decay_w2.weight",
        "time_mix_lerp_fused.weight",
        "attn_rel_b.weight",
        ".position_embd",
        "sam.pos_embd",
        "sam.neck.",
        "sam.net_",
        ".rel_pos",
        ".patch_embd",
        ".patch_merger",
        "a.rvq.codebook",
        "mm.a.code_embd",
    ];
    // As ggml counts dimensions: outer ones of length 1 do not count.
    let is_matrix = shape.iter().rev().skip(1).any(|&dim| dim > 1);
    is_matrix
        && name.ends_with("weight")
        && name != "position_embd.weight"
        && name != "token_types.weight"
        && !KEPT.iter().any(|kept| name.contains(kept))
}

/// Numbers of a model that the rules depend on.
#[derive(Clone, Copy, Debug)]
struct Facts {
    layers: usize,
    experts: u32,
    /// Query heads of a K/V head, of the first layer.
    queries_per_kv: u32,
    /// Llama with 80 layers and grouped queries: its V matrices are small beside the others.
    is_70b: bool,
}

impl Facts {
    fn of(metadata: &Metadata) -> Self {
        let architecture = metadata.str("general.architecture").unwrap_or_default();
        let number = |key: &str| {
            let key = format!("{architecture}.{key}");
            metadata.u32(&key).or_else(|| metadata.u32s(&key)?.first().copied())
        };
        let layers = number("block_count").unwrap_or(0);
        let heads = number("attention.head_count").unwrap_or(0);
        let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
        Self {
            layers: layers as usize,
            experts: number("expert_count").unwrap_or(0),
            queries_per_kv: heads.checked_div(kv_heads).unwrap_or(0),
            is_70b: architecture == "llama" && layers == 80 && heads != kv_heads,
        }
    }
}

/// Chooses the format of one tensor after the other. Some rules count the tensors of a kind, so the order matters: by layer, then
/// by name.
#[derive(Debug)]
pub(crate) struct Chooser {
    mixture: Mixture,
    facts: Facts,
    has_importance: bool,
    /// True if the embeddings are the head as well.
    tied: bool,
    /// Matrices with [`Role::V`], and how many of them were seen.
    values: usize,
    values_seen: usize,
    downs_seen: usize,
    gates_seen: usize,
    ups_seen: usize,
}

/// The choice for a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) format: WeightFormat,
    /// True if the row length does not fit the format of the mixture, and another was taken.
    pub(crate) fallback: bool,
    /// True if the tensor needs an importance matrix.
    pub(crate) needs_importance: bool,
}

impl Chooser {
    /// Creates a chooser for a file with tensors of these names.
    pub(crate) fn new<'a>(
        mixture: Mixture,
        metadata: &Metadata,
        names: impl Iterator<Item = &'a str>,
        has_importance: bool,
    ) -> Self {
        let (mut tied, mut values) = (true, 0);
        for name in names {
            match Role::of(name) {
                Role::Output => tied = false,
                Role::V => values += 1,
                _ => {}
            }
        }
        let facts = Facts::of(metadata);
        Self {
            mixture,
            facts,
            has_importance,
            tied,
            values,
            values_seen: 0,
            downs_seen: 0,
            gates_seen: 0,
            ups_seen: 0,
        }
    }

    /// Chooses the format of a tensor for which [`is_quantized`] is true.
    pub(crate) fn choose(&mut self, name: &str, shape: &[usize]) -> Choice {
        let base = self.mixture.base();
        let cols = shape.last().copied().unwrap_or(1);
        let wanted = if base.is_quantized() { self.rule(name, shape, cols) } else { base };
        let format = fitting(wanted, cols);
        Choice {
            format,
            fallback: format != wanted,
            needs_importance: self.mixture.needs_importance(name, format),
        }
    }

    /// Returns the format of the rules, whether or not a row is a whole number of its blocks.
    fn rule(&mut self, name: &str, shape: &[usize], cols: usize) -> WeightFormat {
        use Mixture as M;
        let Facts { layers, experts, queries_per_kv, is_70b } = self.facts;
        let (mixture, base) = (self.mixture, self.mixture.base());
        let role = Role::of(name);
        let grouped = queries_per_kv >= 4;
        if role == Role::Output || role == Role::Embedding && self.tied {
            return match mixture {
                M::MXFP4 | M::Q8_0 => Q8_0,
                _ if !cols.is_multiple_of(base.block_len()) => Q8_0,
                M::IQ1_S | M::IQ1_M | M::IQ2_XXS | M::IQ2_XS | M::IQ2_S | M::IQ2_M | M::IQ3_XXS => Q5_K,
                _ => Q6_K,
            };
        }
        if mixture == M::MXFP4 {
            let is_stack = shape.len() > 2 && shape[shape.len() - 3] > 1;
            return if is_stack { MXFP4 } else { Q8_0 };
        }
        match role {
            Role::Embedding => match mixture {
                M::TQ1_0 | M::TQ2_0 | M::Q2_0 => Q4_K,
                M::IQ1_S | M::IQ1_M | M::IQ2_XXS | M::IQ2_XS => Q2_K,
                M::IQ2_S | M::IQ2_M | M::IQ3_XXS => IQ3_S,
                _ => base,
            },
            _ if matches!(base, IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S) => self.below_three_bits(role),
            Role::V => {
                let index = self.values_seen;
                self.values_seen += 1;
                let format = match mixture {
                    M::Q2_K if grouped => Q4_K,
                    M::Q2_K => Q3_K,
                    M::Q2_K_S if grouped => Q4_K,
                    M::IQ3_XXS | M::IQ3_XS | M::IQ3_S if grouped => Q4_K,
                    M::IQ3_XXS if !self.has_importance => IQ3_S,
                    M::IQ3_XXS => IQ3_XXS,
                    M::IQ3_M => Q4_K,
                    M::Q3_K_M if index < 2 => Q5_K,
                    M::Q3_K_M => Q4_K,
                    M::Q3_K_L => Q5_K,
                    M::IQ4_NL | M::IQ4_XS if grouped => Q5_K,
                    M::Q4_K_M | M::Q5_K_M if more_bits(index, self.values) => Q6_K,
                    M::Q4_K_S if index < 4 => Q5_K,
                    _ => base,
                };
                match format {
                    _ if experts == 8 => Q8_0,
                    Q3_K | Q4_K if is_70b => Q5_K,
                    format => format,
                }
            }
            Role::K if experts == 8 => Q8_0,
            Role::K | Role::Q if mixture == M::IQ3_XS => IQ3_XXS,
            Role::K | Role::Q if mixture == M::IQ3_XXS => IQ2_S,
            Role::Down => {
                let counted = self.downs_seen;
                self.downs_seen += 1;
                // Experts may have tensors of their own, so their names have the layer.
                let index = if experts > 1 { layer_of(name).unwrap_or(counted) } else { counted };
                let early = index < layers / 8;
                match mixture {
                    M::Q2_K => Q3_K,
                    M::Q2_K_S if early => Q4_K,
                    M::IQ3_XXS if !self.has_importance => {
                        if early {
                            Q4_K
                        } else {
                            Q3_K
                        }
                    }
                    M::IQ3_M if early || experts == 8 && more_bits(index, layers) => Q4_K,
                    M::Q3_K_M if index < layers / 16 => Q5_K,
                    M::Q3_K_M => Q4_K,
                    M::Q3_K_L => Q5_K,
                    M::Q4_K_M | M::Q5_K_M if more_bits(index, layers) => Q6_K,
                    M::IQ4_NL | M::IQ4_XS if early && !self.has_importance => Q5_K,
                    M::Q4_K_S if early => Q5_K,
                    M::Q4_0 if early && self.has_importance => Q4_1,
                    M::Q5_0 if early && self.has_importance => Q5_1,
                    _ => base,
                }
            }
            Role::AttentionOut if experts == 8 => match mixture {
                M::Q2_K | M::Q3_K_S | M::Q3_K_M | M::IQ4_NL | M::IQ4_XS | M::Q4_K_S | M::Q4_K_M => Q5_K,
                M::IQ3_XXS | M::IQ3_XS | M::IQ3_S | M::IQ3_M => Q5_K,
                _ => base,
            },
            Role::AttentionOut => match mixture {
                M::Q2_K => Q3_K,
                M::IQ3_XXS => IQ3_S,
                M::Q3_K_M | M::IQ3_M => Q4_K,
                M::Q3_K_L => Q5_K,
                _ => base,
            },
            Role::Gate | Role::Up if mixture == M::IQ3_XS => {
                let seen = if role == Role::Gate { &mut self.gates_seen } else { &mut self.ups_seen };
                let counted = *seen;
                *seen += 1;
                let index = if experts > 1 { layer_of(name).unwrap_or(counted) } else { counted };
                if (layers / 8..7 * layers / 8).contains(&index) { IQ3_XXS } else { base }
            }
            _ => base,
        }
    }

    /// Returns the format of a matrix in a mixture below three bits.
    fn below_three_bits(&mut self, role: Role) -> WeightFormat {
        let Facts { layers, experts, queries_per_kv, .. } = self.facts;
        let (base, is_larger) =
            (self.mixture.base(), matches!(self.mixture, Mixture::IQ2_S | Mixture::IQ2_M));
        let more = if is_larger { IQ3_S } else { Q2_K };
        match role {
            Role::V if queries_per_kv >= 4 || experts >= 4 => Q4_K,
            Role::V => more,
            Role::K if experts == 8 => Q4_K,
            Role::Down => {
                let early = self.downs_seen < layers / 8;
                self.downs_seen += 1;
                if early { more } else { base }
            }
            Role::AttentionOut if experts == 8 => Q5_K,
            Role::AttentionOut if is_larger => IQ3_S,
            Role::AttentionOut if matches!(base, IQ1_S | IQ1_M) => IQ2_XXS,
            _ => base,
        }
    }
}

/// Returns true for the first and last eighth of the layers, and for every third one between them.
fn more_bits(index: usize, count: usize) -> bool {
    let eighth = count / 8;
    index < eighth || index >= 7 * count / 8 || (index - eighth) % 3 == 2
}

/// Returns the format, or one with smaller blocks if a row is not a whole number of its blocks.
fn fitting(format: WeightFormat, cols: usize) -> WeightFormat {
    let fits = |format: &WeightFormat| cols.is_multiple_of(format.block_len());
    let smaller = match format {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        Q2_0 | Q2_K | Q3_K | TQ1_0 | TQ2_0 => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        other => other,
    };
    [format, smaller].into_iter().find(fits).unwrap_or(F16)
}

#[cfg(test)]
mod tests {
    use paguro_model::gguf::Value;

    use super::*;

    fn chooser(mixture: Mixture, facts: &[(&str, u32)], has_importance: bool) -> Chooser {
        let mut metadata = Metadata::default();
        metadata.set("general.architecture", Value::String("llama".into()));
        for (key, value) in facts {
            metadata.set(&format!("llama.{key}"), Value::U32(*value));
        }
        let names = (0..16).map(|layer| format!("blk.{layer}.attn_v.weight")).collect::<Vec<_>>();
        let names = names.iter().map(String::as_str).chain(["output.weight"]);
        Chooser::new(mixture, &metadata, names, has_importance)
    }

    #[test]
    fn layers_at_both_ends_get_more_bits() {
        let more: Vec<_> = (0..16).filter(|&index| more_bits(index, 16)).collect();
        assert_eq!(more, [0, 1, 4, 7, 10, 13, 14, 15]);
        let mut chooser = chooser(Mixture::Q4_K_M, &[("block_count", 16)], false);
        for layer in 0..16 {
            let mut of =
                |part: &str| chooser.choose(&format!("blk.{layer}.{part}.weight"), &[256, 256]).format;
            let expected = if more.contains(&layer) { Q6_K } else { Q4_K };
            assert_eq!(
                [of("attn_v"), of("ffn_down"), of("ffn_up"), of("attn_k")],
                [expected, expected, Q4_K, Q4_K]
            );
        }
    }

    #[test]
    fn parts_have_rules_of_their_own() {
        let grouped = [("block_count", 16), ("attention.head_count", 8), ("attention.head_count_kv", 2)];
        let eight = [("block_count", 16), ("expert_count", 8)];
        type Case<'a> = (Mixture, &'a [(&'a str, u32)], bool, &'a str, &'a [usize], WeightFormat);
        let cases: [Case<'_>; 25] = [
            (Mixture::Q4_K_M, &[], false, "output.weight", &[9, 256], Q6_K),
            (Mixture::Q8_0, &[], false, "output.weight", &[9, 256], Q8_0),
            (Mixture::Q4_K_M, &[], false, "token_embd.weight", &[9, 256], Q4_K),
            (Mixture::TQ1_0, &[], false, "token_embd.weight", &[9, 256], Q4_K),
            (Mixture::Q4_K_M, &[], false, "blk.9.attn_q.weight", &[9, 64], Q5_0),
            (Mixture::Q6_K, &[], false, "blk.9.attn_q.weight", &[9, 64], Q8_0),
            (Mixture::Q6_K, &[], false, "blk.9.attn_q.weight", &[9, 72], F16),
            (Mixture::Q2_K, &grouped, false, "blk.9.attn_v.weight", &[9, 256], Q4_K),
            (Mixture::IQ4_XS, &grouped, false, "blk.0.attn_v.weight", &[9, 256], Q5_K),
            (Mixture::IQ4_XS, &grouped, true, "blk.0.ffn_down.weight", &[9, 256], IQ4_XS),
            (Mixture::IQ4_XS, &grouped, false, "blk.0.ffn_down.weight", &[9, 256], Q5_K),
            (Mixture::Q4_0, &grouped, true, "blk.0.ffn_down.weight", &[9, 256], Q4_1),
            (Mixture::Q3_K_M, &eight, false, "blk.9.attn_k.weight", &[9, 256], Q8_0),
            (Mixture::Q3_K_M, &eight, false, "blk.9.attn_output.weight", &[9, 256], Q5_K),
            (Mixture::MXFP4, &eight, false, "blk.9.ffn_up_exps.weight", &[8, 9, 256], MXFP4),
            (Mixture::MXFP4, &eight, false, "blk.9.attn_q.weight", &[9, 256], Q8_0),
            (Mixture::IQ1_S, &[], true, "output.weight", &[9, 256], Q5_K),
            (Mixture::IQ1_M, &[], true, "token_embd.weight", &[9, 256], Q2_K),
            (Mixture::IQ1_S, &grouped, true, "blk.9.attn_v.weight", &[9, 256], Q4_K),
            (Mixture::IQ1_M, &[], true, "blk.9.attn_output.weight", &[9, 256], IQ2_XXS),
            (Mixture::IQ1_S, &eight, true, "blk.9.attn_output.weight", &[9, 256], Q5_K),
            (Mixture::IQ1_S, &grouped, true, "blk.0.ffn_down.weight", &[9, 256], Q2_K),
            (Mixture::IQ1_M, &grouped, true, "blk.9.ffn_up.weight", &[9, 256], IQ1_M),
            (Mixture::IQ1_S, &[], true, "blk.9.attn_q.weight", &[9, 64], IQ4_NL),
            (Mixture::F16, &eight, false, "output.weight", &[9, 256], F16),
        ];
        for (mixture, facts, has_importance, name, shape, expected) in cases {
            let choice = chooser(mixture, facts, has_importance).choose(name, shape);
            assert_eq!(choice.format, expected, "{mixture} {name} {facts:?}");
        }
    }

    #[test]
    fn small_and_sensitive_tensors_stay() {
        let kept: [(&str, &[usize]); 5] = [
            ("blk.0.attn_norm.weight", &[256]),
            ("blk.0.attn_q.bias", &[256]),
            ("blk.0.ffn_gate_inp.weight", &[8, 256]),
            ("blk.0.ssm_conv1d.weight", &[256, 4]),
            ("blk.0.ssm_d", &[16, 1]),
        ];
        for (name, shape) in kept {
            assert!(!is_quantized(name, shape), "{name}");
        }
        assert!(is_quantized("blk.0.ffn_up_exps.weight", &[8, 16, 256]));
    }
}
