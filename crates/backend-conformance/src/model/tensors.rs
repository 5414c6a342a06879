//! Random tensors, and the operations that consist of one.

use paguro_backend::{Bytes, Convolution, Linear, Matrix, MatrixId, Norm, NormKind, Rope, VectorId};

use super::{Biases, ExpertsShape, RecurrentShape, builder::Builder};
use crate::random::random_matrix;

/// Elements of the residual stream that stable routers read.
const CODE: usize = 16;

impl Builder<'_> {
    pub(super) fn convolution(&mut self, channels: usize) -> Convolution {
        let RecurrentShape { taps, bias, .. } = self.shape.recurrent;
        let rms = 1.0 / (taps as f32).sqrt();
        let weight = (0..taps * channels).map(|_| rms * self.rng.normal()).collect();
        let bias = bias.then(|| (0..channels).map(|_| 0.3 * self.rng.normal()).collect());
        Convolution { taps, weight: self.vector(weight), bias: bias.map(|bias| self.vector(bias)) }
    }

    pub(super) fn router(&mut self, name: &str, experts: &ExpertsShape, bias: bool) -> Linear {
        let hidden = self.shape.hidden;
        let read = if experts.stable { CODE.min(hidden) } else { hidden };
        let gain = 2.0 / (read as f32).sqrt();
        let weight = |(index, noise): (usize, f32)| if index % hidden < read { gain * noise } else { 0.0 };
        let values: Vec<f32> =
            (0..experts.count * hidden).map(|index| weight((index, self.rng.normal()))).collect();
        let bytes = experts.router.quantize(&values).expect("plain formats have encoders");
        self.weights.matrices.push(Matrix {
            name: name.to_owned(),
            format: experts.router,
            parts: 1,
            rows: experts.count,
            cols: hidden,
            bytes: Bytes::from(bytes),
        });
        let bias = bias.then(|| (0..experts.count).map(|_| 0.5 * self.rng.normal()).collect());
        Linear {
            matrix: MatrixId(self.weights.matrices.len() as u32 - 1),
            bias: bias.map(|bias| self.vector(bias)),
            bounds: None,
        }
    }

    pub(super) fn rope(&self, base: f32, head_dim: usize) -> Rope {
        let rotated = self.shape.rotated.unwrap_or(head_dim);
        let frequency = |pair: usize| base.powf(-2.0 * pair as f32 / rotated as f32);
        Rope {
            style: self.shape.rope_style,
            frequencies: (0..rotated / 2).map(frequency).collect(),
            axes: match self.shape.axes {
                [] => Vec::new(),
                axes => axes.iter().copied().cycle().take(rotated / 2).collect(),
            },
            magnitude: self.shape.rope_magnitude,
        }
    }

    pub(super) fn pre_norm(&mut self) -> Option<Norm> {
        self.shape.pre_norms.then(|| self.norm(self.shape.hidden))
    }

    pub(crate) fn norm(&mut self, width: usize) -> Norm {
        let norm = self.rms_norm(width);
        match self.shape.norms {
            NormKind::Rms => norm,
            NormKind::Layer => {
                let bias = (0..width).map(|_| 0.2 * self.rng.normal()).collect();
                Norm { kind: NormKind::Layer, bias: Some(self.vector(bias)), ..norm }
            }
        }
    }

    pub(super) fn rms_norm(&mut self, width: usize) -> Norm {
        let weight = (0..width).map(|_| 1.0 + 0.2 * self.rng.normal()).collect();
        // Large enough that a forgotten eps shows.
        Norm { kind: NormKind::Rms, weight: self.vector(weight), bias: None, eps: 0.05 }
    }

    pub(crate) fn linear(&mut self, name: &str, rows: usize, cols: usize, gain: f32, bias: bool) -> Linear {
        self.stack(name, 1, rows, cols, gain, bias)
    }

    pub(super) fn stack(
        &mut self,
        name: &str,
        parts: usize,
        rows: usize,
        cols: usize,
        gain: f32,
        bias: bool,
    ) -> Linear {
        let matrix = self.matrix(name, parts, rows, cols, gain / (cols as f32).sqrt());
        let bias = bias.then(|| (0..parts * rows).map(|_| 0.5 * self.rng.normal()).collect());
        Linear { matrix, bias: bias.map(|bias| self.vector(bias)), bounds: None }
    }

    /// Matrices whose outputs are added to the residual stream: nothing to the elements that stable routers read.
    pub(super) fn onto_stream(&mut self, name: &str, parts: usize, cols: usize) -> Linear {
        let hidden = self.shape.hidden;
        let linear = self.stack(name, parts, hidden, cols, 1.0, self.shape.biases == Biases::All);
        if self.shape.experts.is_some_and(|experts| experts.stable) {
            let matrix = &mut self.weights.matrices[linear.matrix.0 as usize];
            let part_bytes = hidden * matrix.format.row_bytes(cols);
            let mut bytes = matrix.bytes.read().expect("in memory").into_owned();
            for part in bytes.chunks_exact_mut(part_bytes) {
                // Zeros decode to zeros in all formats.
                part[..CODE.min(hidden) * matrix.format.row_bytes(cols)].fill(0);
            }
            matrix.bytes = Bytes::from(bytes);
            if let Some(bias) = linear.bias {
                let bias = &mut self.weights.vectors[bias.0 as usize];
                bias.chunks_exact_mut(hidden).for_each(|bias| bias[..CODE.min(hidden)].fill(0.0));
            }
        }
        linear
    }

    /// Random numbers around one.
    pub(crate) fn values(&mut self, len: usize) -> VectorId {
        let values = (0..len).map(|_| 1.0 + 0.3 * self.rng.normal()).collect();
        self.vector(values)
    }

    pub(super) fn vector(&mut self, vector: Vec<f32>) -> VectorId {
        self.weights.vectors.push(vector);
        VectorId(self.weights.vectors.len() as u32 - 1)
    }

    pub(super) fn matrix(
        &mut self,
        name: &str,
        parts: usize,
        rows: usize,
        cols: usize,
        rms: f32,
    ) -> MatrixId {
        let is_finer = name.ends_with(" v") || name.ends_with(" down");
        let format = self.shape.finer.filter(|_| is_finer).unwrap_or(self.shape.format);
        let matrix = random_matrix(name, format, parts * rows, cols, rms, &mut self.rng);
        self.weights.matrices.push(Matrix { parts, rows, ..matrix });
        MatrixId(self.weights.matrices.len() as u32 - 1)
    }
}
