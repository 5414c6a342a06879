//! A Hugging Face folder as a GGUF file has it: names, arrangements and keys, the reverse of what reading does.
//!
//! The result is read back as a GGUF file and compared with the folder, so that a model of which something would be lost is refused
//! and not converted.

use std::collections::HashMap;

use paguro_backend::{Bytes, NormKind, QkNormKind, RopeStyle, Scores, WeightFormat};

use super::{Config, HfMatrices, Names, Tensors, names::Part};
use crate::{
    error::ModelError,
    gguf::{Array, Contents, Metadata, Value},
    rearrange::join,
    rope::{Factors, RopeConfig, Yarn},
    tensor::{DType, Tensor},
};

/// A context that is longer than those of all models.
pub(crate) const LONGEST: usize = 1 << 30;

/// Parts of a model, and of a layer, that are one tensor in both kinds of files.
const MODEL_PARTS: [Part; 3] = [Part::Embedding, Part::OutputNorm, Part::Head];
const LAYER_PARTS: [Part; 21] = [
    Part::AttentionNorm,
    Part::Q,
    Part::K,
    Part::V,
    Part::Qkv,
    Part::QNorm,
    Part::KNorm,
    Part::Sinks,
    Part::AttentionOut,
    Part::PostAttentionNorm,
    Part::FfnNorm,
    Part::Gate,
    Part::Up,
    Part::GateUp,
    Part::Down,
    Part::PostFfnNorm,
    Part::Router,
    Part::SelectionBias,
    Part::SharedGate,
    Part::SharedUp,
    Part::SharedDown,
];
const EXPERT_PARTS: [Part; 3] = [Part::ExpertGate, Part::ExpertUp, Part::ExpertDown];

/// Converts a folder. `long` is its configuration for the longest context, `short` for the shortest; they differ in longrope's
/// factors alone, which change beyond `original` tokens.
///
/// # Errors
/// [`ModelError::Unsupported`] for models that a GGUF file would not have as they are.
pub(crate) fn export(
    long: &Config,
    short: &Config,
    original: Option<usize>,
    names: &Names,
    tensors: &[Tensor],
) -> Result<Contents, ModelError> {
    let config = long;
    let Config { block, definition, .. } = config;
    let arrangement = config.latent.is_some()
        || config.recurrent.is_some()
        || config.layer_embed > 0
        || block.positions
        || block.own_ropes
        || block.attention_gate
        || block.beside
        || definition.hf_matrices != HfMatrices::Plain
        || config.experts.is_some_and(|experts| experts.beside || experts.latent > 0);
    if arrangement {
        return Err(unsupported(config));
    }
    let mut export = Export { config, names, gguf: Names::gguf(definition), metadata: Metadata::default() };
    export.keys(short, original)?;
    let mut converted = export.tensors(tensors)?;
    converted.extend(export.rope_factors(short));
    let contents = Contents { metadata: export.metadata, tensors: converted };
    check(config, &contents)?;
    Ok(contents)
}

fn unsupported(config: &Config) -> ModelError {
    ModelError::unsupported(format!("converting folders of `{}` models to GGUF", config.definition.gguf))
}

