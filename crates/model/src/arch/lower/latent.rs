//! Latent attention.

use paguro_backend::{KvSlot, Latent, LatentQuery, LatentShape, Linear, Matrix, Norm};

use super::{Lowering, Part};
use crate::{
    arch::FLOATS,
    error::ModelError,
    rearrange::{Transpose, join},
};

/// The epsilon of the norms within latent attention, which is none of the configuration's.
const EPS: f32 = 1e-6;

impl Lowering<'_, '_> {
    pub(super) fn latent(
        &mut self,
        layer: usize,
        shape: LatentShape,
        rank: Option<usize>,
        kv: KvSlot,
    ) -> Result<Latent, ModelError> {
        let (hidden, block) = (self.config.hidden, self.config.block);
        let query = match rank {
            None => LatentQuery::Direct(self.linear(layer, Part::Q, shape.query_width(), hidden)?),
            Some(rank) => LatentQuery::Down {
                down: self.linear(layer, Part::QDown, rank, hidden)?,
                rank,
                norm: self.inner_norm(layer, Part::QDownNorm, rank)?,
                up: self.linear(layer, Part::QUp, shape.query_width(), rank)?,
            },
        };
        let [absorb, value] = self.head_matrices(layer, &shape)?;
        Ok(Latent {
            norm: self.norm_if(block.pre_norms, layer, Part::AttentionNorm)?,
            shape,
            query,
            down: self.linear(layer, Part::LatentDown, shape.key_dim(), hidden)?,
            latent_norm: self.inner_norm(layer, Part::LatentNorm, shape.latent)?,
            absorb,
            value,
            rope: 0,
            position_scale: self.config.position_scale,
            scale: self.config.attention_scale,
            kv,
            out: self.linear(layer, Part::AttentionOut, hidden, shape.value_width())?,
            post_norm: self.norm_if(block.post_norms, layer, Part::PostAttentionNorm)?,
        })
    }

    fn inner_norm(&mut self, layer: usize, part: Part, width: usize) -> Result<Norm, ModelError> {
        Ok(Norm { eps: EPS, ..self.norm(&self.names.layer(layer, part), width)? })
    }

    /// Returns the matrices of each head. Files of Hugging Face, and the first ones of llama.cpp, have them in one: for
    /// each head, the rows of K and those of V.
    fn head_matrices(&mut self, layer: usize, shape: &LatentShape) -> Result<[Linear; 2], ModelError> {
        let LatentShape { heads, plain, latent, value, .. } = *shape;
        let [absorb, values, up] = [Part::Absorb, Part::Value, Part::LatentUp]
            .map(|part| format!("{}.weight", self.names.layer(layer, part)));
        let matrices = match self.tensors.stack(&absorb, heads, latent, plain)? {
            Some(matrix) => {
                let value = self.tensors.stack(&values, heads, value, latent)?;
                [matrix, value.ok_or_else(|| self.tensors.missing(&values, &[heads, shape.value, latent]))?]
            }
            None => {
                let up = self.tensors.require_matrix(&up, heads * (plain + value), latent)?;
                if !FLOATS.contains(&up.format) {
                    let what = format!("`{}` in {}, whose columns cannot become rows", up.name, up.format);
                    return Err(ModelError::unsupported_but(what, "files with `attn_k_b` and `attn_v_b`"));
                }
                let row = up.format.row_bytes(latent);
                let piece = |head: usize, first: usize, rows: usize| {
                    let start = (head * (plain + value) + first) * row;
                    up.bytes.slice(start..start + rows * row)
                };
                let keys = join((0..heads).map(|head| piece(head, 0, plain)).collect());
                let values = join((0..heads).map(|head| piece(head, plain, value)).collect());
                let transpose = Transpose {
                    parts: heads,
                    inputs: plain,
                    columns: latent,
                    element: up.format.block_bytes(),
                    first: 0,
                    step: 1,
                    outputs: latent,
                };
                let part = |what: &str, rows, cols, bytes| Matrix {
                    name: format!("{}[{what}]", up.name),
                    parts: heads,
                    rows,
                    cols,
                    bytes,
                    ..up.clone()
                };
                [part("keys", latent, plain, transpose.of(&keys)), part("values", value, latent, values)]
            }
        };
        Ok(matrices.map(|matrix| Linear {
            matrix: self.tensors.add_matrix(matrix),
            bias: None,
            bounds: None,
        }))
    }
}
