//! A backend with a defect: the reference behind a wrapper that changes what passes it.

use std::sync::Arc;

use paguro_backend::{
    AdapterId, Backend, Capacity, DeviceLayout, ExpertCount, GivenRows, KernelCount, KvDtype, Limits,
    LoadError, LowRank, Matrix, MatrixId, OutputKind, OutputValue, PacedRunner, PageContent, PageFormat,
    PageId, PageMove, Program, Runner, SamplingParams, Step, StepError, StepOutput, Ticket, Weights,
    reference::{KvRounding, Reference},
};

use super::{Circumstances, Defect};
use crate::ModelShape;

/// The backend.
pub(super) struct Defective {
    pub(super) defect: Defect,
    pub(super) threads: usize,
}

impl Backend for Defective {
    fn name(&self) -> &str {
        "defective"
    }

    fn capacity(&self) -> Capacity {
        Reference::default().capacity()
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        Reference::default().page_bytes(program, block_size, kv_dtype)
    }

    fn state_bytes(&self, program: &Program) -> usize {
        Reference::default().state_bytes(program)
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        Reference::default().device_layout(matrix)
    }

    fn weight_bytes(&self, program: &Program, weights: &Weights) -> u64 {
        Reference::default().weight_bytes(program, weights)
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        Reference::default().buffer_bytes(program, limits)
    }

    fn load(
        &self,
        program: &Program,
        mut weights: Weights,
        mut limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let mut program = program.clone();
        if !self.defect.checks_weights && program.check(&weights).is_err() {
            let harmless = ModelShape::default().build(0);
            (program, weights) = (harmless.program, harmless.weights);
        }
        (self.defect.program)(&mut program);
        (self.defect.weights)(&mut weights);
        (self.defect.limits)(&mut limits);
        let reference = Reference { kv: KvRounding::F16, poison: Some(1) };
        let Defect { attention, round, .. } = self.defect;
        let inner = reference.load_with(attention, round, &program, weights, limits)?;
        let (threads, expert_slots) = (self.threads, limits.expert_slots);
        let now = Circumstances { threads, expert_slots, ..Circumstances::default() };
        Ok(Box::new(DefectiveRunner { inner: Box::new(inner), program, defect: self.defect, now }))
    }

    fn runs_tower(&self, _: &Program) -> bool {
        true
    }

    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError> {
        Ok(PacedRunner { runner: self.load(program, weights, limits)?, pace: Arc::default() })
    }
}

struct DefectiveRunner {
    inner: Box<dyn Runner>,
    program: Program,
    defect: Defect,
    now: Circumstances,
}

impl Runner for DefectiveRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        let mut pages = step.pages.to_vec();
        (self.defect.block_tables)(&mut pages, step.sequences);
        self.now.rows = step.tokens.len();
        self.now.first_page = step.pages[0].0;
        self.now.steps += 1;
        let params: Vec<SamplingParams> = step
            .outputs
            .iter()
            .map(|output| {
                let OutputKind::Sample(request) = &output.kind else { return SamplingParams::default() };
                let mut params = request.params.clone();
                (self.defect.params)(&mut params);
                params
            })
            .collect();
        let mut outputs = step.outputs.to_vec();
        for (output, params) in outputs.iter_mut().zip(&params) {
            let OutputKind::Sample(request) = &mut output.kind else { continue };
            request.params = params;
        }
        let mut carried = step.carried.to_vec();
        (self.defect.carried)(&mut carried);
        let mut sequences = step.sequences.to_vec();
        (self.defect.sequences)(&mut sequences);
        let values: Vec<_> = step
            .given
            .iter()
            .map(|given| {
                let mut values = given.values.to_vec();
                (self.defect.given)(&mut values, &self.program);
                values
            })
            .collect();
        let given = step.given.iter().zip(&values);
        let given: Vec<_> = given.map(|(given, values)| GivenRows { values, ..given.clone() }).collect();
        let mut coordinates = step.coordinates.to_vec();
        (self.defect.coordinates)(&mut coordinates);
        let mut spans = step.spans.to_vec();
        (self.defect.spans)(&mut spans);
        let changed = (self.defect.step)(Step {
            tokens: step.tokens,
            carried: &carried,
            given: &given,
            coordinates: &coordinates,
            spans: &spans,
            adapters: step.adapters,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
        });
        match self.inner.submit(&changed) {
            Err(StepError::Invalid(_)) if !self.defect.checks_steps => Ok(Ticket(0)),
            result => result,
        }
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        self.inner.collect(ticket, out)?;
        for outcome in &mut out.outcomes {
            match outcome {
                OutputValue::Logits(logits) => (self.defect.logits)(logits, &self.now),
                OutputValue::Embedding(embedding) => (self.defect.embeddings)(embedding, &self.now),
                OutputValue::Sampled(_) | OutputValue::Score(_) | OutputValue::Residual(_) => {}
            }
        }
        (self.defect.outcomes)(&mut out.outcomes);
        Ok(())
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        self.inner.carries(kind)
    }

    fn load_head(
        &mut self,
        program: &Program,
        weights: Weights,
        shared: &[(MatrixId, MatrixId)],
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let Self { defect, now, .. } = self;
        let inner = self.inner.load_head(program, weights, shared, limits)?;
        Ok(Box::new(Self { inner, program: program.clone(), defect: *defect, now: *now }))
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        let mut moves = moves.to_vec();
        moves.iter_mut().for_each(self.defect.moves);
        if self.defect.moves_pages { self.inner.move_pages(&moves) } else { Ok(()) }
    }

    fn page_format(&self) -> Option<PageFormat> {
        self.inner.page_format()
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.inner.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError> {
        if self.defect.moves_pages { self.inner.write_pages(pages, bytes, content) } else { Ok(()) }
    }

    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        self.inner.load_adapter(id, pairs)
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.inner.unload_adapter(id);
    }

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        self.inner.expert_counts()
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        let mut counts = self.inner.kernel_counts();
        (self.defect.counts)(&mut counts);
        counts
    }
}
