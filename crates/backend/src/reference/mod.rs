//! The naive backend that defines every operation.
//!
//! It decodes all weights to f32, sums in f64, processes one row after the other and is slow: read it as documentation.
//! The conformance suite compares every other backend with it.

mod attention;
mod latent;
mod layers;
pub mod ops;
mod pages;
pub mod recurrent;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

pub use attention::{AttentionShape, HeadVectors, attention};
use pages::{Arena, Half, rounding};
pub use pages::{KvRounding, RoundFn, round_f16, round_q4, round_q8};
use recurrent::States;

use crate::{
    Adaptable, AdapterId, AdapterUse, Backend, Capacity, DeviceLayout, ExpertCount, GivenRows, KernelCount,
    KvDtype, Limits, Linear, LoadError, LowRank, Matrix, MatrixId, Norm, Output, OutputKind, OutputValue,
    PacedRunner, PageContent, PageFormat, PageId, PageMove, Program, Runner, Step, StepError, StepOutput,
    Ticket, VectorId, WeightFormat, Weights, sampling::Scratch,
};

/// Version of the bits that the reference computes. It is a part of [`PageFormat::name`], and changes with them.
pub const NUMERICS: u32 = 1;

/// The reference as a backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference {
    /// Rounding of K and V in pages of [`KvDtype::F16`].
    pub kv: KvRounding,
    /// Fills new pages with large finite noise from this seed, so that reads of unwritten data are detected.
    pub poison: Option<u64>,
}

impl Backend for Reference {
    fn name(&self) -> &str {
        "reference"
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            description: "naive reference, one thread, f64 sums".to_owned(),
            bytes_free: u64::MAX,
            host_free: u64::MAX,
            step_rows: 1,
            features: Vec::new(),
        }
    }

    fn page_bytes(&self, program: &Program, block_size: usize, _: KvDtype) -> usize {
        // Rounded, but stored in single precision.
        program.kv.page_elements(block_size) * size_of::<f32>()
    }

    fn state_bytes(&self, program: &Program) -> usize {
        program.state.bytes()
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        let elements = matrix.parts * matrix.rows * matrix.cols;
        DeviceLayout { bytes: elements * size_of::<f32>(), converted_to: Some(WeightFormat::F32) }
    }

    fn weight_bytes(&self, _: &Program, weights: &Weights) -> u64 {
        weights.bytes_on(self)
    }

    fn buffer_bytes(&self, _: &Program, _: &Limits) -> u64 {
        // Allocated row by row, while it computes.
        0
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let round = rounding(limits.kv_dtype, self.kv);
        Ok(Box::new(self.load_with(attention, round, program, weights, limits)?))
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
        // Its steps do not pause: it is for tests.
        Ok(PacedRunner { runner: self.load(program, weights, limits)?, pace: Arc::default() })
    }
}

impl Reference {
    /// Loads a model with other functions for attention and rounding: tests of the conformance suite use defective ones.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load_with(
        &self,
        attention: AttentionFn,
        round: RoundFn,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<ReferenceRunner, LoadError> {
        if program.shares_pages {
            return Err(LoadError::no_shared_pages("no runner has loaded it"));
        }
        let arena = Arena::new(&program.kv, &limits, round, self.poison);
        self.load_beside(attention, round, program, weights, limits, Arc::new(Mutex::new(arena)))
    }

    /// Loads a model with these pages.
    fn load_beside(
        &self,
        attention: AttentionFn,
        round: RoundFn,
        program: &Program,
        weights: Weights,
        limits: Limits,
        arena: Arc<Mutex<Arena>>,
    ) -> Result<ReferenceRunner, LoadError> {
        program.check(&weights)?;
        let matrices = weights.matrices.iter().map(decode).collect::<Result<_, LoadError>>()?;
        weights.check_unchanged()?;
        Ok(ReferenceRunner {
            adaptable: Adaptable::of(program, &weights),
            adapters: BTreeMap::new(),
            adapted: Vec::new(),
            tables: weights.tables,
            arena,
            states: States::new(&program.state, &limits, self.poison),
            program: Arc::new(program.clone()),
            matrices,
            vectors: weights.vectors,
            limits,
            attention,
            round,
            poison: self.poison,
            sampler: Scratch::default(),
            answers: Vec::new(),
            in_flight: VecDeque::new(),
            carried: Vec::new(),
            submitted: 0,
            launches: BTreeMap::new(),
        })
    }
}

/// Returns all numbers of a matrix.
fn decode(matrix: &Matrix) -> Result<Vec<f32>, LoadError> {
    let bytes = matrix.read()?;
    matrix.check_finite(&bytes, 0)?;
    let mut decoded = vec![0.0; matrix.parts * matrix.rows * matrix.cols];
    matrix.format.dequantize(&bytes, &mut decoded);
    Ok(decoded)
}

