//! Programs that this backend runs.

use paguro_backend::{Layer, LoadError, Mixer, Program, Residual};

use crate::plan::Heads;

/// Returns the heads of the layers of each K/V group.
///
/// # Errors
/// [`LoadError::Unsupported`] for layers of a group that differ.
pub fn heads(program: &Program) -> Result<Vec<Heads>, LoadError> {
    Heads::of_groups(program).ok_or_else(|| LoadError::Unsupported {
        device: "cpu".into(),
        what: "query heads that differ between layers with the same window and K/V heads".into(),
        supported: "as many query heads in all of these layers work".into(),
    })
}

/// Returns the first of the last layers that store nothing for later rows, if there are some (Gemma 4 E2B: 20 of 35; a
/// feed-forward network of Nemotron-H at the end).
pub fn tail(program: &Program) -> Option<usize> {
    let stores = |layer: &Layer| {
        layer.mixer.parts().any(|mixer| !matches!(mixer, Mixer::Attention(op) if op.k.is_none()))
    };
    let first = program.layers.iter().rposition(stores).map_or(0, |last| last + 1);
    (first < program.layers.len()).then_some(first)
}

paguro_backend::known_fields! {
    Program { hidden, vocab, bidirectional, shares_pages, kv, state, ropes, input, given_parts, layers, exit }
    Embed { table, scale, positions, types, norm, layers, joined }
    Joined { width, token_norm, given_norm, linear }
    LayerEmbeds { table, scale, count, width, projection, norm }
    Patches { width, ops }
    Merged { rows, width, taps }
    Head { norm, linear, scale, soft_cap, projection }
    Projection { width, linear }
    Layer { mixer, ffn, residual, norm_after_mixer, norm_after_ffn, branch_scale, input, output_scale }
    LayerInput { index, gate, activation, out, post_norm }
    Branch { mixer, scale }
    Attention {
        norm, heads, q, k, v, qk_norm, v_norm, rope, position_scale, scale, soft_cap, distance_bias, sinks, kv, gate, out,
        post_norm,
    }
    QkNorm { q, k, kind }
    KvGroup { window, spans, layer_slots, kv_heads, head_dim }
    Rope { style, frequencies, axes, magnitude }
    Latent {
        norm, shape, query, down, latent_norm, absorb, value, rope, position_scale, scale, kv, out, post_norm,
    }
    ShortConv { norm, width, input, convolution, out, post_norm, state }
    DeltaRule {
        norm, shape, sharing, qkv, gate, alpha, beta, convolution, decay, dt, out_norm, out, post_norm, state,
    }
    Ssd {
        norm, shape, cbv, gate, gate_scale, dt, dt_scale, dt_bias, dt_limits, convolution, decay, skip, out_norm, out,
        post_norm, state,
    }
    Dense { norm, width, gate, up, activation, down, post_norm }
    Experts { norm, router, count, width, latent, gate, up, activation, down, shared, beside, post_norm }
    Router { norm, linear, scores, selection_bias, groups, used, renormalize, factor, expert_scale }
    SharedExpert { width, gate, up, down, output_gate }
    Linear { matrix, bias, bounds }
    Norm { kind, weight, bias, eps }
    Step { tokens, carried, given, coordinates, spans, adapters, sequences, pages, outputs }
    StepSequence { rows, start, tables, state }
    SampleRequest { params, draw, history, prompt_tokens, mask, logprobs }
}

/// Refuses unsupported operations by name.
pub fn check(program: &Program) -> Result<(), LoadError> {
    for layer in &program.layers {
        if let Mixer::Sum(branches) = &layer.mixer {
            let is_parallel = layer.residual == Residual::Parallel;
            if branches.len() > 2 || is_parallel {
                let beside = if is_parallel { " beside a feed-forward network" } else { "" };
                return Err(LoadError::Unsupported {
                    device: "cpu".into(),
                    what: format!("a sum of {} mixers{beside}", branches.len()),
                    supported: "sums of two before a network work".into(),
                });
            }
        }
    }
    heads(program).map(|_| ())
}