/// Reads the file back and compares it with the folder's configuration.
fn check(config: &Config, contents: &Contents) -> Result<(), ModelError> {
    let mut tensors = Tensors::new(config.definition.gguf, &WeightFormat::ALL, &contents.tensors);
    let read = super::config_from_gguf(&contents.metadata, &mut tensors, Some(LONGEST))?;
    let lost = |what: &str| {
        let name = config.definition.gguf;
        Err(ModelError::unsupported(format!(
            "converting this `{name}` model to GGUF, which has no key for its {what},"
        )))
    };
    let close = |a: f32, b: f32| (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
    let numbers = [
        ("norm epsilon", config.norm_eps, read.norm_eps),
        ("scale of embeddings", config.embed_scale, read.embed_scale),
        ("scale of attention scores", config.attention_scale, read.attention_scale),
        ("scale of branches", config.branch_scale, read.branch_scale),
        ("scale of logits", config.logit_scale, read.logit_scale),
        ("cap of logits", config.logit_soft_cap.unwrap_or(0.0), read.logit_soft_cap.unwrap_or(0.0)),
        ("cap of scores", config.attention_soft_cap.unwrap_or(0.0), read.attention_soft_cap.unwrap_or(0.0)),
    ];
    if let Some((what, ..)) = numbers.into_iter().find(|&(_, a, b)| !close(a, b)) {
        return lost(what);
    }
    let shape = |config: &Config| {
        (config.hidden, config.heads, config.kv_heads, config.head_dim, config.ffn, config.context_length)
    };
    let experts = |config: &Config| {
        // Arrangements of folders alone.
        config.experts.map(|experts| super::ExpertsConfig {
            transposed: false,
            alternating: false,
            ..experts
        })
    };
    let ropes = |config: &Config| -> Vec<_> { config.ropes.iter().map(RopeConfig::lower).collect() };
    let same_ropes = ropes(config).len() == ropes(&read).len()
        && ropes(config).iter().zip(&ropes(&read)).all(|(a, b)| {
            let pairs = || a.frequencies.iter().zip(&b.frequencies);
            a.frequencies.len() == b.frequencies.len()
                && close(a.magnitude, b.magnitude)
                && pairs().all(|(&a, &b)| close(a, b))
        });
    let differences = [
        ("dimensions", shape(config) != shape(&read)),
        ("experts", experts(config) != experts(&read)),
        ("windows or kinds of layers", config.layers != read.layers),
        ("blocks", config.block != read.block || config.multipliers != read.multipliers),
        ("RoPE", !same_ropes),
        ("scale of positions", config.position_scale != read.position_scale),
    ];
    if let Some((what, _)) = differences.into_iter().find(|difference| difference.1) {
        return lost(what);
    }
    // Every tensor has a place, and every place a tensor.
    super::lower(&read, &Names::gguf(config.definition), tensors, config.context_length).map(drop)
}

struct Export<'a> {
    config: &'a Config,
    names: &'a Names,
    gguf: Names,
    metadata: Metadata,
}

