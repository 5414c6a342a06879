//! Cases about the contract itself: outputs, refusals, counters.

use std::{io, sync::Arc};

use paguro_backend::{
    AttentionMode, ByteSource, Bytes, GivenRows, Limits, LoadError, Output, OutputKind, OutputValue, PageId,
    SampleRequest, SamplingParams, Step, StepError, StepOutput, StepSequence, TokenMask,
    sampling::{self, Scratch},
};

use super::{
    DriveOptions, Driver, ModelShape, RandomModel, Rng, Subject, Verdict,
    compare::{Schedule, same},
    submit,
};

pub(super) fn require(holds: bool, problem: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(problem()) }
}

/// A sequence of a page and a few more tokens, for manual steps.
pub(super) struct Prompt {
    pub tokens: Vec<u32>,
    sequences: [StepSequence; 1],
    pages: [PageId; 2],
}

impl Prompt {
    pub fn new(vocab: usize) -> Self {
        let tokens = Rng::new(1).tokens(20, vocab);
        Self {
            tokens,
            sequences: [StepSequence { rows: 0..20, start: 0, tables: 0..2, state: None }],
            pages: [PageId(3), PageId(2)],
        }
    }

    pub fn step<'a>(&'a self, outputs: &'a [Output<'a>]) -> Step<'a> {
        Step {
            tokens: &self.tokens,
            sequences: &self.sequences,
            pages: &self.pages,
            outputs,
            ..Step::default()
        }
    }
}

/// A sample equals [`sampling::sample`] of the row's logits, and a score [`sampling::score`]. Several outputs of one
/// row are independent, and outputs may have any order.
pub(super) fn outputs(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    let model = shape.build(1);
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.options())?;
    let prompt = Prompt::new(shape.vocab);
    let hot = SamplingParams { temperature: 1.5, seed: 11, ..SamplingParams::default() };
    let params = [
        SamplingParams::default(),
        hot.clone(),
        SamplingParams { top_k: 5, ..hot.clone() },
        SamplingParams { top_p: 0.7, min_p: 0.01, ..hot.clone() },
        SamplingParams { repetition_penalty: 1.4, penalty_window: Some(8), ..hot.clone() },
        SamplingParams { frequency_penalty: 0.4, presence_penalty: 0.7, ..SamplingParams::default() },
        SamplingParams { logit_bias: vec![(5, 4.0), (9, -90.0)], ..hot },
    ];
    let mask = TokenMask::new(every_third(shape.vocab));
    let mut outputs = Vec::new();
    for (draw, params) in (0..).zip(&params) {
        for (row, mask, logprobs) in [(19, None, None), (0, Some(&mask), Some(3)), (7, None, Some(0))] {
            let history = &prompt.tokens[..=row];
            let request = SampleRequest { params, draw, history, prompt_tokens: row / 2, mask, logprobs };
            outputs.push(Output { row, kind: OutputKind::Sample(request) });
        }
        outputs.push(Output { row: 7, kind: OutputKind::Embedding });
        outputs.push(Output { row: 12, kind: OutputKind::Score { token: 17, top: 0 } });
        outputs.push(Output { row: 19, kind: OutputKind::Score { token: 0, top: 5 } });
    }
    let mut out = StepOutput::default();
    submit(driver.runner(), &prompt.step(&outputs), &mut out)?;
    let answers = std::mem::take(&mut out.outcomes);

    // The embedding alone, also at a row without logits.
    submit(driver.runner(), &prompt.step(&[Output { row: 7, kind: OutputKind::Embedding }]), &mut out)?;
    let embedding = out.outcomes.remove(0);

    let logits: Vec<_> =
        outputs.iter().map(|output| Output { kind: OutputKind::Logits, ..*output }).collect();
    submit(driver.runner(), &prompt.step(&logits), &mut out)?;
    let mut scratch = Scratch::default();
    for (index, (output, logits)) in outputs.iter().zip(&out.outcomes).enumerate() {
        let OutputValue::Logits(logits) = logits else { return Err(format!("logits, not {logits:?}")) };
        let expected = match sampling::answer(logits, &output.kind, &mut scratch) {
            Some(expected) => expected,
            None => embedding.clone(),
        };
        let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
        let same_top = |ours: &[(u32, f32)], theirs: &[(u32, f32)]| {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| a.0 == b.0 && near(a.1, b.1))
        };
        let right = match (&answers[index], &expected) {
            (OutputValue::Sampled(ours), OutputValue::Sampled(theirs)) => {
                ours.token == theirs.token
                    && ours.logprob.is_some() == theirs.logprob.is_some()
                    && near(ours.logprob.unwrap_or(0.0), theirs.logprob.unwrap_or(0.0))
                    && same_top(&ours.top, &theirs.top)
            }
            (OutputValue::Score(ours), OutputValue::Score(theirs)) => {
                near(ours.logprob, theirs.logprob) && same_top(&ours.top, &theirs.top)
            }
            (OutputValue::Embedding(ours), OutputValue::Embedding(theirs)) => ours == theirs,
            _ => false,
        };
        require(right, || format!("output {index}: {:?} where {expected:?} is right", answers[index]))?;
    }
    // A step without outputs also writes its pages.
    submit(driver.runner(), &prompt.step(&[]), &mut out)
}

