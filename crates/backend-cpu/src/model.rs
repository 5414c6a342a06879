//! A loaded model: its packed weights, and the kernels that were chosen for them.

use std::sync::Arc;

use paguro_backend::{
    Activation, AttentionMode, InputSquares, Linear, Matrix, MatrixId, Norm, NormKind, Program, VectorId,
};
use paguro_cpu_kernels::{
    attention::AttentionKernels,
    delta::DeltaKernels,
    matrix::{MatrixKernels, PackedMatrix, RowKind},
    ops::RowKernels,
};

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
