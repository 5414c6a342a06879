//! A Hugging Face folder as a GGUF file has it: names, arrangements and keys, the reverse of what reading does.
//!
//! Most tensors keep their arrangement and get another name ([`tensors`]). Tensors that folders arrange in many ways, such as experts,
//! are taken from the program to which the folder is lowered. The result is read back as a GGUF file and compared with the folder, so that a
//! model of which something would be lost is refused and not converted.

mod multipliers;
mod sources;
mod tensors;

use paguro_backend::{Matrix, NormKind, Program, Scores, WeightFormat, Weights};

use self::multipliers::Factors as Multiplied;
use super::{Config, Names, Recurrent, SsdConfig, Tensors, bert, config::Distances, granite, nemotron_h};
use crate::{
    error::ModelError,
    gguf::{Array, Contents, Metadata, Value},
    rope::{Factors, RopeConfig, Yarn},
    tensor::Tensor,
};

/// A context that is longer than those of all models.
pub(crate) const LONGEST: usize = 1 << 30;

/// Numbers of a folder's `config.json` that a [`Config`] lacks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Original {
    /// The context of a model's first training, beyond which longrope has other factors.
    pub(crate) context: Option<usize>,
    /// RoPE's sections, which only matter for images.
    pub(crate) sections: Option<Vec<i32>>,
}

/// Converts a folder. `long` is its configuration for the longest context, `short` for the shortest; they differ in longrope's
/// factors alone, which change beyond the original context.
///
/// # Errors
/// [`ModelError::Unsupported`] for models that a GGUF file would not have as they are.
pub(crate) fn export(
    long: &Config,
    short: &Config,
    original: &Original,
    names: &Names,
    tensors: &[Tensor],
) -> Result<Contents, ModelError> {
    // Files of llama.cpp have no architecture with buckets of distances.
    let has_no_name = long.block.distances == Distances::Buckets;
    if has_no_name || long.definition.is_encoder() != long.block.bidirectional {
        return Err(unsupported(long));
    }
    let places = Tensors::new(long.definition.gguf, &WeightFormat::ALL, tensors);
    let (program, weights) = super::lower(long, names, places, long.context_length)?;
    let (config, multiplied) = multipliers::fold(target(long));
    let gguf = Names::gguf(config.definition);
    let metadata = Metadata::default();
    let position_offset = long.position_offset;
    let mut export = Export {
        config: &config,
        names,
        gguf,
        metadata,
        program: &program,
        weights: &weights,
        position_offset,
    };
    export.keys(short, original)?;
    let mut converted = export.tensors(tensors, &multiplied)?;
    converted.extend(export.rope_factors(short));
    let contents = Contents { metadata: export.metadata, tensors: converted };
    check(&config, &contents, (&program, &weights), &multiplied)?;
    Ok(contents)
}

/// Returns the configuration with the definition that the file gets: some classes of transformers are several
/// architectures of GGUF.
fn target(config: &Config) -> Config {
    let mut config = config.clone();
    let has_states = config.layers.iter().any(|layer| layer.recurrent);
    config.experts = config.experts.filter(|_| config.layers.iter().any(|layer| layer.experts));
    if let Some(experts) = &mut config.experts
        && !config.block.zeros
    {
        experts.dense_layers = config.layers.iter().take_while(|layer| !layer.experts).count();
    }
    config.definition = match (config.definition.gguf, config.experts) {
        ("nemotron_h_moe", None) => &nemotron_h::DENSE,
        ("granitehybrid", None) if !has_states => &granite::DEF,
        ("granitehybrid", Some(_)) if !has_states => &granite::MOE,
        // The table of positions begins with the first that is used.
        ("xlm-roberta", _) => &bert::BERT,
        _ => config.definition,
    };
    config.position_offset = 0;
    if !has_states {
        config.recurrent = None;
        config.block.zeros = config.definition.block.zeros;
    }
    if let Some(Recurrent::Ssd(scan)) = &mut config.recurrent
        && config.definition.gguf.starts_with("nemotron_h")
    {
        // Files of llama.cpp do not have the least step, a thousandth.
        scan.limits = (0.0, f32::INFINITY);
    }
    config
}

fn unsupported(config: &Config) -> ModelError {
    ModelError::unsupported(format!("converting folders of `{}` models to GGUF", config.definition.gguf))
}

