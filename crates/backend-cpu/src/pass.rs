//! The leader's view of a step, the phases that are common to layers of several kinds, and the statistics of all phases.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use paguro_backend::{Activation, Dense, KernelCount, KvDtype, Linear, MatrixId, Norm, OutputValue, Step};
use paguro_cpu_kernels::{
    isa::Isa,
    matrix::{Destination, PackedMatrix, RowKind},
    ops,
    pages::Arena,
    quantize::BLOCK,
};

use crate::{
    adapters::{AdaptedRows, Adapters, Changes},
    buffers::{Buffers, MatmulInput, Shared},
    by_expert::RowsByExpert,
    plan::StepPlan,
    states::States,
    thread_pool::{Chunking, ThreadPool},
    worker::{AllPending, Kinds, Model, Pending, Worker, WorkerScratch},
};

/// Rows that a runner multiplies between two pauses at most: a portion of 64 outputs takes some milliseconds.
const PACED_ROWS: usize = 512;

/// Outputs of a row that one worker activates at once: whole blocks of the quantized row.
pub const ACTIVATE_SLICE: usize = 8 * BLOCK;

/// One pass over a step, from the leader's view.
pub struct Pass<'a> {
    pub model: &'a Model,
    pub adapters: &'a Adapters,
    pub buffers: &'a Buffers,
    pub arena: &'a Arena,
    pub states: &'a States,
    pub step: &'a Step<'a>,
    pub plan: &'a StepPlan,
    pub counters: &'a Counters,
    pub pool: &'a mut ThreadPool,
    /// Working memory by thread.
    pub scratch: &'a mut [WorkerScratch],
    /// Rows of each expert.
    pub by_expert: &'a mut RowsByExpert,
    /// From this layer on, only rows with outputs are computed, because no later row reads other data of these layers.
    pub tail: Option<(usize, &'a StepPlan)>,
}

/// The answer to each of the step's outputs.
pub type Answers = [Mutex<Option<OutputValue>>];

