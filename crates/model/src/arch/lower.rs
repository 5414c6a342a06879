//! A [`Config`] and tensors become a program and its weights.

mod assistant;
mod distances;
mod experts;
mod latent;
mod layer_input;
mod mtp;
mod recurrent;
mod ssd;

use paguro_backend::{
    Attention, Dense, DistanceBias, Embed, Exit, FeedForward, Head, Input, KvSlot, Layer, Linear, Matrix,
    Mixer, Norm, Positions, Program, QkNorm, QkNormKind, Weights,
};

pub use self::mtp::MtpHead;
use self::recurrent::Rows;
pub(crate) use self::{assistant::lower as lower_assistant, mtp::with_layer};
use super::{
    Config, HfMatrices, Names, Recurrent, Tensors,
    kv::{self, KvKind},
    names::Part,
};
use crate::{
    error::ModelError,
    rearrange::{Transpose, join},
};

/// A lowered model.
pub(crate) struct Lowered {
    pub(crate) program: Program,
    pub(crate) weights: Weights,
    /// Its head for multi-token prediction, if the files have one, or its assistant.
    pub(crate) mtp: Option<MtpHead>,
}

/// Lowers a model. Every tensor is checked for presence and shape; none may be left over that would matter. A window
/// that is not smaller than `max_context` is none.
pub(crate) fn lower(
    config: &Config,
    names: &Names,
    tensors: Tensors<'_>,
    max_context: usize,
) -> Result<Lowered, ModelError> {
    let names = &names.with_mtp(config.layers.len(), |name| tensors.has(name));
    let mut lowering = Lowering { config, names, tensors, distance_bias: None };
    let kind = |(index, layer): (usize, &super::config::Layer)| {
        let window = layer.window.filter(|&window| (window as usize) < max_context);
        let (kv_heads, head_dim) = (config.kv_heads_of(index), config.head_dim_of(index));
        let stores = config.attends(index) && !layer.geometry.shares_kv;
        stores.then_some(KvKind { window, kv_heads, head_dim })
    };
    let kinds: Vec<_> = config.layers.iter().enumerate().filter_map(kind).collect();
    let (kv, places) = kv::arrange(&kinds, max_context);
    let state = recurrent::states(config);
    let kv = if kv.groups.is_empty() { kv::without_attention(state.bytes()) } else { kv };

    let (embed, vocab) = lowering.embed(max_context)?;
    lowering.distance_bias = lowering.distances(max_context)?;
    let (mut places, mut states) = (places.into_iter(), 0..);
    let mut place_of: Vec<KvSlot> = Vec::with_capacity(config.layers.len());
    let layers = config.layers.iter().enumerate().map(|(layer, kind)| {
        // For layers without attention the place has no meaning.
        let place = match config.kv_source(layer) {
            _ if !config.attends(layer) => None,
            Some(source) => Some(place_of[source]),
            None => places.next(), // one for each such layer
        };
        let place = place.unwrap_or(KvSlot { group: 0, layer_slot: 0 });
        place_of.push(place);
        let mixer = match (config.recurrent.filter(|_| kind.recurrent), config.latent) {
            _ if !kind.mixer => Mixer::None,
            (Some(Recurrent::Ssd(scan)), _) if config.block.beside => {
                lowering.attention_beside_scan(layer, &scan, place, states.next().unwrap_or(0))?
            }
            (Some(recurrent), _) => lowering.recurrent(layer, recurrent, states.next().unwrap_or(0))?,
            (None, Some((shape, rank))) => {
                Mixer::Latent(Box::new(lowering.latent(layer, shape, rank, place)?))
            }
            (None, None) => Mixer::Attention(lowering.attention(layer, place)?),
        };
        lowering.layer(layer, mixer)
    });
    let mut layers = layers.collect::<Result<Vec<_>, _>>()?;
    // The last layer's norm of the residual stream is the norm of the head.
    let last_norm = layers.last_mut().and_then(|layer| layer.norm_after_ffn.take());
    let head = lowering.head(&embed, vocab, last_norm)?;
    let tied = head.linear.matrix == embed.table;

    let mut tensors = lowering.tensors;
    let weights = std::mem::take(&mut tensors.weights);
    let (tensors, mtp) = mtp::lower(config, names, tensors, (&embed, &head, &weights), vocab, max_context)?;
    tensors.finish(|name| {
        let extra = config.layers.len()..config.layers.len().saturating_add(config.extra_layers);
        names.is_harmless(name, tied, &extra)
    })?;
    // After the tensors, because only they prove the size of heads in the file.
    let ropes = config.ropes.iter().map(|rope| rope.lower()).collect();
    let (hidden, bidirectional) = (config.hidden, config.block.bidirectional);
    let (input, exit) = (Input::Tokens(embed), Exit::Logits(head));
    let (shares_pages, given_parts) = (false, 0);
    let program = Program {
        hidden,
        vocab,
        bidirectional,
        shares_pages,
        kv,
        state,
        ropes,
        input,
        given_parts,
        layers,
        exit,
    };
    let mtp = mtp.map(|mtp| mtp.with_ropes(&program));
    Ok(Lowered { program, weights, mtp })
}

