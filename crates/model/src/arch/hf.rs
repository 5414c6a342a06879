//! Hugging Face's `config.json` as a [`Config`]. Names and defaults are those of transformers' configuration classes
//! (models/*/configuration_*.py, modeling_rope_utils.py); a file leaves out what equals the default.

use paguro_backend::{Activation, RopeStyle};
use serde_json::{Map, Value};

use super::{Architecture, Config, Layer, gguf::check_factors};
use crate::{
    error::ModelError,
    rope::{Factors, RopeConfig, Yarn, longrope_magnitude},
};

/// Reads the hyperparameters. `tensors` is how many the folder has, a bound for the number of layers; `max_context`
/// chooses between longrope's two sets of factors.
pub(crate) fn config(
    json: &Map<String, Value>,
    tensors: usize,
    max_context: Option<usize>,
) -> Result<Config, ModelError> {
    let class = class(json)?;
    let architecture = Architecture::from_hf(class)?;
    if let Some(quantization) = json.get("quantization_config").filter(|value| !value.is_null()) {
        let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("unknown method");
        return Err(ModelError::unsupported_but(
            format!("a quantized Hugging Face model ({method})"),
            "F32, F16 and BF16 safetensors; quantized models as GGUF",
        ));
    }
    let fields = match json.get("text_config") {
        Some(Value::Object(text)) => Fields(text),
        _ => Fields(json),
    };
    let defaults = Defaults::of(class, architecture);
    check_activation(&fields, architecture)?;

    let layers = fields.size("num_hidden_layers", defaults.layers)?;
    if layers > tensors {
        // Before anything is allocated for each layer.
        return Err(ModelError::Config(format!("{layers} layers, but only {tensors} tensors")));
    }
    let hidden = fields.size("hidden_size", defaults.hidden)?;
    let heads = fields.size("num_attention_heads", defaults.heads)?;
    let kv_heads = fields.size("num_key_value_heads", defaults.kv_heads.or(Some(heads)))?;
    let head_dim = fields.size("head_dim", defaults.head_dim.or(hidden.checked_div(heads)))?;
    let context_length = fields.size("max_position_embeddings", Some(defaults.context_length))?;
    let max_context = max_context.unwrap_or(context_length);

    let windows = windows(&fields, &defaults, architecture, layers)?;
    let rope = |scope| rope(&fields, &defaults, scope, head_dim, context_length, max_context);
    let mut ropes = vec![rope(Scope::Global)?];
    if architecture == Architecture::Gemma3 {
        ropes.push(rope(Scope::Local)?);
    }
    let local_rope = ropes.len() - 1;
    let layer = |window: Option<u32>| Layer { window, rope: if window.is_some() { local_rope } else { 0 } };

    let scale_of = fields.number("query_pre_attn_scalar")?.or(defaults.query_pre_attn_scalar);
    let soft_cap = |key, default: Option<f64>| -> Result<Option<f32>, ModelError> {
        let cap = if fields.has(key) { fields.number(key)? } else { default };
        Ok(cap.map(|cap| cap as f32))
    };
    let is_gemma = architecture.is_gemma();
    let is_gemma2 = architecture == Architecture::Gemma2;
    Config {
        architecture,
        context_length,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn: fields.size("intermediate_size", defaults.ffn)?,
        norm_eps: fields.number("rms_norm_eps")?.unwrap_or(defaults.norm_eps) as f32,
        norm_offset: if is_gemma { 1.0 } else { 0.0 },
        embed_scale: if is_gemma { (hidden as f32).sqrt() } else { 1.0 },
        attention_scale: 1.0 / (scale_of.filter(|_| is_gemma).unwrap_or(head_dim as f64)).sqrt() as f32,
        attention_soft_cap: if is_gemma2 { soft_cap("attn_logit_softcapping", Some(50.0))? } else { None },
        logit_soft_cap: if is_gemma {
            soft_cap("final_logit_softcapping", is_gemma2.then_some(30.0))?
        } else {
            None
        },
        activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
        tied: Some(tied(json, &fields)?.unwrap_or(is_gemma)),
        ropes,
        layers: windows.into_iter().map(layer).collect(),
    }
    .check(tensors)
}

