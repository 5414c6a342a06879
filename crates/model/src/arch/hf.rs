//! Conversion of Hugging Face's `config.json` to a [`Config`]. Names and defaults are those of transformers'
//! configuration classes (models/*/configuration_*.py, modeling_rope_utils.py); a file omits values that equal the
//! default.

use paguro_backend::{Activation, ExpertGroups, RopeStyle};
use serde_json::{Map, Value};

use super::{
    Config, Definition, Multipliers,
    config::{Geometry, Layer},
    gguf::check_factors,
};
use crate::{
    error::ModelError,
    rope::{Factors, RopeConfig, Yarn, check_original, longrope_magnitude},
};

/// Reads the hyperparameters. `tensors` is the number of tensors in the folder, which bounds the number of layers;
/// `max_context` selects one of longrope's two sets of factors.
pub(crate) fn config(
    json: &Map<String, Value>,
    tensors: usize,
    max_context: Option<usize>,
) -> Result<Config, ModelError> {
    let class = class(json)?;
    let definition = Definition::from_hf(class)?;
    let method =
        json.get("quantization_config").and_then(|it| it.get("quant_method")).and_then(Value::as_str);
    if method == Some("mxfp4") && definition.experts.is_none() {
        return Err(ModelError::unsupported("MXFP4 in a model without experts"));
    }
    let fields = match json.get("text_config") {
        Some(Value::Object(text)) => Fields(text),
        _ => Fields(json),
    };
    let defaults = (definition.hf_defaults)(class);
    check_activation(&fields, definition)?;

    // Nemotron-H's files may only list the types of layers.
    let listed = fields.list("layers_block_type")?.map(<[Value]>::len);
    let pattern = fields.text("hybrid_override_pattern")?.map(str::len);
    let layers = fields.size_of(&["num_hidden_layers", "n_layer"], listed.or(pattern).or(defaults.layers))?;
    if layers > tensors {
        // Before anything is allocated for each layer.
        return Err(ModelError::Config(format!("{layers} layers, but only {tensors} tensors")));
    }
    let hidden = fields.size_of(&["hidden_size", "n_embd"], defaults.hidden)?;
    let attends = definition.block.attention;
    let heads = match attends {
        true => fields.size_of(&["num_attention_heads", "n_head"], defaults.heads)?,
        false => 1,
    };
    let kv_heads = match attends {
        true => fields.size("num_key_value_heads", defaults.kv_heads.or(Some(heads)))?,
        false => 1,
    };
    let head_dim = match definition.block.latent {
        _ if !attends => 1,
        // The elements that RoPE rotates.
        true => fields.size("qk_rope_head_dim", Some(64))?,
        false => fields.size("head_dim", defaults.head_dim.or(hidden.checked_div(heads)))?,
    };
    let context_length =
        fields.size_of(&["max_position_embeddings", "n_positions"], Some(defaults.context_length))?;
    let eps = ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"];
    let mut norm_eps = defaults.norm_eps;
    for key in eps {
        norm_eps = fields.number(key)?.unwrap_or(norm_eps);
    }
    let max_context = max_context.unwrap_or(context_length);
    let style = definition.rope_styles[1];
    let rope = match definition.block.positions || definition.block.own_ropes || !attends {
        true => None,
        false => {
            let scope = Scope { kind: "full_attention", other_base: None };
            Some(rope(&fields, &defaults, scope, style, head_dim, context_length, max_context)?)
        }
    };
    let geometry = Geometry::default();
    let rope_index = rope.as_ref().map(|_| 0);
    let layer = Layer {
        window: None,
        rope: rope_index,
        experts: false,
        recurrent: false,
        mixer: true,
        network: true,
        geometry,
    };
    let mut config = Config {
        definition,
        context_length,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn: fields.size_of(&["intermediate_size", "n_inner"], defaults.ffn.or(Some(4 * hidden)))?,
        layer_embed: 0,
        latent: None,
        block: definition.block,
        experts: None,
        recurrent: None,
        norm_eps: norm_eps as f32,
        norm_offset: 0.0,
        position_offset: 0,
        embed_scale: 1.0,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        attention_soft_cap: None,
        position_scale: None,
        branch_scale: 1.0,
        multipliers: Multipliers::NONE,
        logit_scale: 1.0,
        logit_soft_cap: None,
        tied: Some(tied(json, &fields)?.unwrap_or(defaults.tied)),
        layers: vec![layer; layers],
        ropes: rope.into_iter().collect(),
        extra_layers: fields.size_of(&["num_nextn_predict_layers", "num_mtp_layers"], Some(0))?,
    };
    set_windows(&fields, &defaults, &mut config)?;
    if let Some(other_base) = defaults.local_base {
        let scope = Scope { kind: "sliding_attention", other_base: Some(other_base) };
        let own = rope_of_windows(&fields, &defaults, scope, style, &config, max_context)?;
        config.set_local_rope(own);
    }
    if let Some(experts) = definition.experts {
        config.experts = fields.experts(experts, definition.block.latent)?;
        let dense = config.experts.map_or(layers, |experts| experts.dense_layers);
        config.layers.iter_mut().enumerate().for_each(|(index, layer)| layer.experts = index >= dense);
    }
    (definition.from_hf)(&fields, &mut config)?;
    config.check(tensors)
}