/// Q, and K and V where a layer has its own.
type Qkv = (Linear, Option<Linear>, Option<Linear>);

struct Lowering<'a, 't> {
    config: &'a Config,
    names: &'a Names,
    tensors: Tensors<'t>,
    distance_bias: Option<DistanceBias>,
}

impl Lowering<'_, '_> {
    /// Returns the embeddings, and the number of tokens.
    fn embed(&mut self, max_context: usize) -> Result<(Embed, usize), ModelError> {
        let name = format!("{}.weight", self.names.model(Part::Embedding));
        // Its rows are the vocabulary; configurations and tokenizers may count more or fewer.
        let vocab = self.tensors.rows(&name).unwrap_or(0);
        if vocab == 0 {
            return Err(ModelError::Config(format!(
                "the embedding table, tensor `{name}`, is missing or empty"
            )));
        }
        let table = self.tensors.require_matrix(&name, vocab, self.config.hidden)?;
        let table = self.tensors.add_matrix(table);
        let positions = match self.config.block.positions {
            true => Some(self.positions(max_context)?),
            false => None,
        };
        let types = if self.config.block.token_types { self.token_types()? } else { None };
        let norm = match self.config.block.embed_norm {
            true => Some(self.norm(&self.names.model(Part::EmbeddingNorm), self.config.hidden)?),
            false => None,
        };
        let layers = match self.config.layer_embed {
            0 => None,
            width => Some(self.layer_embeds(vocab, width)?),
        };
        Ok((
            Embed { table, scale: self.config.embed_scale, positions, types, norm, layers, joined: None },
            vocab,
        ))
    }

    fn positions(&mut self, max_context: usize) -> Result<Positions, ModelError> {
        let name = format!("{}.weight", self.names.model(Part::Positions));
        let (rows, offset) = (self.tensors.rows(&name).unwrap_or(0), self.config.position_offset);
        let count = rows.saturating_sub(offset);
        if count < max_context {
            let problem = format!("the model has {count} positions, too few for a context of {max_context}");
            return Err(ModelError::Config(problem));
        }
        let table = self.tensors.require_matrix(&name, rows, self.config.hidden)?;
        let row_bytes = table.format.row_bytes(self.config.hidden);
        let bytes = table.bytes.slice(offset * row_bytes..rows * row_bytes);
        let table = Matrix { rows: count, bytes, ..table };
        Ok(Positions { table: self.tensors.add_matrix(table), count })
    }

    fn attention(&mut self, layer: usize, kv: KvSlot) -> Result<Attention, ModelError> {
        let (config, block) = (self.config, self.config.block);
        let (hidden, head_dim) = (config.hidden, config.head_dim_of(layer));
        let q_dim = config.heads * head_dim;
        let shares = config.layers[layer].geometry.shares_kv;
        let ((q, k, v), gate) = match (shares, block.attention_gate) {
            (true, _) => (self.only_q(layer)?, None),
            (false, true) => self.qkv_and_gate(layer)?,
            (false, false) => (self.qkv(layer)?, None),
        };
        let v_norm = (block.v_norm && !shares).then(|| self.plain_norm(head_dim));
        let sinks = match block.sinks {
            true => {
                // Hugging Face's is no module's weight, and has no suffix.
                let suffix = if self.names.is_hf() { "" } else { ".weight" };
                let name = format!("{}{suffix}", self.names.layer(layer, Part::Sinks));
                let sinks = self.tensors.require_vector(&name, config.heads)?;
                Some(self.tensors.add_vector(sinks))
            }
            false => None,
        };
        Ok(Attention {
            norm: self.norm_if(block.pre_norms && !self.lacks_norm(layer), layer, Part::AttentionNorm)?,
            heads: config.heads,
            q,
            k,
            v,
            qk_norm: self.qk_norm(layer)?,
            v_norm,
            rope: config.layers[layer].rope,
            position_scale: config.position_scale,
            scale: config.attention_scale,
            soft_cap: config.attention_soft_cap,
            distance_bias: self.distance_bias,
            sinks,
            kv,
            gate,
            out: self.linear(layer, Part::AttentionOut, hidden, q_dim)?,
            post_norm: self.norm_if(block.post_norms, layer, Part::PostAttentionNorm)?,
        })
    }

