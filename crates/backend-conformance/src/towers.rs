//! Towers: programs that begin with patches and end with merged rows.

use paguro_backend::{
    Activation, Bounds, Exit, FeedForward, Input, Linear, Merged, Mixer, NormKind, OutputKind, Patches,
    RowOp, Tap, WeightFormat, reference::Reference,
};

use super::{
    Biases, DriveOptions, Driver, ModelShape, RandomModel, Rng, Spans, Subject, Verdict,
    compare::{Logits, near, same},
    drive::RowContent,
    rows::unless_refused,
};

/// Elements of a patch.
const PATCH: usize = 96;
/// Rows that become one.
const MERGED: usize = 4;
/// Elements of one of these.
const WIDTH: usize = 160;

/// Ends of a tower.
#[derive(Clone, Copy, Debug)]
enum Ends {
    /// Rows joined between norm and matmuls, with rows of the first layer beside those of the last one.
    Joined,
    /// Means, affine, without activation.
    Mean,
}

/// Ragged sequences of patches, in one step, agree with the reference, and with themselves alone.
pub(super) fn towers(subject: &Subject) -> Verdict {
    let shape = |format| ModelShape {
        bidirectional: true,
        spans: Spans::Windows,
        windows: vec![Some(2000), None],
        axes: &[1, 2],
        given_parts: 1,
        gated: false,
        activation: Activation::GeluTanh,
        norms: NormKind::Layer,
        biases: Biases::All,
        ..ModelShape::of_format(format)
    };
    let cases = [
        (WeightFormat::F32, Ends::Joined),
        (WeightFormat::F16, Ends::Mean),
        (WeightFormat::Q8_0, Ends::Joined),
    ];
    for (format, ends) in cases {
        unless_refused(subject, || {
            let model = tower(&shape(format), ends);
            check(subject, &model, format).map_err(|error| format!("{error}\n{ends:?}"))
        })?;
    }
    for format in [WeightFormat::F16, WeightFormat::Q8_0] {
        unless_refused(subject, || {
            let shape = ModelShape { gated: true, biases: Biases::None, ..shape(format) };
            let mut model = tower(&shape, Ends::Joined);
            bound(&mut model);
            check(subject, &model, format).map_err(|error| format!("{error}\nwith bounds"))
        })?;
    }
    // Ends alone.
    unless_refused(subject, || {
        let format = WeightFormat::F32;
        let mut model = tower(&shape(format), Ends::Mean);
        model.program.layers.clear();
        if let Exit::Merged(merged) = &mut model.program.exit {
            merged.taps.iter_mut().for_each(|tap| tap.layers = 0);
        }
        check(subject, &model, format)
    })
}

fn check(subject: &Subject, model: &RandomModel, format: WeightFormat) -> Verdict {
    // Steps of any number of rows compute the same bits, or those that have many rows also where several have become one.
    let many = subject.exact_rows * MERGED;
    let (rows, beside): (&[usize], _) = match subject.exact_rows {
        0..=1 => (&[40, 4, 1100], 0..2),
        _ => (&[40, many, many + 2 * MERGED], 1..3),
    };
    let max_context = 1200.max(2 * many + 2 * MERGED);
    let options = DriveOptions { output: OutputKind::Residual, max_context, pages: 400, ..subject.options() };
    let pictures: Vec<(usize, RowContent)> = rows.iter().map(|&rows| (rows, content(model, rows))).collect();
    let reference = Reference { kv: subject.kv, poison: Some(3) };
    let alone = |backend: &dyn paguro_backend::Backend| -> Result<Logits, String> {
        let run = |picture: &(usize, RowContent)| {
            let mut driver = Driver::new(backend, model, &options)?;
            Ok(run(&mut driver, std::slice::from_ref(picture))?.remove(0))
        };
        pictures.iter().map(run).collect()
    };
    let ours = alone(&*(subject.backend)(2))?;
    near(subject, format, &ours, &alone(&reference)?)?;
    let mut driver = Driver::new(&*(subject.backend)(3), model, &options)?;
    same("pictures side by side", &run(&mut driver, &pictures[beside.clone()])?, &ours[beside].to_vec())
}

/// Bounds the matrices of all layers, those of most of them closely.
fn bound(model: &mut RandomModel) {
    let mut number = 0.0;
    let mut bound = |linear: &mut Linear| {
        number += 0.07;
        linear.bounds = Some(Bounds {
            input_min: -0.8 - number,
            input_max: f32::INFINITY,
            output_min: -1.0 - number,
            output_max: 0.7 + number,
        });
    };
    for layer in &mut model.program.layers {
        if let Mixer::Attention(op) = &mut layer.mixer {
            [Some(&mut op.q), op.k.as_mut(), op.v.as_mut(), Some(&mut op.out)]
                .into_iter()
                .flatten()
                .for_each(&mut bound);
        }
        if let FeedForward::Dense(op) = &mut layer.ffn {
            [op.gate.as_mut(), Some(&mut op.up), Some(&mut op.down)]
                .into_iter()
                .flatten()
                .for_each(&mut bound);
        }
    }
}

