//! A worker: one thread of the pool in a phase, with its working memory and the loaded model.

use std::sync::Arc;

use paguro_backend::{
    Activation, AttentionMode, Embed, InputSquares, Linear, Matrix, MatrixId, Norm, NormKind, OutputValue,
    Program, Step, VectorId, sampling,
};
use paguro_cpu_kernels::{
    attention::{AttentionKernels, Scores},
    delta::{DeltaKernels, DeltaScratch},
    matrix::{MatrixKernels, PackedMatrix, RowKind, Scratch},
    ops::RowKernels,
    pages::{Arena, StoredHead},
    quantize::{BLOCK, row_blocks},
};

use crate::{
    buffers::{Buffers, MatmulInput, Shared},
    plan::StepPlan,
    states::States,
};

/// Working memory of a worker.
pub struct WorkerScratch {
    /// Scratch of matmuls.
    pub matmul: Scratch,
    /// Scores of a few queries over a split.
    pub scores: Box<Scores>,
    /// Partial attention of a tile's queries over one split.
    pub partial: Vec<f32>,
    /// Scores and partial results, summed over splits.
    pub sums: Vec<f32>,
    /// A row, `[widest]`.
    pub row: Vec<f32>,
    /// K or V of one head.
    pub stored: StoredHead,
    /// Scratch of the sampler.
    pub sampler: sampling::Scratch,
    /// Scratch of the delta rule.
    pub delta: DeltaScratch,
    /// An input of a short convolution.
    pub conv_input: Vec<f32>,
    /// Sum of a row's experts, where a dense network is beside them.
    pub sum: Vec<f32>,
    /// A row of a table, encoded.
    pub encoded: Vec<u8>,
    /// The decoded row.
    pub embeds: Vec<f32>,
}

/// The output of a branch that has not been added to the residual stream yet: the next phase that norms a row adds it.
#[derive(Clone, Copy)]
pub struct Pending {
    /// Index into [`Buffers::branch_outputs`].
    pub output: usize,
    pub bias: Option<VectorId>,
    pub post_norm: Option<Norm>,
    pub scale: f32,
}

/// Outputs of branches that are not in the residual stream yet. The next phase that norms a row adds them.
#[derive(Clone, Copy)]
pub struct AllPending {
    /// At most one for each branch of a layer.
    pub branches: [Option<Pending>; 2],
    /// Norm of the stream after that.
    pub norm: Option<Norm>,
    /// Multiplies the stream at the end.
    pub scale: f32,
}

impl AllPending {
    /// No branches.
    pub const NONE: Self = Self { branches: [None; 2], norm: None, scale: 1.0 };

    /// Returns one branch.
    pub fn of(branch: Pending) -> Self {
        Self { branches: [Some(branch), None], ..Self::NONE }
    }
}

/// The model and its kernels; only `adapted` changes after load.
pub struct Model {
    /// The program.
    pub program: Program,
    /// Matrices by [`MatrixId`].
    pub matrices: Vec<Arc<PackedMatrix>>,
    /// Vectors by [`VectorId`].
    pub vectors: Vec<Vec<f32>>,
    /// Tables by [`TableId`](paguro_backend::TableId).
    pub tables: Vec<Matrix>,
    /// Cosines and sines of a rope and row, at most.
    pub rope_stride: usize,
    /// Paged or gathered.
    pub attention: AttentionMode,
    /// Matmuls.
    pub matmul: MatrixKernels,
    /// Row operations.
    pub rows: RowKernels,
    /// Attention.
    pub attend: AttentionKernels,
    /// Mixers with a state.
    pub delta: DeltaKernels,
    /// Receives the squares of all inputs of matrices.
    pub squares: Option<Arc<InputSquares>>,
    /// True if rows of the step use adapters, which multiply rows in floats.
    pub adapted: bool,
}

impl Model {
    pub fn matrix(&self, id: MatrixId) -> &PackedMatrix {
        &self.matrices[id.0 as usize]
    }

