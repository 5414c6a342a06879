//! Rows in and out: given rows, their coordinates and spans, programs that begin or end with rows.

#![allow(clippy::single_range_in_vec_init)] // lists of one image

use std::ops::Range;

use paguro_backend::{
    AXES, Backend, Coordinates, Exit, Input, NormKind, Output, OutputKind, OutputValue, RopeStyle,
    StepOutput, WeightFormat, reference::Reference,
};

use super::{
    Biases, DriveOptions, Driver, ExpertsShape, ModelShape, RandomModel, Rng, Spans, Subject, Verdict,
    compare::{Logits, Schedule, near, same},
    contract::{Prompt, require},
    drive::RowContent,
    exactness::drawn,
    submit,
};

/// Columns of an image.
const COLUMNS: usize = 4;

/// Tokens of a sequence, and the rows of its images.
#[derive(Clone, Debug)]
pub(super) struct Text {
    pub(super) tokens: Vec<u32>,
    pub(super) content: RowContent,
}

impl Text {
    /// Returns a text of `length` rows of which these are images, with everything that models of this shape read.
    pub(super) fn new(shape: &ModelShape, length: usize, images: &[Range<usize>], seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let tokens = rng.tokens(length, shape.vocab);
        let mut content = RowContent::default();
        for row in images.iter().cloned().flatten().filter(|_| shape.given_parts > 0) {
            let values = (0..shape.given_parts * shape.hidden).map(|_| rng.normal()).collect();
            content.given.insert(row, values);
        }
        if !shape.axes.is_empty() {
            content.coordinates = coordinates(length, images);
        }
        if shape.spans != Spans::None {
            content.spans = images.to_vec();
        }
        Self { tokens, content }
    }
}

/// Coordinates of Qwen's models: those of an image are its beginning, and its rows and columns from there. The next token comes
/// after the largest.
fn coordinates(length: usize, images: &[Range<usize>]) -> Vec<Coordinates> {
    let (mut all, mut next) = (Vec::<Coordinates>::new(), 0);
    while all.len() < length {
        let position = all.len();
        match images.iter().find(|image| image.start == position) {
            None => {
                all.push([next; AXES]);
                next += 1;
            }
            Some(image) => {
                let place = |at: usize| [next, next + (at / COLUMNS) as u32, next + (at % COLUMNS) as u32];
                all.extend((0..image.len()).map(place));
                next += image.len().div_ceil(COLUMNS).max(COLUMNS) as u32;
            }
        }
    }
    all
}

/// Texts, and the texts and numbers of rows of each step.
pub(super) type Texts = (Vec<Text>, Vec<Vec<(usize, usize)>>);

/// Texts with images, and steps that cut none of these: two images side by side, one of a row, one that begins and ends
/// its text, and a text without any.
fn texts(shape: &ModelShape) -> Texts {
    let texts =
        vec![Text::new(shape, 40, &IMAGES, 1), Text::new(shape, 20, &[], 2), Text::new(shape, 9, &[0..9], 3)];
    let steps = vec![
        vec![(0, 18), (1, 6)],
        vec![(2, 9), (0, 15)],
        vec![(0, 1), (1, 1)],
        vec![(1, 13), (0, 1)],
        vec![(0, 5)],
    ];
    (texts, steps)
}

/// Images of the first text.
const IMAGES: [Range<usize>; 3] = [3..15, 20..21, 21..33];

/// Runs texts in these steps.
pub(super) fn run(
    driver: &mut Driver,
    texts: &[Text],
    steps: &[Vec<(usize, usize)>],
) -> Result<Logits, String> {
    let ids: Vec<_> =
        texts.iter().map(|text| driver.start_with(&text.tokens, text.content.clone())).collect();
    for parts in steps {
        let parts: Vec<_> = parts.iter().map(|&(index, count)| (ids[index], count)).collect();
        driver.step(&parts)?;
    }
    let logits = ids.iter().map(|&id| driver.logits(id).1.to_vec()).collect();
    ids.iter().for_each(|&id| driver.preempt(id));
    Ok(logits)
}

