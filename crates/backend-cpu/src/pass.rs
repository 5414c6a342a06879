//! The leader's view of a step, and the phases that are common to layers of several kinds.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use paguro_backend::{Linear, MatrixId, Norm, OutputValue, Step};
use paguro_cpu_kernels::{
    matrix::{Destination, RowKind},
    ops,
    pages::Arena,
};

use crate::{
    adapters::{AdaptedRows, Adapters, Changes},
    buffers::Buffers,
    by_expert::RowsByExpert,
    counters::{Counters, Kernel},
    model::{Kinds, Model},
    plan::StepPlan,
    shared::{MatmulInput, Shared},
    states::States,
    thread_pool::{Chunking, ThreadPool},
    worker::{AllPending, Worker, WorkerScratch},
};

/// Rows that a runner multiplies between two pauses at most: a portion of 64 outputs takes some milliseconds.
const PACED_ROWS: usize = 512;

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

/// Sets an answer.
pub fn put(answer: &Mutex<Option<OutputValue>>, outcome: OutputValue) {
    *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
}
