//! `adapter_config.json` of PEFT and of mlx-lm: scales, and settings that are refused by name.

use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

/// Patterns in a configuration, at most.
const MAX_PATTERNS: usize = 4096;
/// Bytes of a compiled pattern, at most.
const MAX_PATTERN: usize = 1 << 16;

/// Returns true for a configuration of mlx-lm.
pub(super) fn is_mlx(config: &Map<String, Value>) -> bool {
    !config.contains_key("peft_type") && config.contains_key("lora_parameters")
}

/// Scales of pairs.
pub(super) enum Scales {
    /// One for all.
    Constant(f32),
    /// `alpha / rank`, or its root with rsLoRA.
    Alpha {
        alpha: f64,
        /// Other values of alpha, by patterns of names. The first one that matches applies.
        patterns: Vec<(Regex, f64)>,
        of_root: bool,
    },
}

impl Scales {
    /// Reads a configuration.
    ///
    /// # Errors
    /// The unsupported or wrong setting.
    pub(super) fn read(config: &Map<String, Value>) -> Result<Self, String> {
        if is_mlx(config) { Self::of_mlx(config) } else { Self::of_peft(config) }
    }

    fn of_mlx(config: &Map<String, Value>) -> Result<Self, String> {
        match config.get("fine_tune_type").and_then(Value::as_str) {
            None | Some("lora") => {}
            Some(other) => return Err(format!("`fine_tune_type` is `{other}`; only `lora` is supported")),
        }
        let scale = config.get("lora_parameters").and_then(|it| it.get("scale")).and_then(Value::as_f64);
        match scale.map(|scale| scale as f32).filter(|scale| scale.is_finite()) {
            Some(scale) => Ok(Self::Constant(scale)),
            None => Err("`lora_parameters` have no `scale`".to_owned()),
        }
    }

    fn of_peft(config: &Map<String, Value>) -> Result<Self, String> {
        match config.get("peft_type").and_then(Value::as_str) {
            Some("LORA") => {}
            other => {
                let other = other.unwrap_or_default();
                return Err(format!("`peft_type` is `{other}`; only `LORA` is supported"));
            }
        }
        let is_set = |key: &str| match config.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Array(list)) => !list.is_empty(),
            Some(Value::Object(map)) => !map.is_empty(),
            Some(_) => true,
        };
        // All of these change results.
        let refused = [
            ("use_dora", "DoRA"),
            ("modules_to_save", "whole modules"),
            ("trainable_token_indices", "changes of single tokens"),
            ("target_parameters", "adapters of parameters, such as experts"),
            ("lora_bias", "biases"),
            ("layer_replication", "replicated layers"),
            ("alora_invocation_tokens", "invocation tokens (aLoRA)"),
            ("use_qalora", "QALoRA"),
            ("use_bdlora", "BD-LoRA"),
            ("arrow_config", "routing between adapters"),
        ];
        if let Some((key, what)) = refused.into_iter().find(|(key, _)| is_set(key)) {
            return Err(format!("`{key}` is set ({what}), which is not supported"));
        }
        match config.get("bias").and_then(Value::as_str) {
            None | Some("none") => {}
            Some(other) => return Err(format!("`bias` is `{other}`; only `none` is supported")),
        }
        // These replace the base's weights, unless they are converted when they are saved.
        let start = config.get("init_lora_weights").and_then(Value::as_str).unwrap_or_default();
        if ["pissa", "olora", "corda", "loftq"].iter().any(|kind| start.starts_with(kind)) {
            let hint = "save the adapter with `path_initial_model_for_weight_conversion`";
            return Err(format!("`init_lora_weights` is `{start}`, which changes the base; {hint}"));
        }
        let number = |value: &Value| value.as_f64().filter(|alpha| alpha.is_finite());
        let alpha = match config.get("lora_alpha") {
            None | Some(Value::Null) => 8.0,
            Some(value) => number(value).ok_or_else(|| format!("`lora_alpha` is {value}"))?,
        };
        let mut patterns = Vec::new();
        let given = config.get("alpha_pattern").and_then(Value::as_object);
        for (key, value) in given.into_iter().flatten() {
            if patterns.len() == MAX_PATTERNS {
                return Err(format!("`alpha_pattern` has more than {MAX_PATTERNS} entries"));
            }
            let whole = format!(r"^(?:.*\.)?(?:{key})$");
            let regex = RegexBuilder::new(&whole).size_limit(MAX_PATTERN).build();
            let regex = regex.map_err(|_| format!("`{key}` in `alpha_pattern` is no usable pattern"))?;
            let alpha = number(value).ok_or_else(|| format!("`{key}` in `alpha_pattern` is {value}"))?;
            patterns.push((regex, alpha));
        }
        Ok(Self::Alpha { alpha, patterns, of_root: is_set("use_rslora") })
    }

    /// Returns the scale of a target with this rank.
    ///
    /// # Errors
    /// It is not finite.
    pub(super) fn of(&self, target: &str, rank: usize) -> Result<f32, String> {
        let scale = match self {
            Self::Constant(scale) => *scale,
            Self::Alpha { alpha, patterns, of_root } => {
                let own = patterns.iter().find(|(pattern, _)| pattern.is_match(target));
                let alpha = own.map_or(*alpha, |(_, alpha)| *alpha);
                let rank = rank as f64;
                (alpha / if *of_root { rank.sqrt() } else { rank }) as f32
            }
        };
        if scale.is_finite() { Ok(scale) } else { Err(format!("the scale of `{target}` is {scale}")) }
    }
}