/// Reads the file back and compares it with the folder's configuration and weights.
fn check(
    config: &Config,
    contents: &Contents,
    (program, weights): (&Program, &Weights),
    multiplied: &Multiplied,
) -> Result<(), ModelError> {
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
    let shape = |config: &Config| (config.hidden, config.heads, config.context_length, config.layer_embed);
    let experts = |config: &Config| {
        // Arrangements of folders alone.
        config.experts.map(|experts| super::ExpertsConfig {
            transposed: false,
            alternating: false,
            ..experts
        })
    };
    let block = |config: &Config| {
        // The arrangement of a folder.
        super::Block { fused_gate_up: config.definition.block.fused_gate_up, ..config.block }
    };
    let ropes = |config: &Config| -> Vec<_> { config.ropes.iter().map(RopeConfig::lower).collect() };
    let reordered = config.definition.rope_styles == super::REORDERED;
    let same_ropes = ropes(config).len() == ropes(&read).len()
        && ropes(config).iter().zip(&ropes(&read)).all(|(a, b)| {
            let pairs = || a.frequencies.iter().zip(&b.frequencies);
            a.frequencies.len() == b.frequencies.len()
                && close(a.magnitude, b.magnitude)
                && (reordered || a.style == b.style)
                && pairs().all(|(&a, &b)| close(a, b))
        });
    let differences = [
        ("dimensions", shape(config) != shape(&read)),
        ("experts", experts(config) != experts(&read)),
        ("windows or kinds of layers", !same_layers(config, &read)),
        ("blocks", block(config) != block(&read) || config.multipliers != read.multipliers),
        ("latent attention", config.latent != read.latent),
        ("mixers with a state", config.recurrent != read.recurrent),
        ("RoPE", !same_ropes),
        ("scale of positions", config.position_scale != read.position_scale),
    ];
    if let Some((what, _)) = differences.into_iter().find(|difference| difference.1) {
        return lost(what);
    }
    // Every tensor has a place, and every place a tensor. A bias that is lost would leave the numbers of weights unequal.
    let again = super::lower(&read, &Names::gguf(config.definition), tensors, config.context_length)?;
    let shapes = |program: &Program, weights: &Weights| shapes(program, weights, config.context_length);
    if multiplied.is_none() && shapes(program, weights) != shapes(&again.0, &again.1) {
        let name = config.definition.gguf;
        let what = format!("converting this `{name}` model to GGUF, in which some tensors have no place,");
        return Err(ModelError::unsupported(what));
    }
    Ok(())
}

/// Shapes of all weights, sorted. Of a table of positions, those up to `context` count.
fn shapes(program: &Program, weights: &Weights, context: usize) -> Vec<[usize; 3]> {
    let positions = program.embed.positions.as_ref().map(|positions| weights.matrix(positions.table));
    let shape = |matrix: &Matrix| {
        let is_cut = positions.is_some_and(|positions| std::ptr::eq(positions, matrix));
        let rows = if is_cut { matrix.rows.min(context) } else { matrix.rows };
        [matrix.parts, rows, matrix.cols]
    };
    let matrices = weights.matrices.iter().chain(&weights.tables).map(shape);
    let mut all: Vec<_> = matrices.chain(weights.vectors.iter().map(|it| [0, 0, it.len()])).collect();
    all.sort_unstable();
    all
}

/// Returns true if the layers have the same parts with the same dimensions.
fn same_layers(a: &Config, b: &Config) -> bool {
    let parts = |config: &Config, index: usize| {
        let layer = config.layers[index];
        let heads = (config.kv_heads_of(index), config.head_dim_of(index));
        (
            (layer.window, layer.experts, layer.recurrent, layer.mixer, layer.network),
            config.attends(index).then_some((heads, layer.rope, layer.geometry.shares_kv)),
            (layer.network && !layer.experts).then(|| config.ffn_of(index)),
        )
    };
    a.layers.len() == b.layers.len() && (0..a.layers.len()).all(|index| parts(a, index) == parts(b, index))
}