    pub fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    /// Adds biases and applies the activation; returns where the result is.
    pub fn activate<'a>(
        &self,
        gate: Option<(&'a mut [f32], Option<&[f32]>)>,
        (up, up_bias): (&'a mut [f32], Option<&[f32]>),
        activation: Activation,
    ) -> &'a mut [f32] {
        if let Some(bias) = up_bias {
            self.rows.add(up, bias);
        }
        let Some((gate, gate_bias)) = gate else {
            self.rows.activate(up, activation);
            return up;
        };
        if let Some(bias) = gate_bias {
            self.rows.add(gate, bias);
        }
        self.rows.activate_gate(gate, up, activation);
        gate
    }

    /// `out = norm(x)`, a copy without a norm; both of its width.
    pub fn norm(&self, norm: Option<Norm>, x: &[f32], out: &mut [f32]) {
        let Some(norm) = norm else { return out.copy_from_slice(x) };
        let weight = self.vector(norm.weight);
        match norm.kind {
            NormKind::Rms => self.rows.rms_norm(x, weight, norm.eps, out),
            NormKind::Layer => self.rows.layer_norm(x, weight, norm.eps, out),
        }
        if let Some(bias) = norm.bias {
            self.rows.add(out, self.vector(bias));
        }
    }
}

/// Forms of a matmul's input: matrices of one operation may differ.
#[derive(Clone, Copy)]
pub struct Kinds {
    pub quantized: bool,
    pub float: bool,
}

impl Kinds {
    /// Returns the forms that both need.
    pub fn and(self, other: Self) -> Self {
        Self { quantized: self.quantized || other.quantized, float: self.float || other.float }
    }

    pub fn of(model: &Model, linears: &[Linear]) -> Self {
        let any = |kind| linears.iter().any(|linear| model.matrix(linear.matrix).row_kind() == kind);
        // Squares are those of rows before they are quantized.
        let float = any(RowKind::Float) || model.adapted || model.squares.is_some();
        Self { quantized: any(RowKind::Quantized), float }
    }
}

/// A worker in a phase.
pub struct Worker<'a> {
    pub model: &'a Model,
    pub buffers: &'a Buffers,
    pub arena: &'a Arena,
    pub states: &'a States,
    pub step: &'a Step<'a>,
    pub plan: &'a StepPlan,
    pub scratch: &'a mut WorkerScratch,
}

