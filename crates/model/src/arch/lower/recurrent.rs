//! Mixers with a state.

use std::ops::Range;

use paguro_backend::{
    Convolution, DROPPABLE_ROWS, DeltaRule, DeltaShape, KeySharing, Linear, Matrix, Mixer, Norm, NormKind,
    ShortConv, StateLayout, StateShape,
};

use super::{Lowering, Part};
use crate::{
    arch::{Config, DeltaFiles, Recurrent, SsdConfig},
    error::ModelError,
    rearrange::join,
};

/// States of the layers of a model.
pub(super) fn states(config: &Config) -> StateLayout {
    let shape = match config.recurrent {
        None => return StateLayout::default(),
        Some(Recurrent::Conv { taps }) => {
            StateShape { rows: taps - 1 + DROPPABLE_ROWS, channels: config.hidden, delta: None }
        }
        Some(Recurrent::Delta { taps, shape, .. } | Recurrent::Ssd(SsdConfig { taps, shape, .. })) => {
            StateShape { rows: taps - 1 + DROPPABLE_ROWS, channels: shape.channels(), delta: Some(shape) }
        }
    };
    let layers = config.layers.iter().filter(|layer| layer.recurrent);
    StateLayout { layers: layers.map(|_| shape).collect() }
}

impl Lowering<'_, '_> {
    /// Returns the mixer of a layer with state number `state`.
    pub(super) fn recurrent(
        &mut self,
        layer: usize,
        recurrent: Recurrent,
        state: usize,
    ) -> Result<Mixer, ModelError> {
        match recurrent {
            Recurrent::Conv { taps } => self.short_conv(layer, taps, state).map(Mixer::Conv),
            Recurrent::Delta { taps, shape, files } => {
                self.delta_rule(layer, taps, shape, files, state).map(Mixer::DeltaRule)
            }
            Recurrent::Ssd(config) => {
                let norm = self.norm_if(true, layer, Part::AttentionNorm)?;
                Ok(Mixer::Ssd(Box::new(self.ssd(layer, &config, norm, state)?)))
            }
        }
    }

    fn short_conv(&mut self, layer: usize, taps: usize, state: usize) -> Result<ShortConv, ModelError> {
        let hidden = self.config.hidden;
        Ok(ShortConv {
            norm: self.norm_if(true, layer, Part::AttentionNorm)?,
            width: hidden,
            input: self.linear(layer, Part::ConvIn, 3 * hidden, hidden)?,
            convolution: self.convolution(layer, taps, hidden)?,
            out: self.linear(layer, Part::ConvOut, hidden, hidden)?,
            post_norm: None,
            state,
        })
    }

    fn delta_rule(
        &mut self,
        layer: usize,
        taps: usize,
        shape: DeltaShape,
        files: DeltaFiles,
        state: usize,
    ) -> Result<DeltaRule, ModelError> {
        let (hidden, heads) = (self.config.hidden, shape.value_heads);
        let norm = self.norm_if(true, layer, Part::AttentionNorm)?;
        let fused = self.names.layer(layer, Part::DeltaQkvZ);
        let [qkv, gate] = match self.tensors.has(&format!("{fused}.weight")) {
            true => self.split_by_key_head(&fused, &shape)?,
            false => [
                self.linear(layer, Part::DeltaQkv, shape.channels(), hidden)?,
                self.linear(layer, Part::DeltaGate, shape.value_width(), hidden)?,
            ],
        };
        let fused = self.names.layer(layer, Part::DeltaBetaAlpha);
        let [beta, alpha] = match self.tensors.has(&format!("{fused}.weight")) {
            true => {
                let len = heads / shape.key_heads;
                let part =
                    |part: usize| Rows { first: part * len, len, step: 2 * len, count: shape.key_heads };
                self.pick_rows(&fused, 2 * heads, [&[part(0)], &[part(1)]])?
            }
            false => {
                let beta = self.linear(layer, Part::DeltaBeta, heads, hidden)?;
                [beta, self.linear(layer, Part::DeltaAlpha, heads, hidden)?]
            }
        };
        let is_hf = self.names.is_hf();
        // In neither file format do these names have the suffix of a weight.
        let decay = self.decays(layer, heads)?;
        let dt = self.names.layer(layer, Part::DeltaDt);
        let dt = self.tensors.require_vector(&dt, heads)?;
        let out_norm = format!("{}.weight", self.names.layer(layer, Part::DeltaNorm));
        let out_norm = self.tensors.require_vector(&out_norm, shape.value_dim)?;
        Ok(DeltaRule {
            norm,
            shape,
            sharing: if files.alternating && !is_hf {
                KeySharing::Alternating
            } else {
                KeySharing::Consecutive
            },
            qkv,
            gate,
            alpha,
            beta,
            convolution: self.convolution(layer, taps, shape.channels())?,
            decay: self.tensors.add_vector(decay),
            dt: self.tensors.add_vector(dt),
            out_norm: Norm {
                kind: NormKind::Rms,
                weight: self.tensors.add_vector(out_norm),
                bias: None,
                eps: self.config.norm_eps,
            },
            out: self.linear(layer, Part::DeltaOut, hidden, shape.value_width())?,
            post_norm: None,
            state,
        })
    }

