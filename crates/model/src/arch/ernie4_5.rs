//! ERNIE 4.5, dense and with experts; the text part of PaddleOCR-VL.

use super::{Definition, ExpertsConfig, INTERLEAVED, Part, hf::Defaults};
use crate::gguf::Value;

pub(super) const DEF: Definition = Definition {
    gguf: "ernie4_5",
    hf: &["Ernie4_5ForCausalLM"],
    rope_styles: INTERLEAVED,
    hf_defaults: |_| Defaults { kv_heads: Some(2), head_dim: Some(128), rope_theta: 500_000.0, ..COMMON },
    ..Definition::LLAMA
};

pub(super) const MOE: Definition = Definition {
    gguf: "ernie4_5-moe",
    hf: &["Ernie4_5_MoeForCausalLM"],
    rope_styles: INTERLEAVED,
    experts: Some(ExpertsConfig { selection_bias: true, ..ExpertsConfig::SOFTMAX }),
    hf_defaults: |_| Defaults { kv_heads: Some(4), rope_theta: 500_000.0, ..COMMON },
    from_hf: |fields, config| {
        let first = fields.size("moe_layer_start_index", Some(1))?;
        let every = fields.size("moe_layer_interval", Some(1))?.max(1);
        let last = fields.number("moe_layer_end_index")?.filter(|&last| last >= 0.0);
        let last = last.map_or(usize::MAX, |last| last as usize);
        for (index, layer) in config.layers.iter_mut().enumerate() {
            layer.experts = (index + 1).is_multiple_of(every) && (first..=last).contains(&index);
        }
        Ok(())
    },
    // Files have experts in all layers after the dense ones.
    further_gguf_keys: |_| vec![("interleave_moe_layer_step", Value::U32(1))],
    hf_names: &[(Part::SelectionBias, "mlp.moe_statics.e_score_correction_bias")],
    ..Definition::LLAMA
};

pub(super) const PADDLE_OCR: Definition = Definition {
    gguf: "paddleocr",
    hf: &["PaddleOCRVLForConditionalGeneration"],
    gguf_keys: &["rope.dimension_sections"],
    hf_defaults: |_| Defaults { kv_heads: Some(2), head_dim: Some(128), rope_theta: 500_000.0, ..COMMON },
    hf_ignored: &["visual.", "projector.", "mlp_AR."],
    ..Definition::LLAMA
};

const COMMON: Defaults = Defaults { context_length: 131_072, norm_eps: 1e-5, tied: true, ..Defaults::COMMON };
