//! Mixtures of experts, whose matrices files arrange in many ways; a program has them stacked.

use paguro_backend::{
    Beside, Bytes, ExpertLatent, Experts, Linear, Matrix, Norm, Router, Scores, SharedExpert, VectorId,
    WeightFormat,
};

use super::{Lowering, Part, check_transposable};
use crate::{
    arch::ExpertsConfig,
    error::ModelError,
    rearrange::{SplitMxfp4, Transpose, join},
};

/// Gates, ups and downs.
type Stacks = (Option<Linear>, Linear, Linear);

impl Lowering<'_, '_> {
    pub(super) fn experts(
        &mut self,
        layer: usize,
        config: &ExpertsConfig,
        norm: Option<Norm>,
        post_norm: Option<Norm>,
    ) -> Result<Experts, ModelError> {
        let ExpertsConfig { count, groups, used, width, scores, renormalize, factor, .. } = *config;
        let hidden = self.config.hidden;
        if config.beside {
            return self.experts_beside(layer, config, norm, post_norm);
        }
        let linear = self.linear(layer, Part::Router, count, hidden)?;
        let router = Router {
            norm: None,
            linear,
            scores,
            selection_bias: self.selection_bias(layer, config)?,
            groups,
            used,
            renormalize,
            factor,
            expert_scale: None,
        };
        let latent = match config.latent {
            0 => None,
            width => Some(ExpertLatent {
                width,
                down: self.linear(layer, Part::ExpertsIn, width, hidden)?,
                up: self.linear(layer, Part::ExpertsOut, hidden, width)?,
            }),
        };
        let (gate, up, down) = self.stacks(layer, config)?;
        Ok(Experts {
            norm,
            router,
            count,
            width,
            latent,
            gate,
            up,
            activation: self.config.block.activation,
            down,
            shared: match config.shared {
                0 => None,
                width => Some(self.shared(layer, width, config.output_gate)?),
            },
            beside: None,
            post_norm,
        })
    }

    /// Experts beside a dense network, which has the layer's own norm (Gemma 4). The router reads `rms(x) * scale /
    /// sqrt(hidden)`: a norm with these weights.
    fn experts_beside(
        &mut self,
        layer: usize,
        config: &ExpertsConfig,
        norm: Option<Norm>,
        post_norm: Option<Norm>,
    ) -> Result<Experts, ModelError> {
        let ExpertsConfig { count, used, width, scores, renormalize, factor, .. } = *config;
        let hidden = self.config.hidden;
        let dense_norm = self.norm(&self.names.layer(layer, Part::PostDenseNorm), hidden)?;
        let dense = self.dense(layer, norm, Some(dense_norm))?;
        let sum_norm = self.norm(&self.names.layer(layer, Part::PostExpertsNorm), hidden)?;
        let linear = self.linear(layer, Part::Router, count, hidden)?;
        let scale = self.names.layer(layer, Part::RouterScale);
        let mut scale = self.tensors.require_vector(&scale, hidden)?;
        scale.iter_mut().for_each(|scale| *scale /= (hidden as f32).sqrt());
        let weight = self.tensors.add_vector(scale);
        let router_norm = Norm { weight, bias: None, ..sum_norm };
        let expert_scale = self.names.layer(layer, Part::ExpertScale);
        let expert_scale = self.tensors.vector(&expert_scale, count)?;
        let (gate, up, down) = self.stacks(layer, config)?;
        Ok(Experts {
            norm: Some(self.norm(&self.names.layer(layer, Part::ExpertsNorm), hidden)?),
            router: Router {
                norm: Some(router_norm),
                linear,
                scores,
                selection_bias: None,
                groups: None,
                used,
                renormalize,
                factor,
                expert_scale: expert_scale.map(|scale| self.tensors.add_vector(scale)),
            },
            count,
            width,
            latent: None,
            gate,
            up,
            activation: self.config.block.activation,
            down,
            shared: None,
            beside: Some(Box::new(Beside { dense, sum_norm })),
            post_norm,
        })
    }