/// A decoded [`LowRank`].
struct Change {
    matrix: MatrixId,
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
    scale: f32,
}

/// The type of [`attention()`].
pub type AttentionFn = fn(&[f32], &[f32], &[f32], HeadVectors<'_>, &AttentionShape<'_>, &mut [f32]);

/// A loaded model.
pub struct ReferenceRunner {
    program: Arc<Program>,
    /// `[parts, rows, cols]` each, by [`MatrixId`].
    matrices: Vec<Vec<f32>>,
    vectors: Vec<Vec<f32>>,
    tables: Vec<Matrix>,
    adaptable: Adaptable,
    adapters: BTreeMap<AdapterId, Vec<Change>>,
    /// Adapters of each row of the step.
    adapted: Vec<Vec<AdapterUse>>,
    limits: Limits,
    /// Shared with heads that read its pages.
    arena: Arc<Mutex<Arena>>,
    states: States,
    attention: AttentionFn,
    round: RoundFn,
    poison: Option<u64>,
    sampler: Scratch,
    /// The answers of the step that is being computed.
    answers: Vec<OutputValue>,
    /// Outputs of steps that were not collected.
    in_flight: VecDeque<(Ticket, Vec<OutputValue>)>,
    /// Outputs of the last step that the next one may begin with.
    carried: Vec<Option<OutputValue>>,
    /// Number of steps submitted, and the ticket of the last one.
    submitted: u64,
    launches: BTreeMap<&'static str, u64>,
}

impl Runner for ReferenceRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.program, &self.limits)?;
        step.has_adapters(|id| self.adapters.contains_key(&id))?;
        if self.in_flight.len() > usize::from(!step.carried.is_empty()) {
            return Err(StepError::Invalid("the step before was not collected".into()));
        }
        let mut tokens = step.tokens.to_vec();
        let mut rows = Vec::new();
        for carried in step.carried {
            let known = |output: usize| self.carried.get(output).and_then(Option::as_ref);
            let not_carried = |output: usize| {
                StepError::Invalid(format!("output {output} of the step before was not carried"))
            };
            tokens[carried.row] = match known(carried.output) {
                Some(OutputValue::Sampled(sampled)) => sampled.token,
                _ => return Err(not_carried(carried.output)),
            };
            if let Some(output) = carried.given {
                let Some(OutputValue::Embedding(values)) = known(output) else {
                    return Err(not_carried(output));
                };
                rows.push((carried.row, values.clone()));
            }
        }
        let mut given = step.given.to_vec();
        given.extend(rows.iter().map(|(row, values)| GivenRows { rows: *row..row + 1, values }));
        given.sort_by_key(|given| given.rows.start);
        self.forward(&Step { tokens: &tokens, given: &given, ..*step })?;
        let answers = std::mem::take(&mut self.answers);
        let carried = |(output, answer): (&Output<'_>, &OutputValue)| {
            self.carries(&output.kind).then(|| answer.clone())
        };
        self.carried = step.outputs.iter().zip(&answers).map(carried).collect();
        self.submitted += 1;
        self.in_flight.push_back((Ticket(self.submitted), answers));
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        match self.in_flight.pop_front_if(|(first, _)| *first == ticket) {
            Some((_, answers)) => out.outcomes = answers,
            None => {
                let message = format!("step {} was collected or never submitted", ticket.0);
                return Err(StepError::Invalid(message));
            }
        }
        Ok(())
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        match kind {
            // Penalties would need the token that is carried.
            OutputKind::Sample(request) => request.mask.is_none() && !request.params.penalizes(),
            OutputKind::Embedding => self.program.joined().is_some(),
            OutputKind::Score { token: _, top: _ }
            | OutputKind::Logits
            | OutputKind::Mean
            | OutputKind::Residual => false,
        }
    }

    fn load_head(
        &mut self,
        program: &Program,
        weights: Weights,
        _: &[(MatrixId, MatrixId)],
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        // Memory is no concern here.
        let Self { attention, round, poison, .. } = *self;
        let reference = Reference { poison, ..Reference::default() };
        if !program.shares_pages {
            return Ok(Box::new(reference.load_with(attention, round, program, weights, limits)?));
        }
        if !self.arena().has_shape(&program.kv, &limits) {
            return Err(LoadError::no_shared_pages("these have another shape"));
        }
        let arena = Arc::clone(&self.arena);
        Ok(Box::new(reference.load_beside(attention, round, program, weights, limits, arena)?))
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        let Self { arena, states, limits, .. } = self;
        let mut arena = lock(arena);
        let parts = states.numbers().div_ceil(arena.page_numbers());
        for &page_move in moves {
            page_move.check(limits, parts)?;
            match page_move {
                PageMove::Copy { from, to } => arena.copy(from, to),
                PageMove::SaveState { state, part, to } => {
                    states.part(state, part, arena.page_mut(to), |number, page| *page = *number);
                }
                PageMove::RestoreState { from, part, state } => {
                    states.part(state, part, arena.page_mut(from), |number, page| *number = *page);
                }
            }
        }
        Ok(())
    }

    fn page_format(&self) -> Option<PageFormat> {
        let (block_size, kv_dtype) = (self.limits.block_size, self.limits.kv_dtype);
        let name = format!("reference {NUMERICS} {} {block_size}", kv_dtype.name());
        Some(PageFormat { name, page_bytes: self.arena().page_numbers() * size_of::<f32>() })
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.page_format().into_iter().try_for_each(|format| format.check(pages, out.len(), &self.limits))?;
        let arena = self.arena();
        let bytes = arena.page_numbers() * size_of::<f32>();
        pages.iter().zip(out.chunks_exact_mut(bytes)).for_each(|(&page, out)| arena.read(page, out));
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], _: PageContent) -> Result<(), StepError> {
        self.page_format()
            .into_iter()
            .try_for_each(|format| format.check(pages, bytes.len(), &self.limits))?;
        let mut arena = self.arena();
        let page_bytes = arena.page_numbers() * size_of::<f32>();
        pages.iter().zip(bytes.chunks_exact(page_bytes)).for_each(|(&page, from)| arena.write(page, from));
        Ok(())
    }

    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        let changes = self.adapters.entry(id).or_default();
        for pair in pairs {
            self.adaptable.check(pair)?;
            let LowRank { matrix, a, b, scale } = pair;
            let (rank, scale) = (pair.rank(), *scale);
            changes.push(Change { matrix: *matrix, a: decode(a)?, b: decode(b)?, rank, scale });
        }
        Ok(())
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.adapters.remove(&id);
    }

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        Ok(Vec::new())
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        let counts = self.launches.iter();
        counts
            .map(|(name, &launches)| KernelCount {
                name: format!("{name}/reference"),
                launches,
                nanoseconds: 0,
            })
            .collect()
    }
}

