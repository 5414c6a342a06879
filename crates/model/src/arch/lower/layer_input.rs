//! Gemma 4's embeddings for layers, and the operations at the end of its layers.

use paguro_backend::{LayerEmbeds, LayerInput, Norm};

use super::{Lowering, Part};
use crate::error::ModelError;

impl Lowering<'_, '_> {
    /// Returns the embeddings of `vocab` tokens, with `width` elements for each layer.
    ///
    /// The model's definition is `(norm(x·Wᵀ / sqrt(hidden)) + sqrt(width) * table[token]) / sqrt(2)`. The norm divides
    /// by the root of a mean, so the first factor becomes one of its epsilon; the last one is applied to both summands.
    pub(super) fn layer_embeds(&mut self, vocab: usize, width: usize) -> Result<LayerEmbeds, ModelError> {
        let (hidden, count) = (self.config.hidden, self.config.layers.len());
        let name = |part| format!("{}.weight", self.names.model(part));
        let [table, projection, norm] =
            [Part::LayerEmbeds, Part::LayerProjection, Part::LayerProjectionNorm].map(name);
        let table = self.tensors.require_matrix(&table, vocab, count * width)?;
        let projection = self.tensors.require_matrix(&projection, count * width, hidden)?;
        let half = std::f32::consts::FRAC_1_SQRT_2;
        let mut weight = self.tensors.require_vector(&norm, width)?;
        weight.iter_mut().for_each(|weight| *weight *= half);
        let weight = self.tensors.add_vector(weight);
        let eps = self.config.norm_eps * hidden as f32;
        Ok(LayerEmbeds {
            table: self.tensors.add_table(table),
            scale: (width as f32).sqrt() * half,
            count,
            width,
            projection: paguro_backend::Linear {
                matrix: self.tensors.add_matrix(projection),
                bias: None,
                bounds: None,
            },
            norm: Norm { kind: self.config.block.norms, weight, bias: None, eps },
        })
    }

    /// Returns the matrices by which a layer's own embedding enters the residual stream.
    pub(super) fn layer_input(&mut self, layer: usize, width: usize) -> Result<LayerInput, ModelError> {
        let hidden = self.config.hidden;
        Ok(LayerInput {
            index: layer,
            gate: self.linear(layer, Part::InputGate, width, hidden)?,
            activation: self.config.block.activation,
            out: self.linear(layer, Part::InputOut, hidden, width)?,
            post_norm: Some(self.norm(&self.names.layer(layer, Part::PostInputNorm), hidden)?),
        })
    }

    /// Returns the scale of a layer's output, one if the file has none.
    pub(super) fn output_scale(&mut self, layer: usize) -> Result<f32, ModelError> {
        let scale = self.tensors.vector(&self.names.layer(layer, Part::OutputScale), 1)?;
        Ok(scale.map_or(1.0, |scale| scale[0]))
    }
}