impl Export<'_> {
    fn set(&mut self, key: &str, value: Value) {
        self.metadata.set(&format!("{}.{key}", self.config.definition.gguf), value);
    }

    fn size(&mut self, key: &str, size: usize) {
        self.set(key, Value::U32(size as u32));
    }

    fn number(&mut self, key: &str, number: f64) {
        self.set(key, Value::F32(number as f32));
    }

    fn keys(&mut self, short: &Config, original: Option<usize>) -> Result<(), ModelError> {
        let config = self.config;
        let architecture = config.definition.gguf;
        self.metadata.set("general.architecture", Value::String(architecture.to_owned()));
        self.size("context_length", config.context_length);
        self.size("embedding_length", config.hidden);
        self.size("block_count", config.layers.len());
        self.size("feed_forward_length", config.ffn);
        self.size("attention.head_count", config.heads);
        self.size("attention.head_count_kv", config.kv_heads);
        self.size("attention.key_length", config.head_dim);
        self.size("attention.value_length", config.head_dim);
        let eps = match config.block.norms {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        self.number(eps, config.norm_eps.into());
        self.windows();
        self.experts();
        self.rope(short, original)?;
        let known = |key: &str| config.definition.gguf_keys.contains(&key);
        let divides = architecture.starts_with("granite");
        let scales = [
            ("embedding_scale", config.embed_scale),
            ("residual_scale", config.branch_scale),
            ("attention.scale", config.attention_scale),
            ("logit_scale", if divides { 1.0 / config.logit_scale } else { config.logit_scale }),
        ];
        for (key, scale) in scales.into_iter().filter(|scale| known(scale.0)) {
            self.number(key, scale.into());
        }
        let caps = [
            ("attn_logit_softcapping", config.attention_soft_cap),
            ("final_logit_softcapping", config.logit_soft_cap),
        ];
        for (key, cap) in caps {
            if let Some(cap) = cap {
                self.number(key, cap.into());
            }
        }
        if let Some(scale) = config.position_scale {
            self.number("attention.temperature_scale", scale.beta.into());
            self.size("rope.scaling.original_context_length", scale.original as usize);
        }
        Ok(())
    }

    fn windows(&mut self) {
        let windows = self.config.layers.iter().map(|layer| layer.window);
        let Some(window) = windows.clone().flatten().next() else { return };
        self.size("attention.sliding_window", window as usize);
        let local: Vec<bool> = windows.map(|window| window.is_some()).collect();
        if !local.iter().all(|&local| local) {
            self.set("attention.sliding_window_pattern", Value::Array(Array::Bool(local)));
        }
    }

    fn experts(&mut self) {
        let Some(experts) = self.config.experts else { return };
        self.size("expert_count", experts.count);
        self.size("expert_used_count", experts.used);
        self.size("expert_feed_forward_length", experts.width);
        if experts.shared > 0 {
            self.size("expert_shared_feed_forward_length", experts.shared);
            self.size("expert_shared_count", experts.shared.div_ceil(experts.width));
        }
        if experts.dense_layers > 0 {
            self.size("leading_dense_block_count", experts.dense_layers);
        }
        if let Some(groups) = experts.groups {
            self.size("expert_group_count", groups.count);
            self.size("expert_group_used_count", groups.used);
        }
        self.number("expert_weights_scale", experts.factor.into());
        self.set("expert_weights_norm", Value::Bool(experts.renormalize));
        let function = match experts.scores {
            Scores::Softmax => 1,
            Scores::Sigmoid => 2,
            _ => return,
        };
        self.size("expert_gating_func", function);
    }

    fn rope(&mut self, short: &Config, original: Option<usize>) -> Result<(), ModelError> {
        let config = self.config;
        let Some(rope) = config.ropes.first() else { return Ok(()) };
        self.size("rope.dimension_count", rope.dims);
        self.number("rope.freq_base", rope.base);
        if let Some(local) = config.ropes.get(1) {
            self.number("rope.freq_base_swa", local.base);
        }
        if let Some(Yarn { beta_fast, beta_slow, original, .. }) = rope.yarn {
            self.set("rope.scaling.type", Value::String("yarn".to_owned()));
            self.number("rope.scaling.factor", rope.factor);
            self.size("rope.scaling.original_context_length", original as usize);
            self.number("rope.scaling.yarn_beta_fast", beta_fast);
            self.number("rope.scaling.yarn_beta_slow", beta_slow);
            self.number("rope.scaling.attn_factor", rope.magnitude / Yarn::magnitude(rope.factor, 1.0));
        } else if let (Factors::Listed(_), Some(other)) = (&rope.factors, short.ropes.first()) {
            // The factors for long contexts hold beyond the original one.
            if rope.factors == other.factors {
                return Err(unsupported(config));
            }
            self.set("rope.scaling.type", Value::String("longrope".to_owned()));
            self.size("rope.scaling.original_context_length", original.unwrap_or(config.context_length));
            self.number("rope.scaling.attn_factor", rope.magnitude);
        } else if rope.factor != 1.0 {
            self.set("rope.scaling.type", Value::String("linear".to_owned()));
            self.number("rope.scaling.factor", rope.factor);
        }
        Ok(())
    }

    /// Divisors of frequencies, which GGUF files have as tensors.
    fn rope_factors(&self, short: &Config) -> Vec<Tensor> {
        let Some(rope) = self.config.ropes.first() else { return Vec::new() };
        let listed = |rope: &RopeConfig| match &rope.factors {
            Factors::Listed(factors) => factors.clone(),
            _ => Vec::new(),
        };
        match &rope.factors {
            Factors::None => Vec::new(),
            Factors::Listed(long) => {
                let short = short.ropes.first().map(listed).unwrap_or_default();
                vec![vector("rope_factors_long.weight", long), vector("rope_factors_short.weight", &short)]
            }
            Factors::Llama3 { .. } => {
                let plain = RopeConfig { factors: Factors::None, ..rope.clone() };
                let factors: Vec<f32> = (0..rope.dims / 2)
                    .map(|pair| (plain.frequency(pair) / rope.frequency(pair)) as f32)
                    .collect();
                vec![vector("rope_freqs.weight", &factors)]
            }
        }
    }

    fn tensors(&self, tensors: &[Tensor]) -> Result<Vec<Tensor>, ModelError> {
        let by_name: HashMap<&str, &Tensor> = tensors.iter().map(|it| (it.name.as_str(), it)).collect();
        let mut used = Vec::new();
        let mut converted = Vec::new();
        let tied = self.config.tied == Some(true);
        let mut one = |part: Part, hf: String, gguf: String, converted: &mut Vec<Tensor>| {
            // Some parameters are no module's weight and have no suffix.
            for (suffix, own) in [(".weight", ".weight"), (".bias", ".bias"), ("", bare_suffix(part))] {
                let name = format!("{hf}{suffix}");
                if let Some(tensor) = by_name.get(name.as_str()) {
                    converted.push(self.convert(part, tensor, format!("{gguf}{own}"))?);
                    used.push(name);
                }
            }
            Ok::<_, ModelError>(())
        };
        for part in MODEL_PARTS.into_iter().filter(|&part| !(tied && part == Part::Head)) {
            one(part, self.names.model(part), self.gguf.model(part), &mut converted)?;
        }
        let block = self.config.block;
        let exists = |part: &Part| match part {
            Part::PostAttentionNorm | Part::PostFfnNorm => block.post_norms,
            Part::AttentionNorm | Part::FfnNorm => block.pre_norms,
            Part::Up => !block.fused_gate_up,
            Part::GateUp => block.fused_gate_up,
            _ => true,
        };
        for layer in 0..self.config.layers.len() {
            for part in LAYER_PARTS.into_iter().filter(exists) {
                one(part, self.names.layer(layer, part), self.gguf.layer(layer, part), &mut converted)?;
            }
            let output_gate = Part::OutputGate;
            one(
                output_gate,
                self.names.layer(layer, output_gate),
                self.gguf.layer(layer, output_gate),
                &mut converted,
            )?;
        }
        if let Some(experts) = self.config.experts {
            for layer in 0..self.config.layers.len() {
                for part in EXPERT_PARTS {
                    let names: Vec<_> = (0..experts.count)
                        .map(|expert| format!("{}.weight", self.names.expert(layer, part, expert)))
                        .collect();
                    let stack: Vec<&Tensor> =
                        names.iter().filter_map(|name| by_name.get(name.as_str()).copied()).collect();
                    if stack.len() == experts.count
                        && !by_name.contains_key(format!("{}.weight", self.names.layer(layer, part)).as_str())
                    {
                        let name = format!("{}.weight", self.gguf.layer(layer, part));
                        converted.push(stacked(name, &stack)?);
                        used.extend(names);
                    }
                }
            }
        }
        used.sort_unstable();
        let extra =
            self.config.layers.len()..self.config.layers.len().saturating_add(self.config.extra_layers);
        let unknown = tensors.iter().find(|tensor| {
            used.binary_search(&tensor.name).is_err() && !self.names.is_harmless(&tensor.name, tied, &extra)
        });
        match unknown {
            None => Ok(converted),
            Some(tensor) => Err(ModelError::unsupported(format!(
                "converting a `{}` model with tensor `{}` to GGUF",
                self.config.definition.gguf, tensor.name
            ))),
        }
    }

    /// A tensor under its name in GGUF files, arranged as these have it.
    fn convert(&self, part: Part, tensor: &Tensor, name: String) -> Result<Tensor, ModelError> {
        let tensor = Tensor { name, ..tensor.clone() };
        let is_norm = matches!(
            part,
            Part::OutputNorm
                | Part::AttentionNorm
                | Part::QNorm
                | Part::KNorm
                | Part::PostAttentionNorm
                | Part::FfnNorm
                | Part::PostFfnNorm
        );
        let reordered = self.config.definition.rope_styles == [RopeStyle::Interleaved, RopeStyle::HalfSplit];
        if reordered
            && (part == Part::Qkv
                || matches!(part, Part::QNorm | Part::KNorm)
                    && self.config.block.qk_norm != Some(QkNormKind::Row))
        {
            return Err(unsupported(self.config));
        }
        let tensor = match part {
            Part::Q | Part::K if reordered => self.reorder(tensor),
            _ => tensor,
        };
        // As llama.cpp has them: vectors and routers in f32.
        if tensor.shape.len() > 1 && part != Part::Router {
            return Ok(tensor);
        }
        let offset = if is_norm && tensor.name.ends_with(".weight") { self.config.norm_offset } else { 0.0 };
        floats(tensor, offset)
    }

    /// Rows of Q or K, of which RoPE pairs neighbours in GGUF files and halves of a head in folders.
    fn reorder(&self, tensor: Tensor) -> Tensor {
        let (head, rows) = (self.config.head_dim, tensor.shape[0]);
        let dims = self.config.ropes.first().map_or(0, |rope| rope.dims);
        let row = tensor.bytes.len() / rows.max(1);
        let source = |target: usize| {
            let (first, at) = (target / head * head, target % head);
            first + if at < dims { at / 2 + at % 2 * (dims / 2) } else { at }
        };
        let slice = |target: usize| tensor.bytes.slice(source(target) * row..(source(target) + 1) * row);
        if !rows.is_multiple_of(head) {
            return tensor; // refused when it is read back
        }
        Tensor { bytes: join((0..rows).map(slice).collect()), ..tensor }
    }
}