/// The class that the weights belong to.
pub(crate) fn class(json: &Map<String, Value>) -> Result<&str, ModelError> {
    let class = json.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    class.ok_or_else(|| ModelError::Config("config.json does not name its `architectures`".to_owned()))
}

fn tied(json: &Map<String, Value>, fields: &Fields<'_>) -> Result<Option<bool>, ModelError> {
    match fields.flag("tie_word_embeddings")? {
        Some(tied) => Ok(Some(tied)),
        None => Fields(json).flag("tie_word_embeddings"), // of the whole model, where the text is a part
    }
}

/// What transformers assumes for what a file leaves out.
struct Defaults {
    layers: Option<usize>,
    hidden: Option<usize>,
    ffn: Option<usize>,
    heads: Option<usize>,
    /// `None`: as many as heads.
    kv_heads: Option<usize>,
    /// `None`: the hidden size divided by the heads.
    head_dim: Option<usize>,
    context_length: usize,
    norm_eps: f64,
    rope_theta: f64,
    window: Option<u32>,
    /// Every how many layers one sees all.
    window_period: usize,
    query_pre_attn_scalar: Option<f64>,
}

impl Defaults {
    fn of(class: &str, architecture: Architecture) -> Self {
        let plain = Self {
            layers: None,
            hidden: None,
            ffn: None,
            heads: None,
            kv_heads: None,
            head_dim: None,
            context_length: 2048,
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            window: None,
            window_period: 1,
            query_pre_attn_scalar: None,
        };
        match architecture {
            Architecture::Llama if class == "MistralForCausalLM" => {
                Self { kv_heads: Some(8), context_length: 4096 * 32, window: Some(4096), ..plain }
            }
            Architecture::Llama => plain,
            Architecture::Qwen2 => {
                Self { kv_heads: Some(32), context_length: 32768, window: Some(4096), ..plain }
            }
            Architecture::Qwen3 => Self {
                kv_heads: Some(32),
                head_dim: Some(128),
                context_length: 32768,
                window: Some(4096),
                ..plain
            },
            Architecture::Gemma2 => Self {
                kv_heads: Some(4),
                head_dim: Some(256),
                context_length: 8192,
                window: Some(4096),
                window_period: 2,
                query_pre_attn_scalar: Some(256.0),
                ..plain
            },
            // The text part of the multimodal models is written as its difference from the defaults.
            Architecture::Gemma3 => Self {
                layers: Some(26),
                hidden: Some(2304),
                ffn: Some(9216),
                heads: Some(8),
                kv_heads: Some(4),
                head_dim: Some(256),
                context_length: 131_072,
                rope_theta: 1e6,
                window: Some(4096),
                window_period: 6,
                query_pre_attn_scalar: Some(256.0),
                ..plain
            },
            Architecture::Phi3 => Self { context_length: 4096, norm_eps: 1e-5, ..plain },
        }
    }
}

fn check_activation(fields: &Fields<'_>, architecture: Architecture) -> Result<(), ModelError> {
    let expected: &[&str] =
        if architecture.is_gemma() { &["gelu_pytorch_tanh", "gelu_new"] } else { &["silu", "swish"] };
    // Gemma's own key wins over the common one, which some of its files have wrong.
    let name = match fields.text("hidden_activation")? {
        Some(name) => Some(name),
        None if architecture.is_gemma() => None,
        None => fields.text("hidden_act")?,
    };
    match name {
        Some(name) if !expected.contains(&name) => {
            Err(ModelError::unsupported_but(format!("activation `{name}`"), expected[0]))
        }
        _ => Ok(()),
    }
}

