//! Conversion of Hugging Face's `config.json` to a [`Config`]. Names and defaults are those of transformers'
//! configuration classes (models/*/configuration_*.py, modeling_rope_utils.py); a file omits values that equal the
//! default.

mod fields;
mod rope;

use paguro_backend::Activation;
use serde_json::{Map, Value};

pub(super) use self::fields::Fields;
use self::rope::{Scope, read_rope};
use super::{Config, Definition, config::Sizes};
use crate::error::ModelError;

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
    check_activation(&fields, &defaults, definition)?;

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
            Some(read_rope(&fields, &defaults, scope, style, head_dim, context_length, max_context)?)
        }
    };
    let ffn = fields.size_of(&["intermediate_size", "n_inner"], defaults.ffn.or(Some(4 * hidden)))?;
    let tied = tied(json, &fields)?.unwrap_or(defaults.tied);
    let sizes = Sizes { context_length, hidden, heads, kv_heads, head_dim, ffn, layers };
    let mut config = Config {
        tied: Some(tied),
        extra_layers: fields
            .size_of(&["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"], Some(0))?,
        ..Config::plain(definition, sizes, norm_eps as f32, rope)
    };
    set_windows(&fields, &defaults, &mut config)?;
    if let Some(other_base) = defaults.local_base {
        let scope = Scope { kind: "sliding_attention", other_base: Some(other_base) };
        let own = read_rope(&fields, &defaults, scope, style, head_dim, context_length, max_context)?;
        config.set_local_rope(own);
    }
    if let Some(experts) = definition.experts {
        config.set_experts(fields.experts(experts, definition.block.latent)?);
    }
    (definition.from_hf)(&fields, &mut config)?;
    config.check(tensors)
}

/// Returns the class of the weights. Models of one class that see images may contain text models of several.
pub(crate) fn class(json: &Map<String, Value>) -> Result<&str, ModelError> {
    let class = json.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    let text = json.get("text_config").and_then(|text| text.get("model_type")).and_then(Value::as_str);
    match (class, text) {
        (Some("Mistral3ForConditionalGeneration"), Some("mistral4")) => Ok("Mistral4ForCausalLM"),
        (Some("LlavaForConditionalGeneration"), Some("mistral")) => Ok("MistralForCausalLM"), // Pixtral
        (Some("Idefics3ForConditionalGeneration" | "SmolVLMForConditionalGeneration"), Some("llama")) => {
            Ok("LlamaForCausalLM")
        }
        (Some("InternVLForConditionalGeneration"), text) => match text {
            None | Some("qwen2") => Ok("Qwen2ForCausalLM"),
            Some("qwen3") => Ok("Qwen3ForCausalLM"),
            Some("qwen3_moe") => Ok("Qwen3MoeForCausalLM"),
            Some("gpt_oss") => Ok("GptOssForCausalLM"),
            Some("llama") => Ok("LlamaForCausalLM"),
            Some(other) => Err(ModelError::unsupported_but(
                format!("InternVL with a text model `{other}`"),
                "gpt_oss, llama, qwen2, qwen3, qwen3_moe",
            )),
        },
        (Some("Glm46VForConditionalGeneration"), Some("glm4v_moe_text")) => {
            Ok("Glm4vMoeForConditionalGeneration")
        }
        (Some("Glm46VForConditionalGeneration"), _) => Ok("Glm4vForConditionalGeneration"),
        (Some("Lfm2VlForConditionalGeneration"), Some("lfm2_moe")) => Ok("Lfm2MoeForCausalLM"),
        (Some("Lfm2VlForConditionalGeneration"), _) => Ok("Lfm2ForCausalLM"),
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
    /// Names of the activation's field; the first one of the file applies.
    pub(super) activation_keys: &'static [&'static str],
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
        activation_keys: &["hidden_activation", "hidden_act", "activation_function"],
    };
    /// Gemma's name of the activation's field. Some of its files have the common one with another value.
    pub(super) const GEMMA_ACTIVATION: &'static [&'static str] = &["hidden_activation"];
}

fn check_activation(
    fields: &Fields<'_>,
    defaults: &Defaults,
    definition: &Definition,
) -> Result<(), ModelError> {
    let expected: &[&str] = match definition.block.activation {
        // Named silu; its limits are fixed.
        Activation::Silu | Activation::ClampedSwiglu { .. } => &["silu", "swish", "swiglu"],
        Activation::GeluTanh => &["gelu_pytorch_tanh", "gelu_new"],
        Activation::Gelu => &["gelu"],
        Activation::Relu2 => &["relu2"],
    };
    for key in defaults.activation_keys {
        if let Some(name) = fields.text(key)? {
            return match expected.contains(&name) {
                true => Ok(()),
                false => Err(ModelError::unsupported_but(format!("activation `{name}`"), expected[0])),
            };
        }
    }
    Ok(())
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
