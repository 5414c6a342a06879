//! Encoders: attention in both directions, and what their blocks have that others lack.

use std::collections::VecDeque;

use paguro_backend::{Activation, NormKind, Output, OutputKind, QkNormKind, StepOutput, WeightFormat};

use super::{
    Biases, DriveOptions, Driver, ModelShape, Rng, Subject, Verdict,
    compare::{Schedule, agrees_on, same},
    contract::{Prompt, require},
    rows::unless_refused,
    submit,
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

/// Short texts, of which several are in a step.
fn short_texts(vocab: usize) -> Schedule {
    let mut rng = Rng::new(6);
    Schedule {
        sequences: [1, 16, 33, 3, 60].map(|length| rng.tokens(length, vocab)).to_vec(),
        steps: vec![vec![(2, 33), (0, 1), (4, 60)], vec![(1, 16), (3, 3)]],
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
        exact(subject, &shape, &schedule(2 * shape.vocab), options(subject))?;
    }
    Ok(())
}

/// Means of several texts in a step: those of the reference, and the same bits alone, in any batch, and beside outputs of rows.
pub(super) fn means(subject: &Subject) -> Verdict {
    let odd = ModelShape { hidden: 72, windows: vec![Some(30)], ..bert() };
    let plain = ModelShape { bidirectional: true, ..ModelShape::default() };
    let shapes = [bert(), of_format(WeightFormat::Q8_0), odd, plain];
    for shape in subject.draw.some("means", &shapes, 2) {
        let options = DriveOptions { output: OutputKind::Mean, ..options(subject) };
        let schedule = short_texts(shape.vocab * shape.types.unwrap_or(1));
        unless_refused(subject, || {
            agrees_on(subject, &schedule, &shape, &options)?;
            exact(subject, &shape, &schedule, options)?;
            beside_rows(subject, &shape)?;
            in_lanes(subject, &shape)
        })?;
    }
    Ok(())
}

/// A mean is the same beside outputs of single rows, which are those without it.
fn beside_rows(subject: &Subject, shape: &ModelShape) -> Verdict {
    let model = shape.build(3);
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &options(subject))?;
    let prompt = Prompt::new(shape.vocab);
    let mut run = |outputs: &[Output<'_>]| {
        let mut out = StepOutput::default();
        submit(driver.runner(), &prompt.step(outputs), &mut out)?;
        Ok::<_, String>(out.outcomes)
    };
    let kinds = [
        (3, OutputKind::Embedding),
        (0, OutputKind::Mean),
        (19, OutputKind::Residual),
        (0, OutputKind::Residual),
        (0, OutputKind::Embedding),
    ];
    let outputs = kinds.map(|(row, kind)| Output { row, kind });
    let together = run(&outputs)?;
    for (output, together) in outputs.iter().zip(&together) {
        let alone = run(&[*output])?;
        require(alone == [together.clone()], || format!("{output:?} is {together:?}, and {alone:?} alone"))?;
    }
    Ok(())
}

/// Steps in flight at the same time, in the same pages, have the bits of single ones.
fn in_lanes(subject: &Subject, shape: &ModelShape) -> Verdict {
    let model = shape.build(3);
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &options(subject))?;
    let runner = driver.runner();
    let mut prompts = [(); 2].map(|()| Prompt::new(shape.vocab));
    prompts[1].tokens.reverse();
    let kinds = [(0, OutputKind::Mean), (7, OutputKind::Embedding), (5, OutputKind::Residual)];
    let outputs = kinds.map(|(row, kind)| Output { row, kind });
    let mut expected = Vec::new();
    for prompt in &prompts {
        let mut out = StepOutput::default();
        submit(runner, &prompt.step(&outputs), &mut out)?;
        expected.push(out.outcomes);
    }
    let mut in_flight = VecDeque::new();
    for index in 0..7 {
        let step = prompts[index % 2].step(&outputs);
        let ticket = runner.submit(&step).map_err(|error| error.to_string())?;
        in_flight.push_back((index, ticket));
        if in_flight.len() < runner.lanes() && index < 6 {
            continue;
        }
        while let Some((index, ticket)) = in_flight.pop_front() {
            let mut out = StepOutput::default();
            runner.collect(ticket, &mut out).map_err(|error| error.to_string())?;
            let expected = &expected[index % 2];
            require(out.outcomes == *expected, || {
                format!("step {index} in flight is {:?}, and {expected:?} alone", out.outcomes)
            })?;
            if index < 4 {
                break;
            }
        }
    }
    Ok(())
}

fn exact(subject: &Subject, shape: &ModelShape, schedule: &Schedule, options: DriveOptions) -> Verdict {
    let options = DriveOptions { least_rows: subject.exact_rows, ..options };
    unless_refused(subject, || {
        let model = shape.build(2);
        let run = |schedule: &Schedule, options: &DriveOptions, threads: usize| {
            schedule.run(&mut Driver::new(&*(subject.backend)(threads), &model, options)?)
        };
        let together = run(schedule, &options, 2)?;
        let alone = Schedule::whole(schedule.sequences.clone());
        same("a batch", &together, &run(&alone, &options, 2)?)?;
        let elsewhere = DriveOptions { scatter: Some(9), block_size: 32, ..options };
        same("another place and one thread", &together, &run(&alone, &elsewhere, 1)?)
    })
}
