//! Tensors of a GGUF file.
//!
//! | parts | from |
//! |-|-|
//! | matrices | the folder, under another name; rows of Q and K in the order of the file's RoPE |
//! | vectors, routers, convolutions | the folder, in f32; norms with their offset |
//! | value heads of a delta rule | the folder, interleaved by key heads where the architecture has them so |
//! | experts; matrices that are fused or transposed in folders alone; heads of latent attention | the program |

use std::collections::{HashMap, HashSet};

use paguro_backend::{Bytes, DeltaShape, FeedForward, Linear, Mixer, QkNormKind, RopeStyle, WeightFormat};

use super::{
    super::{DeltaFiles, HfMatrices, Part, Recurrent},
    Export, Multiplied, sources, unsupported,
};
use crate::{
    error::ModelError,
    rearrange::join,
    tensor::{DType, Tensor},
};

const MODEL_PARTS: [Part; 9] = [
    Part::Embedding,
    Part::Positions,
    Part::TokenTypes,
    Part::EmbeddingNorm,
    Part::LayerEmbeds,
    Part::LayerProjection,
    Part::LayerProjectionNorm,
    Part::OutputNorm,
    Part::Head,
];

/// Parts of a layer that are one tensor in both kinds of files.
const LAYER_PARTS: &[Part] = &[
    Part::AttentionNorm,
    Part::Q,
    Part::K,
    Part::V,
    Part::Qkv,
    Part::QNorm,
    Part::KNorm,
    Part::Sinks,
    Part::AttentionOut,
    Part::QDown,
    Part::QDownNorm,
    Part::QUp,
    Part::LatentDown,
    Part::LatentNorm,
    Part::ConvIn,
    Part::Conv,
    Part::ConvOut,
    Part::DeltaQkv,
    Part::DeltaGate,
    Part::DeltaAlpha,
    Part::DeltaBeta,
    Part::DeltaBetaAlpha,
    Part::DeltaDecay,
    Part::DeltaDt,
    Part::DeltaNorm,
    Part::DeltaOut,
    Part::SsmIn,
    Part::SsmSkip,
    Part::PostAttentionNorm,
    Part::FfnNorm,
    Part::Gate,
    Part::Up,
    Part::GateUp,
    Part::Down,
    Part::PostFfnNorm,
    Part::Router,
    Part::RouterScale,
    Part::ExpertScale,
    Part::SelectionBias,
    Part::ExpertsIn,
    Part::ExpertsOut,
    Part::SharedGate,
    Part::SharedUp,
    Part::SharedDown,
    Part::OutputGate,
    Part::ExpertGateUp,
    Part::ExpertDowns,
    Part::ExpertsNorm,
    Part::PostDenseNorm,
    Part::PostExpertsNorm,
    Part::InputGate,
    Part::InputOut,
    Part::PostInputNorm,
    Part::OutputScale,
    Part::NormAfterMixer,
    Part::NormAfterFfn,
];

/// Parts of a layer that is a head for multi-token prediction.
const MTP_PARTS: &[Part] = &[
    Part::MtpJoin,
    Part::MtpTokenNorm,
    Part::MtpRowNorm,
    Part::MtpEmbedding,
    Part::MtpOutputNorm,
    Part::MtpOutput,
];

/// Norms whose weights folders may have as differences from one.
const OFFSET_NORMS: [Part; 10] = [
    Part::MtpTokenNorm,
    Part::MtpRowNorm,
    Part::MtpOutputNorm,
    Part::OutputNorm,
    Part::AttentionNorm,
    Part::QNorm,
    Part::KNorm,
    Part::PostAttentionNorm,
    Part::FfnNorm,
    Part::PostFfnNorm,
];

/// The tensors that have been converted.
#[derive(Default)]
struct Converted {
    tensors: Vec<Tensor>,
    names: HashSet<String>,
}

impl Converted {
    fn push(&mut self, tensor: Tensor) {
        // Parts of different kinds of layers may be one tensor.
        if self.names.insert(tensor.name.clone()) {
            self.tensors.push(tensor);
        }
    }
}

