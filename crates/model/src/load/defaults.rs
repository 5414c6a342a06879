//! Sampling parameters that a model recommends, and its stop tokens.

use paguro_backend::SamplingParams;
use serde_json::{Map, Value};

use crate::{SamplingOverrides, gguf::Gguf, hf::HfFolder};

/// Recommendations of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Sampling values.
    pub recommended: SamplingOverrides,
    /// Length of an answer.
    pub max_tokens: Option<usize>,
}

impl GenerationDefaults {
    /// Returns the default sampling parameters. The model's recommendations are used without ours, even if they set
    /// only some values, because a mixture would be neither. Without any: temperature 0.8, top-k 40, top-p 0.95, min-p
    /// 0.05.
    pub fn sampling(&self) -> SamplingParams {
        let off = SamplingParams::default();
        let SamplingOverrides { temperature, top_k, top_p, min_p, .. } = self.recommended;
        let recommends = [temperature, top_p, min_p].iter().any(Option::is_some) || top_k.is_some();
        let mut params = if recommends {
            SamplingParams { temperature: 1.0, ..off }
        } else {
            SamplingParams { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..off }
        };
        self.recommended.apply(&mut params);
        params
    }
}

pub(super) fn gguf_defaults(gguf: &Gguf) -> GenerationDefaults {
    let number = |key: &str| gguf.metadata.f32(&format!("general.sampling.{key}"));
    let integer = |key: &str| gguf.metadata.u32(&format!("general.sampling.{key}"));
    let recommended = SamplingOverrides {
        temperature: number("temp"),
        top_k: integer("top_k"),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("penalty_repeat"),
        penalty_window: integer("penalty_last_n").map(Some),
        ..SamplingOverrides::default()
    };
    GenerationDefaults { recommended, max_tokens: None }
}

pub(super) fn hf_defaults(generation: &Map<String, Value>) -> GenerationDefaults {
    let number = |key: &str| Some(generation.get(key)?.as_f64()? as f32);
    let integer = |key: &str| generation.get(key)?.as_u64()?.try_into().ok();
    let greedy = generation.get("do_sample").and_then(Value::as_bool) == Some(false);
    let recommended = SamplingOverrides {
        temperature: if greedy { Some(0.0) } else { number("temperature") },
        top_k: integer("top_k"),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
        ..SamplingOverrides::default()
    };
    let max_tokens = integer("max_new_tokens").map(|tokens: u32| tokens as usize);
    GenerationDefaults { recommended, max_tokens }
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