/// Runs pictures in one step.
fn run(driver: &mut Driver, pictures: &[(usize, RowContent)]) -> Result<Logits, String> {
    let start = |(rows, content): &(usize, RowContent)| driver.start_with(&vec![0; *rows], content.clone());
    let ids: Vec<_> = pictures.iter().map(start).collect();
    let parts: Vec<_> = ids.iter().zip(pictures).map(|(&id, (rows, _))| (id, *rows)).collect();
    driver.step(&parts)?;
    let merged = |rows: &[Vec<f32>]| rows.iter().step_by(MERGED).cloned().collect::<Vec<_>>();
    let found = ids.iter().map(|&id| merged(driver.logits(id).1)).collect();
    ids.iter().for_each(|&id| driver.preempt(id));
    Ok(found)
}

/// Patches in squares of four columns, with spans.
fn content(model: &RandomModel, rows: usize) -> RowContent {
    let mut rng = Rng::new(rows as u64);
    let mut content = RowContent::default();
    let width = model.program.given_width();
    for row in 0..rows {
        content.given.insert(row, (0..width).map(|_| rng.normal()).collect());
    }
    content.coordinates = (0..rows).map(|row| [0, (row / 4) as u32, (row % 4) as u32]).collect();
    let spans = (0..rows).step_by(24).map(|first| first..rows.min(first + 24));
    content.spans = spans.collect();
    content
}

fn tower(shape: &ModelShape, ends: Ends) -> RandomModel {
    let hidden = shape.hidden;
    shape.build_with(1, |builder| {
        let patches = match ends {
            Ends::Joined => vec![
                RowOp::Linear {
                    linear: builder.linear("patches", hidden, PATCH, 1.0, true),
                    width: hidden,
                    activation: None,
                },
                RowOp::Add,
                RowOp::Norm(builder.norm(hidden)),
            ],
            Ends::Mean => vec![
                RowOp::Norm(builder.norm(PATCH)),
                RowOp::Linear {
                    linear: builder.linear("patches", hidden, PATCH, 1.0, false),
                    width: hidden,
                    activation: None,
                },
                RowOp::Add,
                RowOp::Add,
            ],
        };
        let all = shape.windows.len();
        let mut tap = |layers: usize| {
            let joined = MERGED * hidden;
            let ops = match ends {
                Ends::Joined if layers == all => vec![
                    RowOp::Norm(builder.norm(hidden)),
                    RowOp::Join(MERGED),
                    RowOp::Linear {
                        linear: builder.linear("up", 192, joined, 1.0, true),
                        width: 192,
                        activation: Some(Activation::Gelu),
                    },
                    RowOp::Linear {
                        linear: builder.linear("down", WIDTH, 192, 1.0, true),
                        width: WIDTH,
                        activation: None,
                    },
                ],
                Ends::Joined => vec![
                    RowOp::Join(2),
                    RowOp::Join(2),
                    RowOp::Norm(builder.norm(joined)),
                    RowOp::Linear {
                        linear: builder.linear("tap", WIDTH, joined, 1.0, false),
                        width: WIDTH,
                        activation: Some(Activation::Silu),
                    },
                ],
                Ends::Mean => vec![
                    RowOp::Mean { rows: MERGED, scale: 1.5 },
                    RowOp::Affine { scale: builder.values(hidden), bias: builder.values(hidden) },
                    RowOp::Linear {
                        linear: builder.linear("out", WIDTH, hidden, 1.0, false),
                        width: WIDTH,
                        activation: None,
                    },
                    RowOp::Norm(builder.norm(WIDTH)),
                    RowOp::Activate { activation: Activation::Gelu, gated: false },
                    RowOp::Linear {
                        linear: builder.linear("gate_up", 2 * WIDTH, WIDTH, 1.0, true),
                        width: 2 * WIDTH,
                        activation: None,
                    },
                    RowOp::Activate { activation: Activation::Silu, gated: true },
                ],
            };
            Tap { layers, ops }
        };
        let taps = vec![tap(all), tap(1), tap(0)];
        (
            Input::Patches(Patches { width: PATCH, ops: patches }),
            Exit::Merged(Merged { rows: MERGED, width: WIDTH, taps }),
        )
    })
}
