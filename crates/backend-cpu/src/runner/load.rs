//! The load of a model: packed weights, and buffers for the largest step.

use std::sync::{Arc, Mutex};

use paguro_backend::{
    AttentionMode, InputSquares, Limits, LoadError, MatrixId, Pace, Program, WeightFormat, Weights,
};
use paguro_cpu_kernels::{
    attention::{AttentionKernels, SPLIT, Scores},
    delta::{DeltaKernels, DeltaScratch},
    isa::Isa,
    matrix::{Activations, MatrixKernels, PackedMatrix, Packing, Scratch},
    ops::RowKernels,
    pages::{Arena, PageShape, StoredHead},
};

use super::{CpuRunner, lock};
use crate::{
    Cpu, CpuOptions,
    adapters::Adapters,
    buffers::BufferSizes,
    by_expert::RowsByExpert,
    page_format,
    pass::Counters,
    plan::StepPlan,
    states::States,
    support,
    thread_pool::{Chunking, ThreadPool},
    worker::{Model, WorkerScratch},
};

/// Surroundings of a load.
pub(super) struct LoadContext<'a> {
    pub pool: Arc<Mutex<ThreadPool>>,
    pub isa: Isa,
    pub poison: bool,
    pub squares: Option<Arc<InputSquares>>,
    /// Matrices that are packed already.
    pub packed: &'a [(MatrixId, Arc<PackedMatrix>)],
    /// Pages of a program that shares pages.
    pub pages: Option<&'a Arc<Mutex<Arena>>>,
}

impl CpuRunner {
    /// Starts a thread pool, which may pause, and loads a model for it.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load(
        cpu: &Cpu,
        program: &Program,
        weights: Weights,
        limits: Limits,
        pace: Option<Arc<Pace>>,
    ) -> Result<Self, LoadError> {
        let (isa, threads) = (cpu.isa(), cpu.threads());
        let CpuOptions { threads: _, isa: _, memory: _, poison, squares } = cpu.options.clone();
        let mut pool = ThreadPool::new(threads).map_err(|error| {
            LoadError::Device(format!("cannot start {threads} threads: {error}; use fewer with --threads"))
        })?;
        pool.pace = pace;
        let pool = Arc::new(Mutex::new(pool));
        let context = LoadContext { pool, isa, poison, squares, packed: &[], pages: None };
        Self::load_on(context, program, weights, limits)
    }

    /// Packs the weights on the thread pool and allocates all buffers for `limits`.
    ///
    /// # Errors
    /// [`LoadError`]
    pub(super) fn load_on(
        context: LoadContext<'_>,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Self, LoadError> {
        let mut pool = lock(&context.pool);
        let threads = pool.threads();
        program.check(&weights)?;
        support::check(program)?;
        if limits.expert_slots.is_some() {
            return Err(LoadError::no_slots("cpu"));
        }
        let shapes = PageShape::of_groups(&program.kv, limits.block_size, limits.kv_dtype)?;
        if !SPLIT.is_multiple_of(limits.block_size) {
            return Err(LoadError::Unsupported {
                device: "cpu".into(),
                what: format!("pages of {} tokens", limits.block_size),
                supported: "16, 32, 64, 128, 256 and 512 work".into(),
            });
        }
        let activations = activations_of(program, &weights);
        let matrices = pack(&weights, activations, context.packed, &mut pool)?;
        drop(pool);
        let LoadContext { pool, isa, poison, squares, packed: _, pages } = context;
        if let Some(squares) = &squares {
            squares.begin(&weights);
        }
        let adapters = Adapters::new(program, &weights, limits.max_rows)?;
        let Weights { matrices: _, vectors, tables } = weights;
        let mut states = States::new(&program.state, limits.states)?;
        if poison {
            states.poison();
        }
        let arena = arena(program, limits.pages, shapes, poison, pages)?;

        let page_format = page_format::of(isa, &limits, lock(&arena).page_bytes());
        let sizes = BufferSizes::new(program, &limits, threads);
        let groups: Vec<_> = program.kv.groups.iter().copied().zip(support::heads(program)?).collect();
        let plan = StepPlan::new(&groups, &limits, threads, sizes.partial_count);
        let needs_all = limits.attention != AttentionMode::Paged || squares.is_some();
        let tail = support::tail(program).filter(|_| !needs_all);
        let tail = tail.map(|first| (first, StepPlan::new(&groups, &limits, threads, sizes.partial_count)));
        let scratch = (0..threads).map(|_| WorkerScratch {
            matmul: Scratch::default(),
            scores: Scores::new(limits.kv_dtype, sizes.head_dim),
            partial: vec![0.0; sizes.tile_partial],
            sums: vec![0.0; sizes.tile_partial],
            row: vec![0.0; sizes.widest.max(sizes.row_ops.widest)],
            stored: StoredHead::new(limits.kv_dtype, sizes.head_dim),
            sampler: paguro_backend::sampling::Scratch::default(),
            delta: DeltaScratch::new(sizes.recurrent.head().0, sizes.recurrent.head().1),
            conv_input: vec![0.0; sizes.recurrent.conv()],
            sum: vec![0.0; sizes.experts.sum],
            encoded: Vec::new(),
            embeds: vec![0.0; sizes.layer_embeds],
        });
        Ok(Self {
            scratch: scratch.collect(),
            buffers: sizes.allocate()?,
            by_expert: RowsByExpert::new(sizes.experts, limits.max_rows),
            counters: Counters::new(isa, limits.kv_dtype, &matrices),
            answers: (0..limits.max_outputs).map(|_| Mutex::new(None)).collect(),
            model: Model {
                program: program.clone(),
                matrices,
                vectors,
                tables,
                rope_stride: sizes.rope_stride,
                attention: limits.attention,
                matmul: MatrixKernels::new(isa, activations),
                rows: RowKernels::new(isa),
                attend: AttentionKernels::new(isa),
                delta: DeltaKernels::new(isa),
                squares,
                adapted: false,
            },
            adapters,
            pool,
            isa,
            poison,
            limits,
            page_format,
            arena,
            states,
            plan,
            tail,
            outputs: 0,
            submitted: 0,
        })
    }
}

