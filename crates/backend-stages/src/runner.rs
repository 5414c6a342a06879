//! A model that is loaded on several devices.

use std::{collections::HashMap, ops::Range};

use paguro_backend::{
    AdapterId, AdapterWork, ExpertCount, GivenRows, Input, KernelCount, Limits, LoadError, LowRank, MatrixId,
    Output, OutputKind, OutputValue, PageContent, PageFormat, PageId, PageMove, Program, Runner, Step,
    StepError, StepOutput, Ticket, Weights,
};

/// A stage on its device.
pub struct LoadedStage {
    runner: Box<dyn Runner>,
    /// True if its rows are embeddings of tokens.
    has_tokens: bool,
    /// Its layers in the whole program.
    layers: Range<usize>,
    /// Matrices that adapters can change, by their ids in the whole program.
    adaptable: HashMap<MatrixId, MatrixId>,
}

impl LoadedStage {
    /// Creates a stage of these layers.
    pub fn new(
        runner: Box<dyn Runner>,
        program: &Program,
        layers: Range<usize>,
        adaptable: HashMap<MatrixId, MatrixId>,
    ) -> Self {
        Self { runner, has_tokens: matches!(program.input, Input::Tokens(_)), layers, adaptable }
    }
}

/// A model over stages.
pub struct StagesRunner {
    stages: Vec<LoadedStage>,
    program: Program,
    limits: Limits,
    /// Ticket of the last stage, which computes the outputs.
    in_flight: Option<Ticket>,
    /// Rows between two stages, `[rows, hidden]`.
    rows: Vec<f32>,
    answers: StepOutput,
    submitted: u64,
}

impl StagesRunner {
    /// Creates a runner of these stages, of which there is at least one.
    pub fn new(stages: Vec<LoadedStage>, program: &Program, limits: Limits) -> Self {
        Self {
            stages,
            program: program.clone(),
            limits,
            in_flight: None,
            rows: Vec::new(),
            answers: StepOutput::default(),
            submitted: 0,
        }
    }

    /// Returns the format of each stage's pages, or `None` if one of them has none.
    fn formats(&self) -> Option<Vec<PageFormat>> {
        self.stages.iter().map(|stage| stage.runner.page_format()).collect()
    }

    fn own_format(&self) -> Result<PageFormat, StepError> {
        self.page_format().ok_or_else(|| StepError::Invalid("pages of a stage have no format".into()))
    }

    /// Returns the offset of each stage's bytes in a page, and their number.
    fn parts(&self) -> Vec<(usize, usize)> {
        let formats = self.formats().unwrap_or_default();
        let mut end = 0;
        let place = |format: PageFormat| {
            end += format.page_bytes;
            (end - format.page_bytes, format.page_bytes)
        };
        formats.into_iter().map(place).collect()
    }
}

/// Runs the stages before the last one, from `rows` on. The rows of each are the input of the next one.
fn run(
    stage: &mut LoadedStage,
    step: &Step<'_>,
    answers: &mut StepOutput,
    rows: &mut Vec<f32>,
) -> Result<(), StepError> {
    let outputs: Vec<_> =
        (0..step.tokens.len()).map(|row| Output { row, kind: OutputKind::Residual }).collect();
    let ticket = stage.runner.submit(&Step { outputs: &outputs, ..*step })?;
    stage.runner.collect(ticket, answers)?;
    rows.clear();
    for answer in &answers.outcomes {
        let OutputValue::Residual(row) = answer else {
            return Err(StepError::Invalid("a stage has returned something other than rows".into()));
        };
        rows.extend_from_slice(row);
    }
    Ok(())
}

