//! A [`Config`] and tensors become a program and its weights.

use paguro_backend::{
    Attention, Dense, Embed, FeedForward, Head, KvSlot, Layer, Linear, Matrix, Mixer, Norm, NormKind,
    Program, QkNorm, QkNormKind, Residual, Weights,
};

use super::{Config, Names, Tensors, kv, names::Part};
use crate::error::ModelError;

/// Lowers a model. Every tensor is checked for presence and shape; none may be left over that would matter. A window
/// that is not smaller than `max_context` is none.
pub(crate) fn lower(
    config: &Config,
    names: &Names,
    tensors: Tensors<'_>,
    max_context: usize,
) -> Result<(Program, Weights), ModelError> {
    let mut lowering = Lowering { config, names, tensors };
    let windows =
        config.layers.iter().map(|layer| layer.window.filter(|&window| (window as usize) < max_context));
    let windows: Vec<_> = windows.collect();
    let (kv, places) = kv::arrange(&windows, config.kv_heads, config.head_dim, max_context);

    let (embed, vocab) = lowering.embed()?;
    let layers = places.into_iter().enumerate().map(|(layer, place)| lowering.layer(layer, place));
    let layers = layers.collect::<Result<_, _>>()?;
    let head = lowering.head(&embed, vocab)?;
    let tied = head.linear.matrix == embed.table;

    let weights = lowering.tensors.finish(|name| names.is_harmless(name, tied))?;
    // Not before now: heads are as large as the file says, and only its tensors prove it.
    let ropes = config.ropes.iter().map(|rope| rope.lower()).collect();
    Ok((Program { hidden: config.hidden, vocab, kv, ropes, embed, layers, head }, weights))
}

struct Lowering<'a, 't> {
    config: &'a Config,
    names: &'a Names,
    tensors: Tensors<'t>,
}

impl Lowering<'_, '_> {
    /// The table, and the number of its rows.
    fn embed(&mut self) -> Result<(Embed, usize), ModelError> {
        let name = self.names.embedding();
        // Its rows are the vocabulary; configurations and tokenizers may count more or fewer.
        let vocab = self.tensors.rows(&name).unwrap_or(0);
        if vocab == 0 {
            return Err(ModelError::Config(format!(
                "the embedding table, tensor `{name}`, is missing or empty"
            )));
        }
        let table = self.tensors.require_matrix(&name, vocab, self.config.hidden)?;
        Ok((
            Embed { table: self.tensors.add_matrix(table), scale: self.config.embed_scale, positions: None },
            vocab,
        ))
    }

    fn layer(&mut self, layer: usize, kv: KvSlot) -> Result<Layer, ModelError> {
        let config = self.config;
        let (hidden, q_dim) = (config.hidden, config.heads * config.head_dim);
        let [q, k, v] = self.qkv(layer)?;
        let attention = Attention {
            norm: Some(self.norm(layer, Part::AttentionNorm)?),
            heads: config.heads,
            q,
            k,
            v,
            qk_norm: self.qk_norm(layer)?,
            rope: Some(config.layers[layer].rope),
            position_scale: None,
            scale: config.attention_scale,
            soft_cap: config.attention_soft_cap,
            sinks: None,
            kv,
            out: self.linear(layer, Part::AttentionOut, hidden, q_dim)?,
            post_norm: self.post_norm(layer, Part::PostAttentionNorm)?,
        };
        let [gate, up] = self.gate_up(layer)?;
        let dense = Dense {
            norm: Some(self.norm(layer, Part::FfnNorm)?),
            width: config.ffn,
            gate: Some(gate),
            up,
            activation: config.activation,
            down: self.linear(layer, Part::Down, hidden, config.ffn)?,
            post_norm: self.post_norm(layer, Part::PostFfnNorm)?,
        };
        Ok(Layer {
            mixer: Mixer::Attention(attention),
            ffn: FeedForward::Dense(dense),
            residual: Residual::Sequential,
            branch_scale: 1.0,
        })
    }

    fn head(&mut self, embed: &Embed, vocab: usize) -> Result<Head, ModelError> {
        let norm = self.norm_named(&self.names.output_norm(), self.config.hidden)?;
        let name = self.names.head();
        let weight = format!("{name}.weight");
        let matrix = match self.config.tied {
            Some(true) => embed.table,
            Some(false) => {
                let matrix = self.tensors.require_matrix(&weight, vocab, self.config.hidden)?;
                self.tensors.add_matrix(matrix)
            }
            None => match self.tensors.matrix(&weight, vocab, self.config.hidden)? {
                Some(matrix) => self.tensors.add_matrix(matrix),
                None => embed.table,
            },
        };
        let bias = self.tensors.vector(&format!("{name}.bias"), vocab)?;
        let bias = bias.map(|bias| self.tensors.add_vector(bias));
        Ok(Head { norm, linear: Linear { matrix, bias }, scale: 1.0, soft_cap: self.config.logit_soft_cap })
    }