fn rope_of_windows(
    fields: &Fields<'_>,
    defaults: &Defaults,
    scope: Scope,
    style: RopeStyle,
    config: &Config,
    max_context: usize,
) -> Result<RopeConfig, ModelError> {
    rope(fields, defaults, scope, style, config.head_dim, config.context_length, max_context)
}

/// Returns the class of the weights. Models of one class that see images may contain text models of several.
pub(crate) fn class(json: &Map<String, Value>) -> Result<&str, ModelError> {
    let class = json.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    let text = json.get("text_config").and_then(|text| text.get("model_type")).and_then(Value::as_str);
    match (class, text) {
        (Some("Mistral3ForConditionalGeneration"), Some("mistral4")) => Ok("Mistral4ForCausalLM"),
        (Some(class), _) => Ok(class),
        (None, _) => Err(ModelError::Config("config.json does not name its `architectures`".to_owned())),
    }
}

/// Returns true if embeddings and head are one matrix. If the text model is a part of a larger model, the flag of the
/// larger one applies: transformers writes the part's default beside it.
fn tied(json: &Map<String, Value>, fields: &Fields<'_>) -> Result<Option<bool>, ModelError> {
    match Fields(json).flag("tie_word_embeddings")? {
        Some(tied) => Ok(Some(tied)),
        None => fields.flag("tie_word_embeddings"),
    }
}

/// Defaults of transformers for omitted fields.
#[derive(Clone, Copy)]
pub(super) struct Defaults {
    pub(super) layers: Option<usize>,
    pub(super) hidden: Option<usize>,
    /// `None`: four times the hidden size, as GPT-2 has it, where files may leave it out.
    pub(super) ffn: Option<usize>,
    pub(super) heads: Option<usize>,
    /// `None`: as many as heads.
    pub(super) kv_heads: Option<usize>,
    /// `None`: the hidden size divided by the heads.
    pub(super) head_dim: Option<usize>,
    pub(super) context_length: usize,
    pub(super) norm_eps: f64,
    pub(super) rope_theta: f64,
    pub(super) partial_rotary_factor: f64,
    /// Layers with a window.
    pub(super) windows: Windows,
    pub(super) window: Option<u32>,
    /// Layers with a window have a separate RoPE without scaling, with this base unless the file has one. A base of
    /// zero is that of the other layers.
    pub(super) local_base: Option<f64>,
    pub(super) tied: bool,
}

/// Layers with a window, if the file does not list them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// No layer, regardless of the file.
    Never,
    /// All.
    All,
    /// Layers from `max_window_layers` on, if `use_sliding_window` is set.
    Qwen,
    /// All layers except every n-th.
    Period(usize),
}

impl Defaults {
    /// Defaults common to most classes.
    pub(super) const COMMON: Self = Self {
        layers: None,
        hidden: None,
        ffn: None,
        heads: None,
        kv_heads: None,
        head_dim: None,
        context_length: 2048,
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
        partial_rotary_factor: 1.0,
        windows: Windows::Never,
        window: None,
        local_base: None,
        tied: false,
    };
}

