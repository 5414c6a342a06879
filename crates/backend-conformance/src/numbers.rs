//! Cases that compare logits with the reference's, within tolerances.

use paguro_backend::{
    Activation, AttentionMode, Limits, LoadError, NormKind, OutputKind, PositionScale, QkNormKind, Residual,
    RopeStyle, WeightFormat,
};

use super::{
    Biases, DriveOptions, ModelShape, Rng, Subject, Verdict,
    compare::{Schedule, agrees, agrees_on, agrees_with, near},
    exactness::busy,
};

/// Matrices of one format, with rows and columns that are no round numbers wherever its blocks allow.
pub(super) fn format(subject: &Subject, format: WeightFormat) -> Verdict {
    let shape = ModelShape::of_format(format);
    if subject.unsupported.contains(&format) {
        return refuses(subject, &shape, format.name());
    }
    agrees(subject, &shape)?;
    let wide = match format.block_len() {
        1 => ModelShape { hidden: 219, ffn: 67, ..shape },
        32 => ModelShape { hidden: 224, ffn: 96, ..shape },
        _ => ModelShape { hidden: 768, ffn: 256, ..shape },
    };
    agrees(subject, &ModelShape { windows: vec![None], ..wide })
}

/// A layer whose matrices have formats of two kinds, so that matmuls that are usually fused are separate.
pub(super) fn mixed_formats(subject: &Subject) -> Verdict {
    for (format, finer) in [(WeightFormat::Q4_K, WeightFormat::Q6_K), (WeightFormat::Q8_0, WeightFormat::F16)]
    {
        if subject.unsupported.iter().any(|unsupported| [format, finer].contains(unsupported)) {
            continue;
        }
        agrees(subject, &ModelShape { finer: Some(finer), ..ModelShape::of_format(format) })?;
    }
    Ok(())
}