    fn qkv(&mut self, layer: usize) -> Result<[Linear; 3], ModelError> {
        let Config { hidden, heads, kv_heads, head_dim, .. } = *self.config;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let parts = [(Part::Q, q), (Part::K, kv), (Part::V, kv)];
        let fused = self.names.layer(layer, Part::Qkv);
        if self.tensors.has(&format!("{fused}.weight")) {
            return self.split(&fused, parts.map(|part| part.1), hidden);
        }
        let [q, k, v] = parts.map(|(part, rows)| self.linear(layer, part, rows, hidden));
        Ok([q?, k?, v?])
    }

    fn gate_up(&mut self, layer: usize) -> Result<[Linear; 2], ModelError> {
        let Config { hidden, ffn, .. } = *self.config;
        if self.names.gate_up_is_fused() {
            return self.split(&self.names.layer(layer, Part::GateUp), [ffn, ffn], hidden);
        }
        let gate = self.linear(layer, Part::Gate, ffn, hidden)?;
        Ok([gate, self.linear(layer, Part::Up, ffn, hidden)?])
    }

    /// The matrix `name` with its bias, cut into parts of `rows` rows: a row is a whole number of bytes in every format,
    /// so parts are ranges of the file.
    fn split<const N: usize>(
        &mut self,
        name: &str,
        rows: [usize; N],
        cols: usize,
    ) -> Result<[Linear; N], ModelError> {
        let all = rows.iter().sum();
        let whole = self.tensors.require_matrix(&format!("{name}.weight"), all, cols)?;
        let bias = self.tensors.vector(&format!("{name}.bias"), all)?;
        let row_bytes = whole.format.row_bytes(cols);
        let mut first = 0;
        Ok(rows.map(|rows| {
            let range = first..first + rows;
            first += rows;
            let matrix = self.tensors.add_matrix(Matrix {
                name: format!("{}[{}..{}]", whole.name, range.start, range.end),
                rows,
                bytes: whole.bytes.slice(range.start * row_bytes..range.end * row_bytes),
                ..whole.clone()
            });
            let bias = bias.as_ref().map(|bias| self.tensors.add_vector(bias[range].to_vec()));
            Linear { matrix, bias }
        }))
    }

    fn linear(&mut self, layer: usize, part: Part, rows: usize, cols: usize) -> Result<Linear, ModelError> {
        let name = self.names.layer(layer, part);
        let matrix = self.tensors.require_matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = self.tensors.vector(&format!("{name}.bias"), rows)?;
        let matrix = self.tensors.add_matrix(matrix);
        Ok(Linear { matrix, bias: bias.map(|bias| self.tensors.add_vector(bias)) })
    }

    fn norm(&mut self, layer: usize, part: Part) -> Result<Norm, ModelError> {
        self.norm_named(&format!("{}.weight", self.names.layer(layer, part)), self.config.hidden)
    }

    /// The norm of what a part of a layer adds to the residual stream, in the architectures that have it.
    fn post_norm(&mut self, layer: usize, part: Part) -> Result<Option<Norm>, ModelError> {
        match self.config.architecture.is_gemma() {
            true => self.norm(layer, part).map(Some),
            false => Ok(None),
        }
    }

    /// The norms of each head, in the architectures that have them.
    fn qk_norm(&mut self, layer: usize) -> Result<Option<QkNorm>, ModelError> {
        if !self.config.architecture.has_head_norms() {
            return Ok(None);
        }
        let [q, k] = [Part::QNorm, Part::KNorm].map(|part| {
            let name = format!("{}.weight", self.names.layer(layer, part));
            self.norm_named(&name, self.config.head_dim)
        });
        Ok(Some(QkNorm { q: q?, k: k?, kind: QkNormKind::Head }))
    }

    fn norm_named(&mut self, name: &str, width: usize) -> Result<Norm, ModelError> {
        let mut weight = self.tensors.require_vector(name, width)?;
        for value in &mut weight {
            *value += self.config.norm_offset;
        }
        let weight = self.tensors.add_vector(weight);
        Ok(Norm { kind: NormKind::Rms, weight, bias: None, eps: self.config.norm_eps })
    }
}