    fn layer(&mut self, layer: usize, mixer: Mixer) -> Result<Layer, ModelError> {
        let (config, block) = (self.config, self.config.block);
        let has_network = config.layers[layer].network;
        let norm = match &mixer {
            Mixer::Attention(attention) if block.one_norm => attention.norm,
            _ => self.norm_if(block.pre_norms && has_network, layer, Part::FfnNorm)?,
        };
        let norm = norm.map(|norm| self.scaled(norm, config.multipliers.ffn_in));
        let post_norm = self.norm_if(block.post_norms && has_network, layer, Part::PostFfnNorm)?;
        let ffn = match config.experts.filter(|_| config.layers[layer].experts) {
            _ if !has_network => FeedForward::None,
            Some(experts) => FeedForward::Experts(self.experts(layer, &experts, norm, post_norm)?),
            None => FeedForward::Dense(self.dense(layer, norm, post_norm)?),
        };
        let input = match config.layer_embed {
            0 => None,
            width => Some(self.layer_input(layer, width)?),
        };
        let output_scale = if block.output_scale { self.output_scale(layer)? } else { 1.0 };
        let (residual, branch_scale) = (block.residual, config.branch_scale);
        let norm_after_mixer = self.norm_if(block.norms_after, layer, Part::NormAfterMixer)?;
        let norm_after_ffn = self.norm_if(block.norms_after, layer, Part::NormAfterFfn)?;
        Ok(Layer {
            mixer,
            ffn,
            residual,
            norm_after_mixer,
            norm_after_ffn,
            branch_scale,
            input,
            output_scale,
        })
    }

    fn dense(
        &mut self,
        layer: usize,
        norm: Option<Norm>,
        post_norm: Option<Norm>,
    ) -> Result<Dense, ModelError> {
        let Config { hidden, block, .. } = *self.config;
        let ffn = self.config.ffn_of(layer);
        let has_gate = self.tensors.has(&format!("{}.weight", self.names.layer(layer, Part::Gate)));
        let (gate, up) = match (block.gated, block.fused_gate_up && !has_gate) {
            (true, true) => {
                let name = self.names.layer(layer, Part::GateUp);
                let [gate, up] = self.split(&name, [ffn, ffn], hidden)?;
                (Some(gate), up)
            }
            (true, false) => {
                let gate = self.linear(layer, Part::Gate, ffn, hidden)?;
                (Some(gate), self.linear(layer, Part::Up, ffn, hidden)?)
            }
            (false, _) => (None, self.linear(layer, Part::Up, ffn, hidden)?),
        };
        let down = self.linear(layer, Part::Down, hidden, ffn)?;
        Ok(Dense { norm, width: ffn, gate, up, activation: block.activation, down, post_norm })
    }

    fn head(&mut self, embed: &Embed, vocab: usize, norm: Option<Norm>) -> Result<Head, ModelError> {
        let norm = match norm {
            Some(norm) => norm,
            None => self.norm(&self.names.model(Part::OutputNorm), self.config.hidden)?,
        };
        let name = self.names.model(Part::Head);
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
        let (scale, soft_cap) = (self.config.logit_scale, self.config.logit_soft_cap);
        let linear = Linear { matrix, bias, bounds: None };
        Ok(Head { norm, linear, scale, soft_cap, projection: None })
    }