/// Checks that the load fails and names the unsupported part.
fn refuses(subject: &Subject, shape: &ModelShape, name: &str) -> Verdict {
    let model = shape.build(1);
    let options = subject.options();
    let limits = Limits {
        block_size: options.block_size,
        pages: options.pages,
        max_rows: 16,
        max_sequences: 4,
        max_outputs: 4,
        max_context: options.max_context,
        states: 0,
        kv_dtype: subject.kv_dtype,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    match (subject.backend)(2).load(&model.program, model.weights, limits) {
        Err(LoadError::Unsupported { what, .. }) if what.contains(name) => Ok(()),
        Err(error) => Err(format!("the refusal does not name {name}: {error}")),
        Ok(_) => Err(format!("{name} was said to be unsupported, but loads")),
    }
}

/// Every sharing of K/V heads: all their own, groups of three, one for all; counts that threads do not divide.
pub(super) fn grouped_heads(subject: &Subject) -> Verdict {
    for (heads, kv_heads) in [(4, 4), (5, 5), (6, 2), (9, 3), (7, 1), (8, 1), (1, 1)] {
        agrees(subject, &ModelShape { heads, kv_heads, ..ModelShape::default() })?;
    }
    Ok(())
}

/// Many sequences with one row each beside a prompt: attention of steps with cooperative matrices has a kernel of its own
/// for these.
pub(super) fn many_sequences(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    let (singles, prompt) = (20, 120);
    let mut rng = Rng::new(9);
    let mut sequences: Vec<_> = (0..singles).map(|index| rng.tokens(3 + index % 5, shape.vocab)).collect();
    sequences.push(rng.tokens(prompt, shape.vocab));
    let first = (0..singles).map(|index| (index, 2 + index % 5)).collect();
    let last = (0..singles).map(|index| (index, 1)).chain([(singles, prompt)]).collect();
    let schedule = Schedule { sequences, steps: vec![first, last] };
    agrees_on(subject, &schedule, &shape, &subject.options())
}

/// The head widths of common models.
pub(super) fn head_dims(subject: &Subject) -> Verdict {
    [64, 80, 96, 128, 256]
        .into_iter()
        .try_for_each(|head_dim| agrees(subject, &ModelShape { head_dim, ..ModelShape::default() }))
}

/// Rare head dimensions, and those of very small models. A backend that does not support one must refuse it at load.
pub(super) fn unusual_head_dims(subject: &Subject) -> Verdict {
    [8, 16, 32, 40, 48, 72, 112, 160, 192].into_iter().try_for_each(|head_dim| {
        agrees_or_refuses(subject, &ModelShape { head_dim, ..ModelShape::default() }, "head_dim")
    })
}

/// Biases of q, k and v.
pub(super) fn biases(subject: &Subject) -> Verdict {
    agrees(subject, &ModelShape { biases: Biases::Qkv, ..ModelShape::default() })
}

/// Keys with an element that is far larger than the others, as those of Qwen 2, and the same for all tokens: quantized pages that
/// do not transform heads lose the other elements of its block.
pub(super) fn large_keys(subject: &Subject) -> Verdict {
    for head_dim in [64, 80] {
        let shape =
            ModelShape { head_dim, rotated: Some(32), biases: Biases::LargeKeys, ..ModelShape::default() };
        agrees(subject, &shape)?;
    }
    Ok(())
}

/// Biases of all matmuls.
pub(super) fn biases_everywhere(subject: &Subject) -> Verdict {
    agrees(subject, &ModelShape { biases: Biases::All, ..ModelShape::default() })
}

/// A model of this shape agrees with the reference, or does not load for a reason with this name.
pub(super) fn agrees_or_refuses(subject: &Subject, shape: &ModelShape, name: &str) -> Verdict {
    agrees_or_refuses_with(subject, shape, name, || agrees(subject, shape))
}

/// A check of a model of this shape passes, or the model does not load for a reason with this name.
pub(super) fn agrees_or_refuses_with(
    subject: &Subject,
    shape: &ModelShape,
    name: &str,
    check: impl FnOnce() -> Verdict,
) -> Verdict {
    let agrees = check();
    if agrees.is_err() && refuses(subject, shape, name).is_ok() { Ok(()) } else { agrees }
}

/// Norms of query and key heads.
pub(super) fn qk_norms(subject: &Subject) -> Verdict {
    agrees(subject, &ModelShape { qk_norm: Some(QkNormKind::Head), ..ModelShape::default() })
}

/// Norms after attention and feed-forward.
pub(super) fn post_norms(subject: &Subject) -> Verdict {
    agrees(subject, &ModelShape { post_norms: true, ..ModelShape::default() })
}

/// Soft caps of scores and of logits, each alone; low enough to matter.
pub(super) fn soft_caps(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    agrees(subject, &ModelShape { attention_cap: Some(1.5), ..shape.clone() })?;
    agrees(subject, &ModelShape { logit_cap: Some(0.8), ..shape })
}

/// The same window in all layers: less than a page, a page, a page and a token, and more than the context.
pub(super) fn windows(subject: &Subject) -> Verdict {
    for window in [1, 9, 16, 17, 31, 500] {
        agrees(subject, &ModelShape { windows: vec![Some(window); 2], ..ModelShape::default() })?;
    }
    Ok(())
}

/// Layers with and without windows: two block tables, one with scratch where the window has passed.
pub(super) fn alternating_windows(subject: &Subject) -> Verdict {
    for block_size in [16, 32] {
        let options = DriveOptions { block_size, ..subject.options() };
        let windows = vec![Some(9), None, Some(9)];
        agrees_with(subject, &ModelShape { windows: windows.clone(), ..ModelShape::default() }, &options)?;
        // One layer per page: two groups with the same window.
        agrees_with(
            subject,
            &ModelShape { windows, layer_slots: Some(1), ..ModelShape::default() },
            &options,
        )?;
    }
    // The last group of a kind leaves slots unused.
    let windows = vec![Some(20), Some(20), Some(20), None];
    agrees(subject, &ModelShape { windows, layer_slots: Some(2), ..ModelShape::default() })
}

/// Both pairings, rotation of a part of the head, and a magnitude.
pub(super) fn ropes(subject: &Subject) -> Verdict {
    for rope_style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
        for (head_dim, rotated, rope_magnitude) in [(64, 64, 1.0), (64, 32, 1.0), (80, 24, 1.3), (64, 0, 1.0)]
        {
            let shape = ModelShape {
                rope_style,
                head_dim,
                rotated: Some(rotated),
                rope_magnitude,
                ..ModelShape::default()
            };
            agrees(subject, &shape)?;
        }
    }
    Ok(())
}

