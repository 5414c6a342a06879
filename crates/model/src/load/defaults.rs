//! Sampling parameters that a model recommends, and its stop tokens.

use paguro_backend::SamplingParams;
use serde_json::{Map, Value};

use crate::{gguf::Gguf, hf::HfFolder};

/// Recommended sampling parameters; `None` where the model has no recommendation.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // named as the sampling parameters that they set
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Number of tokens that the penalty considers.
    pub penalty_window: Option<u32>,
    /// Length of an answer.
    pub max_tokens: Option<usize>,
}

impl GenerationDefaults {
    /// Returns the default sampling parameters. The model's recommendations are used without ours, even if they set
    /// only some values, because a mixture would be neither. Without any: temperature 0.8, top-k 40, top-p 0.95, min-p
    /// 0.05.
    pub fn sampling(&self) -> SamplingParams {
        let off = SamplingParams::default();
        let recommends =
            [self.temperature, self.top_p, self.min_p].iter().any(Option::is_some) || self.top_k.is_some();
        let ours = if recommends {
            SamplingParams { temperature: 1.0, ..off }
        } else {
            SamplingParams { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..off }
        };
        SamplingParams {
            temperature: self.temperature.unwrap_or(ours.temperature),
            top_k: self.top_k.unwrap_or(ours.top_k),
            top_p: self.top_p.unwrap_or(ours.top_p),
            min_p: self.min_p.unwrap_or(ours.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(ours.repetition_penalty),
            penalty_window: self.penalty_window.or(ours.penalty_window),
            ..ours
        }
    }
}

pub(super) fn gguf_defaults(gguf: &Gguf) -> GenerationDefaults {
    let number = |key: &str| gguf.metadata.f32(&format!("general.sampling.{key}"));
    let integer = |key: &str| gguf.metadata.u32(&format!("general.sampling.{key}"));
    GenerationDefaults {
        temperature: number("temp"),
        top_k: integer("top_k"),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("penalty_repeat"),
        penalty_window: integer("penalty_last_n"),
        max_tokens: None,
    }
}

pub(super) fn hf_defaults(generation: &Map<String, Value>) -> GenerationDefaults {
    let number = |key: &str| Some(generation.get(key)?.as_f64()? as f32);
    let integer = |key: &str| generation.get(key)?.as_u64()?.try_into().ok();
    let greedy = generation.get("do_sample").and_then(Value::as_bool) == Some(false);
    GenerationDefaults {
        temperature: if greedy { Some(0.0) } else { number("temperature") },
        top_k: integer("top_k"),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
        penalty_window: None,
        max_tokens: integer("max_new_tokens").map(|tokens: u32| tokens as usize),
    }
}

/// Returns `eos_token_id` of both configurations, each a number or a list.
pub(super) fn hf_stop_tokens(folder: &HfFolder) -> Vec<u32> {
    let ids = [&folder.generation, &folder.config].into_iter().filter_map(|file| file.get("eos_token_id"));
    let ids = ids.flat_map(|value| match value {
        Value::Array(ids) => ids.as_slice(),
        single => std::slice::from_ref(single),
    });
    ids.filter_map(|id| id.as_u64()?.try_into().ok()).collect()
}