impl Worker<'_> {
    /// Returns a row of a buffer.
    ///
    /// # Safety
    /// No other worker writes the row in this phase, and this worker does not while the slice lives.
    pub unsafe fn read<'b>(&self, buffer: &'b Shared<f32>, row: usize, width: usize) -> &'b [f32] {
        // SAFETY: the caller keeps writers away.
        unsafe { buffer.get(row * width..(row + 1) * width) }
    }

    /// Returns a row of a buffer, or a head of one, to write.
    ///
    /// # Safety
    /// No other worker reads or writes the row in this phase, and this worker has no other slice of it.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn write<'b>(&self, buffer: &'b Shared<f32>, row: usize, width: usize) -> &'b mut [f32] {
        // SAFETY: the caller keeps all others away.
        unsafe { buffer.get_mut(row * width..(row + 1) * width) }
    }

    /// Returns a part of a given row, `[hidden]`, or the row that is joined with an embedding.
    pub fn given(&self, row: usize, part: usize) -> Option<&[f32]> {
        let (width, parts) = (self.model.program.part_width(), self.model.program.given_parts);
        let given = self.step.given_row(self.plan.rows[row], parts * width)?;
        Some(&given[part * width..][..width])
    }

    /// Bias and norm of a whole row, in place.
    pub fn finish_row(&mut self, x: &mut [f32], bias: Option<VectorId>, norm: Norm) {
        let model = self.model;
        if let Some(bias) = bias {
            model.rows.add(x, model.vector(bias));
        }
        let normed = &mut self.scratch.row[..x.len()];
        model.norm(Some(norm), x, normed);
        x.copy_from_slice(normed);
    }

    /// Adds a bias to a row, if there is one.
    pub fn add_row_bias(&self, bias: Option<VectorId>, x: &mut [f32]) {
        if let Some(bias) = bias {
            self.model.rows.add(x, self.model.vector(bias));
        }
    }

    /// Writes the embedding of a row's token.
    pub fn embed(&mut self, op: &Embed, row: usize, x: &mut [f32]) {
        let Embed { table, scale, positions, types, norm, layers: _, joined: _ } = op;
        let model = self.model;
        let id = self.step.tokens[row] as usize;
        let (kind, token) = (id / model.program.vocab, id % model.program.vocab);
        model.matrix(*table).dequantize_row(token, x);
        if *scale != 1.0 {
            model.rows.scale(x, *scale);
        }
        if let Some(positions) = positions {
            let learned = &mut self.scratch.row[..x.len()];
            model.matrix(positions.table).dequantize_row(self.plan.positions[row], learned);
            model.rows.add(x, learned);
        }
        if let Some(types) = types {
            model.rows.add(x, &model.vector(types.table)[kind * x.len()..][..x.len()]);
        }
        if let Some(norm) = *norm {
            self.finish_row(x, None, norm);
        }
    }

    /// Returns a row of the residual stream, to which nothing is pending.
    pub fn residual(&self, row: usize) -> OutputValue {
        // SAFETY: no other worker writes it in this phase; see the table in `forward.rs`.
        OutputValue::Residual(unsafe { self.read(&self.buffers.x, row, self.model.program.hidden) }.to_vec())
    }

    /// Adds pending branches to a row of the residual stream.
    pub fn add_pending(&mut self, row: usize, pending: AllPending) {
        let (model, buffers) = (self.model, self.buffers);
        let hidden = model.program.hidden;
        for Pending { output, bias, post_norm, scale } in pending.branches.into_iter().flatten() {
            // SAFETY: phases that norm rows are shared by row; see the table in `forward.rs`.
            let x = unsafe { self.write(&buffers.x, row, hidden) };
            // SAFETY: phases that norm rows are shared by row; see the table in `forward.rs`.
            let output = unsafe { self.write(&buffers.branch_outputs[output], row, hidden) };
            if let Some(bias) = bias {
                model.rows.add(output, model.vector(bias));
            }
            let added = match post_norm {
                Some(_) => {
                    let normed = &mut self.scratch.row[..hidden];
                    model.norm(post_norm, output, normed);
                    normed
                }
                None => output,
            };
            match scale {
                1.0 => model.rows.add(x, added),
                scale => model.rows.add_scaled(x, added, scale),
            }
        }
        if let Some(norm) = pending.norm {
            // SAFETY: phases that norm rows are shared by row; see the table in `forward.rs`.
            self.finish_row(unsafe { self.write(&buffers.x, row, hidden) }, None, norm);
        }
        if pending.scale != 1.0 {
            // SAFETY: phases that norm rows are shared by row; see the table in `forward.rs`.
            model.rows.scale(unsafe { self.write(&buffers.x, row, hidden) }, pending.scale);
        }
    }

    /// Makes `input`, whose first element is number `first` of row `row`, a multiple of the block, part of the next
    /// matmul's input. The last part also fills the padding of the row.
    pub fn set_input(
        &self,
        to: &MatmulInput,
        row: usize,
        first: usize,
        input: &[f32],
        kinds: Kinds,
        last: bool,
    ) {
        if kinds.quantized {
            let start = row * to.quantized_stride + first / BLOCK;
            let end = match last {
                true => row * to.quantized_stride + row_blocks(first + input.len()),
                false => start + input.len() / BLOCK,
            };
            // SAFETY: only this worker has this slice of this row in this phase.
            let out = unsafe { to.quantized.get_mut(start..end) };
            self.model.matmul.quantize_row(input, out);
        }
        if kinds.float {
            let start = row * to.float_stride + first;
            // SAFETY: as above.
            unsafe { to.float.get_mut(start..start + input.len()) }.copy_from_slice(input);
        }
    }

    pub fn norm_row(&mut self, row: usize, norm: Option<Norm>) {
        let (model, hidden) = (self.model, self.model.program.hidden);
        // SAFETY: no other worker writes it in this phase; see the table in `forward.rs`.
        let x = unsafe { self.read(&self.buffers.x, row, hidden) };
        model.norm(norm, x, &mut self.scratch.row[..hidden]);
    }
}