/// The head is the embedding's table, whose rows are scaled, in formats of each kind.
pub(super) fn tied_head(subject: &Subject) -> Verdict {
    for format in [WeightFormat::F32, WeightFormat::Q8_0, WeightFormat::Q6_K] {
        let shape = ModelShape { tied: true, embed_scale: 3.0, ..ModelShape::of_format(format) };
        agrees(subject, &shape)?;
    }
    Ok(())
}

/// Gemma's activation.
pub(super) fn gelu(subject: &Subject) -> Verdict {
    agrees(subject, &ModelShape { activation: Activation::GeluTanh, ..ModelShape::default() })
}

/// LayerNorm with biases.
pub(super) fn layer_norms(subject: &Subject) -> Verdict {
    let shape = ModelShape { norms: NormKind::Layer, post_norms: true, ..ModelShape::default() };
    for hidden in [64, 72, 100] {
        agrees(subject, &ModelShape { hidden, ..shape.clone() })?;
    }
    Ok(())
}

/// Norms of the output alone, and none at all.
pub(super) fn norm_places(subject: &Subject) -> Verdict {
    // Small, because attention scores grow with the residual stream.
    let shape = ModelShape { pre_norms: false, embed_scale: 0.5, ..ModelShape::default() };
    agrees(subject, &ModelShape { post_norms: true, ..shape.clone() })?;
    agrees(subject, &ModelShape { branch_scale: 0.5, ..shape })
}

/// All activations behind a gate, with and without biases.
pub(super) fn activations(subject: &Subject) -> Verdict {
    let clamped = Activation::ClampedSwiglu { alpha: 1.7, limit: 1.5 };
    for activation in [Activation::Gelu, Activation::Relu2, clamped] {
        for biases in [Biases::None, Biases::All] {
            let shape = ModelShape { activation, biases, ..ModelShape::default() };
            agrees(subject, &shape)?;
        }
    }
    Ok(())
}

/// Feed-forward networks without a gate.
pub(super) fn ungated(subject: &Subject) -> Verdict {
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu, Activation::Relu2] {
        for (format, biases) in [(WeightFormat::F16, Biases::All), (WeightFormat::Q8_0, Biases::None)] {
            let shape = ModelShape { gated: false, activation, biases, ..ModelShape::of_format(format) };
            agrees(subject, &shape)?;
        }
    }
    Ok(())
}

/// Branches that read the same residual stream.
pub(super) fn parallel(subject: &Subject) -> Verdict {
    let shape = ModelShape { residual: Residual::Parallel, ..ModelShape::default() };
    agrees(subject, &shape)?;
    agrees(subject, &ModelShape { biases: Biases::All, post_norms: true, branch_scale: 0.3, ..shape })
}

/// Norms of whole rows of queries and keys, and of heads after RoPE.
pub(super) fn qk_norm_kinds(subject: &Subject) -> Verdict {
    for kind in [QkNormKind::Row, QkNormKind::HeadAfterRope] {
        for biases in [Biases::None, Biases::All] {
            let shape = ModelShape { qk_norm: Some(kind), biases, heads: 6, ..ModelShape::default() };
            agrees(subject, &shape)?;
        }
    }
    Ok(())
}

/// Layers without RoPE.
pub(super) fn no_positions(subject: &Subject) -> Verdict {
    let shape = ModelShape { skips_ropes: true, ..ModelShape::default() };
    agrees(subject, &shape)?;
    agrees(subject, &ModelShape { qk_norm: Some(QkNormKind::Head), biases: Biases::Qkv, ..shape })
}