/// A mask that allows every third token.
fn every_third(vocab: usize) -> Vec<u32> {
    (0..vocab.div_ceil(32) as u32).map(|word| 0x4924_9249_u32.rotate_left(word)).collect()
}

fn load(subject: &Subject, model: RandomModel) -> Result<(), LoadError> {
    let limits = Limits {
        block_size: 16,
        pages: 4,
        max_rows: 4,
        max_sequences: 1,
        max_outputs: 1,
        max_context: 32,
        states: 0,
        kv_dtype: subject.kv_dtype,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    (subject.backend)(2).load(&model.program, model.weights, limits).map(|_| ())
}

/// A file that ends early, or that was replaced while it was read.
struct FailingFile {
    is_short: bool,
}

impl FailingFile {
    /// Makes it the source of a matrix.
    fn replace(self, model: &mut RandomModel) {
        let matrix = &mut model.weights.matrices[2];
        matrix.bytes = Bytes::new(Arc::new(self), 0, matrix.bytes.len());
    }
}

impl ByteSource for FailingFile {
    fn size(&self) -> u64 {
        u64::MAX
    }

    fn read_at(&self, _offset: u64, out: &mut [u8]) -> io::Result<()> {
        out.fill(0);
        if self.is_short { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    fn check_unchanged(&self) -> io::Result<()> {
        if self.is_short { Ok(()) } else { Err(io::Error::other("it has changed")) }
    }
}

/// Weights that do not fit are refused when they are loaded.
pub(super) fn bad_weights(subject: &Subject) -> Verdict {
    type Damage = fn(&mut RandomModel);
    let damages: [(&str, Damage); 7] = [
        ("too few bytes", |model| {
            let matrix = &mut model.weights.matrices[2];
            matrix.bytes = matrix.bytes.slice(0..matrix.bytes.len() - 4);
        }),
        ("a row more", |model| {
            let matrix = &mut model.weights.matrices[2];
            let bytes = matrix.bytes.read().expect("in memory");
            let bytes = [&bytes[..], &bytes[..matrix.format.row_bytes(matrix.cols)]].concat();
            (matrix.rows, matrix.bytes) = (matrix.rows + 1, Bytes::from(bytes));
        }),
        ("values that are not finite", |model| {
            let matrix = &mut model.weights.matrices[2];
            let mut bytes = matrix.bytes.read().expect("in memory").into_owned();
            let block = bytes.len() - matrix.format.block_bytes();
            matrix.format.spoil(&mut bytes[block..]);
            matrix.bytes = Bytes::from(bytes);
        }),
        ("a file that was truncated", |model| FailingFile { is_short: true }.replace(model)),
        ("a file that was changed", |model| FailingFile { is_short: false }.replace(model)),
        ("a vector that is too short", |model| {
            model.weights.vectors[0].pop();
        }),
        ("no last matrix", |model| {
            model.weights.matrices.pop();
        }),
    ];
    for (what, damage) in damages {
        let mut model = ModelShape::default().build(1);
        damage(&mut model);
        match load(subject, model) {
            Err(LoadError::BadWeights { .. } | LoadError::Unreadable { .. } | LoadError::BadProgram(_)) => {}
            Err(error) => return Err(format!("{what} is no reason for this error: {error}")),
            Ok(()) => return Err(format!("weights with {what} were loaded")),
        }
    }
    Ok(())
}

/// Steps that break the contract are refused and change nothing.
pub(super) fn invalid_steps(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    let model = shape.build(1);
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.options())?;
    let valid = Prompt::new(shape.vocab);
    let logits = [Output { row: 19, kind: OutputKind::Logits }];
    let mut before = StepOutput::default();
    submit(driver.runner(), &valid.step(&logits), &mut before)?;

    let broken = |change: fn(&mut Prompt)| {
        let mut prompt = Prompt::new(shape.vocab);
        change(&mut prompt);
        prompt
    };
    let prompts = [
        ("a token that does not exist", broken(|prompt| prompt.tokens[7] = u32::MAX)),
        ("a page that does not exist", broken(|prompt| prompt.pages[1] = PageId(u32::MAX))),
        ("scratch for a page that is written", broken(|prompt| prompt.pages[1] = PageId::SCRATCH)),
        ("one page for two blocks", broken(|prompt| prompt.pages[1] = prompt.pages[0])),
        ("a row of no sequence", broken(|prompt| prompt.sequences[0].rows.end -= 1)),
        ("a context that is too long", broken(|prompt| prompt.sequences[0].start = 1 << 40)),
        ("an incomplete table", broken(|prompt| prompt.sequences[0].tables.end -= 1)),
    ];
    let steps = prompts.iter().map(|(what, prompt)| (*what, prompt.step(&logits)));
    let no_row = [Output { row: 20, kind: OutputKind::Logits }];
    let values = vec![0.0; shape.hidden];
    let given = [GivenRows { rows: 3..4, values: &values }];
    let coordinates = [[0; 3]; 20];
    let span = 2..5;
    let others = [
        ("an output of a row that does not exist", valid.step(&no_row)),
        ("given rows of a model of tokens", Step { given: &given, ..valid.step(&logits) }),
        ("coordinates of a model of positions", Step { coordinates: &coordinates, ..valid.step(&logits) }),
        ("a span that no layer sees", Step { spans: std::slice::from_ref(&span), ..valid.step(&logits) }),
    ];
    for (what, step) in steps.chain(others) {
        match driver.runner().submit(&step) {
            Err(StepError::Invalid(_)) => {}
            Err(error) => return Err(format!("{what} is no reason for this error: {error}")),
            Ok(_) => return Err(format!("a step with {what} was run")),
        }
    }

    let mut after = StepOutput::default();
    submit(driver.runner(), &valid.step(&logits), &mut after)?;
    require(before.outcomes == after.outcomes, || "a refused step changed the next one's logits".to_owned())
}

/// Kernels are counted under names of their own, attention's among them, and which way attention went shows.
pub(super) fn kernel_counts(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    let model = shape.build(1);
    let schedule = Schedule::mixed(16, shape.vocab);
    for attention in [AttentionMode::Paged, AttentionMode::Gather] {
        let options = DriveOptions { attention, ..subject.options() };
        let mut driver = Driver::new(&*(subject.backend)(2), &model, &options)?;
        schedule.run(&mut driver)?;
        let first = driver.runner().kernel_counts();
        schedule.run(&mut driver)?;
        let second = driver.runner().kernel_counts();

        let mut names: Vec<_> = second.iter().map(|kernel| &kernel.name).collect();
        names.sort();
        names.dedup();
        require(names.len() == second.len(), || format!("kernels share names: {second:?}"))?;
        let launches =
            |name: &str| first.iter().find(|kernel| kernel.name == name).map_or(0, |kernel| kernel.launches);
        for kernel in &second {
            let (once, twice) = (launches(&kernel.name), kernel.launches);
            require(twice == 2 * once, || {
                format!("{} ran {once} times, and twice that is {twice}", kernel.name)
            })?;
        }
        let ran = |part: &str| second.iter().any(|kernel| kernel.name.contains(part) && kernel.launches > 0);
        require(ran("atten"), || format!("no kernel named after attention ran: {second:?}"))?;
        require(ran("gather") == (attention == AttentionMode::Gather), || {
            format!("{attention:?} attention ran these: {second:?}")
        })?;
    }
    Ok(())
}

/// A page has room for its K and V, and two runners of one backend do not disturb each other.
pub(super) fn runners_are_separate(subject: &Subject) -> Verdict {
    let shape = ModelShape::default();
    let backend = (subject.backend)(2);
    let models = [shape.build(1), shape.build(2)];
    for block_size in [16, 32] {
        // No format of fewer than four bits an element is in sight.
        let least = models[0].program.kv.page_elements(block_size) / 2;
        let bytes = backend.page_bytes(&models[0].program, block_size, subject.kv_dtype);
        require(bytes >= least, || format!("{bytes} bytes hold no page of {block_size} tokens"))?;
    }
    let schedule = Schedule::mixed(16, shape.vocab);
    let alone = models.each_ref().map(|model| schedule.load_and_run(&*backend, model, &subject.options()));
    let mut drivers = Vec::new();
    for model in &models {
        drivers.push(Driver::new(&*backend, model, &subject.options())?);
    }
    for (driver, alone) in drivers.iter_mut().zip(alone) {
        same("another runner", &schedule.run(driver)?, &alone?)?;
    }
    Ok(())
}
