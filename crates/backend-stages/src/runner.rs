//! A model that is loaded on several devices.

use std::collections::{HashMap, HashSet, VecDeque};

use paguro_backend::{
    AdapterId, AdapterWork, Carried, ExpertCount, KernelCount, Limits, LoadError, LowRank, MatrixId,
    OutputKind, PageContent, PageFormat, PageId, PageMove, Program, Runner, Step, StepError, StepOutput,
    Ticket, Weights,
};

use crate::{pipeline::Pipeline, stage::LoadedStage, step::OwnedStep};

/// Matrices of a stage that adapters can change, by their ids in the whole program.
pub type AdaptableMatrices = HashMap<MatrixId, MatrixId>;

/// A model over stages.
pub struct StagesRunner {
    pipeline: Pipeline,
    /// Matrices of each stage.
    adaptable: Vec<AdaptableMatrices>,
    adapters: HashSet<AdapterId>,
    program: Program,
    limits: Limits,
    /// Pages of a copy of the states of one sequence.
    state_parts: usize,
    submitted: u64,
    collected: u64,
    /// Steps in flight, with the outputs that are carried.
    in_flight: VecDeque<Vec<bool>>,
}

impl StagesRunner {
    /// Creates a runner of these stages, of which there is at least one. `state_parts` is the number of pages of a copy of the
    /// states of one sequence.
    ///
    /// # Errors
    /// [`LoadError::Device`] if the system refuses a thread.
    pub fn new(
        stages: Vec<(LoadedStage, AdaptableMatrices)>,
        program: &Program,
        limits: Limits,
        state_parts: usize,
    ) -> Result<Self, LoadError> {
        let (stages, adaptable) = stages.into_iter().unzip();
        let refused =
            |error: std::io::Error| LoadError::Device(format!("cannot start a thread for a stage: {error}"));
        Ok(Self {
            pipeline: Pipeline::start(stages).map_err(refused)?,
            adaptable,
            adapters: HashSet::new(),
            program: program.clone(),
            limits,
            state_parts,
            submitted: 0,
            collected: 0,
            in_flight: VecDeque::new(),
        })
    }

    /// Returns the format of each stage's pages, or `None` if one of them has none.
    fn formats(&self) -> Option<Vec<PageFormat>> {
        self.pipeline.stages().iter().map(|stage| stage.runner().page_format()).collect()
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

impl Runner for StagesRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.program, &self.limits)?;
        step.has_adapters(|id| self.adapters.contains(&id))?;
        let most = self.lanes() + usize::from(!step.carried.is_empty());
        if self.in_flight.len() >= most {
            return Err(StepError::Invalid(format!("{most} steps were not collected")));
        }
        let is_carried =
            |output: usize| self.in_flight.front().is_some_and(|carried| carried.get(output) == Some(&true));
        if let Some(Carried { output, .. }) = step.carried.iter().find(|carried| !is_carried(carried.output))
        {
            return Err(StepError::Invalid(format!(
                "output {output} of the oldest step in flight is not carried"
            )));
        }
        self.in_flight.push_back(step.outputs.iter().map(|output| self.carries(&output.kind)).collect());
        self.submitted += 1;
        self.pipeline.submit(self.submitted, OwnedStep::new(step), self.collected + 1);
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        let Ticket(number) = ticket;
        if number != self.collected + 1 || number > self.submitted {
            return Err(StepError::Invalid(format!("step {number} is not the oldest one in flight")));
        }
        self.collected = number;
        self.in_flight.pop_front();
        *out = self.pipeline.collect()?;
        Ok(())
    }

    fn lanes(&self) -> usize {
        self.pipeline.stages().len()
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        // Penalties would need the token that is carried.
        matches!(kind, OutputKind::Sample(request) if request.mask.is_none() && !request.params.penalizes())
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        moves.iter().try_for_each(|page_move| page_move.check(&self.limits, self.state_parts))?;
        self.pipeline.move_pages(moves.to_vec());
        Ok(())
    }

    fn page_format(&self) -> Option<PageFormat> {
        let formats = self.formats()?;
        let page_bytes = formats.iter().map(|format| format.page_bytes).sum();
        // Bits depend on the cuts as well.
        let stages = self.pipeline.stages().iter().zip(formats);
        let names: Vec<_> =
            stages.map(|(stage, format)| format!("{:?} {}", stage.layers, format.name)).collect();
        Some(PageFormat { name: names.join("; "), page_bytes })
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        let format = self.own_format()?;
        format.check(pages, out.len(), &self.limits)?;
        let mut own = Vec::new();
        let parts = self.parts();
        for (stage, (first, bytes)) in self.pipeline.idle_stages().iter().zip(parts) {
            own.resize(pages.len() * bytes, 0);
            stage.runner().read_pages(pages, &mut own)?;
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
        let parts = self.parts();
        for (stage, (first, count)) in self.pipeline.idle_stages().iter().zip(parts) {
            own.clear();
            let all = bytes.chunks_exact(format.page_bytes);
            all.for_each(|page| own.extend_from_slice(&page[first..first + count]));
            stage.runner().write_pages(pages, &own, content)?;
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
        let known = |pair: &&LowRank| self.adaptable.iter().any(|stage| stage.contains_key(&pair.matrix));
        if let Some(unknown) = pairs.iter().find(|pair| !known(pair)) {
            let tensor = unknown.a.name.clone();
            let problem = "adapters cannot change this matrix".to_owned();
            return Err(LoadError::BadWeights { tensor, problem });
        }
        self.adapters.insert(id);
        for (stage, adaptable) in self.pipeline.idle_stages().iter().zip(&self.adaptable) {
            let own = pairs.iter().filter_map(|pair| {
                let matrix = *adaptable.get(&pair.matrix)?;
                Some(LowRank { matrix, ..pair.clone() })
            });
            let own: Vec<_> = own.collect();
            stage.runner().load_adapter(id, &own)?;
        }
        Ok(())
    }

    fn prepare_adapters(&mut self) -> Option<AdapterWork> {
        let stages = self.pipeline.idle_stages().iter();
        let works: Vec<AdapterWork> = stages.filter_map(|stage| stage.runner().prepare_adapters()).collect();
        if works.is_empty() {
            return None;
        }
        Some(Box::new(|| works.into_iter().try_for_each(|work| work())))
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.adapters.remove(&id);
        self.pipeline.idle_stages().iter().for_each(|stage| stage.runner().unload_adapter(id));
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        let mut counts: Vec<KernelCount> = Vec::new();
        for count in self.pipeline.stages().iter().flat_map(|stage| stage.runner().kernel_counts()) {
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
        for stage in self.pipeline.idle_stages() {
            let own = stage.runner().expert_counts()?.into_iter();
            counts.extend(own.map(|count| ExpertCount { layer: count.layer + stage.layers.start, ..count }));
        }
        Ok(counts)
    }
}