/// Learned positions, whose number bounds sequences.
pub(super) fn learned_positions(subject: &Subject) -> Verdict {
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        let shape = ModelShape { positions: Some(160), embed_scale: 2.0, ..ModelShape::of_format(format) };
        agrees(subject, &shape)?;
    }
    Ok(())
}

/// Queries that grow with their position.
pub(super) fn position_scale(subject: &Subject) -> Verdict {
    let position_scale = Some(PositionScale { beta: 0.4, original: 7 });
    agrees(subject, &ModelShape { position_scale, ..ModelShape::default() })
}

/// Sinks, with windows, caps and several query heads for each K/V head, and with attention shared out in parts.
pub(super) fn sinks(subject: &Subject) -> Verdict {
    let shape = ModelShape { sinks: true, heads: 6, ..ModelShape::default() };
    let windows = vec![Some(9), None];
    let capped = ModelShape { attention_cap: Some(3.0), windows, ..shape.clone() };
    agrees(subject, &capped)?;
    agrees(subject, &shape)?;
    let options = DriveOptions { attention: AttentionMode::Gather, ..subject.options() };
    agrees_with(subject, &shape, &options)?;
    let tokens = 1100;
    let shape = ModelShape { windows: vec![None], hidden: 32, ffn: 32, ..shape };
    let options = DriveOptions { pages: 80, max_context: tokens, ..subject.options() };
    let sequences = vec![Rng::new(8).tokens(tokens, shape.vocab)];
    let steps = vec![vec![(0, 1000)], vec![(0, 97)], vec![(0, 1)], vec![(0, 2)]];
    agrees_on(subject, &Schedule { sequences, steps }, &shape, &options)
}

/// Scales of branches and of logits.
pub(super) fn scales(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    agrees(subject, &ModelShape { logit_scale: 0.125, ..shape.clone() })?;
    let capped = ModelShape { logit_scale: 3.0, logit_cap: Some(2.0), ..shape.clone() };
    agrees(subject, &capped)?;
    for biases in [Biases::None, Biases::All] {
        for post_norms in [false, true] {
            let shape = ModelShape { branch_scale: 0.22, biases, post_norms, ..shape.clone() };
            agrees(subject, &shape)?;
        }
    }
    Ok(())
}

/// All features at once, in formats of each kind.
pub(super) fn everything(subject: &Subject) -> Verdict {
    for format in [WeightFormat::F16, WeightFormat::Q4_0, WeightFormat::Q4_K] {
        agrees(subject, &busy(format))?;
    }
    Ok(())
}

/// Pages of 16 and of 32 tokens, in order and scattered, fresh and written before.
pub(super) fn pages(subject: &Subject) -> Verdict {
    for block_size in [16, 32] {
        for (scatter, stale) in [(None, false), (Some(5), false), (None, true), (Some(6), true)] {
            let options = DriveOptions { block_size, pages: 20, scatter, stale, ..subject.options() };
            agrees_with(subject, &ModelShape::default(), &options)?;
        }
    }
    Ok(())
}

/// Prompts of one token, of almost a page, a page, a little more, and two; then a token more, one by one and all
/// in one step.
pub(super) fn lengths(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    for block_size in [16, 32] {
        let options = DriveOptions { block_size, max_context: 200, ..subject.options() };
        let lengths = [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size];
        let mut rng = Rng::new(9);
        let sequences: Vec<_> = lengths.iter().map(|&length| rng.tokens(length + 1, shape.vocab)).collect();
        let alone =
            lengths.iter().enumerate().flat_map(|(index, &length)| [vec![(index, length)], vec![(index, 1)]]);
        agrees_on(
            subject,
            &Schedule { sequences: sequences.clone(), steps: alone.collect() },
            &shape,
            &options,
        )?;
        let together = vec![
            lengths.iter().enumerate().map(|(index, &length)| (index, length)).collect(),
            (0..lengths.len()).rev().map(|index| (index, 1)).collect(),
        ];
        agrees_on(subject, &Schedule { sequences, steps: together }, &shape, &options)?;
    }
    Ok(())
}

