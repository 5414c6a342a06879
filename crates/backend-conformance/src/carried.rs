//! Tokens and rows that the device carries from one step to the next.

use std::collections::VecDeque;

use paguro_backend::{
    Carried, GivenRows, Output, OutputKind, OutputValue, PageId, SampleRequest, SamplingParams, Step,
    StepError, StepOutput, StepSequence, Ticket, WeightFormat,
};

use super::{
    DriveOptions, Driver, ModelShape, RandomModel, Rng, Subject, Verdict,
    contract::{Prompt, require},
    heads::shape_of,
    rows::unless_refused,
    submit,
};

/// If tokens are carried, steps that follow each other without being collected give the same results as steps with
/// tokens from the host, also if the host reads embeddings for layers by token. Otherwise, and without a token to carry,
/// they are refused.
pub(super) fn carried_tokens(subject: &Subject) -> Verdict {
    for layer_embeds in [None, Some(32)] {
        carried_with(subject, &ModelShape { layer_embeds, ..ModelShape::default() })?;
    }
    Ok(())
}

fn carried_with(subject: &Subject, shape: &ModelShape) -> Verdict {
    let model = shape.build(1);
    let greedy = SamplingParams::default();
    let hot = SamplingParams { temperature: 2.0, top_k: 20, seed: 5, ..SamplingParams::default() };
    for params in [&greedy, &hot] {
        let mut decoding = Decoding::new(subject, &model, params)?;
        let request =
            SampleRequest { params, draw: 0, history: &[], prompt_tokens: 0, mask: None, logprobs: None };
        if !decoding.driver.runner().carries(&OutputKind::Sample(request)) {
            continue;
        }
        let serial = decoding.run(false)?;
        let carried = Decoding::new(subject, &model, params)?.run(true)?;
        require(serial == carried, || format!("carried tokens give {carried:?}, others {serial:?}"))?;
        let lanes = decoding.driver.runner().lanes().min(Decoding::PROMPTS.len());
        let in_lanes = |left| Decoding::new(subject, &model, params)?.run_in_lanes(lanes, left);
        let (one, all) = (in_lanes(0)?, in_lanes(lanes)?);
        require(one == all, || format!("{lanes} steps in flight give {all:?}, one gives {one:?}"))?;
    }
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.options())?;
    let prompt = Prompt::new(shape.vocab);
    let refused = |driver: &mut Driver, carried: &[Carried]| match driver
        .runner()
        .submit(&Step { carried, ..prompt.step(&[]) })
    {
        Err(StepError::Invalid(_)) => Ok(()),
        other => Err(format!("a step with {carried:?} gave {other:?}")),
    };
    refused(&mut driver, &[Carried { row: 0, output: 0, given: None }])?;
    let logits = [Output { row: 19, kind: OutputKind::Logits }];
    submit(driver.runner(), &prompt.step(&logits), &mut StepOutput::default())?;
    for carried in [
        &[Carried { row: 0, output: 0, given: None }][..],
        &[Carried { row: 0, output: 1, given: None }],
        &[Carried { row: 20, output: 0, given: None }],
        &[Carried { row: 1, output: 0, given: None }, Carried { row: 1, output: 0, given: None }],
    ] {
        refused(&mut driver, carried)?;
    }
    submit(driver.runner(), &prompt.step(&logits), &mut StepOutput::default())
}

/// Three decoding sequences with separate pages, for manual steps.
struct Decoding<'a> {
    driver: Driver,
    vocab: usize,
    params: &'a SamplingParams,
}

impl<'a> Decoding<'a> {
    /// Lengths of their prompts.
    const PROMPTS: [usize; 3] = [1, 14, 20];
    /// Pages of each.
    const PAGES: usize = 3;
    const STEPS: usize = 20;

