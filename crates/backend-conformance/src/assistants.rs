//! Cases of programs that read the pages of another one, and whose rows have another width: assistants of Gemma 4.

use paguro_backend::{
    Backend, GivenRows, Limits, MatrixId, Output, OutputKind, OutputValue, PageId, Step, StepOutput,
    StepSequence, WeightFormat, reference::Reference,
};

use super::{
    Biases, DriveOptions, Driver, ModelShape, PagesOf, RandomModel, Rng, SequenceId, Subject, Verdict,
    compare::{Logits, near, same},
    contract::require,
    exactness::drawn,
    rows::unless_refused,
    submit,
};

/// Lengths of texts: within a page, a whole page, more than a window and several pages.
const LENGTHS: [usize; 4] = [5, 16, 40, 97];

/// A model with two kinds of layers, and an assistant that reads the pages of the last one of each.
fn pair(format: WeightFormat, biases: Biases) -> (RandomModel, RandomModel, (MatrixId, MatrixId)) {
    let small = ModelShape::of_format(format);
    let shape = ModelShape {
        biases,
        windows: vec![Some(9), None, Some(9), None],
        window_heads: Some((1, 64)),
        ..small.clone()
    };
    let model = shape.build(4);
    let shape = ModelShape {
        // Narrower rows than those of the model.
        hidden: small.hidden.div_ceil(2).next_multiple_of(format.block_len().max(8)),
        windows: vec![Some(9), Some(9), None],
        pages_of: Some(PagesOf::program(&model.program)),
        joined: true,
        given_parts: 1,
        embed_scale: 2.0,
        ..shape
    };
    let mut assistant = shape.build(5);
    let table = |model: &RandomModel| model.program.embed().expect("tokens").table;
    let shared = (table(&assistant), table(&model));
    assistant.weights.matrices[shared.0.0 as usize] = model.weights.matrix(shared.1).clone();
    (model, assistant, shared)
}

/// A row of an assistant after each of the texts.
struct Rows {
    tokens: Vec<u32>,
    /// `[rows, width]`
    given: Vec<f32>,
}

/// Runs texts on a model, then an assistant after them, in steps of these texts. Returns logits and projected rows of each text.
fn run(
    backend: &dyn Backend,
    (model, assistant, shared): &(RandomModel, RandomModel, (MatrixId, MatrixId)),
    options: &DriveOptions,
    steps: &[Vec<usize>],
) -> Result<Logits, String> {
    let mut driver = Driver::new(backend, model, options)?;
    let mut rng = Rng::new(7);
    let (vocab, width) = (model.program.vocab, model.program.hidden);
    let texts: Vec<SequenceId> = LENGTHS.map(|length| driver.start(&rng.tokens(length, vocab))).to_vec();
    let all: Vec<_> = texts.iter().copied().zip(LENGTHS).collect();
    driver.step(&all)?;
    let rows = Rows {
        tokens: rng.tokens(LENGTHS.len(), vocab),
        given: (0..LENGTHS.len() * width).map(|_| rng.normal()).collect(),
    };
    let limits = Driver::limits(model, options);
    let load = |driver: &mut Driver, limits: Limits| {
        let weights = assistant.weights.clone();
        driver.runner().load_head(&assistant.program, weights, &[*shared], limits)
    };
    let fewer = Limits { pages: limits.pages - 1, ..limits };
    let refused = load(&mut driver, fewer).is_err();
    require(refused, || "an assistant was loaded for fewer pages than its model has".to_owned())?;
    let mut runner = load(&mut driver, limits)
        .map_err(|error| format!("{} cannot load the assistant: {error}", backend.name()))?;
    let mut found = vec![Vec::new(); LENGTHS.len()];
    for step in steps {
        let (mut tokens, mut given, mut sequences, mut pages) =
            (vec![], vec![], vec![], Vec::<PageId>::new());
        for (row, &text) in step.iter().enumerate() {
            let first = pages.len();
            let groups = 0..model.program.kv.groups.len();
            groups.for_each(|group| pages.extend(driver.table(texts[text], group)));
            tokens.push(rows.tokens[text]);
            given.extend_from_slice(&rows.given[text * width..][..width]);
            let (start, tables) = (LENGTHS[text], first..pages.len());
            sequences.push(StepSequence { rows: row..row + 1, start, tables, state: None });
        }
        let kinds = |row| [OutputKind::Logits, OutputKind::Embedding].map(|kind| Output { row, kind });
        let outputs: Vec<Output<'_>> = (0..step.len()).flat_map(kinds).collect();
        let step_rows = Step {
            tokens: &tokens,
            given: &[GivenRows { rows: 0..step.len(), values: &given }],
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        let mut out = StepOutput::default();
        submit(&mut *runner, &step_rows, &mut out)?;
        for (&text, outcomes) in step.iter().zip(out.outcomes.as_chunks::<2>().0) {
            match outcomes {
                [OutputValue::Logits(logits), OutputValue::Embedding(row)] if row.len() == width => {
                    found[text] = vec![logits.clone(), row.clone()];
                }
                other => {
                    return Err(format!("logits and a row of {width} numbers were asked for, not {other:?}"));
                }
            }
        }
    }
    // The model goes on as if nothing had read its pages.
    let more: Vec<u32> = rng.tokens(3, vocab);
    texts.iter().for_each(|&text| driver.push(text, &more));
    let all: Vec<_> = texts.iter().map(|&text| (text, more.len())).collect();
    driver.step(&all)?;
    found.extend(texts.iter().map(|&text| driver.logits(text).1.to_vec()));
    Ok(found)
}

/// An assistant reads the pages of its model, and its rows have the same bits in any step.
pub(super) fn shared_pages(subject: &Subject) -> Verdict {
    let formats = [WeightFormat::F32, WeightFormat::Q8_0, WeightFormat::Q4_K];
    for format in drawn(subject, "assistants", &formats, 2) {
        for biases in [Biases::None, Biases::All] {
            unless_refused(subject, || agrees(subject, format, biases))?;
        }
    }
    Ok(())
}

fn agrees(subject: &Subject, format: WeightFormat, biases: Biases) -> Verdict {
    let pair = pair(format, biases);
    let options = subject.options();
    let alone: Vec<Vec<usize>> = (0..LENGTHS.len()).map(|text| vec![text]).collect();
    let backend = (subject.backend)(2);
    let assistant = &pair.1;
    let by_itself =
        backend.load(&assistant.program, assistant.weights.clone(), Driver::limits(assistant, &options));
    require(by_itself.is_err(), || "an assistant was loaded without its model".to_owned())?;
    let ours = run(&*backend, &pair, &options, &alone)?;
    let together = run(&*(subject.backend)(3), &pair, &options, &[vec![2, 0], vec![3, 1, 2, 0]])?;
    if subject.exact_rows <= 1 {
        same("an assistant in a step with others", &together, &ours)?;
    }
    let reference = Reference { kv: subject.kv, poison: Some(3) };
    let theirs = run(&reference, &pair, &DriveOptions { scatter: None, ..options }, &alone)?;
    near(subject, format, &ours, &theirs)?;
    near(subject, format, &together, &theirs)
}