/// Enough rows in a step that a backend may have kernels for them, with tokens before them and a decode beside them: windows, caps,
/// groups of heads and pages of several sizes.
pub(super) fn many_rows(subject: &Subject) -> Verdict {
    let of_heads =
        |heads, kv_heads, head_dim| ModelShape { heads, kv_heads, head_dim, ..ModelShape::default() };
    let windows = |shape| ModelShape { windows: vec![Some(70), None], ..shape };
    let shapes = [
        (busy(WeightFormat::F32), 32),
        (of_heads(7, 1, 96), 16),
        (windows(of_heads(4, 4, 128)), 64),
        (windows(of_heads(10, 2, 64)), 16),
        (of_heads(2, 1, 256), 128),
    ];
    for (shape, block_size) in subject.draw.some("many rows", &shapes, 3) {
        let options = DriveOptions { block_size, max_context: 200, ..subject.options() };
        let mut rng = Rng::new(11);
        let sequences = [181, 12].map(|tokens| rng.tokens(tokens, shape.vocab)).to_vec();
        let steps = vec![vec![(0, 37), (1, 10)], vec![(1, 1), (0, 143)], vec![(0, 1), (1, 1)]];
        agrees_on(subject, &Schedule { sequences, steps }, &shape, &options)?;
    }
    Ok(())
}

/// Embeddings are those of the reference.
pub(super) fn embeddings(subject: &Subject) -> Verdict {
    let options = DriveOptions { output: OutputKind::Embedding, ..DriveOptions::default() };
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        agrees_with(subject, &busy(format), &options)?;
    }
    // More of them than any slice of logits.
    let schedule =
        Schedule::whole(vec![Rng::new(6).tokens(options.max_context, ModelShape::default().vocab)]);
    agrees_on(subject, &schedule, &ModelShape::default(), &options)
}

/// The maximum rows, sequences and outputs of the load, and a sequence of the maximum length.
pub(super) fn limits(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    let options = subject.options();
    let mut rng = Rng::new(4);
    // A driver loads for eight sequences, and for as many rows as the longest has tokens.
    let share = options.max_context / 8;
    let many: Vec<_> = (0..8).map(|_| rng.tokens(share, shape.vocab)).collect();
    let steps = vec![(0..8).map(|index| (index, share)).collect()];
    agrees_on(subject, &Schedule { sequences: many, steps }, &shape, &options)?;
    let long = vec![rng.tokens(options.max_context, shape.vocab)];
    agrees_on(subject, &Schedule::whole(long), &shape, &options)
}

/// A context long enough that attention is shared out in parts, prefilled in chunks and then decoded.
pub(super) fn long_context(subject: &Subject) -> Verdict {
    let tokens = 1100;
    // Few and many heads that share K and V.
    [3, 8].into_iter().try_for_each(|heads| {
        let shape = ModelShape {
            windows: vec![None],
            hidden: 32,
            ffn: 32,
            heads,
            kv_heads: 1,
            ..ModelShape::default()
        };
        let options = DriveOptions { pages: 80, max_context: tokens, ..subject.options() };
        let sequences = vec![Rng::new(8).tokens(tokens, shape.vocab)];
        let steps =
            vec![vec![(0, 500)], vec![(0, 595)], vec![(0, 1)], vec![(0, 1)], vec![(0, 2)], vec![(0, 1)]];
        agrees_on(subject, &Schedule { sequences, steps }, &shape, &options)
    })
}

/// The gather path equals the reference and the paged path.
pub(super) fn gather(subject: &Subject) -> Verdict {
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        let shape = busy(format);
        let gather = DriveOptions { attention: AttentionMode::Gather, ..subject.options() };
        agrees_with(subject, &shape, &gather)?;
        let (model, backend) = (shape.build(1), (subject.backend)(2));
        let schedule = Schedule::mixed(gather.block_size, shape.vocab);
        let gathered = schedule.load_and_run(&*backend, &model, &gather)?;
        let paged = schedule.load_and_run(&*backend, &model, &subject.options())?;
        near(subject, format, &paged, &gathered)?;
    }
    Ok(())
}
