//! GPT-NeoX and Pythia: branches side by side, LayerNorm, GELU without a gate.

use paguro_backend::{Activation, NormKind, Residual};

use super::{Block, Definition, HfMatrices, Part, hf::Defaults};
use crate::gguf::Value;

pub(super) const DEF: Definition = Definition {
    gguf: "gptneox",
    hf: &["GPTNeoXForCausalLM"],
    block: Block {
        norms: NormKind::Layer,
        // llama.cpp computes its tanh form.
        activation: Activation::Gelu,
        gated: false,
        residual: Residual::Parallel,
        ..Block::LLAMA
    },
    from_gguf: |keys, config| {
        config.block.residual = match keys.flag("use_parallel_residual") {
            Some(false) => Residual::Sequential,
            _ => Residual::Parallel,
        };
        Ok(())
    },
    further_gguf_keys: |config| {
        let is_parallel = config.block.residual == Residual::Parallel;
        vec![("use_parallel_residual", Value::Bool(is_parallel))]
    },
    hf_defaults: |_| Defaults { norm_eps: 1e-5, partial_rotary_factor: 0.25, ..Defaults::COMMON },
    from_hf: |fields, config| {
        if fields.flag("use_parallel_residual")? == Some(false) {
            config.block.residual = Residual::Sequential;
        }
        Ok(())
    },
    hf_names: &[
        (Part::Embedding, "embed_in"),
        (Part::OutputNorm, "final_layer_norm"),
        (Part::Head, "embed_out"),
        (Part::Qkv, "attention.query_key_value"),
        (Part::AttentionOut, "attention.dense"),
        (Part::Up, "mlp.dense_h_to_4h"),
        (Part::Down, "mlp.dense_4h_to_h"),
    ],
    hf_matrices: HfMatrices::QkvByHead,
    // Causal masks.
    hf_ignored: &[".attention.bias", ".attention.masked_bias"],
    ..Definition::LLAMA
};