impl Export<'_> {
    pub(super) fn tensors(
        &self,
        tensors: &[Tensor],
        multiplied: &Multiplied,
    ) -> Result<Vec<Tensor>, ModelError> {
        let by_name: HashMap<&str, &Tensor> = tensors.iter().map(|it| (it.name.as_str(), it)).collect();
        let mut converted = Converted::default();
        let tied = self.config.tied == Some(true);
        let one = |part: Part, hf: String, gguf: String, converted: &mut Converted| {
            // Some parameters are no module's weight and have no suffix.
            for (suffix, own) in [(".weight", ".weight"), (".bias", ".bias"), ("", bare_suffix(part))] {
                if let Some(tensor) = by_name.get(format!("{hf}{suffix}").as_str()) {
                    let tensor = self.multiply(part, tensor, multiplied)?;
                    // llama.cpp knows this one norm without a suffix.
                    let is_bare = part == Part::FfnNorm && self.config.definition.gguf == "falcon-h1";
                    let own = if is_bare { "" } else { own };
                    converted.push(self.convert(part, tensor, format!("{gguf}{own}"))?);
                }
            }
            Ok::<_, ModelError>(())
        };
        for part in MODEL_PARTS.into_iter().filter(|_| self.first_layer == 0) {
            let from = match tied && part == Part::Head {
                // A head with a factor of its own is another matrix than the embeddings.
                true if multiplied.of(Part::Head).is_some() || multiplied.of(Part::Embedding).is_some() => {
                    Part::Embedding
                }
                true => continue,
                false => part,
            };
            one(part, self.names.model(from), self.gguf.model(part), &mut converted)?;
        }
        let of_heads = if self.first_layer > 0 { MTP_PARTS } else { &[] };
        for layer in self.first_layer..self.config.layers.len() {
            self.arranged(layer, &by_name, &mut converted)?;
            for &part in LAYER_PARTS.iter().chain(of_heads).filter(|&&part| self.exists(layer, part)) {
                one(part, self.names.layer(layer, part), self.gguf.layer(layer, part), &mut converted)?;
            }
        }
        Ok(converted.tensors)
    }

    /// False for names that belong to another part in this layer, and for parts whose arrangement differs.
    fn exists(&self, layer: usize, part: Part) -> bool {
        let (config, block) = (self.config, self.config.block);
        let is_dense = match config.experts {
            Some(experts) => experts.beside || !config.layers[layer].experts,
            None => true,
        };
        match part {
            Part::Gate | Part::Down => is_dense,
            Part::SharedGate | Part::SharedUp | Part::SharedDown => config.layers[layer].experts,
            Part::PostAttentionNorm | Part::PostFfnNorm => block.post_norms,
            Part::AttentionNorm | Part::FfnNorm => block.pre_norms,
            Part::NormAfterMixer | Part::NormAfterFfn => block.norms_after,
            Part::Up => is_dense && !block.fused_gate_up,
            Part::GateUp => is_dense && block.fused_gate_up && config.definition.block.fused_gate_up,
            // Only these files have gates and ups as folders do.
            Part::ExpertGateUp | Part::ExpertDowns => config.experts.is_some_and(|it| it.beside),
            _ => true,
        }
    }

    /// The tensors of a layer that come from the program.
    fn arranged(
        &self,
        layer: usize,
        by_name: &HashMap<&str, &Tensor>,
        converted: &mut Converted,
    ) -> Result<(), ModelError> {
        let has = |part: Part| {
            let name = self.names.layer(layer, part);
            by_name.contains_key(format!("{name}.weight").as_str())
        };
        let mut add = |part: Part, linear: Linear, is_stack: bool| {
            let name = self.gguf.layer(layer, part);
            let matrix = self.weights.matrix(linear.matrix);
            let shape = match is_stack {
                true => vec![matrix.parts, matrix.rows, matrix.cols],
                false => vec![matrix.rows, matrix.cols],
            };
            let weight = format!("{name}.weight");
            converted.push(new_tensor(weight, matrix.format, shape, matrix.bytes.clone()));
            if let Some(bias) = linear.bias.map(|bias| self.weights.vector(bias)) {
                let bias = vector(&format!("{name}.bias"), bias);
                let shape = if is_stack { vec![matrix.parts, matrix.rows] } else { bias.shape.clone() };
                converted.push(Tensor { shape, ..bias });
            }
        };
        let program = &self.program.layers[layer - self.first_layer];
        let arrangement = self.config.definition.hf_matrices;
        for mixer in program.mixer.parts() {
            match mixer {
                Mixer::Latent(latent) => {
                    add(Part::Absorb, latent.absorb, true);
                    add(Part::Value, latent.value, true);
                }
                Mixer::DeltaRule(rule) if has(Part::DeltaQkvZ) => {
                    add(Part::DeltaQkv, rule.qkv, false);
                    add(Part::DeltaGate, rule.gate, false);
                }
                Mixer::Attention(attention) if arrangement == HfMatrices::Transposed => {
                    add(Part::AttentionOut, attention.out, false);
                }
                _ => {}
            }
        }
        match &program.ffn {
            FeedForward::Dense(dense) => {
                let is_fused = self.config.block.fused_gate_up && has(Part::GateUp);
                let separate = is_fused && !self.config.definition.block.fused_gate_up;
                if arrangement == HfMatrices::Transposed {
                    add(Part::Down, dense.down, false);
                }
                if let Some(gate) = dense.gate.filter(|_| separate) {
                    add(Part::Gate, gate, false);
                }
                if separate || arrangement == HfMatrices::Transposed {
                    add(Part::Up, dense.up, false);
                }
            }
            FeedForward::Experts(experts) if experts.beside.is_none() => {
                if let Some(gate) = experts.gate {
                    add(Part::ExpertGate, gate, true);
                }
                add(Part::ExpertUp, experts.up, true);
                add(Part::ExpertDown, experts.down, true);
                if let Some(shared) = &experts.shared
                    && let Some(gate) = shared.gate.filter(|_| !has(Part::SharedUp))
                {
                    add(Part::SharedGate, gate, false);
                    add(Part::SharedUp, shared.up, false);
                }
            }
            _ => {}
        }
        if arrangement != HfMatrices::Plain {
            self.joined_qkv(layer, converted)?;
        }
        Ok(())
    }

    /// Q, K and V in one matrix, in this order.
    fn joined_qkv(&self, layer: usize, converted: &mut Converted) -> Result<(), ModelError> {
        let Mixer::Attention(attention) = &self.program.layers[layer - self.first_layer].mixer else {
            return Ok(());
        };
        let (Some(k), Some(v)) = (attention.k, attention.v) else { return Err(unsupported(self.config)) };
        let parts = [attention.q, k, v];
        let matrices = parts.map(|linear| self.weights.matrix(linear.matrix));
        let name = self.gguf.layer(layer, Part::Qkv);
        let rows = matrices.iter().map(|matrix| matrix.rows).sum();
        let bytes = join(matrices.iter().map(|matrix| matrix.bytes.clone()).collect());
        let shape = vec![rows, matrices[0].cols];
        converted.push(new_tensor(format!("{name}.weight"), matrices[0].format, shape, bytes));
        let biases: Option<Vec<&[f32]>> =
            parts.iter().map(|linear| Some(self.weights.vector(linear.bias?))).collect();
        if let Some(biases) = biases {
            converted.push(vector(&format!("{name}.bias"), &biases.concat()));
        }
        Ok(())
    }

    /// Returns a tensor with the multipliers of its part.
    fn multiply(&self, part: Part, tensor: &Tensor, multiplied: &Multiplied) -> Result<Tensor, ModelError> {
        let is_bias = tensor.shape.len() == 1;
        let factors = if is_bias { multiplied.of_bias(part) } else { multiplied.of(part) };
        let (Some(factors), Some(&rows)) = (factors, tensor.shape.first()) else { return Ok(tensor.clone()) };
        let Some(format) = tensor.dtype.weight_format().filter(|format| !format.is_quantized()) else {
            let what = format!("converting `{}` in {} with a multiplier to GGUF", tensor.name, tensor.dtype);
            return Err(ModelError::unsupported(what));
        };
        let bytes = sources::multiplied(&tensor.bytes, format, tensor.bytes.len() / rows.max(1), factors);
        Ok(Tensor { bytes, ..tensor.clone() })
    }

    /// Returns a tensor under its name in GGUF files, arranged as these have it.
    fn convert(&self, part: Part, tensor: Tensor, name: String) -> Result<Tensor, ModelError> {
        let tensor = Tensor { name, ..tensor };
        let styles = self.config.definition.rope_styles;
        let reordered = styles == [RopeStyle::Interleaved, RopeStyle::HalfSplit];
        if reordered
            && (part == Part::Qkv
                || matches!(part, Part::QNorm | Part::KNorm)
                    && self.config.block.qk_norm != Some(QkNormKind::Row))
        {
            return Err(unsupported(self.config));
        }
        let tensor = match part {
            Part::Q | Part::K if reordered || self.config.halves_in_gguf => self.reorder(tensor),
            Part::Positions => self.positions(tensor),
            _ => self.value_heads(part, tensor)?,
        };
        // As llama.cpp has them: vectors and some small matrices in f32.
        let is_small = matches!(
            part,
            Part::Router
                | Part::OutputGate
                | Part::Conv
                | Part::Positions
                | Part::TokenTypes
                | Part::DeltaNorm
        );
        if tensor.shape.len() > 1 && !is_small {
            return Ok(tensor);
        }
        let offset = match OFFSET_NORMS.contains(&part) && tensor.name.ends_with(".weight") {
            true => self.config.norm_offset,
            false => 0.0,
        };
        let tensor = floats(tensor, |value| match part {
            Part::DeltaDecay => -value.exp(),
            _ => value + offset,
        })?;
        let shape = self.shape(part, &tensor);
        Ok(Tensor { shape, ..tensor })
    }

    /// Returns the shape of a vector or a convolution in GGUF files.
    fn shape(&self, part: Part, tensor: &Tensor) -> Vec<usize> {
        let is_weight = tensor.name.ends_with(".weight");
        match (part, self.config.recurrent, tensor.shape.as_slice()) {
            (Part::Conv, _, &[channels, 1, taps]) => vec![channels, taps],
            (Part::OutputGate, _, &[1, hidden]) => vec![hidden],
            (Part::DeltaDecay | Part::SsmSkip, Some(Recurrent::Ssd(_)), &[heads]) => vec![heads, 1],
            (Part::DeltaNorm, Some(Recurrent::Ssd(scan)), &[width])
                if is_weight && width.is_multiple_of(scan.shape.key_heads) =>
            {
                vec![scan.shape.key_heads, width / scan.shape.key_heads]
            }
            (_, _, shape) => shape.to_vec(),
        }
    }

    /// Returns a delta rule's tensor with its value heads in the order of the file: head `h` of key head `k` is head `k
    /// * n + h` in folders, and `h * keys + k` in files in which they alternate.
    fn value_heads(&self, part: Part, tensor: Tensor) -> Result<Tensor, ModelError> {
        let Some(Recurrent::Delta { shape, files: DeltaFiles { alternating: true }, .. }) =
            self.config.recurrent
        else {
            return Ok(tensor);
        };
        let DeltaShape { key_heads, value_heads, value_dim, .. } = shape;
        let order: Vec<usize> = (0..value_heads)
            .map(|head| head % key_heads * (value_heads / key_heads) + head / key_heads)
            .collect();
        let (first, len) = match part {
            Part::DeltaQkv | Part::Conv => (2 * shape.key_width(), value_dim),
            Part::DeltaGate => (0, value_dim),
            Part::DeltaAlpha | Part::DeltaBeta | Part::DeltaDecay | Part::DeltaDt => (0, 1),
            Part::DeltaOut => {
                let format = tensor.dtype.weight_format();
                let format = format.filter(|format| value_dim.is_multiple_of(format.block_len()));
                let Some(format) = format else {
                    let what =
                        format!("`{}` in {}, whose columns have another order", tensor.name, tensor.dtype);
                    return Err(ModelError::unsupported(what));
                };
                let bytes = sources::reordered_columns(&tensor.bytes, format.row_bytes(value_dim), order);
                return Ok(Tensor { bytes, ..tensor });
            }
            _ => return Ok(tensor),
        };
        let row = tensor.bytes.len() / tensor.shape[0].max(1);
        let slice = |first: usize, rows: usize| tensor.bytes.slice(first * row..(first + rows) * row);
        let heads = order.iter().map(|head| slice(first + head * len, len));
        let bytes = join(std::iter::once(slice(0, first)).chain(heads).collect());
        Ok(Tensor { bytes, ..tensor })
    }

    /// Returns the rows of a table of positions that the context uses. llama.cpp wants no others.
    fn positions(&self, tensor: Tensor) -> Tensor {
        let [rows, hidden] = tensor.shape[..] else { return tensor };
        let first = self.position_offset.min(rows);
        let count = self.config.context_length.min(rows - first);
        let row = tensor.bytes.len() / rows.max(1);
        let bytes = tensor.bytes.slice(first * row..(first + count) * row);
        Tensor { bytes, shape: vec![count, hidden], ..tensor }
    }

    /// Returns the rows of Q or K, of which RoPE pairs neighbours in GGUF files and halves of a head in folders, or the other way round.
    fn reorder(&self, tensor: Tensor) -> Tensor {
        let (head, rows) = (self.config.head_dim, tensor.shape[0]);
        let dims = self.config.ropes.first().map_or(0, |rope| rope.dims);
        let row = tensor.bytes.len() / rows.max(1);
        let source = |target: usize| {
            let (first, at) = (target / head * head, target % head);
            let half = dims / 2;
            first
                + match at {
                    _ if at >= dims => at,
                    _ if !self.config.halves_in_gguf => at / 2 + at % 2 * half,
                    _ if at < half => 2 * at,
                    _ => 2 * (at - half) + 1,
                }
        };
        let slice = |target: usize| tensor.bytes.slice(source(target) * row..(source(target) + 1) * row);
        if !rows.is_multiple_of(head) {
            return tensor; // refused when it is read back
        }
        Tensor { bytes: join((0..rows).map(slice).collect()), ..tensor }
    }
}