/// Packs all matrices, except for those that are `packed` already.
fn pack(
    weights: &Weights,
    activations: Activations,
    packed: &[(MatrixId, Arc<PackedMatrix>)],
    pool: &mut ThreadPool,
) -> Result<Vec<Arc<PackedMatrix>>, LoadError> {
    let mut matrices = Vec::with_capacity(weights.matrices.len());
    // One after the other, so that beside the packed weights, memory holds only the rows that threads are packing.
    for (id, source) in weights.matrices.iter().enumerate() {
        if let Some((_, packed)) = packed.iter().find(|(shared, _)| shared.0 as usize == id) {
            matrices.push(packed.clone());
            continue;
        }
        let packing = Packing::new(source, activations)?;
        pool.run(pool.threads(), Chunking::Single, |_, _| packing.work());
        matrices.push(Arc::new(packing.finish()?));
    }
    weights.check_unchanged()?;
    Ok(matrices)
}

/// Allocates the pages of a program, or returns those that it shares.
fn arena(
    program: &Program,
    count: usize,
    shapes: Vec<PageShape>,
    poison: bool,
    shared: Option<&Arc<Mutex<Arena>>>,
) -> Result<Arc<Mutex<Arena>>, LoadError> {
    match shared.filter(|_| program.shares_pages) {
        Some(arena) if lock(arena).has_shape(count, &shapes) => Ok(Arc::clone(arena)),
        Some(_) => Err(LoadError::no_shared_pages("these have another shape")),
        None if program.shares_pages => Err(LoadError::no_shared_pages("no runner has loaded it")),
        None => {
            let mut arena = Arena::new(count, shapes)?;
            if poison {
                arena.poison();
            }
            Ok(Arc::new(Mutex::new(arena)))
        }
    }
}

/// Returns the form of quantized activations. Rows of encoders in Q8_0 are ranged. Decoders keep the eighth bit,
/// which blocks around zero would lose; their steps of few rows wait for memory and not for instructions.
fn activations_of(program: &Program, weights: &Weights) -> Activations {
    let mut quantized =
        weights.matrices.iter().map(|matrix| matrix.format).filter(|format| format.is_quantized());
    let is_ranged = program.bidirectional && quantized.all(|format| format == WeightFormat::Q8_0);
    if is_ranged { Activations::Ranged } else { Activations::Signed }
}

/// Returns the bytes of all packed matrices.
pub fn packed_bytes(program: &Program, weights: &Weights) -> u64 {
    let activations = activations_of(program, weights);
    let bytes = weights.matrices.iter().map(|matrix| PackedMatrix::packed_bytes(matrix, activations) as u64);
    bytes.fold(0, u64::saturating_add)
}