/// Locks pages, which one runner uses at a time.
fn lock(arena: &Mutex<Arena>) -> MutexGuard<'_, Arena> {
    arena.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReferenceRunner {
    fn arena(&self) -> MutexGuard<'_, Arena> {
        lock(&self.arena)
    }

    fn count(&mut self, kernel: &'static str) {
        *self.launches.entry(kernel).or_default() += 1;
    }

    fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    fn norm(&self, norm: &Norm, x: &[f32]) -> Vec<f32> {
        let mut out = x.to_vec();
        let bias = norm.bias.map(|bias| self.vector(bias));
        ops::norm(&mut out, norm.kind, self.vector(norm.weight), bias, norm.eps);
        out
    }

    fn optional_norm(&self, norm: Option<Norm>, x: &[f32]) -> Vec<f32> {
        norm.map_or_else(|| x.to_vec(), |norm| self.norm(&norm, x))
    }

    /// Returns a linear of row `row` of the step, with the changes of its adapters.
    fn linear(&self, linear: &Linear, row: usize, x: &[f32]) -> Vec<f32> {
        let mut out = self.plain(linear, x);
        for AdapterUse { sequence: _, adapter, scale } in &self.adapted[row] {
            for change in self.adapters[adapter].iter().filter(|change| change.matrix == linear.matrix) {
                let (mut low, mut added) = (vec![0.0; change.rank], vec![0.0; out.len()]);
                ops::linear(x, &change.a, None, &mut low);
                ops::linear(&low, &change.b, None, &mut added);
                out.iter_mut().zip(added).for_each(|(out, added)| *out += scale * change.scale * added);
            }
        }
        out
    }

    /// Returns a linear without adapters.
    fn plain(&self, linear: &Linear, x: &[f32]) -> Vec<f32> {
        let rows = self.matrices[linear.matrix.0 as usize].len() / x.len();
        let Some(bounds) = &linear.bounds else { return self.part(linear, 0, x, rows) };
        let mut x = x.to_vec();
        bounds.clamp_input(&mut x);
        let mut y = self.part(linear, 0, &x, rows);
        bounds.clamp_output(&mut y);
        y
    }

    /// Matrix `part` of a stack, each of `rows` rows.
    fn part(&self, linear: &Linear, part: usize, x: &[f32], rows: usize) -> Vec<f32> {
        let size = rows * x.len();
        let matrix = &self.matrices[linear.matrix.0 as usize][part * size..(part + 1) * size];
        let bias = linear.bias.map(|bias| &self.vector(bias)[part * rows..(part + 1) * rows]);
        let mut out = vec![0.0; rows];
        ops::linear(x, matrix, bias, &mut out);
        out
    }
}