impl Pass<'_> {
    /// Returns the number of rows that are computed.
    pub fn rows(&self) -> usize {
        self.plan.rows.len()
    }

    /// Runs a phase, timed on the leader: workers perform `work` for all of `0..count`.
    pub fn phase(
        &mut self,
        kernel: Kernel<'_>,
        count: usize,
        chunking: Chunking,
        work: impl Fn(&mut Worker<'_>, Range<usize>) + Sync,
    ) {
        let start = Instant::now();
        let Self { model, buffers, arena, states, step, plan, .. } = *self;
        self.pool.run_with(self.scratch, count, chunking, |scratch, range| {
            work(&mut Worker { model, buffers, arena, states, step, plan, scratch }, range);
        });
        self.counters.launched(kernel, start.elapsed());
    }

    /// Phase: adds pending branches, norms, and writes the result as input of the next matmuls.
    pub fn add_norm(&mut self, norm: Option<Norm>, pending: AllPending, kinds: Kinds) {
        let hidden = self.model.program.hidden;
        self.phase(Kernel::AddNorm, self.rows(), Chunking::Guided(1), |worker, range| {
            for row in range {
                worker.add_pending(row, pending);
                worker.norm_row(row, norm);
                worker.set_input(&worker.buffers.input, row, 0, &worker.scratch.row[..hidden], kinds, true);
            }
        });
    }

    /// Phase: multiplies `count` rows of the input with several matrices, whose groups of outputs are shared as one
    /// list.
    pub fn multiply<const N: usize>(&mut self, count: usize, linears: [(MatrixId, &Shared<f32>); N]) {
        let plan = self.plan;
        self.multiply_rows(&self.buffers.input, count, &plan.adapted, linears);
    }

    /// Phase: multiplies `count` rows of any input, of which some use adapters. Runners that pause have a phase for each block of rows.
    pub fn multiply_rows<const N: usize>(
        &mut self,
        input: &MatmulInput,
        count: usize,
        adapted: &[AdaptedRows],
        linears: [(MatrixId, &Shared<f32>); N],
    ) {
        let model = self.model;
        self.add_squares(&linears.map(|(id, _)| id), 0, input, 0..count);
        let groups: usize = linears.iter().map(|(id, _)| model.matrix(*id).groups()).sum();
        let ids = linears.map(|(id, _)| id);
        let floats = ids.iter().any(|&id| model.matrix(id).row_kind() == RowKind::Float);
        // The groups that kernels multiply at once. More if the rows exceed the second-level cache, so that a worker
        // reads them less often.
        let unit = match (floats, count) {
            (true, _) => 4,
            (false, ..=64) => 2,
            (false, _) => (groups / (4 * self.pool.threads())).clamp(2, 8),
        };
        let changes = self.adapters.changes(self.step, adapted, &ids);
        let block = if self.pool.pace.is_some() { PACED_ROWS } else { count.max(1) };
        for first in (0..count).step_by(block) {
            let rows = first..count.min(first + block);
            // The first phase also has the adapters' part for all rows.
            let changes = (first == 0).then_some(&changes);
            self.multiply_block(input, rows, linears, (groups, unit), changes);
        }
        self.apply(&changes, input, &linears.map(|(_, out)| out));
    }

    /// Phase: multiplies these rows, in units of `unit` of all `groups` groups of outputs, and all adapted ones of `changes` with the
    /// first matrices of their adapters.
    fn multiply_block<const N: usize>(
        &mut self,
        input: &MatmulInput,
        rows: Range<usize>,
        linears: [(MatrixId, &Shared<f32>); N],
        (groups, unit): (usize, usize),
        changes: Option<&Changes<'_>>,
    ) {
        let (model, ids) = (self.model, linears.map(|(id, _)| id));
        let units = changes.map_or(0, |changes| changes.units(0));
        self.phase(Kernel::Matmul(&ids), units + groups, Chunking::Guided(unit), |worker, range| {
            if let Some(changes) = changes {
                changes.down(0, &range, &model.matmul, input, &mut worker.scratch.matmul);
            }
            let mut offset = units;
            for (id, out) in linears {
                let matrix = model.matrix(id);
                let part = ops::part(&range, offset, matrix.groups());
                offset += matrix.groups();
                let width = matrix.rows();
                let start = rows.start * width;
                let length = out.len().checked_sub(start).expect("the rows are in the buffer");
                // SAFETY: `start` is in the buffer, which is written by group of outputs in this phase, and read by nobody.
                let out = unsafe { Destination::from_raw(out.as_ptr().add(start), length, width) };
                // SAFETY: inputs are only read in this phase.
                let input = unsafe { input.rows(matrix.row_kind(), rows.clone()) };
                matrix.multiply(&model.matmul, 0, input, rows.len(), part, &out, &mut worker.scratch.matmul);
            }
        });
    }

    /// Adds rows of part `part` of matrices to the [sums of squares](paguro_backend::InputSquares), if they are collected.
    /// No phase is open.
    pub fn add_squares(&self, ids: &[MatrixId], part: usize, input: &MatmulInput, rows: Range<usize>) {
        let Some(squares) = &self.model.squares else { return };
        let stride = input.float_stride;
        // SAFETY: no phase is open, so nobody writes.
        let values = unsafe { input.float.get(rows.start * stride..rows.end * stride) };
        ids.iter().for_each(|&id| squares.add(id, part, values, stride));
    }

    /// Phases: A of adapters, except that of the first level, and B.
    fn apply(&mut self, changes: &Changes<'_>, input: &MatmulInput, outs: &[&Shared<f32>]) {
        let model = self.model;
        for level in 0..changes.levels() {
            if level > 0 {
                let units = changes.units(level);
                self.phase(Kernel::AdapterDown, units, Chunking::Guided(1), |worker, range| {
                    changes.down(level, &range, &model.matmul, input, &mut worker.scratch.matmul);
                });
            }
            let groups = changes.groups(level);
            self.phase(Kernel::AdapterUp, groups, Chunking::Guided(4), |worker, range| {
                changes.up(level, &range, &model.matmul, outs, &mut worker.scratch.matmul);
            });
        }
    }

    /// Phase, if there is a bias: adds it, because other rows read this one in the next phase.
    pub fn add_bias(&mut self, linear: Linear, to: &Shared<f32>, width: usize) {
        if linear.bias.is_some() {
            self.phase(Kernel::Bias, self.rows(), Chunking::Guided(4), |worker, range| {
                for row in range {
                    // SAFETY: the phase is shared by row; see the table in `forward.rs`.
                    worker.add_row_bias(linear.bias, unsafe { worker.write(to, row, width) });
                }
            });
        }
    }
}