/// Returns the suffix in GGUF files of parameters that folders have without a suffix.
fn bare_suffix(part: Part) -> &'static str {
    match part {
        Part::SelectionBias => ".bias",
        // Their names are complete.
        Part::DeltaDecay
        | Part::DeltaDt
        | Part::SsmSkip
        | Part::OutputScale
        | Part::RouterScale
        | Part::ExpertScale => "",
        _ => ".weight",
    }
}

/// Returns a tensor in f32, with a function of each value.
fn floats(tensor: Tensor, of: impl Fn(f32) -> f32) -> Result<Tensor, ModelError> {
    let unreadable = |problem: String| ModelError::Unreadable { tensor: tensor.name.clone(), problem };
    let format = tensor.dtype.weight_format().ok_or_else(|| unreadable(format!("it is {}", tensor.dtype)))?;
    let bytes = tensor.bytes.read().map_err(|error| unreadable(error.to_string()))?;
    let mut values = vec![0.0; tensor.elements() as usize];
    format.dequantize(&bytes, &mut values);
    let bytes: Vec<u8> = values.iter().flat_map(|&value| of(value).to_le_bytes()).collect();
    Ok(Tensor { dtype: DType::Weight(WeightFormat::F32), bytes: Bytes::from(bytes), ..tensor })
}

/// Returns a tensor of one dimension in f32.
pub(super) fn vector(name: &str, values: &[f32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    new_tensor(name.to_owned(), WeightFormat::F32, vec![values.len()], Bytes::from(bytes))
}

fn new_tensor(name: String, format: WeightFormat, shape: Vec<usize>, bytes: Bytes) -> Tensor {
    Tensor { name, dtype: DType::Weight(format), shape, bytes, offset: 0, file: 0 }
}