fn check_activation(fields: &Fields<'_>, definition: &Definition) -> Result<(), ModelError> {
    let expected: &[&str] = match definition.block.activation {
        // Named silu; its limits are fixed.
        Activation::Silu | Activation::ClampedSwiglu { .. } => &["silu", "swish", "swiglu"],
        Activation::GeluTanh => &["gelu_pytorch_tanh", "gelu_new"],
        Activation::Gelu => &["gelu"],
        Activation::Relu2 => &["relu2"],
        _ => &[],
    };
    // Gemma's own key wins over the common one, which some of its files have wrong.
    let is_gemma = definition.gguf.starts_with("gemma");
    let name = match fields.text("hidden_activation")? {
        Some(name) => Some(name),
        None if is_gemma => None,
        None => fields.text("hidden_act")?.or(fields.text("activation_function")?),
    };
    match name {
        Some(name) if !expected.contains(&name) => {
            Err(ModelError::unsupported_but(format!("activation `{name}`"), expected[0]))
        }
        _ => Ok(()),
    }
}

/// Gives layers their windows.
fn set_windows(fields: &Fields<'_>, defaults: &Defaults, config: &mut Config) -> Result<(), ModelError> {
    let layers = config.layers.len();
    let window = match fields.has("sliding_window") {
        true => fields.integer("sliding_window")?,
        false => defaults.window,
    };
    // Qwen's windows are off unless a second key enables them.
    let on = match defaults.windows {
        Windows::Never => false,
        Windows::Qwen => fields.flag("use_sliding_window")?.unwrap_or(false),
        Windows::All | Windows::Period(_) => true,
    };
    let Some(window) = window.filter(|&window| on && window > 0) else { return Ok(()) };

    if let Some(types) = fields.list("layer_types")? {
        if types.len() < layers {
            let problem = format!("`layer_types` has {} entries for {layers} layers", types.len());
            return Err(ModelError::Config(problem));
        }
        let is_local = |kind: &Value| match kind.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(ModelError::unsupported_but(
                format!("layer type {kind}"),
                "full_attention, sliding_attention",
            )),
        };
        let local = types[..layers].iter().map(is_local).collect::<Result<Vec<bool>, _>>()?;
        config.set_windows(Some(window), &local);
        return Ok(());
    }
    match defaults.windows {
        Windows::Period(period) => {
            config.set_window_period(Some(window), fields.size("sliding_window_pattern", Some(period))?);
        }
        Windows::Qwen => {
            let first = fields.size("max_window_layers", Some(28))?;
            config.set_windows(Some(window), &(0..layers).map(|layer| layer >= first).collect::<Vec<_>>());
        }
        Windows::All | Windows::Never => config.set_windows(Some(window), &vec![true; layers]),
    }
    Ok(())
}

/// Layers that share a RoPE.
#[derive(Clone, Copy)]
struct Scope {
    /// Their type, where there are parameters for each.
    kind: &'static str,
    /// The base, if these layers have separate parameters; see [`Defaults::local_base`].
    other_base: Option<f64>,
}