struct Export<'a> {
    /// The configuration as the file has it.
    config: &'a Config,
    names: &'a Names,
    gguf: Names,
    metadata: Metadata,
    /// The folder's program.
    program: &'a Program,
    weights: &'a Weights,
    /// Rows of the folder's table of positions that are not used.
    position_offset: usize,
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

    /// A number for each layer, or one number if all are equal.
    fn by_layer(&mut self, key: &str, numbers: &[usize]) {
        match numbers.split_first() {
            Some((first, rest)) if rest.iter().any(|number| number != first) => {
                let numbers = numbers.iter().map(|&number| number as i32).collect();
                self.set(key, Value::Array(Array::I32(numbers)));
            }
            first => self.size(key, first.map_or(0, |first| *first.0)),
        }
    }

    fn keys(&mut self, short: &Config, original: &Original) -> Result<(), ModelError> {
        let config = self.config;
        let architecture = config.definition.gguf;
        self.metadata.set("general.architecture", Value::String(architecture.to_owned()));
        self.size("context_length", config.context_length);
        self.size("embedding_length", config.hidden);
        self.size("block_count", config.layers.len());
        self.size("vocab_size", self.program.vocab);
        self.dimensions();
        self.mixers();
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
        if config.block.bidirectional {
            self.set("attention.causal", Value::Bool(false));
        }
        if let Some(types) = self.program.embed.types {
            self.metadata.set("tokenizer.ggml.token_type_count", Value::U32(types.count as u32));
        }
        if config.block.distances == Distances::Alibi {
            self.number("attention.max_alibi_bias", 8.0);
        }
        if let Some(scale) = config.position_scale {
            self.number("attention.temperature_scale", scale.beta.into());
            self.size("rope.scaling.original_context_length", scale.original as usize);
            if config.latent.is_some() {
                self.size("attention.temperature_length", scale.original as usize);
            }
        }
        Ok(())
    }

    /// Heads of attention, and widths of feed-forward networks. Layers without them have zeros where the architecture needs that.
    fn dimensions(&mut self) {
        let config = self.config;
        let layers = 0..config.layers.len();
        if !config.block.attention {
            self.size("attention.head_count", 0);
            return self.size("feed_forward_length", 0);
        }
        self.size("attention.head_count", config.heads);
        let is_conv = matches!(config.recurrent, Some(Recurrent::Conv { .. }));
        let kv_heads = |layer: usize| match config.attends(layer) || !(config.block.zeros || is_conv) {
            true => config.kv_heads_of(layer),
            false => 0,
        };
        let ffn = |layer: usize| match config.experts {
            _ if !config.layers[layer].network => 0,
            Some(experts) if config.block.zeros && config.layers[layer].experts => experts.width,
            _ => config.ffn_of(layer),
        };
        self.by_layer("attention.head_count_kv", &layers.clone().map(kv_heads).collect::<Vec<_>>());
        self.by_layer("feed_forward_length", &layers.map(ffn).collect::<Vec<_>>());
        let dim = |has_window: bool| {
            let layer = config.layers.iter().position(|layer| layer.window.is_some() == has_window);
            layer.map_or(config.head_dim, |layer| config.head_dim_of(layer))
        };
        let (key, value) = match config.latent {
            Some((shape, _)) => (shape.key_dim(), shape.latent),
            None if config.block.own_ropes => (dim(false), dim(false)),
            None => (config.head_dim, config.head_dim),
        };
        self.size("attention.key_length", key);
        self.size("attention.value_length", value);
        if config.block.own_ropes {
            self.size("attention.key_length_swa", dim(true));
            self.size("attention.value_length_swa", dim(true));
        }
    }

    /// Latent attention, mixers with a state, and what the layers of Gemma 4 have.
    fn mixers(&mut self) {
        let config = self.config;
        if let Some((shape, rank)) = config.latent {
            self.size("attention.key_length_mla", shape.plain + shape.rotated);
            self.size("attention.value_length_mla", shape.value);
            self.size("attention.kv_lora_rank", shape.latent);
            if let Some(rank) = rank {
                self.size("attention.q_lora_rank", rank);
            }
        }
        if config.block.own_ropes {
            let shared = config.layers.iter().filter(|layer| layer.geometry.shares_kv).count();
            self.size("attention.shared_kv_layers", shared);
            self.size("embedding_length_per_layer_input", config.layer_embed);
        }
        let (taps, shape) = match config.recurrent {
            None => return,
            Some(Recurrent::Conv { taps }) => return self.size("shortconv.l_cache", taps),
            Some(Recurrent::Delta { taps, shape, .. } | Recurrent::Ssd(SsdConfig { taps, shape, .. })) => {
                (taps, shape)
            }
        };
        self.size("ssm.conv_kernel", taps);
        self.size("ssm.state_size", shape.key_dim);
        self.size("ssm.group_count", shape.key_heads);
        self.size("ssm.time_step_rank", shape.value_heads);
        self.size("ssm.inner_size", shape.value_width());
        if matches!(config.recurrent, Some(Recurrent::Delta { .. })) {
            let recurrent = config.layers.iter().map(|layer| layer.recurrent).collect();
            self.set("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
        } else if config.definition.gguf == "granitehybrid" {
            // A switch, to llama.cpp.
            let turns = config.layers.iter().any(|layer| layer.rope.is_some());
            self.set("rope.scaling.finetuned", Value::Bool(turns));
        }
    }

    fn windows(&mut self) {
        let windows = self.config.layers.iter().map(|layer| layer.window);
        let Some(window) = windows.clone().flatten().next() else { return };
        // In files, windows of encoders count in both directions together, as `Config::set_spans` reads them.
        let window = if self.config.block.bidirectional { 2 * (window - 1) } else { window };
        self.size("attention.sliding_window", window as usize);
        let local: Vec<bool> = windows.map(|window| window.is_some()).collect();
        if self.config.block.own_ropes || !local.iter().all(|&local| local) {
            self.set("attention.sliding_window_pattern", Value::Array(Array::Bool(local)));
        }
    }

    fn experts(&mut self) {
        let Some(experts) = self.config.experts else { return };
        self.size("expert_count", experts.count);
        self.size("expert_used_count", experts.used);
        self.size("expert_feed_forward_length", experts.width);
        if experts.latent > 0 {
            self.size("moe_latent_size", experts.latent);
        }
        if self.config.latent.is_some() && experts.shared == 0 {
            self.size("expert_shared_count", 0);
        }
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

    fn rope(&mut self, short: &Config, original: &Original) -> Result<(), ModelError> {
        let config = self.config;
        let Some(rope) = config.ropes.first() else { return Ok(()) };
        self.size("rope.dimension_count", rope.dims);
        if config.definition.gguf_keys.contains(&"rope.dimension_sections") {
            // Any sections mean the same for text.
            let third = (rope.dims / 2 / 3) as i32;
            let even = || vec![(rope.dims / 2) as i32 - 2 * third, third, third];
            let mut sections = original.sections.clone().unwrap_or_else(even);
            sections.resize(4, 0);
            self.set("rope.dimension_sections", Value::Array(Array::I32(sections)));
        }
        self.number("rope.freq_base", rope.base);
        if let Some(local) = config.ropes.get(1) {
            self.number("rope.freq_base_swa", local.base);
            if config.block.own_ropes {
                self.size("rope.dimension_count_swa", local.dims);
            }
        }
        if let Some(Yarn { beta_fast, beta_slow, original, .. }) = rope.yarn {
            self.set("rope.scaling.type", Value::String("yarn".to_owned()));
            self.number("rope.scaling.factor", rope.factor);
            self.size("rope.scaling.original_context_length", original as usize);
            self.number("rope.scaling.yarn_beta_fast", beta_fast);
            self.number("rope.scaling.yarn_beta_slow", beta_slow);
            match self.yarn_scale(rope.factor) {
                // The magnitude is in the scale of scores, as llama.cpp's converter writes it.
                Some(all) => self.number("rope.scaling.yarn_log_multiplier", 0.1 * all),
                None => {
                    let magnitude = rope.magnitude / Yarn::magnitude(rope.factor, 1.0);
                    self.number("rope.scaling.attn_factor", magnitude);
                }
            }
        } else if config.block.own_ropes {
            // Its factors are a tensor without a key.
        } else if let (Factors::Listed(_), Some(other)) = (&rope.factors, short.ropes.first()) {
            // The factors for long contexts hold beyond the original one.
            if rope.factors == other.factors {
                return Err(unsupported(config));
            }
            self.set("rope.scaling.type", Value::String("longrope".to_owned()));
            self.size(
                "rope.scaling.original_context_length",
                original.context.unwrap_or(config.context_length),
            );
            self.number("rope.scaling.attn_factor", rope.magnitude);
        } else if rope.factor != 1.0 {
            self.set("rope.scaling.type", Value::String("linear".to_owned()));
            self.number("rope.scaling.factor", rope.factor);
        }
        Ok(())
    }

    /// YaRN's `mscale_all_dim`, by which latent attention scales its scores.
    fn yarn_scale(&self, factor: f64) -> Option<f64> {
        let (shape, _) = self.config.latent?;
        let plain = 1.0 / ((shape.plain + shape.rotated) as f64).sqrt();
        let magnitude = (f64::from(self.config.attention_scale) / plain).sqrt();
        // The inverse of `Yarn::magnitude`.
        let all = (magnitude - 1.0) / (0.1 * factor.ln());
        (factor > 1.0 && (magnitude - 1.0).abs() > 1e-6).then_some(all)
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
            Factors::Listed(factors) if self.config.block.own_ropes => {
                vec![tensors::vector("rope_freqs.weight", factors)]
            }
            Factors::Listed(long) => {
                let short = short.ropes.first().map(listed).unwrap_or_default();
                vec![
                    tensors::vector("rope_factors_long.weight", long),
                    tensors::vector("rope_factors_short.weight", &short),
                ]
            }
            Factors::Llama3 { .. } => {
                let plain = RopeConfig { factors: Factors::None, ..rope.clone() };
                let factors: Vec<f32> = (0..rope.dims / 2)
                    .map(|pair| (plain.frequency(pair) / rope.frequency(pair)) as f32)
                    .collect();
                vec![tensors::vector("rope_freqs.weight", &factors)]
            }
        }
    }
}