impl Runner for StagesRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.program, &self.limits)?;
        step.carries_nothing()?;
        if self.in_flight.is_some() {
            return Err(StepError::Invalid("the step before was not collected".into()));
        }
        let Self { stages, rows, answers, .. } = self;
        let zeros = vec![0; step.tokens.len()];
        let (last, others) = stages.split_last_mut().expect("there is a stage");
        for (index, stage) in others.iter_mut().enumerate() {
            let values = std::mem::take(rows);
            let given = [GivenRows { rows: 0..step.tokens.len(), values: &values }];
            let tokens = if stage.has_tokens { step.tokens } else { &zeros };
            let given = if index == 0 { step.given } else { &given };
            run(stage, &Step { tokens, given, ..*step }, answers, rows)?;
        }
        let given = [GivenRows { rows: 0..step.tokens.len(), values: rows }];
        let tokens = if last.has_tokens { step.tokens } else { &zeros };
        let given = if others.is_empty() { step.given } else { &given };
        self.in_flight = Some(last.runner.submit(&Step { tokens, given, ..*step })?);
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        let Ticket(number) = ticket;
        let own = self.in_flight.take().filter(|_| number == self.submitted);
        let own = own.ok_or_else(|| StepError::Invalid(format!("step {number} is not in flight")))?;
        let last = self.stages.last_mut().expect("there is a stage");
        last.runner.collect(own, out)
    }

    fn carries(&self, _: &OutputKind<'_>) -> bool {
        // The first stage needs the token, which only the last one knows.
        false
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        self.stages.iter_mut().try_for_each(|stage| stage.runner.move_pages(moves))
    }

    fn page_format(&self) -> Option<PageFormat> {
        let formats = self.formats()?;
        let page_bytes = formats.iter().map(|format| format.page_bytes).sum();
        // Bits depend on the cuts as well.
        let stages = self.stages.iter().zip(formats);
        let name =
            |(stage, format): (&LoadedStage, PageFormat)| format!("{:?} {}", stage.layers, format.name);
        let names: Vec<_> = stages.map(name).collect();
        Some(PageFormat { name: names.join("; "), page_bytes })
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        let format = self.own_format()?;
        format.check(pages, out.len(), &self.limits)?;
        let mut own = Vec::new();
        for (stage, (first, bytes)) in self.parts().into_iter().enumerate() {
            own.resize(pages.len() * bytes, 0);
            self.stages[stage].runner.read_pages(pages, &mut own)?;
            if bytes > 0 {
                for (page, own) in out.chunks_exact_mut(format.page_bytes).zip(own.chunks_exact(bytes)) {
                    page[first..first + bytes].copy_from_slice(own);
                }
            }
        }
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError> {
        let format = self.own_format()?;
        format.check(pages, bytes.len(), &self.limits)?;
        let mut own = Vec::new();
        for (stage, (first, count)) in self.parts().into_iter().enumerate() {
            own.clear();
            let all = bytes.chunks_exact(format.page_bytes);
            all.for_each(|page| own.extend_from_slice(&page[first..first + count]));
            self.stages[stage].runner.write_pages(pages, &own, content)?;
        }
        Ok(())
    }

    fn load_head(
        &mut self,
        program: &Program,
        _: Weights,
        _: &[(MatrixId, MatrixId)],
        _: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        Err(LoadError::no_heads("several devices", program))
    }

    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        let known =
            |pair: &&LowRank| self.stages.iter().any(|stage| stage.adaptable.contains_key(&pair.matrix));
        if let Some(unknown) = pairs.iter().find(|pair| !known(pair)) {
            let tensor = unknown.a.name.clone();
            let problem = "adapters cannot change this matrix".to_owned();
            return Err(LoadError::BadWeights { tensor, problem });
        }
        for stage in &mut self.stages {
            let own = pairs.iter().filter_map(|pair| {
                let matrix = *stage.adaptable.get(&pair.matrix)?;
                Some(LowRank { matrix, ..pair.clone() })
            });
            let own: Vec<_> = own.collect();
            stage.runner.load_adapter(id, &own)?;
        }
        Ok(())
    }

    fn prepare_adapters(&mut self) -> Option<AdapterWork> {
        let of_stages = self.stages.iter_mut().filter_map(|stage| stage.runner.prepare_adapters());
        let works: Vec<AdapterWork> = of_stages.collect();
        if works.is_empty() {
            return None;
        }
        Some(Box::new(|| works.into_iter().try_for_each(|work| work())))
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.stages.iter_mut().for_each(|stage| stage.runner.unload_adapter(id));
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        let mut counts: Vec<KernelCount> = Vec::new();
        for count in self.stages.iter().flat_map(|stage| stage.runner.kernel_counts()) {
            match counts.iter_mut().find(|known| known.name == count.name) {
                Some(known) => {
                    known.launches += count.launches;
                    known.nanoseconds += count.nanoseconds;
                }
                None => counts.push(count),
            }
        }
        counts
    }

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        let mut counts = Vec::new();
        for stage in &mut self.stages {
            let own = stage.runner.expert_counts()?.into_iter();
            counts.extend(own.map(|count| ExpertCount { layer: count.layer + stage.layers.start, ..count }));
        }
        Ok(counts)
    }
}