    fn qkv(&mut self, layer: usize) -> Result<Qkv, ModelError> {
        let Config { hidden, heads, .. } = *self.config;
        let (kv_heads, head_dim) = (self.config.kv_heads_of(layer), self.config.head_dim_of(layer));
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let parts = [(Part::Q, q), (Part::K, kv), (Part::V, kv)];
        let fused = self.names.layer(layer, Part::Qkv);
        if self.tensors.has(&format!("{fused}.weight")) {
            let by_head = self.names.is_hf() && self.config.definition.hf_matrices == HfMatrices::QkvByHead;
            let [q, k, v] = match by_head {
                true => self.split_by_head(&fused)?,
                false => self.split(&fused, parts.map(|part| part.1), hidden)?,
            };
            return Ok((q, Some(k), Some(v)));
        }
        let q = self.linear(layer, Part::Q, q, hidden)?;
        let k = self.linear(layer, Part::K, kv, hidden)?;
        let v_name = format!("{}.weight", self.names.layer(layer, Part::V));
        if self.config.layers[layer].geometry.keys_as_values && !self.tensors.has(&v_name) {
            return Ok((q, Some(k), None));
        }
        Ok((q, Some(k), Some(self.linear(layer, Part::V, kv, hidden)?)))
    }

    /// Q of a layer that reads another one's K and V. Some files have matrices for its own, which have no effect.
    fn only_q(&mut self, layer: usize) -> Result<Qkv, ModelError> {
        let rows = self.config.heads * self.config.head_dim_of(layer);
        for part in [Part::K, Part::V, Part::KNorm] {
            let name = self.names.layer(layer, part);
            ["weight", "bias"].iter().for_each(|kind| self.tensors.ignore(&format!("{name}.{kind}")));
        }
        Ok((self.linear(layer, Part::Q, rows, self.config.hidden)?, None, None))
    }

    /// Returns a norm without weights: with weights of one.
    fn plain_norm(&mut self, width: usize) -> Norm {
        let weight = self.tensors.add_vector(vec![1.0; width]);
        Norm { kind: self.config.block.norms, weight, bias: None, eps: self.config.norm_eps }
    }

    /// Q, K and V, and the gate that is in one matrix with Q: head by head, first the query's rows.
    fn qkv_and_gate(&mut self, layer: usize) -> Result<(Qkv, Option<Linear>), ModelError> {
        let Config { hidden, heads, .. } = *self.config;
        let (kv_heads, head_dim) = (self.config.kv_heads_of(layer), self.config.head_dim_of(layer));
        let name = self.names.layer(layer, Part::Q);
        let part =
            |part: usize| Rows { first: part * head_dim, len: head_dim, step: 2 * head_dim, count: heads };
        let [q, gate] = self.pick_rows(&name, 2 * heads * head_dim, [&[part(0)], &[part(1)]])?;
        let [k, v] = [Part::K, Part::V].map(|part| self.linear(layer, part, kv_heads * head_dim, hidden));
        Ok(((q, Some(k?), Some(v?)), Some(gate)))
    }

    /// Q, K and V of a matrix `[heads, 3, head_dim, hidden]` with its bias.
    fn split_by_head(&mut self, name: &str) -> Result<[Linear; 3], ModelError> {
        let Config { hidden, heads, head_dim, .. } = *self.config;
        let rows = heads * head_dim;
        let whole = self.tensors.require_matrix(&format!("{name}.weight"), 3 * rows, hidden)?;
        let bias = self.tensors.vector(&format!("{name}.bias"), 3 * rows)?;
        let head_bytes = head_dim * whole.format.row_bytes(hidden);
        Ok([0, 1, 2].map(|part| {
            let head = |head: usize| {
                let start = 3 * head + part;
                whole.bytes.slice(start * head_bytes..(start + 1) * head_bytes)
            };
            let matrix = self.tensors.add_matrix(Matrix {
                name: format!("{}[{part}]", whole.name),
                rows,
                bytes: join((0..heads).map(head).collect()),
                ..whole.clone()
            });
            let bias = bias.as_ref().map(|bias| {
                let heads = bias.chunks_exact(head_dim).skip(part).step_by(3);
                self.tensors.add_vector(heads.flatten().copied().collect())
            });
            Linear { matrix, bias, bounds: None }
        }))
    }