    fn selection_bias(
        &mut self,
        layer: usize,
        config: &ExpertsConfig,
    ) -> Result<Option<VectorId>, ModelError> {
        if !config.selection_bias {
            return Ok(None);
        }
        let name = self.names.layer(layer, Part::SelectionBias);
        let name = if self.names.is_hf() { name } else { format!("{name}.bias") };
        let bias = self.tensors.vector(&name, config.count)?;
        if bias.is_none() && config.scores == Scores::Sigmoid {
            return Err(self.tensors.missing(&name, &[config.count]));
        }
        Ok(bias.map(|bias| self.tensors.add_vector(bias)))
    }

    fn shared(&mut self, layer: usize, width: usize, output_gate: bool) -> Result<SharedExpert, ModelError> {
        let hidden = self.config.hidden;
        let fused = self.names.layer(layer, Part::SharedGateUp);
        let fused_rows = self.tensors.rows(&format!("{fused}.weight"));
        let (gate, up) = match fused_rows == Some(2 * width) {
            _ if !self.config.block.gated => (None, self.linear(layer, Part::SharedUp, width, hidden)?),
            true => {
                let [gate, up] = self.split(&fused, [width, width], hidden)?;
                (Some(gate), up)
            }
            false => {
                let gate = self.linear(layer, Part::SharedGate, width, hidden)?;
                (Some(gate), self.linear(layer, Part::SharedUp, width, hidden)?)
            }
        };
        let down = self.linear(layer, Part::SharedDown, hidden, width)?;
        let output_gate = match output_gate {
            true => Some(self.output_gate(layer)?),
            false => None,
        };
        Ok(SharedExpert { width, gate, up, down, output_gate })
    }

    /// Returns a matrix of one row, which GGUF files store as a vector.
    fn output_gate(&mut self, layer: usize) -> Result<Linear, ModelError> {
        let name = format!("{}.weight", self.names.layer(layer, Part::OutputGate));
        let row = self.tensors.require_vector(&name, self.config.hidden)?;
        let format = WeightFormat::F32;
        let bytes: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (rows, cols) = (1, row.len());
        let matrix = Matrix { name, format, parts: 1, rows, cols, bytes: bytes.into() };
        Ok(Linear { matrix: self.tensors.add_matrix(matrix), bias: None, bounds: None })
    }

    /// Gates, if there are some, ups and downs of all experts.
    fn stacks(&mut self, layer: usize, config: &ExpertsConfig) -> Result<Stacks, ModelError> {
        let ExpertsConfig { count, width, latent, .. } = *config;
        if !self.config.block.gated {
            let row = if latent > 0 { latent } else { self.config.hidden };
            let up = self.stack(layer, Part::ExpertUp, count, width, row)?;
            return Ok((None, up, self.stack(layer, Part::ExpertDown, count, row, width)?));
        }
        let [gate, up, down] = self.gated_stacks(layer, config)?;
        Ok((Some(gate), up, down))
    }

    fn gated_stacks(&mut self, layer: usize, config: &ExpertsConfig) -> Result<[Linear; 3], ModelError> {
        let ExpertsConfig { count, width, .. } = *config;
        let hidden = self.config.hidden;
        let fused = self.names.layer(layer, Part::ExpertGateUp);
        if !self.names.is_hf() && self.tensors.has(&format!("{fused}.weight")) {
            let [gate, up] = self.halves(&format!("{fused}.weight"), config)?;
            let down = self.stack(layer, Part::ExpertDown, count, hidden, width)?;
            return Ok([gate, up, down]);
        }
        if self.names.is_hf() {
            let downs = self.names.layer(layer, Part::ExpertDowns);
            if self.tensors.has(&format!("{fused}_blocks")) {
                return self.mxfp4_stacks(&fused, &downs, config);
            }
            if let Some(shape) = self.tensors.shape(&fused) {
                let transposed = match shape {
                    [_, rows, cols] if rows != cols => *cols == 2 * width && *rows == hidden,
                    _ => config.transposed,
                };
                return match transposed {
                    true => self.transposed_stacks(&fused, &downs, config),
                    false => {
                        let [gate, up] = self.halves(&fused, config)?;
                        let down = self.tensors.stack(&downs, count, hidden, width)?;
                        let down =
                            down.ok_or_else(|| self.tensors.missing(&downs, &[count, hidden, width]))?;
                        Ok([
                            gate,
                            up,
                            Linear { matrix: self.tensors.add_matrix(down), bias: None, bounds: None },
                        ])
                    }
                };
            }
        }
        let gate = self.stack(layer, Part::ExpertGate, count, width, hidden)?;
        let up = self.stack(layer, Part::ExpertUp, count, width, hidden)?;
        Ok([gate, up, self.stack(layer, Part::ExpertDown, count, hidden, width)?])
    }