/// Computes a dense feed-forward network. Returns its output, `[rows, hidden]`.
pub fn dense(pass: &mut Pass<'_>, op: &Dense, pending: AllPending, output: usize) -> Pending {
    pass.add_norm(op.norm, pending, Kinds::of(pass.model, &[op.gate.unwrap_or(op.up), op.up]));
    gated(pass, op.gate, op.up, op.width, op.activation, op.down, output);
    Pending { output, bias: op.down.bias, post_norm: op.post_norm, scale: 1.0 }
}

/// Phases: the matmuls of gate and up, the activation, and the matmul of down.
pub fn gated(
    pass: &mut Pass<'_>,
    gate: Option<Linear>,
    up: Linear,
    width: usize,
    activation: Activation,
    down: Linear,
    output: usize,
) {
    let (model, buffers, rows) = (pass.model, pass.buffers, pass.rows());
    match gate {
        Some(gate) => pass.multiply(rows, [(gate.matrix, &buffers.gate), (up.matrix, &buffers.up)]),
        None => pass.multiply(rows, [(up.matrix, &buffers.up)]),
    }
    let slices = width.div_ceil(ACTIVATE_SLICE);
    let kinds = Kinds::of(model, &[down]);
    pass.phase(Kernel::Activate, rows * slices, Chunking::Guided(slices.div_ceil(4)), |worker, range| {
        for unit in range {
            let (row, first) = (unit / slices, unit % slices * ACTIVATE_SLICE);
            let end = width.min(first + ACTIVATE_SLICE);
            let at = row * width + first..row * width + end;
            // SAFETY: only this worker has this slice of this row in this phase.
            let (gates, ups) = unsafe { (buffers.gate.get_mut(at.clone()), buffers.up.get_mut(at)) };
            let bias = |linear: Linear| linear.bias.map(|bias| &model.vector(bias)[first..end]);
            let gates = gate.map(|gate| (gates, bias(gate)));
            let active = model.activate(gates, (ups, bias(up)), activation);
            worker.set_input(&buffers.input, row, first, active, kinds, end == width);
        }
    });
    pass.multiply(rows, [(down.matrix, &buffers.branch_outputs[output])]);
}

/// Sets an answer.
pub fn put(answer: &Mutex<Option<OutputValue>>, outcome: OutputValue) {
    *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
}

/// Declares the phases of the forward pass with their names in the statistics.
macro_rules! kernels {
    ($($kernel:ident = $name:literal,)*) => {
        /// A phase of the forward pass.
        #[derive(Clone, Copy, Debug)]
        pub enum Kernel<'a> {
            $($kernel,)*
            /// Matmuls of these matrices, by the kernels of their formats.
            Matmul(&'a [MatrixId]),
        }

        const NAMES: &[&str] = &[$($name),*];

        /// Returns the index of a phase in [`NAMES`]; `None` for matmuls.
        fn index(kernel: Kernel<'_>) -> Option<usize> {
            enum Index { $($kernel),* }
            match kernel {
                $(Kernel::$kernel => Some(Index::$kernel as usize),)*
                Kernel::Matmul(_) => None,
            }
        }
    };
}