/// The suffix that GGUF files append to names of parameters that folders have without a suffix.
fn bare_suffix(part: Part) -> &'static str {
    match part {
        Part::SelectionBias => ".bias",
        _ => ".weight",
    }
}

/// A tensor in f32, with `offset` added to each value.
fn floats(tensor: Tensor, offset: f32) -> Result<Tensor, ModelError> {
    let unreadable = |problem: String| ModelError::Unreadable { tensor: tensor.name.clone(), problem };
    let format = tensor.dtype.weight_format().ok_or_else(|| unreadable(format!("it is {}", tensor.dtype)))?;
    let bytes = tensor.bytes.read().map_err(|error| unreadable(error.to_string()))?;
    let mut values = vec![0.0; tensor.elements() as usize];
    format.dequantize(&bytes, &mut values);
    let bytes: Vec<u8> = values.iter().flat_map(|value| (value + offset).to_le_bytes()).collect();
    Ok(Tensor { dtype: DType::Weight(WeightFormat::F32), bytes: Bytes::from(bytes), ..tensor })
}

fn vector(name: &str, values: &[f32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor {
        name: name.to_owned(),
        dtype: DType::Weight(WeightFormat::F32),
        shape: vec![values.len()],
        bytes: Bytes::from(bytes),
        offset: 0,
        file: 0,
    }
}

/// Matrices of experts as one tensor.
fn stacked(name: String, experts: &[&Tensor]) -> Result<Tensor, ModelError> {
    let first = experts[0];
    if let Some(other) = experts.iter().find(|it| it.dtype != first.dtype || it.shape != first.shape) {
        return Err(ModelError::unsupported(format!("`{}` unlike `{}`", other.name, first.name)));
    }
    let shape = [&[experts.len()], first.shape.as_slice()].concat();
    let bytes = join(experts.iter().map(|expert| expert.bytes.clone()).collect());
    Ok(Tensor { name, shape, bytes, ..first.clone() })
}