/// Runs texts alone and in one piece each.
pub(super) fn alone(
    backend: &dyn Backend,
    model: &RandomModel,
    options: &DriveOptions,
    texts: &[Text],
) -> Result<Logits, String> {
    let mut driver = Driver::new(backend, model, options)?;
    let whole = |text: &Text| {
        let steps = [vec![(0, text.tokens.len())]];
        Ok(run(&mut driver, std::slice::from_ref(text), &steps)?.remove(0))
    };
    texts.iter().map(whole).collect()
}

/// Passes if the check does, or if the backend may refuse this and does at load.
pub(super) fn unless_refused(subject: &Subject, check: impl FnOnce() -> Verdict) -> Verdict {
    check().or_else(|problem| {
        let refuses = problem.contains("cannot run");
        match refuses && subject.refused.iter().any(|name| problem.contains(name)) {
            true => Ok(()),
            false => Err(problem),
        }
    })
}

/// Texts on a model of this shape agree with the reference.
pub(super) fn agrees_on(
    subject: &Subject,
    shape: &ModelShape,
    (texts, steps): &Texts,
    options: &DriveOptions,
) -> Verdict {
    unless_refused(subject, || {
        let model = shape.build(1);
        let ours = run(&mut Driver::new(&*(subject.backend)(2), &model, options)?, texts, steps)?;
        let reference = Reference { kv: subject.kv, poison: Some(3) };
        let theirs = alone(&reference, &model, &DriveOptions { scatter: None, ..*options }, texts)?;
        near(subject, shape.format, &ours, &theirs).map_err(|error| format!("{error}\n{shape:?}"))
    })
}

fn agrees(subject: &Subject, shape: &ModelShape) -> Verdict {
    agrees_on(subject, shape, &texts(shape), &subject.options())
}

/// Given rows replace embeddings, and their other parts are added after layers.
pub(super) fn given_rows(subject: &Subject) -> Verdict {
    let shape = ModelShape { given_parts: 1, embed_scale: 3.0, ..ModelShape::default() };
    agrees(subject, &shape)?;
    agrees(subject, &ModelShape { positions: Some(160), rotated: Some(0), ..shape.clone() })?;
    let deep = ModelShape { given_parts: 4, windows: vec![None; 4], biases: Biases::All, ..shape.clone() };
    agrees(subject, &deep)?;
    agrees(subject, &ModelShape { given_parts: 5, output_scale: 0.5, post_norms: true, ..deep.clone() })?;
    agrees(subject, &ModelShape { experts: Some(ExpertsShape::default()), ..deep.clone() })?;
    agrees(subject, &ModelShape { layer_embeds: Some(32), ..deep })?;
    let format = WeightFormat::Q8_0;
    agrees(subject, &ModelShape { given_parts: 3, windows: vec![None; 3], ..ModelShape::of_format(format) })
}

/// Rotations by coordinates, in sections and interleaved; text is rotated as without coordinates.
pub(super) fn rope_axes(subject: &Subject) -> Verdict {
    let sections: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];
    for axes in [&[0, 1, 2], sections, &[2, 1]] {
        for rope_style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
            let shape = ModelShape { axes, rope_style, rotated: Some(48), ..ModelShape::default() };
            agrees(subject, &shape)?;
        }
    }
    // All at once, as in Qwen3-VL.
    let shape = ModelShape { axes: &[0, 1, 2], given_parts: 2, ..ModelShape::default() };
    agrees(subject, &shape)?;
    let model = ModelShape { axes: &[0, 1, 2], ..ModelShape::default() }.build(1);
    let text = Text::new(&ModelShape::default(), 30, &[], 5);
    let mut explicit = text.clone();
    explicit.content.coordinates = coordinates(30, &[]);
    unless_refused(subject, || {
        let run = |text: &Text| {
            alone(&*(subject.backend)(2), &model, &subject.options(), std::slice::from_ref(text))
        };
        same("coordinates that are positions", &run(&explicit)?, &run(&text)?)
    })
}