    fn new(subject: &Subject, model: &RandomModel, params: &'a SamplingParams) -> Result<Self, String> {
        let options = DriveOptions { least_rows: 0, ..subject.options() };
        let driver = Driver::new(&*(subject.backend)(2), model, &options)?;
        Ok(Self { driver, vocab: model.program.vocab, params })
    }

    /// Returns the tokens of all steps, and the logits after them.
    fn run(&mut self, carry: bool) -> Result<(Vec<Vec<u32>>, Vec<OutputValue>), String> {
        let mut known: Vec<Vec<u32>> =
            Self::PROMPTS.iter().map(|&length| Rng::new(length as u64).tokens(length, self.vocab)).collect();
        let mut in_flight = VecDeque::new();
        let mut computed = [0; 3];
        for draw in 0..Self::STEPS {
            // The second sequence is sometimes left out. Sequences of the previous step have a token that is not known
            // yet.
            let own: Vec<usize> = (0..3).filter(|&which| which != 1 || draw % 5 != 3).collect();
            if !carry || draw % 7 == 6 {
                self.collect(&mut in_flight, &mut known, 0)?;
            }
            let before: Vec<usize> =
                in_flight.back().map_or(Vec::new(), |(_, own): &(Ticket, Vec<usize>)| own.clone());
            if own.iter().all(|which| !before.contains(which)) {
                self.collect(&mut in_flight, &mut known, 0)?;
            }
            let ticket = self.submit(&own, &before, &known, &mut computed, draw as u64)?;
            in_flight.push_back((ticket, own));
            self.collect(&mut in_flight, &mut known, 1)?;
        }
        self.collect(&mut in_flight, &mut known, 0)?;
        let (tokens, sequences, pages) = Self::rows(&[0, 1, 2], &[], &known, &mut computed);
        let outputs =
            [0, 1, 2].map(|row| Output { row: sequences[row].rows.end - 1, kind: OutputKind::Logits });
        let step = Step {
            tokens: &tokens,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        let mut out = StepOutput::default();
        submit(self.driver.runner(), &step, &mut out)?;
        Ok((known, out.outcomes))
    }

    /// Returns the tokens of as many sequences as there are lanes, which have steps in turn. After each submission, the last `left` steps
    /// are not collected.
    fn run_in_lanes(&mut self, lanes: usize, left: usize) -> Result<Vec<Vec<u32>>, String> {
        let prompts = Self::PROMPTS.iter().take(lanes);
        let mut known: Vec<_> =
            prompts.map(|&length| Rng::new(length as u64).tokens(length, self.vocab)).collect();
        let (mut in_flight, mut computed) = (VecDeque::new(), [0; 3]);
        for draw in 0..Self::STEPS {
            for lane in 0..lanes {
                let has_step = in_flight.iter().any(|(_, own): &(Ticket, Vec<usize>)| own[0] == lane);
                let before = if has_step { vec![lane] } else { Vec::new() };
                let ticket = self.submit(&[lane], &before, &known, &mut computed, draw as u64)?;
                in_flight.push_back((ticket, vec![lane]));
                self.collect(&mut in_flight, &mut known, left)?;
            }
        }
        self.collect(&mut in_flight, &mut known, 0)?;
        Ok(known)
    }

    /// Returns the rows of the sequences `own`. Those in `carried` have a row whose token is not known.
    fn rows(
        own: &[usize],
        carried: &[usize],
        known: &[Vec<u32>],
        computed: &mut [usize; 3],
    ) -> (Vec<u32>, Vec<StepSequence>, Vec<PageId>) {
        let (mut tokens, mut sequences, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        for &which in own {
            let (first, first_page) = (tokens.len(), pages.len());
            tokens.extend(&known[which][computed[which].min(known[which].len())..]);
            tokens.extend(carried.contains(&which).then_some(0));
            let start = computed[which];
            computed[which] += tokens.len() - first;
            let blocks = computed[which].div_ceil(16);
            pages.extend((0..blocks).map(|block| PageId((1 + Self::PAGES * which + block) as u32)));
            sequences.push(StepSequence {
                rows: first..tokens.len(),
                start,
                tables: first_page..pages.len(),
                state: None,
            });
        }
        (tokens, sequences, pages)
    }

    fn submit(
        &mut self,
        own: &[usize],
        before: &[usize],
        known: &[Vec<u32>],
        computed: &mut [usize; 3],
        draw: u64,
    ) -> Result<Ticket, String> {
        let (tokens, sequences, pages) = Self::rows(own, before, known, computed);
        let request = SampleRequest {
            params: self.params,
            draw,
            history: &[],
            prompt_tokens: 0,
            mask: None,
            logprobs: None,
        };
        let ends = sequences.iter().map(|sequence| sequence.rows.end - 1);
        let outputs: Vec<_> = ends.map(|row| Output { row, kind: OutputKind::Sample(request) }).collect();
        let carried = |(which, output): (&usize, &Output<'_>)| {
            let output_before = before.iter().position(|other| other == which)?;
            Some(Carried { row: output.row, output: output_before, given: None })
        };
        let carried: Vec<_> = own.iter().zip(&outputs).filter_map(carried).collect();
        let step = Step {
            tokens: &tokens,
            carried: &carried,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        self.driver.runner().submit(&step).map_err(|error| error.to_string())
    }

    /// Collects all steps in flight except the last `left`.
    fn collect(
        &mut self,
        in_flight: &mut VecDeque<(Ticket, Vec<usize>)>,
        known: &mut [Vec<u32>],
        left: usize,
    ) -> Verdict {
        while in_flight.len() > left
            && let Some((ticket, own)) = in_flight.pop_front()
        {
            let mut out = StepOutput::default();
            self.driver.runner().collect(ticket, &mut out).map_err(|error| error.to_string())?;
            for (which, outcome) in own.into_iter().zip(out.outcomes) {
                let OutputValue::Sampled(sampled) = outcome else {
                    return Err(format!("a token, not {outcome:?}"));
                };
                known[which].push(sampled.token);
            }
        }
        Ok(())
    }
}

/// Sequences of a step of [`Chain`], with their outputs: a token, and the row behind it.
const CHAIN: [&[usize]; 8] = [&[0, 1], &[0, 1], &[1, 0], &[0], &[0], &[0], &[0], &[0]];

/// A program that joins tokens with given rows may begin with a token and a row of the step before, as drafts of a head do. Steps that
/// follow each other without being collected give the same results as steps with tokens and rows from the host.
pub(super) fn carried_rows(subject: &Subject) -> Verdict {
    [WeightFormat::F32, WeightFormat::Q8_0].into_iter().try_for_each(|format| {
        let model = shape_of(format).build(3);
        unless_refused(subject, || {
            let options = DriveOptions { least_rows: 0, ..subject.options() };
            let new = || Driver::new(&*(subject.backend)(2), &model, &options);
            let carries = new()?.runner().carries(&OutputKind::Embedding);
            let serial = Chain::new(new()?, &model).run(false)?;
            if carries {
                let carried = Chain::new(new()?, &model).run(true)?;
                require(serial == carried, || format!("carried rows give {carried:?}, others {serial:?}"))?;
            }
            Chain::new(new()?, &model).refuses()
        })
    })
}

/// A sampled token, and the row before it.
type TokenRow = (u32, Vec<f32>);

/// Two sequences of a program with joined rows.
struct Chain {
    driver: Driver,
    params: SamplingParams,
    /// Tokens and given rows of their prompts, of which the first one has several rows.
    prompts: [(Vec<u32>, Vec<f32>); 2],
    computed: [usize; 2],
}

impl Chain {
    fn new(driver: Driver, model: &RandomModel) -> Self {
        let mut rng = Rng::new(4);
        let width = model.program.given_width();
        let prompts = [5, 1].map(|rows| {
            let values = (0..rows * width).map(|_| rng.normal()).collect();
            (rng.tokens(rows, model.program.vocab), values)
        });
        Self { driver, params: SamplingParams::default(), prompts, computed: [0; 2] }
    }

    /// Submits a step of these sequences, with the prompts or with `known` tokens and rows. Others are those of the step before.
    fn submit(
        &mut self,
        own: &[usize],
        known: Option<&[TokenRow]>,
        before: &[usize],
    ) -> Result<Ticket, StepError> {
        let (mut tokens, mut values, mut carried) = (Vec::new(), Vec::new(), Vec::new());
        let (mut sequences, mut pages, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        let request = SampleRequest {
            params: &self.params,
            draw: 0,
            history: &[],
            prompt_tokens: 0,
            mask: None,
            logprobs: None,
        };
        for &which in own {
            let (first, first_page, start) = (tokens.len(), pages.len(), self.computed[which]);
            let at = before.iter().position(|&other| other == which);
            match (at, known) {
                (None, _) => {
                    tokens.extend(&self.prompts[which].0);
                    values.extend(&self.prompts[which].1);
                }
                (Some(at), Some(known)) => {
                    tokens.push(known[at].0);
                    values.extend(&known[at].1);
                }
                (Some(at), None) => {
                    carried.push(Carried { row: first, output: 2 * at, given: Some(2 * at + 1) });
                    tokens.push(0);
                }
            }
            let end = start + tokens.len() - first;
            self.computed[which] = end;
            pages.extend((0..end.div_ceil(16)).map(|block| PageId((1 + 3 * which + block) as u32)));
            let (rows, tables) = (first..tokens.len(), first_page..pages.len());
            sequences.push(StepSequence { rows, start, tables, state: None });
            let row = tokens.len() - 1;
            outputs.push(Output { row, kind: OutputKind::Sample(request) });
            outputs.push(Output { row, kind: OutputKind::Embedding });
        }
        let given = GivenRows { rows: 0..tokens.len(), values: &values };
        let step = Step {
            tokens: &tokens,
            carried: &carried,
            given: if carried.is_empty() { std::slice::from_ref(&given) } else { &[] },
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        self.driver.runner().submit(&step)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<TokenRow>, String> {
        let mut out = StepOutput::default();
        self.driver.runner().collect(ticket, &mut out).map_err(|error| error.to_string())?;
        let pairs = out.outcomes.as_chunks::<2>().0.iter().map(|pair| match pair {
            [OutputValue::Sampled(sampled), OutputValue::Embedding(row)] => Ok((sampled.token, row.clone())),
            other => Err(format!("a token and a row, not {other:?}")),
        });
        pairs.collect()
    }

    /// Returns the tokens and rows of all steps.
    fn run(&mut self, carry: bool) -> Result<Vec<Vec<TokenRow>>, String> {
        let (mut all, mut before, mut in_flight) = (Vec::new(), &[][..], None);
        let mut known = Vec::new();
        for own in CHAIN {
            let ahead = if carry { None } else { Some(&known[..]) };
            let ticket = self.submit(own, ahead, before).map_err(|error| error.to_string())?;
            before = own;
            match in_flight.replace(ticket).filter(|_| carry) {
                Some(ticket) => all.push(self.collect(ticket)?),
                None if carry => {}
                None => {
                    known =
                        in_flight.take().map(|ticket| self.collect(ticket)).transpose()?.unwrap_or_default();
                    all.push(known.clone());
                }
            }
        }
        if let Some(ticket) = in_flight {
            all.push(self.collect(ticket)?);
        }
        Ok(all)
    }

    /// Checks that a row which was not carried, and a carried token without a row, are refused.
    fn refuses(mut self) -> Verdict {
        match self.submit(&[0], None, &[0]) {
            Err(StepError::Invalid(_)) => Ok(()),
            other => Err(format!("a row of no step gave {other:?}")),
        }
    }
}
