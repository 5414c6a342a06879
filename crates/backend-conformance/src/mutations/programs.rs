//! Programs and rows with a defect.

use std::ops::Range;

use paguro_backend::{
    Activation, Attention, Bytes, Carried, DeltaRule, Dense, Embed, Experts, FeedForward, Head, KeySharing,
    Mixer, Norm, NormKind, OutputValue, Program, QkNorm, QkNormKind, Residual, RopeStyle, Step, Weights,
};

pub(super) fn embed(program: &mut Program) -> &mut Embed {
    program.embed_mut().expect("a program of tokens")
}

pub(super) fn head(program: &mut Program) -> &mut Head {
    program.head_mut().expect("a program with logits")
}

pub(super) fn swaps_norms_of_join(program: &mut Program) {
    let joined = program.embed_mut().and_then(|embed| embed.joined.as_mut());
    joined.into_iter().for_each(|joined| std::mem::swap(&mut joined.token_norm, &mut joined.given_norm));
}

pub(super) fn keeps_no_dropped_inputs(program: &mut Program) {
    let droppable = program.droppable_rows().unwrap_or(0);
    program.state.layers.iter_mut().for_each(|layer| layer.rows -= droppable);
}

pub(super) fn each_attention(program: &mut Program, change: fn(&mut Attention)) {
    for layer in &mut program.layers {
        if let Mixer::Attention(attention) = &mut layer.mixer {
            change(attention);
        }
    }
}

pub(super) fn each_dense(program: &mut Program, change: fn(&mut Dense)) {
    for layer in &mut program.layers {
        if let FeedForward::Dense(dense) = &mut layer.ffn {
            change(dense);
        }
    }
}

pub(super) fn each_experts(program: &mut Program, change: fn(&mut Experts)) {
    for layer in &mut program.layers {
        if let FeedForward::Experts(experts) = &mut layer.ffn {
            change(experts);
        }
    }
}

/// All norms of the residual stream.
pub(super) fn each_norm(program: &mut Program, change: fn(&mut Norm)) {
    each_attention(program, |_| ());
    for layer in &mut program.layers {
        if let Mixer::Attention(Attention { norm: Some(norm), .. }) = &mut layer.mixer {
            change(norm);
        }
        match &mut layer.ffn {
            FeedForward::Dense(Dense { norm: Some(norm), .. })
            | FeedForward::Experts(Experts { norm: Some(norm), .. }) => change(norm),
            _ => {}
        }
    }
    program.head_mut().into_iter().for_each(|head| change(&mut head.norm));
}

pub(super) fn other_pairs(program: &mut Program) {
    for rope in &mut program.ropes {
        rope.style = match rope.style {
            RopeStyle::Interleaved => RopeStyle::HalfSplit,
            RopeStyle::HalfSplit => RopeStyle::Interleaved,
        };
    }
}

pub(super) fn rotates_all(program: &mut Program) {
    for rope in &mut program.ropes {
        rope.frequencies.resize(program.kv.groups[0].head_dim / 2, 0.1);
    }
}

pub(super) fn no_magnitude(program: &mut Program) {
    program.ropes.iter_mut().for_each(|rope| rope.magnitude = 1.0);
}

pub(super) fn one_rope(program: &mut Program) {
    each_attention(program, |op| op.rope = Some(0));
}

pub(super) fn no_eps(program: &mut Program) {
    each_norm(program, |norm| norm.eps = 0.0);
}

pub(super) fn no_mean(program: &mut Program) {
    each_norm(program, |norm| norm.kind = NormKind::Rms);
}

pub(super) fn no_norm_bias(program: &mut Program) {
    each_norm(program, |norm| norm.bias = None);
}

pub(super) fn no_q_norm(program: &mut Program) {
    each_attention(program, |op| op.qk_norm = op.qk_norm.map(|norm| QkNorm { q: norm.k, ..norm }));
}

pub(super) fn no_qk_norm(program: &mut Program) {
    each_attention(program, |op| op.qk_norm = None);
}

pub(super) fn norms_before_rope(program: &mut Program) {
    each_attention(program, |op| {
        if let Some(norm) = &mut op.qk_norm
            && norm.kind == QkNormKind::HeadAfterRope
        {
            norm.kind = QkNormKind::Head;
        }
    });
}

pub(super) fn no_post_norms(program: &mut Program) {
    each_attention(program, |op| op.post_norm = None);
    each_dense(program, |op| op.post_norm = None);
    each_experts(program, |op| op.post_norm = None);
}

pub(super) fn no_qkv_bias(program: &mut Program) {
    each_attention(program, |op| {
        let linears = [&mut op.q].into_iter().chain(&mut op.k).chain(&mut op.v);
        linears.for_each(|linear| linear.bias = None);
    });
}

pub(super) fn no_expert_bias(program: &mut Program) {
    each_experts(program, |op| {
        let linears = [&mut op.up, &mut op.down].into_iter().chain(&mut op.gate);
        linears.for_each(|linear| linear.bias = None);
    });
}

/// Adds every choice twice, which the weights' sum does not show.
pub(super) fn one_expert_less(program: &mut Program) {
    each_experts(program, |op| op.router.used = (op.router.used - 1).max(1));
}