    /// Returns a convolution, of which files have the channels one after the other.
    fn convolution(&mut self, layer: usize, taps: usize, channels: usize) -> Result<Convolution, ModelError> {
        let name = self.names.layer(layer, Part::Conv);
        let weight = format!("{name}.weight");
        let by_channel = match self.names.is_hf() {
            true => self.tensors.values(&weight, &[channels, 1, taps])?,
            false => self.tensors.values(&weight, &[channels, taps])?,
        };
        let weight = (0..taps * channels).map(|index| by_channel[index % channels * taps + index / channels]);
        let weight = weight.collect();
        let bias = self.tensors.vector(&format!("{name}.bias"), channels)?;
        Ok(Convolution {
            taps,
            weight: self.tensors.add_vector(weight),
            bias: bias.map(|bias| self.tensors.add_vector(bias)),
        })
    }

    /// Queries, keys and values, and gates, of a matrix that has them key head by key head.
    fn split_by_key_head(&mut self, name: &str, shape: &DeltaShape) -> Result<[Linear; 2], ModelError> {
        let values = shape.value_width() / shape.key_heads;
        let step = 2 * (shape.key_dim + values);
        let part = |first: usize, len: usize| Rows { first, len, step, count: shape.key_heads };
        let (queries, keys) = (part(0, shape.key_dim), part(shape.key_dim, shape.key_dim));
        let (values, gates) = (part(2 * shape.key_dim, values), part(2 * shape.key_dim + values, values));
        self.pick_rows(name, step * shape.key_heads, [&[queries, keys, values], &[gates]])
    }

    /// Matrices made of some of the rows of the matrix `name`, `[rows, hidden]`, with its bias.
    pub(super) fn pick_rows<const N: usize>(
        &mut self,
        name: &str,
        rows: usize,
        parts: [&[Rows]; N],
    ) -> Result<[Linear; N], ModelError> {
        let hidden = self.config.hidden;
        let whole = self.matrix(&format!("{name}.weight"), rows, hidden)?;
        let bias = self.tensors.vector(&format!("{name}.bias"), rows)?;
        let row_bytes = whole.format.row_bytes(hidden);
        let mut index = 0;
        Ok(parts.map(|parts| {
            let ranges = || parts.iter().flat_map(Rows::ranges);
            let piece =
                |range: Range<usize>| whole.bytes.slice(range.start * row_bytes..range.end * row_bytes);
            let matrix = Matrix {
                name: format!("{}[{index}]", whole.name),
                rows: ranges().map(|range| range.len()).sum(),
                bytes: join(ranges().map(piece).collect()),
                ..whole.clone()
            };
            index += 1;
            let bias = bias.as_ref().map(|bias| {
                let bias = ranges().flat_map(|range| bias[range].to_vec()).collect();
                self.tensors.add_vector(bias)
            });
            Linear { matrix: self.tensors.add_matrix(matrix), bias, bounds: None }
        }))
    }
}

/// Rows `first..first + len` of a matrix, repeated `count` times at a distance of `step` rows.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) step: usize,
    pub(super) count: usize,
}

impl Rows {
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Self { first, len, step, count } = *self;
        (0..count).map(move |index| first + index * step..first + index * step + len)
    }
}