kernels! {
    Embed = "embed",                           // Embedding lookup, and the rotations' angles.
    AddNorm = "add_norm_quantize",             // Residual add, norm, quantization.
    RopeStore = "rope_store",                  // Bias, head norm, rotation, store into the pages.
    Attend = "attend",                         // Paged attention.
    AttendMerge = "attend_merge",              // Sum of splits that workers shared.
    AttendGather = "attend_gather",            // Attention the reference way.
    Quantize = "quantize",                     // Quantization of attention's output.
    Activate = "activate_quantize",            // Activation, gate times up, quantization.
    QkNorm = "qk_norm",                        // Norms of whole rows of queries and keys.
    Route = "route",                           // Choice of experts.
    Sort = "sort_rows",                        // Rows in the order of their experts.
    Combine = "combine",                       // Sum of a row's experts.
    Sample = "sample",                         // Sampling and log-probabilities.
    Convolve = "convolve",                     // Convolution, activation and norms.
    Delta = "delta_rule",                      // The delta rule.
    Scan = "scan",                             // The scan of Mamba-2.
    ScanDots = "scan_dots",                    // Products of a scan's C and B.
    NormGate = "norm_gate_quantize",           // Norm and gate of a delta rule's results, quantization.
    Keep = "keep_state",                       // Copies of a step's last rows into the states.
    CombineLatent = "combine_latent_quantize", // Sum of a row's experts of their own width, quantization.
    Bias = "bias",                             // Bias of a convolution's inputs.
    LayerEmbed = "layer_embed",                // Embeddings for layers, from their table and a projection.
    LayerInput = "layer_input_quantize",       // Activation of an input of a layer, times its embedding; quantization.
    LatentSplit = "latent_split_quantize",     // Heads of queries in the order of latent attention's matrices, quantization.
    LatentStore = "latent_store",              // Rotation of absorbed queries and of the latent vector, store into the pages.
    LatentValues = "latent_values_quantize",   // Heads of latent attention's results, quantization.
    LatentJoin = "latent_join_quantize",       // Rows of these heads, quantization.
    AdapterDown = "adapter_down",              // Products of rows with A of adapters, where they are not computed beside the matmul.
    AdapterUp = "adapter_up",                  // Products with B of adapters, added to the outputs of a matmul.
}

#[derive(Default)]
struct Count {
    launches: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Count {
    fn add(&self, time: Duration) {
        self.launches.fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Relaxed);
    }
}

/// Counts since load.
pub struct Counters {
    isa: Isa,
    kv_dtype: KvDtype,
    fixed: [Count; NAMES.len()],
    /// Counts by weight format.
    matmuls: Vec<(String, Count)>,
    /// Index into `matmuls` and bytes, by matrix.
    matrices: Vec<(usize, u64)>,
}

impl Counters {
    /// For these matrices and pages.
    pub fn new(isa: Isa, kv_dtype: KvDtype, matrices: &[Arc<PackedMatrix>]) -> Self {
        let mut matmuls: Vec<(String, Count)> = Vec::new();
        let matrices = matrices.iter().map(|matrix| {
            let name = matrix.kernel_name(isa);
            let index = matmuls.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
                matmuls.push((name, Count::default()));
                matmuls.len() - 1
            });
            (index, matrix.bytes() as u64)
        });
        let matrices = matrices.collect();
        Self { isa, kv_dtype, fixed: Default::default(), matmuls, matrices }
    }

    /// Records one launch. The time of several matmuls in one phase is divided by the bytes that they read.
    pub fn launched(&self, kernel: Kernel<'_>, time: Duration) {
        if let Some(index) = index(kernel) {
            return self.fixed[index].add(time);
        }
        let Kernel::Matmul(ids) = kernel else { return };
        let matrix = |id: &MatrixId| self.matrices[id.0 as usize];
        let total: u64 = ids.iter().map(|id| matrix(id).1).sum();
        for id in ids {
            let (index, bytes) = matrix(id);
            self.matmuls[index].1.add(time.mul_f64(bytes as f64 / total as f64));
        }
    }

    /// Returns the kernels that ran.
    pub fn snapshot(&self) -> Vec<KernelCount> {
        let isa = self.isa;
        let fixed = NAMES.iter().zip(&self.fixed).map(|(&name, count)| {
            let kind = match (name, self.kv_dtype) {
                ("rope_store" | "attend" | "attend_gather", KvDtype::Q8) => "_q8",
                ("rope_store" | "attend" | "attend_gather", KvDtype::Q4) => "_q4",
                _ => "",
            };
            (format!("{name}{kind}/{isa}"), count)
        });
        let matmuls = self.matmuls.iter().map(|(name, count)| (name.clone(), count));
        let counts = matmuls.chain(fixed).map(|(name, count)| KernelCount {
            name,
            launches: count.launches.load(Relaxed),
            nanoseconds: count.nanoseconds.load(Relaxed),
        });
        counts.filter(|count| count.launches > 0).collect()
    }
}