/// Rows of spans see each other, in all layers or in those with a window, also where a span is longer than these.
pub(super) fn spans(subject: &Subject) -> Verdict {
    let shape = ModelShape { spans: Spans::All, ..ModelShape::default() };
    agrees(subject, &shape)?;
    for window in [1, 5, 17] {
        let windows = vec![Some(window), None, Some(window)];
        agrees(subject, &ModelShape { windows: windows.clone(), ..shape.clone() })?;
        agrees(subject, &ModelShape { windows, spans: Spans::Windows, ..shape.clone() })?;
    }
    let sinks = ModelShape { sinks: true, heads: 6, kv_heads: 1, attention_cap: Some(5.0), ..shape.clone() };
    agrees(subject, &sinks)?;
    // Longer than a split of attention, from the middle of one tile of queries to that of another.
    let long = ModelShape { hidden: 32, ffn: 32, windows: vec![None, Some(300)], ..shape };
    let texts = vec![Text::new(&long, 620, &[20..31, 40..575], 4), Text::new(&long, 20, &[2..17], 5)];
    let steps = vec![vec![(1, 20), (0, 35)], vec![(0, 584)], vec![(0, 1)]];
    agrees_on(subject, &long, &(texts, steps), &long_options(subject))
}

fn long_options(subject: &Subject) -> DriveOptions {
    DriveOptions { max_context: 640, pages: 200, ..subject.options() }
}

/// In both directions, rows see only their own span in some layers, and all rows in the others.
pub(super) fn spans_of_encoders(subject: &Subject) -> Verdict {
    let shape = ModelShape {
        bidirectional: true,
        spans: Spans::Windows,
        windows: vec![Some(2000), None, Some(6)],
        given_parts: 1,
        axes: &[1, 2],
        ..ModelShape::default()
    };
    let texts = vec![
        Text::new(&shape, 40, &[0..12, 12..29, 33..40], 6),
        Text::new(&shape, 600, &[1..500, 500..560], 7),
        Text::new(&shape, 1, &[0..1], 8),
    ];
    let steps = vec![vec![(0, 40), (2, 1)], vec![(1, 600)]];
    agrees_on(subject, &shape, &(texts, steps), &long_options(subject))
}

/// Rows of images are as exact as tokens: in any batch, chunks and place, on any threads. Spans may be cut off from the rest at
/// every place outside of them.
pub(super) fn exact(subject: &Subject) -> Verdict {
    let formats = [WeightFormat::F16, WeightFormat::Q8_0];
    for format in drawn(subject, "rows", &formats, 1) {
        let shape = ModelShape {
            // The last two layers are computed for rows with outputs only.
            given_parts: 4,
            axes: &[0, 1, 2],
            spans: Spans::Windows,
            windows: vec![Some(7), None, Some(7), None],
            shared_kv: 2,
            biases: Biases::Qkv,
            ..ModelShape::of_format(format)
        };
        unless_refused(subject, || exact_shape(subject, &shape))?;
    }
    Ok(())
}

fn exact_shape(subject: &Subject, shape: &ModelShape) -> Verdict {
    let model = shape.build(2);
    let options = subject.exact_options();
    let (texts, steps) = texts(shape);
    let expected = alone(&*(subject.backend)(2), &model, &options, &texts)?;
    for (threads, scatter, sparse) in [(2, Some(1), false), (3, None, true)] {
        let options = DriveOptions { scatter, sparse, ..options };
        let mut driver = Driver::new(&*(subject.backend)(threads), &model, &options)?;
        same("a batch with images", &run(&mut driver, &texts, &steps)?, &expected)?;
    }
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &options)?;
    let (text, expected) = (&texts[..1], vec![expected[0].clone()]);
    let whole = |cut: &usize| !IMAGES.iter().any(|image| image.start < *cut && *cut < image.end);
    for cut in (1..40).filter(whole) {
        let cut_off = run(&mut driver, text, &[vec![(0, cut)], vec![(0, 40 - cut)]])?;
        same(&format!("images cut off at {cut}"), &cut_off, &expected)?;
    }
    // Without spans, images are cut as well.
    let shape = ModelShape { spans: Spans::None, ..shape.clone() };
    let model = shape.build(2);
    let text = [Text::new(&shape, 40, &IMAGES, 1)];
    let expected = alone(&*(subject.backend)(2), &model, &options, &text)?;
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &options)?;
    for chunk in [1, 7] {
        let steps: Vec<_> = (0..40).step_by(chunk).map(|first| vec![(0, chunk.min(40 - first))]).collect();
        same(&format!("chunks of {chunk} rows"), &run(&mut driver, &text, &steps)?, &expected)?;
    }
    Ok(())
}