pub(super) fn sequential(program: &mut Program) {
    program.layers.iter_mut().for_each(|layer| layer.residual = Residual::Sequential);
}

pub(super) fn only_silu(program: &mut Program) {
    each_dense(program, |op| op.activation = Activation::Silu);
    each_experts(program, |op| op.activation = Activation::Silu);
}

/// K and V of all layers of a group land on each other once a later step reads them.
pub(super) fn one_slot(program: &mut Program) {
    each_attention(program, |op| op.kv.layer_slot = 0);
}

pub(super) fn one_group(program: &mut Program) {
    each_attention(program, |op| op.kv.group = 0);
}

fn each_delta(program: &mut Program, change: impl Fn(&mut DeltaRule)) {
    for layer in &mut program.layers {
        if let Mixer::DeltaRule(op) = &mut layer.mixer {
            change(op);
        }
    }
}

pub(super) fn other_sharing(program: &mut Program) {
    each_delta(program, |op| {
        op.sharing = match op.sharing {
            KeySharing::Consecutive => KeySharing::Alternating,
            KeySharing::Alternating => KeySharing::Consecutive,
        };
    });
}

/// Uses the update strength as decay.
pub(super) fn decay_by_strength(program: &mut Program) {
    each_delta(program, |op| op.alpha = op.beta);
}

pub(super) fn no_convolution_bias(program: &mut Program) {
    for layer in &mut program.layers {
        match &mut layer.mixer {
            Mixer::Conv(op) => op.convolution.bias = None,
            Mixer::DeltaRule(op) => op.convolution.bias = None,
            Mixer::Ssd(op) => op.convolution.bias = None,
            _ => {}
        }
    }
}

/// Layers without K and V of their own read those of the first layer of their group.
pub(super) fn other_source(program: &mut Program) {
    each_attention(program, |op| {
        if op.k.is_none() {
            op.kv.layer_slot = 0;
        }
    });
}

pub(super) fn no_inputs(program: &mut Program) {
    program.layers.iter_mut().for_each(|layer| layer.input = None);
}

pub(super) fn first_input(program: &mut Program) {
    program.layers.iter_mut().flat_map(|layer| &mut layer.input).for_each(|input| input.index = 0);
}

pub(super) fn other_latent_scale(program: &mut Program) {
    for layer in &mut program.layers {
        if let Mixer::Latent(op) = &mut layer.mixer {
            op.scale = 1.0 / ((op.shape.plain + op.shape.rotated) as f32).sqrt();
        }
    }
}

pub(super) fn copies_tables(weights: &mut Weights) {
    for table in &mut weights.tables {
        if let Ok(bytes) = table.bytes.read() {
            table.bytes = Bytes::from(bytes.into_owned());
        }
    }
}

pub(super) fn neighbours(carried: &mut [Carried]) {
    if let [first, second, ..] = carried {
        std::mem::swap(&mut first.output, &mut second.output);
    }
}

pub(super) fn rows_of_neighbours(carried: &mut [Carried]) {
    if let [first, second, ..] = carried {
        std::mem::swap(&mut first.given, &mut second.given);
    }
}

/// The smallest possible change.
pub(super) fn nudge(logits: &mut [f32], by: usize) {
    if by.is_multiple_of(2) {
        logits[0] = f32::from_bits(logits[0].to_bits() ^ 1);
    }
}

pub(super) fn zeroth(outcomes: &mut Vec<OutputValue>) {
    for outcome in outcomes {
        if let OutputValue::Sampled(sampled) = outcome {
            sampled.token = 0;
        }
    }
}

/// Drops given rows beside other sequences.
pub(super) fn only_alone(step: Step<'_>) -> Step<'_> {
    if step.sequences.len() > 1 { Step { given: &[], ..step } } else { step }
}

/// Drops adapters beside other sequences.
pub(super) fn adapted_alone(step: Step<'_>) -> Step<'_> {
    if step.sequences.len() > 1 { Step { adapters: &[], ..step } } else { step }
}

/// Swaps the last two parts of given rows, if there are more than two.
pub(super) fn other_parts(values: &mut [f32], program: &Program) {
    let (parts, hidden) = (program.given_parts, program.hidden);
    if parts > 2 {
        for row in values.chunks_exact_mut(parts * hidden) {
            let (first, last) = row.split_at_mut((parts - 1) * hidden);
            first[(parts - 2) * hidden..].swap_with_slice(last);
        }
    }
}

pub(super) fn shorter_spans(spans: &mut Vec<Range<usize>>) {
    spans.iter_mut().for_each(|span| span.end -= 1);
    spans.retain(|span| !span.is_empty());
}

pub(super) fn joined_spans(spans: &mut Vec<Range<usize>>) {
    spans.dedup_by(|next, span| {
        let is_adjacent = span.end == next.start;
        if is_adjacent {
            span.end = next.end;
        }
        is_adjacent
    });
}

pub(super) fn scaled_residuals(outcomes: &mut Vec<OutputValue>) {
    for outcome in outcomes {
        if let OutputValue::Residual(row) = outcome {
            row.iter_mut().for_each(|x| *x *= 1.05);
        }
    }
}
