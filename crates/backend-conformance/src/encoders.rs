//! Encoders: attention in both directions, and what their blocks have that others lack.

use paguro_backend::{Activation, NormKind, QkNormKind, WeightFormat};

use super::{
    Biases, DriveOptions, Driver, ModelShape, Rng, Subject, Verdict,
    compare::{Schedule, agrees_on, same},
    rows::unless_refused,
};

/// BERT in small.
fn bert() -> ModelShape {
    ModelShape {
        kv_heads: 4,
        bidirectional: true,
        pre_norms: false,
        norms: NormKind::Layer,
        norms_after: true,
        embed_norm: true,
        types: Some(2),
        positions: Some(600),
        rotated: Some(0),
        biases: Biases::All,
        gated: false,
        activation: Activation::Gelu,
        ..ModelShape::default()
    }
}

/// [`bert`] with matrices of this format.
fn of_format(format: WeightFormat) -> ModelShape {
    let ModelShape { hidden, ffn, .. } = ModelShape::of_format(format);
    ModelShape { format, hidden, ffn, ..bert() }
}

/// Whole sequences in steps of one and of several: single tokens, pages, more than a split.
fn schedule(vocab: usize) -> Schedule {
    let mut rng = Rng::new(5);
    let lengths = [1, 16, 17, 40, 530, 3];
    Schedule {
        sequences: lengths.map(|length| rng.tokens(length, vocab)).to_vec(),
        steps: vec![vec![(3, 40), (0, 1), (2, 17)], vec![(4, 530)], vec![(1, 16), (5, 3)]],
    }
}

fn options(subject: &Subject) -> DriveOptions {
    DriveOptions { max_context: 640, pages: 160, ..subject.options() }
}

fn check(subject: &Subject, shape: &ModelShape) -> Verdict {
    unless_refused(subject, || {
        let ids = shape.vocab * shape.types.unwrap_or(1);
        agrees_on(subject, &schedule(ids), shape, &options(subject))
    })
}

/// Attention in both directions, with windows of less than a page, of more, and of more than a split.
pub(super) fn bidirectional(subject: &Subject) -> Verdict {
    let shape = ModelShape { bidirectional: true, ..ModelShape::default() };
    check(subject, &shape)?;
    for window in [1, 9, 17, 100, 515] {
        check(subject, &ModelShape { windows: vec![Some(window), None], ..shape.clone() })?;
    }
    check(subject, &ModelShape { qk_norm: Some(QkNormKind::Head), heads: 6, kv_heads: 1, ..shape.clone() })?;
    // Heads that have no whole blocks, as those of many vision towers.
    check(
        subject,
        &ModelShape { qk_norm: Some(QkNormKind::Head), heads: 6, kv_heads: 6, head_dim: 40, ..shape },
    )
}

/// Norms after the sums, a norm of the embeddings, and token types.
pub(super) fn encoder_blocks(subject: &Subject) -> Verdict {
    check(subject, &bert())?;
    // Backends may quantize activations of encoders in another way than those of decoders.
    check(subject, &of_format(WeightFormat::Q8_0))?;
    check(subject, &ModelShape { embed_norm: false, types: None, ..bert() })?;
    check(subject, &ModelShape { types: Some(1), norms: NormKind::Rms, gated: true, ..bert() })
}

/// Scores that distances change, in both directions and in one.
pub(super) fn distance_biases(subject: &Subject) -> Verdict {
    let shape = ModelShape { distance_bias: Some(599), positions: None, ..bert() };
    check(subject, &shape)?;
    check(subject, &ModelShape { attention_cap: Some(2.0), kv_heads: 2, ..shape.clone() })?;
    check(subject, &ModelShape { windows: vec![Some(20), None], ..shape.clone() })?;
    let causal = ModelShape { distance_bias: Some(159), rotated: Some(0), ..ModelShape::default() };
    unless_refused(subject, || super::compare::agrees(subject, &causal))
}

/// A sequence gives the same bits alone and in any batch.
pub(super) fn exact_encoders(subject: &Subject) -> Verdict {
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        let shape =
            ModelShape { windows: vec![Some(30), None], distance_bias: Some(529), ..of_format(format) };
        exact(subject, &shape)?;
    }
    Ok(())
}

fn exact(subject: &Subject, shape: &ModelShape) -> Verdict {
    let schedule = schedule(2 * shape.vocab);
    let options = DriveOptions { least_rows: subject.exact_rows, ..options(subject) };
    unless_refused(subject, || {
        let model = shape.build(2);
        let run = |schedule: &Schedule, options: &DriveOptions, threads: usize| {
            schedule.run(&mut Driver::new(&*(subject.backend)(threads), &model, options)?)
        };
        let together = run(&schedule, &options, 2)?;
        let alone = Schedule::whole(schedule.sequences.clone());
        same("a batch", &together, &run(&alone, &options, 2)?)?;
        let elsewhere = DriveOptions { scatter: Some(9), block_size: 32, ..options };
        same("another place and one thread", &together, &run(&alone, &elsewhere, 1)?)
    })
}