/// Rows of the residual stream agree with the reference's, and are the same bits beside any other outputs.
pub(super) fn residuals(subject: &Subject) -> Verdict {
    let shape = ModelShape { output_scale: 0.7, norms: NormKind::Layer, ..ModelShape::default() };
    let model = shape.build(1);
    let options = DriveOptions { output: OutputKind::Residual, ..subject.options() };
    unless_refused(subject, || {
        let schedule = Schedule::mixed(16, shape.vocab);
        let ours = schedule.load_and_run(&*(subject.backend)(2), &model, &options)?;
        near(subject, shape.format, &ours, &schedule.reference(subject, &model, &options)?)?;
        let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.options())?;
        let prompt = Prompt::new(shape.vocab);
        let (residual, mut out) = (Output { row: 7, kind: OutputKind::Residual }, StepOutput::default());
        submit(driver.runner(), &prompt.step(&[residual]), &mut out)?;
        let expected = out.outcomes.remove(0);
        require(matches!(&expected, OutputValue::Residual(row) if row.len() == shape.hidden), || {
            format!("{expected:?} is no row of {} numbers", shape.hidden)
        })?;
        let others = [OutputKind::Logits, OutputKind::Embedding].map(|kind| Output { row: 7, kind });
        for outputs in [vec![others[0], residual, others[1]], vec![residual, others[1]]] {
            submit(driver.runner(), &prompt.step(&outputs), &mut out)?;
            let at = usize::from(outputs.len() > 2);
            require(out.outcomes[at] == expected, || {
                format!("{:?} beside other outputs, {expected:?} without", out.outcomes[at])
            })?;
        }
        Ok(())
    })
}

/// Two programs, the second of which begins with the rows that the first one ends with, compute the same bits as one.
pub(super) fn stages(subject: &Subject) -> Verdict {
    let of = |format| ModelShape {
        windows: vec![Some(9), None, Some(9), None],
        post_norms: true,
        ..ModelShape::of_format(format)
    };
    for format in drawn(subject, "stages", &[WeightFormat::F32, WeightFormat::Q8_0], 1) {
        for shape in [of(format), ModelShape { tied: true, norms: NormKind::Layer, ..of(format) }] {
            unless_refused(subject, || (1..4).try_for_each(|cut| stages_of(subject, &shape, cut)))?;
        }
    }
    Ok(())
}

fn stages_of(subject: &Subject, shape: &ModelShape, cut: usize) -> Verdict {
    let model = shape.build(3);
    let options = subject.exact_options();
    let schedule = Schedule::mixed(16, shape.vocab);
    let expected = schedule.load_and_run(&*(subject.backend)(2), &model, &options)?;
    let mut first = model.clone();
    first.program.layers.truncate(cut);
    first.program.exit = Exit::Rows;
    let mut second = model;
    second.program.layers.drain(..cut);
    (second.program.input, second.program.given_parts) = (Input::Rows, 1);
    let to_rows = DriveOptions { output: OutputKind::Residual, ..options };
    let rows = schedule.load_and_run(&*(subject.backend)(2), &first, &to_rows)?;
    let texts = rows.into_iter().map(|rows| Text {
        tokens: vec![0; rows.len()],
        content: RowContent { given: rows.into_iter().enumerate().collect(), ..RowContent::default() },
    });
    let texts: Vec<_> = texts.collect();
    let mut driver = Driver::new(&*(subject.backend)(3), &second, &options)?;
    same(&format!("stages cut after layer {cut}"), &run(&mut driver, &texts, &schedule.steps)?, &expected)
}