/// How far back each layer sees.
fn windows(
    fields: &Fields<'_>,
    defaults: &Defaults,
    architecture: Architecture,
    layers: usize,
) -> Result<Vec<Option<u32>>, ModelError> {
    let is_qwen = matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3);
    let window = match fields.has("sliding_window") {
        true => fields.integer("sliding_window")?,
        false => defaults.window,
    };
    // Llama has none, whatever the file says; Qwen's is off unless a second key turns it on.
    let on = match architecture {
        Architecture::Llama => defaults.window.is_some(),
        _ if is_qwen => fields.flag("use_sliding_window")?.unwrap_or(false),
        _ => true,
    };
    let Some(window) = window.filter(|&window| on && window > 0) else { return Ok(vec![None; layers]) };

    if let Some(types) = fields.list("layer_types")? {
        if types.len() < layers {
            let problem = format!("`layer_types` has {} entries for {layers} layers", types.len());
            return Err(ModelError::Config(problem));
        }
        let window_of = |kind: &Value| match kind.as_str() {
            Some("sliding_attention") => Ok(Some(window)),
            Some("full_attention") => Ok(None),
            _ => Err(ModelError::unsupported_but(
                format!("layer type {kind}"),
                "full_attention, sliding_attention",
            )),
        };
        return types[..layers].iter().map(window_of).collect();
    }
    let first = if is_qwen { fields.size("max_window_layers", Some(28))? } else { 0 };
    let period = fields.size("sliding_window_pattern", Some(defaults.window_period))?;
    let local = |layer: usize| match architecture {
        Architecture::Gemma2 | Architecture::Gemma3 => period == 0 || !(layer + 1).is_multiple_of(period),
        _ => layer >= first,
    };
    Ok((0..layers).map(|layer| local(layer).then_some(window)).collect())
}

/// Gemma 3's layers with a window have their own RoPE.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Global,
    Local,
}

fn rope(
    fields: &Fields<'_>,
    defaults: &Defaults,
    scope: Scope,
    head_dim: usize,
    context_length: usize,
    max_context: usize,
) -> Result<RopeConfig, ModelError> {
    // `rope_parameters` has been the name since transformers 5, where it also holds what stood beside it; there may be
    // one for each type of layer.
    let parameters = match fields.object("rope_parameters")? {
        Some(parameters) if scope == Scope::Local => parameters.object("sliding_attention")?,
        Some(parameters) => Some(parameters.object("full_attention")?.unwrap_or(parameters)),
        None if scope == Scope::Local => None, // scaling is only for the layers that see far
        None => fields.object("rope_scaling")?,
    };
    let empty = Map::new();
    let scaling = parameters.unwrap_or(Fields(&empty));
    let base = match (scaling.number("rope_theta")?, scope) {
        (Some(base), _) => base,
        (None, Scope::Global) => fields.number("rope_theta")?.unwrap_or(defaults.rope_theta),
        (None, Scope::Local) => fields.number("rope_local_base_freq")?.unwrap_or(10_000.0),
    };
    let partial = match scaling.number("partial_rotary_factor")? {
        Some(partial) => partial,
        None => fields.number("partial_rotary_factor")?.unwrap_or(1.0),
    };
    let dims = (head_dim as f64 * partial) as usize; // rounds toward zero, as transformers does
    let mut rope = RopeConfig::plain(RopeStyle::HalfSplit, dims, base);

    let kind = match scaling.text("rope_type")? {
        Some(kind) => kind,
        None => scaling.text("type")?.unwrap_or("default"),
    };
    let original = match scaling.number("original_max_position_embeddings")? {
        Some(original) => original,
        None => fields.number("original_max_position_embeddings")?.unwrap_or(context_length as f64),
    };
    match kind {
        "default" => {}
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
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn has(&self, key: &str) -> bool {
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

    fn integer(&self, key: &str) -> Result<Option<u32>, ModelError> {
        self.read(key, "an unsigned 32-bit integer", |value| value.as_u64()?.try_into().ok())
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.read(key, "a number", Value::as_f64)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.read(key, "true or false", Value::as_bool)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a string", Value::as_str)
    }

    fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ModelError> {
        self.read(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ModelError> {
        self.read(key, "an object", |value| value.as_object().map(Fields))
    }

    /// An integer; without a default it has to be there.
    fn size(&self, key: &str, default: Option<usize>) -> Result<usize, ModelError> {
        let size = self.integer(key)?.map(|size| size as usize).or(default);
        size.ok_or_else(|| ModelError::Config(format!("config.json has no `{key}`")))
    }

    fn require(&self, key: &str) -> Result<f64, ModelError> {
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