fn rope(
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

/// Typed access to a JSON object. `null` counts as absent, as in Python, except in [`Fields::has`].
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(super) fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let mut found = value.to_string();
                if found.len() > 60 {
                    found = "something else".to_owned();
                }
                let wrong =
                    || ModelError::Config(format!("config.json: `{key}` is {found}, expected {expected}"));
                convert(value).ok_or_else(wrong).map(Some)
            }
        }
    }

    pub(super) fn integer(&self, key: &str) -> Result<Option<u32>, ModelError> {
        self.read(key, "an unsigned 32-bit integer", |value| value.as_u64()?.try_into().ok())
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.read(key, "a number", Value::as_f64)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a string", Value::as_str)
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ModelError> {
        self.read(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// Two numbers, without bounds by default. Infinity is a number, a string, or the string in an object.
    pub(super) fn limits(&self, key: &str) -> Result<(f32, f32), ModelError> {
        let number = |value: &Value| match value.get("__float__").unwrap_or(value) {
            Value::String(text) if text == "Infinity" => Some(f32::INFINITY),
            value => value.as_f64().map(|number| number as f32),
        };
        let limits = match self.list(key)? {
            None => Some((0.0, f32::INFINITY)),
            Some([least, most]) => number(least).zip(number(most)),
            Some(_) => None,
        };
        let limits = limits.filter(|&(least, most)| 0.0 <= least && least <= most);
        limits.ok_or_else(|| ModelError::Config(format!("config.json: `{key}` is not a range from 0 on")))
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ModelError> {
        self.read(key, "an object", |value| value.as_object().map(Fields))
    }

    /// An integer; without a default it has to be there.
    pub(super) fn size(&self, key: &str, default: Option<usize>) -> Result<usize, ModelError> {
        let size = self.integer(key)?.map(|size| size as usize).or(default);
        size.ok_or_else(|| ModelError::Config(format!("config.json has no `{key}`")))
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.integer(key)?.map(|size| size as usize))
    }

    /// The type of each layer, where the file lists them; all must be `known`.
    pub(super) fn layer_types(
        &self,
        layers: usize,
        known: &[&'static str],
    ) -> Result<Option<Vec<&'static str>>, ModelError> {
        let Some(types) = self.list("layer_types")? else { return Ok(None) };
        if types.len() < layers {
            let problem = format!("`layer_types` has {} entries for {layers} layers", types.len());
            return Err(ModelError::Config(problem));
        }
        let find = |kind: &Value| {
            let found = known.iter().find(|known| kind.as_str() == Some(known));
            let unknown = || ModelError::unsupported_but(format!("layer type {kind}"), &known.join(", "));
            found.copied().ok_or_else(unknown)
        };
        types[..layers].iter().map(find).collect::<Result<_, _>>().map(Some)
    }

    /// Returns the first of these integers that exists.
    pub(super) fn size_of(&self, keys: &[&str], default: Option<usize>) -> Result<usize, ModelError> {
        for key in keys {
            if let Some(size) = self.optional_size(key)? {
                return Ok(size);
            }
        }
        self.size(keys[0], default)
    }

    /// Returns the mixture of experts of an architecture that may have one like `defaults`.
    fn experts(
        &self,
        defaults: super::ExpertsConfig,
        latent: bool,
    ) -> Result<Option<super::ExpertsConfig>, ModelError> {
        const COUNTS: [&str; 4] = ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"];
        const USED: [&str; 4] = ["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"];
        if COUNTS.iter().all(|key| self.0.get(*key).is_none_or(Value::is_null)) {
            return Ok(None);
        }
        let groups = self.optional_size("n_group")?.unwrap_or(1);
        if groups > 1 && !latent {
            return Err(ModelError::unsupported(format!("a router with {groups} groups of experts")));
        }
        let used_groups = self.size("topk_group", Some(1))?;
        let groups = (groups > 1).then_some(ExpertGroups { count: groups, used: used_groups, best: 1 });
        let width = self.size_of(&["moe_intermediate_size", "intermediate_size"], None)?;
        let shared_counts = ["n_shared_experts", "moe_num_shared_experts", "num_shared_expert"];
        let shared = match self.optional_size("shared_expert_intermediate_size")? {
            Some(shared) => shared,
            None => self.size_of(&shared_counts, Some(0))?.saturating_mul(width),
        };
        let factor = self.number("routed_scaling_factor")?.unwrap_or(1.0);
        Ok(Some(super::ExpertsConfig {
            count: self.size_of(&COUNTS, None)?,
            groups,
            used: self.size_of(&USED, None)?,
            width,
            renormalize: self.flag("norm_topk_prob")?.unwrap_or(defaults.renormalize),
            factor: factor as f32,
            shared,
            dense_layers: self.size("first_k_dense_replace", Some(0))?,
            ..defaults
        }))
    }

    pub(super) fn require(&self, key: &str) -> Result<f64, ModelError> {
        self.number(key)?
            .ok_or_else(|| ModelError::Config(format!("config.json: RoPE scaling has no `{key}`")))
    }

    fn floats(&self, key: &str) -> Result<Vec<f32>, ModelError> {
        let list = self.list(key)?.unwrap_or_default();
        let floats = list.iter().map(|value| value.as_f64().map(|value| value as f32));
        let floats: Option<Vec<_>> = floats.collect();
        floats.ok_or_else(|| ModelError::Config(format!("config.json: `{key}` is not a list of numbers")))
    }
}
