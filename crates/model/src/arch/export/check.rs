//! Comparison of a converted file with its folder, so that no property of the model is lost.

use paguro_backend::{Matrix, Program, WeightFormat, Weights};

use super::{LONGEST, Multiplied};
use crate::{
    arch::{self, Config, MtpHead, Names, Tensors},
    error::ModelError,
    gguf::Contents,
    rope::RopeConfig,
};

/// Reads the file and compares it with the configuration and the weights of the folder.
///
/// # Errors
/// [`ModelError::Unsupported`], with the property that the file lacks.
pub(super) fn check(
    config: &Config,
    contents: &Contents,
    (program, weights, mtp): (&Program, &Weights, Option<&MtpHead>),
    multiplied: &Multiplied,
) -> Result<(), ModelError> {
    let mut tensors = Tensors::new(config.definition.gguf, &WeightFormat::ALL, &contents.tensors);
    let read = arch::config_from_gguf(&contents.metadata, &mut tensors, Some(LONGEST))?;
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
        config.experts.map(|experts| arch::ExpertsConfig { transposed: false, alternating: false, ..experts })
    };
    let block = |config: &Config| {
        // The arrangement of a folder.
        arch::Block { fused_gate_up: config.definition.block.fused_gate_up, ..config.block }
    };
    let ropes = |config: &Config| -> Vec<_> { config.ropes.iter().map(RopeConfig::lower).collect() };
    let reordered = config.definition.rope_styles == arch::REORDERED;
    let same_ropes = ropes(config).len() == ropes(&read).len()
        && ropes(config).iter().zip(&ropes(&read)).all(|(a, b)| {
            let pairs = || a.frequencies.iter().zip(&b.frequencies);
            a.frequencies.len() == b.frequencies.len()
                && close(a.magnitude, b.magnitude)
                && (reordered || config.halves_in_gguf || a.style == b.style)
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
    let again = arch::lower(&read, &Names::gguf(config.definition), tensors, config.context_length)?;
    let shapes = |program: &Program, weights: &Weights| shapes(program, weights, config.context_length);
    let of_head = |head: Option<&MtpHead>| head.map(|head| shapes(&head.program, &head.weights));
    let same = shapes(program, weights) == shapes(&again.program, &again.weights)
        && of_head(mtp) == of_head(again.mtp.as_ref());
    if multiplied.is_none() && !same {
        let name = config.definition.gguf;
        let what = format!("converting this `{name}` model to GGUF, in which some tensors have no place,");
        return Err(ModelError::unsupported(what));
    }
    Ok(())
}

/// Returns the shapes of all weights, sorted. A table of positions counts with `context` rows at most.
fn shapes(program: &Program, weights: &Weights, context: usize) -> Vec<[usize; 3]> {
    let positions = program.embed().and_then(|embed| embed.positions.as_ref());
    let positions = positions.map(|positions| weights.matrix(positions.table));
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