    /// Returns one tensor for all experts, or one per expert.
    fn stack(
        &mut self,
        layer: usize,
        part: Part,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Linear, ModelError> {
        let name = self.names.layer(layer, part);
        if let Some(stack) = self.tensors.stack(&format!("{name}.weight"), count, rows, cols)? {
            let bias = self.tensors.vectors(&format!("{name}.bias"), count, rows)?;
            let bias = bias.map(|bias| self.tensors.add_vector(bias));
            return Ok(Linear { matrix: self.tensors.add_matrix(stack), bias, bounds: None });
        }
        let name_of = |this: &Self, expert| format!("{}.weight", this.names.expert(layer, part, expert));
        if !self.tensors.has(&name_of(self, 0)) && !self.names.is_hf() {
            return Err(self.tensors.missing(&format!("{name}.weight"), &[count, rows, cols]));
        }
        let mut pieces: Vec<Bytes> = Vec::with_capacity(count);
        let mut first: Option<Matrix> = None;
        for expert in 0..count {
            let matrix = self.tensors.require_matrix(&name_of(self, expert), rows, cols)?;
            pieces.push(matrix.bytes.clone());
            let first = first.get_or_insert_with(|| matrix.clone());
            if first.format != matrix.format {
                return Err(ModelError::unsupported(format!(
                    "experts of different types (`{}` is {}, `{}` is {})",
                    first.name, first.format, matrix.name, matrix.format
                )));
            }
        }
        let Some(first) = first else { return Err(ModelError::Config("no experts".to_owned())) };
        let stack = Matrix { parts: count, bytes: join(pieces), ..first };
        Ok(Linear { matrix: self.tensors.add_matrix(stack), bias: None, bounds: None })
    }

    /// Gates and ups of a stack `[experts, 2 * width, hidden]`.
    fn halves(&mut self, name: &str, config: &ExpertsConfig) -> Result<[Linear; 2], ModelError> {
        let ExpertsConfig { count, width, .. } = *config;
        let hidden = self.config.hidden;
        let whole = self.tensors.stack(name, count, 2 * width, hidden)?;
        let whole = whole.ok_or_else(|| self.tensors.missing(name, &[count, 2 * width, hidden]))?;
        let half_bytes = width * whole.format.row_bytes(hidden);
        Ok([0, 1].map(|half| {
            let piece = |expert: usize| {
                let start = (2 * expert + half) * half_bytes;
                whole.bytes.slice(start..start + half_bytes)
            };
            let bytes = join((0..count).map(piece).collect());
            let matrix = Matrix { name: format!("{name}[{half}]"), rows: width, bytes, ..whole.clone() };
            Linear { matrix: self.tensors.add_matrix(matrix), bias: None, bounds: None }
        }))
    }

    /// Stacks of which files have the transposes, `[experts, hidden, 2 * width]` and `[experts, width, hidden]`.
    fn transposed_stacks(
        &mut self,
        fused: &str,
        downs: &str,
        config: &ExpertsConfig,
    ) -> Result<[Linear; 3], ModelError> {
        let ExpertsConfig { count, width, alternating, .. } = *config;
        let hidden = self.config.hidden;
        let fused_stack = self.tensors.stack(fused, count, hidden, 2 * width)?;
        let fused_stack =
            fused_stack.ok_or_else(|| self.tensors.missing(fused, &[count, hidden, 2 * width]))?;
        let down_stack = self.tensors.stack(downs, count, width, hidden)?;
        let down_stack = down_stack.ok_or_else(|| self.tensors.missing(downs, &[count, width, hidden]))?;
        check_transposable(&fused_stack)?;
        check_transposable(&down_stack)?;
        let biases = self.fused_biases(fused, downs, config)?;
        let columns = |half: usize| if alternating { (half, 2) } else { (half * width, 1) };
        let mut transpose = |stack: &Matrix, (first, step): (usize, usize), outputs: usize| {
            let (inputs, columns) = (stack.rows, stack.cols);
            let element = stack.format.block_bytes();
            let shape = Transpose { parts: count, inputs, columns, element, first, step, outputs };
            let bytes = shape.of(&stack.bytes);
            self.tensors.add_matrix(Matrix { rows: outputs, cols: inputs, bytes, ..stack.clone() })
        };
        let matrices = [
            transpose(&fused_stack, columns(0), width),
            transpose(&fused_stack, columns(1), width),
            transpose(&down_stack, (0, 1), hidden),
        ];
        Ok([0, 1, 2].map(|index| Linear { matrix: matrices[index], bias: biases[index], bounds: None }))
    }

    /// Stacks in MXFP4 with scales in tensors of their own.
    fn mxfp4_stacks(
        &mut self,
        fused: &str,
        downs: &str,
        config: &ExpertsConfig,
    ) -> Result<[Linear; 3], ModelError> {
        let ExpertsConfig { count, width, alternating, .. } = *config;
        let hidden = self.config.hidden;
        if !hidden.is_multiple_of(32) || !width.is_multiple_of(32) {
            let problem = format!("experts of {width} x {hidden} elements are not whole blocks of MXFP4");
            return Err(ModelError::Config(problem));
        }
        let biases = self.fused_biases(fused, downs, config)?;
        let mut read = |name: &str, rows: usize, cols: usize| -> Result<[Bytes; 2], ModelError> {
            let blocks = self.tensors.raw(&format!("{name}_blocks"), &[count, rows, cols / 32, 16])?;
            Ok([blocks, self.tensors.raw(&format!("{name}_scales"), &[count, rows, cols / 32])?])
        };
        let fused_parts = read(fused, 2 * width, hidden)?;
        let down_parts = read(downs, hidden, width)?;
        let mut add = |name: &str,
                       [blocks, scales]: &[Bytes; 2],
                       file_rows,
                       cols: usize,
                       first,
                       step,
                       rows| {
            let split = SplitMxfp4 {
                blocks: blocks.clone(),
                scales: scales.clone(),
                file_rows,
                row_blocks: cols / 32,
                parts: count,
                first,
                step,
                rows,
            };
            let (name, format) = (name.to_owned(), WeightFormat::MXFP4);
            self.tensors.add_matrix(Matrix { name, format, parts: count, rows, cols, bytes: split.join() })
        };
        let (first, step) = if alternating { (1, 2) } else { (width, 1) };
        let matrices = [
            add(fused, &fused_parts, 2 * width, hidden, 0, step, width),
            add(fused, &fused_parts, 2 * width, hidden, first, step, width),
            add(downs, &down_parts, hidden, width, 0, 1, hidden),
        ];
        Ok([0, 1, 2].map(|index| Linear { matrix: matrices[index], bias: biases[index], bounds: None }))
    }

    /// Returns the biases of gates, ups and downs beside fused stacks, if there are any.
    fn fused_biases(
        &mut self,
        fused: &str,
        downs: &str,
        config: &ExpertsConfig,
    ) -> Result<[Option<VectorId>; 3], ModelError> {
        let ExpertsConfig { count, width, alternating, .. } = *config;
        let both = self.tensors.vectors(&format!("{fused}_bias"), count, 2 * width)?;
        let down = self.tensors.vectors(&format!("{downs}_bias"), count, self.config.hidden)?;
        let half = |both: &[f32], half: usize| -> Vec<f32> {
            let of_expert = |expert: &[f32]| -> Vec<f32> {
                match alternating {
                    true => expert.iter().skip(half).step_by(2).copied().collect(),
                    false => expert[half * width..(half + 1) * width].to_vec(),
                }
            };
            both.chunks_exact(2 * width).flat_map(of_expert).collect()
        };
        let halves = both.map(|both| [half(&both, 0), half(&both, 1)]);
        let mut add = |vector: Option<Vec<f32>>| vector.map(|vector| self.tensors.add_vector(vector));
        let (gate, up) = match halves {
            Some([gate, up]) => (add(Some(gate)), add(Some(up))),
            None => (None, None),
        };
        Ok([gate, up, add(down)])
    }
}
