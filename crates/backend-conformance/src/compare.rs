//! Common parts of the cases: schedules of steps, their execution, and comparisons.

use paguro_backend::{Backend, WeightFormat, reference::Reference};

use super::{DriveOptions, Driver, ModelShape, RandomModel, Rng, SequenceId, Subject, Verdict};

/// Logits of some sequences, `[sequences][positions][vocab]`.
pub(super) type Logits = Vec<Vec<Vec<f32>>>;

/// Sequences and the steps that they run in.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    /// Their tokens.
    pub(super) sequences: Vec<Vec<u32>>,
    /// Sequence and number of its next tokens, in the order of the step's rows. All sequences run to their end.
    pub(super) steps: Vec<Vec<(usize, usize)>>,
}

impl Schedule {
    /// Returns a schedule with all kinds of batches: a prompt that fills its page exactly, one that is chunked while others
    /// decode, a single token, one that is a token longer than a page; decodes alone, and in changing order.
    pub(super) fn mixed(block_size: usize, vocab: usize) -> Self {
        let b = block_size;
        let mut rng = Rng::new(b as u64);
        let [page, chunked, single, more] = [0, 1, 2, 3];
        let lengths = [b + 6, 3 * b + 6, 6, b + 5];
        Self {
            sequences: lengths.map(|length| rng.tokens(length, vocab)).to_vec(),
            steps: vec![
                vec![(page, b), (single, 1)],
                vec![(page, 1), (chunked, 5)],
                vec![(single, 1), (chunked, b), (page, 1), (more, b + 1)],
                vec![(chunked, 2 * b - 2), (more, 1), (page, 1), (single, 1)],
                vec![(single, 1), (page, 1), (chunked, 1), (more, 1)],
                vec![(more, 1), (single, 1), (page, 1), (chunked, 1)],
                vec![(chunked, 1), (more, 1), (page, 1), (single, 1)],
            ],
        }
    }

    /// Each sequence alone and in one piece.
    pub(super) fn whole(sequences: Vec<Vec<u32>>) -> Self {
        let steps = sequences.iter().enumerate().map(|(index, tokens)| vec![(index, tokens.len())]).collect();
        Self { sequences, steps }
    }

    /// Runs the schedule: the logits of every token.
    pub(super) fn run(&self, driver: &mut Driver) -> Result<Logits, String> {
        let ids: Vec<SequenceId> = self.sequences.iter().map(|tokens| driver.start(tokens)).collect();
        for parts in &self.steps {
            let parts: Vec<_> = parts.iter().map(|&(index, count)| (ids[index], count)).collect();
            driver.step(&parts)?;
        }
        let logits = ids.iter().map(|&id| driver.logits(id).1.to_vec()).collect();
        ids.iter().for_each(|&id| driver.preempt(id));
        Ok(logits)
    }

    /// Runs the schedule on a newly loaded model.
    pub(super) fn load_and_run(
        &self,
        backend: &dyn Backend,
        model: &RandomModel,
        options: &DriveOptions,
    ) -> Result<Logits, String> {
        self.run(&mut Driver::new(backend, model, options)?)
    }

    /// Returns the reference's logits of the schedule's sequences, each alone and in one piece.
    pub(super) fn reference(
        &self,
        subject: &Subject,
        model: &RandomModel,
        options: &DriveOptions,
    ) -> Result<Logits, String> {
        let longest = self.sequences.iter().map(Vec::len).max().unwrap_or(0);
        // Pages of windows are released between steps only, so each sequence holds all of its own.
        let pages = 1 + longest.div_ceil(options.block_size) * model.program.kv.groups.len();
        let options = DriveOptions { pages, scatter: None, ..*options };
        let reference = Reference { kv: subject.kv, poison: Some(3) };
        let run = |tokens: &Vec<u32>| {
            Ok(Schedule::whole(vec![tokens.clone()]).load_and_run(&reference, model, &options)?.remove(0))
        };
        self.sequences.iter().map(run).collect()
    }
}

/// The mixed schedule on a model of this shape agrees with the reference, with pages as they are by default.
pub(super) fn agrees(subject: &Subject, shape: &ModelShape) -> Verdict {
    agrees_with(subject, shape, &subject.options())
}

/// The mixed schedule on a model of this shape agrees with the reference.
pub(super) fn agrees_with(subject: &Subject, shape: &ModelShape, options: &DriveOptions) -> Verdict {
    let schedule = Schedule::mixed(options.block_size, shape.vocab);
    agrees_on(subject, &schedule, shape, options)
}

/// A schedule on a model of this shape agrees with the reference.
pub(super) fn agrees_on(
    subject: &Subject,
    schedule: &Schedule,
    shape: &ModelShape,
    options: &DriveOptions,
) -> Verdict {
    let model = shape.build(1);
    let ours = schedule.load_and_run(&*(subject.backend)(2), &model, options)?;
    let theirs = schedule.reference(subject, &model, options)?;
    near(subject, shape.format, &ours, &theirs).map_err(|error| format!("{error}\n{shape:?}\n{options:?}"))
}

/// Checks that logits equal those of the reference within the format's tolerance.
pub(super) fn near(subject: &Subject, format: WeightFormat, ours: &Logits, theirs: &Logits) -> Verdict {
    let tolerance = (subject.tolerance)(format);
    let (mut squares, mut count) = (0.0, 0.0);
    each_row(ours, theirs, |ours, theirs| {
        let rms = (theirs.iter().map(|x| x * x).sum::<f32>() / theirs.len() as f32).sqrt();
        if let Some(token) = ours.iter().position(|logit| !logit.is_finite()) {
            return Err(format!("{format}: logit {token} is {}", ours[token]));
        }
        let errors = || ours.iter().zip(theirs).map(|(a, b)| (a - b).abs() / rms);
        squares += errors().map(|error| f64::from(error).powi(2)).sum::<f64>();
        count += ours.len() as f64;
        let worst = errors().fold(0.0, f32::max);
        match worst <= tolerance.error {
            true => Ok(()),
            false => Err(format!(
                "{format} is off by {worst:.5} of the logits' root mean square, more than {}\n({})",
                tolerance.error, tolerance.reason
            )),
        }
    })?;
    let typical = (squares / count).sqrt();
    match typical <= f64::from(tolerance.error) / 4.0 {
        true => Ok(()),
        false => Err(format!(
            "{format} is off by {typical:.5} of the logits' root mean square on average, more than a quarter of {}\n({})",
            tolerance.error, tolerance.reason
        )),
    }
}

/// Logits are the same, bit for bit.
pub(super) fn same(what: &str, ours: &Logits, theirs: &Logits) -> Verdict {
    let verdict = each_row(ours, theirs, |ours, theirs| {
        match ours.iter().zip(theirs).position(|(a, b)| a.to_bits() != b.to_bits()) {
            None => Ok(()),
            Some(token) => Err(format!("logit {token} is {:e} and {:e}", ours[token], theirs[token])),
        }
    });
    verdict.map_err(|error| format!("{what} changes logits: {error}"))
}

fn each_row(ours: &Logits, theirs: &Logits, mut check: impl FnMut(&[f32], &[f32]) -> Verdict) -> Verdict {
    let lengths = |logits: &Logits| logits.iter().map(Vec::len).collect::<Vec<_>>();
    if lengths(ours) != lengths(theirs) {
        return Err(format!("logits for {:?} and {:?} tokens", lengths(ours), lengths(theirs)));
    }
    for (sequence, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        for (position, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
            check(ours, theirs)
                .map_err(|error| format!("sequence {sequence}, position {position}: {error}"))?;
        }
    }
    Ok(())
}