    /// Returns the matrix `name` with its bias, cut into parts of `rows` rows: a row is a whole number of bytes in
    /// every format, so parts are ranges of the file.
    fn split<const N: usize>(
        &mut self,
        name: &str,
        rows: [usize; N],
        cols: usize,
    ) -> Result<[Linear; N], ModelError> {
        let all = rows.iter().sum();
        let whole = self.matrix(&format!("{name}.weight"), all, cols)?;
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
            Linear { matrix, bias, bounds: None }
        }))
    }

    /// Returns the matrix `name`, `[rows, cols]`, which some files store transposed.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix, ModelError> {
        let transposed = self.names.is_hf() && self.config.definition.hf_matrices == HfMatrices::Transposed;
        if !transposed {
            return self.tensors.require_matrix(name, rows, cols);
        }
        let matrix = self.tensors.require_matrix(name, cols, rows)?;
        check_transposable(&matrix)?;
        let shape = Transpose {
            parts: 1,
            inputs: cols,
            columns: rows,
            element: matrix.format.block_bytes(),
            first: 0,
            step: 1,
            outputs: rows,
        };
        Ok(Matrix { rows, cols, bytes: shape.of(&matrix.bytes), ..matrix })
    }

    fn linear(&mut self, layer: usize, part: Part, rows: usize, cols: usize) -> Result<Linear, ModelError> {
        let name = self.names.layer(layer, part);
        let matrix = self.matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = self.tensors.vector(&format!("{name}.bias"), rows)?;
        let matrix = self.tensors.add_matrix(matrix);
        Ok(Linear { matrix, bias: bias.map(|bias| self.tensors.add_vector(bias)), bounds: None })
    }

    /// True for a first layer that reads the norm of the embeddings instead of its own (ModernBERT).
    fn lacks_norm(&self, layer: usize) -> bool {
        let name = self.names.layer(layer, Part::AttentionNorm);
        layer == 0 && self.config.block.embed_norm && !self.tensors.has(&format!("{name}.weight"))
    }

    /// Returns a norm of the residual stream in a layer, in the architectures that have it.
    fn norm_if(&mut self, exists: bool, layer: usize, part: Part) -> Result<Option<Norm>, ModelError> {
        match exists {
            true => self.norm(&self.names.layer(layer, part), self.config.hidden).map(Some),
            false => Ok(None),
        }
    }

    /// Returns the norms of queries and keys, in the architectures that have them.
    fn qk_norm(&mut self, layer: usize) -> Result<Option<QkNorm>, ModelError> {
        let Config { heads, block, .. } = *self.config;
        let (kv_heads, head_dim) = (self.config.kv_heads_of(layer), self.config.head_dim_of(layer));
        let Some(kind) = block.qk_norm else { return Ok(None) };
        let [q, k] = [Part::QNorm, Part::KNorm].map(|part| self.names.layer(layer, part));
        if block.optional_qk_norm && !self.tensors.has(&format!("{q}.weight")) {
            return Ok(None);
        }
        let (q_width, k_width) = match kind {
            QkNormKind::Row => (heads * head_dim, kv_heads * head_dim),
            QkNormKind::Head | QkNormKind::HeadAfterRope => (head_dim, head_dim),
        };
        let q = self.norm(&q, q_width)?;
        let k = match self.config.layers[layer].geometry.shares_kv {
            true => q, // without effect: keys are those of another layer
            false => self.norm(&k, k_width)?,
        };
        Ok(Some(QkNorm { q, k, kind }))
    }

    /// Returns the norm `name`, with its bias if there is one.
    fn norm(&mut self, name: &str, width: usize) -> Result<Norm, ModelError> {
        let full = format!("{name}.weight");
        // Some GGUF files of Falcon-H1 leave the suffix out.
        let full = if !self.tensors.has(&full) && self.tensors.has(name) { name } else { &full };
        // The first BERT models have other names.
        let old = [format!("{name}.gamma"), format!("{name}.beta")];
        let (full, bias) = match !self.tensors.has(full) && self.tensors.has(&old[0]) {
            true => (old[0].as_str(), old[1].clone()),
            false => (full, format!("{name}.bias")),
        };
        let mut weight = self.tensors.require_vector(full, width)?;
        for value in &mut weight {
            *value += self.config.norm_offset;
        }
        let weight = self.tensors.add_vector(weight);
        let bias = self.tensors.vector(&bias, width)?;
        let bias = bias.map(|bias| self.tensors.add_vector(bias));
        Ok(Norm { kind: self.config.block.norms, weight, bias, eps: self.config.norm_eps })
    }
}

/// Fails for a matrix whose columns cannot become rows, because inputs share scales.
fn check_transposable(matrix: &Matrix) -> Result<(), ModelError> {
    match matrix.format.is_quantized() {
        false => Ok(()),
        true => Err(ModelError::unsupported(format!(
            "`{}` in {}, whose columns cannot become rows",
            matrix.name, matrix.format
        ))),
    }
}
